"""Python in a process of its own, with a home and caches of its own."""

import json
import os
import pathlib
import site
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(script, arguments, home, **variables):
    """What `script` prints last, as JSON, with `home` for NineToothed's and Triton's files.

    :raises SystemExit: If it fails, with what it wrote.
    """

    environment = {
        **os.environ,
        # Packages may lie in the home that this process has.
        "PYTHONUSERBASE": site.getuserbase(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])]),
        "HOME": str(home),
        "TRITON_CACHE_DIR": str(pathlib.Path(home, "triton")),
        **variables,
    }
    finished = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )

    if finished.returncode:
        raise SystemExit(f"{script} failed:\n{finished.stdout}\n{finished.stderr}")

    return json.loads(finished.stdout.splitlines()[-1])

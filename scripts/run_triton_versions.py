"""Run the tests of launch plans with every supported version of Triton.

For each version an environment of its own is made that holds that Triton and takes everything else (PyTorch, NineToothed,
pytest, hypothesis) from the environment this runs in. Nothing here needs a GPU.

    python scripts/run_triton_versions.py [--versions 3.2.0 3.6.0] [--folder FOLDER] [--wheels FOLDER] [-- PYTEST_ARGUMENT...]

The last lines are the table of docs/launch_plans.md.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent

VERSIONS = ("3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")

TESTS = (
    "tests/test_call_key.py",
    "tests/test_launch_differential.py",
    "tests/test_launch_hazards.py",
    "tests/test_materializer.py",
    "tests/test_plan_cache.py",
    "tests/test_triton_abi.py",
    "tests/test_triton_runtime_auto_tuning.py",
)


def make_environment(folder, version, wheels):
    """The Python of an environment with this Triton; made if it is not there."""

    environment = folder / version
    python = environment / "bin" / "python"
    marker = environment / "ready"

    if marker.exists():
        return python

    venv.create(environment, with_pip=True, clear=True)
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    found = sorted(wheels.glob(f"triton-{version}-*.whl")) if wheels else []
    # Before 3.5 Triton needs `pkg_resources`-era setuptools at run time, which a new environment lacks.
    subprocess.run(
        [*command, *(found[:1] or [f"triton=={version}"]), "setuptools<80"], check=True
    )
    own = pathlib.Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # Behind the environment's own packages, so that its Triton is found first.
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    marker.touch()

    return python


def run(python, folder, version, arguments):
    """The numbers that pytest ends with."""

    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(folder / f"cache-{version}"),
        "TRITON_INTERPRET": "0",
    }
    found = subprocess.run(
        [python, "-c", "import triton; print(triton.__version__)"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    ).stdout.strip()

    if found != version:
        sys.exit(f"the environment for Triton {version} has Triton {found}")

    finished = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )

    if finished.returncode:
        print(finished.stdout[-20_000:], finished.stderr[-5_000:], flush=True)

    last = (finished.stdout.strip().splitlines() or [""])[-1]

    return {
        outcome: int(number)
        for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=ROOT / "build" / "triton_versions",
        help="where the environments are made and kept",
    )
    parser.add_argument(
        "--wheels",
        type=pathlib.Path,
        help="a folder with wheels of Triton; what is not there is downloaded",
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    lines = []
    has_failed = False

    for version in options.versions:
        python = make_environment(options.folder.resolve(), version, options.wheels)
        counts = run(python, options.folder.resolve(), version, options.pytest)
        failed = counts.get("failed", 0) + counts.get("error", 0)
        has_failed |= bool(failed) or not counts.get("passed")
        lines.append(
            f"| {version} | {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} |"
        )
        print(lines[-1], flush=True)

    print("| Triton | passed | failed | skipped |", "|---|---|---|---|", sep="\n")
    print(*lines, sep="\n")

    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

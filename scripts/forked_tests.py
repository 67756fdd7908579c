"""Runs of pytest in forks of a process that has imported what takes long, for `check_mutations.py`.

    python scripts/forked_tests.py

It reads requests from its standard input, a line of JSON each: a folder, arguments for
pytest, environment variables, and a file for what pytest prints. After each run it prints
its exit status, which is negative if a signal ended it.
"""

import importlib
import json
import os
import sys

# None of it is the product, which each fork imports anew, from the folder of its request.
_IMPORTED_ONCE = (
    "hypothesis",
    "ninetoothed",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "triton",
)


def main():
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)

    for line in sys.stdin:
        process = os.fork()

        if process == 0:
            _run(**json.loads(line))

        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(folder, arguments, environment, output):
    import pytest

    # What the tests start, and leave behind, is found by it.
    os.setsid()
    os.chdir(folder)
    os.environ |= environment
    sys.path[0] = folder
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = pytest.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()

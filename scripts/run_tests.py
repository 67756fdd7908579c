"""Run the whole test-suite: once as it is, once under Triton's interpreter.

Triton decides when it is imported whether it interprets kernels, so the tests in
`tests/interpreted/` need a process of their own. Arguments are handed on to both runs.

    python scripts/run_tests.py [PYTEST_ARGUMENT...]
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# pytest's exit status when a selection (`-k`, `-m`) leaves no test in one of the runs.
NO_TESTS_COLLECTED = 5


def main(arguments):
    runs = (("tests", "0"), ("tests/interpreted", "1"))
    statuses = []

    for folder, interpret in runs:
        print(f"== {folder} (TRITON_INTERPRET={interpret})", flush=True)
        statuses.append(
            subprocess.run(
                [sys.executable, "-m", "pytest", folder, *arguments],
                cwd=ROOT,
                env={**os.environ, "TRITON_INTERPRET": interpret},
            ).returncode
        )

    if all(status == NO_TESTS_COLLECTED for status in statuses):
        return NO_TESTS_COLLECTED

    # Not the greatest: of a run that a signal ended it is negative.
    return next(
        (status for status in statuses if status not in (0, NO_TESTS_COLLECTED)), 0
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The interpreter ends without a word, whatever is alive."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_interpreter_ends_without_a_warning(device):
    """No weak reference, lock or unloading of a kernel complains; in Python's development mode."""

    finished = subprocess.run(
        [
            sys.executable,
            *("-X", "dev", "-W", "error"),
            # What Triton and NineToothed use of Python's own is theirs.
            *("-W", "ignore::DeprecationWarning"),
            TESTS / "clean_exit.py",
            device,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path]),
            # Triton 3.9 warns where it is not said.
            "TRITON_DEFAULT_FP_FUSION": "1",
            "TRITON_INTERPRET": "0",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "ended\n"
    assert finished.stderr == ""

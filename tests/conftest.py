"""What every test module shares: which tests this process can run, and which it does.

Tests marked `slow` (tens of gigabytes, or minutes) run only where `-m` names the mark.
"""

import os
import pathlib

import hypothesis
import pytest
import torch

from ninetoothed_patches import host_driver

# pytest shows the values of a failed `assert` in test modules. In what they import, where told.
pytest.register_assert_rewrite(
    *(
        path.stem
        for path in pathlib.Path(__file__).parent.glob("*.py")
        if path.stem != "conftest" and not path.stem.startswith("test_")
    )
)

# The same examples on each run, and no failure because the machine is busy.
hypothesis.settings.register_profile(
    "same examples",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("same examples")

# Kernels are either interpreted or compiled in one process: `scripts/run_tests.py`
# runs this folder and `tests/interpreted/` one after the other.
if host_driver.interpreter_is_on():
    collect_ignore_glob = ["test_*.py"]
else:
    collect_ignore = ["interpreted"]


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        import tempfile

        import ninetoothed.generation

        # NineToothed writes its generated sources in place: of two processes that make
        # one kernel at once, one may import half a file. Each worker has a folder.
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        ninetoothed.generation.CACHE_DIR = pathlib.Path(folder.name)


def pytest_collection_modifyitems(config, items):
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if "slow" in item.keywords]
        items[:] = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=slow)

    if torch.cuda.is_available() and not host_driver.interpreter_is_on():
        return

    skip = pytest.mark.skip(reason="needs a GPU, and kernels that are compiled")

    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

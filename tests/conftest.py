"""What every test module shares: which tests this process can run."""

import pytest
import torch

from ninetoothed_patches import host_driver

# Kernels are either interpreted or compiled in one process: `scripts/run_tests.py`
# runs this folder and `tests/interpreted/` one after the other.
collect_ignore = [] if host_driver.interpreter_is_on() else ["interpreted"]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and not host_driver.interpreter_is_on():
        return

    skip = pytest.mark.skip(reason="needs a GPU, and kernels that are compiled")

    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

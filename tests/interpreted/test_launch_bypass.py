"""A kernel that was made under Triton's interpreter is never planned, and works."""

import pathlib
import sys

import torch

import ninetoothed_patches
from ninetoothed_patches import host_driver

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import launch_kernels  # noqa: E402


def test_interpreted_calls_go_the_ordinary_way():
    """LP35, LP55: right results, counted as "interpreter"; positional and keyword."""

    with host_driver.stand_in():
        handle = ninetoothed_patches.planned(launch_kernels.scale())

    x, o = torch.randn(9, 128), torch.empty(9, 128)

    for count in range(1, 4):
        o.zero_()
        handle(x, 0.5, o=o)
        assert torch.equal(o, x * 0.5)
        info = handle.cache_info()
        assert info.bypasses == {"interpreter": count}
        assert (info.hits, info.misses, info.plans) == (0, 0, 0)


def test_interpreted_handles_of_an_applied_patch_work_as_well():
    """LP35: with `apply()` too, tuned or not."""

    ninetoothed_patches.apply()

    try:
        with host_driver.stand_in():
            handle = launch_kernels.axpy()
    finally:
        ninetoothed_patches.revert()

    x, y, o = torch.randn(5, 128), torch.randn(5, 128), torch.empty(5, 128)
    handle(x, y, o, 2.0)
    assert torch.allclose(o, 2 * x + y)
    assert handle.cache_info().bypasses == {"interpreter": 1}

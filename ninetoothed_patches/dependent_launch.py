"""Where a kernel may be launched before the one in front of it has ended."""

import ctypes

import torch
from triton.backends.compiler import GPUTarget

from ninetoothed_patches import host_driver, triton_abi

# The first whose graphs have such launches, as 1000 * major + 10 * minor.
_FIRST_CUDA_VERSION = 12030


def is_known_on(device):
    """See `ninetoothed_patches.has_dependent_launch`."""

    if not isinstance(device, torch.device):
        raise TypeError(
            f"`device` must be a torch.device, but is a {type(device).__name__}."
        )

    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or host_driver.interpreter_is_on()
        or not _driver_knows_it()
    ):
        return False

    major, minor = torch.cuda.get_device_capability(device)

    return triton_abi.has_dependent_launch(GPUTarget("cuda", 10 * major + minor, 32))


def suits(compiled):
    """Whether a plan may launch this kernel early: it waits itself, and such launches are known on the GPU that it is for."""

    return (
        triton_abi.waits_for_previous_kernel(compiled)
        and triton_abi.has_dependent_launch(compiled.metadata.target)
        and _driver_knows_it()
    )


def _driver_knows_it():
    return driver_version() >= _FIRST_CUDA_VERSION


def driver_version():
    """The version of CUDA that the driver is for; 0 where there is no driver to ask."""

    version = ctypes.c_int()

    try:
        # As it is loaded by whoever uses CUDA on Linux. PyTorch has no function for this.
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0

    driver.cuDriverGetVersion(ctypes.byref(version))

    return version.value

"""Where an operator runs: on which device, as a kernel or as its definition."""

import functools
import math

import torch


def runs_kernel(tensor):
    """Whether operators run their NineToothed kernel on `tensor`'s device.

    A CPU tensor does so under Triton's interpreter only (`TRITON_INTERPRET=1`), and is
    computed by the definition in `ntops_ext.reference` otherwise.
    """

    if tensor.device.type != "cpu":
        return True

    from ninetoothed_patches import host_driver

    return host_driver.interpreter_is_on()


@functools.cache
def shared_memory(device):
    """How many bytes of shared memory a program may use on `device`; of a CPU infinitely many."""

    if device.type == "cpu":
        return math.inf

    properties = torch.get_device_module(device).get_device_properties(device)

    # ROCm has no more than the latter.
    return getattr(
        properties,
        "shared_memory_per_block_optin",
        properties.shared_memory_per_block,
    )


def launch(handle, device, *args):
    """Call a handle on `device`, whichever device is current.

    Triton launches on the current device, not on that of the tensors it is given.

    :raises OSError: If Triton has to compile and cannot use its cache.
    """

    try:
        _launch(handle, device, *args)
    except OSError as error:
        from ninetoothed_patches import source_files

        raise source_files.name_triton_cache(error) from error.__cause__


def _launch(handle, device, *args):
    if device.type == "cpu":
        handle(*args)

        return

    module = torch.get_device_module(device)

    if module.current_device() == device.index:
        handle(*args)

        return

    with module.device(device):
        handle(*args)

"""A runtime patch for NineToothed 0.26: kernels that are cheap to call, and kernels without a GPU.

`apply()` gives every kernel that NineToothed makes from then on launch plans (docs/launch_plans.md); `planned()` gives them
to one kernel and patches nothing. Importing this package imports neither NineToothed nor Triton.
"""

import os
import sys

from ninetoothed_patches import counters
from ninetoothed_patches.errors import SourceFolderError, UnsupportedVersionError

__all__ = [
    "SourceFolderError",
    "UnsupportedVersionError",
    "apply",
    "cache_info",
    "clear_plans",
    "has_dependent_launch",
    "is_applied",
    "make",
    "planned",
    "repeater",
    "revert",
]

DEFAULT_MAX_PLANS = 1024

# What `apply()` was given, until `revert()`.
_max_plans = None


def apply(*, max_plans=None):
    """Give every kernel that NineToothed makes from now on launch plans. Applying twice is applying once.

    Kernels made before stay as they are: they work, the ordinary way. Kernels made from now on execute the source that
    was generated for them, never a file of NineToothed's folder that another process may have half written.

    :param max_plans: How many plans a handle made from now on may hold; the least recently used goes first. By default
        what `apply()` was given before, or else the environment variable `NINETOOTHED_PATCHES_MAX_PLANS`, or else 1024.
    :return: Whether the patch is applied now: False if the environment says `NINETOOTHED_PATCHES=0`.
    :raises ValueError: If `max_plans`, or the variable in its place, is not a positive integer.
    :raises UnsupportedVersionError: If this NineToothed or this Triton is not known. Nothing is changed then.
    :raises SourceFolderError: If NineToothed cannot make its folder `~/.ninetoothed`.
    """

    global _max_plans

    _bound(max_plans)

    if _is_switched_off():
        return False

    materializer = _import_materializer()
    materializer.install(lambda: _bound(_max_plans))

    if max_plans is not None:
        _max_plans = max_plans

    return True


def revert():
    """Undo `apply()`, to the last attribute. Kernels made in between keep their plans, and go on working."""

    global _max_plans

    materializer = sys.modules.get(f"{__name__}.materializer")
    _max_plans = None

    if materializer is not None:
        materializer.uninstall()


def is_applied():
    """Whether kernels made now get launch plans."""

    materializer = sys.modules.get(f"{__name__}.materializer")

    return materializer is not None and materializer.is_installed()


def make(arrangement, application, tensors, *, max_plans=None, **options):
    """`ninetoothed.make`, with launch plans and of a checked source, as after `apply()`. Nothing is patched.

    :param max_plans: How many plans the handle may hold. By default the environment variable
        `NINETOOTHED_PATCHES_MAX_PLANS`, or else 1024, whatever `apply()` was given.
    :param options: The other arguments of `ninetoothed.make`.
    :return: What `ninetoothed.make` returns; exactly that, if the environment says `NINETOOTHED_PATCHES=0`.
    :raises ValueError: If `max_plans`, or the variable in its place, is not a positive integer.
    :raises UnsupportedVersionError: If this NineToothed or this Triton is not known.
    :raises SourceFolderError: If the source cannot be kept in NineToothed's folder.
    """

    bound = _bound(max_plans)

    if _is_switched_off():
        import ninetoothed

        return ninetoothed.make(arrangement, application, tensors, **options)

    materializer = _import_materializer()

    return materializer.make(arrangement, application, tensors, options, bound)


def planned(handle, *, max_plans=None):
    """A handle with launch plans, made from one that `ninetoothed.make` returned. Nothing is patched.

    The result is called exactly as `handle`, which stays as it is.

    :param max_plans: As for `make()`.
    :return: The new handle; `handle` itself if it has plans already, or if the environment says `NINETOOTHED_PATCHES=0`.
    :raises TypeError: If `handle` is no such handle.
    :raises ValueError: If `max_plans`, or the variable in its place, is not a positive integer.
    :raises UnsupportedVersionError: If this NineToothed or this Triton is not known.
    """

    bound = _bound(max_plans)

    if _is_switched_off():
        return handle

    materializer = _import_materializer()

    return materializer.plan(handle, bound)


def repeater(handle, *arguments):
    """A function that launches what `handle(*arguments)` launches, with other addresses.

    For callers that know themselves that a call is like an earlier one: they save reading it again. The function takes
    the address of each tensor of `arguments`, in their order, as an integer. It returns True if it has launched, on the
    current stream, and False if nothing was launched because the plan of that call does not hold: it was dropped, the
    alignment of an address differs, another device is current, a launch hook is installed, or the state of Triton or of
    the auto-tuner has changed. Then call the handle. The function holds no tensor.

    That the tensors behind the addresses have the shapes, strides, dtypes and device of `arguments`, and that the scalars
    are the same, is for the caller to see to: nothing checks it.

    :param handle: A handle with plans; for one without there is no such function.
    :param arguments: A call's arguments, by position.
    :return: The function, or None if there is no plan for such a call yet, or can be none: after the call has been made
        there may be one. There is none where more than type and alignment of a tensor decide which kernel is launched:
        for AMD, the size of its storage.
    :raises TypeError: If `handle` is nothing that `ninetoothed.make` returned, with or without plans.
    """

    if hasattr(handle, "repeater"):
        return handle.repeater(*arguments)

    if not hasattr(handle, "_launch"):
        raise TypeError(
            f"`handle` must be what `ninetoothed.make` returned, but is of type {type(handle).__qualname__}."
        )

    return None


def has_dependent_launch(device):
    """Whether a plan may start its kernel on `device` before the kernel in front of it on the stream has ended.

    It does where the kernel itself waits for that one (docs/launch_plans.md). That takes an NVIDIA GPU of compute
    capability 9.0 (Hopper), a driver for CUDA 12.3 or newer (before, no graph has such a launch), Triton 3.5 or newer,
    and that kernels are compiled, not interpreted.

    :param device: A `torch.device`.
    :raises TypeError: If it is none.
    """

    from ninetoothed_patches import dependent_launch

    return dependent_launch.is_known_on(device)


def cache_info():
    """What became of all calls of handles with plans that are alive: a `counters.CacheInfo`.

    `hits`, `misses`, `evictions` and `plans` are numbers, `bypasses` maps a reason to a number, and `handles` has the same
    for each handle, by its kernel's name and a number. `bound` is that of handles that `apply()` gives plans to.

    :raises ValueError: If there is no such bound, because the environment variable `NINETOOTHED_PATCHES_MAX_PLANS` is not a
        positive integer.
    """

    plan_cache = sys.modules.get(f"{__name__}.plan_cache")

    return counters.total(
        {} if plan_cache is None else plan_cache.infos(), _bound(_max_plans)
    )


def clear_plans():
    """Drop all plans of all handles: for whoever changes what plans cannot see (docs/launch_plans.md lists it)."""

    plan_cache = sys.modules.get(f"{__name__}.plan_cache")

    if plan_cache is not None:
        for cache in plan_cache.caches():
            cache.clear()


def _import_materializer():
    from ninetoothed_patches import source_files

    source_files.import_ninetoothed()

    from ninetoothed_patches import materializer

    return materializer


def _is_switched_off():
    return os.environ.get("NINETOOTHED_PATCHES") == "0"


def _bound(max_plans):
    source = "`max_plans`"

    if max_plans is None:
        source = "the environment variable NINETOOTHED_PATCHES_MAX_PLANS"
        text = os.environ.get("NINETOOTHED_PATCHES_MAX_PLANS", str(DEFAULT_MAX_PLANS))
        max_plans = int(text) if text.isdecimal() else text

    if type(max_plans) is not int or max_plans < 1:
        raise ValueError(f"{source} is {max_plans!r}; it must be a positive integer.")

    return max_plans

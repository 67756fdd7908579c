"""Kernels made once and kept: a kernel's premake and choices in, its handle out."""

import functools

# More than the widths, layouts and modes of any one program; a program that sweeps
# more of them makes the oldest ones anew.
MAX_HANDLES = 1024


def make_handle(premake, *, num_warps, num_stages=1, **keywords):
    """The handle of `premake(**keywords)` with this configuration, with launch plans.

    :param premake: A function of `ntops_ext.kernels` that returns an arrangement, an
        application and tensors.
    :param num_warps: The number of warps of a program.
    :param num_stages: The number of pipeline stages of its loops.
    :param keywords: What `premake` takes; every value must be hashable.
    :raises RuntimeError: If NineToothed cannot keep its generated sources.
    """

    from ninetoothed_patches import host_driver

    # `ninetoothed.make` writes the arrangement into the application's annotations, so two
    # threads that make kernels from one application would mix theirs. `stand_in` lets one
    # thread in; with a lock of our own around it, a thread that is in already, and makes
    # a kernel there, would take the two in the other order.
    with host_driver.stand_in():
        return _make(premake, num_warps, num_stages, tuple(keywords.items()))


@functools.lru_cache(MAX_HANDLES)
def _make(premake, num_warps, num_stages, keywords):
    import ninetoothed_patches

    return ninetoothed_patches.make(
        *premake(**dict(keywords)), num_warps=num_warps, num_stages=num_stages
    )


def import_kernels():
    """`ntops_ext.kernels`, imported when the first kernel is needed.

    NineToothed keeps its generated sources in `~/.ninetoothed` and makes that folder
    when it is imported.

    :raises RuntimeError: If it cannot make it.
    """

    from ninetoothed_patches import source_files

    source_files.import_ninetoothed()

    import ntops_ext.kernels

    return ntops_ext.kernels

"""How applications are specialised, and how they begin.

Where a GPU has programmatic dependent launch, the programs of a kernel may be launched before
the kernel in front of it has ended. Then it is theirs to wait for it, before they read or write
anything. `ninetoothed_patches` launches a kernel that does so early (docs/launch_plans.md).
"""

import types

import ninetoothed.language as ntl


def specialize(function, **names):
    # NineToothed inlines the functions that an application calls by looking their names up
    # in its globals. The copy is also what keeps two kernels of one application apart:
    # `ninetoothed.make` writes the arrangement into the application's annotations.
    return types.FunctionType(function.__code__, {**function.__globals__, **names})


def _begin_at_once():
    pass


def _begin_after_previous_kernel():
    ntl.extra.cuda.gdc_wait()


# The first statement of every application; `specialize` puts what `beginning` returns in its place.
begin = _begin_at_once


def beginning(waits):
    """The first statement of programs that wait for the kernel in front of theirs, or that do not."""

    return _begin_after_previous_kernel if waits else _begin_at_once

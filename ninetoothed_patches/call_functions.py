"""What a handle's calls run, as source text written out for its parameters.

A loop over parameters and a function for each thing that is looked at would cost more than all that they read.
"""

import dataclasses
from collections.abc import Callable

import torch

from ninetoothed_patches import triton_abi
from ninetoothed_patches.call_key import (
    any_is_nested,
    bits,
    compile_function,
    scalar_fits,
)

# In a key's place: this call gets none.
_NEW = object()

# Every name but those of the parameters starts with two underscores: a tensor may be called `key` or `type`.
_ENTRY = """\
def {name}(__handle, {parameters}, *__surplus):
    if __surplus or __is_dynamo_compiling():
        return __ordinary({parameters}, *__surplus)

    try:
        {read_addresses}
        __alignments = {alignments}

        for __plan in () if {any_is_nested} else __cache.last.successors:
            if (
                __plan.fits({tensors})
                and __plan.is_kept
                and __plan.driver is {driver}
                and __plan.current_device() == __plan.device
                and __plan.alignments == __alignments
                {scalars_fit}
                and __plan.state == {state}
                and __plan.store is {stores}[__plan.device]
                {tuner_fits}
                and not ({watchers})
            ):
                break
        else:
            __plan = None
            __outline = {outline}
            __key = __NEW if __cache.unused > {max_unused} and __hash(__outline) not in __cache.seen else {key}
    except __Exception:
        # Whatever it is, the ordinary call meets it again and says so.
        __plan = __key = None

    if __plan is None:
        if __key is None:
            return __cache.unreadable(({parameters},))

        if __key is __NEW:
            return __cache.new(__outline, ({parameters},))

        return __cache.call(__key, ({parameters},), ({addresses},))

    __cache.last = __plan
    __plan.stamp = __next(__clock)
    __plan.launch(__plan.current_stream(__plan.device), {addresses})
"""

# What is looked at where no successor fits: in one function, for a call costs as much as what it would read.
_LOOK = """\
def is_watched():
    try:
        return bool({watchers})
    except AttributeError:
        # Not the chain of hooks that belongs there.
        return True


def look():
    driver = {driver} or __active_driver()
    device = driver.get_current_device()

    return driver, device, {state}, {stores}[device], is_watched()
"""

_READ = """\
def read({parameters}):
    {read_addresses}
    __alignments = {alignments}
    __outline = {outline}

    return {key}, ({addresses},)
"""

_REPEATER = """\
def make(__plan, __driver, __device, __state, __store):
    __launch = __plan.launch
    __alignments = __plan.alignments
    __current_device, __current_stream = __plan.current_device, __plan.current_stream

    def {name}({addresses}):
        try:
            __is_valid = (
                __plan.is_kept
                and {driver} is __driver
                and __current_device() == __device
                and ({alignments}) == __alignments
                and {state} == __state
                and {stores}[__device] is __store
                {tuner_fits}
                and not ({watchers})
            )
        except __Exception:
            # Whatever it is, the whole call meets it again and says so.
            return False

        if not __is_valid:
            return False

        __plan.stamp = __next(__clock)
        __launch(__current_stream(__device), {addresses})

        return True

    return {name}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFunctions:
    """The functions of one handle.

    :param entry: Its `__call__`: launches by a successor of the last plan, or hands the call to the `PlanCache`.
    :param is_watched: Whether anything wants to see launches now.
    :param look: What else than the arguments decides on a plan now: driver, device, Triton's state, where Triton keeps
        that device's kernels, and `is_watched()`.
    :param read: A call's key and addresses.
    :param make_repeater: See `ninetoothed_patches.repeater`.
    """

    entry: Callable
    is_watched: Callable
    look: Callable
    read: Callable
    make_repeater: Callable


def call_functions(cache, *, name, reader, kernel, tuner, clock, ordinary, max_unused):
    """The functions of the handle whose plans are in `cache`.

    :param name: The launch function's.
    :param reader: A `CallReader` for its parameters.
    :param kernel: The handle's JITFunction.
    :param tuner: The auto-tuner around it, or None.
    :param clock: Counts and stamps launches by a plan.
    :param ordinary: What is called while Dynamo traces, and with too many arguments.
    :param max_unused: A call has to come twice before it gets a plan where more than this many are unused.
    """

    expressions = triton_abi.expressions()
    names = {
        **expressions.names,
        "__jit": kernel,
        "__cache": cache,
        "__clock": clock,
        "__tuner": tuner,
        "__ordinary": ordinary,
        "__active_driver": triton_abi.active_driver,
        "__is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "__bits": bits,
        "__int": int,
        "__hash": hash,
        "__type": type,
        "__next": next,
        "__NEW": _NEW,
        "__len": len,
        "__Exception": Exception,
    }
    texts = {
        "name": name,
        "parameters": ", ".join(reader.parameters),
        "tensors": ", ".join(reader.tensors),
        "any_is_nested": any_is_nested(reader.tensors),
        "read_addresses": "; ".join(map(" = ".join, reader.addresses)),
        "addresses": ", ".join(address for address, _ in reader.addresses),
        "alignments": reader.alignments,
        "outline": reader.outline,
        "key": f"({reader.kinds}, {reader.layout})",
        "driver": expressions.driver,
        "state": expressions.state,
        "stores": expressions.stores,
        "watchers": expressions.watchers,
        "tuner_fits": "and __len(__tuner.cache) == __cache.tuned" if tuner else "",
        "scalars_fit": "\n                ".join(
            f"and {scalar_fits(scalar, f'__plan.scalars[{position}]')}"
            for position, scalar in enumerate(reader.scalars)
        ),
        "max_unused": max_unused,
    }

    def compiled(template, defined):
        return compile_function(template.format(**texts), defined, names)

    return CallFunctions(
        entry=compiled(_ENTRY, name),
        is_watched=compiled(_LOOK, "is_watched"),
        look=compiled(_LOOK, "look"),
        read=compiled(_READ, "read"),
        make_repeater=compiled(_REPEATER, "make"),
    )

"""NineToothed on a machine without a GPU.

NineToothed asks Triton's driver for two properties of the device whenever it makes a kernel, and raises where
there is no driver. `stand_in()` answers that question on such a machine, so that kernels can be made there: to run
on CPU tensors under Triton's interpreter (`TRITON_INTERPRET=1`), or to be compiled by `compile_call()` for a named
target and read. A real driver, or one that somebody else has set, is never replaced.
"""

import contextlib
import os
import threading
import types

import triton
from triton.backends.compiler import GPUTarget

from ninetoothed_patches import source_files, triton_abi
from ninetoothed_patches.locks import ProcessLock

_SWITCH = ProcessLock()

_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1

_INT64_MAX = 2**63 - 1

# Triton tells the compiler whether an integer is divisible by this, and nothing finer.
_DIVISIBILITY = 16


def interpreter_is_on():
    """Whether Triton runs kernels in its interpreter, on CPU tensors, in this process."""

    knobs = getattr(triton, "knobs", None)

    if knobs is not None:
        return bool(knobs.runtime.interpret)

    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def driver_is_present():
    """Whether Triton has a driver to ask: a GPU's, or one that was set by hand."""

    config = triton.runtime.driver

    # A driver set by hand: `_active` from Triton 3.5 on, before that an `active` that is not the default.
    if getattr(config, "_active", None) is not None:
        return True

    if not hasattr(config, "_active") and config.active is not config.default:
        return True

    return any(
        backend.driver.is_active() for backend in triton.backends.backends.values()
    )


class _StandInUtils:
    @staticmethod
    def get_device_properties(device):
        # The limits of an NVIDIA H100 or H200. NineToothed derives its default `num_stages` and its largest
        # auto-tuned tile from them; no kernel of this project leaves either to that default.
        return {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
        }


class _StandInDriver:
    """Answers what NineToothed asks while it makes a kernel. It can launch nothing."""

    utils = _StandInUtils()

    def __init__(self):
        # In which it stands in.
        self.thread = threading.current_thread()

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return _TARGETS["sm_90"]

    def get_benchmarker(self):
        # Up to 3.3 Triton asks for it where a tuned kernel is made. It measures with the driver that is there by then.
        return lambda *args, **kwargs: triton.runtime.driver.active.get_benchmarker()(
            *args, **kwargs
        )


@contextlib.contextmanager
def stand_in():
    """For the block's duration, let NineToothed make kernels on a machine where Triton has no driver.

    Where there is a driver, nothing is changed. One thread at a time is within such a block.
    """

    with _SWITCH.held():
        if driver_is_present():
            yield

            return

        triton.runtime.driver.set_active(_StandInDriver())

        try:
            yield
        finally:
            _withdraw()


def _withdraw():
    config = triton.runtime.driver

    # `reset_active()` would ask for the default driver, which does not exist here.
    if hasattr(config, "_active"):
        config._active = None
    else:
        config.active = config.default


def _withdraw_in_child():
    """The thread within `stand_in()` is in the child only if it is the one that forked."""

    config = triton.runtime.driver
    active = getattr(config, "_active", None) or vars(config).get("active")

    if (
        isinstance(active, _StandInDriver)
        and active.thread is not threading.current_thread()
    ):
        _withdraw()


os.register_at_fork(after_in_child=_withdraw_in_child)


class _Capture:
    """Stands where a generated launch function expects its kernel, and keeps what it is called with."""

    def __getitem__(self, grid):
        self.grid = grid

        return self

    def __call__(self, *args, **options):
        self.args = args
        self.options = options


def compile_call(handle, *args, target, **kwargs):
    """Compile, without a GPU and without launching, the binary that `handle(*args, **kwargs)` would launch.

    :param handle: What `ninetoothed.make` returned, with a fixed configuration (not auto-tuned).
    :param args: The arguments of the call. Tensors may lie anywhere, the CPU included: only their layout, dtype
        and the alignment of their addresses count, and on an AMD GPU whether their storages are below 2 GiB.
    :param target: `"sm_80"`, `"sm_90"`, `"sm_100"`, `"gfx942"`, or a `GPUTarget`.
    :return: Triton's compiled kernel. `.asm["ptx"]` (`.asm["amdgcn"]`) is the assembly, `.metadata` the resources.
    :raises ValueError: If the target's name is not known.
    :raises OSError: If Triton cannot use its cache.
    :raises TypeError: If `handle` is something else, is auto-tuned, or was made while the interpreter was on; if an argument
        is of a type that no kernel takes; or if `target` is of another type.
    """

    if isinstance(target, str):
        if target not in _TARGETS:
            raise ValueError(
                f"`target` is {target!r}; known are {', '.join(map(repr, _TARGETS))}, or a `GPUTarget`."
            )

        target = _TARGETS[target]

    if not isinstance(target, GPUTarget):
        raise TypeError(
            f"`target` must be a name or a `GPUTarget`, but is a {type(target).__name__}."
        )

    if not hasattr(handle, "_kernel"):
        raise TypeError(
            f"`handle` must be what `ninetoothed.make` returned, but is a {type(handle).__name__}."
        )

    if not isinstance(handle._kernel, triton.runtime.JITFunction):
        raise TypeError(
            "`handle` was made while Triton's interpreter was on: nothing can be compiled from it."
        )

    capture = _Capture()
    launch = handle._launch
    kernel_name = handle._kernel.__name__

    if f"{kernel_name}_with_auto_tuning" in launch.__globals__:
        raise TypeError(
            f"`handle` ({kernel_name}) is auto-tuned: which binary a call launches is not known offline."
        )

    types.FunctionType(launch.__code__, {**launch.__globals__, kernel_name: capture})(
        *args, **kwargs
    )

    try:
        return triton.compile(
            _source(handle._kernel, capture.args, triton_abi.tensor_attributes(target)),
            target=target,
            # Outside its debug mode Triton makes checks of integers for overflow, and then drops them. Without them
            # the binary is the same, and is compiled sooner.
            options={**capture.options, "sanitize_overflow": False},
        )
    except OSError as error:
        raise source_files.name_triton_cache(error) from error.__cause__


def _source(kernel, args, tensor_attributes):
    """The kernel, specialised as Triton's JIT specialises it for these arguments."""

    signature, constants, attributes = {}, {}, {}

    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1)
        ):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value

            continue

        if hasattr(value, "data_ptr"):
            dtype = str(value.dtype).split(".")[-1]
            signature[parameter.name] = (
                f"*{triton.runtime.jit.type_canonicalisation_dict[dtype]}"
            )
            attributes[(index,)] = tensor_attributes(value)

            continue

        signature[parameter.name], is_divisible = _specialize(parameter.name, value)

        if is_divisible:
            attributes[(index,)] = [["tt.divisibility", _DIVISIBILITY]]

    return triton.compiler.ASTSource(kernel, signature, constants, attributes)


def _specialize(name, value):
    if isinstance(value, bool):
        return "u1", False

    if isinstance(value, int):
        if _INT32_MIN <= value <= _INT32_MAX:
            return "i32", value % _DIVISIBILITY == 0

        return ("i64" if value <= _INT64_MAX else "u64"), value % _DIVISIBILITY == 0

    if isinstance(value, float):
        return "fp32", False

    raise TypeError(
        f"`{name}` is a {type(value).__name__}: Triton cannot specialise on it."
    )

"""A driver of Triton that records launches instead of making them, on a machine without a GPU.

Everything above the C function is real: NineToothed, Triton's JIT, binder, compiler, auto-tuner, and Triton's own launcher
object for NVIDIA, with its C function replaced by one that notes what it is given.
"""

import collections
import contextlib
import dataclasses
import os
import threading
import types
import zlib

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel

SM_80 = GPUTarget("cuda", 80, 32)
SM_90 = GPUTarget("cuda", 90, 32)
GFX942 = GPUTarget("hip", "gfx942", 64)


@dataclasses.dataclass(frozen=True)
class Record:
    """One launch, as the C function would see it: tensors are their addresses, nothing watches.

    :param grid: Three integers.
    :param stream: An integer.
    :param function: An integer that stands for the binary: the same binary, the same integer.
    :param rest: Everything else in order: packed metadata, scratch, kernel arguments (types kept: True is not 1).
    """

    grid: tuple
    stream: int
    function: int
    rest: tuple

    @property
    def values(self):
        return tuple(value for _, value in self.rest)


class PlainLauncher:
    """A launcher that is not one of Triton's: it can only be called."""

    def __init__(self, record):
        self._record = record

    def __call__(self, *args):
        self._record(*args)


@dataclasses.dataclass(frozen=True)
class RecordedModule:
    """A binary that was loaded."""

    driver: object
    function: int


def _unload_where_it_was_loaded(kernel):
    """A compiled kernel may outlive the driver that loaded it: then Triton would ask another one to unload it."""

    module = getattr(kernel, "module", None)

    if isinstance(module, RecordedModule):
        module.driver.utils.unload_module(module)
    else:
        _ORIGINAL_DEL(kernel)


_ORIGINAL_DEL = getattr(CompiledKernel, "__del__", None)

if _ORIGINAL_DEL is not None:
    CompiledKernel.__del__ = _unload_where_it_was_loaded


class RecordingDriver:
    """The driver. `records` has all launches so far, `clear()` forgets them.

    :param target: What the machine pretends to be.
    :param plain_launcher: Launch through an object that Triton does not know, instead of Triton's own launcher.
    :param devices: The number of multiprocessors of each device.
    :param load: Called whenever a binary is loaded.
    """

    def __init__(
        self, target=SM_90, *, plain_launcher=False, devices=(132,), load=None
    ):
        self.records = []
        self.devices = devices
        self.stream = 7
        # The current device is a thread's own, as CUDA's is.
        self._thread = threading.local()
        self._target = target
        self._load = load
        self.unloaded = []
        # How many threads any kernel may have.
        self.max_threads = 1024
        # Raised instead of benchmarking or launching, if it is set.
        self.benchmark_error = None
        self.launch_error = None
        # Called before each launch, if it is set.
        self.on_launch = None
        self.utils = types.SimpleNamespace(
            get_device_properties=self._get_device_properties,
            load_binary=self._load_binary,
            unload_module=lambda module: self.unloaded.append(module.function),
            launch=self._record,
            build_signature_metadata=tuple,
        )

        if plain_launcher or target.backend != "cuda":
            self.launcher_cls = lambda source, metadata: PlainLauncher(self._record)
        else:
            self.launcher_cls = nvidia.CudaLauncher

    def clear(self):
        self.records.clear()

    def take(self):
        """The records so far, which are forgotten."""

        records, self.records[:] = list(self.records), []

        return records

    @property
    def device(self):
        return getattr(self._thread, "device", 0)

    @device.setter
    def device(self, device):
        self._thread.device = device

    def get_current_device(self):
        return self.device

    def set_current_device(self, device):
        self.device = device

    def get_current_stream(self, device):
        return self.stream + 100 * device

    def get_current_target(self):
        return self._target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        return self._benchmark

    def _benchmark(self, launch, quantiles):
        if self.benchmark_error is not None:
            raise self.benchmark_error

        launch()

        # Some order among the candidates that is the same for the same binaries, and does not favour the first.
        time = zlib.crc32(str(self.records[-1].function).encode()) % 1000

        return [float(time)] * 3

    def _get_device_properties(self, device):
        return {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": self.devices[device],
            "warpSize": 32,
        }

    def _load_binary(self, name, kernel, shared, device):
        if self._load is not None:
            self._load()

        function = zlib.crc32(kernel + name.encode() + bytes([device]))
        # Module, function, registers, spills, and from 3.4 on the most threads.
        loaded = (RecordedModule(self, function), function, 32, 0, self.max_threads)

        return loaded if _loads_five() else loaded[:4]

    def _record(self, *args):
        if self.launch_error is not None:
            raise self.launch_error

        if self.on_launch is not None:
            self.on_launch()

        *args, last = args
        flat = [*args, *(last if isinstance(last, tuple) else (last,))]
        first = 1 if self._target.backend == "hip" and not _is_plain(flat) else 0
        grid = tuple(flat[first : first + 3])
        stream, function, *rest = flat[first + 3 :]
        metadata = next((value for value in rest if hasattr(value, "get")), None)

        for hook in rest:
            # The C function calls the first before the launch and the second after it.
            if callable(hook) and not isinstance(hook, type):
                hook(metadata)

        self.records.append(
            Record(grid, stream, function, tuple(map(_seen_by_kernel, rest)))
        )


def _is_plain(flat):
    return type(flat[0]) is int


def _seen_by_kernel(value):
    if isinstance(value, torch.Tensor):
        return int, value.data_ptr()

    if value is None or callable(value) or hasattr(value, "get"):
        return type(None), None

    if isinstance(value, float):
        # As text: -0.0 is not 0.0, and NaN is NaN.
        return type(value), value.hex()

    if isinstance(value, list):
        return list, len(value)

    return type(value), value


def _loads_five():
    return "n_max_threads" in CompiledKernel._init_handles.__code__.co_names


class _KernelArgument(collections.namedtuple("KernelArgument", "nested_tuple type")):
    """What 3.7 and later describe an argument with; only its presence counts here."""


@contextlib.contextmanager
def recording(*args, **kwargs):
    """A recording driver, active for the block's duration."""

    driver = RecordingDriver(*args, **kwargs)

    with active(driver):
        yield driver


@contextlib.contextmanager
def active(driver):
    """Make `driver` Triton's active one for the block's duration."""

    config = triton.runtime.driver
    name = "_active" if hasattr(config, "_active") else "active"
    before = getattr(config, name)
    stand_ins = {
        "compile_module_from_src": lambda *args, **kwargs: types.SimpleNamespace(
            launch=lambda *given: triton.runtime.driver.active._record(*given)
        ),
        "library_dirs": lambda: [],
        "PyKernelArg": _KernelArgument,
    }
    originals = {
        stand_in: getattr(nvidia, stand_in)
        for stand_in in stand_ins
        if hasattr(nvidia, stand_in)
    }

    for stand_in in originals:
        setattr(nvidia, stand_in, stand_ins[stand_in])

    # A binary with line numbers names its source file, and two processes that share Triton's cache may have their own.
    line_info = os.environ.get("TRITON_DISABLE_LINE_INFO")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    config.set_active(driver)

    try:
        yield driver
    finally:
        setattr(config, name, before)

        if line_info is None:
            del os.environ["TRITON_DISABLE_LINE_INFO"]
        else:
            os.environ["TRITON_DISABLE_LINE_INFO"] = line_info

        for stand_in, original in originals.items():
            setattr(nvidia, stand_in, original)

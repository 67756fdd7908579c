"""The only file that knows which version of Triton is running.

Triton's launch path moved between 3.2 and 3.9: where kernels are stored, what is read on each call, how a launch is
watched, which arguments the launcher is given. Everything here is chosen once, by looking at what is there rather
than at a version number; the version is checked as well, because a feature that looks the same in a version nobody
has tried may not be the same. docs/results/README.md has the versions that were tried.
"""

import copy
import dataclasses
import functools
import inspect
import os
import re

import torch
import triton
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.runtime import driver as driver_config
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ninetoothed_patches.call_key import ALIGNMENT

OLDEST, NEWEST = (3, 2), (3, 9)

SUPPORTED = "3.2 to 3.9"


def version_is_supported(version):
    """Whether `version` is a Triton whose launch path is known. A local or post release is the release it is made of."""

    match = re.match(r"(\d+)\.(\d+)\.", version)

    return bool(match) and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expressions:
    """Source text for what is looked at on every call, put straight into each handle's entry.

    A function call costs about 0.1 us, as much as all that one of these reads. `__jit` is the handle's JITFunction.

    :param driver: The active driver; None before it is first asked for.
    :param watchers: True if anything wants to see launches: then they go the ordinary way.
    :param state: A tuple of all else that Triton reads on each call and that decides which kernel it launches; the
        first is the kernel's hash.
    :param stores: The mapping of a device to the kernels compiled for it.
    :param names: What the expressions refer to, except `__jit`.
    """

    driver: str
    watchers: str
    state: str
    stores: str
    names: dict


@functools.cache
def expressions():
    """The expressions for the running Triton."""

    names = {"__driver_config": driver_config, "__CompiledKernel": CompiledKernel}
    knobs = getattr(triton, "knobs", None)
    watchers = ["__jit.pre_run_hooks"]
    state = ["__jit.hash"]

    if _mentions(JITFunction.run, "debug"):
        state.append("__jit.debug")

    if knobs is None:
        names["__environ"] = os.environ
        state.append('__environ.get("TRITON_DEBUG", "0") == "1"')
        watchers += [f"__CompiledKernel.{hook}" for hook in _LAUNCH_HOOKS]
    else:
        names |= {"__runtime": knobs.runtime, "__compilation": knobs.compilation}
        state.append("__runtime.debug")
        # From 3.5 on a hook is a chain that is always there; a launch is watched if the chain has links.
        suffix = ".calls" if hasattr(knobs, "HookChain") else ""
        watchers += [f"__runtime.{hook}{suffix}" for hook in _LAUNCH_HOOKS]

        for knob in ("instrumentation_mode", "fpsan_homomorphic_casts"):
            if _mentions(JITFunction.run, knob):
                state.append(f"__compilation.{knob}")

        if _mentions(JITFunction.run, "add_stages_inspection_hook"):
            watchers.append("__runtime.add_stages_inspection_hook")

    return Expressions(
        # `DriverConfig.active` became a property in 3.5; the attribute behind it costs a third.
        driver="__driver_config._active"
        if isinstance(vars(type(driver_config)).get("active"), property)
        else "__driver_config.active",
        watchers=" or ".join(watchers),
        state=f"({', '.join(state)},)",
        stores=f"__jit.{_store_attribute()}",
        names=names,
    )


_LAUNCH_HOOKS = ("launch_enter_hook", "launch_exit_hook")


def _mentions(function, name):
    return name in function.__code__.co_names


def _store_attribute():
    return next(
        (
            name
            for name in ("device_caches", "cache")
            if _mentions(JITFunction.run, name)
        ),
        None,
    )


def missing_features():
    """What plans rely on and this Triton lacks, by name."""

    missing = []

    if _store_attribute() is None:
        missing.append("JITFunction.device_caches")

    for name in ("pre_run_hooks", "function", "packed_metadata", "used_global_vals"):
        if not _mentions(JITFunction.run, name):
            missing.append(f"JITFunction.run: {name}")

    for name in ("packed_metadata", "function", "metadata"):
        if not _mentions(CompiledKernel.__init__, name):
            missing.append(f"CompiledKernel.{name}")

    for name in ("best_config", "cache"):
        if not _mentions(Autotuner.run, name):
            missing.append(f"Autotuner.{name}")

    knobs = getattr(triton, "knobs", None)
    owner = CompiledKernel if knobs is None else knobs.runtime

    for hook in _LAUNCH_HOOKS:
        if not hasattr(owner, hook):
            missing.append(hook)

    if hasattr(knobs, "HookChain") and not hasattr(knobs.HookChain(), "calls"):
        missing.append("HookChain.calls")

    # Not `hasattr`: as a property it would look for a GPU.
    if "active" not in vars(type(driver_config)) | vars(driver_config):
        missing.append("driver.active")

    return missing


def is_compiled(kernel):
    """Whether `kernel` is compiled; otherwise it was made while Triton's interpreter was on."""

    return isinstance(kernel, JITFunction)


def version():
    return triton.__version__


def active_driver():
    return driver_config.active


def captured_globals(jit):
    """The globals that Triton compares with their values at compile time, on every call."""

    return jit.used_global_vals


def current_device_and_stream(driver):
    """The functions by which `driver` tells the current device's index, and a device's current stream.

    PyTorch's `current_device` initialises CUDA if need be, and then asks; where a plan exists, that is done.
    """

    current_device = driver.get_current_device

    if current_device is torch.cuda.current_device and hasattr(
        torch._C, "_cuda_getDevice"
    ):
        current_device = torch._C._cuda_getDevice

    return current_device, driver.get_current_stream


def tensor_rule(store):
    """What else than type and 16-byte alignment the backend specialises tensors on.

    :param store: A device's entry of `Expressions.stores`.
    :return: A function of a tensor, or None where the backend leaves it at the alignment.
    """

    if isinstance(store, dict):
        # 3.2 finds its kernels by type and alignment alone, whatever the backend does later.
        return None

    return _tensor_rule_of(store[-2])


def _tensor_rule_of(backend):
    for name, arguments in (
        ("get_tensor_specialization", ()),
        ("get_arg_specialization", ("tensor",)),
    ):
        if hasattr(BaseBackend, name):
            rule = getattr(backend, name)

            if rule is getattr(BaseBackend, name):
                return None

            return lambda tensor: rule(tensor, *arguments, align=True)

    return None


def tensor_attributes(target):
    """What the compiler is told of a tensor, beside its type, where a launch on `target` is what compiles.

    :return: A function of a tensor that returns pairs of an attribute's name and its value.
    """

    backend = triton.compiler.make_backend(target)
    rule = _tensor_rule_of(backend) or _alignment

    return lambda tensor: backend.parse_attr(rule(tensor))


def _alignment(tensor):
    # As every backend writes it that looks at nothing else.
    return "D" if tensor.data_ptr() % ALIGNMENT == 0 else ""


def kernel_arguments(compiled, bound):
    """The names of those bound arguments that the launcher is given, in its order.

    3.2 leaves out what is a constexpr in the kernel; later versions give everything. Both are what the signature names.
    """

    signature = compiled.src.signature

    return [name for name in bound if name in signature]


def winner_has_hook(tuner):
    """Whether the configuration of the auto-tuner's last run wants to be told of every run."""

    return tuner.best_config.pre_hook is not None


def has_dependent_launch(target):
    """Whether a launch on `target` may start before the kernel in front of it has ended, if it says that it waits itself:
    programmatic dependent launch, of NVIDIA's GPUs of compute capability 9.0, by Triton from 3.5 on. Later GPUs have it too,
    but nobody has tried them; of one a capture was reported to fail (docs/known_reports.md).
    """

    # 3.4 has the function that waits, too, but cannot compile it.
    wait = getattr(triton.language.extra.cuda, "gdc_wait", None)

    return (
        target.backend == "cuda"
        and target.arch == 90
        and wait is not None
        and "_semantic" in inspect.signature(wait).parameters
    )


def waits_for_previous_kernel(compiled):
    """Whether a program of this kernel itself waits for the kernel in front of it."""

    return "griddepcontrol.wait" in compiled.asm.get("ptx", "")


def c_launch(launcher, arguments, *, is_dependent=False):
    """What `launcher(*arguments)` hands to the C function below it.

    Triton's launchers are Python objects whose `__call__` adds constants (is the grid cooperative, no scratch memory)
    and calls `self.launch`. What it adds is found out by asking: a copy of the launcher is called with a `launch` that
    only notes its arguments. So neither a version's order of arguments nor a vendor's is written down here.

    :param arguments: May be placeholders: a launcher that computes with them cannot be asked.
    :param is_dependent: Whether the launch may start before the kernel in front of it has ended.
    :return: The C function and its arguments, or None if the launcher does something on every call (allocates scratch
        memory, adds a sanitizer's state, computes with the grid) or is not one of Triton's own: then it has to be called
        itself.
    """

    if not type(launcher).__module__.startswith("triton.backends."):
        return None

    state = vars(launcher)

    if "launch" not in state or state.get("gsan_enabled"):
        return None

    if any(value for name, value in state.items() if name.endswith("scratch_size")):
        return None

    noted = []
    probe = copy.copy(launcher)
    probe.launch = lambda *given: noted.append(given)

    if is_dependent and "launch_pdl" in state:
        probe.launch_pdl = True

    try:
        probe(*arguments)
    except Exception:
        # Whatever it does with its arguments, it is not to hand them on.
        return None

    return (launcher.launch, noted[0]) if len(noted) == 1 else None

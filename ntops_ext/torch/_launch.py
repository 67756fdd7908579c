"""Where an operator runs: on which device, as a kernel or as its definition, and who has to see the call before."""

import contextlib
import functools
import math

import torch

from ninetoothed_patches.locks import ProcessLock
from ntops_ext.torch import _layouts

# Tensors whose memory holds their elements; a `Buffer` is one of the first kind.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_NO_DISPATCH = torch.Tensor.__torch_dispatch__

# While a kernel runs in it, Triton's interpreter has put functions of its own in the place of Triton's.
_INTERPRETER = ProcessLock()


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


@functools.cache
def waits(device):
    """Whether kernels on `device` wait themselves for what runs there before, and so may be launched early."""

    import ninetoothed_patches

    return ninetoothed_patches.has_dependent_launch(device)


def dispatched(name, tensors, writes):
    """The function of `_compiled` to make a call with, or None where the call goes on as it is.

    PyTorch's dispatcher has to see a call where a tensor wraps others (`DTensor`) or stands
    for none (`FakeTensor`), for its address is no kernel's business, where a mode or a
    transform of `torch.func` is active: what is allocated within one may be fake, and where
    `torch.jit.trace` writes down what happens, of which it sees no launch. The definition,
    which consists of PyTorch's own operators, can do with all of these, except that addresses
    are compared where something given is written, and that unknown sizes cannot be remembered.

    :param name: The operator's.
    :param tensors: Those of the call, the one that says where it runs first.
    :param writes: Whether one of them is written.
    :raises NotImplementedError: If `torch.func` differentiates the call, or makes one call after
        another of one that writes; if an argument carries a tangent, of which the custom operator
        would not know.
    """

    # Private names for what has no public ones.
    is_transformed = torch._C._are_functorch_transforms_active()

    if not (
        is_transformed
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
        or _has_dispatch_of_its_own(tensors)
    ):
        return None

    is_kernel = not isinstance(tensors[0], torch.Tensor) or runs_kernel(tensors[0])

    if not is_kernel and not writes and not any(map(_has_unknown_sizes, tensors)):
        return None

    if is_transformed and any(
        isinstance(tensor, torch.Tensor)
        and torch._C._functorch.is_gradtrackingtensor(tensor)
        for tensor in tensors
    ):
        raise NotImplementedError(
            f"`{name}` has no gradients for the transforms of torch.func: use"
            f" torch.autograd, or the definition in `ntops_ext.reference`, which has them."
        )

    if is_transformed and writes:
        for tensor in tensors:
            if _is_batched(tensor):
                raise NotImplementedError(
                    f"`{name}` cannot write under torch.func.vmap: leave out what it is to"
                    f" write, or loop over the calls."
                )

    if _layouts.is_in_forward_mode() and _layouts.carries_tangents(
        filter(torch.is_tensor, tensors)
    ):
        raise NotImplementedError(
            f"`{name}` has no forward-mode gradient where PyTorch's dispatcher sees the call"
            f" (an argument carries a tangent): use the definition in `ntops_ext.reference`,"
            f" which has one."
        )

    # Imported here, because it is made of the modules that call this function.
    from ntops_ext.torch import _compiled

    return getattr(_compiled, name)


def check_gradients_are_not_batched(name, grad_output):
    """Refuse several gradients at once, whose memory no kernel can be given.

    :raises NotImplementedError: If `grad_output` stands for several.
    """

    if _is_batched(grad_output):
        raise NotImplementedError(
            f"the gradients of `{name}` are computed one at a time: leave out"
            f" `is_grads_batched=True` or `vectorize=True`, or differentiate the definition in"
            f" `ntops_ext.reference`."
        )


def _is_batched(tensor):
    functorch = torch._C._functorch

    return isinstance(tensor, torch.Tensor) and (
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def _has_unknown_sizes(tensor):
    # Those of a trace (`make_fx`), which no layout can be remembered by.
    try:
        numbers = (*tensor.shape, *tensor.stride())
    except (AttributeError, RuntimeError, ValueError):
        # What has none is no dense tensor, and is refused by name.
        return False

    return any(isinstance(number, torch.SymInt) for number in numbers)


def _has_dispatch_of_its_own(tensors):
    return not _PLAIN_TYPES.issuperset(map(type, tensors)) and any(
        getattr(type(tensor), "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH
        for tensor in tensors
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


@contextlib.contextmanager
def _interpreter():
    """Hold Triton's interpreter, and leave it at the program at which it was.

    A finalizer or a signal handler may call in the midst of a kernel of the same thread.
    """

    from triton.runtime import interpreter

    with _INTERPRETER.held():
        state = vars(interpreter.interpreter_builder)
        before = dict(state)

        try:
            yield
        finally:
            state.update(before)


def _launch(handle, device, *args):
    if device.type == "cpu":
        from ninetoothed_patches import host_driver

        if host_driver.interpreter_is_on():
            with _interpreter():
                handle(*args)
        else:
            handle(*args)

        return

    module = torch.get_device_module(device)

    if module.current_device() == device.index:
        handle(*args)

        return

    with module.device(device):
        handle(*args)

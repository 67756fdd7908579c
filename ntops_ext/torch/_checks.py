"""Checks of arguments. Each raises an error that names the argument, or says nothing."""

import math
import numbers
import sys

import numpy as np
import torch

# Steps of a search that is exponential at worst; this many take some 10 ms.
_MAX_OVERLAP_WORK = 10**5

_LARGEST_FLOAT = sys.float_info.max

# Numbers to Python, and none to an operator: NumPy takes durations for integers.
NO_NUMBERS = (bool, np.timedelta64)

FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(name, value):
    """Refuse what is not a tensor whose memory holds its elements.

    :raises TypeError: As `check_kind`.
    :raises ValueError: As `check_kind`, or if it is a lazily negated view.
    """

    check_kind(name, value)

    if value.is_neg():
        raise ValueError(
            f"`{name}` is a view whose elements are negated when PyTorch reads them (such"
            f" as the imaginary part of a conjugate): pass `{name}.resolve_neg()`."
        )


def check_tensors(names, values):
    """`check_tensor` of each that is not None."""

    for name, value in zip(names, values, strict=True):
        if value is not None:
            check_tensor(name, value)


def check_kind(name, value):
    """Refuse what has no shape and strides.

    :raises TypeError: If `value` is not a tensor, or a sparse or a nested one.
    :raises ValueError: If it is a parameter of a lazy module that has not run.
    """

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type_name(value)}.")

    if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"`{name}` must have data, but is an {type(value).__name__}, whose module has"
            f" not run."
        )

    if value.is_nested:
        raise TypeError(
            f"`{name}` must be a dense (strided) tensor, but is a nested one, whose"
            f" layout is {value.layout}."
        )

    if value.layout is not torch.strided:
        raise TypeError(
            f"`{name}` must be a dense (strided) tensor, but its layout is"
            f" {value.layout}."
        )


def type_name(value):
    """The name of a value's type, for messages: with its module unless it is a built-in one.

    `numpy.bool` is not `bool`.
    """

    kind = type(value)

    if kind.__module__ == "builtins":
        return kind.__qualname__

    return f"{kind.__module__}.{kind.__qualname__}"


def shown(value, form=str):
    """A value for messages: as `form` gives it, unless Python writes no number so long."""

    try:
        return form(value)
    except ValueError:
        return f"of type {type_name(value)} with too many digits to show"


def check_dtype(name, tensor, allowed):
    """:raises TypeError: If the dtype of `tensor` is not one of `allowed`."""

    if tensor.dtype not in allowed:
        raise TypeError(
            f"`{name}` must be of {_either(allowed)}, but is of {tensor.dtype}."
        )


def check_device(name, tensor, reference_name, reference):
    """:raises ValueError: If `tensor` lies on another device than `reference`."""

    if tensor.device != reference.device:
        raise ValueError(
            f"`{name}` must be on the device of `{reference_name}`"
            f" ({reference.device}), but is on {tensor.device}."
        )


def check_device_is_usable(device):
    """Refuse what PyTorch can make no tensor on, whose own errors name no argument.

    :raises TypeError: If `device` is nothing that names a device.
    :raises ValueError: If it names none that there is here.
    """

    try:
        torch.empty(0, device=device)
    except TypeError as error:
        raise TypeError(
            f"`device` must be a torch.device, a name or a number of one, or None, but is"
            f" {shown(device, repr)}."
        ) from error
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        # A PyTorch that was built without CUDA asserts that it has it, one without a module
        # for a device imports it, and a number may be too large for any.
        raise ValueError(
            f"`device` must be a device that PyTorch can use here, but is"
            f" {shown(device, repr)}: {error}"
        ) from error


def check_shape(name, tensor, expected, meaning):
    """:raises ValueError: If `tensor` has another shape than `expected`.

    :param meaning: What the expected shape is, for the message: "the shape of `input`".
    """

    if tensor.shape != expected:
        raise ValueError(
            f"`{name}` must have {meaning}, {tuple(expected)}, but has shape"
            f" {tuple(tensor.shape)}."
        )


def check_operands(input, rows, parameters):
    """Refuse what does not go with `input`, of shape `(..., N)`; None is an absent tensor.

    :param rows: Pairs of a name and a tensor of the shape of `input`.
    :param parameters: Pairs of a name and a tensor of shape `(N,)`.
    """

    shape = tuple(input.shape)
    expected = (
        (rows, shape, "the shape of `input`"),
        (parameters, shape[-1:], "one element a column of `input`"),
    )

    for pairs, expected_shape, meaning in expected:
        for name, tensor in pairs:
            if tensor is not None:
                check_dtype(name, tensor, FLOATING_DTYPES)
                check_device(name, tensor, "input", input)
                check_shape(name, tensor, expected_shape, meaning)


def check_number(name, value):
    """:raises TypeError, ValueError: If it is not a number that is finite as a float."""

    # The usual case, and the one that `torch.compile` can trace with an unknown value.
    if type(value) in (float, int) and -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:
        return

    if not isinstance(value, numbers.Real) or isinstance(value, NO_NUMBERS):
        raise TypeError(f"`{name}` must be a number, but is a {type_name(value)}.")

    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        # An int or a fraction that no float holds; the int's digits may be too many, too.
        raise ValueError(f"`{name}` must be finite as a float, but is not.") from None

    if not is_finite:
        raise ValueError(f"`{name}` must be finite, but is {value}.")


def check_eps(eps):
    """`eps` as a float.

    :raises TypeError, ValueError: If it is not a finite number that is not negative.
    """

    if type(eps) is float and 0.0 <= eps < math.inf:
        return eps

    check_number("eps", eps)

    if eps < 0:
        raise ValueError(f"`eps` must not be negative, but is {shown(eps, repr)}.")

    return float(eps)


def check_no_self_overlap(name, tensor):
    """:raises ValueError: If two elements of `tensor` may share memory.

    Two do not where each dimension steps over all that the smaller steps span. Views that
    interleave dimensions in another way are refused, too.
    """

    if tensor.numel() == 0:
        return

    extent = 0

    for stride, size in sorted(
        (abs(stride), size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ):
        if stride <= extent:
            raise ValueError(
                f"`{name}` is written, so no two of its elements may share memory:"
                f" each of its strides must exceed what the smaller ones span, but it has"
                f" shape {tuple(tensor.shape)} and strides {tensor.stride()}."
            )

        extent += stride * (size - 1)


def overlap(first_name, first, second_name, second):
    """Whether two tensors have a byte of memory in common. Exact, not by extents.

    Tensors on the meta device have no memory.

    :param first: The one that is written.
    :raises ValueError: If it cannot be told in reasonable time: that takes strides that
        are nearly, but not, multiples of one another.
    """

    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False

    if first.is_meta:
        return False

    if lie_apart(first, second):
        return False

    try:
        return np.shares_memory(
            _addresses(first), _addresses(second), max_work=_MAX_OVERLAP_WORK
        )
    except np.exceptions.TooHardError:
        raise ValueError(
            f"`{first_name}`, which is written, and `{second_name}` interleave in memory in a"
            f" way that takes too long to tell apart: they have shapes {tuple(first.shape)}"
            f" and {tuple(second.shape)}, strides {first.stride()} and {second.stride()}."
            f" Pass a copy of one of them."
        ) from None


def lie_apart(first, second):
    """Whether one of two tensors, neither of them empty, ends before the other begins."""

    first_start, first_end = _extent(first)
    second_start, second_end = _extent(second)

    return first_end <= second_start or second_end <= first_start


def bytes_spanned(tensor):
    """How many bytes lie from the first of `tensor`, which is not empty, to its last."""

    start, end = _extent(tensor)

    return end - start


def is_same_view(first, second):
    """Whether two tensors are the same elements of memory in the same order."""

    return (
        first.data_ptr() == second.data_ptr()
        and first.dtype == second.dtype
        and first.shape == second.shape
        and all(
            first_stride == second_stride
            for first_stride, second_stride, size in zip(
                first.stride(), second.stride(), first.shape, strict=True
            )
            if size > 1
        )
    )


def _either(values):
    *others, last = [str(value) for value in values]

    return f"{', '.join(others)} or {last}" if others else last


def _extent(tensor):
    """The first byte of `tensor` and the byte behind its last."""

    start = tensor.data_ptr()
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )

    return start, start + (last + 1) * tensor.element_size()


class _Addresses:
    """An array over a tensor's addresses, on whichever device. Never read through."""

    def __init__(self, tensor):
        item_size = tensor.element_size()

        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item_size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item_size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


def _addresses(tensor):
    return np.asarray(_Addresses(tensor))

"""One call: its key, its addresses, and whether its tensors are like those of a call seen before.

The key holds all of a call that decides the launch. `CallReader` writes it out for a handle's parameters, as source text:
reading five tensors by a loop costs twice as much.

Comparing a call with one that was seen before needs no key: `tensor_guard` does it in C++, at a third of the price.
"""

import enum
import functools
import itertools
import struct
import types

import torch
from torch import Tensor
from torch.nn import Parameter

# Subclasses may compute their metadata, or have no storage. A Parameter only adds a flag.
TENSOR_TYPES = frozenset({Tensor, Parameter})

# Immutable, and equal only to what the same bits make of them, once type and sign of zero are told apart.
SCALAR_TYPES = frozenset({int, float, bool, types.NoneType, str})

# Triton specialises on this, and on nothing finer.
ALIGNMENT = 16


def bits(value):
    """What of a scalar stands in a key, beside its type: equal only for the same bits.

    NaN does not equal itself, and 0.0 equals -0.0. Of what is no plain scalar nothing is kept: it may not be hashable, and
    by its type no plan can be made for it.
    """

    if type(value) is float and not (value and value == value):
        return struct.pack("d", value)

    return value if is_scalar(value) else None


def is_scalar(value):
    """Whether `value` is immutable and, its type known, equal only to itself.

    A member of an IntEnum is, unless its class has an equality of its own: ntops passes them as constants.
    """

    kind = type(value)

    return kind in SCALAR_TYPES or (
        isinstance(value, enum.IntEnum) and kind.__eq__ is int.__eq__
    )


def scalar_fits(given, seen):
    """Source text that compares two scalars, named by such text: the same object, or of the same type and bits.

    It may say no to what has the same bits: a zero, whose sign would cost a call to tell, or a NaN.
    """

    return f"({given} is {seen} or __type({given}) is __type({seen}) and {given} == {seen} and {given})"


def any_is_nested(tensors):
    """Source text that tells whether any of some tensors, named by such text, is nested.

    To be asked before a `tensor_guard`: that reads the strides of a nested tensor, of which one of strided layout has none,
    and PyTorch's C++ exception then ends the process.
    """

    return " or ".join(f"{tensor}.is_nested" for tensor in tensors)


class CallReader:
    """How calls of one handle are read.

    `alignments`, `outline`, `kinds` and `layout` are source text in terms of the parameters, for the handle's entry, and
    `addresses` pairs of a name and such text; names of ours in it start with two underscores. The outline is the shapes and
    scalars alone, for a look that must cost less than a key. A key has two parts: `kinds` (types and devices), which decides
    whether a call can be planned at all, and `layout`, in which the outline and the alignments are, as `__outline` and
    `__alignments`.

    :param parameters: The launch function's parameters in order: pairs of a name, and whether it is a tensor.
    """

    def __init__(self, parameters):
        self.parameters = [name for name, _ in parameters]
        self.tensors = [name for name, is_tensor in parameters if is_tensor]
        self.scalars = [name for name, is_tensor in parameters if not is_tensor]
        self._is_tensor = [is_tensor for _, is_tensor in parameters]

        self.addresses = []
        kinds, outline, layout = [], [], ["__outline", "__alignments"]

        for name, is_tensor in parameters:
            kinds.append(f"__type({name})")

            if is_tensor:
                self.addresses.append((f"__address_{name}", f"{name}.data_ptr()"))
                kinds.append(f"{name}.device")
                outline.append(f"{name}.shape")
                layout += [f"{name}.stride()", f"{name}.dtype"]
            else:
                outline.append(f"{name} if __type({name}) is __int else __bits({name})")

        self.kinds, self.outline, self.layout = (
            f"({', '.join(parts)},)" for parts in (kinds, outline, layout)
        )
        # 0 where all addresses are aligned: mostly they are, and that is seen at once.
        addresses = [address for address, _ in self.addresses]
        any_address = " | ".join(addresses)
        each = "".join(f"{address} % {ALIGNMENT} == 0, " for address in addresses)
        self.alignments = f"({any_address}) % {ALIGNMENT} and ({each})"

    def tensors_of(self, arguments):
        return list(itertools.compress(arguments, self._is_tensor))

    def scalars_of(self, arguments):
        return tuple(
            argument
            for argument, is_tensor in zip(arguments, self._is_tensor, strict=True)
            if not is_tensor
        )

    def unplannable(self, arguments):
        """Why no call with arguments of these kinds can be planned, or None."""

        for argument, is_tensor in zip(arguments, self._is_tensor, strict=True):
            reason = (_unlike_tensor if is_tensor else _unlike_scalar)(argument)

            if reason is not None:
                return reason

        return None


def _unlike_tensor(argument):
    if type(argument) in TENSOR_TYPES:
        return None

    if not isinstance(argument, torch.Tensor):
        return "not a tensor"

    return "jagged" if argument.is_nested else "tensor subclass"


def _unlike_scalar(argument):
    if is_scalar(argument):
        return None

    if isinstance(argument, torch.Tensor):
        return "tensor as scalar"

    if type(argument).__module__ == "numpy":
        return "numpy scalar"

    return "unknown scalar type"


def compile_function(source, name, names=()):
    """The function `name` that `source` defines, with `names` as its globals."""

    scope = dict(names)
    exec(compile(source, f"<generated: {name}>", "exec"), scope)

    return scope[name]


def tensor_guard(tensors):
    """A function that tells, of tensors given in the same places, whether they are like these.

    Like means: the same type, shape, strides, dtype and device. It may say no to tensors that are (in another autograd
    mode, say), never yes to tensors that are not. None of those that are given may be nested: see `any_is_nested`.
    """

    guards = _tensor_guards()

    if guards is None:
        return None

    if len({id(tensor) for tensor in tensors}) == len(tensors):
        return _guard(guards, tensors)

    # One guard for all refuses a call that passes a tensor twice.
    checks = [_guard(guards, [tensor]) for tensor in tensors]

    return lambda *given: all(
        check(tensor) for check, tensor in zip(checks, given, strict=True)
    )


def _guard(guards, tensors):
    return guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


@functools.cache
def _tensor_guards():
    """PyTorch's own guard of a compiled graph's inputs, if this PyTorch has it and it tells apart what it must.

    It is not a public interface. What is relied on is tried here, once, and without it a call is compared by its key.
    """

    guards = getattr(
        getattr(getattr(torch._C, "_dynamo", None), "guards", None),
        "TensorGuards",
        None,
    )

    if guards is None:
        return None

    def meta(shape, strides, dtype=torch.float16):
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    like = _guard(guards, [meta((4, 1), (1, 1))])
    others = [
        meta((4, 2), (1, 1)),
        meta((3, 1), (1, 1)),
        meta((4, 1), (2, 1)),
        # The stride of a dimension of size 1 moves nothing, but it is an argument of the kernel.
        meta((4, 1), (1, 7)),
        meta((4,), (1,)),
        meta((4, 1), (1, 1), dtype=torch.bfloat16),
        torch.empty_strided((4, 1), (1, 1), dtype=torch.float16, device="cpu"),
        Parameter(meta((4, 1), (1, 1)), requires_grad=False),
    ]

    if not like(meta((4, 1), (1, 1))) or any(like(other) for other in others):
        return None

    return guards

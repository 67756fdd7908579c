"""One call: its key, its addresses, and whether it is the same call as one seen before.

The key is one flat tuple that holds all of a call that decides the launch. `CallReader` makes it, by a function that is
generated for the handle's parameters: reading five tensors by a loop costs twice as much.

Comparing a call with one that was seen before needs no key: `tensor_guard` does it in C++ at a third of the price.
"""

import functools
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


def float_bits(value):
    """A float's bits, for the floats that do not equal themselves (NaN) or equal others (0.0 and -0.0)."""

    return struct.pack("d", value) if type(value) is float else value


class CallReader:
    """Reads calls of one handle.

    :param parameters: The launch function's parameters in order: pairs of a name, and whether it is a tensor.
    """

    def __init__(self, parameters):
        self.names = [name for name, _ in parameters]
        self.tensor_names = [name for name, is_tensor in parameters if is_tensor]
        self.tensor_indices = [
            index for index, (_, is_tensor) in enumerate(parameters) if is_tensor
        ]
        self.scalar_indices = [
            index for index, (_, is_tensor) in enumerate(parameters) if not is_tensor
        ]
        self.read = _compile(self._read_source(parameters), "read", bits=float_bits)

    def tensors(self, arguments):
        return [arguments[index] for index in self.tensor_indices]

    def scalars(self, arguments):
        return tuple(arguments[index] for index in self.scalar_indices)

    def unreadable(self, arguments):
        """Why the key cannot be trusted to hold all that decides this call, or None."""

        for index in self.tensor_indices:
            argument = arguments[index]

            if type(argument) not in TENSOR_TYPES:
                if not isinstance(argument, Tensor):
                    return "not a tensor"

                return "jagged" if argument.is_nested else "tensor subclass"

            if argument.layout is not torch.strided:
                return "jagged" if argument.is_nested else "not strided"

        for index in self.scalar_indices:
            argument = arguments[index]

            if type(argument) not in SCALAR_TYPES:
                if isinstance(argument, Tensor):
                    return "tensor as scalar"

                if type(argument).__module__ == "numpy":
                    return "numpy scalar"

                return "unknown scalar type"

        return None

    @staticmethod
    def _read_source(parameters):
        """`read(*arguments)`: the key, and the addresses of the tensors."""

        addresses, key = [], []

        for name, is_tensor in parameters:
            if is_tensor:
                addresses.append(f"{name}_address = {name}.data_ptr()")
                key.append(
                    f"type({name}), {name}.shape, {name}.stride(), {name}.dtype, {name}.device, "
                    f"{name}_address % {ALIGNMENT} == 0"
                )
            else:
                key.append(
                    f"type({name}), {name} if {name} and {name} == {name} else bits({name})"
                )

        names = ", ".join(name for name, _ in parameters)
        given = "".join(
            f"{name}_address, " for name, is_tensor in parameters if is_tensor
        )
        lines = [
            *(f"    {line}" for line in addresses),
            f"    return ({', '.join(key)}), ({given})",
        ]

        return "\n".join([f"def read({names}):", *lines])


def _compile(source, name, **names):
    exec(compile(source, f"<generated: {name}>", "exec"), names)

    return names[name]


compile_function = _compile


def tensor_guard(tensors):
    """A function that tells, of tensors given in the same places, whether they are like these.

    Like means: the same type, shape, strides, dtype and device. It may say no to tensors that are (in another autograd
    mode, say), never yes to tensors that are not.
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

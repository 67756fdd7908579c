"""Arguments of the operators, right and wrong in every way that comes to mind, and what must become of a call of them.

A call with nothing wrong gives what the definition gives. One with something wrong raises a documented error that names
what is wrong. Whatever happens, nothing is written but the elements of the outputs, and on an error not even those: the
memory of every argument, with the canaries around it, is compared as bytes.
"""

import dataclasses
import decimal
import enum
import fractions
import re

import numpy as np
import torch
from comparison import assert_rounded_once
from huge_storage import reserve
from hypothesis import strategies as st

DOCUMENTED = (TypeError, ValueError, RuntimeError, NotImplementedError)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

CANARY = -11.375


class Subclass(torch.Tensor):
    """A subclass that changes nothing: a tensor like any other."""


class Size(enum.IntEnum):
    """An int, for all that matters."""

    FOUR = 4


class Number(float):
    """A float, likewise."""


class Text(str):
    """A str, likewise."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """An argument.

    :param value: What is passed.
    :param error: The error it must raise, or None if nothing is wrong with it.
    :param is_unsure: Whether it may be refused, or computed right: tensors of kinds that nothing is said of.
    """

    value: object
    error: type | None = None
    is_unsure: bool = False


def right(value):
    return Drawn(value)


def wrong(error, value):
    return Drawn(value, error)


def unsure(value):
    return Drawn(value, is_unsure=True)


# Tensors.


def embedded(shape, dtype, layout, seed=0):
    """Normal numbers in one of the layouts, within a larger buffer of canaries."""

    generator = torch.Generator().manual_seed(seed)
    source = torch.float32 if dtype.is_complex or dtype not in FLOATS else dtype
    values = torch.randn(shape, generator=generator).to(source)
    shape = tuple(shape)
    *others, last = shape or (1,)
    offset, step, pad = 16, 1, 0

    if layout == "misaligned":
        offset = 17
    elif layout == "padded":
        pad = 3
    elif layout == "every second":
        step = 2

    row = last * step + pad
    strides = [step]

    for size in reversed(others):
        strides.insert(0, row)
        row *= max(size, 1)

    if layout == "columns first" and len(shape) > 1:
        strides = [1]

        for size in shape[:-1]:
            strides.append(strides[-1] * max(size, 1))

    if layout == "expanded" and len(shape) > 1:
        strides[0] = 0

    if layout == "windows" and len(shape) > 1:
        # Each a step further than the one before: they share memory.
        strides[0] = 1

    if layout == "single":
        # Strides of dimensions of one element, or of none, move nothing.
        meaningless = [0, 3, 2**40]
        strides = [
            meaningless[(seed + position) % 3] if size < 2 or 0 in shape else stride
            for position, (size, stride) in enumerate(zip(shape, strides, strict=False))
        ]

    strides = strides[: len(shape)]
    extent = sum(
        (size - 1) * stride
        for size, stride in zip(shape, strides, strict=True)
        if 0 not in shape
    )

    if layout == "far apart" and len(shape) > 1 and 1 < shape[0] <= 3:
        strides[0] = 2**30 + 16
        tensor = reserve(2**31 + 2**16, dtype).as_strided(shape, strides, offset)
    else:
        buffer = torch.full((64 + extent,), CANARY).to(dtype)
        tensor = buffer.as_strided(shape, strides, offset)

    # Row by row: rows may share memory.
    for row, value in zip(
        tensor if len(shape) > 1 else [tensor],
        values if len(shape) > 1 else [values],
        strict=True,
    ):
        row.copy_(value.to(dtype))

        if layout == "expanded":
            break

    return tensor


LAYOUTS = ["dense", "misaligned", "padded", "every second", "columns first"]
LAYOUTS += ["single", "far apart", "expanded", "windows"]

# In which elements share memory.
_SHARED = ("expanded", "windows")


@st.composite
def tensors(draw, shape, *, dtypes=FLOATS, layouts=LAYOUTS, is_written=False):
    """What is right in a tensor's place."""

    layouts = [name for name in layouts if not (is_written and name in _SHARED)]
    tensor = embedded(
        shape,
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(["dense", "dense", *layouts])),
        draw(st.integers(0, 3)),
    )
    kind = draw(
        st.sampled_from(["plain"] * 6 + ["zeros", "inference", "subclass", "parameter"])
    )

    if kind == "zeros" and not is_written and tensor.numel():
        tensor[..., : max(tensor.shape[-1] // 2, 1)].zero_()
    elif kind == "inference":
        with torch.inference_mode():
            clone = tensor.clone()

        return clone if not is_written else tensor
    elif kind == "subclass":
        return tensor.as_subclass(Subclass)
    elif kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=False)

    return tensor


NO_TENSORS = [None, "text", 3, 1.0, True, [1.0], (), {}, b"", object(), torch.float16]
NO_TENSORS += [np.ones(8, np.float32), np.float32(1), torch.nn.Linear, torch.Size([8])]
NO_TENSORS += [torch.strided, torch.device("cpu"), Ellipsis, range(8), 1j, torch.Tensor]
NO_TENSORS += [torch.UntypedStorage(8), torch.nn.Identity(), [torch.ones(8)], Size.FOUR]


class _Disguised:
    """What has the attributes of a tensor and is none."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)


class _Wrapper(torch.Tensor):
    """A tensor whose elements are another one's: it has no memory of its own."""

    @staticmethod
    def __new__(cls, tensor):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        wrapper.tensor = tensor

        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        def unwrapped(value):
            return value.tensor if isinstance(value, cls) else value

        return function(
            *torch.utils._pytree.tree_map(unwrapped, arguments),
            **torch.utils._pytree.tree_map(unwrapped, keywords or {}),
        )


def _quantized(shape):
    return torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.quint8)


def _named(tensor):
    if not hasattr(tensor, "rename"):
        # Later versions of PyTorch have no names of dimensions.
        return tensor

    return tensor.rename(*(f"d{index}" for index in range(tensor.ndim)))


# By name, what is made of a shape and a dtype, and what it raises: None if that is open.
WRONG_KINDS = {
    "int64": (lambda shape, dtype: embedded(shape, torch.int64, "dense"), TypeError),
    "bool": (lambda shape, dtype: torch.ones(shape, dtype=torch.bool), TypeError),
    "float64": (lambda shape, dtype: torch.ones(shape, dtype=torch.float64), TypeError),
    "complex64": (
        lambda shape, dtype: torch.ones(shape, dtype=torch.complex128),
        TypeError,
    ),
    "float8": (
        lambda shape, dtype: torch.zeros(shape, dtype=torch.uint8).view(
            torch.float8_e5m2
        ),
        TypeError,
    ),
    "quantized": (lambda shape, dtype: _quantized(shape), TypeError),
    "sparse": (
        lambda shape, dtype: torch.ones(shape, dtype=dtype).to_sparse(),
        TypeError,
    ),
    "negative": (
        lambda shape, dtype: torch._neg_view(embedded(shape, dtype, "dense")),
        ValueError,
    ),
    "imaginary": (
        lambda shape, dtype: torch.ones(shape, dtype=torch.complex64).conj().imag,
        (TypeError, ValueError),
    ),
    "meta": (
        lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        ValueError,
    ),
    "float8_e4m3fn": (
        lambda shape, dtype: torch.zeros(shape, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ),
        TypeError,
    ),
    "uint16": (lambda shape, dtype: torch.zeros(shape, dtype=torch.uint16), TypeError),
    "bits8": (
        lambda shape, dtype: torch.zeros(shape, dtype=torch.uint8).view(torch.bits8),
        TypeError,
    ),
    "complex32": (
        lambda shape, dtype: torch.zeros(shape, dtype=torch.complex32),
        TypeError,
    ),
    "compressed rows": (
        lambda shape, dtype: torch.ones(3, 4, dtype=dtype).to_sparse_csr(),
        TypeError,
    ),
    "lazy parameter": (
        lambda shape, dtype: torch.nn.parameter.UninitializedParameter(),
        ValueError,
    ),
    "lazy buffer": (
        lambda shape, dtype: torch.nn.parameter.UninitializedBuffer(),
        ValueError,
    ),
    "disguised": (
        lambda shape, dtype: _Disguised(embedded(shape, dtype, "dense")),
        TypeError,
    ),
    "nested": (
        lambda shape, dtype: torch.nested.nested_tensor([torch.ones(4), torch.ones(2)]),
        (TypeError, ValueError),
    ),
    "jagged": (
        lambda shape, dtype: torch.nested.nested_tensor(
            [torch.ones(4, 2), torch.ones(2, 2)], layout=torch.jagged
        ),
        (TypeError, ValueError),
    ),
    "mkldnn": (
        lambda shape, dtype: torch.ones(shape or (1,)).to_mkldnn(),
        (TypeError, ValueError),
    ),
    "named": (lambda shape, dtype: _named(embedded(shape, dtype, "dense")), None),
    "wrapper": (lambda shape, dtype: _Wrapper(embedded(shape, dtype, "dense")), None),
}


@st.composite
def no_right_tensors(draw, shape, *, dtype=torch.float32, is_optional=True):
    """What is wrong in the place of a tensor of this shape."""

    what = draw(st.sampled_from(["kind", "kind", "shape", "no tensor"]))

    if what == "no tensor":
        value = draw(st.sampled_from([*NO_TENSORS[is_optional:]]))

        return wrong(TypeError, value)

    if what == "shape":
        # Of what is not optional, the others' shapes follow: they may be right for this one.
        certain = wrong if is_optional else lambda error, value: unsure(value)
        other = draw(st.sampled_from(other_shapes(tuple(shape))))

        return certain(ValueError, embedded(other, dtype, "dense"))

    make, error = WRONG_KINDS[draw(st.sampled_from(list(WRONG_KINDS)))]
    value = make(tuple(shape), dtype)

    if not is_optional and isinstance(value, torch.Tensor) and value.is_meta:
        return unsure(value)

    return unsure(value) if error is None else wrong(error, value)


def other_shapes(shape):
    candidates = [(*shape, 1), (1, *shape), shape[:-1], shape[1:], ()]
    candidates += [(*shape[:-1], shape[-1] + 1)] if shape else [(1,)]
    candidates += [(*shape[:-1], 1), (shape[0] + 1, *shape[1:])] if shape else []

    return [candidate for candidate in candidates if candidate != shape]


# Numbers and flags.

RIGHT_EPS = [1e-5, 1e-6, 1.0, 1, 0.0, -0.0, 0, np.float32(1e-5), np.float64(1e-5)]
RIGHT_EPS += [np.int64(1), np.float16(0.5), fractions.Fraction(1, 3), 1e30, Size.FOUR]
RIGHT_EPS += [np.longdouble(1e-5), np.uint8(1), np.int8(0), Number(1e-5), 10**20]

NO_NUMBERS = [None, "1e-5", [1e-5], (), {}, 1j, True, False, np.bool_(True), object()]
NO_NUMBERS += [torch.tensor(1e-5), torch.tensor([1e-5]), decimal.Decimal("0.1"), {1}]
NO_NUMBERS += [np.array([1e-5]), np.complex64(1), b"1", np.array(1e-5), complex(1, 0)]
NO_NUMBERS += [
    np.str_("1"),
    np.datetime64(1, "s"),
    np.timedelta64(1, "s"),
    float,
    Ellipsis,
]
NO_NUMBERS += [range(1), Text("1"), torch.nn.Parameter(torch.ones(())), torch.float32]

INFINITE = [float("nan"), float("inf"), float("-inf"), np.float32("nan"), 10**400]
INFINITE += [np.float64("inf"), fractions.Fraction(10**400, 3), -(10**400)]
INFINITE += [np.longdouble("1e4000"), np.float16("nan"), Number("inf")]

eps = st.one_of(
    st.sampled_from(RIGHT_EPS).map(right),
    st.floats(0, 4, width=32, allow_subnormal=False).map(right),
)
no_eps = st.one_of(
    st.sampled_from(NO_NUMBERS).map(lambda value: wrong(TypeError, value)),
    st.sampled_from([*INFINITE, -1e-5, -1, np.float32(-1), fractions.Fraction(-1)]).map(
        lambda value: wrong(ValueError, value)
    ),
)
offsets = st.sampled_from(
    [0.0, -0.0, 0, 1.0, 1, -1.0, np.float32(0.5), np.int64(2), fractions.Fraction(1, 4)]
    + [np.uint8(3), np.longdouble(0.5), Number(0.25), Size.FOUR, -(10**3), np.int8(-1)]
).map(right)
no_offsets = st.one_of(
    st.sampled_from(NO_NUMBERS).map(lambda value: wrong(TypeError, value)),
    st.sampled_from(INFINITE).map(lambda value: wrong(ValueError, value)),
)
NO_FLAGS = [0, 1, None, "yes", 1.0, np.bool_(True), [], torch.tensor(True), object()]
NO_FLAGS += [1j, "True", np.int8(1), Size.FOUR, Ellipsis, bool, np.array(True), {}]
no_flags = st.sampled_from(NO_FLAGS).map(lambda value: wrong(TypeError, value))
NO_ACTIVATIONS = ["gelu", "", "SiLU", "silu ", None, 3, ["silu"], b"silu", {}, object()]
NO_ACTIVATIONS += [torch.sigmoid, True, np.str_("relu"), "silu\0", "sigmoid()", 1j]
NO_ACTIVATIONS += [np.array("silu"), np.array(["silu"]), Text(""), ("silu",), {"silu"}]
RIGHT_ACTIVATIONS = ["silu", "swish", "sigmoid", np.str_("silu"), Text("sigmoid")]
no_activations = st.sampled_from(NO_ACTIVATIONS).map(
    lambda value: wrong(ValueError, value)
)


def group_sizes(columns):
    divisors = [size for size in range(1, columns + 1) if columns % size == 0]

    return st.sampled_from(
        [
            None,
            *divisors,
            *map(np.int64, divisors),
            *map(np.uint8, divisors),
            *([Size.FOUR] if columns % 4 == 0 else []),
        ]
    ).map(right)


def no_group_sizes(columns):
    sizes = [0, -1, columns + 1, 2 * columns + 1, 10**30, -(10**30), np.int64(-3)]
    kinds = [1.0, True, "4", [4], (4,), torch.tensor(4), np.float32(4), np.bool_(1), {}]
    kinds += [4j, fractions.Fraction(4), decimal.Decimal(4), np.array(4), range(4), int]
    kinds += [
        np.array([4]),
        np.timedelta64(4, "s"),
        torch.Size([4]),
        Number(4),
        Ellipsis,
    ]

    return st.one_of(
        st.sampled_from(sizes).map(lambda value: wrong(ValueError, value)),
        st.sampled_from(kinds).map(lambda value: wrong(TypeError, value)),
    )


# Calls.


@dataclasses.dataclass
class Call:
    """Arguments of one call by name, and what is wrong with them."""

    arguments: dict
    errors: dict
    is_unsure: bool
    mode: str = "no grad"

    @classmethod
    def of(cls, drawn, errors=(), mode="no grad"):
        return cls(
            {name: argument.value for name, argument in drawn.items()},
            {
                name: argument.error
                for name, argument in drawn.items()
                if argument.error is not None
            }
            | dict(errors),
            any(argument.is_unsure for argument in drawn.values()),
            mode,
        )

    def describe(self):
        return {name: _describe(value) for name, value in self.arguments.items()}


def _describe(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)

    if value.is_nested or value.layout is not torch.strided:
        return type(value).__name__, str(value.layout), value.is_nested

    return type(value).__name__, tuple(value.shape), value.stride(), value.dtype


class Memory:
    """The bytes of all memory that some arguments lie in."""

    def __init__(self, values):
        widest = {}

        for value in values:
            value = _with_memory(value)

            if not isinstance(value, torch.Tensor) or value.device.type == "meta":
                continue

            try:
                storage = value.untyped_storage()
            except (NotImplementedError, RuntimeError, ValueError):
                # Sparse, jagged, lazy, of another library: no memory as such.
                continue

            if not value.is_nested and storage.data_ptr():
                other, _ = widest.get(storage.data_ptr(), (value, storage))

                # Of what is seen by its elements, all are seen by those of the whole.
                if value.numel() >= other.numel():
                    widest[storage.data_ptr()] = value, storage

        self._before = [
            (seen, seen.read()) for seen in (_Seen(*one) for one in widest.values())
        ]

    def assert_unchanged(self, *, but=()):
        """Require all bytes to be as before, but those of the elements of some tensors."""

        for seen, before in self._before:
            now = seen.read()

            for tensor in map(_with_memory, but):
                if tensor.untyped_storage().data_ptr() == seen.address:
                    for memory in (before, now):
                        seen.elements(memory, tensor).zero_()

            assert torch.equal(before, now), "memory beside the outputs was written"


def _with_memory(value):
    """What a wrapper's elements are, or one in disguise."""

    value = getattr(value, "tensor", value)

    return getattr(value, "_tensor", value)


# Larger storages are looked at where their elements are, and a little around.
_LARGE = 2**24

_MARGIN = 16


class _Seen:
    """The bytes that are looked at of a tensor's storage: all, or some around what lies far apart."""

    def __init__(self, tensor, storage):
        self.address = storage.data_ptr()
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._is_large = storage.nbytes() > _LARGE

        if self._is_large:
            size = tensor.element_size()
            (num_far, *sizes), (step, *strides) = _far_first(tensor)
            extent = sum(
                (length - 1) * stride
                for length, stride in zip(sizes, strides, strict=True)
                if length > 1
            )
            self._bytes = self._bytes.as_strided(
                (num_far, (extent + 1 + 2 * _MARGIN) * size),
                (step * size, 1),
                (tensor.storage_offset() - _MARGIN) * size,
            )

    def read(self):
        return self._bytes.clone(memory_format=torch.contiguous_format)

    def elements(self, memory, tensor):
        """Those of a tensor, in what was read."""

        size = tensor.element_size()
        shape, strides = tensor.shape, tensor.stride()
        strides, offset = (
            [one * size for one in strides],
            tensor.storage_offset() * size,
        )

        if self._is_large:
            shape, strides = _far_first(tensor)
            strides = [memory.shape[1], *(one * size for one in strides[1:])]
            offset = _MARGIN * size

        return memory.as_strided((*shape, size), (*strides, 1), offset)


def _far_first(tensor):
    """Shape and strides, those of the dimension with the largest steps before the others'."""

    dims = sorted(
        range(tensor.ndim),
        key=lambda dim: tensor.stride(dim) if tensor.shape[dim] > 1 else 0,
        reverse=True,
    )

    return [tensor.shape[dim] for dim in dims], [tensor.stride(dim) for dim in dims]


def check_error(call, error):
    """Require a documented error that names an argument which is wrong."""

    message = str(error)
    assert type(error) in DOCUMENTED, f"{type(error).__name__}: {message}"
    assert call.errors or call.is_unsure, f"refused though right: {message}"
    named = set(re.findall(r"`(\w+)", message))
    expected = call.errors.keys()

    if call.is_unsure:
        # What is wrong may be how the others go with it.
        expected = call.arguments.keys()

    assert named & expected, f"{message!r} names none of {sorted(expected)}"
    kinds = [call.errors[name] for name in named & set(call.errors)]
    assert not kinds or any(isinstance(error, kind) for kind in kinds), (
        f"{type(error).__name__} for {call.errors}: {message}"
    )


def run(function, call, check, *, written=()):
    """Call `function`, and require what must become of it.

    :param check: Takes the result of a call that was not refused.
    :param written: The names of the arguments that are written.
    """

    memory = Memory(call.arguments.values())

    try:
        with MODES[call.mode]():
            result = _called(function, call)
    except BaseException as error:
        memory.assert_unchanged()
        check_error(call, error)

        return type(error).__name__

    assert not call.errors, f"not refused: {call.errors} in {call.describe()}"
    memory.assert_unchanged(
        but=[call.arguments[name] for name in written if name in call.arguments]
    )
    check(result)

    return "computed"


MODES = {
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "vmap": torch.no_grad,
}

modes = st.sampled_from(["no grad", "no grad", "grad", "inference", "vmap"])


def _called(function, call):
    """What a call gives; or, under a transform of `torch.func`, what it gives for a batch of one."""

    arguments = dict(call.arguments)
    input = arguments.pop("input", None)

    if (
        call.mode != "vmap"
        or call.errors
        or call.is_unsure
        or type(input) is not torch.Tensor
        or input.is_inference()
        or arguments.get("out") is not None
    ):
        return function(**call.arguments)

    def for_one(one):
        return function(input=one, **arguments)

    return torch.func.vmap(for_one)(input[None])[0]


@st.composite
def modes_and_leaves(draw, drawn, errors, *, of_leaves):
    """In which mode a call is made; tensors that require gradients are among its arguments, if that changes nothing.

    :param drawn: The arguments, of which some are replaced.
    :param errors: What is wrong with the call, to which is added.
    :param of_leaves: What is wrong where gradients are recorded, in terms of the names of the leaves.
    """

    mode = draw(modes)
    is_wrong = any(argument.error or argument.is_unsure for argument in drawn.values())
    names = [
        name
        for name, argument in drawn.items()
        if type(argument.value) is torch.Tensor
        and (argument.value.is_floating_point() or argument.value.is_complex())
        and not argument.value.is_inference()
    ]

    if is_wrong or errors or not names or not draw(st.booleans()):
        return mode

    leaves = draw(st.sets(st.sampled_from(names), min_size=1))
    added = of_leaves(leaves) if mode == "grad" else {}

    if mode == "vmap" or mode == "grad" and not added:
        return mode

    made = {}

    for name in leaves:
        value = drawn[name].value
        made[id(value)] = value.detach().requires_grad_()

    # An argument in two places stays one.
    for name, argument in drawn.items():
        if id(argument.value) in made:
            drawn[name] = right(made[id(argument.value)])

    errors |= added

    if mode == "grad":
        errors |= of_inference(
            {name: argument.value for name, argument in drawn.items()}
        )

    return mode


def of_inference(arguments):
    """What is wrong with tensors that cannot be saved, where gradients are recorded."""

    return {
        name: ValueError
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.parameter.UninitializedTensorMixin)
        and not value.is_nested
        and value.is_inference()
    }


def make_leaves(call, names):
    """Let some of the tensors require gradients; those of inference mode cannot, and cannot be saved either."""

    tensors = {
        name: value
        for name, value in call.arguments.items()
        if isinstance(value, torch.Tensor)
    }

    for name in names & tensors.keys():
        if not tensors[name].is_inference():
            call.arguments[name] = tensors[name].detach().requires_grad_()

    if leaves_of(call):
        call.errors |= of_inference(tensors)


def leaves_of(call):
    return {
        name: value
        for name, value in call.arguments.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }


def assert_near(actual, exact, error, **options):
    """`assert_rounded_once`, of tensors of any kind."""

    assert_rounded_once(
        actual.detach().as_subclass(torch.Tensor), exact, error, **options
    )

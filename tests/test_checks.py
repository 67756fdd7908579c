"""The checks of arguments that do not belong to one operator."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import _checks, eager_rounding, gated_rms_norm

SETTINGS = settings(max_examples=300)

_BUFFER = torch.zeros(512, dtype=torch.uint8)


@pytest.mark.parametrize(
    "value, name",
    [
        (1, "int"),
        (None, "NoneType"),
        (np.bool_(True), f"numpy.{np.bool_.__name__}"),
        (torch.ones(1), "torch.Tensor"),
    ],
    ids=str,
)
def test_messages_name_types_so_that_they_can_be_told_apart(value, name):
    """A `numpy.bool` that is refused is not said to be a bool."""

    assert _checks.type_name(value) == name

    if name != "torch.Tensor":
        with pytest.raises(TypeError, match=f"is a {name}\\."):
            _checks.check_tensor("input", value)

    if name not in ("int", "torch.Tensor"):
        with pytest.raises(TypeError, match=f"`norm_before_gate`.* is a {name}\\."):
            gated_rms_norm(torch.ones(2), norm_before_gate=value)


# Python, by default, writes no int of so many digits.
_LONG = 10**5000


@pytest.mark.parametrize(
    "name, call",
    [
        ("group_size", lambda: gated_rms_norm(torch.ones(2), group_size=_LONG)),
        ("eps", lambda: gated_rms_norm(torch.ones(2), eps=Fraction(-1, _LONG))),
        (
            "weight_offset",
            lambda: gated_rms_norm(torch.ones(2), weight_offset=Fraction(1, _LONG)),
        ),
        ("activation", lambda: gated_rms_norm(torch.ones(2), activation=_LONG)),
        ("hidden_size", lambda: GatedRMSNorm(_LONG)),
        ("hidden_size", lambda: GatedRMSNorm(-_LONG)),
        ("dtype", lambda: GatedRMSNorm(2, dtype=_LONG)),
        ("device", lambda: GatedRMSNorm(2, device=_LONG)),
        ("head_dim", lambda: eager_rounding(head_dim=-_LONG, device="cpu")),
        ("dtype", lambda: eager_rounding(dtype=_LONG, device="cpu")),
    ],
)
def test_a_number_that_python_does_not_write_is_refused_by_name(name, call):
    """Its type is said in its place."""

    with pytest.raises((TypeError, ValueError), match=f"^`{name}`"):
        call()


@st.composite
def _views(draw):
    """A view of up to 4 dimensions of one buffer, in some dtype."""

    dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.int8]))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [draw(st.integers(0, 9)) for _ in shape]
    start = draw(st.integers(0, 20)) * dtype.itemsize

    return (
        _BUFFER[start:].view(dtype).as_strided(shape, strides, start // dtype.itemsize)
    )


def memory_of(tensor):
    """The addresses of each element's bytes, element by element: the oracle."""

    offsets = [0] if tensor.numel() else []

    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [one + index * stride for one in offsets for index in range(size)]

    item_size = tensor.element_size()

    return [
        [tensor.data_ptr() + offset * item_size + byte for byte in range(item_size)]
        for offset in offsets
    ]


def bytes_of(tensor):
    return {byte for element in memory_of(tensor) for byte in element}


@SETTINGS
@given(_views(), _views())
def test_overlap_is_exact(first, second):
    """Two tensors overlap if and only if they have a byte in common."""

    expected = bool(bytes_of(first) & bytes_of(second))

    assert _checks.overlap("out", first, "gate", second) is expected
    assert _checks.overlap("out", second, "gate", first) is expected


@SETTINGS
@given(_views(), _views())
def test_the_same_view_is_the_same_memory_in_the_same_order(first, second):
    """Strides of sizes of 1 mean nothing."""

    if first.numel() == 0 or second.numel() == 0:
        return

    expected = (first.dtype, first.shape, memory_of(first)) == (
        second.dtype,
        second.shape,
        memory_of(second),
    )

    assert _checks.is_same_view(first, second) is expected


@SETTINGS
@given(_views())
def test_what_overlaps_itself_is_refused(tensor):
    """Nothing whose elements share memory passes."""

    num_elements = len(memory_of(tensor))
    overlaps = len({tuple(element) for element in memory_of(tensor)}) < num_elements

    if overlaps:
        with pytest.raises(ValueError, match="`x`"):
            _checks.check_no_self_overlap("x", tensor)


@pytest.mark.parametrize(
    "shape, strides",
    [
        ((3, 4), (4, 1)),
        ((3, 4), (1, 3)),
        ((3, 4), (8, 2)),
        ((2, 3, 4), (4, 8, 1)),
        ((1, 4), (0, 1)),
        ((4, 1), (1, 0)),
        ((0, 4), (0, 0)),
        ((), ()),
    ],
    ids=str,
)
def test_what_does_not_overlap_itself_is_not_refused(shape, strides):
    """Slices, permutations, gaps, and strides that mean nothing."""

    _checks.check_no_self_overlap("x", torch.zeros(64).as_strided(shape, strides))


def test_tensors_without_memory_share_none():
    """On the meta device there are no addresses."""

    tensor = torch.empty(4, 4, device="meta")

    assert not _checks.overlap("out", tensor, "gate", tensor)


def test_an_overlap_too_hard_to_tell_is_refused():
    """A search that is exponential at worst ends in an error, not in minutes of waiting."""

    tokens, width = 65536, 128
    storage = torch.empty(25166288 + 384 * tokens + 1000, dtype=torch.float16)
    first = storage.as_strided((2, tokens, 1, width), (22020552, 336, width, 1))
    second = storage.as_strided((2, tokens, 1, width), (25166288, 384, width, 1), 159)

    with pytest.raises(
        ValueError, match="`out`.*`gate`.*too long to tell apart.*Pass a copy"
    ):
        _checks.overlap("out", first, "gate", second)


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf")])
def test_a_number_must_be_finite_as_a_float(value):
    """Integers beyond every float are refused like infinity."""

    with pytest.raises(ValueError, match="`eps` must be finite"):
        _checks.check_number("eps", value)

"""`qk_norm_rope` and `qk_norm_rope_pack_` as kernels, in Triton's interpreter.

NumPy, which the interpreter computes with, contracts nothing, rounds an `fma` once (from
Triton 3.9 on) and rounds float16 to nearest: so in float16 and float32 every bit of a
kernel is checked against the same steps written out here. Its float32 to bfloat16
truncates; there an error of a whole unit at each of the three roundings is the most that
can be asked for.
"""

import numpy as np
import pytest
import torch
import triton
from comparison import assert_all_equal_bits, assert_equal_bits
from fused_multiply_add import fused_multiply_add
from huge_storage import reserve
from qk_norm_rope_behaviour import *  # noqa: F403
from qk_norm_rope_behaviour import forget_layouts
from rope_inputs import make_pack, make_rope

from ntops_ext import reference
from ntops_ext.torch import _chunks as chunks_module
from ntops_ext.torch import (
    _eager,
    _qk_norm_rope,
    _qk_norm_rope_pack,
    qk_norm_rope,
    qk_norm_rope_pack_,
)

SMALL = {"tokens": 3, "prefix": 2, "heads": 3, "kv_heads": 3}


@pytest.fixture(scope="module")
def device():
    return "cpu"


rounds_fma_once = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

needs_fma = pytest.mark.skipif(
    not rounds_fma_once, reason="this Triton's interpreter rounds an fma twice"
)


def add_rows(squares, order):
    """Sums of rows in a named order, with loops over lanes."""

    grouping, distances = order
    width = 1 << (squares.shape[-1] - 1).bit_length()
    padded = np.zeros((*squares.shape[:-1], width), np.float32)
    padded[..., : squares.shape[-1]] = squares
    columns = [padded[..., at] for at in range(width)]

    def halve(values):
        half = len(values) // 2

        return [values[at] + values[at + half] for at in range(half)]

    if grouping == "folded_vectors":
        columns = halve(columns)

    if grouping in ("vectors", "folded_vectors"):
        columns = [
            ((columns[at] + columns[at + 1]) + columns[at + 2]) + columns[at + 3]
            for at in range(0, len(columns), 4)
        ]

    if grouping == "lanes":
        lanes = width // 4
        columns = [
            ((columns[at] + columns[at + lanes]) + columns[at + 2 * lanes])
            + columns[at + 3 * lanes]
            for at in range(lanes)
        ]

    while len(columns) > (1 if distances == "decreasing" else 32):
        columns = halve(columns)

    while len(columns) > 1:
        columns = [columns[at] + columns[at + 1] for at in range(0, len(columns), 2)]

    return columns[0]


def written_out(heads, weight, rope, eps=1e-6, *, order, real_part, imaginary_part):
    """The kernel's steps in NumPy, for float16 and float32."""

    dtype = heads.numpy().dtype
    wide = heads.numpy().astype(np.float32)
    total = add_rows(wide * wide, order)[..., None]
    mean = total * np.float32(1 / heads.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    normalized = (wide * scale).astype(dtype).astype(np.float32)
    weighted = (normalized * weight.numpy().astype(np.float32)).astype(dtype)
    weighted = weighted.astype(np.float32)
    real, imaginary = weighted[..., 0::2], weighted[..., 1::2]
    table = rope.numpy()[:, None, :]
    real, imaginary, cosine, sine = np.broadcast_arrays(
        real, imaginary, table.real, table.imag
    )
    reals = {
        "real*cosine": lambda: fused_multiply_add(real, cosine, -(imaginary * sine)),
        "imaginary*sine": lambda: fused_multiply_add(-imaginary, sine, real * cosine),
    }
    imaginaries = {
        "real*sine": lambda: fused_multiply_add(real, sine, imaginary * cosine),
        "imaginary*cosine": lambda: fused_multiply_add(imaginary, cosine, real * sine),
    }
    result = np.stack((reals[real_part](), imaginaries[imaginary_part]()), -1)

    return torch.from_numpy(result.reshape(wide.shape).astype(dtype))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def round_as(monkeypatch):
    """Let the operators round in a named way."""

    def choose(order, real_part="real*cosine", imaginary_part="real*sine", few=None):
        rounding = _eager.EagerRounding(
            order_of_few_rows=few or order,
            order_of_rows=order,
            real_part=real_part,
            imaginary_part=imaginary_part,
            is_reproduced=True,
            reason="",
        )
        monkeypatch.setattr(
            _eager, "default_rounding", lambda head_dim, reason: rounding
        )
        forget_layouts()

    yield choose

    forget_layouts()


def expected_pack(inputs, **rounding):
    """What the written-out steps make of the arguments."""

    prefix = inputs.k_prefix.shape[1]
    k_src = inputs.k_out[:, prefix:] if inputs.k_src is None else inputs.k_src
    v_src = inputs.v_out[:, prefix:] if inputs.v_src is None else inputs.v_src

    return [
        written_out(inputs.q, inputs.q_weight, inputs.rope, **rounding),
        torch.cat(
            (
                inputs.k_prefix,
                written_out(k_src, inputs.k_weight, inputs.rope, **rounding),
            ),
            1,
        ),
        torch.cat((inputs.v_prefix, v_src), 1),
    ]


OWN_ROUNDING = {"real_part": "real*cosine", "imaginary_part": "real*sine"}


@needs_fma
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sources", ["", "k", "v", "kv"])
def test_every_bit_is_that_of_the_written_out_steps(dtype, sources):
    """Every mode, K and Q with their own weights; V untouched where no source is given."""

    inputs = make_pack(**SMALL, batch=2, dtype=dtype, sources=sources)
    expected = expected_pack(inputs, order=("vectors", "decreasing"), **OWN_ROUNDING)

    assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments()), expected)
    inputs.assert_canaries()


@needs_fma
@pytest.mark.parametrize(
    "head_dim, order",
    [
        (128, ("vectors", "decreasing")),
        (128, ("vectors", "increasing")),
        (128, ("lanes", "decreasing")),
        (128, ("lanes", "increasing")),
        (128, ("nothing", "increasing")),
        (64, ("nothing", "decreasing")),
        (96, ("lanes", "decreasing")),
        (96, ("nothing", "decreasing")),
        (256, ("folded_vectors", "decreasing")),
        (256, ("vectors", "decreasing")),
        (192, ("folded_vectors", "decreasing")),
        (2, ("nothing", "decreasing")),
    ],
    ids=str,
)
def test_squares_are_added_in_the_order_that_was_asked_for(round_as, head_dim, order):
    """In float32, where a wrong order changes a sixth of the rows; also padded widths."""

    round_as(order)
    inputs = make_pack(
        tokens=12, heads=4, head_dim=head_dim, dtype=torch.float32, kv_heads=1
    )
    arguments = (inputs.q, inputs.q_weight, inputs.rope)

    assert_equal_bits(
        qk_norm_rope(*arguments),
        written_out(*arguments, order=order, **OWN_ROUNDING),
    )


@needs_fma
@pytest.mark.parametrize("real_part", ["real*cosine", "imaginary*sine"])
@pytest.mark.parametrize("imaginary_part", ["real*sine", "imaginary*cosine"])
def test_products_are_rounded_as_was_asked_for(round_as, real_part, imaginary_part):
    """In float32, where another form changes a quarter of the elements."""

    order = ("nothing", "decreasing")
    round_as(order, real_part, imaginary_part)
    inputs = make_pack(**SMALL, head_dim=64, dtype=torch.float32)
    expected = expected_pack(
        inputs, order=order, real_part=real_part, imaginary_part=imaginary_part
    )

    assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments()), expected)


@needs_fma
def test_q_and_k_may_be_added_in_different_orders(round_as):
    """Sixteen heads of q and eight of K, as in a decoding step of grouped queries."""

    few, many = ("vectors", "decreasing"), ("folded_vectors", "decreasing")
    round_as(many, few=few)
    inputs = make_pack(
        tokens=1,
        prefix=0,
        heads=32,
        kv_heads=4,
        head_dim=256,
        dtype=torch.float32,
        sources="k",
    )
    expected = [
        written_out(inputs.q, inputs.q_weight, inputs.rope, order=many, **OWN_ROUNDING),
        written_out(
            inputs.k_src, inputs.k_weight, inputs.rope, order=few, **OWN_ROUNDING
        ),
    ]

    assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments())[:2], expected)


@needs_fma
def test_all_heads_of_a_call_decide_on_the_order(round_as):
    """Sixteen of two batch entries are not few."""

    few, many = ("vectors", "decreasing"), ("folded_vectors", "decreasing")
    round_as(many, few=few)
    inputs = make_pack(
        batch=2, tokens=1, heads=8, head_dim=256, dtype=torch.float32, seed=4
    )
    arguments = (inputs.q, inputs.q_weight, inputs.rope)
    expected, other = (
        written_out(*arguments, order=order, **OWN_ROUNDING) for order in (many, few)
    )

    assert not torch.equal(expected, other)
    assert_equal_bits(qk_norm_rope(*arguments), expected)


def test_bfloat16_is_within_its_roundings():
    """A unit for each of the three roundings, which the interpreter truncates."""

    inputs = make_pack(**SMALL)
    expected = inputs.expected(reference.qk_norm_rope_pack_)
    actual = qk_norm_rope_pack_(*inputs.arguments())

    for one, other in zip(actual, expected, strict=True):
        assert reference.rotation_error(one, other) <= 3

    # Copies are exact.
    assert_all_equal_bits(actual[2:], expected[2:])
    assert_equal_bits(actual[1][:, :2], expected[1][:, :2])


@pytest.mark.parametrize(
    "sizes",
    [
        {"prefix": 0},
        {"tokens": 0},
        {"heads": 6, "kv_heads": 2},
        {"heads": 2, "kv_heads": 6},
        {"heads": 5, "kv_heads": 1},
        {"heads": 1, "kv_heads": 1, "tokens": 1, "prefix": 1},
        {"padding": 5},
        {"padding": 8},
        {"heads": 2, "kv_heads": 1, "tokens": 1, "prefix": 1, "head_dim": 512},
        {"batch": 2, "heads": 40, "kv_heads": 40, "tokens": 1, "head_dim": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("sources", ["", "kv"])
def test_shapes_and_strides(sizes, sources):
    """No prefix, no tokens, other head counts, padded tokens, forty heads (S9)."""

    inputs = make_pack(
        **{**SMALL, "head_dim": 8, "dtype": torch.float16, **sizes}, sources=sources
    )
    expected = inputs.expected(reference.qk_norm_rope_pack_)
    actual = qk_norm_rope_pack_(*inputs.arguments())

    for one, other in zip(actual, expected, strict=True):
        assert reference.rotation_error(one, other) <= 1

    inputs.assert_canaries()


@pytest.mark.parametrize("heads_per_program", [1, 4, 16])
def test_launch_choices_change_no_bit(launch_as, heads_per_program):
    """Sixteen heads of q and four of K, however many a program owns (L10)."""

    shape = {"tokens": 1, "prefix": 1, "heads": 16, "kv_heads": 4, "head_dim": 16}
    inputs = make_pack(**shape, dtype=torch.float32)
    expected = make_pack(**shape, dtype=torch.float32)
    qk_norm_rope_pack_(*expected.arguments())
    launch_as(heads_per_program, max(heads_per_program // 4, 1))
    qk_norm_rope_pack_(*inputs.arguments())

    assert_all_equal_bits(inputs.written(), expected.written())


@pytest.mark.parametrize("heads, kv_heads", [(1, 3), (3, 1)])
def test_every_head_has_a_program(launch_as, heads, kv_heads):
    """Where K has more blocks of heads than q, or fewer."""

    launch_as(1, 1)
    inputs = make_pack(
        tokens=1,
        prefix=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        dtype=torch.float16,
    )
    expected = inputs.expected(reference.qk_norm_rope_pack_)
    actual = qk_norm_rope_pack_(*inputs.arguments())

    for one, other in zip(actual, expected, strict=True):
        assert reference.rotation_error(one, other) <= 1

    inputs.assert_canaries()


@pytest.mark.parametrize("kept", ["k", "v"])
def test_a_prefix_is_copied_where_the_other_lies_in_place(kept):
    """Only where both are in place is there nothing to copy."""

    inputs = make_pack(tokens=1, prefix=1, heads=1, kv_heads=1, head_dim=8)
    setattr(inputs, f"{kept}_prefix", getattr(inputs, f"{kept}_out")[:, :1])
    expected = [inputs.k_prefix.clone(), inputs.v_prefix.clone()]
    _, k_out, v_out = qk_norm_rope_pack_(*inputs.arguments())

    assert_all_equal_bits([k_out[:, :1], v_out[:, :1]], expected)


def test_packed_views_and_kept_prefixes():
    """Views of one tensor; prefixes, K and V that lie in place already (L7)."""

    buffer = torch.randn(1, 5, 3, 2, 8)
    q, k_out, v_out = buffer[:, 2:, 0], buffer[:, :, 1], buffer[:, :, 2]
    inputs = make_pack(
        tokens=3, prefix=2, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32
    )
    others = inputs.arguments()[3:6]
    variants = {
        "prefix copied": (inputs.k_prefix, inputs.v_prefix, None, None),
        "prefixes kept": (k_out[:, :2], v_out[:, :2], None, None),
        "one prefix kept": (k_out[:, :2], inputs.v_prefix, None, None),
        "all in place": (k_out[:, :2], v_out[:, :2], k_out[:, 2:], v_out[:, 2:]),
    }

    for name, sources in variants.items():
        old = buffer.clone()
        copies = [one.clone() for one in (q, k_out, v_out)]
        copied_sources = [None if one is None else one.clone() for one in sources]
        qk_norm_rope_pack_(*copies, *others, *copied_sources)
        qk_norm_rope_pack_(q, k_out, v_out, *others, *sources)

        assert_all_equal_bits([q, k_out, v_out], copies)
        assert torch.equal(buffer[:, :2, 0], old[:, :2, 0]), name


def test_any_strides_of_a_single_tensor():
    """Transposed, expanded and column-sliced inputs, a strided weight, an own output."""

    base = torch.randn(3, 2, 3, 8)
    rope, weight = make_rope(3, 8), torch.randn(16)[::2]

    for heads in (
        base.transpose(0, 1),
        base[:, :1].transpose(0, 1).expand(2, -1, -1, -1),
        torch.randn(2, 3, 70)[..., 7:31].unflatten(-1, (3, 8)),
    ):
        expected = qk_norm_rope(heads.contiguous(), weight.contiguous(), rope)
        result = qk_norm_rope(heads, weight, rope)
        out = torch.full((2, 3, 30), 7.5)
        view = out[..., :24].unflatten(-1, (3, 8))

        assert result.is_contiguous()
        assert qk_norm_rope(heads, weight, rope, out=view) is view
        assert_all_equal_bits([result, view], [expected, expected])
        assert (out[..., 24:] == 7.5).all()

    in_place = base.transpose(0, 1)
    expected = qk_norm_rope(in_place, weight, rope)

    assert_equal_bits(qk_norm_rope(in_place, weight, rope, out=in_place), expected)


@pytest.mark.parametrize(
    "batch, prefix, tokens, sources", [(3, 1, 5, ""), (2, 7, 4, "kv"), (1, 0, 9, "kv")]
)
def test_a_call_that_is_cut_equals_one_that_is_not(
    monkeypatch, batch, prefix, tokens, sources
):
    """Offsets that must stay below 64 elements instead of 2^31 (S4, S6)."""

    shape = {
        "batch": batch,
        "prefix": prefix,
        "tokens": tokens,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": torch.float16,
        "sources": sources,
    }
    whole, cut = make_pack(**shape), make_pack(**shape)
    qk_norm_rope_pack_(*whole.arguments())
    single = qk_norm_rope(whole.q, whole.q_weight, whole.rope)
    launches = []
    launch = _qk_norm_rope_pack.launch

    def counting_launch(handle, device, *arguments):
        for tensor in arguments[:-1]:
            last = sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            assert tensor.numel() == 0 or last < 64

        launches.append(handle)
        launch(handle, device, *arguments)

    plan = chunks_module.plan_chunks
    for module in (_qk_norm_rope, _qk_norm_rope_pack):
        monkeypatch.setattr(module, "plan_chunks", lambda *call: plan(*call, 63))
        monkeypatch.setattr(module, "launch", counting_launch)

    forget_layouts()
    qk_norm_rope_pack_(*cut.arguments())

    assert len(launches) > 1
    assert_all_equal_bits(cut.written(), whole.written())
    cut.assert_canaries()

    launches.clear()

    assert_equal_bits(qk_norm_rope(whole.q, whole.q_weight, whole.rope), single)
    assert len(launches) > 1
    forget_layouts()


def test_one_launch_whatever_the_mode(monkeypatch):
    """Q, K, V and both prefixes are one launch."""

    launches = []
    launch = _qk_norm_rope_pack.launch
    monkeypatch.setattr(
        _qk_norm_rope_pack,
        "launch",
        lambda *call: (launches.append(call), launch(*call)),
    )

    for sources in ("", "k", "v", "kv"):
        launches.clear()
        inputs = make_pack(**SMALL, sources=sources, dtype=torch.float16)
        qk_norm_rope_pack_(*inputs.arguments())

        assert len(launches) == 1

    launches.clear()
    inputs = make_pack(**{**SMALL, "prefix": 0, "tokens": 0})
    qk_norm_rope_pack_(*inputs.arguments())

    assert not launches


def test_an_empty_table_of_any_stride():
    """Prefixes are copied, and no view of what is not there is asked for."""

    inputs = make_pack(**{**SMALL, "prefix": 1, "tokens": 0}, dtype=torch.float32)
    inputs.rope = torch.empty(0, 2 * inputs.rope.shape[1], dtype=torch.complex64)[
        :, ::2
    ]
    qk_norm_rope_pack_(*inputs.arguments())

    assert_all_equal_bits(
        [inputs.k_out, inputs.v_out], [inputs.k_prefix, inputs.v_prefix]
    )


def test_special_values():
    """Signs of zero, subnormals, infinities, NaN: each head for itself (X5, X11, X12)."""

    heads = torch.randn(1, 1, 7, 8)
    heads[0, 0, 0] = 0.0
    heads[0, 0, 1] = torch.tensor([-0.0, 0.0] * 4)
    heads[0, 0, 2] = torch.tensor([0.0, -0.0] * 4)
    heads[0, 0, 3] = 0.0
    heads[0, 0, 3, 2] = 1e-39
    heads[0, 0, 4, 3] = float("inf")
    heads[0, 0, 5, 1] = float("nan")
    rope = torch.ones(1, 4, dtype=torch.complex64)
    weight = torch.ones(8)
    actual = qk_norm_rope(heads, weight, rope)
    expected = reference.qk_norm_rope(heads, weight, rope)
    is_nan = expected.isnan()

    assert torch.equal(actual.isnan(), is_nan)
    # The subnormal is not flushed: times 1000 it is a normal number.
    assert actual[0, 0, 3, 2] > 0
    assert_equal_bits(actual[:, :, :4], expected[:, :, :4])
    assert is_nan[0, 0, 5].all() and not is_nan[0, 0, 6].any()
    torch.testing.assert_close(actual[:, :, 6], expected[:, :, 6])

    without_eps = qk_norm_rope(heads, weight, rope, eps=0.0)

    assert without_eps[0, 0, 0].isnan().all()
    assert not without_eps[0, 0, 6].isnan().any()


def test_the_same_call_gives_the_same_bits():
    """Twice from the same contents."""

    first, second = make_pack(**SMALL), make_pack(**SMALL)
    qk_norm_rope_pack_(*first.arguments())
    qk_norm_rope_pack_(*second.arguments())

    assert_all_equal_bits(first.written(), second.written())


def test_the_interpreter_promises_no_equality():
    """The operators say so, and use the likeliest order."""

    rounding = _qk_norm_rope.eager_roundings.get(
        torch.device("cpu"), torch.bfloat16, 128
    )

    assert not rounding.is_reproduced
    assert rounding.order(100) == ("vectors", "decreasing")


def _negated_after(ordinary):
    """A float16 view of -1, negated lazily, and the view of 1 that has its layout."""

    values = torch.complex(ordinary, ordinary).to(torch.complex32)

    return values.conj().imag, values.imag


def test_a_lazily_negated_weight_is_refused_whatever_came_before():
    """The negative bit is no part of a layout: it is looked at in every call."""

    width = 16
    input = torch.randn(1, 3, 2, width).half()
    rope = torch.ones(3, width // 2, dtype=torch.complex64)
    negated, ordinary = _negated_after(torch.ones(width))
    qk_norm_rope(input, ordinary, rope)

    with pytest.raises(ValueError, match="`weight`.*resolve_neg"):
        qk_norm_rope(input, negated, rope)


def test_a_lazily_negated_prefix_is_refused_whatever_came_before():
    """Likewise for what is copied."""

    def arguments(k_prefix):
        heads = torch.ones(1, 1, 2, 16).half()
        weight = torch.ones(16).half()
        rope = torch.ones(1, 8, dtype=torch.complex64)
        k_out, v_out = (torch.zeros(1, 2, 2, 16).half() for _ in range(2))

        return heads, k_out, v_out, weight, weight, rope, k_prefix, heads.clone()

    shape, strides = (1, 1, 2, 16), (32, 32, 16, 1)
    values = torch.ones(64).half().view(torch.complex32)
    qk_norm_rope_pack_(*arguments(values.imag.as_strided(shape, strides)))
    negated = arguments(values.conj().imag.as_strided(shape, strides))

    with pytest.raises(ValueError, match="`k_prefix`.*resolve_neg"):
        qk_norm_rope_pack_(*negated)

    assert not negated[1].any()


def test_a_weight_whose_offsets_pass_32_bits():
    """A weight may have any stride."""

    width, stride = 128, 2**25
    memory = reserve(width * stride)
    weight = memory.view(width, stride)[:, 0]
    weight.copy_(torch.arange(1, width + 1))
    input = torch.ones(1, 1, 1, width).half()
    rope = torch.ones(1, width // 2, dtype=torch.complex64)

    assert_equal_bits(
        qk_norm_rope(input, weight, rope), qk_norm_rope(input, weight.clone(), rope)
    )


@pytest.mark.parametrize("order", _eager.candidate_orders(2**18), ids=str)
def test_the_widest_heads(order, round_as):
    """They are held whole, and no order of additions has too few steps."""

    round_as(order)
    width = 2**18
    heads = torch.randn((1, 2, 1, width), generator=torch.Generator().manual_seed(0))
    weight = torch.ones(width)
    table = torch.polar(torch.ones(2, width // 2), torch.ones(2, width // 2))

    torch.testing.assert_close(
        qk_norm_rope(heads, weight, table), reference.qk_norm_rope(heads, weight, table)
    )

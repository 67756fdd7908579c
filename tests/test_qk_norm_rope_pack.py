"""`qk_norm_rope` and `qk_norm_rope_pack_` without a kernel: the definition, the refusals."""

import doctest
import math
import sys

import pytest
import torch
from comparison import assert_all_equal_bits, assert_equal_bits, bits
from qk_norm_rope_behaviour import *  # noqa: F403
from rope_inputs import make_pack, make_rope

from ntops_ext import reference
from ntops_ext.torch import (
    _layouts,
    _qk_norm_rope_pack,
    eager_rounding,
    qk_norm_rope,
    qk_norm_rope_pack_,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SOURCES = ["", "k", "v", "kv"]


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def clone_all(inputs):
    return [None if one is None else one.clone() for one in inputs.arguments()]


# -- The definition. --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 64, 96, 128, 512])
def test_definition_rounds_where_it_says(dtype, head_dim):
    """Within one rounding of a float64 chain that rounds at the same three points."""

    inputs = make_pack(head_dim=head_dim, dtype=dtype, tokens=9)
    actual = reference.qk_norm_rope(inputs.q, inputs.q_weight, inputs.rope)
    expected = reference.qk_norm_rope_in_float64(inputs.q, inputs.q_weight, inputs.rope)

    assert actual.dtype == dtype
    assert reference.rotation_error(actual, expected) <= (
        8 if dtype == torch.float32 else 1
    )
    # The three roundings are few enough that most elements agree to the bit.
    if dtype != torch.float32:
        assert (actual == expected).float().mean() > 0.99


def test_definition_rotates_pairs_of_neighbours():
    """A quarter turn makes (re, im) into (-im, re)."""

    heads = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    turned = qk_norm_rope(heads, torch.ones(4), torch.full((1, 2), 1j), eps=0.0)
    scale = 1 / math.sqrt(30 / 4)

    torch.testing.assert_close(
        turned.flatten(), scale * torch.tensor([-2.0, 1.0, -4.0, 3.0])
    )


def test_eps_is_inside_the_root():
    """A row of rms 1e-3 with eps 1e-6 keeps 1/sqrt(2) of its unit length."""

    heads = torch.full((1, 1, 1, 128), 1e-3)
    rope = torch.ones(1, 64, dtype=torch.complex64)
    result = qk_norm_rope(heads, torch.ones(128), rope, eps=1e-6)

    torch.testing.assert_close(result, torch.full_like(result, math.sqrt(0.5)))


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("prefix, tokens", [(5, 7), (0, 7), (5, 0), (0, 0)])
def test_pack_writes_its_rows_and_nothing_else(sources, prefix, tokens):
    """Every row comes from where it should; V stays where no source is given."""

    inputs = make_pack(prefix=prefix, tokens=tokens, sources=sources, kv_heads=2)
    old = clone_all(inputs)
    returned = qk_norm_rope_pack_(*inputs.arguments())

    assert all(
        one is other for one, other in zip(returned, inputs.written(), strict=True)
    )

    k_src = inputs.k_src if "k" in sources else old[1][:, prefix:]
    v_src = inputs.v_src if "v" in sources else old[2][:, prefix:]
    assert_all_equal_bits(
        [
            inputs.q,
            inputs.k_out[:, :prefix],
            inputs.k_out[:, prefix:],
            inputs.v_out[:, :prefix],
            inputs.v_out[:, prefix:],
        ],
        [
            reference.qk_norm_rope(old[0], inputs.q_weight, inputs.rope),
            inputs.k_prefix,
            reference.qk_norm_rope(k_src, inputs.k_weight, inputs.rope),
            inputs.v_prefix,
            v_src,
        ],
    )
    inputs.assert_canaries()


def test_pack_takes_views_of_one_packed_tensor():
    """q, K and V of one `(B, P + S, 3, H, D)` tensor are written in place (L7)."""

    inputs = make_pack(sources="")
    buffer = torch.randn(1, 38, 3, 8, 128).to(torch.bfloat16)
    old = buffer.clone()
    q, k_out, v_out = buffer[:, 5:, 0], buffer[:, :, 1], buffer[:, :, 2]
    expected = [q.clone(), k_out.clone(), v_out.clone()]
    qk_norm_rope_pack_(*expected, *inputs.arguments()[3:])
    qk_norm_rope_pack_(q, k_out, v_out, *inputs.arguments()[3:])

    assert_all_equal_bits([q, k_out, v_out], expected)
    assert_equal_bits(buffer[:, :5, 0], old[:, :5, 0])


def test_pack_takes_the_buffers_own_rows():
    """A prefix, K or V that is in place already is as good as a copy of it."""

    inputs = make_pack(sources="kv")
    arguments = clone_all(inputs)
    k_out, v_out = arguments[1:3]
    arguments[6:] = k_out[:, :5], v_out[:, :5], k_out[:, 5:], v_out[:, 5:]
    copies = [one.clone() for one in arguments]
    qk_norm_rope_pack_(*copies)
    qk_norm_rope_pack_(*arguments)

    assert_all_equal_bits(arguments[:3], copies[:3])


def test_result_is_contiguous_whatever_the_strides():
    """Transposed, expanded and sliced inputs give new contiguous tensors (C3)."""

    weight, rope = torch.randn(64), make_rope(17, 64)
    base = torch.randn(17, 2, 4, 64)

    for heads in (
        base.transpose(0, 1),
        base[:, :1].transpose(0, 1).expand(3, -1, -1, -1),
        torch.randn(2, 17, 700)[..., 5:261].unflatten(-1, (4, 64)),
    ):
        result = qk_norm_rope(heads, weight, rope)

        assert result.is_contiguous()
        assert_equal_bits(result, qk_norm_rope(heads.contiguous(), weight, rope))


def test_out_may_be_the_input():
    """`out=input` is exactly in place; `out` is what is returned."""

    heads, weight, rope = torch.randn(1, 5, 2, 8), torch.randn(8), make_rope(5, 8)
    expected = qk_norm_rope(heads, weight, rope)
    other = torch.empty_like(heads)

    assert qk_norm_rope(heads, weight, rope, out=other) is other
    assert qk_norm_rope(heads, weight, rope, out=heads) is heads
    assert_all_equal_bits([other, heads], [expected, expected])


def test_stride_of_a_single_head_is_meaningless():
    """One head of K, whatever its head stride says (L6)."""

    inputs = make_pack(kv_heads=1, head_dim=64, heads=4, padding=24)
    expected = inputs.expected(reference.qk_norm_rope_pack_)
    arguments = inputs.arguments()
    arguments[1] = inputs.k_out.as_strided(
        inputs.k_out.shape,
        (*inputs.k_out.stride()[:2], 999, 1),
        inputs.k_out.storage_offset(),
    )
    actual = qk_norm_rope_pack_(*arguments)

    assert_all_equal_bits(actual, expected)
    inputs.assert_canaries()


def test_parts_of_a_sequence_equal_the_whole():
    """Tokens computed with their own rows of the table, in any company (L15)."""

    heads, weight = torch.randn(1, 8, 3, 64), torch.randn(64)
    rope = make_rope(8, 64)
    whole = qk_norm_rope(heads, weight, rope)

    for tokens in ([0, 3, 4, 7], [1, 2, 5, 6]):
        part = qk_norm_rope(heads[:, tokens], weight, rope[tokens])

        assert_equal_bits(part, whole[:, tokens])


def test_empty_calls_write_nothing():
    """B = 0, no tokens and no heads are calls like others (E2)."""

    for sizes in ({"batch": 0}, {"prefix": 0, "tokens": 0}):
        inputs = make_pack(**sizes)
        old = clone_all(inputs)

        assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments()), old[:3])

    empty = qk_norm_rope(torch.empty(2, 0, 3, 8), torch.ones(8), make_rope(0, 8))

    assert empty.shape == (2, 0, 3, 8)
    assert qk_norm_rope(
        torch.empty(1, 2, 0, 8), torch.ones(8), make_rope(2, 8)
    ).shape == (
        1,
        2,
        0,
        8,
    )


def test_positional_order_is_that_of_the_published_operator():
    """q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src, eps."""

    by_position, by_name = make_pack(), make_pack()
    names = [
        "q",
        "k_out",
        "v_out",
        "q_weight",
        "k_weight",
        "rope",
        "k_prefix",
        "v_prefix",
        "k_src",
        "v_src",
    ]
    qk_norm_rope_pack_(*by_position.arguments(), 1e-3)
    qk_norm_rope_pack_(**dict(zip(names, by_name.arguments(), strict=True)), eps=1e-3)

    assert_all_equal_bits(by_position.written(), by_name.written())


# -- Autograd. --------------------------------------------------------------------------


def test_gradients_of_the_pack_are_refused_not_dropped():
    """An argument that requires a gradient raises, and the message says what to use."""

    inputs = make_pack(dtype=torch.float32)
    inputs.q_weight.requires_grad_()
    old = clone_all(inputs)

    with torch.enable_grad():
        with pytest.raises(NotImplementedError, match="qk_norm_rope` and `torch.cat"):
            qk_norm_rope_pack_(*inputs.arguments())

    assert_all_equal_bits(inputs.written(), old[:3])
    qk_norm_rope_pack_(*inputs.arguments())


def test_gradients_that_there_are_not_are_refused():
    """That of the table, and any through `out`."""

    inputs = make_pack(dtype=torch.float32)
    old = inputs.q.clone()
    rope = inputs.rope.clone().requires_grad_()
    weight = inputs.q_weight.clone().requires_grad_()

    with torch.enable_grad():
        with pytest.raises(NotImplementedError, match="`rope` requires grad.*detach"):
            qk_norm_rope(inputs.q, inputs.q_weight, rope)

        with pytest.raises(ValueError, match="`out`.*gradients"):
            qk_norm_rope(inputs.q, weight, inputs.rope, out=inputs.q)

    assert_equal_bits(inputs.q, old)
    qk_norm_rope(inputs.q, weight, rope, out=inputs.q)


def test_autograd_notices_what_was_written():
    """A value saved for a backward pass and then packed over is reported, not used."""

    inputs = make_pack(dtype=torch.float32)
    factor = torch.ones_like(inputs.q, requires_grad=True)

    with torch.enable_grad():
        product = factor * inputs.q
        qk_norm_rope_pack_(*inputs.arguments())

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_inference_mode_works():
    """Inference tensors, which count no versions, are written as others are."""

    with torch.inference_mode():
        inputs = make_pack()
        expected = inputs.expected(reference.qk_norm_rope_pack_)

        assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments()), expected)


# -- Refusals. --------------------------------------------------------------------------


def replaced(name, change):
    def apply(inputs):
        setattr(inputs, name, change(getattr(inputs, name)))

    return apply


def wide_heads(tensor):
    return tensor.repeat(1, 1, 1, 2)[..., : tensor.shape[3]]


def share(name, make):
    """The argument becomes a view of another."""

    def apply(inputs):
        setattr(inputs, name, make(inputs))

    return apply


REFUSALS = {
    "q-list": (replaced("q", lambda q: q.tolist()), TypeError, "`q`.*list"),
    "rope-none": (replaced("rope", lambda rope: None), TypeError, "`rope`.*NoneType"),
    "v_prefix-sparse": (
        replaced("v_prefix", lambda one: one.to_sparse()),
        TypeError,
        "`v_prefix`.*sparse",
    ),
    "q-int8": (replaced("q", lambda q: q.to(torch.int8)), TypeError, "`q`.*int8"),
    "q-float64": (replaced("q", lambda q: q.double()), TypeError, "`q`.*float64"),
    "q-fp8": (
        replaced("q", lambda q: q.to(torch.float8_e4m3fn)),
        TypeError,
        "`q`.*float8",
    ),
    "weight-float64": (
        replaced("k_weight", lambda one: one.double()),
        TypeError,
        "`k_weight`.*float64",
    ),
    "weight-float32": (
        replaced("q_weight", lambda one: one.float()),
        TypeError,
        "`q_weight`.*bfloat16.*float32",
    ),
    "weight-float16": (
        replaced("q_weight", lambda one: one.half()),
        TypeError,
        "`q_weight`.*float16",
    ),
    "k_prefix-int8": (
        replaced("k_prefix", lambda one: one.to(torch.int8)),
        TypeError,
        "`k_prefix`.*int8",
    ),
    "k_out-float16": (
        replaced("k_out", lambda one: one.half()),
        TypeError,
        "`k_out`.*float16",
    ),
    "rope-real-bfloat16": (
        replaced("rope", lambda one: torch.view_as_real(one).flatten(1).bfloat16()),
        TypeError,
        "`rope`.*complex64.*bfloat16",
    ),
    "rope-complex128": (
        replaced("rope", lambda one: one.to(torch.complex128)),
        TypeError,
        "`rope`.*complex64.*complex128",
    ),
    "rope-complex32": (
        replaced(
            "rope",
            lambda one: one.to(torch.complex32),
        ),
        TypeError,
        "`rope`.*complex64.*(complex32|ComplexHalf)",
    ),
    "rope-conj": (replaced("rope", torch.conj), ValueError, "`rope`.*resolve_conj"),
    "rope-half-width": (
        replaced("rope", lambda one: one[:, :32]),
        ValueError,
        r"`rope`.*\(33, 64\).*\(33, 32\)",
    ),
    "rope-short": (
        replaced("rope", lambda one: one[:-1]),
        ValueError,
        r"`rope`.*\(33, 64\).*\(32, 64\)",
    ),
    "rope-long": (
        replaced("rope", lambda one: one.repeat(3, 1)),
        ValueError,
        r"`rope`.*\(33, 64\).*\(99, 64\)",
    ),
    "rope-three-axes": (
        replaced("rope", lambda one: one.expand(3, -1, -1)),
        ValueError,
        "`rope`.*two dimensions",
    ),
    "rope-rank-three": (
        replaced("rope", lambda one: one[:, None]),
        ValueError,
        "`rope`.*two dimensions",
    ),
    "rope-columns": (
        replaced("rope", lambda one: one.t().contiguous().t()),
        ValueError,
        "`rope`.*dense rows",
    ),
    "q-rank": (replaced("q", lambda q: q[0]), ValueError, "`q`.*four dimensions"),
    "q-wide-heads": (replaced("q", wide_heads), ValueError, "`q`.*densely.*strides"),
    "k_out-packed-with-v": (
        # K and V beside one another in the width of a cache.
        replaced("k_out", lambda one: torch.cat([one, one], 3)[..., :128]),
        ValueError,
        "`k_out`.*densely.*strides",
    ),
    "k_src-wide-heads": (
        replaced("k_src", wide_heads),
        ValueError,
        "`k_src`.*densely.*strides",
    ),
    "q-transposed-width": (
        replaced("q", lambda q: q.transpose(2, 3).contiguous().transpose(2, 3)),
        ValueError,
        "`q`.*densely",
    ),
    "weight-short": (
        replaced("q_weight", lambda one: one[:64]),
        ValueError,
        r"`q_weight`.*\(128,\).*\(64,\)",
    ),
    "k_prefix-batch": (
        replaced("k_prefix", lambda one: one.repeat(2, 1, 1, 1)),
        ValueError,
        r"`k_prefix`.*\(1, 5, 8, 128\).*\(2, 5, 8, 128\)",
    ),
    "v_prefix-short": (
        replaced("v_prefix", lambda one: one[:, :4]),
        ValueError,
        r"`v_prefix`.*\(1, 5, 8, 128\).*\(1, 4, 8, 128\)",
    ),
    "k_out-short": (
        replaced("k_out", lambda one: one[:, 1:]),
        ValueError,
        r"`k_out`.*\(1, 38, 8, 128\).*\(1, 37, 8, 128\)",
    ),
    "v_out-heads": (
        replaced("v_out", lambda one: one[:, :, :4]),
        ValueError,
        "`v_out`.*(1, 38, 8, 128)",
    ),
    "v_src-tokens": (
        replaced("v_src", lambda one: one[:, 1:]),
        ValueError,
        "`v_src`.*(1, 33, 8, 128)",
    ),
    "q-expanded": (
        replaced("q", lambda q: q[:, :1].expand(-1, 33, -1, -1)),
        ValueError,
        "`q`.*no two of its elements",
    ),
    "k_out-expanded": (
        replaced("k_out", lambda one: one[:, :1].expand(-1, 38, -1, -1)),
        ValueError,
        "`k_out`.*no two of its elements",
    ),
    "device": (
        replaced("k_weight", lambda one: one.to("meta")),
        ValueError,
        "`k_weight`.*cpu.*meta",
    ),
    "q-is-k_out": (
        share("q", lambda inputs: inputs.k_out[:, 5:]),
        ValueError,
        "`q`.*`k_out`",
    ),
    "k_out-is-v_out": (
        share("v_out", lambda inputs: inputs.k_out),
        ValueError,
        "`k_out`.*`v_out`",
    ),
    "k_src-is-q": (share("k_src", lambda inputs: inputs.q), ValueError, "`q`.*`k_src`"),
    "prefix-shifted": (
        share("k_prefix", lambda inputs: inputs.k_out[:, 1:6]),
        ValueError,
        "`k_out`.*`k_prefix`.*own rows",
    ),
    "prefix-of-the-other": (
        share("v_prefix", lambda inputs: inputs.k_out[:, :5]),
        ValueError,
        "`k_out`.*`v_prefix`",
    ),
    "k_src-shifted": (
        share("k_src", lambda inputs: inputs.k_out[:, 4:37]),
        ValueError,
        "`k_out`.*`k_src`.*own rows",
    ),
    "weight-inside-q": (
        share("q_weight", lambda inputs: inputs.q[0, 0, 0]),
        ValueError,
        "`q`.*`q_weight`",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_pack_refuses_before_it_writes(name):
    """The error names the argument, what it got and what it needs; no bit has changed."""

    change, error, message = REFUSALS[name]
    inputs = make_pack()
    old = [buffer.clone() for buffer, _ in inputs.guarded.values()]
    change(inputs)

    with pytest.raises(error, match=message):
        qk_norm_rope_pack_(*inputs.arguments())

    assert_all_equal_bits([buffer for buffer, _ in inputs.guarded.values()], old)


@pytest.mark.parametrize(
    "eps, error",
    [
        (None, TypeError),
        ("1e-6", TypeError),
        (True, TypeError),
        (torch.tensor(1e-6), TypeError),
        (-1e-6, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
    ],
    ids=str,
)
def test_eps_must_be_a_number(eps, error):
    """A wrong eps is refused by both operators, before anything is written."""

    inputs = make_pack()
    old = clone_all(inputs)

    with pytest.raises(error, match="`eps`"):
        qk_norm_rope_pack_(*inputs.arguments(), eps)

    with pytest.raises(error, match="`eps`"):
        qk_norm_rope(inputs.q, inputs.q_weight, inputs.rope, eps=eps)

    assert_all_equal_bits(inputs.written(), old[:3])


def test_a_warm_layout_is_checked_for_what_it_does_not_hold():
    """Lazy views, gradients and addresses are looked at in every call of a layout."""

    inputs = make_pack()
    qk_norm_rope_pack_(*inputs.arguments())
    old = clone_all(inputs)
    arguments = inputs.arguments()

    lazy = list(arguments)
    lazy[5] = inputs.rope.conj()
    shifted = list(arguments)
    shifted[8] = inputs.k_out[:, 4:37]
    shared = list(arguments)
    shared[3] = inputs.q[0, 0, 0]

    for wrong in (lazy, shifted, shared):
        with pytest.raises(ValueError):
            qk_norm_rope_pack_(*wrong)

    assert_all_equal_bits(inputs.written(), old[:3])


def test_a_warm_out_is_checked_for_its_address():
    """An output of a known layout that overlaps its input at a shift is refused."""

    base = torch.randn(1, 5, 2, 4)
    heads, weight, rope = base[:, :4], torch.ones(4), make_rope(4, 4)
    qk_norm_rope(heads, weight, rope, out=torch.empty_like(heads))
    old = base.clone()

    with pytest.raises(ValueError, match="`out`.*`input`.*overlaps"):
        qk_norm_rope(heads, weight, rope, out=base[:, 1:])

    assert_equal_bits(base, old)


def test_what_is_remembered_is_bounded(monkeypatch):
    """Many layouts are all checked, and not all kept."""

    monkeypatch.setattr(_layouts, "_MAX_REMEMBERED", 4)
    _qk_norm_rope_pack.layouts.clear()

    for tokens in range(1, 12):
        inputs = make_pack(tokens=tokens, head_dim=2)
        expected = inputs.expected(reference.qk_norm_rope_pack_)

        assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments()), expected)
        assert len(_qk_norm_rope_pack.layouts._kept) <= 4

    _qk_norm_rope_pack.layouts.clear()


def test_addresses_are_bounded_over_all_layouts(monkeypatch):
    """A few addresses for each of many layouts are many; calls with forgotten ones are checked anew."""

    monkeypatch.setattr(_layouts, "_MAX_ADDRESSES", 7)
    _qk_norm_rope_pack.layouts.clear()
    kept = [make_pack(tokens=tokens, head_dim=2) for tokens in (1, 2, 3) * 4]

    for inputs in kept * 2:
        expected = inputs.expected(reference.qk_norm_rope_pack_)

        assert_all_equal_bits(qk_norm_rope_pack_(*inputs.arguments()), expected)

        found = [
            len(layout.verdicts) for layout in _qk_norm_rope_pack.layouts._kept.values()
        ]

        assert 1 <= sum(found) <= 7

    _qk_norm_rope_pack.layouts.clear()


@pytest.mark.parametrize("shape", [(1, 2, 3, 7), (1, 2, 3, 0)])
def test_heads_must_have_pairs(shape):
    """An odd or empty width is refused."""

    with pytest.raises(ValueError, match="`input`.*even"):
        qk_norm_rope(torch.ones(shape), torch.ones(shape[3]), make_rope(2, 6))


def test_heads_that_kernels_cannot_hold_are_refused():
    """Wherever they lie, and whatever asks for them."""

    width = 2**18 + 2
    heads, weight = torch.ones(1, 1, 1, width), torch.ones(width)
    table = torch.ones(1, width // 2, dtype=torch.complex64)

    with pytest.raises(ValueError, match="`input`.*262144.*262146"):
        qk_norm_rope(heads, weight, table)

    with pytest.raises(ValueError, match="`q`.*262144.*262146"):
        qk_norm_rope_pack_(
            *(heads.clone() for _ in range(3)),
            *(weight, weight, table),
            *(heads[:, :0] for _ in range(2)),
        )

    with pytest.raises(ValueError, match="`head_dim`.*262144.*262146"):
        eager_rounding(head_dim=width, device="cpu")


@pytest.mark.parametrize(
    "make_out, error, message",
    [
        (lambda heads: heads.half(), TypeError, "`out`.*float32.*float16"),
        (lambda heads: heads[:, 1:], ValueError, "`out`.*shape of `input`"),
        (lambda heads: heads[:, :1].expand_as(heads), ValueError, "`out`.*no two"),
        (lambda heads: wide_heads(heads), ValueError, "`out`.*densely"),
        (lambda heads: heads.tolist(), TypeError, "`out`.*list"),
        (
            lambda heads: heads.as_strided(heads.shape, heads.stride(), 2),
            ValueError,
            "`out`.*`input`.*overlaps",
        ),
    ],
    ids=["dtype", "shape", "expanded", "wide", "list", "shifted"],
)
def test_out_is_refused_before_it_is_written(make_out, error, message):
    """What cannot be filled, or is read at a shift, is refused."""

    base = torch.randn(1, 5, 2, 4)
    heads, old = base[:, :4], base.clone()

    with pytest.raises(error, match=message):
        qk_norm_rope(heads, torch.ones(4), make_rope(4, 4), out=make_out(heads))

    assert_equal_bits(base, old)


def test_rows_of_zeros():
    """eps keeps a head of zeros zero; without it that head alone is NaN (X5)."""

    heads, rope = torch.randn(1, 1, 3, 8), torch.ones(1, 4, dtype=torch.complex64)
    heads[:, :, 1] = 0
    with_eps = qk_norm_rope(heads, torch.ones(8), rope)
    without = qk_norm_rope(heads, torch.ones(8), rope, eps=0.0)

    assert (bits(with_eps[:, :, 1]) == 0).all()
    assert without[:, :, 1].isnan().all()
    assert not without[:, :, [0, 2]].isnan().any()


# -- Examples. --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["eager_rounding", "qk_norm_rope", "qk_norm_rope_pack_"]
)
def test_examples_of_docstrings(name):
    """The examples give what they show."""

    results = doctest.testmod(sys.modules[f"ntops_ext.torch.{name}"])

    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("position", range(3))
def test_an_inference_tensor_is_refused_before_anything_is_written(position):
    """PyTorch would refuse the one, and have written the others."""

    written = [torch.ones(1, 1, 1, 2) for _ in range(3)]

    with torch.inference_mode():
        written[position] = written[position].clone()

    weight, rope = torch.ones(2), torch.full((1, 1), 1j)
    prefix = torch.zeros(1, 0, 1, 2)

    with pytest.raises(ValueError, match="inference tensor"):
        qk_norm_rope_pack_(*written, weight, weight, rope, prefix, prefix)

    for tensor in written:
        assert torch.equal(tensor, torch.ones(1, 1, 1, 2))


def test_an_eps_beyond_every_float_is_refused():
    """It is not finite as a float."""

    heads, rope = torch.ones(1, 1, 1, 2), torch.full((1, 1), 1j)

    with pytest.raises(ValueError, match="`eps`"):
        qk_norm_rope(heads, torch.ones(2), rope, eps=10**400)


def test_a_tangent_is_refused():
    """Forward-mode derivatives are no more dropped silently than backward ones."""

    heads, rope = torch.ones(1, 1, 1, 2), torch.full((1, 1), 1j)
    weight, prefix = torch.ones(2), torch.zeros(1, 0, 1, 2)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(heads, torch.ones_like(heads))

        with pytest.raises(NotImplementedError, match="gradient"):
            qk_norm_rope(dual, weight, rope)

        with pytest.raises(NotImplementedError, match="gradient"):
            qk_norm_rope_pack_(
                dual, heads.clone(), heads.clone(), weight, weight, rope, prefix, prefix
            )


def test_tokens_that_overlap():
    """Token strides are free: windows over one row of heads are read as they lie."""

    windows = torch.randn(16).as_strided((2, 4, 1, 8), (1, 1, 8, 1))
    weight, rope = torch.randn(8), torch.polar(torch.ones(4, 4), torch.randn(4, 4))
    result = qk_norm_rope(windows, weight, rope)

    assert torch.equal(result, qk_norm_rope(windows.contiguous(), weight, rope))

"""The gradients of `qk_norm_rope` on a CPU: those of the definition; their launches."""

import pytest
import torch
from comparison import assert_all_equal_bits
from hypothesis import given
from hypothesis import strategies as st
from qk_norm_rope_backward_behaviour import backward, make_arguments

from ntops_ext import configs, reference
from ntops_ext.torch import _layouts, _qk_norm_rope, qk_norm_rope


def test_the_definition_is_differentiated():
    """Autograd through the operator and the function behind it agree with the definition."""

    grad_output, input, weight, rope = make_arguments("cpu")
    leaves = [tensor.clone().requires_grad_() for tensor in (input, weight)]
    output = reference.qk_norm_rope(*leaves, rope)
    expected = torch.autograd.grad(output, leaves, grad_output)

    # Written out there: the same numbers in another order.
    for one, other in zip(
        backward((grad_output, input, weight, rope)), expected, strict=True
    ):
        torch.testing.assert_close(one, other)

    assert backward((grad_output, input, weight, rope), needs=(True, False))[1] is None
    assert backward((grad_output, input, weight, rope), needs=(False, True))[0] is None

    output = qk_norm_rope(*leaves, rope)

    assert_all_equal_bits(torch.autograd.grad(output, leaves, grad_output), expected)


def test_the_float64_gradients_are_the_definition_s():
    """The yardstick, by differences of the float32 definition's own gradients."""

    grad_output, input, weight, rope = make_arguments("cpu")
    expected = reference.qk_norm_rope_gradients(grad_output, input, weight, rope)
    tolerances = reference.qk_norm_rope_gradients_tolerance(
        grad_output, input, weight, rope
    )
    actual = backward((grad_output, input, weight, rope))

    for one, other, tolerance in zip(actual, expected, tolerances, strict=True):
        assert ((one.double() - other).abs() <= tolerance).all()
        # It is no tolerance within which anything passes.
        assert (tolerance <= 1e-4 * other.abs().max()).all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda one: one[:, :1], ValueError, "`grad_output` must have the shape"),
        (lambda one: one.half(), TypeError, "`grad_output` must be of the dtype"),
        (lambda one: one.to("meta"), ValueError, "`grad_output` must be on the device"),
        (lambda one: None, TypeError, "`grad_output` must be a tensor"),
    ],
)
def test_a_wrong_gradient_is_refused(change, error, message):
    """The message names it, what it is and what is needed."""

    grad_output, *others = make_arguments("cpu")

    with pytest.raises(error, match=message):
        backward((change(grad_output), *others))


def test_a_call_without_gradients_pays_nothing(monkeypatch):
    """It never comes near the autograd function."""

    def fail(*_):
        raise AssertionError("recorded for autograd")

    monkeypatch.setattr(_qk_norm_rope, "_differentiable", fail)
    monkeypatch.setattr(_layouts, "carries_tangents", fail)
    _, input, weight, rope = make_arguments("cpu")
    qk_norm_rope(input, weight, rope)

    with torch.no_grad():
        qk_norm_rope(input.requires_grad_(), weight, rope)


@pytest.mark.parametrize(
    "batch, tokens, heads, head_dim, item_size, expected",
    [
        (1, 4096, 32, 128, 2, (16, 8, 1)),
        (2, 4096, 32, 128, 2, (16, 8, 1)),
        (1, 512, 32, 128, 2, (2, 8, 1)),
        (1, 1, 1, 128, 2, (1, 1, 1)),
        (1, 65536, 32, 128, 2, (16, 8, 1)),
        (1, 4096, 4, 128, 2, (4, 4, 1)),
        (1, 4096, 32, 128, 4, (16, 4, 1)),
        (1, 2, 1, 2**30, 2, (2, 1, 16)),
    ],
)
def test_choices(batch, tokens, heads, head_dim, item_size, expected):
    """About 1024 programs, of at most 16 tokens, unless partial sums pass 32 bits."""

    config = configs.qk_norm_rope_backward_config(
        batch=batch,
        tokens=tokens,
        num_heads=heads,
        head_dim=head_dim,
        item_size=item_size,
    )

    assert config == configs.QKNormRopeBackwardConfig(
        tokens_per_program=expected[0],
        heads_per_program=expected[1],
        num_warps=expected[2],
        # Heads of 2^30 do not fit in shared memory.
        pipeline_stages=3 if head_dim < 2**20 else 1,
    )


@given(
    batch=st.integers(1, 10**3),
    tokens=st.integers(1, 10**7),
    heads=st.integers(1, 300),
    head_dim=st.integers(1, 3000).map(lambda half: 2 * half),
)
def test_partial_sums_can_be_addressed(batch, tokens, heads, head_dim):
    """In 32 bits, as long as programs can take more tokens: others are added in slabs."""

    config = configs.qk_norm_rope_backward_config(
        batch=batch, tokens=tokens, num_heads=heads, head_dim=head_dim, item_size=2
    )
    runs = -(-tokens // config.tokens_per_program)
    blocks = -(-heads // config.heads_per_program)

    assert runs == 1 or batch * runs * blocks * head_dim <= 2**30


@pytest.mark.parametrize(
    "rows, columns, expected",
    [(1, 128, (16, 4, 8)), (2048, 128, (512, 4, 8)), (100, 2, (128, 2, 8))],
)
def test_choices_of_the_sum(rows, columns, expected):
    """4 columns a program, up to 512 rows a step."""

    assert configs.sum_of_rows_config(rows, columns) == configs.SumOfRowsConfig(
        rows_per_step=expected[0],
        columns_per_program=expected[1],
        num_warps=expected[2],
    )

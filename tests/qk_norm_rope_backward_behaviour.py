"""What the gradients of `qk_norm_rope` promise wherever the kernels run.

A test module imports these tests and defines the fixture `device`.
"""

import pytest
import torch
from comparison import assert_all_equal_bits, assert_equal_bits
from rope_inputs import make_rope

from ntops_ext import configs, reference
from ntops_ext.torch import (
    _launch,
    _partial_sums,
    _qk_norm_rope_backward,
    qk_norm_rope,
)


def make_arguments(
    device, batch=1, tokens=3, heads=2, head_dim=16, dtype=torch.float32, seed=0
):
    """grad_output, input, weight, rope."""

    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, tokens, heads, head_dim)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return (
        randn(*shape),
        randn(*shape),
        randn(head_dim),
        make_rope(tokens, head_dim, device, generator),
    )


def backward(arguments, eps=1e-6, needs=(True, True)):
    return _qk_norm_rope_backward.backward(*arguments, eps, needs)


def check(arguments, eps=1e-6):
    """Both gradients are right; returns them."""

    actual = backward(arguments, eps)
    grad_output, input, weight, rope = arguments
    expected = reference.qk_norm_rope_gradients(*arguments, eps)
    tolerances = reference.qk_norm_rope_gradients_tolerance(*arguments, eps)
    # The interpreter truncates on the way to bfloat16: a rounding of a whole unit.
    is_truncated = input.dtype == torch.bfloat16 and input.device.type == "cpu"

    for name, one, other, tolerance, like in zip(
        ("input", "weight"), actual, expected, tolerances, (input, weight), strict=True
    ):
        assert (one.shape, one.dtype) == (like.shape, like.dtype)
        assert one.is_contiguous()

        errors = (one.double() - other).abs() / ((1 + is_truncated) * tolerance)

        assert errors.numel() == 0 or errors.max() <= 1, (name, errors.max().item())

    return actual


@pytest.fixture
def launch_as(monkeypatch):
    """Let the backward pass launch with a named choice."""

    def choose(tokens_per_program, heads_per_program, num_warps=1):
        config = configs.QKNormRopeBackwardConfig(
            tokens_per_program=tokens_per_program,
            heads_per_program=heads_per_program,
            num_warps=num_warps,
            pipeline_stages=3,
        )
        monkeypatch.setattr(configs, "qk_norm_rope_backward_config", lambda **_: config)
        _qk_norm_rope_backward.layouts.clear()

    yield choose

    _qk_norm_rope_backward.layouts.clear()


@pytest.mark.parametrize(
    "sizes",
    [
        {"dtype": torch.float16, "heads": 3},
        {"dtype": torch.bfloat16, "batch": 2},
        {"head_dim": 128, "tokens": 1, "heads": 1},
        {"head_dim": 96, "tokens": 2},
        {"head_dim": 2},
        {"tokens": 0},
        {"batch": 0},
        {"heads": 0},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_definition(device, sizes):
    """In float32 with one rounding, of any number of tokens and heads, for any even width."""

    check(make_arguments(device, **sizes))


def test_autograd_gives_them(device):
    """Through the graph, beside other uses of the same tensors; only those asked for."""

    grad_output, input, weight, rope = make_arguments(device)
    expected = backward((grad_output, input, weight, rope))
    input.requires_grad_()
    weight.requires_grad_()
    output = qk_norm_rope(input, weight, rope)

    assert output.grad_fn is not None

    (output + input).backward(grad_output)

    assert_equal_bits(input.grad, expected[0] + grad_output)
    assert_equal_bits(weight.grad, expected[1])

    output = qk_norm_rope(input.detach(), weight, rope)

    assert_all_equal_bits(
        torch.autograd.grad(output, weight, grad_output), [expected[1]]
    )

    output = qk_norm_rope(input, weight.detach(), rope)

    assert_all_equal_bits(
        torch.autograd.grad(output, input, grad_output), [expected[0]]
    )


def test_each_alone_has_the_bits_of_both(device):
    """What is not needed is None, and changes nothing of the other.

    Without an `eps` the fourth head of a program, which is not there, has no norm.
    """

    arguments = make_arguments(device, heads=3)
    both = check(arguments, eps=0.0)

    assert backward(arguments, needs=(False, False)) == (None, None)

    of_input, none = backward(arguments, 0.0, needs=(True, False))

    assert none is None

    none, of_weight = backward(arguments, 0.0, needs=(False, True))

    assert none is None
    assert_all_equal_bits((of_input, of_weight), both)


def test_strides_change_no_bit(device):
    """An expanded gradient, a transposed one, columns apart, padded and transposed heads."""

    grad_output, input, weight, rope = make_arguments(device, batch=2, tokens=3)
    grad_output = grad_output[:, :1, :1, :1].expand(input.shape)
    expected = backward((grad_output.contiguous(), input, weight, rope))
    padded = torch.empty(2, 3, 40, device=device).as_strided(
        input.shape, (120, 40, 16, 1)
    )
    padded.copy_(input)
    by_tokens = input.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.empty(16, 3, device=device)[:, 1].copy_(weight)

    assert_all_equal_bits(backward((grad_output, padded, apart, rope)), expected)
    assert_all_equal_bits(backward((grad_output, by_tokens, weight, rope)), expected)

    grad_output = make_arguments(device, batch=2, tokens=3, seed=1)[0]
    expected = backward((grad_output, input, weight, rope))

    for order in ((0, 2, 1, 3), (3, 1, 0, 2)):
        inverse = sorted(range(4), key=order.__getitem__)
        transposed = grad_output.permute(order).contiguous().permute(inverse)

        assert_all_equal_bits(backward((transposed, input, weight, rope)), expected)


def test_a_lazily_negated_gradient_is_resolved(device):
    """Autograd may hand one on; the kernel reads memory."""

    grad_output, input, weight, rope = make_arguments(device)
    negated = torch.view_as_complex(torch.stack((grad_output, -grad_output), -1)).conj()

    assert negated.imag.is_neg()
    assert_all_equal_bits(
        backward((negated.imag, input, weight, rope)),
        backward((grad_output, input, weight, rope)),
    )


@pytest.mark.parametrize("tokens_per_program", [2, 8])
def test_what_pads_a_program_adds_nothing(device, launch_as, tokens_per_program):
    """Neither heads nor tokens, not even where eps is 0 and an empty head has no norm."""

    launch_as(tokens_per_program, 4)
    check(make_arguments(device, batch=2, tokens=5, heads=3), eps=0.0)


def test_a_row_of_zeros(device):
    """Its gradient is finite with an eps, and without one as the definition's is not."""

    arguments = make_arguments(device)
    arguments[1][0, 1, 0] = 0
    check(arguments, eps=1e-2)
    grad_input, grad_weight = backward(arguments, eps=0.0)

    assert grad_input[0, 1, 0].isnan().all()
    assert grad_input.isnan().sum() == 16
    assert grad_weight.isnan().all()


def test_a_head_depends_on_nothing_else(device):
    """Its gradient has the bits that it has alone, whatever NaN is beside it."""

    grad_output, input, weight, rope = make_arguments(device, tokens=3)
    whole, _ = backward((grad_output, input, weight, rope))
    input[:, 1:] = float("nan")
    beside, _ = backward((grad_output, input, weight, rope))
    alone, _ = backward((grad_output[:, :1, 1:], input[:, :1, 1:], weight, rope[:1]))

    assert_equal_bits(beside[:, :1], whole[:, :1])
    assert_equal_bits(alone, whole[:, :1, 1:])


def test_it_is_cut_into_launches(device, launch_as, monkeypatch):
    """Where offsets would pass the bound, in launches between batch entries and tokens."""

    launch_as(1, 2)
    arguments = make_arguments(device, batch=2, tokens=3)
    whole = backward(arguments)
    launches = []
    plan, launch = _qk_norm_rope_backward.plan_chunks, _qk_norm_rope_backward.launch

    def counting_launch(handle, *args):
        launches.append(handle)
        launch(handle, *args)

    monkeypatch.setattr(
        _qk_norm_rope_backward, "plan_chunks", lambda *call: plan(*call, 63)
    )

    for module in (_qk_norm_rope_backward, _launch):
        monkeypatch.setattr(module, "launch", counting_launch)

    _qk_norm_rope_backward.layouts.clear()
    cut = backward(arguments)

    assert len(launches) == 2 * 2 + 1
    assert_all_equal_bits(cut, whole)


def test_partial_sums_beyond_the_bound_are_added_in_slabs(device, monkeypatch):
    """As many as an entry of the batch has programs, whose tokens may be few."""

    arguments = make_arguments(device, batch=7, tokens=1)
    input_gradient, weight_gradient = backward(arguments)
    launches = []
    launch = _launch.launch

    def counting_launch(handle, device, result, partial_sums):
        launches.append(len(partial_sums))
        launch(handle, device, result, partial_sums)

    monkeypatch.setattr(_launch, "launch", counting_launch)
    monkeypatch.setattr(_partial_sums, "MAX_ELEMENTS", 3 * 16)
    in_slabs = backward(arguments)

    assert launches == [3, 3, 1, 3]
    assert_equal_bits(in_slabs[0], input_gradient)
    torch.testing.assert_close(in_slabs[1], weight_gradient)


def test_a_second_derivative_is_refused(device):
    """The kernels' own gradients are not differentiable, and say so."""

    grad_output, input, weight, rope = make_arguments(device)
    input.requires_grad_()
    output = qk_norm_rope(input, weight, rope)
    grad_output.requires_grad_()
    (gradient,) = torch.autograd.grad(output, input, grad_output, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_changed_input_is_noticed(device):
    """The input is what is saved: written over before the backward pass, it is reported."""

    grad_output, input, weight, rope = make_arguments(device)
    output = qk_norm_rope(input, weight.requires_grad_(), rope)
    input.zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(grad_output)

"""`ntops_ext.nn.GatedRMSNorm`: what it computes, its parameters, and how it is handled as a module."""

import copy
import doctest
import pickle

import pytest
import torch
from comparison import assert_equal_bits
from torch.nn.utils import parametrize

import ntops_ext.nn
from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import gated_rms_norm

# Arguments of the module, beyond its size.
CONFIGURATIONS = {
    "defaults": {},
    "gate_first": {"norm_before_gate": False},
    "sigmoid": {"activation": "sigmoid"},
    "groups": {"group_size": 4, "eps": 0.5},
    "bias": {"bias": True},
    "offset": {"weight_offset": 1.0},
    "no_parameters": {"elementwise_affine": False},
}


def make(size=12, **arguments):
    """A module whose parameters are not those that it begins with."""

    norm = GatedRMSNorm(size, **arguments)
    generator = torch.Generator().manual_seed(1)

    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    return norm


def rows(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_doctest():
    """The example of the docstring."""

    results = doctest.testmod(ntops_ext.nn)

    assert results.attempted and not results.failed


@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no_gate"])
@pytest.mark.parametrize("arguments", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_it_is_the_operator(arguments, has_gate):
    """Each argument is that of the operator, with the module's parameters."""

    norm = make(**arguments)
    input = rows(3, 5, 12)
    gate = rows(3, 5, 12, seed=2) if has_gate else None
    options = {
        name: value
        for name, value in arguments.items()
        if name not in ("bias", "elementwise_affine")
    }

    assert_equal_bits(
        norm(input, gate),
        gated_rms_norm(input, norm.weight, gate, bias=norm.bias, **options),
    )


@pytest.mark.parametrize("arguments", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_it_begins_without_a_scale_or_an_addition(arguments):
    """`reset_parameters` makes it the norm alone, whatever was loaded."""

    for norm in (GatedRMSNorm(12, **arguments), make(**arguments)):
        norm.reset_parameters()
        input, gate = rows(3, 12), rows(3, 12, seed=2)
        options = {
            name: value
            for name, value in arguments.items()
            if name not in ("bias", "elementwise_affine", "weight_offset")
        }

        assert_equal_bits(
            norm(input, gate), gated_rms_norm(input, gate=gate, **options)
        )


def test_its_state_is_named_as_in_other_libraries():
    """`weight`, and `bias` if there is one: a checkpoint of theirs loads strictly."""

    weight, bias = rows(12), rows(12, seed=1)

    for arguments, state in (
        ({}, {"weight": weight}),
        ({"bias": True}, {"weight": weight, "bias": bias}),
        ({"elementwise_affine": False}, {}),
    ):
        norm = GatedRMSNorm(12, **arguments)
        norm.load_state_dict(state, strict=True)

        assert norm.state_dict().keys() == state.keys()

        for name, value in state.items():
            assert_equal_bits(getattr(norm, name), value)

    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        GatedRMSNorm(8).load_state_dict({"weight": weight})


def test_what_is_absent_is_none():
    """As in PyTorch's own norms, so that code that looks there works."""

    assert GatedRMSNorm(12).bias is None
    assert GatedRMSNorm(12, elementwise_affine=False).weight is None


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, "GatedRMSNorm(12, eps=1e-05)"),
        (
            {"eps": 1e-6, "group_size": 4, "norm_before_gate": False, "bias": True},
            "GatedRMSNorm(12, eps=1e-06, group_size=4, norm_before_gate=False, bias=True)",
        ),
        (
            {"activation": "sigmoid", "weight_offset": 1.0},
            "GatedRMSNorm(12, eps=1e-05, activation='sigmoid', weight_offset=1.0)",
        ),
        (
            {"elementwise_affine": False},
            "GatedRMSNorm(12, eps=1e-05, elementwise_affine=False)",
        ),
    ],
)
def test_it_is_shown_with_what_differs(arguments, expected):
    """What is shown makes the same module again."""

    norm = GatedRMSNorm(12, **arguments)

    assert repr(norm) == expected
    assert repr(eval(expected)) == expected


def test_parameters_of_another_dtype_than_the_input():
    """As where a trainer casts parameters for the forward: the input decides the result."""

    norm = make(bias=True)
    input, gate = rows(3, 12, dtype=torch.bfloat16), rows(3, 12, seed=2)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        norm.to(dtype)
        result = norm(input, gate)

        assert norm.weight.dtype is norm.bias.dtype is dtype
        assert_equal_bits(
            result, gated_rms_norm(input, norm.weight, gate, bias=norm.bias)
        )
        assert result.dtype is torch.bfloat16


def test_dtype_and_device_of_parameters():
    """Those asked for, or PyTorch's defaults."""

    assert GatedRMSNorm(4, dtype=torch.bfloat16, bias=True).bias.dtype is torch.bfloat16
    assert GatedRMSNorm(4, device="meta").weight.is_meta

    with torch.device("meta"):
        norm = GatedRMSNorm(4)

    assert norm.weight.is_meta

    norm.to_empty(device="cpu").reset_parameters()

    assert_equal_bits(norm.weight, torch.ones(4))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_are_equal_and_apart(duplicate):
    """`deepcopy` and `pickle` keep every argument, and share no parameter."""

    norm = make(group_size=4, norm_before_gate=False, activation="sigmoid", bias=True)
    twin = duplicate(norm)
    input, gate = rows(3, 12), rows(3, 12, seed=2)

    assert repr(twin) == repr(norm)
    assert_equal_bits(twin(input, gate), norm(input, gate))

    with torch.no_grad():
        twin.weight.zero_()

    assert norm.weight.any()


def test_a_parametrized_weight():
    """`torch.nn.utils.parametrize` may stand between the parameter and the norm."""

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    norm = make()
    input, gate, weight = rows(3, 12), rows(3, 12, seed=2), norm.weight.detach().clone()
    parametrize.register_parametrization(norm, "weight", Doubled())

    assert_equal_bits(norm(input, gate), gated_rms_norm(input, 2 * weight, gate))

    norm(input, gate).sum().backward()

    assert norm.parametrizations.weight.original.grad.any()


def test_functional_call():
    """Parameters of somebody else's may be used for one call."""

    norm, weight = make(), rows(12, seed=3)
    input = rows(3, 12)

    assert_equal_bits(
        torch.func.functional_call(norm, {"weight": weight}, (input,)),
        gated_rms_norm(input, weight),
    )


def test_gradients_reach_parameters_and_inputs():
    """Every tensor that requires one gets the gradient of the definition."""

    norm = make(bias=True, norm_before_gate=False, weight_offset=1.0)
    input, gate = (rows(3, 12, seed=seed).requires_grad_() for seed in (0, 2))
    tensors = [input, gate, norm.weight, norm.bias]
    actual = torch.autograd.grad(norm(input, gate).square().sum(), tensors)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    u = wide[0] * wide[1] * wide[1].sigmoid()
    u_hat = u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    result = u_hat * (1 + wide[2]) + wide[3]
    expected = torch.autograd.grad(result.square().sum(), wide)

    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"hidden_size": 4.0}, TypeError, "`hidden_size`.*int.*float"),
        ({"hidden_size": 0}, ValueError, "`hidden_size`.*positive.*0"),
        # FLA's second argument is `elementwise_affine`.
        ({"eps": True}, TypeError, "`eps`.*number.*bool"),
        ({"eps": -1.0}, ValueError, "`eps`.*negative"),
        ({"group_size": 3}, ValueError, "`group_size`.*8"),
        ({"norm_before_gate": 1}, TypeError, "`norm_before_gate`.*bool.*int"),
        ({"activation": "gelu"}, ValueError, "`activation`.*'gelu'"),
        ({"bias": torch.ones(8)}, TypeError, "`bias`.*bool.*Tensor"),
        ({"elementwise_affine": None}, TypeError, "`elementwise_affine`.*NoneType"),
        (
            {"bias": True, "elementwise_affine": False},
            ValueError,
            "`bias`.*`elementwise_affine=False`",
        ),
        (
            {"weight_offset": 1.0, "elementwise_affine": False},
            ValueError,
            "`weight_offset`.*`weight`",
        ),
        ({"weight_offset": "1"}, TypeError, "`weight_offset`.*number.*str"),
        ({"dtype": torch.float64}, TypeError, "`dtype`.*torch.float64"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(arguments, error, message):
    """By name, not at the first call."""

    with pytest.raises(error, match=message):
        GatedRMSNorm(**{"hidden_size": 8, **arguments})


def test_arguments_whose_order_differs_elsewhere_have_none_here():
    """`group_size` is second with Zamba-2, third with vLLM: it must be named."""

    with pytest.raises(TypeError, match="positional"):
        GatedRMSNorm(8, 1e-6, 4)


@pytest.mark.parametrize("elementwise_affine", [True, False])
def test_an_input_of_another_width_is_refused(elementwise_affine):
    """With parameters, and without any that would not fit."""

    norm = GatedRMSNorm(8, elementwise_affine=elementwise_affine)

    with pytest.raises(ValueError, match=r"input`.*8"):
        norm(rows(2, 4))

    with pytest.raises(ValueError, match="`gate`.*shape of `input`"):
        norm(rows(2, 8), rows(8))

    with pytest.raises(TypeError, match="`input`.*tensor.*list"):
        norm([1.0] * 8)

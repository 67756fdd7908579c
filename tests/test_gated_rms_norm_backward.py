"""The definition of the gradients of `gated_rms_norm`, against autograd of the operator's definition."""

import pytest
import torch
from gated_rms_norm_backward_behaviour import MODES, make

from ntops_ext import reference


@pytest.mark.parametrize("mode", MODES)
def test_the_definition_is_what_autograd_makes_of_the_operator(mode):
    """In float64, where rounding does not matter."""

    grad_output, tensors, options = make(
        "cpu", dtypes=(torch.float64,) * 4, **MODES[mode]
    )
    leaves = [None if tensor is None else tensor.requires_grad_() for tensor in tensors]
    input, weight, gate, bias = leaves
    output = reference.gated_rms_norm(
        input,
        weight,
        gate,
        bias=bias,
        **options,
        arithmetic_dtype=torch.float64,
        output_dtype=torch.float64,
    )
    present = [leaf for leaf in leaves if leaf is not None]
    expected = iter(torch.autograd.grad(output, present, grad_output))
    actual = reference.gated_rms_norm_backward(
        grad_output,
        input,
        weight,
        gate,
        bias=bias,
        **options,
        arithmetic_dtype=torch.float64,
    )

    for leaf, gradient in zip(leaves, actual, strict=True):
        if leaf is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, next(expected), rtol=1e-9, atol=1e-9)

"""`GatedRMSNorm` in the place of FLA's `FusedRMSNormGated`, with its weights, on a GPU."""

import pytest
import torch
from gated_rms_norm_behaviour import _distance

from ntops_ext.nn import GatedRMSNorm

pytestmark = pytest.mark.gpu

WIDTH = 128


@pytest.fixture(scope="module")
def fla_modules():
    return pytest.importorskip(
        "fla.modules", reason="compares with flash-linear-attention"
    )


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_results_and_gradients(fla_modules, activation):
    """Both round once: results within a unit in the last place, gradients within their own rounding."""

    torch.manual_seed(0)
    theirs = fla_modules.FusedRMSNormGated(
        WIDTH, activation=activation, device="cuda", dtype=torch.bfloat16
    )

    with torch.no_grad():
        theirs.weight.normal_()

    ours = GatedRMSNorm(
        WIDTH, activation=activation, device="cuda", dtype=torch.bfloat16
    )
    ours.load_state_dict(theirs.state_dict(), strict=True)
    input, gate, grad_output = (
        torch.randn(4096, WIDTH, device="cuda").to(torch.bfloat16) for _ in range(3)
    )
    outcomes = []

    for norm in (theirs, ours):
        leaves = [input.clone().requires_grad_(), gate.clone().requires_grad_()]
        result = norm(*leaves)
        gradients = torch.autograd.grad(result, [*leaves, norm.weight], grad_output)
        outcomes.append((result.detach(), *gradients))

    (expected, *expected_gradients), (actual, *actual_gradients) = outcomes

    assert _distance(actual, expected) <= 1

    for one, other in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)

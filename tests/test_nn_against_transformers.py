"""`GatedRMSNorm` in the place of the gated norms of `transformers`, with their own weights.

`transformers` rounds more often (docs/gated_rms_norm_module.md), so results are compared within the units in the last
place that its roundings cost, and its bits are not asked for.
"""

import importlib
import inspect

import pytest
import torch
from gated_rms_norm_behaviour import _distance

from ntops_ext.nn import GatedRMSNorm

pytest.importorskip(
    "transformers", reason="compares with transformers, an optional test dependency"
)

# Class -> its arguments, ours, and the units in the last place between the two results in a 16-bit dtype, with a
# weight of that dtype and with one in float32.
MODULES = {
    "mamba2.MambaRMSNormGated": (
        {"group_size": 32, "eps": 1e-6},
        {"group_size": 32, "eps": 1e-6, "norm_before_gate": False},
        (1, 1),
    ),
    "zamba2.Zamba2RMSNormGated": (
        {"group_size": 32, "eps": 1e-5},
        {"group_size": 32, "eps": 1e-5, "norm_before_gate": False},
        (1, 1),
    ),
    "qwen3_next.Qwen3NextRMSNormGated": ({"eps": 1e-6}, {"eps": 1e-6}, (2, 1)),
    "falcon_h1.FalconH1RMSNormGated": (
        {"eps": 1e-6, "n_groups": 4, "norm_before_gate": False},
        {"eps": 1e-6, "group_size": 32, "norm_before_gate": False},
        (1, 1),
    ),
    "kimi_linear.KimiLinearRMSNormGated": (
        {"eps": 1e-5},
        {"eps": 1e-5, "activation": "sigmoid"},
        (1, 1),
    ),
}

WIDTH = 128


@pytest.fixture(params=MODULES)
def pair(request):
    """The module of `transformers` with random weights, ours with its state, and the units."""

    theirs_arguments, ours_arguments, units = MODULES[request.param]
    model, name = request.param.split(".")

    try:
        module = importlib.import_module(
            f"transformers.models.{model}.modeling_{model}"
        )
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {model}")

    norm = getattr(module, name)

    if not theirs_arguments.keys() <= inspect.signature(norm).parameters.keys():
        # Mamba-2's had no groups in transformers 5.17, and must have them in 5.24.
        theirs_arguments, ours_arguments = (
            {name: value for name, value in arguments.items() if name != "group_size"}
            for arguments in (theirs_arguments, ours_arguments)
        )

    theirs = norm(WIDTH, **theirs_arguments)

    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        theirs.weight.copy_(torch.randn(WIDTH, generator=generator))

    ours = GatedRMSNorm(WIDTH, **ours_arguments)
    ours.load_state_dict(theirs.state_dict(), strict=True)

    return theirs, ours, units


def draw(seed, dtype):
    generator = torch.Generator().manual_seed(seed)

    return torch.randn(2, 8, WIDTH, generator=generator).to(dtype)


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["unit_rows", "tiny_rows"])
def test_in_float32(pair, scale):
    """The same numbers, but for the order of a few float32 operations. Tiny rows tell where eps is added."""

    theirs, ours, _ = pair
    input, gate = scale * draw(1, torch.float32), draw(2, torch.float32)
    expected = theirs(input, gate)

    torch.testing.assert_close(ours(input, gate), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("weight_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_in_16_bits(pair, dtype, weight_dtype):
    """Within the units that the docs' table gives."""

    theirs, ours, units = pair
    input, gate = draw(1, dtype), draw(2, dtype)

    if weight_dtype == "same":
        theirs.to(dtype)
        ours.to(dtype)

    result = ours(input, gate)

    assert result.dtype is dtype
    # With a float32 weight some of them do not round their result at all.
    expected = theirs(input, gate).to(dtype)

    assert _distance(result, expected) <= units[weight_dtype == "float32"]


def test_gradients_in_float32(pair):
    """What is trained through one is trained through the other."""

    theirs, ours, _ = pair
    gradients = []

    for norm in (theirs, ours):
        input, gate = (draw(seed, torch.float32).requires_grad_() for seed in (1, 2))
        weights = draw(3, torch.float32)
        loss = (norm(input, gate) * weights).sum()
        gradients.append(torch.autograd.grad(loss, [input, gate, norm.weight]))

    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

"""The tolerance that smoke scripts use: it lets pass what is right, and no more."""

import pytest
import torch
from gated_rms_norm_calls import DTYPES, MODES, make_call

from ntops_ext import reference


def _is_within(call, actual):
    exact = call.definition(torch.float64, torch.float64)
    tolerance = reference.gated_rms_norm_tolerance(**call.tensors, **call.options)

    return ((actual.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_one_rounding_is_within_the_tolerance(mode, dtype):
    """Also where a bias cancels what it is added to."""

    call = make_call(64, 256, mode=mode, dtype=DTYPES[dtype], bias=True, group_size=64)

    assert _is_within(call, call.definition(torch.float32))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
def test_a_second_rounding_is_not(mode, dtype):
    """Of the activated gate, or of what the gate multiplies."""

    call = make_call(64, 256, mode=mode, dtype=DTYPES[dtype])
    input, gate = call.tensors["input"], call.tensors["gate"]
    factor = reference.ACTIVATIONS[call.options["activation"]](gate.float())
    factor = factor.to(input.dtype).float()

    if call.options["norm_before_gate"]:
        normalised = call.definition(torch.float32, torch.float32, gate=None)
        twice = normalised * factor
    else:
        gated = (input.float() * factor).to(input.dtype)
        twice = call.definition(torch.float32, gate=None, input=gated)

    assert not _is_within(call, twice.to(input.dtype))

"""The gradients of `gated_rms_norm`, compiled for a GPU that is not there."""

import re

import pytest
import torch
from gated_rms_norm_binaries import contractible_sums

from ninetoothed_patches import host_driver
from ntops_ext.torch import _gated_rms_norm_backward, _launch


def compile_kernels(monkeypatch, dtype, norm_before_gate, columns):
    """The PTX of one call, in the order of its launches."""

    binaries = []

    def launch(handle, device, *arguments):
        binaries.append(
            host_driver.compile_call(handle, *arguments, target="sm_90").asm["ptx"]
        )

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "runs_kernel", lambda tensor: True)
    input, gate, grad_output = torch.zeros(3, 3, columns, dtype=dtype)
    weight, bias = torch.zeros(2, columns, dtype=dtype)
    _gated_rms_norm_backward.backward(
        grad_output,
        input,
        weight,
        gate,
        bias,
        1e-5,
        None,
        norm_before_gate,
        "silu",
        0.0,
        (True,) * 4,
    )

    return binaries


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("columns", [128, 1280, 20000])
def test_every_launch_compiles(monkeypatch, dtype, norm_before_gate, columns):
    """Groups of one program and of several pieces: the interpreter runs what a compiler refuses."""

    binaries = compile_kernels(monkeypatch, dtype, norm_before_gate, columns)

    assert binaries
    assert all(".target sm_90" in binary for binary in binaries)


@pytest.mark.parametrize("columns", [128, pytest.param(20000, marks=pytest.mark.slow)])
def test_no_sum_of_a_product_is_left_to_the_compiler(monkeypatch, columns):
    """Whether Triton fuses products into sums changes no bit: there are none to fuse."""

    num_fused = []

    for fusion in ("0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fusion)
        binaries = compile_kernels(monkeypatch, torch.float32, True, columns)
        num_fused.append([len(re.findall(r"\bfma\.rn", one)) for one in binaries])

        for binary in binaries:
            assert contractible_sums(binary) == []

    assert num_fused[0] == num_fused[1]
    assert num_fused[0][0] > 0

"""The gradients of `gated_rms_norm`, compiled for a GPU that is not there."""

import re

import pytest
import torch
import triton
from gated_rms_norm_binaries import contractible_sums

from ninetoothed_patches import host_driver
from ntops_ext import configs
from ntops_ext.torch import _gated_rms_norm_backward, _launch


def compile_launches(
    monkeypatch,
    *,
    columns,
    dtype,
    norm_before_gate,
    weight=True,
    bias=True,
    activation="silu",
    needs=(True,) * 4,
):
    """The binaries of every launch of a call of these columns, for sm_90.

    :param needs: Whether the gradients of input, weight, gate and bias are needed.
    """

    binaries = []

    def launch(handle, device, *arguments):
        binaries.append(
            host_driver.compile_call(handle, *arguments, target="sm_90").asm
        )

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "runs_kernel", lambda tensor: True)
    input, gate, grad_output = torch.zeros(3, 3, columns, dtype=dtype)
    parameters = torch.zeros(2, columns, dtype=dtype)
    _gated_rms_norm_backward.backward(
        grad_output,
        input,
        parameters[0] if weight else None,
        gate,
        parameters[1] if bias else None,
        1e-5,
        None,
        norm_before_gate,
        activation,
        0.0,
        needs,
    )

    return binaries


def spills(binary):
    """Whether a kernel uses local memory."""

    return bool(re.findall(r"\b(?:STL|LDL)\b", binary["sass"]))


def expect_a_spill_of_triton_3_9(request, columns, norm_before_gate):
    """Its ptxas spills one register of 5120 columns, gate first; that of 3.6 none."""

    if (columns, norm_before_gate) == (5120, False) and triton.__version__[:3] == "3.9":
        request.applymarker(
            pytest.mark.xfail(strict=True, reason="one register is spilled")
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("columns", [128, 1280, 20000])
def test_every_launch_compiles(monkeypatch, dtype, norm_before_gate, columns):
    """Groups of one program and of several: the interpreter runs what a compiler refuses."""

    binaries = compile_launches(
        monkeypatch, columns=columns, dtype=dtype, norm_before_gate=norm_before_gate
    )

    assert binaries
    assert all(".target sm_90" in binary["ptx"] for binary in binaries)


@pytest.mark.parametrize(
    "needs",
    [
        (True, False, True, False),
        (False, False, True, False),
        (False, True, False, False),
        (False, False, False, True),
    ],
    ids=str,
)
def test_some_gradients_compile(monkeypatch, needs):
    """Those of frozen parameters are left out: a loop of Triton 3.3 has to carry something on."""

    binary, *_ = compile_launches(
        monkeypatch,
        columns=64,
        dtype=torch.bfloat16,
        norm_before_gate=True,
        needs=needs,
    )

    assert ".target sm_90" in binary["ptx"]


def test_gradients_without_parameters_compile(monkeypatch):
    binary, *_ = compile_launches(
        monkeypatch,
        columns=64,
        dtype=torch.float32,
        norm_before_gate=False,
        weight=False,
        bias=False,
    )

    assert ".target sm_90" in binary["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_sigmoid_compile(monkeypatch, dtype):
    """They take another sigmoid after the sums, where Triton 3.3 knows fewer constants."""

    binary, *_ = compile_launches(
        monkeypatch,
        columns=128,
        dtype=dtype,
        norm_before_gate=True,
        activation="sigmoid",
    )

    assert ".target sm_90" in binary["ptx"]


@pytest.mark.parametrize(
    "columns",
    [
        128,
        384,
        512,
        *(
            pytest.param(columns, marks=pytest.mark.slow)
            for columns in (
                16,
                64,
                256,
                1024,
                1280,
                2048,
                3072,
                3584,
                4096,
                5120,
                7168,
                8192,
            )
        ),
    ],
)
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_no_register_is_spilled(monkeypatch, request, columns, norm_before_gate):
    """Groups of 512 took 70 times the time, and more, while a thread held a whole row of them."""

    expect_a_spill_of_triton_3_9(request, columns, norm_before_gate)
    binaries = compile_launches(
        monkeypatch,
        columns=columns,
        dtype=torch.bfloat16,
        norm_before_gate=norm_before_gate,
        bias=False,
    )

    assert not any(spills(binary) for binary in binaries)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, bias", [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_more_is_not_spilled_where_16_bits_just_fit(monkeypatch, dtype, bias):
    """5120 columns are 40 a thread in 16 bits, 20 in float32 or with a bias."""

    binary, *_ = compile_launches(
        monkeypatch, columns=5120, dtype=dtype, norm_before_gate=False, bias=bias
    )

    assert not spills(binary)


@pytest.mark.skipif(
    not hasattr(triton, "knobs"),
    reason="the compiler of Triton 3.3 holds what is computed all the same",
)
@pytest.mark.parametrize(
    "columns, norm_before_gate",
    [
        (8192, False),
        *(
            pytest.param(columns, norm_before_gate, marks=pytest.mark.slow)
            for columns in (1280, 1536, 3072, 3584, 4096, 5120, 7168, 8192)
            for norm_before_gate in (True, False)
            if (columns, norm_before_gate) != (8192, False)
        ),
    ],
)
def test_a_multiprocessor_holds_as_many_programs_as_are_launched(
    monkeypatch, request, columns, norm_before_gate
):
    """In registers: one instead of two waits at its own barriers."""

    expect_a_spill_of_triton_3_9(request, columns, norm_before_gate)
    binary, *_ = compile_launches(
        monkeypatch,
        columns=columns,
        dtype=torch.bfloat16,
        norm_before_gate=norm_before_gate,
        bias=False,
    )
    config = configs.gated_rms_norm_backward_config(columns, 1)
    programs = config.max_row_blocks // configs._MULTIPROCESSORS
    registers = 1 + max(map(int, re.findall(r"\bR(\d+)\b", binary["sass"])))

    assert programs * 32 * config.num_warps * (-(-registers // 8) * 8) <= 65536
    assert not spills(binary)


@pytest.mark.parametrize("has_gate, stages", [(True, 2), (False, 3)])
def test_as_many_steps_are_on_their_way_as_the_device_has_room_for(
    monkeypatch, has_gate, stages
):
    """A step is the rows of all tensors: 16 KiB of two, 24 of three, of 64 in all."""

    launches = []
    monkeypatch.setattr(
        _launch, "launch", lambda handle, device, *given: launches.append(given)
    )
    monkeypatch.setattr(_launch, "shared_memory", lambda device: 64 * 1024)
    monkeypatch.setattr(_launch, "runs_kernel", lambda tensor: True)
    input, gate, grad_output = torch.zeros(3, 3, 4096, dtype=torch.bfloat16)
    options = 1e-5, None, True, "silu", 0.0
    _gated_rms_norm_backward._layouts_of_calls.clear()
    _gated_rms_norm_backward.backward(
        *(grad_output, input, None, gate if has_gate else None, None),
        *options,
        (True, False, False, False),
    )
    _gated_rms_norm_backward._layouts_of_calls.clear()
    ((*_, pipeline_stages),) = launches

    assert pipeline_stages == stages


@pytest.mark.parametrize("columns", [512, 1000, 3584])
def test_rows_are_read_and_written_widely(monkeypatch, columns):
    """By 16 bytes a thread to shared memory and from it, or 8 where a group is in pieces.

    16 does not divide the row stride of 1000.
    """

    binary, *_ = compile_launches(
        monkeypatch,
        columns=columns,
        dtype=torch.bfloat16,
        norm_before_gate=False,
        bias=False,
    )
    bytes_read = set(
        re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (\w+), ", binary["ptx"])
    )
    stores = set(re.findall(r"\bst\.global\.(v\d)\.b32", binary["ptx"]))
    size, vector = ("0x10", "v4") if columns != 3584 else ("0x8", "v2")

    assert bytes_read == {size}
    # A row of partial sums is written by 16 bytes.
    assert stores <= {vector, "v4"} and vector in stores


@pytest.mark.parametrize("columns", [128, pytest.param(20000, marks=pytest.mark.slow)])
def test_no_sum_of_a_product_is_left_to_the_compiler(monkeypatch, columns):
    """Whether Triton fuses products into sums changes no bit: there are none to fuse."""

    num_fused = []

    for fusion in ("0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fusion)
        binaries = compile_launches(
            monkeypatch, columns=columns, dtype=torch.float32, norm_before_gate=True
        )
        ptx = [binary["ptx"] for binary in binaries]
        num_fused.append([len(re.findall(r"\bfma\.rn", one)) for one in ptx])

        for one in ptx:
            assert contractible_sums(one) == []

    assert num_fused[0] == num_fused[1]
    assert num_fused[0][0] > 0

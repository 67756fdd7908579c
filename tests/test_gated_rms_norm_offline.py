"""The binaries of `gated_rms_norm`, compiled for GPUs without one, and read."""

import itertools
import re

import pytest
import torch
import triton
from gated_rms_norm_binaries import (
    compile_call,
    contractible_sums,
    global_accesses,
    is_wide,
)
from gated_rms_norm_calls import DTYPES, MODES, Call, make_call
from huge_storage import reserve

from ntops_ext import configs
from ntops_ext.torch import _rows

NUM_ROWS = 64

_IS_BEFORE_TRITON_3_5 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5)

needs_a_linker_for_amd = pytest.mark.skipif(
    _IS_BEFORE_TRITON_3_5, reason="before 3.5 Triton has no linker for AMD's code"
)

# Width -> group size. Powers of two, and the widths of real models.
WIDTHS = {
    64: 64,
    128: 128,
    512: 512,
    960: 960,
    1024: 1024,
    1280: 1280,
    2048: 2048,
    3584: 3584,
    4096: 4096,
    5120: 5120,
    7168: 3584,
    7680: 1536,
    8192: 1024,
    10240: 1280,
    16384: 16384,
}


def column_slice(row_stride, width, dtype=torch.bfloat16):
    return torch.zeros(NUM_ROWS, row_stride, dtype=dtype)[:, :width]


def assert_wide(ptx, group_size):
    """Require 16 bytes of each access, but for the weight of a group of few columns.

    Such a weight is shared by the rows of a program, and its load by all their threads. Of
    a group that is held in pieces a thread takes 4 columns of each: 8 bytes, where a warp
    still reads 256 in a row.
    """

    config = configs.gated_rms_norm_config(group_size, 1)
    num_bytes = 8 if config.holds_pieces else 16
    accesses = global_accesses(ptx)
    narrow = {
        one: count for one, count in accesses.items() if not is_wide(one, num_bytes)
    }
    allowed = 1 if group_size <= 512 and config.rows_per_program > 1 else 0

    assert {one[:2] for one in accesses.keys() - narrow.keys()} == {"ld", "st"}
    assert sum(narrow.values()) <= allowed, narrow
    assert not [one for one in narrow if one.startswith("st")], narrow


@pytest.mark.parametrize(
    "target, width",
    [
        *(("sm_90", width) for width in WIDTHS),
        # Those that differ in kind.
        *itertools.product(["sm_80", "sm_100"], [64, 960, 5120, 10240]),
    ],
)
@pytest.mark.parametrize("num_groups", ["few", "many"])
def test_accesses_of_dense_tensors_are_wide(monkeypatch, num_groups, width, target):
    """Each load and store, and nothing goes through local memory."""

    if num_groups == "many":
        monkeypatch.setattr(configs, "_FEW_GROUPS", 0)

    call = make_call(
        NUM_ROWS,
        width,
        mode="gate_first-silu",
        dtype=torch.bfloat16,
        group_size=WIDTHS[width],
    )
    ptx = compile_call(monkeypatch, call, target).asm["ptx"]

    assert_wide(ptx, WIDTHS[width])
    assert ".local" not in ptx


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accesses_are_wide_in_every_mode_and_dtype(monkeypatch, dtype, mode):
    """Also with a bias, and in float32."""

    call = make_call(NUM_ROWS, 1024, mode=mode, dtype=DTYPES[dtype], bias=True)
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

    assert_wide(ptx, 1024)
    assert ".local" not in ptx


@pytest.mark.parametrize(
    "width, group_size, row_stride",
    [
        (10240, 1280, 22656),
        (8192, 1024, 18560),
        (4096, 512, 10304),
        # 16 divides neither these row strides nor those of the other tensors, but 8 does.
        (1536, 1536, 3352),
        (1000, 1000, 2024),
    ],
)
def test_accesses_of_a_column_slice_are_wide(
    monkeypatch, width, group_size, row_stride
):
    """Case L1: a gate out of a fused projection costs no more than a dense one."""

    call = make_call(
        NUM_ROWS,
        width,
        mode="gate_first-silu",
        dtype=torch.bfloat16,
        group_size=group_size,
    ).with_tensors(gate=column_slice(row_stride, width))
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

    assert_wide(ptx, group_size)


def test_accesses_of_an_interleaved_gate_are_wide(monkeypatch):
    """Strides (12288, 768, 128, 1), which no two dimensions of rows merge."""

    gate = torch.zeros(4, 16, 6, 128, dtype=torch.bfloat16)[:, :, 4:]
    call = make_call(4, 16, 2, 128, dtype=torch.bfloat16).with_tensors(gate=gate)

    assert gate.stride() == (12288, 768, 128, 1)
    assert_wide(compile_call(monkeypatch, call, "sm_90").asm["ptx"], 128)


def test_a_gate_that_is_not_aligned_narrows_only_itself(monkeypatch):
    """By 8 elements: of an odd row stride. Input, weight and result keep accesses of 16 bytes."""

    dense = make_call(NUM_ROWS, 2048, mode="gate_first-silu", dtype=torch.bfloat16)
    sliced = dense.with_tensors(gate=column_slice(3353, 2048))
    wide, narrow = (
        global_accesses(compile_call(monkeypatch, call, "sm_90").asm["ptx"])
        for call in (dense, sliced)
    )

    assert narrow["st.v4.b32"] == wide["st.v4.b32"] > 0
    # Input and weight of three.
    assert 3 * narrow["ld.v4.b32"] == 2 * wide["ld.v4.b32"] > 0


@pytest.mark.parametrize("width", [20000, 65536])
def test_accesses_of_groups_read_piece_by_piece_are_wide(monkeypatch, width):
    """Also where the last piece is not whole."""

    call = make_call(2, width, mode="gate_first-silu", dtype=torch.bfloat16)
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

    assert_wide(ptx, width)
    assert ".local" not in ptx


def test_a_group_that_is_held_in_pieces_is_read_once(monkeypatch):
    """Input, gate and weight, each of them a load a piece."""

    call = make_call(NUM_ROWS, 384, mode="gate_first-silu", dtype=torch.bfloat16)
    accesses = global_accesses(compile_call(monkeypatch, call, "sm_90").asm["ptx"])

    assert accesses == {"ld.v2.b32": 9, "st.v2.b32": 3}


@pytest.mark.parametrize("width", [1024, 1280, 4096, 5120, 8192])
def test_warps_exchange_their_sums_once(monkeypatch, width):
    """One barrier, after which every thread reads them all."""

    assert configs.gated_rms_norm_config(width, NUM_ROWS).num_warps > 1

    call = make_call(NUM_ROWS, width, mode="gate_first-silu", dtype=torch.bfloat16)
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

    assert ptx.count("bar.sync") == 1


@pytest.mark.parametrize(
    "width, accesses",
    [
        (4096, {"ld.v4.b32": 2, "ld.v2.b32": 3, "st.v2.b32": 1}),
        (1536, {"ld.v2.b32": 3 + 3, "st.v2.b32": 1}),
        (5120, {"ld.v2.b32": 5 + 3, "st.v2.b32": 1}),
    ],
)
def test_accesses_of_a_row_that_programs_share(monkeypatch, width, accesses):
    """A thread reads the whole row, or its pieces, and input, gate and weight of its own 4 columns."""

    call = make_call(1, width, dtype=torch.bfloat16)
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

    assert configs.gated_rms_norm_config(width, 1, may_share=True).columns_per_share
    assert global_accesses(ptx) == accesses
    assert ptx.count("bar.sync") == 1
    assert ".local" not in ptx


@pytest.mark.parametrize("width", [512, 640])
def test_a_row_of_one_warp_needs_no_barrier(monkeypatch, width):
    """The sum stays in the warp."""

    monkeypatch.setattr(configs, "_FEW_GROUPS", 0)

    assert configs.gated_rms_norm_config(width, NUM_ROWS).num_warps == 1

    call = make_call(NUM_ROWS, width, dtype=torch.bfloat16)
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

    assert "bar.sync" not in ptx
    assert "shfl.sync" in ptx


@pytest.mark.parametrize(
    "width, mode",
    [
        (128, "norm_first-silu"),
        (1280, "gate_first-sigmoid"),
        (1280, "plain"),
        (65536, "gate_first-silu"),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_sum_of_a_product_is_left_to_the_compiler(monkeypatch, dtype, width, mode):
    """Whether Triton fuses products into sums changes no bit: there are none to fuse."""

    call = make_call(2, width, mode=mode, dtype=DTYPES[dtype], bias=True)
    num_fused = []

    for fusion in ("0", "1"):
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_DEFAULT_FP_FUSION", fusion)
            ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]

        num_fused.append(len(re.findall(r"\bfma\.rn", ptx)))

    assert contractible_sums(ptx) == []
    assert num_fused[0] == num_fused[1] > 0


@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-sigmoid"])
def test_float32_divides_and_takes_roots_with_rounding(monkeypatch, mode):
    """A GPU's own inverse root and quotient are 2 units in the last place of a float32 off."""

    call = make_call(2, 128, mode=mode, dtype=torch.float32)
    ptx = compile_call(monkeypatch, call, "sm_90").asm["ptx"]
    operations = set(re.findall(r"\b(?:r?sqrt|div)\.[\w.]+", ptx))

    assert operations == {"sqrt.rn.f32", "div.rn.f32"}


def test_what_looks_for_contractible_sums_finds_one():
    """The test above can fail."""

    assert contractible_sums("mul.f32 \t%f3, %f1, %f2;\nadd.f32 %f5, %f4, %f3;") == [
        {""}
    ]
    assert contractible_sums("mul.rn.f32 %f3, %f1, %f2;\nadd.f32 %f5, %f4, %f3;") == []


@pytest.mark.parametrize(
    "width, dtype",
    [
        *itertools.product([5120, 8192, 10240, 16384, 65536], ["bf16"]),
        *itertools.product([1024, 8192], ["fp32"]),
        pytest.param(
            16384,
            "fp32",
            marks=pytest.mark.xfail(
                strict=True,
                reason="16 warps leave a thread 128 registers, and it spills some of them",
            ),
        ),
    ],
)
@pytest.mark.parametrize("num_groups", ["few", "many"])
def test_no_register_is_spilled(monkeypatch, num_groups, width, dtype):
    """Nothing goes through local memory, where a thread holds most, either."""

    if num_groups == "many":
        monkeypatch.setattr(configs, "_FEW_GROUPS", 0)

    call = make_call(
        2, width, mode="gate_first-silu", dtype=DTYPES[dtype], bias=dtype == "fp32"
    )
    instructions = compile_call(monkeypatch, call, "sm_90").asm["sass"]

    assert re.search(r"\bLDG\.E\.(?:64|128)\b", instructions)
    assert not re.findall(r"\b(?:STL|LDL)\b", instructions)


@needs_a_linker_for_amd
@pytest.mark.parametrize("width", [128, 1280, 65536])
def test_it_compiles_for_an_amd_gpu(monkeypatch, width):
    """gfx942: the same kernels, in accesses of 4 to 16 bytes, without spilling."""

    call = make_call(NUM_ROWS, width, mode="gate_first-silu", dtype=torch.bfloat16)
    assembly = compile_call(monkeypatch, call, "gfx942").asm["amdgcn"]

    assert re.search(r"_load_dword(?:x[24])?\b", assembly)
    assert re.search(r"_store_dword(?:x[24])?\b", assembly)
    assert not re.search(r"_store_(short|byte)\b|scratch_", assembly)


@pytest.mark.parametrize("group_size", [None, 1])
def test_rows_of_as_many_columns_as_are_taken_compile(monkeypatch, group_size):
    """Their number is a constant of 32 bits, with a sign."""

    row = reserve(_rows.MAX_COLUMNS)[None]
    call = Call({"input": row}, {"group_size": group_size, "out": row})

    assert compile_call(monkeypatch, call, "sm_90").asm["ptx"]

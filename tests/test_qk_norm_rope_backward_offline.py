"""The kernels of `qk_norm_rope`'s gradients, compiled without a GPU and read."""

import re

import pytest
import torch
import triton
from gated_rms_norm_binaries import contractible_sums, global_accesses, is_wide
from qk_norm_rope_backward_behaviour import backward, make_arguments

from ninetoothed_patches import host_driver
from ntops_ext.torch import _launch, _qk_norm_rope_backward

NEEDS = [(True, True), (True, False), (False, True)]

needs_triton_3_5 = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5),
    reason="before, a table changes its layout through shared memory",
)


def compile_kernels(monkeypatch, target="sm_90", needs=(True, True), **sizes):
    """The binaries of one call, in the order of their launches."""

    launches = []
    _qk_norm_rope_backward.layouts.clear()
    sizes = {"dtype": torch.bfloat16, "tokens": 32, "heads": 32, **sizes}
    arguments = make_arguments("cpu", **{"head_dim": 128, **sizes})

    with monkeypatch.context() as patch:
        patch.setattr(_qk_norm_rope_backward, "runs_kernel", lambda tensor: True)

        for module in (_qk_norm_rope_backward, _launch):
            patch.setattr(
                module,
                "launch",
                lambda handle, device, *args: launches.append((handle, args)),
            )

        backward(arguments, needs=needs)

    _qk_norm_rope_backward.layouts.clear()

    return [
        host_driver.compile_call(handle, *args, target=target)
        for handle, args in launches
    ]


def assert_nothing_is_spilled(binary):
    assert not re.findall(r"\b(?:STL|LDL)\b", binary.asm["sass"])


@pytest.mark.parametrize(
    "heads, needs", [*((32, needs) for needs in NEEDS), (30, NEEDS[0])], ids=str
)
def test_dense_heads_are_moved_by_16_bytes(monkeypatch, needs, heads):
    """Inputs and gradients in whole accesses, and nothing is spilled."""

    binary, *_ = compile_kernels(monkeypatch, needs=needs, heads=heads)
    accesses = global_accesses(binary.asm["ptx"])
    # 8 heads of 128 are four times 16 bytes a lane, twice to read; the table is one more,
    # the weight half of one. Partial sums are 512 bytes.
    expected = {"ld.v4.b32": 9}

    if needs[0]:
        expected["ld.v2.b32"] = 1

    expected["st.v4.b32"] = 4 * needs[0] + needs[1]

    assert accesses == expected
    assert_nothing_is_spilled(binary)


@needs_triton_3_5
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_nothing_leaves_the_warp(monkeypatch, needs):
    """No shared memory and no barrier."""

    binary, *_ = compile_kernels(monkeypatch, needs=needs)

    assert binary.metadata.shared == 0
    assert not re.search(r"\b(?:bar|barrier)\.\S+", binary.asm["ptx"])


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_the_next_tokens_are_on_their_way(monkeypatch, needs):
    """Where a program takes several: heads and gradients by 16 bytes, with nothing spilled."""

    binary, *_ = compile_kernels(monkeypatch, tokens=4096, needs=needs)
    sizes = re.findall(
        r"cp\.async\.c[ag]\.shared\.global .*?, (\w+), ", binary.asm["ptx"]
    )

    assert set(sizes) == {"0x10"}
    assert_nothing_is_spilled(binary)


@pytest.mark.parametrize(
    "head_dim, dtype",
    [
        *((head_dim, torch.bfloat16) for head_dim in (64, 96, 128, 256)),
        # Those that hold most in registers.
        *((head_dim, torch.float32) for head_dim in (128, 256)),
    ],
    ids=str,
)
def test_every_width_is_stored_by_16_bytes(monkeypatch, head_dim, dtype):
    """Widths and dtypes of the contract, with nothing spilled."""

    binary, _ = compile_kernels(monkeypatch, heads=16, head_dim=head_dim, dtype=dtype)
    accesses = global_accesses(binary.asm["ptx"])
    narrow = {
        access: number
        for access, number in accesses.items()
        if access.startswith("st") and not is_wide(access)
    }

    # A row of 64 partial sums is 8 bytes a lane.
    assert narrow == ({"st.v2.b32": 1} if head_dim == 64 else {})
    assert_nothing_is_spilled(binary)


def test_partial_sums_are_read_by_32_bytes_a_row(monkeypatch):
    """8 columns of each row, by 16 bytes a lane; nothing is spilled."""

    _, binary = compile_kernels(monkeypatch, tokens=4096)
    loads = {
        access
        for access in global_accesses(binary.asm["ptx"])
        if access.startswith("ld")
    }

    assert loads == {"ld.v4.b32"}
    assert_nothing_is_spilled(binary)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_sum_of_a_product_is_left_to_the_compiler(monkeypatch, dtype):
    """Whether Triton fuses products into sums changes no bit: there are none to fuse."""

    num_fused = []

    for fusion in ("0", "1"):
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_DEFAULT_FP_FUSION", fusion)
            binary, _ = compile_kernels(monkeypatch, dtype=dtype, heads=8)

        num_fused.append(len(re.findall(r"\bfma\.rn", binary.asm["ptx"])))

    assert contractible_sums(binary.asm["ptx"]) == []
    assert num_fused[0] == num_fused[1] > 0


@needs_triton_3_5
def test_compiles_for_gfx942(monkeypatch):
    """Nothing in the kernels is NVIDIA's. Of tensors below 2 GiB, Triton 3.6 and later load from buffers."""

    binary, of_sum = compile_kernels(monkeypatch, target="gfx942")

    assert re.search(r"\b(?:global|buffer)_load_dwordx4\b", binary.asm["amdgcn"])
    assert re.search(r"\b(?:global|buffer)_load_dword", of_sum.asm["amdgcn"])

"""The kernels of `qk_norm_rope` and `qk_norm_rope_pack_`, compiled without a GPU and read."""

import collections
import re

import pytest
import torch
import triton
from rope_inputs import make_pack

from ninetoothed_patches import host_driver
from ntops_ext._handles import make_handle
from ntops_ext.configs import qk_norm_rope_config
from ntops_ext.kernels import _heads, qk_norm_rope, qk_norm_rope_pack

TARGETS = ["sm_80", "sm_90", "sm_100"]

VECTORS = ("vectors", "decreasing")
NOTHING = ("nothing", "decreasing")

# Head width -> the order in which the builds of PyTorch that were seen add.
ORDERS = {64: NOTHING, 96: ("lanes", "decreasing"), 128: VECTORS, 256: VECTORS}

# Before, a table changes its layout through 256 bytes of shared memory, and code for AMD
# is linked by a program that has to be installed.
needs_triton_3_5 = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5),
    reason="what is asked for holds from Triton 3.5 on",
)


def compile_pack(target, *, sources="", order=VECTORS, **shape):
    """The binary of a call with these arguments."""

    inputs = make_pack(sources=sources, **{"tokens": 32, "prefix": 16, **shape})
    num_heads, head_dim = inputs.q.shape[2:]
    num_kv_heads = inputs.k_out.shape[2]
    item_size = inputs.q.element_size()
    config = qk_norm_rope_config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        item_size=item_size,
    )
    handle = make_handle(
        qk_norm_rope_pack.premake,
        num_warps=config.num_warps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        heads_per_program=config.heads_per_program,
        kv_heads_per_program=config.kv_heads_per_program,
        q_order=order,
        k_order=order,
        real_part="real*cosine",
        imaginary_part="real*sine",
        squares_are_exact=item_size == 2,
        has_k_src="k" in sources,
        has_v_src="v" in sources,
    )
    arguments = [one for one in inputs.arguments() if one is not None]
    arguments[5] = inputs.rope.view(torch.float32)

    return host_driver.compile_call(handle, *arguments, 1e-6, target=target)


def compile_one(target, *, order=VECTORS, **shape):
    """The binary of `qk_norm_rope` of q."""

    inputs = make_pack(**{"tokens": 32, "heads": 32, **shape})
    num_heads, head_dim = inputs.q.shape[2:]
    item_size = inputs.q.element_size()
    config = qk_norm_rope_config(
        num_heads=num_heads, num_kv_heads=0, head_dim=head_dim, item_size=item_size
    )
    handle = make_handle(
        qk_norm_rope.premake,
        num_warps=config.num_warps,
        num_heads=num_heads,
        head_dim=head_dim,
        heads_per_program=config.heads_per_program,
        order=order,
        real_part="real*cosine",
        imaginary_part="real*sine",
        squares_are_exact=item_size == 2,
    )

    return host_driver.compile_call(
        handle,
        inputs.q,
        torch.empty_like(inputs.q),
        inputs.q_weight,
        inputs.rope.view(torch.float32),
        1e-6,
        target=target,
    )


def count(assembly, pattern):
    return collections.Counter(re.findall(pattern, assembly))


@pytest.mark.parametrize(
    "target, sources, tiles",
    [
        ("sm_80", "kv", 3),
        ("sm_90", "", 2),
        ("sm_90", "k", 2),
        ("sm_90", "v", 3),
        ("sm_90", "kv", 3),
        ("sm_100", "kv", 3),
    ],
)
def test_dense_heads_are_moved_by_16_bytes(target, sources, tiles):
    """Every row is read and written 16 bytes a lane, the table and weights once a block."""

    ptx = compile_pack(target, sources=sources, heads=32, kv_heads=32).asm["ptx"]
    loads = count(ptx, r"\bld\.global\S*")
    stores = count(ptx, r"\bst\.global\S*")

    # 8 heads of 128 are four times 16 bytes a lane: q, k and perhaps v, and the prefixes.
    # The table is one more, and each weight half of one.
    assert loads == {"ld.global.v4.b32": 4 * (tiles + 2) + 1, "ld.global.v2.b32": 2}
    assert stores == {"st.global.v4.b32": 4 * (tiles + 2)}


@needs_triton_3_5
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_leaves_the_warp(target):
    """No barrier, no shared and no local memory; sums in half a warp, by 64 exchanges."""

    binary = compile_pack(target, heads=32, kv_heads=32)
    ptx = binary.asm["ptx"]

    assert binary.metadata.shared == 0
    assert not count(ptx, r"\b(?:bar|barrier)\.\S+")
    assert not count(ptx, r"\b(?:ld|st)\.(?:local|shared)\S*|\.local\b")
    # Two sums of four squares a lane and head, over distances 8, 4, 2 and 1: a reduction
    # over the whole warp would need a fifth step.
    assert count(ptx, r"\bshfl\.sync\.bfly\S*") == {"shfl.sync.bfly.b32": 64}
    # The table and the weights are brought to the heads, and not the heads to them.
    assert count(ptx, r"\bshfl\.sync\.idx\S*")["shfl.sync.idx.b32"] <= 24


@needs_triton_3_5
@pytest.mark.parametrize("target", ["sm_90"])
def test_single_tensor_is_moved_by_16_bytes(target):
    """`qk_norm_rope` has the code of the pack, for one tensor."""

    binary = compile_one(target)
    ptx = binary.asm["ptx"]

    assert count(ptx, r"\bld\.global\S*") == {
        "ld.global.v4.b32": 5,
        "ld.global.v2.b32": 1,
    }
    assert count(ptx, r"\bst\.global\S*") == {"st.global.v4.b32": 4}
    assert binary.metadata.shared == 0
    assert not count(ptx, r"\b(?:bar|barrier)\.\S+")


@pytest.mark.parametrize("heads, kv_heads", [(32, 4), (30, 30)])
def test_other_head_counts_are_moved_by_16_bytes(heads, kv_heads):
    """Grouped queries and heads that fill no power of two."""

    ptx = compile_pack("sm_90", heads=heads, kv_heads=kv_heads).asm["ptx"]

    assert set(count(ptx, r"\bld\.global\S*")) == {
        "ld.global.v4.b32",
        "ld.global.v2.b32",
    }
    assert set(count(ptx, r"\bst\.global\S*")) == {"st.global.v4.b32"}


@pytest.mark.parametrize("head_dim", ORDERS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str
)
def test_every_width_is_stored_by_16_bytes(head_dim, dtype):
    """Widths and dtypes of the contract; nothing of them is in local memory."""

    ptx = compile_pack(
        "sm_90",
        heads=16,
        kv_heads=16,
        head_dim=head_dim,
        dtype=dtype,
        order=ORDERS[head_dim],
    ).asm["ptx"]

    assert set(count(ptx, r"\bst\.global\S*")) == {"st.global.v4.b32"}
    assert not count(ptx, r"\b(?:ld|st)\.local\S*|\.local\b")


def test_padded_tokens_compile():
    """A token stride that no access width divides costs width, nothing else."""

    ptx = compile_pack("sm_90", heads=8, kv_heads=8, padding=5).asm["ptx"]

    assert count(ptx, r"\bst\.global\S*")


@needs_triton_3_5
@pytest.mark.parametrize("sources", ["", "kv"])
def test_compiles_for_gfx942(sources):
    """Nothing in the kernels is NVIDIA's. In tensors below 2 GiB, Triton 3.6 and later store through buffers."""

    binary = compile_pack("gfx942", sources=sources, heads=32, kv_heads=32)

    assert re.search(r"\b(?:global|buffer)_store_dwordx4\b", binary.asm["amdgcn"])


@pytest.mark.parametrize("order", _heads.ORDERS, ids="-".join)
def test_every_order_compiles(order):
    """Also the orders of builds of PyTorch that were read of, not seen."""

    assert compile_one("sm_90", order=order, heads=8).asm["ptx"]


def count_arithmetic(dtype):
    ptx = compile_pack("sm_90", heads=8, kv_heads=8, dtype=dtype).asm["ptx"]
    operations = count(ptx, r"\b(?:fma|mul|add|sub|neg)\.(?:rn\.)?f32\b")

    return collections.Counter(
        {name.replace(".rn", ""): number for name, number in operations.items()}
    )


def test_nothing_depends_on_the_default_of_fp_fusion(monkeypatch):
    """What is rounded is the same, whether Triton contracts by itself or not.

    The squares of 16-bit numbers are exact, so that contracting their sums changes no bit:
    that they are contracted shows that the setting was in force.
    """

    counts = {}

    for dtype in (torch.float32, torch.bfloat16):
        for setting in ("0", "1"):
            monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", setting)
            counts[dtype, setting] = count_arithmetic(dtype)

    assert counts[torch.float32, "0"] == counts[torch.float32, "1"]

    contracted = counts[torch.bfloat16, "1"] - counts[torch.bfloat16, "0"]
    apart = counts[torch.bfloat16, "0"] - counts[torch.bfloat16, "1"]
    # In 16 heads, the four squares of each lane: three of them are added to another.
    num_sums = 2 * 8 * 128 // 32 * 3 // 4

    assert set(contracted) == {"fma.f32"}
    assert apart == {"mul.f32": contracted["fma.f32"], "add.f32": contracted["fma.f32"]}
    assert contracted["fma.f32"] <= num_sums

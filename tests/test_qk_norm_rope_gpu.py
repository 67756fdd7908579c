"""`qk_norm_rope` and `qk_norm_rope_pack_` on a GPU: bits, layouts, sizes, graphs."""

import os
import subprocess
import sys

import pytest
import torch
from comparison import assert_all_equal_bits, assert_equal_bits, bits
from gpu_events import gpu_events
from qk_norm_rope_behaviour import *  # noqa: F403
from qk_norm_rope_behaviour import forget_layouts
from rope_inputs import make_pack, make_rope

from ntops_ext import reference
from ntops_ext.torch import (
    _qk_norm_rope,
    eager_rounding,
    qk_norm_rope,
    qk_norm_rope_pack_,
)
from ntops_ext.torch._eager import RoundingCache

pytestmark = pytest.mark.gpu

SOURCES = ["", "k", "v", "kv"]


@pytest.fixture(scope="module")
def device():
    return "cuda"


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def check_pack(inputs):
    """Every written tensor is what eager PyTorch gives; nothing else was written."""

    expected = inputs.expected(reference.qk_norm_rope_pack_)
    actual = qk_norm_rope_pack_(*inputs.arguments())
    check_results(actual, expected)
    inputs.assert_canaries()


def check_results(actual, expected):
    """Equal bits where the device promises them, else one rounding each time."""

    dtype, head_dim = expected[0].dtype, expected[0].shape[-1]
    rounding = eager_rounding(dtype, head_dim, expected[0].device)

    if rounding.is_reproduced:
        assert_all_equal_bits(actual, expected)

        return

    for one, other in zip(actual, expected, strict=True):
        assert reference.rotation_error(one, other) <= (
            8 if dtype == torch.float32 else 3
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_equality_is_promised(dtype, head_dim):
    """In 16 bits and these widths PyTorch's rounding is one that the kernel has."""

    rounding = eager_rounding(dtype, head_dim, "cuda")

    assert rounding.is_reproduced, rounding.reason


# Fewer elements cannot see a wrong order of additions: 3 in a million differ.
@pytest.mark.parametrize("sources", SOURCES)
def test_production_shape_has_every_bit_of_eager(sources):
    """[1, 4096, 32, 128] and a prefix of 27: 33 million rotated elements a call."""

    check_pack(
        make_pack(
            tokens=4096,
            prefix=27,
            heads=32,
            kv_heads=32,
            device="cuda",
            sources=sources,
        )
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ten_million_elements_have_every_bit_of_eager(dtype, head_dim):
    """Each dtype and width for which equality is promised."""

    inputs = make_pack(
        tokens=2**18 // head_dim,
        prefix=0,
        heads=40,
        kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
    )
    arguments = (inputs.q, inputs.q_weight, inputs.rope)

    assert inputs.q.numel() > 8_000_000
    assert_equal_bits(qk_norm_rope(*arguments), reference.qk_norm_rope(*arguments))


SHAPES = [
    {"batch": 2, "tokens": 17, "heads": 4, "kv_heads": 4},
    {"batch": 2, "tokens": 17, "heads": 6, "kv_heads": 6},
    {"tokens": 1, "prefix": 1, "heads": 1, "kv_heads": 1},
    {"tokens": 1, "prefix": 128, "heads": 32, "kv_heads": 4},
    {"tokens": 17, "heads": 30, "kv_heads": 30},
    {"batch": 2, "tokens": 37, "heads": 32, "kv_heads": 4},
    {"batch": 2, "heads": 40, "kv_heads": 40},
    {"tokens": 33, "heads": 2, "kv_heads": 12},
    {"prefix": 0},
    {"tokens": 0},
    {"padding": 5},
    {"padding": 8, "batch": 2},
    {"tokens": 300, "head_dim": 64, "heads": 24, "kv_heads": 24},
    {"tokens": 300, "head_dim": 96},
    {"tokens": 300, "head_dim": 256},
    {"tokens": 300, "head_dim": 80},
    {"tokens": 300, "head_dim": 2},
    {"tokens": 1, "head_dim": 256, "heads": 32, "kv_heads": 4},
    {"tokens": 1, "head_dim": 96, "heads": 32, "kv_heads": 4},
    {"tokens": 5, "head_dim": 4096, "heads": 2, "kv_heads": 2},
]

# A kernel takes seconds to make: the other dtypes in the shapes where they differ most.
OTHER_DTYPES = [
    {"tokens": 1, "prefix": 128, "heads": 32, "kv_heads": 4},
    {"padding": 5},
    *[{"tokens": 300, "head_dim": head_dim} for head_dim in (64, 96, 128, 256)],
]


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *[(shape, torch.bfloat16) for shape in SHAPES],
        *[(shape, torch.float16) for shape in OTHER_DTYPES],
        *[(shape, torch.float32) for shape in OTHER_DTYPES],
    ],
    ids=str,
)
def test_shapes_and_strides(shape, dtype):
    """Shapes of models and of nobody, with canaries around every tensor."""

    sources = ("", "kv")[shape.get("heads", 8) % 4 == 0]
    check_pack(make_pack(**shape, dtype=dtype, device="cuda", sources=sources))


@pytest.mark.parametrize("part", ["real", "imaginary"])
def test_cancelling_parts_have_every_bit_of_eager(part):
    """Where one part is nothing but rounding, the forms of a product differ (N5)."""

    inputs = make_pack(tokens=136, heads=1, kv_heads=1, device="cuda")
    identity = torch.ones_like(inputs.rope)
    weighted = reference.qk_norm_rope(inputs.q, inputs.q_weight, identity).float()
    pairs = torch.view_as_complex(weighted[0, :, 0].unflatten(-1, (-1, 2)))
    directions = pairs / pairs.abs()

    if part == "real":
        rope = torch.complex(directions.imag, directions.real)
    else:
        rope = directions.conj().resolve_conj()

    heads = inputs.q.expand(-1, -1, 8, -1).contiguous()
    expected = reference.qk_norm_rope(heads, inputs.q_weight, rope)

    assert_equal_bits(qk_norm_rope(heads, inputs.q_weight, rope), expected)


def test_special_rows_have_every_bit_of_eager():
    """Zeros of both signs, a subnormal, infinities, NaN, each in its own head."""

    heads = torch.randn(1, 2, 8, 128, device="cuda").to(torch.bfloat16)
    heads[0, 0, 0] = 0
    heads[0, 0, 1, 0::2], heads[0, 0, 1, 1::2] = -0.0, 0.0
    heads[0, 0, 2, 0::2], heads[0, 0, 2, 1::2] = 0.0, -0.0
    heads[0, 0, 3] = 0
    heads[0, 0, 3, 5] = 1e-39
    heads[0, 0, 4, 7] = float("inf")
    heads[0, 0, 5, 9] = -float("inf")
    heads[0, 0, 6, 11] = float("nan")
    weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)

    for rope in (
        torch.ones(2, 64, device="cuda", dtype=torch.complex64),
        make_rope(2, 128, "cuda"),
        make_rope(2, 128, "cuda").conj().resolve_conj(),
    ):
        for eps in (1e-6, 1e-30):
            expected = reference.qk_norm_rope(heads, weight, rope, eps)
            actual = qk_norm_rope(heads, weight, rope, eps=eps)
            is_number = ~expected.isnan()

            # Which NaN comes out is not promised.
            assert torch.equal(actual.isnan(), ~is_number)
            assert torch.equal(bits(actual)[is_number], bits(expected)[is_number])
            assert expected[0, 0, 6].isnan().all()
            assert not expected[0, 1].isnan().any()


def test_zero_rows_without_eps():
    """NaN in that head alone (X5)."""

    heads = torch.randn(1, 2, 8, 128, device="cuda").to(torch.bfloat16)
    heads[0, 0, 3] = 0
    weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    result = qk_norm_rope(heads, weight, make_rope(2, 128, "cuda"), eps=0.0)
    is_nan = result.isnan().all(-1)

    assert is_nan[0, 0, 3]
    assert is_nan.sum() == 1
    assert result.isnan().sum() == 128


def test_packed_views_are_written_in_place():
    """q, K and V of one tensor; the prefix's rows of q are untouched (L7)."""

    buffer = torch.randn(1, 38, 3, 8, 128, device="cuda").to(torch.bfloat16)
    old = buffer.clone()
    others = make_pack(device="cuda", sources="").arguments()[3:]
    views = [buffer[:, 5:, 0], buffer[:, :, 1], buffer[:, :, 2]]
    expected = [view.clone() for view in views]
    reference.qk_norm_rope_pack_(*expected, *others)
    qk_norm_rope_pack_(*views, *others)

    check_results(views, expected)
    assert_equal_bits(buffer[:, :5, 0], old[:, :5, 0])


def test_kept_prefixes_are_kept():
    """Prefixes, K and V that are the buffers' own rows already."""

    inputs = make_pack(device="cuda", tokens=100, prefix=50)
    expected = [one.clone() for one in inputs.written()]
    own = [
        inputs.k_out[:, :50],
        inputs.v_out[:, :50],
        inputs.k_out[:, 50:],
        inputs.v_out[:, 50:],
    ]
    others = inputs.arguments()[3:6]
    reference.qk_norm_rope_pack_(*expected, *others, *[one.clone() for one in own])
    actual = qk_norm_rope_pack_(*inputs.written(), *others, *own)

    check_results(actual, expected)
    inputs.assert_canaries()


def test_parts_of_a_sequence_equal_the_whole():
    """A row's bits are its own: alone, in halves, in another order (L15, N1)."""

    inputs = make_pack(device="cuda", tokens=64, heads=8)
    heads, weight, rope = inputs.q, inputs.q_weight, inputs.rope
    whole = qk_norm_rope(heads, weight, rope)

    for tokens in ([0, 3, 4, 7], [1, 2, 5, 6], [63], list(range(63, -1, -1))):
        part = qk_norm_rope(heads[:, tokens], weight, rope[tokens])

        assert_equal_bits(part, whole[:, tokens])

    for head in range(8):
        alone = qk_norm_rope(heads[:, :, head : head + 1].contiguous(), weight, rope)

        assert_equal_bits(alone, whole[:, :, head : head + 1])


def test_long_sequences_do_not_lose_positions():
    """Token 15962 of a table of float32 angles, against float64 (T5)."""

    tokens = 15963
    positions = torch.arange(tokens, device="cuda", dtype=torch.float64)
    frequencies = 10000.0 ** (
        -torch.arange(64, device="cuda", dtype=torch.float64) / 64
    )
    angles = torch.outer(positions, frequencies)
    rope = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    inputs = make_pack(tokens=tokens, prefix=0, heads=1, kv_heads=1, device="cuda")
    actual = qk_norm_rope(inputs.q, inputs.q_weight, rope)
    expected = reference.qk_norm_rope_in_float64(inputs.q, inputs.q_weight, rope)

    assert reference.rotation_error(actual[:, -1:], expected[:, -1:]) <= 1


@pytest.mark.parametrize("heads_per_program", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_warps", [1, 8])
def test_launch_choices_change_no_bit(launch_as, heads_per_program, num_warps):
    """Sixteen heads of q and four of K, in every partition (L10)."""

    shape = {"tokens": 9, "heads": 16, "kv_heads": 4, "device": "cuda"}
    expected, actual = make_pack(**shape), make_pack(**shape)
    qk_norm_rope_pack_(*expected.arguments())
    launch_as(heads_per_program, max(heads_per_program // 4, 1), num_warps)
    qk_norm_rope_pack_(*actual.arguments())

    assert_all_equal_bits(actual.written(), expected.written())


def test_no_race(launch_as):
    """In place on eight warps, fifty times from the same contents (I1)."""

    shape = {"tokens": 8, "heads": 64, "kv_heads": 8, "device": "cuda", "sources": ""}
    launch_as(64, 8, 8)
    expected = make_pack(**shape).expected(reference.qk_norm_rope_pack_)

    for _ in range(50):
        inputs = make_pack(**shape)
        check_results(qk_norm_rope_pack_(*inputs.arguments()), expected)


def test_one_kernel_and_no_allocation():
    """In place, on packed views, after the first call (L9)."""

    buffer = torch.randn(1, 4123, 3, 32, 128, device="cuda").to(torch.bfloat16)
    others = make_pack(
        tokens=4096, prefix=27, heads=32, kv_heads=32, device="cuda", sources=""
    ).arguments()[3:]
    views = buffer[:, 27:, 0], buffer[:, :, 1], buffer[:, :, 2]

    def call():
        qk_norm_rope_pack_(*views, *others)

    (event,) = gpu_events(call)

    assert "qk_norm_rope_pack" in event

    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


@pytest.mark.parametrize("sources", ["", "kv"])
def test_graphs_replay_with_new_contents(sources):
    """Captured after a first call; a replay computes from what lies there then."""

    inputs = make_pack(device="cuda", sources=sources)
    other = make_pack(device="cuda", sources=sources, seed=1)
    qk_norm_rope_pack_(*make_pack(device="cuda", sources=sources).arguments())
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        qk_norm_rope_pack_(*inputs.arguments())

    expected = other.expected(reference.qk_norm_rope_pack_)

    for one, new in zip(inputs.arguments(), other.arguments(), strict=True):
        if one is not None:
            one.copy_(new)

    graph.replay()

    check_results(inputs.written(), expected)
    inputs.assert_canaries()


def test_a_first_call_inside_a_capture_is_refused():
    """Finding out how PyTorch rounds would break the capture: the error says what to do."""

    cache = RoundingCache(_qk_norm_rope._run_for_comparison)
    device = torch.device("cuda", torch.cuda.current_device())
    ones = torch.ones(4, device="cuda")

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ones + 1

        with pytest.raises(RuntimeError, match="once before the capture"):
            cache.get(device, torch.bfloat16, 128)

    assert cache.get(device, torch.bfloat16, 128) == eager_rounding(device="cuda")


def test_other_streams():
    """The launch is on the current stream, and waits for what is there."""

    inputs = make_pack(device="cuda", tokens=512)
    expected = inputs.expected(reference.qk_norm_rope_pack_)
    new = [one.clone() for one in inputs.written()]

    for one in inputs.written():
        one.zero_()

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)

        for one, contents in zip(inputs.written(), new, strict=True):
            one.copy_(contents)

        qk_norm_rope_pack_(*inputs.arguments())

    stream.synchronize()

    check_results(inputs.written(), expected)


def test_mixed_devices_are_refused():
    """A table on the CPU is named, with both devices, and nothing is written (V2)."""

    inputs = make_pack(device="cuda")
    old = [one.clone() for one in inputs.written()]

    for name in ("rope", "k_weight", "v_src"):
        arguments = make_pack(device="cuda").arguments()
        position = list(vars(inputs)).index(name)
        arguments[:3] = inputs.written()
        arguments[position] = arguments[position].cpu()

        with pytest.raises(ValueError, match=f"`{name}`.*cuda.*cpu"):
            qk_norm_rope_pack_(*arguments)

    assert_all_equal_bits(inputs.written(), old)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current():
    """Everything on cuda:1 while cuda:0 is current (V2)."""

    with torch.cuda.device(0):
        check_pack(make_pack(device="cuda:1"))
        inputs = make_pack(device="cuda:1")
        inputs.rope = inputs.rope.to("cuda:0")

        with pytest.raises(ValueError, match="`rope`.*cuda:1.*cuda:0"):
            qk_norm_rope_pack_(*inputs.arguments())

        assert torch.cuda.current_device() == 0


def test_token_counts_do_not_multiply_kernels(monkeypatch):
    """Two hundred random token counts: one kernel a class of divisibility (P1)."""

    inputs = make_pack(tokens=8192, prefix=0, heads=16, kv_heads=1, device="cuda")
    # Finding that out launches kernels of its own.
    eager_rounding(device="cuda")
    forget_layouts()
    handles = set()
    launch = _qk_norm_rope.launch

    def record(handle, *args):
        handles.add(handle)
        launch(handle, *args)

    monkeypatch.setattr(_qk_norm_rope, "launch", record)
    counts = torch.randint(72, 8192, (200,), generator=torch.Generator().manual_seed(0))

    for tokens in counts.tolist():
        qk_norm_rope(inputs.q[:, :tokens], inputs.q_weight, inputs.rope[:tokens])

    (handle,) = handles
    kernels = handle._kernel.device_caches[torch.cuda.current_device()][0]

    # Divisible by 16 or not, and the batch stride of a single entry likewise.
    assert 1 <= len(kernels) <= 4


def test_nothing_depends_on_the_default_of_fp_fusion(tmp_path):
    """Equal to eager in processes where Triton contracts by itself, and does not."""

    program = """
import torch
from ntops_ext import reference
from ntops_ext.torch import eager_rounding, qk_norm_rope
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for head_dim in (64, 96, 128, 256):
        rounding = eager_rounding(dtype, head_dim)
        x = torch.randn(1, 4096, 8, head_dim, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
        angles = torch.rand(4096, head_dim // 2, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        y = qk_norm_rope(x, x[0, 0, 0].clone(), torch.polar(torch.ones_like(angles), angles))
        print(dtype, head_dim, rounding, y.view(torch.uint8).long().mul(torch.arange(y.numel() * y.element_size(), device="cuda").view(y.view(torch.uint8).shape) % 8191).sum().item())
"""  # noqa: E501
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "TRITON_DEFAULT_FP_FUSION": setting,
                "TRITON_CACHE_DIR": str(tmp_path / setting),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for setting in ("0", "1")
    ]

    assert outputs[0] == outputs[1]
    assert outputs[0].count("is_reproduced") == 12


@pytest.mark.slow
def test_tokens_past_the_32_bit_offsets():
    """Token 524,288 of 32 heads of 128 starts at element 2^31 (S4)."""

    inputs = make_pack(
        tokens=524290, prefix=2, heads=32, kv_heads=32, device="cuda", sources=""
    )
    tokens = [0, 524286, 524287, 524288, 524289]
    packed = [2 + token for token in tokens]
    expected = [
        reference.qk_norm_rope(
            inputs.q[:, tokens], inputs.q_weight, inputs.rope[tokens]
        ),
        reference.qk_norm_rope(
            inputs.k_out[:, packed], inputs.k_weight, inputs.rope[tokens]
        ),
        inputs.v_out[:, packed],
    ]
    qk_norm_rope_pack_(*inputs.arguments())
    actual = [
        inputs.q[:, tokens],
        inputs.k_out[:, packed],
        inputs.v_out[:, packed],
    ]

    check_results(actual, expected)
    assert_all_equal_bits(
        [inputs.k_out[:, :2], inputs.v_out[:, :2]], [inputs.k_prefix, inputs.v_prefix]
    )


@pytest.mark.slow
def test_a_single_tensor_past_the_32_bit_offsets():
    """Out of place, with a last token beyond 2^31 elements (S6)."""

    inputs = make_pack(
        tokens=524289, prefix=0, heads=32, kv_heads=1, device="cuda", sources=""
    )
    result = qk_norm_rope(inputs.q, inputs.q_weight, inputs.rope)
    tokens = [0, 1, 524287, 524288]
    expected = reference.qk_norm_rope(
        inputs.q[:, tokens], inputs.q_weight, inputs.rope[tokens]
    )

    check_results([result[:, tokens]], [expected])


@pytest.mark.slow
def test_a_batch_past_the_32_bit_offsets():
    """Entries that fit one by one, in a stride between them that does not."""

    buffer = torch.empty(3 * 2**30 + 2**20, dtype=torch.bfloat16, device="cuda")
    heads = buffer.as_strided((4, 100, 32, 128), (2**30, 4096, 128, 1))
    heads.normal_()
    weight = torch.ones(128, dtype=torch.bfloat16, device="cuda")
    rope = make_rope(100, 128, "cuda")
    expected = reference.qk_norm_rope(heads, weight, rope)

    check_results([qk_norm_rope(heads, weight, rope)], [expected])

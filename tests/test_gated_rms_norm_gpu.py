"""The kernel of `gated_rms_norm` on a GPU."""

import hashlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from comparison import assert_equal_bits
from gated_rms_norm_behaviour import *  # noqa: F403
from gated_rms_norm_behaviour import _distance
from gated_rms_norm_calls import DTYPES, MODES, make_call
from gated_rms_norm_kernel_behaviour import *  # noqa: F403
from gpu_events import gpu_events

from ntops_ext.torch import _launch, gated_rms_norm

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return f"cuda:{torch.cuda.current_device()}"


@pytest.fixture(scope="module")
def is_kernel():
    """Whether the NineToothed kernel runs, with what it alone promises."""

    return True


@pytest.fixture(scope="module")
def huge(device):
    return torch.zeros(2**31 + 1024, dtype=torch.float16, device=device)


# A row and its company.


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
@pytest.mark.parametrize("width", [128, 960, 1280, 5120])
def test_rows_of_any_number_have_the_bits_of_each_alone(device, width, mode, dtype):
    """Case N1: whatever the number of rows decides, it changes no bit."""

    call = make_call(4096, width, mode=mode, dtype=DTYPES[dtype], device=device)
    whole = call.run()

    for num_rows in (1, 2, 15, 16, 17, 31, 32, 33, 255, 257):
        assert_equal_bits(call.rows(slice(0, num_rows)).run(), whole[:num_rows])

    for row in (7, 1000, 4095):
        one = slice(row, row + 1)
        assert_equal_bits(call.rows(one).run(), whole[one])


@pytest.mark.parametrize("seed", range(32))
def test_eight_rows_together_and_one_by_one(device, seed):
    """Case N1, as it was reported."""

    call = make_call(8, 128, dtype=torch.bfloat16, seed=seed, device=device)
    alone = [call.rows(slice(row, row + 1)).run() for row in range(8)]

    assert_equal_bits(call.run(), torch.cat(alone))


def test_many_calls_repeat(device):
    """Bits do not depend on the run, nor on what runs beside it."""

    call = make_call(4096, 5120, dtype=torch.bfloat16, device=device)
    expected = call.run()
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    results = []

    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))

        with torch.cuda.stream(stream):
            results.append(call.run())

    torch.cuda.synchronize(device)

    for result in results:
        assert_equal_bits(result, expected)


# Full sizes.


@pytest.mark.parametrize(
    "shape, group_size, mode",
    [
        ((131072, 128), 128, "norm_first-silu"),
        ((4096, 32, 128), 128, "norm_first-sigmoid"),
        ((4096, 5120), 5120, "gate_first-silu"),
        ((4096, 8192), 1024, "gate_first-silu"),
        ((4096, 10240), 1280, "gate_first-silu"),
        ((2048, 7168), 3584, "plain"),
        ((1000, 16384), 16384, "gate_first-silu"),
        ((100, 65536), 65536, "norm_first-silu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(device, dtype, shape, group_size, mode):
    """Many rows, rounded once, in each dtype."""

    call = make_call(
        *shape, mode=mode, dtype=DTYPES[dtype], group_size=group_size, device=device
    )
    call.check(call.run())


@pytest.mark.parametrize("weight_dtype, limit", [("bf16", 2), ("fp32", 1)])
def test_near_the_chain_that_rounds_thrice_in_bfloat16(device, weight_dtype, limit):
    """Case N3: within 2 units of Qwen3-Next's module, 1 with a float32 weight."""

    call = make_call(
        8192,
        128,
        dtype=torch.bfloat16,
        weight_dtype=DTYPES[weight_dtype],
        eps=1e-6,
        device=device,
    )
    input, gate, weight = (call.tensors[one] for one in ("input", "gate", "weight"))

    value = input.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)
    value = weight * value.to(torch.bfloat16)
    value = value * torch.nn.functional.silu(gate.float())

    assert _distance(call.run(), value.to(torch.bfloat16)) <= limit


def test_near_the_chain_that_rounds_twice_in_bfloat16(device):
    """Case N3: within a unit of Mamba-2's module."""

    call = make_call(
        8192, 128, mode="gate_first-silu", dtype=torch.bfloat16, device=device
    )
    input, gate, weight = (call.tensors[one] for one in ("input", "gate", "weight"))

    value = input.float() * torch.nn.functional.silu(gate.float())
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5)
    value = weight * value.to(torch.bfloat16)

    assert _distance(call.run(), value) <= 1


# What a call does.


def _strided_call(device):
    projection = torch.randn(4096, 12288, device=device).to(torch.bfloat16)
    call = make_call(4096, 32, 128, dtype=torch.bfloat16, device=device)

    return call.with_tensors(gate=projection[:, 8192:].view(4096, 32, 128))


@pytest.mark.parametrize("layout", ["dense", "strided", "transposed", "last_stride_2"])
def test_a_call_is_one_kernel(device, layout):
    """No cast, no copy: exactly one kernel, whatever the strides and dtypes."""

    call = {
        "dense": lambda: make_call(
            4096, 5120, dtype=torch.bfloat16, weight_dtype=torch.float32, device=device
        ),
        "strided": lambda: _strided_call(device),
        "transposed": lambda: make_call(
            64, 8, 256, dtype=torch.float16, device=device
        ).with_tensors(
            gate=torch.randn(8, 64, 256, device=device).half().transpose(0, 1)
        ),
        "last_stride_2": lambda: make_call(
            64, 256, dtype=torch.bfloat16, device=device
        ).with_tensors(input=torch.randn(64, 512, device=device)[:, ::2]),
    }[layout]()

    (name,) = gpu_events(call.run)

    assert "gated_rms_norm" in name


@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_memory_grows_by_the_result_only(device, layout):
    """Case L1: no hidden copy of the gate."""

    call = (
        _strided_call(device)
        if layout == "strided"
        else make_call(4096, 4096, dtype=torch.bfloat16, device=device)
    )
    size = call.run().nbytes
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call.run()

    assert torch.cuda.max_memory_allocated(device) - before == size
    assert_equal_bits(result, call.contiguous().run())


def test_nothing_is_allocated_for_a_given_result(device):
    """With `out=` a call allocates nothing."""

    call = make_call(64, 4096, dtype=torch.bfloat16, device=device)
    out = call.run()
    call.run(out=out)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    call.run(out=out)

    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


def test_numbers_of_rows_share_their_binaries(device, monkeypatch):
    """Case P2: from 1 row to 131072, a width has at most three binaries."""

    handles = set()
    launch = _launch.launch

    def record(handle, *args):
        handles.add(handle)
        launch(handle, *args)

    monkeypatch.setattr(_launch, "launch", record)

    for num_rows in (1, 7, 64, 4096, 131072):
        # A width of this test alone, so that no other call has made its kernels.
        make_call(num_rows, 136, dtype=torch.bfloat16, device=device).run()

    index = torch.device(device).index
    binaries = [len(handle._kernel.device_caches[index][0]) for handle in handles]

    assert 1 <= sum(binaries) <= 3


def test_the_current_stream_is_used(device):
    """A call waits for what its stream does, and nothing else."""

    call = make_call(1024, 1024, dtype=torch.bfloat16, device=device)
    expected = call.run()
    late = torch.zeros_like(call.tensors["input"])
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))

    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(call.tensors["input"])
        result = call.with_tensors(input=late).run()

    stream.synchronize()

    assert_equal_bits(result, expected)


@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_a_call_can_be_captured_and_replayed(device, layout):
    """A CUDA graph computes from what its inputs hold when it is replayed."""

    call = (
        _strided_call(device)
        if layout == "strided"
        else make_call(33, 5120, dtype=torch.bfloat16, device=device)
    )
    call.run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        result = call.run()

    for seed in range(2):
        generator = torch.Generator(device).manual_seed(seed)

        for tensor in call.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))

        graph.replay()
        torch.cuda.synchronize(device)

        assert_equal_bits(result, call.run())


def test_gradients_are_refused_or_right(device):
    """What has no gradients must say so, and compute nothing."""

    call = make_call(8, 128, device=device)
    weight = call.tensors["weight"].clone().requires_grad_()

    with torch.no_grad():
        assert_equal_bits(call.with_tensors(weight=weight).run(), call.run())

    with torch.inference_mode():
        assert_equal_bits(call.run().clone(), call.run())

    out = torch.zeros(8, 128, device=device)

    with pytest.raises(ValueError, match="`out`.*gradients"):
        call.with_tensors(weight=weight).run(out=out)

    assert not out.any()


# Devices.


@pytest.mark.parametrize("name", ["gate", "weight", "bias", "out"])
def test_a_tensor_on_the_cpu_is_refused(device, name):
    """By name, with both devices."""

    call = make_call(4, 64, bias=True, device=device)
    elsewhere = {**call.tensors, "out": call.tensors["input"]}[name].cpu()

    with pytest.raises(ValueError, match=f"`{name}`.*{device}.*cpu"):
        call.run(**{name: elsewhere})


def test_a_device_that_is_not_current(device):
    """Case V1, forward: the tensors' device runs it, and the current one stays."""

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    call = make_call(64, 1024, dtype=torch.bfloat16, device="cuda:1")

    with torch.cuda.device(0):
        result = call.run()
        assert torch.cuda.current_device() == 0

        with pytest.raises(ValueError, match="`weight`.*cuda:1.*cuda:0"):
            call.run(weight=call.tensors["weight"].to("cuda:0"))

    torch.cuda.synchronize(1)

    assert result.device == torch.device("cuda:1")
    call.check(result)


# Contraction.

ROOT = pathlib.Path(__file__).resolve().parent.parent


def digest_of_results():
    """A digest of the bits of calls in every mode, for another process to compare."""

    digest = hashlib.sha256()

    for dtype in DTYPES.values():
        for mode in MODES:
            for group_size in (96, 128, 1280, 20000):
                call = make_call(
                    33,
                    2 * group_size,
                    mode=mode,
                    dtype=dtype,
                    bias=True,
                    group_size=group_size,
                    weight_offset=1.0,
                    device="cuda",
                )
                digest.update(call.run().view(torch.uint8).cpu().numpy().tobytes())

    return digest.hexdigest()


def test_bits_do_not_depend_on_contraction(device):
    """Whether Triton may fuse a product into a sum changes nothing."""

    code = "import test_gated_rms_norm_gpu as module; print(module.digest_of_results())"
    digests = {
        fusion: subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "tests", *sys.path])),
                "TRITON_DEFAULT_FP_FUSION": fusion,
            },
            check=True,
            capture_output=True,
            text=True,
            timeout=500,
        ).stdout.split()[-1]
        for fusion in ("0", "1")
    }

    assert len(digests["0"]) == 64
    assert digests["0"] == digests["1"]


# Past 2^31 elements. Forward only.


def _check_large(call, rows, rows_per_part):
    """Require named rows to be right, and all rows to have the bits of smaller calls."""

    result = call.run()
    num_rows = result.shape[0]

    for row in rows:
        one = slice(row, row + 1) if row != -1 else slice(num_rows - 1, num_rows)
        call.rows(one).check(result[one])

    for start in range(0, num_rows, rows_per_part):
        part = slice(start, start + rows_per_part)
        assert torch.equal(call.rows(part).run(), result[part])


def _large_call(device, *shape, mode, group_size=None, gate_stride=None):
    """A bfloat16 call whose tensors are filled where they lie."""

    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes):
        return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(
            generator=generator
        )

    call = make_call(
        1,
        shape[-1],
        mode=mode,
        dtype=torch.bfloat16,
        group_size=group_size,
        device=device,
    )
    tensors = {"input": draw(*shape)}

    if mode != "plain":
        tensors["gate"] = (
            draw(*shape)
            if gate_stride is None
            else draw(*shape[:-1], gate_stride)[..., : shape[-1]]
        )

    return call.with_tensors(**tensors)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
@pytest.mark.parametrize(
    "num_rows, width", [(2**20 + 1, 2048), (2**19 + 1, 4096), (2**23 + 16, 256)]
)
def test_a_row_more_than_2_to_the_31_elements(device, num_rows, width, mode):
    """Case S1: 2^31 elements and a row, of both tensors."""

    call = _large_call(device, num_rows, width, mode=mode)
    middle = num_rows // 2
    _check_large(call, [0, middle - 1, middle, num_rows - 2, -1], 2**18)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 12, 6144, 128), (256, 1, 8200, 1024)], ids=str)
def test_many_dimensions_past_2_to_the_31(device, shape):
    """Case S2, forward: rows around the flat offset 2^31 and the last."""

    call = _large_call(device, *shape, mode="plain")
    result = call.run()
    input = call.tensors["input"].view(-1, shape[-1])
    flat = result.view(-1, shape[-1])
    boundary = 2**31 // shape[-1]

    for row in (0, boundary - 1, boundary, boundary + 1, flat.shape[0] - 1):
        one = slice(row, row + 1)
        call.with_tensors(input=input[one]).check(flat[one])


@pytest.mark.slow
def test_a_million_rows(device):
    """Case S3: 4.1 thousand million elements, no gate."""

    call = _large_call(device, 1_000_000, 4096, mode="plain")
    _check_large(call, [0, 524_287, 524_288, 524_289, -1], 2**18)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [65536 * 64, 65536 * 128])
def test_twice_2_to_the_31_elements(device, num_rows):
    """Case S5: 2^32 elements, and 2^31 as a control."""

    call = _large_call(device, num_rows, 512, mode="plain")
    _check_large(call, [0, num_rows // 2 - 1, num_rows // 2, num_rows - 2, -1], 2**20)


@pytest.mark.slow
def test_a_gate_whose_offsets_pass_2_to_the_31(device):
    """A slice of rows of 22656, 131072 of them; the input alone would fit."""

    call = _large_call(
        device,
        131072,
        8192,
        mode="gate_first-silu",
        group_size=1024,
        gate_stride=22656,
    )
    boundary = 2**31 // 22656
    _check_large(call, [0, boundary, boundary + 1, 131070, -1], 2**15)


@pytest.mark.slow
def test_in_place_past_2_to_the_31(device):
    """Parts of a call write where they should."""

    call = _large_call(device, 2**19 + 3, 4096, mode="gate_first-silu")
    expected = call.run()
    input = call.tensors["input"]

    assert gated_rms_norm(**{**call.tensors, **call.options}, out=input) is input
    assert torch.equal(input, expected)

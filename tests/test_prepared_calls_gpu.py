"""Prepared calls on a GPU: the bits of a call that goes the whole way, on each device, stream and in a graph."""

import pytest
import torch
from rope_inputs import make_pack, make_rope

import ntops_ext
from ntops_ext.torch import _gated_rms_norm, _qk_norm_rope, _qk_norm_rope_pack

pytestmark = pytest.mark.gpu

MODULES = (_gated_rms_norm, _qk_norm_rope, _qk_norm_rope_pack)


def norm(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    projection = torch.randn(64, 1024, generator=generator, device=device).half()
    weight = torch.nn.Parameter(torch.randn(256, generator=generator, device=device))

    return lambda: ntops_ext.torch.gated_rms_norm(
        projection[:, :256], weight, projection[:, 512:768], group_size=128
    )


def norm_out(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    input, gate = torch.randn(2, 64, 256, generator=generator, device=device)
    out = torch.empty_like(input)

    return lambda: ntops_ext.torch.gated_rms_norm(input, gate=gate, out=out)


def rope(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    heads = torch.randn(2, 33, 8, 128, generator=generator, device=device).bfloat16()
    weight = torch.ones(128, dtype=torch.bfloat16, device=device)
    table = make_rope(33, 128, device, generator)

    return lambda: ntops_ext.torch.qk_norm_rope(heads, weight, table)


def pack(device, seed):
    inputs = make_pack(device=device, seed=seed, heads=8, kv_heads=4)
    original = [tensor.clone() for tensor in inputs.written()]

    def call():
        for tensor, values in zip(inputs.written(), original, strict=True):
            tensor.copy_(values)

        return ntops_ext.torch.qk_norm_rope_pack_(*inputs.arguments())

    return call


CALLS = {"norm": norm, "norm, out": norm_out, "rope": rope, "pack": pack}


def forget():
    for module in MODULES:
        module._prepared_calls.clear()

        for known in ("layouts", "_layouts_of_calls"):
            if hasattr(module, known):
                getattr(module, known).clear()


def copies(result):
    results = result if isinstance(result, tuple) else (result,)

    return [tensor.clone() for tensor in results]


def whole_way(call):
    forget()

    return copies(call())


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.device == other.device
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.fixture(params=CALLS)
def make(request):
    forget()

    with torch.no_grad():
        yield CALLS[request.param]

    forget()


def num_prepared():
    return sum(len(module._prepared_calls.recent) for module in MODULES)


def test_results_are_those_of_the_whole_way(make):
    """Other tensors each time, so that an address that was kept would show."""

    calls = [make("cuda", seed) for seed in range(3)]
    expected = [whole_way(call) for call in calls]

    for _ in range(3):
        for call, result in zip(calls, expected, strict=True):
            assert_same(copies(call()), result)

    assert num_prepared() > 0


def test_a_prepared_call_follows_the_stream(make):
    """Its input is written on a stream of its own, late."""

    call = make("cuda", 0)
    expected = whole_way(call)

    for _ in range(3):
        call()

    assert num_prepared() > 0
    stream = torch.cuda.Stream()

    for _ in range(3):
        torch.cuda.synchronize()

        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            result = call()
            done = stream.record_event()

        assert not done.query()
        stream.synchronize()
        assert_same(copies(result), expected)


def test_a_prepared_call_is_captured(make):
    """And replayed."""

    call = make("cuda", 0)
    expected = whole_way(call)

    for _ in range(3):
        call()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        result = call()

    for tensor in result if isinstance(result, tuple) else (result,):
        tensor.zero_()

    graph.replay()
    torch.cuda.synchronize()
    assert_same(copies(result), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(make):
    """Prepared on the one, called on the other, with the other current and not."""

    calls = [make(f"cuda:{index}", index) for index in range(2)]
    expected = []

    for index, call in enumerate(calls):
        with torch.cuda.device(index):
            expected.append(whole_way(call))

    for current in (0, 1, 0, 1):
        with torch.cuda.device(current):
            for _ in range(3):
                for call, result in zip(calls, expected, strict=True):
                    assert_same(copies(call()), result)

"""Prepared calls on a GPU: the bits of a call that goes the whole way, on each device, stream and in a graph."""

import pytest
import torch
from operator_calls import CALLS, MODULES, copies, forget, whole_way

pytestmark = pytest.mark.gpu


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
            torch.cuda._sleep(200_000_000)
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

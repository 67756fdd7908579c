"""Device time and host time of a call, each on its own clock."""

import statistics
import time

import torch
import triton

# Launches in one graph, where the cost of one launch of the graph must not show.
LAUNCHES_PER_GRAPH = 20


def cold_device_time(function, *, milliseconds=60):
    """Microseconds of one call as a CUDA graph, with the L2 cache cleared before it.

    The launch of the graph is included. Returns the median, and the distance between the
    20th and the 80th percentile.
    """

    graph = _capture(function, 1)
    low, median, high = triton.testing.do_bench(
        graph.replay, warmup=10, rep=milliseconds, quantiles=(0.2, 0.5, 0.8)
    )

    return 1e3 * median, 1e3 * (high - low)


def warm_device_time(function, *, rounds=15):
    """Microseconds a call of `LAUNCHES_PER_GRAPH` back to back in one CUDA graph."""

    graph = _capture(function, LAUNCHES_PER_GRAPH)
    times = []

    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / LAUNCHES_PER_GRAPH)

    return _median_and_spread(times)


def host_time(function, *, calls=300, rounds=9):
    """Microseconds of wall clock a call, without waiting for the device in between."""

    function()
    torch.cuda.synchronize()
    times = []

    for _ in range(rounds):
        start = time.perf_counter()

        for _ in range(calls):
            function()

        times.append(1e6 * (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()

    return _median_and_spread(times)


def _capture(function, launches):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(stream):
        for _ in range(3):
            function()

    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        for _ in range(launches):
            function()

    return graph


def _median_and_spread(times):
    quantiles = statistics.quantiles(times, n=5)

    return statistics.median(times), quantiles[-1] - quantiles[0]

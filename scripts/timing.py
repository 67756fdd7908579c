"""Device time and host time of calls, each on its own clock.

Calls that are compared take turns, so that what the machine does meanwhile meets them all.
On a CPU nothing here says anything about a kernel: each call is timed once by the wall clock,
so that a script runs to its end there, and `NOT_MEANINGFUL` is printed above its table.
"""

import functools
import statistics
import time

import torch

# Launches in one graph, where the cost of one launch of the graph must not show.
LAUNCHES_PER_GRAPH = 20

# So few that their launches fit into the device's queue of about a thousand, which otherwise
# makes the host wait: a call of PyTorch's eager chain makes a dozen.
HOST_CALLS = 50

NOT_MEANINGFUL = "These times are of a CPU, and mean nothing."


def all_times(functions, *, device, quick=False):
    """Every time of every function, in microseconds, as a benchmark's record keeps it.

    `cold_us`: one call as a CUDA graph, with the L2 cache cleared before it; the launch of
    the graph is included. `warm_us`: a call of `LAUNCHES_PER_GRAPH` back to back in one
    graph. `host_us`: wall clock a call, without waiting for the device in between. Each is a
    median over rounds, and with `_spread` in its name the distance between the 20th and the
    80th percentile of these.
    """

    if device == "cpu":
        clocks = dict.fromkeys(("cold", "warm", "host"), _once(functions))
    else:
        clocks = {
            "cold": _cold_times(functions, rounds=3 if quick else 5),
            "warm": _warm_times(functions, rounds=7 if quick else 15),
            "host": _host_times(functions, rounds=7 if quick else 15, calls=HOST_CALLS),
        }

    times = {name: {} for name in functions}

    for clock, samples in clocks.items():
        for name, values in samples.items():
            median, spread = _median_and_spread(values)
            times[name][f"{clock}_us"] = median
            times[name][f"{clock}_spread_us"] = spread

    return times


def cold_device_time(function, *, milliseconds=60):
    """The median and the spread of `cold_us` over single runs."""

    from triton.testing import do_bench

    low, median, high = do_bench(
        _capture(function, 1).replay,
        warmup=10,
        rep=milliseconds,
        quantiles=(0.2, 0.5, 0.8),
    )

    return 1e3 * median, 1e3 * (high - low)


def warm_device_time(function, *, rounds=15):
    """The median and the spread of `warm_us`."""

    return _median_and_spread(_warm_times({"": function}, rounds=rounds)[""])


def host_time(function, *, rounds=15, calls=HOST_CALLS):
    """The median and the spread of `host_us`."""

    samples = _host_times({"": function}, rounds=rounds, calls=calls)

    return _median_and_spread(samples[""])


def host_times(functions, *, rounds, calls):
    """Host time of each function: the median over rounds, and the spread between quartiles.

    `calls` launches have to fit into the device's queue.
    """

    samples = _host_times(functions, rounds=rounds, calls=calls)

    return {name: summary(values) for name, values in samples.items()}


def summary(samples):
    """The median, and the distance between the quartiles."""

    low, middle, high = statistics.quantiles(samples, n=4)

    return {"median": middle, "spread": high - low}


def wall_time(function):
    """One call by the wall clock, for a CPU, in the form of `cold_device_time`."""

    return _median_and_spread(_once({"": function})[""])


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cold_times(functions, *, rounds):
    from triton.testing import do_bench

    graphs = {name: _capture(function, 1) for name, function in functions.items()}
    samples = {name: [] for name in functions}

    for _ in range(rounds):
        for name, graph in graphs.items():
            _, median, _ = do_bench(
                graph.replay, warmup=5, rep=20, quantiles=(0.2, 0.5, 0.8)
            )
            samples[name].append(1e3 * median)

    return samples


def _warm_times(functions, *, rounds):
    graphs = {
        name: _capture(function, LAUNCHES_PER_GRAPH)
        for name, function in functions.items()
    }
    samples = {name: [] for name in functions}

    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(1e3 * start.elapsed_time(end) / LAUNCHES_PER_GRAPH)

    return samples


def _host_times(functions, *, rounds, calls):
    samples = {name: [] for name in functions}

    for function in functions.values():
        for _ in range(calls):
            function()

    synchronize()

    for _ in range(rounds):
        for name, function in functions.items():
            repeat = range(calls)
            start = time.perf_counter()

            for _ in repeat:
                function()

            samples[name].append((time.perf_counter() - start) / calls * 1e6)
            # Between two functions, never within one.
            synchronize()

    return samples


def _once(functions):
    samples = {}

    for name, function in functions.items():
        start = time.perf_counter()
        function()
        samples[name] = [(time.perf_counter() - start) * 1e6] * 2

    return samples


@functools.cache
def _capture_stream():
    return torch.cuda.Stream()


def on_capture_stream(function):
    """What `function` returns, called on the stream on which functions are captured.

    A function that differentiates what was computed before has to have computed it there:
    autograd goes back on the stream of the way forth.
    """

    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(stream):
        result = function()

    torch.cuda.current_stream().wait_stream(stream)

    return result


def _capture(function, launches):
    for _ in range(3):
        on_capture_stream(function)

    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph, stream=_capture_stream()):
        for _ in range(launches):
            function()

    return graph


def _median_and_spread(samples):
    quantiles = statistics.quantiles(samples, n=5)

    return statistics.median(samples), quantiles[-1] - quantiles[0]

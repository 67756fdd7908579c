"""Host time of calls that take turns, with a GPU or without one."""

import contextlib
import json
import pathlib
import statistics
import sys
import time

import torch

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"


def host_times(functions, *, rounds, calls):
    """Microseconds a call: for each function the median over rounds, and the spread between the quartiles.

    The functions take turns, so that what the machine does meanwhile meets them all. The device is waited for between
    two, never within one: `calls` launches have to fit into its queue.
    """

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
            synchronize()

    return {name: summary(values) for name, values in samples.items()}


def summary(samples):
    low, middle, high = statistics.quantiles(samples, n=4)

    return {"median": middle, "spread": high - low}


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def launching():
    """The device to put tensors on. Without a GPU that is the CPU, and launches do nothing."""

    if torch.cuda.is_available():
        yield "cuda"

        return

    sys.path.insert(0, str(TESTS))
    import recording_driver

    # A function of C that takes whatever it is given, and is quick about it.
    recording_driver.RecordingDriver._record = staticmethod("".format)
    recording_driver.RecordingDriver._benchmark = staticmethod(
        lambda launch, quantiles: [1.0] * 3
    )

    with recording_driver.recording():
        yield "cpu"


def call(handle, arguments):
    """A call with these arguments, written out: packing and unpacking them costs 0.2 us."""

    names = [f"a{index}" for index in range(len(arguments))]
    source = f"lambda: handle({', '.join(names)})"

    return eval(source, {"handle": handle, **dict(zip(names, arguments, strict=True))})


def write(path, records):
    """Write `records` as JSON lines, if there is a `path`."""

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

"""Many calls of changing shapes: do the host's memory, the device's, or the time of a call grow?

    python scripts/soak.py [--device cuda|cpu] [--calls N] [--slices N] [--quick] [--output FILE.jsonl]

Two handles with launch plans, one of them auto-tuned, the three operators, and, uncounted, `torch.add` take turns. Nine
calls in ten have a shape of which there are fewer than plans may be held, the tenth has one of more than anything here
remembers. A record is one slice of the calls: the memory after it, the median host time of a call in it, and what
became of the calls so far. The exit status is 1 if, in the second half of a million calls or more, the memory of either
side grew by more than `ALLOWED_GROWTH`. On a CPU launches do nothing: that is a soak of everything above the launch.
"""

import collections
import dataclasses
import gc
import os
import random
import statistics
import sys
import time
import typing

import launch_cases
import results
import torch
from command_line import make_parser, parse
from environment import describe_environment, print_environment

import ninetoothed_patches
import ntops_ext
from ntops_ext.torch import _launch, _qk_norm_rope, _qk_norm_rope_pack

# MiB.
ALLOWED_GROWTH = 16.0

# Of fewer, all that is remembered up to a bound still fills up in the second half.
JUDGED_CALLS = 10**6

# Of each callee's calls, every one of this many has a shape of the many.
BEYOND_EVERY = 10

# Calls whose arguments are made before they are timed.
PREPARED_CALLS = 200

# More than layouts are remembered (4096), and plans held (1024).
MANY_ROWS = 10_000

COLUMNS, HEADS, HEAD_DIM, PREFIX = 128, 2, 64, 3

MEBIBYTE = 2.0**20

# What a call costs that remembers nothing. It is not counted among the calls.
FLOOR = "torch.add"


@dataclasses.dataclass(frozen=True)
class Callee:
    """What is called, and with which shapes.

    :param arguments: A function of a number of rows and of `random.Random` that returns arguments and keywords.
    :param within: Numbers of rows, fewer than plans may be held.
    :param beyond: Numbers of rows, more than that.
    """

    function: typing.Callable
    arguments: typing.Callable
    within: range
    beyond: range


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument("--calls", type=int, help="in all; 1,000,000 unless --quick")
    parser.add_argument("--slices", type=int, help="of which each is a record")
    options = parse(parser, arguments, interpret=False)
    is_tiny = options.quick and options.device == "cpu"
    calls = options.calls or (2000 if is_tiny else 100_000 if options.quick else 10**6)
    slices = options.slices or (4 if is_tiny else 20 if options.quick else 100)

    if not 1 < slices <= calls:
        parser.error(
            f"--slices {slices}: must be at least 2 and at most --calls {calls}"
        )

    with launch_cases.launching(options.device), torch.no_grad():
        if options.device == "cpu":
            # Launches do nothing there, and have to be made for that.
            for module in (_launch, _qk_norm_rope, _qk_norm_rope_pack):
                module.runs_kernel = lambda tensor: True

        environment = describe_environment()
        print_environment(environment)
        records = results.write(
            options.output,
            soak(make_callees(options.device), options.device, calls, slices),
            environment,
        )

    if options.device == "cpu":
        print(launch_cases.LAUNCHES_DO_NOTHING)

    print_table(records)

    return int(calls >= JUDGED_CALLS and has_grown(records))


def make_callees(device):
    """What is called, by name."""

    def randn(*shape):
        return torch.randn(shape, device=device).to(torch.bfloat16)

    norm = ntops_ext.torch.gated_rms_norm
    x, gate = (randn(MANY_ROWS, COLUMNS) for _ in range(2))
    out = randn(2 * MANY_ROWS, COLUMNS)
    weight, head_weight = randn(COLUMNS), randn(HEAD_DIM)
    q, k, v = (randn(1, MANY_ROWS, HEADS, HEAD_DIM) for _ in range(3))
    k_out, v_out = (randn(1, PREFIX + MANY_ROWS, HEADS, HEAD_DIM) for _ in range(2))
    k_prefix, v_prefix = (randn(1, PREFIX, HEADS, HEAD_DIM) for _ in range(2))
    angles = torch.rand(MANY_ROWS, HEAD_DIM // 2, device=device)
    rope = torch.polar(torch.ones_like(angles), angles)
    vectors = launch_cases.arguments_of_five(device)[2:4]
    matrices = [torch.ones(MANY_ROWS, COLUMNS, device=device) for _ in range(3)]

    def arguments_of_handle(rows, generator):
        first, second, third = (matrix[:rows] for matrix in matrices)

        return (first, second, *vectors, third, 1e-5, 1.0), {}

    def arguments_of_norm(rows, generator):
        return (x[:rows], weight, gate[:rows]), {}

    def arguments_of_norm_out(rows, generator):
        # Written to another place each time.
        start = generator.randrange(MANY_ROWS)

        return (x[:rows], weight, gate[:rows]), {"out": out[start : start + rows]}

    def arguments_of_rope(rows, generator):
        return (q[:, :rows], head_weight, rope[:rows]), {}

    def arguments_of_pack(rows, generator):
        packed = PREFIX + rows

        return (
            q[:, :rows],
            k_out[:, :packed],
            v_out[:, :packed],
            head_weight,
            head_weight,
            rope[:rows],
            k_prefix,
            v_prefix,
            k[:, :rows],
            v[:, :rows],
        ), {}

    def arguments_of_add(rows, generator):
        return (x[:rows], gate[:rows]), {"out": out[:rows]}

    few, many = range(17, 65), range(65, MANY_ROWS)

    return {
        FLOOR: Callee(torch.add, arguments_of_add, few, few),
        "handle": Callee(
            ninetoothed_patches.planned(launch_cases.five(), max_plans=64),
            arguments_of_handle,
            few,
            many,
        ),
        # Every shape is tuned for, which takes a device about a second.
        "auto-tuned handle": Callee(
            ninetoothed_patches.planned(launch_cases.five_tuned(), max_plans=8),
            arguments_of_handle,
            range(17, 23),
            range(23, 35),
        ),
        "gated_rms_norm": Callee(norm, arguments_of_norm, few, many),
        "gated_rms_norm, out": Callee(norm, arguments_of_norm_out, few, many),
        "qk_norm_rope": Callee(
            ntops_ext.torch.qk_norm_rope, arguments_of_rope, few, many
        ),
        "qk_norm_rope_pack_": Callee(
            ntops_ext.torch.qk_norm_rope_pack_, arguments_of_pack, few, many
        ),
    }


def soak(callees, device, calls, slices):
    """The records, one a slice."""

    generator = random.Random(0)
    endless = calls_in_turn(callees, generator)
    done = 0
    # What the imports made need not be gone through at every slice.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()

    try:
        for index in range(slices):
            target = calls * (index + 1) // slices
            times = collections.defaultdict(list)

            while done < target:
                prepared = []

                while done < target and len(prepared) < PREPARED_CALLS:
                    prepared.append(next(endless))
                    done += prepared[-1][0][0] != FLOOR

                run(prepared, times)

            if device == "cuda":
                torch.cuda.synchronize()

            yield {
                "benchmark": "soak",
                "device": device,
                "calls": done,
                "seconds": round(time.perf_counter() - start, 3),
                "times": {
                    " ".join(kind): round(1e-3 * statistics.median(samples), 3)
                    for kind, samples in times.items()
                },
                **memory(device),
                **counts(),
            }
    finally:
        # What is frozen is not collected at the end of the interpreter either, and Triton's library says that it leaks.
        gc.unfreeze()


def calls_in_turn(callees, generator):
    """Without end: a kind of call, its callee's function, and arguments that are made now."""

    number = 0

    while True:
        for name, callee in callees.items():
            is_beyond = number % BEYOND_EVERY == BEYOND_EVERY - 1
            rows = generator.choice(callee.beyond if is_beyond else callee.within)
            kind = name, "beyond" if is_beyond else "within"

            yield kind, callee.function, *callee.arguments(rows, generator)

        number += 1


def run(prepared, times):
    clock = time.perf_counter_ns

    for kind, function, arguments, keywords in prepared:
        before = clock()
        function(*arguments, **keywords)
        times[kind].append(clock() - before)


def memory(device):
    """In MiB: of this process, of PyTorch's allocator, and of the whole device."""

    # When the collector runs by itself is no matter of ours.
    gc.collect()

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])

    measured = {"host_mib": pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE}

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        measured |= {
            "allocated_mib": torch.cuda.memory_allocated() / MEBIBYTE,
            "reserved_mib": torch.cuda.memory_reserved() / MEBIBYTE,
            "device_mib": (total - free) / MEBIBYTE,
        }

    return {name: round(value, 3) for name, value in measured.items()}


def counts():
    info = ninetoothed_patches.cache_info()

    return {
        "hits": info.hits,
        "misses": info.misses,
        "bypasses": sum(info.bypasses.values()),
        "evictions": info.evictions,
        "plans": info.plans,
    }


def growth(records):
    """In MiB, what each memory gained over the second half."""

    middle, last = records[len(records) // 2 - 1], records[-1]

    return {name: last[name] - middle[name] for name in last if name.endswith("_mib")}


def has_grown(records):
    return any(gain > ALLOWED_GROWTH for gain in growth(records).values())


def print_table(records):
    shown = records[:: max(1, len(records) // 10)]
    memories = [name for name in records[0] if name.endswith("_mib")]
    print(f"{'calls':>9}" + "".join(f"{name:>15}" for name in memories), end="")
    print(f"{'plans':>7}{'evictions':>11}{'within, us':>12}{'beyond, us':>12}")

    for record in shown:
        print(f"{record['calls']:9}", end="")
        print("".join(f"{record[name]:15.1f}" for name in memories), end="")
        print(f"{record['plans']:7}{record['evictions']:11}", end="")

        for where in ("within", "beyond"):
            medians = [
                median
                for kind, median in record["times"].items()
                if kind.endswith(where) and not kind.startswith(FLOOR)
            ]
            print(f"{statistics.fmean(medians) if medians else 0.0:12.2f}", end="")

        print()

    for name, gain in growth(records).items():
        print(f"{name}, second half: {gain:+.1f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

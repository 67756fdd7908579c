"""Host time of a NineToothed call, unpatched and from a plan, beside `torch.add(x, y, out=z)` in the same run.

    python scripts/benchmark_launch.py [--device cuda|cpu] [--quick] [--output FILE.jsonl]

Wall clock a call over hundreds of calls without synchronising; the median of rounds, in which all calls take turns.
On a CPU launches do nothing: the times are what Python and Triton take on that machine, and no device's.
"""

import itertools
import random
import sys
import time

import launch_cases
import results
import timing
import torch
from command_line import make_parser, parse_host_options
from environment import describe_environment, print_environment

import ninetoothed_patches
from ninetoothed_patches.plan_cache import UNUSED_PLANS

# A planned call against torch.add, at most.
BARS = {
    "5 tensors, planned": 1.25,
    "5 tensors, auto-tuned, planned": 1.25,
    "11 tensors, planned": 2.0,
}

# A call that never comes back against the unpatched call, at most.
MISS_BAR = 1.3


def main(arguments):
    options = parse_host_options(make_parser(__doc__), arguments)

    with launch_cases.launching(options.device):
        records = measure(options)

    environment = describe_environment()
    results.write(options.output, records, environment)
    print_environment(environment)

    launch_cases.print_table(records, options.device)

    return 0


def measure(options):
    device = options.device
    x, y, z = (
        torch.ones(launch_cases.ROWS, launch_cases.COLUMNS, device=device)
        for _ in range(3)
    )
    functions = {
        "torch.add(x, y, out=z)": lambda: torch.add(x, y, out=z),
        "torch.empty_like(x)": lambda: torch.empty_like(x),
    }
    handles = {}

    for name, (make, arguments_of) in launch_cases.CASES.items():
        arguments = arguments_of(device)
        twin, handle = make(), ninetoothed_patches.planned(make())
        handles[name] = handle
        functions[f"{name}, unpatched"] = launch_cases.call(twin, arguments)
        functions[f"{name}, planned"] = launch_cases.call(handle, arguments)

    layouts = unseen_layouts(launch_cases.arguments_of_five(device))[:16]
    choose = random.Random(0)

    # Each layout comes after any other: most calls make their key and look it up.
    for order, sequence in {
        "6 layouts in one order": layouts[:6],
        "16 layouts in no order": choose.choices(layouts, k=4096),
    }.items():
        handle = ninetoothed_patches.planned(launch_cases.five())
        handles[order] = handle
        functions[f"5 tensors, {order}"] = in_turn(handle, sequence)

    times = timing.host_times(functions, rounds=options.rounds, calls=options.calls)

    for name, handle in handles.items():
        info = handle.cache_info()
        assert not info.bypasses and info.hits > info.misses, (name, info)

    floor = times["torch.add(x, y, out=z)"]["median"]
    records = [
        {
            "case": name,
            **time,
            "ratio": time["median"] / floor,
            "of": "torch.add",
            "bar": BARS.get(name),
        }
        for name, time in times.items()
    ]
    miss = misses(options.rounds, options.calls, launch_cases.arguments_of_five(device))
    records += [
        {
            "case": f"5 tensors, layouts in a row, {name}",
            **time,
            "ratio": time["median"] / miss["unpatched"]["median"],
            "of": "unpatched",
            "bar": MISS_BAR if name == "new" else None,
        }
        for name, time in miss.items()
    ]

    return [{"benchmark": "launch", "device": device, **record} for record in records]


def in_turn(handle, sequence):
    layouts = itertools.cycle(sequence)

    return lambda: handle(*next(layouts))


def unseen_layouts(arguments):
    """Calls of `five`, each with a number of rows of its own, and all for one compiled kernel."""

    device = arguments[0].device
    x, gate, weight, bias, out, *scalars = launch_cases.arguments_of_five(device, 4096)
    # Neither 1 nor divisible by 16, which Triton compiles kernels of their own for.
    counts = [count for count in range(17, 4096) if count % 16]

    return [
        (x[:count], gate[:count], weight, bias, out[:count], *scalars)
        for count in counts
    ]


def misses(rounds, calls, arguments):
    """Unpatched calls, calls that never come back, and calls that come again and get a plan, of the same layouts."""

    twin = launch_cases.five()
    layouts = unseen_layouts(arguments)[: calls + UNUSED_PLANS + 1]
    handle = ninetoothed_patches.planned(launch_cases.five(), max_plans=len(layouts))
    # Makes the kernel for these layouts.
    twin(*layouts[-1])
    handle(*layouts[-1])
    samples = {"unpatched": [], "new": [], "plan made": []}

    def measure(name, handle, layouts):
        start = time.perf_counter()

        for layout in layouts:
            handle(*layout)

        samples[name].append((time.perf_counter() - start) / len(layouts) * 1e6)
        timing.synchronize()

    for _ in range(rounds):
        handle._cache.clear()

        # So many plans for nothing, and no more.
        for layout in layouts[: UNUSED_PLANS + 1]:
            handle(*layout)

        remaining = layouts[UNUSED_PLANS + 1 :]
        measure("unpatched", twin, remaining)
        measure("new", handle, remaining)
        measure("plan made", handle, remaining)
        assert handle.cache_info().plans == len(layouts)

    info = handle.cache_info()
    assert (info.hits, info.bypasses) == (0, {}), info

    return {name: timing.summary(values) for name, values in samples.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Host time of NineToothed's and this library's calls, beside `torch.add(x, y, out=z)` in the same run.

    python scripts/benchmark_launch.py [--device cuda|cpu] [--quick] [--output FILE.jsonl]

Wall clock a call over hundreds of calls without synchronising; the median of rounds, in which all calls take turns:
NineToothed's handles, unpatched and from a plan; and this library's operators, checks and allocation included, on
tensors so small that the device does not matter.

On a CPU launches do nothing: the times are what Python and Triton take on that machine, no device's. This
library's operators compute their definitions there, and are left out.
"""

import itertools
import sys

import launch_cases
import results
import timing
import torch
from command_line import make_parser, parse
from environment import describe_environment, print_environment

import ninetoothed_patches

# A planned call against torch.add, at most.
BARS = {
    "5 tensors, planned": 1.25,
    "5 tensors, auto-tuned, planned": 1.25,
    "11 tensors, planned": 2.0,
    "gated_rms_norm, allocating": 2.0,
    "qk_norm_rope_pack_": 2.25,
}

# A miss against the unpatched call, at most.
MISS_BAR = 1.3


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int)
    options = parse(parser, arguments, interpret=False)
    is_tiny = options.quick and options.device == "cpu"
    options.rounds = options.rounds or (2 if is_tiny else 9 if options.quick else 25)
    options.calls = options.calls or (8 if is_tiny else 400)

    with launch_cases.launching(options.device):
        records = measure(options)

    environment = describe_environment()
    results.write(options.output, records, environment)
    print_environment(environment)

    if options.device == "cpu":
        print("Launches do nothing here: these times are not those of a device.")

    print(f"{'case':34} {'us':>7} {'spread':>7} {'ratio':>6} {'bar':>5}")

    for record in records:
        bar = record["bar"]
        print(
            f"{record['case']:34} {record['median']:7.2f} {record['spread']:7.2f} "
            f"{record['ratio']:6.2f} {'' if bar is None else format(bar, '5.2f')}"
            f"{'' if bar is None or record['ratio'] <= bar else '  MISSED'}"
        )

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

    # Six layouts in turn are more than the recent plans: each call makes its key and looks it up.
    handles["rotating"] = rotating = ninetoothed_patches.planned(launch_cases.five())
    layouts = itertools.cycle(
        unseen_layouts(launch_cases.arguments_of_five(device))[:6]
    )
    functions["5 tensors, 6 layouts in turn"] = lambda: rotating(*next(layouts))

    if device == "cuda":
        functions |= operators()

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
            "case": f"5 tensors, new layout, {name}",
            **time,
            "ratio": time["median"] / miss["unpatched"]["median"],
            "of": "unpatched",
            "bar": MISS_BAR if name == "miss" else None,
        }
        for name, time in miss.items()
    ]

    return [{"benchmark": "launch", "device": device, **record} for record in records]


def operators():
    """Calls of this library's operators, as an inference engine makes them at one token."""

    from ntops_ext.torch import gated_rms_norm, qk_norm_rope, qk_norm_rope_pack_

    def heads(*shape):
        return torch.ones(*shape, 128, device="cuda", dtype=torch.bfloat16)

    x, gate, weight, out = heads(32), heads(32), heads(), heads(32)
    q, k_out, v_out, k_prefix, v_prefix = (
        heads(1, rows, 32) for rows in (1, 2, 2, 1, 1)
    )
    rope = torch.ones(1, 64, device="cuda", dtype=torch.complex64)

    return {
        "gated_rms_norm, allocating": lambda: gated_rms_norm(x, weight, gate),
        "gated_rms_norm, out given": lambda: gated_rms_norm(x, weight, gate, out=out),
        "qk_norm_rope, allocating": lambda: qk_norm_rope(q, weight, rope),
        "qk_norm_rope_pack_": lambda: qk_norm_rope_pack_(
            q, k_out, v_out, weight, weight, rope, k_prefix, v_prefix
        ),
    }


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
    """Unpatched calls and misses with the same layouts."""

    twin = launch_cases.five()
    layouts = unseen_layouts(arguments)
    handle = ninetoothed_patches.planned(launch_cases.five(), max_plans=len(layouts))
    # Makes the kernel for these layouts.
    twin(*layouts[-1])
    handle(*layouts[-1])
    calls = min(calls, len(layouts) // 2)
    unpatched, missing = itertools.cycle(layouts), itertools.cycle(layouts)

    def miss():
        handle(*next(missing))

    def unpatched_call():
        twin(*next(unpatched))

    def forget():
        # Outside of what is timed: the layouts come round again.
        handle._cache.clear()

    samples = {"unpatched": [], "miss": []}

    for _ in range(rounds):
        forget()
        times = timing.host_times(
            {"unpatched": unpatched_call, "miss": miss}, rounds=2, calls=calls // 4
        )

        for name, time in times.items():
            samples[name].append(time["median"])

    info = handle.cache_info()
    assert info.hits == 0, "a layout came round before it was forgotten"

    return {name: timing.summary(values) for name, values in samples.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

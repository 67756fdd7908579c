"""Where the time of one NineToothed call goes, unpatched and from a plan.

    python scripts/profile_launch.py [--output FILE.jsonl]

Each part is called alone, many times, and the parts take turns. Alone a part finds its code and data in the caches: the
parts add up to somewhat less than the whole, and the rest is shown as such. Without a GPU the launcher does nothing, and the
rows that need one are left out.
"""

import argparse
import pathlib
import types

import launch_cases
import launch_timing
import timing
import torch
from environment import describe_environment, print_environment
from launch_timing import call

import ninetoothed_patches


def unpatched_parts(twin, arguments):
    """The generated launch function without what it calls, and Triton's own way down to the launcher."""

    launch = twin._launch
    kernel = twin._kernel
    name = kernel.__name__
    tuned = f"{name}_with_auto_tuning"
    tuner = launch.__globals__.get(tuned)
    seen = {}

    class Noted:
        """Takes a call in the kernel's place."""

        def __getitem__(self, grid):
            seen["grid"] = grid

            return self

        def __call__(self, *args, **options):
            seen["args"], seen["options"] = args, options

    noted = types.FunctionType(
        launch.__code__,
        {**launch.__globals__, (name if tuner is None else tuned): Noted()},
    )
    noted(*arguments)
    args = seen["args"]
    options = dict(seen["options"])
    bound = dict(zip(kernel.arg_names, args, strict=False))

    if tuner is not None:
        options = tuner.best_config.all_kwargs()
        bound |= options

    def jit():
        kernel[seen["grid"]](*args, **options)

    parts = {
        "handle and launch function: sizes, strides": lambda: noted(*arguments),
        "grid": lambda: seen["grid"](bound),
        "Triton's JITFunction, with its launcher": jit,
    }

    if tuner is not None:
        parts["Triton's Autotuner, with all below"] = lambda: tuner[seen["grid"]](*args)

    return parts


def planned_parts(handle, arguments):
    """What `plan_cache`'s entry does, piece by piece."""

    cache = handle._cache
    (plan,) = cache.recent
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    stream = plan.current_stream(plan.device)
    read = ", ".join(f"t{index}.data_ptr()" for index in range(len(tensors)))
    names = {f"t{index}": tensor for index, tensor in enumerate(tensors)}

    def key_and_look_up():
        cache.recent = ()
        handle(*arguments)

    return {
        "addresses": eval(f"lambda: ({read})", names),
        "tensor guard": call(plan.fits, tensors),
        "Triton's state": cache._state,
        "hooks": cache._watchers,
        "device": plan.current_device,
        "stream": lambda: plan.current_stream(plan.device),
        "launcher, with its arguments": call(plan.launch, [stream, *addresses]),
        "(a whole call by key and look-up)": key_and_look_up,
    }


def kernel_time(function):
    """Microseconds that the kernel takes on the device; None without one."""

    if not torch.cuda.is_available():
        return None

    return timing.warm_device_time(function)[0]


def profile(name, device, options):
    make, arguments_of = launch_cases.CASES[name]
    arguments = arguments_of(device)
    twin, handle = make(), ninetoothed_patches.planned(make())

    for _ in range(3):
        twin(*arguments)
        handle(*arguments)

    functions = {
        ("unpatched", "a whole call"): call(twin, arguments),
        ("planned", "a whole call"): call(handle, arguments),
    }

    for way, parts in (
        ("unpatched", unpatched_parts(twin, arguments)),
        ("planned", planned_parts(handle, arguments)),
    ):
        functions |= {(way, part): function for part, function in parts.items()}

    times = launch_timing.host_times(
        functions, rounds=options.rounds, calls=options.calls
    )
    records = [
        {"case": name, "way": way, "part": part, **time}
        for (way, part), time in times.items()
    ]
    planned = [record for record in records if record["way"] == "planned"]
    parts = sum(
        record["median"]
        for record in planned
        if record["part"] != "a whole call" and not record["part"].startswith("(")
    )
    records.append(
        {
            "case": name,
            "way": "planned",
            "part": "rest: frames, comparing, counting",
            "median": planned[0]["median"] - parts,
            "spread": 0.0,
        }
    )
    device_time = kernel_time(call(handle, arguments))

    if device_time is not None:
        records.append(
            {
                "case": name,
                "way": "device",
                "part": "kernel",
                "median": device_time,
                "spread": 0.0,
            }
        )

    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--output", type=pathlib.Path, help="a file for JSON lines")
    options = parser.parse_args()
    records = []

    with launch_timing.launching() as device:
        x, y, z = (torch.ones(32, 128, device=device) for _ in range(3))
        floor = launch_timing.host_times(
            {"torch.add(x, y, out=z)": lambda: torch.add(x, y, out=z)},
            rounds=options.rounds,
            calls=options.calls,
        )
        records += [
            {"case": "floor", "way": "", "part": part, **time}
            for part, time in floor.items()
        ]

        for name in launch_cases.CASES:
            records += profile(name, device, options)

    environment = describe_environment()
    launch_timing.write(options.output, [environment | record for record in records])
    print_environment(environment)
    case = None

    for record in records:
        if record["case"] != case:
            case = record["case"]
            print(f"\n{case}")

        print(f"  {record['way']:10} {record['part']:46} {record['median']:8.2f} us")


if __name__ == "__main__":
    main()

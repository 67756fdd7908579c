"""Where the time of one NineToothed call goes, unpatched and from a plan.

    python scripts/profile_launch.py [--device cuda|cpu] [--quick] [--output FILE.jsonl]

Each part is called alone, many times, and the parts take turns. Alone a part finds its code and data in the caches: the
parts add up to somewhat less than the whole, and the rest is shown as such. On a CPU launches do nothing: the launcher's
time is missing there.
"""

import sys
import types

import launch_cases
import results
import timing
import torch
from command_line import make_parser, parse_host_options
from environment import describe_environment, print_environment
from launch_cases import call

import ninetoothed_patches
from ninetoothed_patches import triton_abi

WHOLE, REST = "a whole call", "rest: frames, comparing, counting"


def main(arguments):
    options = parse_host_options(make_parser(__doc__), arguments)

    with launch_cases.launching(options.device):
        x, y, z = (torch.ones(32, 128, device=options.device) for _ in range(3))
        floor = timing.host_times(
            {"torch.add(x, y, out=z)": lambda: torch.add(x, y, out=z)},
            rounds=options.rounds,
            calls=options.calls,
        )
        records = [
            {"case": "floor", "way": "", "part": part, "within": None, **time}
            for part, time in floor.items()
        ]

        for name in launch_cases.CASES:
            records += profile(name, options)

    environment = describe_environment()
    records = [
        {"benchmark": "profile_launch", "device": options.device, **record}
        for record in records
    ]
    results.write(options.output, records, environment)
    print_environment(environment)

    if options.device == "cpu":
        print(launch_cases.LAUNCHES_DO_NOTHING)

    print_table(records)

    return 0


def profile(name, options):
    """The records of one case: whole calls, their parts, and what is left over."""

    make, arguments_of = launch_cases.CASES[name]
    arguments = arguments_of(options.device)
    twin, handle = make(), ninetoothed_patches.planned(make())

    for _ in range(3):
        twin(*arguments)
        handle(*arguments)

    functions = {
        ("unpatched", WHOLE): call(twin, arguments),
        ("planned", WHOLE): call(handle, arguments),
    }
    within = {}

    for way, (parts, outer) in (
        ("unpatched", unpatched_parts(twin, arguments)),
        ("planned", planned_parts(handle, arguments)),
    ):
        functions |= {(way, part): function for part, function in parts.items()}
        within |= {(way, part): outer.get(part, WHOLE) for part in parts}

    times = timing.host_times(functions, rounds=options.rounds, calls=options.calls)

    for way in ("unpatched", "planned"):
        parts = sum(
            time["median"]
            for key, time in times.items()
            if key[0] == way and within.get(key) == WHOLE
        )
        left = times[way, WHOLE]["median"] - parts
        times[way, REST] = {"median": left, "spread": 0.0}
        within[way, REST] = WHOLE

    if options.device == "cuda":
        median, spread = timing.warm_device_time(call(handle, arguments))
        times["device", "kernel"] = {"median": median, "spread": spread}

    return [
        {
            "case": name,
            "way": way,
            "part": part,
            "within": within.get((way, part)),
            **time,
        }
        for (way, part), time in times.items()
    ]


def unpatched_parts(twin, arguments):
    """The generated launch function without what it calls, and Triton's own way down to the launcher.

    :return: Functions by the part's name, and for parts that lie in another part that one's name.
    """

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

    launched = kernel[seen["grid"]](*args, **options)
    jit = "Triton's JITFunction, with its launcher"
    parts = {
        "handle and launch function: sizes, strides": call(noted, arguments),
        jit: lambda: kernel[seen["grid"]](*args, **options),
        "grid": lambda: seen["grid"](bound),
    }
    within = {"grid": jit}

    if tuner is not None:
        tuner_part = "Triton's Autotuner, with all below"
        parts[tuner_part] = lambda: tuner[seen["grid"]](*args)
        within[jit] = tuner_part

    assert launched is not None, "Triton returned no kernel"

    return parts, within


def planned_parts(handle, arguments):
    """What `plan_cache`'s entry does, piece by piece. Returned as by `unpatched_parts`."""

    cache = handle._cache
    plan = cache.last
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    stream = plan.current_stream(plan.device)
    read = ", ".join(f"t{index}.data_ptr()" for index in range(len(tensors)))
    names = {f"t{index}": tensor for index, tensor in enumerate(tensors)}

    expressions = triton_abi.expressions()
    state, hooks = (
        eval(f"lambda: {text}", {**expressions.names, "__jit": handle._kernel})
        for text in (expressions.state, expressions.watchers)
    )

    def key_and_look_up():
        plan.successors = ()
        handle(*arguments)

    look_up = "(a whole call by key and look-up)"
    parts = {
        "addresses": eval(f"lambda: ({read})", names),
        "tensor guard": call(plan.fits, tensors),
        "Triton's state": state,
        "hooks": hooks,
        "device": plan.current_device,
        "stream": lambda: plan.current_stream(plan.device),
        "launcher, with its arguments": call(plan.launch, [stream, *addresses]),
        look_up: key_and_look_up,
    }

    # Not a part: another way for a whole call to go.
    return parts, {look_up: None}


def print_table(records):
    case = None

    for record in records:
        if record["case"] != case:
            case = record["case"]
            print(f"\n{case}")

        indent = "" if record["within"] in (None, WHOLE) else "  "
        print(
            f"  {record['way']:10} {indent + record['part']:48}"
            f" {record['median']:8.2f} us"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

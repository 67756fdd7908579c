"""Time `qk_norm_rope_pack_` and `qk_norm_rope` beside a copy of the bytes, and beside others.

    python scripts/benchmark_rope_pack.py [--device cuda|cpu] [--quick] [--sweep]
        [--cases PATTERN...] [--output FILE.jsonl]

Each case is checked against PyTorch's eager chain, the others' results with it. Then, in
turns, everybody is timed (`timing.all_times` says how): the operator; the floor, an
element-wise kernel that moves as many bytes as the case must; and, in the three modes of the
production shape, the eager chain, the same under torch.compile, and the CUDA scheme that
others have published (cuda_scheme.cu). `--sweep` times launch choices other than that of
`ntops_ext.configs` as well.

On a CPU the kernel runs in Triton's interpreter on tiny cases, and times mean nothing.
"""

import contextlib
import dataclasses
import sys

import cuda_scheme
import results
import torch
from command_line import choose_cases, make_parser, parse, progress
from environment import describe_environment, print_environment
from run_rope_pack_smoke import MAX_ERROR, Case, make_inputs
from timing import NOT_MEANINGFUL, all_times

from ntops_ext import configs, reference
from ntops_ext.torch import (
    _qk_norm_rope,
    _qk_norm_rope_pack,
    qk_norm_rope,
    qk_norm_rope_pack_,
)

CASES = (
    Case(name="in_place"),
    Case(name="copy_k_and_v", mode="copy_k_and_v"),
    Case(name="single_tensor", mode="single_tensor"),
    Case(name="packed_views", layout="packed"),
    Case(name="prefix_kept", layout="prefix_kept", prefix=4123),
    Case(name="prefix_copied", prefix=4123),
    Case(name="512_tokens", tokens=512, prefix=0),
    Case(name="16384_tokens", tokens=16384, prefix=0),
    Case(name="65536_tokens", tokens=65536, prefix=0),
    Case(name="thirty_heads", heads=30, kv_heads=30, prefix=32),
    Case(name="24_heads", tokens=4608, prefix=0, heads=24, kv_heads=24),
    Case(name="12_heads", prefix=0, heads=12, kv_heads=12),
    Case(name="grouped_32_4", prefix=0, heads=32, kv_heads=4),
    Case(name="grouped_64_8", tokens=8192, prefix=0, heads=64, kv_heads=8),
    Case(name="width_64", heads=24, kv_heads=24, head_dim=64),
    Case(name="width_96", heads=16, kv_heads=16, head_dim=96),
    Case(name="width_256", heads=16, kv_heads=16, head_dim=256),
    Case(name="float32", dtype="float32"),
)

QUICK = ("in_place", "copy_k_and_v", "single_tensor", "packed_views", "grouped_32_4")
# The interpreter runs about a thousand programs a second.
TINY = {"tokens": 2, "prefix": 1, "heads": 2, "kv_heads": 2, "head_dim": 16}
QUICK_ON_CPU = ("copy_k_and_v", "single_tensor")

# Heads a program, warps.
SWEEP = ((4, 1), (8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (32, 2), (32, 4))

# The production shape: with peers, and swept.
PRODUCTION = ("in_place", "copy_k_and_v", "single_tensor")

# The ratio to the floor that is aimed at there, with the L2 cleared.
BAR = 1.05

FLOOR, OURS, SCHEME = "copy", "ntops_ext", "CUDA scheme"


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sweep", action="store_true", help="other launch choices as well"
    )
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="as `width_*`")
    options = parse(parser, arguments)
    quick = QUICK if options.device == "cuda" else QUICK_ON_CPU
    named_cases = [
        (
            case.name,
            case if options.device == "cuda" else dataclasses.replace(case, **TINY),
        )
        for case in CASES
        if not options.quick or case.name in quick
    ]
    cases = choose_cases(parser, options, named_cases)
    environment = describe_environment()
    print_environment(environment)
    runs = [(case, None) for case in cases]

    if options.sweep:
        runs += [
            (case, choice)
            for case in cases
            if case.name in PRODUCTION
            for choice in SWEEP
        ]

    records = results.write(
        options.output,
        (_measure(case, choice, options) for case, choice in progress(runs, "case")),
        environment,
    )
    print_table(records, options.device)

    return int(not all(record["is_right"] for record in records))


def print_table(records, device):
    if device == "cpu":
        print(NOT_MEANINGFUL)

    print(
        f"{'us; ratios to the copy':22}{'L2 cleared':>12} {'ratio':>6} {'TB/s':>5}"
        f"{'warm':>9} {'ratio':>6}{'host':>10}  bits"
    )

    for record in records:
        shape = f"{record['tokens']} tokens, {record['mode']}, {record['layout']}"
        print(f"{record['case']} ({shape}), choice {record['choice']}")
        times = record["times"]

        for name, row in times.items():
            print(
                f"  {name:20}{row['cold_us']:12.2f} {row['cold_ratio']:6.3f}"
                f" {row['tb_per_s']:5.2f}{row['warm_us']:9.2f} {row['warm_ratio']:6.3f}"
                f"{row['host_us']:10.2f}  {_verdict(record['errors'].get(name))}"
            )

        for name, reason in record["missing"].items():
            print(f"  {name} is not timed: {reason.splitlines()[0]}")

        if device == "cpu" or record["case"] not in PRODUCTION:
            continue

        ratio = times[OURS]["cold_ratio"]

        if record["choice"] == "own" and ratio > BAR:
            print(f"  MISSED: {ratio:.3f} of the copy > {BAR}")

        for clock in ("cold", "warm"):
            if SCHEME in times:
                lead = times[SCHEME][f"{clock}_us"] / times[OURS][f"{clock}_us"]
                print(
                    f"  {'' if lead > 1 else 'MISSED: '}{SCHEME} / ours, {clock}:"
                    f" {lead:.2f}"
                )


def _verdict(error):
    if error is None:
        return ""

    return "equal" if error["is_equal"] else f"{error['error']:.2f} off"


@contextlib.contextmanager
def _launched_as(choice):
    """For the block's duration, launch with these heads a program and warps."""

    heads_per_program, num_warps = choice
    own = configs.qk_norm_rope_config
    configs.qk_norm_rope_config = lambda **_: configs.QKNormRopeConfig(
        heads_per_program=heads_per_program,
        kv_heads_per_program=heads_per_program,
        num_warps=num_warps,
    )
    _forget_layouts()

    try:
        yield
    finally:
        configs.qk_norm_rope_config = own
        _forget_layouts()


def _forget_layouts():
    _qk_norm_rope.layouts.clear()
    _qk_norm_rope_pack.layouts.clear()


def _measure(case, choice, options):
    with contextlib.nullcontext() if choice is None else _launched_as(choice):
        return _measure_as_launched(case, choice, options)


def _measure_as_launched(case, choice, options):
    device = options.device
    makers = {OURS: _make_call}
    calls, errors, missing = {}, {}, {}

    if choice is None and case.name in PRODUCTION:
        makers |= {
            "eager": _make_eager_call,
            "torch.compile": _make_compiled_call,
            SCHEME: _make_scheme_call,
        }

    inputs = make_inputs(case, device)
    expected = [tensor.clone() for tensor in _make_eager_call(case, inputs)()]

    for name, make in makers.items():
        # Everybody's own inputs, that others have not written to.
        inputs = make_inputs(case, device)

        try:
            call = make(case, inputs)
            errors[name] = _compare(call(), expected)
        except Exception as error:
            if name == OURS:
                raise

            # A peer that cannot do it must not end the others' run.
            missing[name] = f"not available: {error}"

            continue

        if name != OURS and not errors[name]["error"] <= 2 * MAX_ERROR[case.dtype]:
            missing[name] = f"wrong by {errors[name]['error']:.1f} roundings"
        else:
            calls[name] = call

    num_bytes = bytes_that_must_move(case)
    source = torch.ones(num_bytes // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # Not `copy_`: a captured copy becomes a memcpy node, which is another thing.
    calls = {FLOOR: lambda: torch.neg(source, out=target), **calls}
    times = all_times(calls, device=device, quick=options.quick)

    for row in times.values():
        row["tb_per_s"] = num_bytes / row["cold_us"] / 1e6

        for clock in ("cold", "warm"):
            row[f"{clock}_ratio"] = row[f"{clock}_us"] / times[FLOOR][f"{clock}_us"]

    return {
        "benchmark": "rope_pack",
        "case": case.name,
        **{
            name: value
            for name, value in dataclasses.asdict(case).items()
            if name != "name"
        },
        "device": device,
        "choice": "own" if choice is None else "/".join(map(str, choice)),
        "is_equal": errors[OURS]["is_equal"],
        "is_right": errors[OURS]["error"] <= MAX_ERROR[case.dtype],
        "largest_error": errors[OURS]["error"],
        "errors": errors,
        "bytes": num_bytes,
        "times": times,
        "missing": missing,
    }


def _compare(actual, expected):
    pairs = list(zip(actual, expected, strict=True))

    return {
        "is_equal": all(
            torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in pair))
            for pair in pairs
        ),
        "error": max(reference.rotation_error(one, other) for one, other in pairs),
    }


# Each of these returns a call that returns what it wrote.


def _make_call(case, inputs):
    if case.mode == "single_tensor":
        arguments = (inputs.q, inputs.q_weight, inputs.rope)
        output = torch.empty_like(inputs.q)

        return lambda: (qk_norm_rope(*arguments, out=output),)

    arguments = (*inputs.written, *inputs.read)

    return lambda: qk_norm_rope_pack_(*arguments)


def _make_eager_call(case, inputs, compiled=lambda function: function):
    if case.mode == "single_tensor":
        arguments = (inputs.q, inputs.q_weight, inputs.rope)
        single = compiled(reference.qk_norm_rope)

        return lambda: (single(*arguments),)

    arguments = (*inputs.written, *inputs.read)
    pack = compiled(reference.qk_norm_rope_pack_)

    return lambda: pack(*arguments)


def _make_compiled_call(case, inputs):
    if inputs.q.device.type == "cpu":
        raise RuntimeError("needs a GPU")

    torch._dynamo.reset()

    return _make_eager_call(case, inputs, torch.compile)


def _make_scheme_call(case, inputs):
    if inputs.q.device.type == "cpu":
        raise cuda_scheme.NotAvailableError("needs a GPU")

    return cuda_scheme.make_call(case, inputs, torch.empty_like(inputs.q))


def bytes_that_must_move(case):
    item_size = getattr(torch, case.dtype).itemsize
    head_size = case.head_dim * item_size
    tokens = case.batch * case.tokens
    table = case.tokens * case.head_dim * 4

    if case.mode == "single_tensor":
        return 2 * tokens * case.heads * head_size + table

    moved = tokens * (case.heads + case.kv_heads)

    if case.layout != "prefix_kept":
        moved += 2 * case.batch * case.prefix * case.kv_heads

    if case.mode in ("copy_v", "copy_k_and_v"):
        moved += tokens * case.kv_heads

    return 2 * moved * head_size + table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

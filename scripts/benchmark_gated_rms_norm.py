"""Time gated RMSNorm beside `torch.add` on the same bytes, and beside its peers.

    python scripts/benchmark_gated_rms_norm.py [--device cuda|cpu] [--quick | --all]
        [--cases PATTERN...] [--peers PATTERN...] [--output FILE.jsonl]

Each case is checked against the definition first, the peers' results with it. Then, in turns,
everybody is timed: this library, writing into a given `out` and allocating its result; the
floor, `torch.add(input, gate, out=output)` on dense tensors of the same shape, which reads and
writes as many bytes; and the peers that are installed. `timing.all_times` says what is timed.
Cases have names: those of the models in gated_rms_norm_cases.py, or `dense-N-D` for N columns
in groups of D, then the number of tokens. `--all` times every model at every number of tokens.

On a CPU the kernel runs in Triton's interpreter on tiny cases, and times mean nothing.
"""

import dataclasses
import sys

import results
import torch
from command_line import choose_cases, make_parser, matches, parse, progress
from environment import describe_environment, print_environment
from gated_rms_norm_cases import CASES, Case
from gated_rms_norm_peers import find_peers
from timing import NOT_MEANINGFUL, all_times

import ntops_ext
from ntops_ext import reference


def _dense(num_columns, group_size=None, norm_before_gate=True):
    group_size = num_columns if group_size is None else group_size

    return Case(
        name=f"dense-{num_columns}-{group_size}",
        num_columns=num_columns,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
    )


# (case, tokens, whether it is part of --quick)
DENSE = (
    (_dense(128), 131072, True),
    (_dense(128), 32768, False),
    (_dense(128), 4096, True),
    (_dense(128), 32, True),
    (_dense(1024), 8192, False),
    (_dense(4096), 16384, False),
    (_dense(4096), 1, False),
    (_dense(5120, norm_before_gate=False), 4096, True),
    (_dense(5120, norm_before_gate=False), 8, True),
    (_dense(7168, norm_before_gate=False), 4096, False),
    (_dense(8192, 1024, norm_before_gate=False), 4096, False),
    (_dense(8192, 1024, norm_before_gate=False), 1, False),
    (_dense(10240, 1280, norm_before_gate=False), 4096, False),
    (_dense(10240, 1280, norm_before_gate=False), 64, True),
)

STRIDED = tuple(
    (case, 4096, case.name in ("nemotron-nano-9b-v2", "qwen3-next-interleaved"))
    for case in CASES
    if case.gate_strides is not None
)

# Real models at these numbers of tokens, while tensors stay below this size.
ALL_TOKENS = (1, 8, 64, 512, 2048, 4096, 16384, 65536, 131072)
MAX_ELEMENTS = 2**29

# Of the interpreter: each mode once, as narrow as it can be.
TINY = tuple(
    (dataclasses.replace(case, name=f"tiny-{case.name}"), 2, True)
    for case in (
        _dense(64),
        _dense(96, 48, norm_before_gate=False),
        Case(
            name="slices",
            num_columns=64,
            group_size=32,
            gate_strides=(160,),
            input_is_slice=True,
        ),
    )
)

# The ratio to `torch.add` that is aimed at: with the L2 cache cleared where many bytes move;
# warm, where a launch takes a microsecond or two; and the host's, with an output allocated.
COLD_BAR, WARM_BAR, HOST_BAR = 1.05, 1.25, 2.0
FEW_BYTES, MANY_TOKENS = 4e6, 2048

FLOOR, OURS, ALLOCATING = "torch.add", "ntops_ext", "ntops_ext, allocating"

# In units of the tolerance of one rounding. Peers may round up to three times.
MAX_ERROR_OF_PEERS = 8

# How many elements are compared at once: float64 takes some ten tensors of as many.
_BLOCK = 2**25


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument("--all", action="store_true", help="every model, all tokens")
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="as `dense-*`")
    parser.add_argument(
        "--peers", nargs="*", metavar="PATTERN", help="as `fla*`; none if empty"
    )
    options = parse(parser, arguments)
    runs = choose_cases(parser, options, named_runs(options))
    environment = describe_environment()
    print_environment(environment)
    peers, missing = find_peers(options.device)

    for name, reason in missing.items():
        print(f"{name} is not timed: {reason}")

    if options.peers is not None:
        peers = {
            name: peer for name, peer in peers.items() if matches(name, options.peers)
        }

    records = results.write(
        options.output,
        (
            measure(case, num_tokens, peers, missing, options)
            for case, num_tokens in progress(runs, "case")
        ),
        environment,
    )
    print_table(records, options.device)

    return 0


def named_runs(options):
    """Names, each with its case and number of tokens."""

    runs = TINY if options.device == "cpu" else DENSE + STRIDED

    if options.all and options.device == "cuda":
        runs = [
            (case, num_tokens, False)
            for case in CASES
            for num_tokens in ALL_TOKENS
            if case.num_elements(num_tokens) <= MAX_ELEMENTS
        ]

    return [
        (f"{case.name}-{num_tokens}", (case, num_tokens))
        for case, num_tokens, is_quick in runs
        if is_quick or not options.quick
    ]


def measure(case, num_tokens, peers, missing_peers, options):
    """The record of one case: what ran, and the times of everybody.

    :param missing_peers: Why each peer that is not in `peers` is not.
    """

    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors, keywords = case.make_arguments(num_tokens, device=device, dtype=dtype)
    input, _, gate = tensors
    output = torch.empty(input.shape, dtype=dtype, device=device)
    dense = input.contiguous()
    other = dense if gate is None else gate.contiguous()
    operator = ntops_ext.torch.gated_rms_norm
    calls = {
        OURS: lambda: operator(*tensors, **keywords, out=output),
        ALLOCATING: lambda: operator(*tensors, **keywords),
    }
    missing = dict(missing_peers)

    for name, peer in peers.items():
        call = peer(tensors, keywords)

        if call is None:
            missing[name] = "lacks the mode"
        else:
            calls[name] = call

    errors = {
        name: largest_error(calls[name](), tensors, keywords)
        for name in (OURS, ALLOCATING)
    }

    if not max(errors.values()) <= 1:
        raise SystemExit(f"{case.name} with {num_tokens} tokens is wrong: {errors}")

    for name in [name for name in calls if name not in errors]:
        try:
            errors[name] = largest_error(calls[name](), tensors, keywords)
        except Exception as error:
            # A peer that cannot do it must not end the others' run.
            missing[name] = f"{type(error).__name__}: {error}"
            del calls[name]

            continue

        if not errors[name] <= MAX_ERROR_OF_PEERS:
            missing[name] = f"wrong by {errors[name]:.1f} roundings"
            del calls[name]

    calls = {FLOOR: lambda: torch.add(dense, other, out=output), **calls}
    times = all_times(calls, device=device, quick=options.quick)
    num_bytes = (2 if gate is None else 3) * input.numel() * input.element_size()

    for row in times.values():
        row["tb_per_s"] = num_bytes / row["cold_us"] / 1e6

        for clock in ("cold", "warm", "host"):
            row[f"{clock}_ratio"] = row[f"{clock}_us"] / times[FLOOR][f"{clock}_us"]

    return {
        "benchmark": "gated_rms_norm",
        "case": f"{case.name}-{num_tokens}",
        "tokens": num_tokens,
        "shape": list(input.shape),
        "group_size": case.group_size,
        "mode": case.mode,
        "layout": case.layout,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "bytes": num_bytes,
        "error": errors[OURS],
        "errors": errors,
        "times": times,
        "missing": missing,
    }


def largest_error(output, tensors, keywords):
    """The largest distance to the exact result, in units of the tolerance."""

    input, weight, gate = tensors
    num_tokens = max(_BLOCK // input[0].numel(), 1)
    errors = []

    for start in range(0, len(input), num_tokens):
        block = slice(start, start + num_tokens)
        arguments = input[block], weight, None if gate is None else gate[block]
        exact = reference.gated_rms_norm(
            *arguments,
            **keywords,
            arithmetic_dtype=torch.float64,
            output_dtype=torch.float64,
        )
        tolerance = reference.gated_rms_norm_tolerance(*arguments, **keywords)
        errors.append(((output[block].double() - exact).abs() / tolerance).max().item())

    # A NaN is the largest of all.
    return max(errors, key=lambda error: (error != error, error))


def bars_of(record):
    """What is aimed at: of which call, on which clock, the ratio to the floor."""

    bars = [(ALLOCATING, "host", HOST_BAR)]

    if record["bytes"] < FEW_BYTES:
        bars.append((OURS, "warm", WARM_BAR))
    elif record["tokens"] >= MANY_TOKENS:
        bars.append((OURS, "cold", COLD_BAR))

    return bars


def faster_peers(record):
    """Which peers are ahead, on which clock, by more than the spreads of both."""

    times = record["times"]

    for name, row in times.items():
        if name in (FLOOR, OURS, ALLOCATING):
            continue

        for clock in ("cold", "warm", "host"):
            # Peers allocate.
            own = times[ALLOCATING if clock == "host" else OURS]
            lead = own[f"{clock}_us"] - row[f"{clock}_us"]

            if lead > own[f"{clock}_spread_us"] + row[f"{clock}_spread_us"]:
                yield f"{name} is ahead, {clock}, by {lead:.2f} us"


def print_table(records, device):
    if device == "cpu":
        print(NOT_MEANINGFUL)

    print(
        f"{'us; ratios to torch.add':26}{'L2 cleared':>12} {'ratio':>6} {'TB/s':>5}"
        f"{'warm':>9} {'ratio':>6}{'host':>9} {'ratio':>6} {'error':>6}"
    )

    for record in records:
        print(f"{record['case']}: {results.label(record)}")

        for name, row in record["times"].items():
            error = record["errors"].get(name)
            print(
                f"  {name:24}{row['cold_us']:12.2f} {row['cold_ratio']:6.2f}"
                f" {row['tb_per_s']:5.2f}{row['warm_us']:9.2f} {row['warm_ratio']:6.2f}"
                f"{row['host_us']:9.2f} {row['host_ratio']:6.2f}"
                f" {'' if error is None else format(error, '6.2f')}"
            )

        if device == "cpu":
            continue

        for name, clock, bar in bars_of(record):
            ratio = record["times"][name][f"{clock}_ratio"]

            if ratio > bar:
                print(f"  MISSED: {name}, {clock}: {ratio:.3f} > {bar}")

        for lead in faster_peers(record):
            print(f"  {lead}")

        for name, reason in record["missing"].items():
            if "not installed" not in reason:
                print(f"  {name} is not timed: {reason.splitlines()[0]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

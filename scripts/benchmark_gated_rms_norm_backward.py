"""Time the gradients of gated RMSNorm beside the bytes they must move, and beside peers.

    python scripts/benchmark_gated_rms_norm_backward.py [--device cuda|cpu] [--quick]
        [--cases PATTERN...] [--output FILE.jsonl]

Each case asks for the gradients of input, gate and weight, which are checked against the
definition in float64 first. Then everybody is timed as one CUDA graph with the L2 cache
cleared: this library's backward pass; the floor, an element-wise kernel that reads and writes
as many bytes as the pass must (input, gate and the incoming gradient are read, two gradients
written); and the backward passes of the peers that are installed, on a graph that is kept.

On a CPU the kernels run in Triton's interpreter on a tiny case, and times mean nothing.
"""

import statistics
import sys

import results
import torch
from command_line import choose_cases, make_parser, parse, progress
from environment import describe_environment, print_environment
from gated_rms_norm_cases import Case
from gated_rms_norm_peers import find_peers
from timing import NOT_MEANINGFUL, cold_device_time, on_capture_stream, wall_time

from ntops_ext import reference
from ntops_ext.torch import _gated_rms_norm_backward

FLOOR, OURS = "floor", "ntops_ext"

# A ratio to the floor that is aimed at.
BAR = 1.15


def _case(num_columns, group_size=None, norm_before_gate=False):
    group_size = num_columns if group_size is None else group_size

    return Case(
        name=f"{num_columns}-{group_size}",
        num_columns=num_columns,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
    )


# (case, rows, whether it is part of --quick). Peers of a library offer one order only for
# whole rows, so that of whole rows the norm mostly comes first.
CASES = (
    (_case(128, norm_before_gate=True), 131072, True),
    (_case(2048, 64, norm_before_gate=True), 16384, False),
    (_case(4096, 256), 4096, False),
    (_case(4096, 512), 4096, False),
    (_case(1536), 16384, False),
    (_case(2048, norm_before_gate=True), 16384, False),
    (_case(3072), 8192, False),
    (_case(7168, 3584), 4096, False),
    (_case(4096, norm_before_gate=True), 16384, True),
    (_case(5120), 4096, True),
    (_case(7168), 4096, False),
    (_case(8192), 4096, False),
    (_case(8192, 1024), 4096, True),
    (_case(10240, 1280), 4096, False),
    (_case(16384, 2048), 4096, False),
    (_case(20480), 2048, False),
    (_case(4096, norm_before_gate=True), 512, False),
)

TINY = ((_case(96, 48), 3, True),)


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="as `8192-*`")
    options = parse(parser, arguments)
    named_runs = [
        (f"{case.name}-{rows}", (case, rows))
        for case, rows, is_quick in (TINY if options.device == "cpu" else CASES)
        if is_quick or not options.quick
    ]
    runs = choose_cases(parser, options, named_runs)
    environment = describe_environment()
    print_environment(environment)
    peers, missing = find_peers(options.device)

    for name, reason in missing.items():
        print(f"{name} is not timed: {reason}")

    records = results.write(
        options.output,
        (
            measure(case, rows, peers, missing, options.device)
            for case, rows in progress(runs, "case")
        ),
        environment,
    )
    print_table(records, options.device)

    return 0


def measure(case, rows, peers, missing_peers, device):
    """The record of one case.

    :param missing_peers: Why each peer that is not in `peers` is not.
    """

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors, keywords = case.make_arguments(rows, device=device, dtype=dtype)
    grad_output = torch.randn(tensors[0].shape, device=device).to(dtype)
    num_bytes = 5 * tensors[0].numel() * tensors[0].element_size()
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    calls = {
        # Not `copy_`: a captured copy becomes a memcpy node, which is another thing.
        FLOOR: lambda: torch.neg(source, out=target),
        OURS: lambda: own_gradients(grad_output, tensors, keywords),
    }
    errors = {OURS: largest_error(calls[OURS](), grad_output, tensors, keywords)}

    if not errors[OURS] <= 1:
        raise SystemExit(f"{case.name} of {rows} rows is wrong: {errors}")

    missing = dict(missing_peers)

    for name, peer in peers.items():
        try:
            call = gradients_of_peer(peer, grad_output, tensors, keywords)

            if call is None:
                missing[name] = "lacks the mode"
            else:
                errors[name] = largest_error(call(), grad_output, tensors, keywords)
                calls[name] = call
        except Exception as error:
            # A peer that cannot do it must not end the others' run.
            missing[name] = f"{type(error).__name__}: {error}"

    return {
        "benchmark": "gated_rms_norm_backward",
        "case": f"{case.name}-{rows}",
        "shape": [rows, case.num_columns],
        "group_size": case.group_size,
        "mode": case.mode,
        "layout": case.layout,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "bytes": num_bytes,
        "errors": errors,
        "times": times_of(calls, num_bytes, device),
        "missing": missing,
    }


def own_gradients(grad_output, tensors, keywords):
    """The gradients of input, weight and gate, as autograd asks for them."""

    input, weight, gate = tensors
    names = "eps", "group_size", "norm_before_gate", "activation", "weight_offset"
    options = (keywords[name] for name in names)

    return _gated_rms_norm_backward.backward(
        grad_output, input, weight, gate, None, *options, (True, True, True, False)
    )[:3]


def gradients_of_peer(peer, grad_output, tensors, keywords):
    """The same, of a peer's forward pass, which is run once; None where it lacks the mode."""

    leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    call = peer(leaves, keywords)

    if call is None:
        return None

    output = on_capture_stream(call)

    return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)


def largest_error(gradients, grad_output, tensors, keywords):
    """The largest distance to the gradients in float64, in units of the tolerance."""

    input, weight, gate = (tensor.double() for tensor in tensors)
    exact = reference.gated_rms_norm_backward(
        grad_output.double(),
        input,
        weight,
        gate,
        **keywords,
        arithmetic_dtype=torch.float64,
    )
    errors = reference.gated_rms_norm_backward_errors(
        grad_output.double(), input, weight, gate, **keywords
    )
    ratios = []

    for gradient, expected, error in zip(gradients, exact, errors, strict=False):
        unit = torch.finfo(gradient.dtype).eps / 2
        tolerance = error + unit * expected.abs() + torch.finfo(gradient.dtype).tiny
        ratios.append(((gradient.double() - expected).abs() / tolerance).max().item())

    # A NaN is the largest of all.
    return max(ratios, key=lambda ratio: (ratio != ratio, ratio))


def times_of(calls, num_bytes, device, rounds=3):
    """Medians over rounds in which the calls take turns, in microseconds."""

    if device == "cpu":
        times = {name: wall_time(call)[0] for name, call in calls.items()}
    else:
        samples = {name: [] for name in calls}

        for _ in range(rounds):
            for name, call in calls.items():
                samples[name].append(cold_device_time(call, milliseconds=30)[0])

        times = {name: statistics.median(values) for name, values in samples.items()}

    return {
        name: {
            "cold_us": time,
            "cold_ratio": time / times[FLOOR],
            "tb_per_s": num_bytes / time / 1e6,
        }
        for name, time in times.items()
    }


def print_table(records, device):
    if device == "cpu":
        print(NOT_MEANINGFUL)

    print(
        f"{'us; ratios to the floor':26}{'us':>9} {'ratio':>6} {'TB/s':>5} {'error':>6}"
    )

    for record in records:
        print(f"{record['case']}: {record['mode']}")

        for name, row in record["times"].items():
            error = record["errors"].get(name)
            print(
                f"  {name:24}{row['cold_us']:9.2f} {row['cold_ratio']:6.2f}"
                f" {row['tb_per_s']:5.2f} {'' if error is None else format(error, '6.2f')}"
            )

        if device != "cpu" and record["times"][OURS]["cold_ratio"] > BAR:
            print(f"  MISSED: {record['times'][OURS]['cold_ratio']:.3f} > {BAR}")

        for name, reason in record["missing"].items():
            if "not installed" not in reason:
                print(f"  {name} is not timed: {reason.splitlines()[0][:150]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

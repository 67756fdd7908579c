"""Wall time of a whole forward, before and after `ninetoothed_patches`, on four cases.

    python scripts/reproduce_submission.py [--device cuda|cpu] [--quick] [--output FILE.jsonl]

The protocol is that of the submission this project grew from: four named cases, correctness
against the PyTorch reference first, then wall time of the whole forward, before and after the
patch in separate processes with separate caches, after a warm-up, the median of rounds. Its
official cases were never published: these four are our own choice.

What is compared. *Before*: the kernel as any user of NineToothed or ntops calls it, the output
allocated and the handle called, with nothing checked and no plan (`NINETOOTHED_PATCHES=0`).
It is the very handle, and the very arguments, that the operator uses. *After*: the public
operator with launch plans, `ninetoothed_patches.apply()` called first, all its checks and its
allocation included. So the kernels are the same, and before has less to do in Python.

The time is that of many calls one after the other and one synchronisation, divided by their
number: as long as the host is slower than the device, it is the host's, and otherwise the
kernel's. Decode and short prompts show the former. `pack_prefill` is there to show where the
kernel itself takes longest, which no plan can change.

On a CPU kernels run in Triton's interpreter, without plans, and times mean nothing.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time

import results
import torch
from command_line import make_parser, parse
from environment import describe_environment, print_environment
from fresh_process import run
from gated_rms_norm_cases import CASES as MODELS
from run_rope_pack_smoke import MAX_ERROR, Case, make_inputs
from timing import NOT_MEANINGFUL, synchronize

GOAL = 4.0

# (the model's case, tokens): 8 sequences of Qwen3-Next that decode, a short prompt of
# Nemotron 3 Nano with the gate a slice of its projection.
GATED_NORM = {
    "gated_norm_decode": ("qwen3-next", 8),
    "gated_norm_prefill": ("nemotron-3-nano-30b", 512),
}

# Few tokens behind a cached prefix, and the production shape of Qwen-Image.
PACK = {
    "pack_decode": Case(name="pack_decode", tokens=16),
    "pack_prefill": Case(name="pack_prefill"),
}

NAMES = (*GATED_NORM, *PACK)


def main(arguments):
    parser = make_parser(__doc__)
    # What this script starts itself with.
    parser.add_argument("--way", choices=("before", "after"), help=argparse.SUPPRESS)
    options = parse(parser, arguments)

    if options.way:
        print(json.dumps(measure(options)))

        return 0

    environment = describe_environment()
    print_environment(environment)
    times = {}

    for way, switch in (("before", "0"), ("after", "1")):
        own = [f"--device={options.device}", f"--way={way}"]
        own += ["--quick"] * options.quick

        with tempfile.TemporaryDirectory() as home:
            times[way] = run(__file__, own, home, NINETOOTHED_PATCHES=switch)

    records = [
        {
            "benchmark": "reproduce_submission",
            "device": options.device,
            "case": name,
            "before_us": times["before"][name]["us"],
            "after_us": times["after"][name]["us"],
            "before_spread_us": times["before"][name]["spread_us"],
            "after_spread_us": times["after"][name]["spread_us"],
            "speed_up": times["before"][name]["us"] / times["after"][name]["us"],
        }
        for name in _names(options)
    ]
    results.write(options.output, records, environment)
    print_table(records, options.device)

    return 0


def _names(options):
    # In the interpreter one of each operator will do.
    return NAMES[::2] if options.device == "cpu" and options.quick else NAMES


def print_table(records, device):
    if device == "cpu":
        print(NOT_MEANINGFUL)

    print(f"{'case':24} {'before us':>10} {'after us':>10} {'speed-up':>9}")
    before, after = (
        sum(record[f"{way}_us"] for record in records) for way in ("before", "after")
    )

    for record in records:
        print(
            f"{record['case']:24} {record['before_us']:10.1f} {record['after_us']:10.1f}"
            f" {record['speed_up']:8.2f}x"
        )

    print(f"{'together':24} {before:10.1f} {after:10.1f} {before / after:8.2f}x")

    if device == "cuda":
        print(f"goal: {GOAL} x, {'met' if before / after >= GOAL else 'MISSED'}")


def measure(options):
    """The times of this process's way, by case."""

    import ninetoothed_patches

    is_applied = ninetoothed_patches.apply()
    assert is_applied == (options.way == "after"), "NINETOOTHED_PATCHES is not as told"
    rounds, calls, warm_up = (7, 100, 50) if options.quick else (15, 200, 50)

    if options.device == "cpu":
        rounds, calls, warm_up = 1, 1, 0

    times = {}

    for name in _names(options):
        make = _gated_norm if name in GATED_NORM else _pack
        forward, check = make(name, options)
        check(forward())

        for _ in range(warm_up):
            forward()

        samples = []

        for _ in range(rounds):
            synchronize()
            start = time.perf_counter()

            for _ in range(calls):
                forward()

            synchronize()
            samples.append((time.perf_counter() - start) / calls * 1e6)

        times[name] = {
            "us": statistics.median(samples),
            "spread_us": max(samples) - min(samples),
        }

    return times


# Each of these returns the forward of a case, and a function that checks its result.


def _gated_norm(name, options):
    from ntops_ext import reference
    from ntops_ext.torch import gated_rms_norm

    model, num_tokens = GATED_NORM[name]
    (case,) = (case for case in MODELS if case.name == model)
    dtype = torch.bfloat16

    if options.device == "cpu":
        # The interpreter truncates on the way to bfloat16.
        num_tokens, dtype = 1, torch.float32

        small = {"row_shape": (), "num_columns": 32, "group_size": 32}
        case = dataclasses.replace(case, **small, gate_strides=(96,), gate_offset=0)

    tensors, keywords = case.make_arguments(
        num_tokens, device=options.device, dtype=dtype
    )
    exact = reference.gated_rms_norm(
        *tensors, **keywords, arithmetic_dtype=torch.float64, output_dtype=torch.float64
    )
    tolerance = reference.gated_rms_norm_tolerance(*tensors, **keywords)

    def check(result):
        error = ((result.double() - exact).abs() / tolerance).max().item()

        if not error <= 1:
            raise SystemExit(f"{name} is wrong: {error} times the tolerance")

    def forward():
        return gated_rms_norm(*tensors, **keywords)

    return (_plainly(forward) if options.way == "before" else forward), check


def _pack(name, options):
    from ntops_ext import reference
    from ntops_ext.torch import qk_norm_rope_pack_

    case = PACK[name]

    if options.device == "cpu":
        small = {"tokens": 1, "prefix": 1, "heads": 2, "kv_heads": 2, "head_dim": 16}
        case = dataclasses.replace(case, **small)

    inputs = make_inputs(case, options.device)
    arguments = (*inputs.written, *inputs.read)
    expected = [tensor.clone() for tensor in inputs.written]
    reference.qk_norm_rope_pack_(*expected, *inputs.read)

    def check(result):
        error = max(map(reference.rotation_error, result, expected))

        if not error <= MAX_ERROR[case.dtype]:
            raise SystemExit(f"{name} is wrong: {error} units in the last place")

    def forward():
        return qk_norm_rope_pack_(*arguments)

    if options.way == "after":
        return forward, check

    # Noting a call makes it, and it works in place.
    begun = [tensor.clone() for tensor in inputs.written]
    plain_forward = _plainly(forward)

    for tensor, begin in zip(inputs.written, begun, strict=True):
        tensor.copy_(begin)

    return plain_forward, check


def _plainly(forward):
    """What `forward` does, as a user of NineToothed would write it: allocate, call the handle."""

    import ninetoothed.jit

    handle_class = sys.modules[ninetoothed.jit.__module__]._Handle
    call, noted = handle_class.__call__, []

    def note(handle, *arguments):
        noted.append((handle, arguments))

        return call(handle, *arguments)

    # An operator may look at its device first, with calls of its own.
    forward()
    handle_class.__call__ = note

    try:
        result = forward()
    finally:
        handle_class.__call__ = call

    ((handle, arguments),) = noted

    if isinstance(result, tuple):

        def plain_forward():
            handle(*arguments)

            return result

        return plain_forward

    (position,) = (
        index
        for index, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor)
        and argument.data_ptr() == result.data_ptr()
    )
    head, written, tail = (
        arguments[:position],
        arguments[position],
        arguments[position + 1 :],
    )
    assert written.is_contiguous()

    def plain_forward():
        output = torch.empty_like(written)
        handle(*head, output, *tail)

        return output.view(result.shape)

    return plain_forward


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

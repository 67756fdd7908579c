"""Time gated RMSNorm beside `torch.add` on the same bytes, and beside its peers.

    python scripts/benchmark_gated_rms_norm.py --device cuda [--quick] --output FILE.jsonl

Each case is checked against the definition first. Then, for this library, for
`torch.add(input, gate, out=output)` on dense tensors of the same shape (which reads and
writes as many bytes), and for the peers that are installed: device time with the L2 cache
cleared (one launch as a CUDA graph), device time warm (20 launches in one CUDA graph), and
host time (wall clock a call, without synchronising). Medians, in microseconds; the spread
is the distance between the 20th and the 80th percentile.

Peers are called as they are: where they copy a strided gate, the copy is timed with them.
"""

import argparse
import json
import sys

import torch
from environment import describe_environment, print_environment
from gated_rms_norm_cases import CASES, Case
from timing import cold_device_time, host_time, warm_device_time
from tqdm import tqdm

import ntops_ext
from ntops_ext import reference


def _dense(num_columns, group_size=None, norm_before_gate=True):
    return Case(
        name="dense",
        num_columns=num_columns,
        group_size=num_columns if group_size is None else group_size,
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
    (_dense(4096), 1, True),
    (_dense(5120, norm_before_gate=False), 4096, True),
    (_dense(5120, norm_before_gate=False), 8, True),
    (_dense(7168, norm_before_gate=False), 4096, False),
    (_dense(8192, 1024, norm_before_gate=False), 4096, True),
    (_dense(8192, 1024, norm_before_gate=False), 1, False),
    (_dense(10240, 1280, norm_before_gate=False), 4096, False),
    (_dense(10240, 1280, norm_before_gate=False), 64, True),
)

STRIDED = tuple(
    (case, 4096, case.name in ("nemotron-nano-9b-v2", "qwen3-next-interleaved"))
    for case in CASES
    if case.gate_strides is not None
)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases, under 2 minutes"
    )
    parser.add_argument(
        "--output", metavar="FILE.jsonl", help="where records are written"
    )
    options = parser.parse_args(arguments)

    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA or ROCm device here")

    environment = describe_environment()
    print_environment(environment)
    peers = {"torch.compile": _compiled(), **_installed_peers()}
    records = []

    for case, num_tokens, is_quick in tqdm(DENSE + STRIDED, unit="case"):
        if is_quick or not options.quick:
            records.append(measure(case, num_tokens, peers))

    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            for record in records:
                print(json.dumps({**record, "environment": environment}), file=file)

    print_table(records)


def measure(case, num_tokens, peers):
    """The record of one case: what ran, and the times of everybody."""

    tensors, keywords = case.make_arguments(
        num_tokens, device="cuda", dtype=torch.bfloat16
    )
    input, weight, gate = tensors
    output = ntops_ext.torch.gated_rms_norm(*tensors, **keywords)
    exact = reference.gated_rms_norm(
        *tensors,
        **keywords,
        arithmetic_dtype=torch.float64,
        output_dtype=torch.float64,
    )
    tolerance = reference.gated_rms_norm_tolerance(*tensors, **keywords)
    error = ((output.double() - exact).abs() / tolerance).max().item()
    del exact, tolerance

    if not error <= 1:
        raise SystemExit(
            f"{case.name} with {num_tokens} tokens is wrong: error {error}"
        )

    dense_input, dense_gate = input.contiguous(), gate.contiguous()
    calls = {
        "torch.add": lambda: torch.add(dense_input, dense_gate, out=output),
        "ntops_ext": lambda: ntops_ext.torch.gated_rms_norm(
            *tensors, **keywords, out=output
        ),
    }

    for name, peer in peers.items():
        call = peer(tensors, keywords)

        if call is not None:
            calls[name] = call

    return {
        "benchmark": "gated_rms_norm",
        "case": case.name,
        "shape": list(input.shape),
        "group_size": case.group_size,
        "mode": case.mode,
        "layout": case.layout,
        "dtype": "bfloat16",
        "bytes": 3 * input.numel() * input.element_size(),
        "error": error,
        "times": {name: _times(call) for name, call in calls.items()},
    }


def _times(call):
    cold, cold_spread = cold_device_time(call)
    warm, warm_spread = warm_device_time(call)
    host, host_spread = host_time(call)

    return {
        "cold_us": cold,
        "cold_spread_us": cold_spread,
        "warm_us": warm,
        "warm_spread_us": warm_spread,
        "host_us": host,
        "host_spread_us": host_spread,
    }


def _compiled():
    compiled = torch.compile(reference.gated_rms_norm, dynamic=False)

    def peer(tensors, keywords):
        # One specialisation a case, as a model would have, without the limit on them.
        torch._dynamo.reset()

        return lambda: compiled(*tensors, **keywords)

    return peer


def _installed_peers():
    """Functions that make a call of a peer, or None where the peer lacks the mode."""

    try:
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.modules.layernorm_gated import rmsnorm_fn
    except ImportError as error:
        print(f"flash-linear-attention is not timed: {error}")

        return {}

    def fla_rms_norm_gated(tensors, keywords):
        input, weight, gate = tensors

        if (
            not keywords["norm_before_gate"]
            or keywords["group_size"] != input.shape[-1]
            or "bias" in keywords
        ):
            return None

        return lambda: rms_norm_gated(
            input,
            gate,
            weight,
            None,
            activation=keywords["activation"],
            eps=keywords["eps"],
        )

    def mamba_rmsnorm_fn(tensors, keywords):
        input, weight, gate = tensors

        if keywords["activation"] == "sigmoid":
            return None

        return lambda: rmsnorm_fn(
            input,
            weight,
            keywords.get("bias"),
            z=gate,
            eps=keywords["eps"],
            group_size=keywords["group_size"],
            norm_before_gate=keywords["norm_before_gate"],
        )

    return {
        "fla rms_norm_gated": fla_rms_norm_gated,
        "fla/mamba rmsnorm_fn": mamba_rmsnorm_fn,
    }


def print_table(records):
    print(
        "device us with the L2 cleared / warm / host us; ratio of the first to torch.add"
    )

    for record in records:
        times = record["times"]
        floor = times["torch.add"]["cold_us"]
        shape = "x".join(map(str, record["shape"]))
        print(f"{record['case']} {shape} {record['mode']}; {record['layout']}")

        for name, row in times.items():
            print(
                f"  {name:22} {row['cold_us']:8.1f} {row['warm_us']:8.2f}"
                f" {row['host_us']:8.1f}   {row['cold_us'] / floor:5.2f} x"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

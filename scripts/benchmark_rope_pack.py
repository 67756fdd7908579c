"""Device and host time of `qk_norm_rope_pack_` and `qk_norm_rope`, beside a copy.

    python scripts/benchmark_rope_pack.py --device cuda [--quick] [--sweep] --output FILE

Each case is checked against PyTorch's eager chain, then timed as the replay of a CUDA graph
of one call with the L2 cleared before it. Beside it, in the same rounds, runs an
element-wise kernel that moves as many bytes as the case must: its floor. `--sweep` times
launch choices other than that of `ntops_ext.configs` as well. Every measurement is a line
of JSON in FILE, and a table comes last.
"""

import argparse
import contextlib
import dataclasses
import json
import sys

import torch
from environment import describe_environment, print_environment
from run_rope_pack_smoke import MAX_ERROR, Case, make_inputs
from timing import cold_device_time, host_time, warm_device_time
from tqdm import tqdm

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

# Heads a program, warps.
SWEEP = ((4, 1), (8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (32, 2), (32, 4))
SWEPT = ("in_place", "copy_k_and_v", "single_tensor")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument(
        "--sweep", action="store_true", help="other launch choices as well"
    )
    parser.add_argument(
        "--output", metavar="FILE.jsonl", help="where records are written"
    )
    options = parser.parse_args(arguments)

    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA or ROCm device here")

    environment = describe_environment()
    print_environment(environment)
    runs = [(case, None) for case in CASES if not options.quick or case.name in QUICK]

    if options.sweep:
        runs += [
            (case, choice) for case in CASES if case.name in SWEPT for choice in SWEEP
        ]

    records = [_measure(case, choice) for case, choice in tqdm(runs, unit="case")]

    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            for record in records:
                print(json.dumps({**record, "environment": environment}), file=file)

    print(_HEADER)
    print("\n".join(_row(record) for record in records))

    return int(not all(record["is_right"] for record in records))


_COLUMNS = {
    "device_us": "us",
    "floor_us": "floor",
    "ratio": "ratio",
    "tb_per_s": "TB/s",
    "spread_us": "spread",
    "warm_us": "warm",
    "host_us": "host",
    "eager_us": "eager",
}

_HEADER = f"{'case':16} {'choice':6} {'bits':6}" + "".join(
    f" {title:>7}" for title in _COLUMNS.values()
)


def _row(record):
    numbers = "".join(
        f" {record[name]:7.{3 if name == 'ratio' else 2}f}"
        if name in record
        else 8 * " "
        for name in _COLUMNS
    )
    bits = "equal" if record["is_equal"] else "differ"

    return f"{record['name']:16} {record['choice']:6} {bits:6}{numbers}"


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


def _measure(case, choice):
    with contextlib.nullcontext() if choice is None else _launched_as(choice):
        return _measure_as_launched(case, choice)


def _measure_as_launched(case, choice):
    inputs = make_inputs(case, "cuda")
    call, call_eager, expected = _calls(case, inputs)
    actual = [tensor.clone() for tensor in call()]
    is_equal = all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(expected, actual, strict=True)
    )
    error = max(
        reference.rotation_error(one, other)
        for one, other in zip(actual, expected, strict=True)
    )
    del expected, actual

    num_bytes = _bytes_that_must_move(case)
    source = torch.ones(num_bytes // 8, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    # In turns, so that a drifting clock reaches both alike. The floor is not `copy_`: a
    # captured copy becomes a memcpy node, which is another thing.
    times, floors = [], []

    for _ in range(3):
        times.append(cold_device_time(call))
        floors.append(cold_device_time(lambda: torch.neg(source, out=target)))

    device_us, spread_us = sorted(times)[1]
    floor_us, floor_spread_us = sorted(floors)[1]
    times = {
        "device_us": device_us,
        "spread_us": spread_us,
        "floor_us": floor_us,
        "floor_spread_us": floor_spread_us,
        "ratio": device_us / floor_us,
        "tb_per_s": num_bytes / device_us / 1e6,
    }

    if choice is None:
        times["warm_us"] = warm_device_time(call)[0]
        times["host_us"] = host_time(call)[0]

        if case.name in SWEPT:
            times["eager_us"] = cold_device_time(call_eager)[0]

    return {
        "benchmark": "rope_pack",
        **dataclasses.asdict(case),
        "choice": "own" if choice is None else "/".join(map(str, choice)),
        "is_equal": is_equal,
        "is_right": error <= MAX_ERROR[case.dtype],
        "largest_error": error,
        "bytes": num_bytes,
        **times,
    }


def _calls(case, inputs):
    """The call, the same in eager PyTorch, and what the former must give."""

    if case.mode == "single_tensor":
        arguments = (inputs.q, inputs.q_weight, inputs.rope)
        output = torch.empty_like(inputs.q)

        return (
            lambda: [qk_norm_rope(*arguments, out=output)],
            lambda: reference.qk_norm_rope(*arguments),
            [reference.qk_norm_rope(*arguments)],
        )

    expected = [tensor.clone() for tensor in inputs.written]
    reference.qk_norm_rope_pack_(*expected, *inputs.read)
    arguments = (*inputs.written, *inputs.read)

    return (
        lambda: qk_norm_rope_pack_(*arguments),
        lambda: reference.qk_norm_rope_pack_(*arguments),
        expected,
    )


def _bytes_that_must_move(case):
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

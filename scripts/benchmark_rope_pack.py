"""Device and host time of `qk_norm_rope_pack_` and `qk_norm_rope`, beside a copy.

    python scripts/benchmark_rope_pack.py --device cuda [--quick] [--sweep] --output FILE

Each case is checked against PyTorch's eager chain, then timed as the replay of a CUDA graph
of one call with the L2 cleared before it. Beside it, in the same rounds, runs an
element-wise kernel that moves as many bytes as the case must: its floor. `--sweep` times
launch choices other than that of `ntops_ext.configs` as well. Every measurement is a line
of JSON in FILE, and a table comes last.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

from run_rope_pack_smoke import Case, make_inputs

ROOT = pathlib.Path(__file__).resolve().parent.parent

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


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("--device cuda, but PyTorch sees no GPU")

    environment = _environment()
    rounds = 60 if options.quick else 200
    records = []

    for case in CASES:
        if options.quick and case.name not in QUICK:
            continue

        records.append(_measure(case, rounds, with_eager=case.name in SWEPT))
        print(_row(records[-1]), flush=True)

    if options.sweep:
        for case in (case for case in CASES if case.name in SWEPT):
            for heads_per_program, num_warps in SWEEP:
                with _launch_choice(heads_per_program, num_warps) as choice:
                    record = _measure(case, rounds, choice=choice)

                records.append(record)
                print(_row(record), flush=True)

    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(
            "".join(json.dumps({**environment, **record}) + "\n" for record in records)
        )

    print(f"\n{environment}\n\n{_HEADER}")
    print("\n".join(_row(record) for record in records))

    return 0 if all(record["is_right"] for record in records) else 1


_HEADER = (
    f"{'case':16} {'choice':8} {'bits':6} {'us':>7} {'floor':>7} {'ratio':>6}"
    f" {'TB/s':>5} {'spread':>7} {'warm':>7} {'host':>7} {'eager':>7}"
)


def _row(record):
    return (
        f"{record['name']:16} {record['choice']:8}"
        f" {'equal' if record['is_equal'] else 'differ':6} {record['device_us']:7.2f}"
        f" {record['floor_us']:7.2f} {record['ratio']:6.3f} {record['tb_per_s']:5.2f}"
        f" {record['spread_us']:7.2f} {record['warm_us']:7.2f} {record['host_us']:7.2f}"
        f" {record['eager_us'] or float('nan'):7.1f}"
    )


def _environment():
    import torch

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True
    )

    return {
        "device": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "python": platform.python_version(),
        **{
            package: importlib.metadata.version(package)
            for package in ("torch", "triton", "ninetoothed")
        },
        "commit": git.stdout.decode().strip() or "unknown",
    }


def _driver_version():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]

    try:
        return subprocess.check_output(query, text=True).split()[0]
    except OSError:
        return "unknown"


class _launch_choice:
    """For the block's duration, launch with these heads a program and warps."""

    def __init__(self, heads_per_program, num_warps):
        self._choice = heads_per_program, num_warps

    def __enter__(self):
        from ntops_ext import configs

        heads_per_program, num_warps = self._choice
        self._chooser = configs.qk_norm_rope_config
        configs.qk_norm_rope_config = lambda **_: configs.QKNormRopeConfig(
            heads_per_program=heads_per_program,
            kv_heads_per_program=heads_per_program,
            num_warps=num_warps,
        )
        _forget_layouts()

        return f"{heads_per_program}/{num_warps}"

    def __exit__(self, *_):
        from ntops_ext import configs

        configs.qk_norm_rope_config = self._chooser
        _forget_layouts()


def _forget_layouts():
    from ntops_ext.torch import _qk_norm_rope, _qk_norm_rope_pack

    _qk_norm_rope._layouts.clear()
    _qk_norm_rope_pack._layouts.clear()


def _measure(case, rounds, choice="own", with_eager=False):
    import torch

    from ntops_ext import reference
    from ntops_ext.torch import qk_norm_rope, qk_norm_rope_pack_

    inputs = make_inputs(case, "cuda")

    if case.mode == "single_tensor":
        output = torch.empty_like(inputs.q)
        expected = [reference.qk_norm_rope(inputs.q, inputs.q_weight, inputs.rope)]

        def call():
            return [qk_norm_rope(inputs.q, inputs.q_weight, inputs.rope, out=output)]

        def call_eager():
            reference.qk_norm_rope(inputs.q, inputs.q_weight, inputs.rope)
    else:
        expected = [tensor.clone() for tensor in inputs.written]
        reference.qk_norm_rope_pack_(*expected, *inputs.read)

        def call():
            return qk_norm_rope_pack_(*inputs.written, *inputs.read)

        def call_eager():
            reference.qk_norm_rope_pack_(*inputs.written, *inputs.read)

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

    def call_floor():
        # Not `copy_`: a captured copy becomes a memcpy node, which is another thing.
        torch.neg(source, out=target)

    times, floor_times = _device_times([call, call_floor], rounds)
    eager_us = None

    if with_eager:
        eager_us = statistics.median(_device_times([call_eager], 20)[0])

    device_us, floor_us = statistics.median(times), statistics.median(floor_times)
    quartiles = statistics.quantiles(times, n=4)

    return {
        **dataclasses.asdict(case),
        "choice": choice,
        "is_equal": is_equal,
        "is_right": error <= 8,
        "largest_error": error,
        "bytes": num_bytes,
        "device_us": device_us,
        "spread_us": quartiles[2] - quartiles[0],
        "floor_us": floor_us,
        "ratio": device_us / floor_us,
        "tb_per_s": num_bytes / device_us / 1e6,
        "warm_us": _warm_time(call),
        "host_us": _host_time(call),
        "eager_us": eager_us,
        "rounds": rounds,
    }


def _bytes_that_must_move(case):
    import torch

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


def _capture(call, repetitions=1):
    import torch

    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        call()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repetitions):
            call()

    return graph


def _device_times(calls, rounds):
    """Microseconds of each round of each call, the calls taking turns, L2 cold."""

    import torch

    graphs = [_capture(call) for call in calls]
    # More than the L2 of any GPU of today.
    eviction = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = [[] for _ in calls]

    for first in (True, False):
        events = []

        for _ in range(10 if first else rounds):
            for position, graph in enumerate(graphs):
                eviction.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                events.append((position, start, end))

        torch.cuda.synchronize()

        if not first:
            for position, start, end in events:
                times[position].append(1000 * start.elapsed_time(end))

    return times


def _warm_time(call, repetitions=20):
    """Microseconds of a call among many in one graph, the L2 left as it is."""

    import torch

    graph = _capture(call, repetitions)
    times = []

    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / repetitions)

    return statistics.median(times)


def _host_time(call, calls=300):
    """Microseconds that the caller waits for a call, without synchronising."""

    import torch

    times = []

    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()

        for _ in range(calls):
            call()

        times.append(1e6 * (time.perf_counter() - start) / calls)

    torch.cuda.synchronize()

    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

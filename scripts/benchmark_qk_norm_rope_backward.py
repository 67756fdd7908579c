"""Device and host time of the gradients of `qk_norm_rope`, beside a copy and torch.compile.

    python scripts/benchmark_qk_norm_rope_backward.py [--device cuda|cpu] [--quick] [--sweep]
        [--cases PATTERN...] [--output FILE.jsonl]

Each case is checked against the definition in float64, then timed as the replay of a CUDA
graph of one backward pass (both gradients) with the L2 cleared before it. Beside it, in the
same rounds, run an element-wise kernel that moves as many bytes as the pass must, its floor,
and the backward pass that torch.compile makes of the definition. `--sweep` times launch
choices other than that of `ntops_ext.configs` as well, for each case. On a CPU the kernels run in Triton's
interpreter on a tiny case, and times mean nothing.
"""

import contextlib
import dataclasses
import sys

import results
import torch
from command_line import choose_cases, make_parser, parse, progress
from environment import describe_environment, print_environment
from timing import (
    NOT_MEANINGFUL,
    cold_device_time,
    host_time,
    on_capture_stream,
    wall_time,
)

from ntops_ext import configs, reference
from ntops_ext.torch import _qk_norm_rope_backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    tokens: int = 4096
    heads: int = 32
    head_dim: int = 128
    dtype: str = "bfloat16"


CASES = (
    Case(name="32_heads"),
    Case(name="512_tokens", tokens=512),
    Case(name="16384_tokens", tokens=16384),
    Case(name="65536_tokens", tokens=65536),
    Case(name="24_heads", tokens=4608, heads=24),
    Case(name="4_heads", heads=4),
    Case(name="width_64", heads=24, head_dim=64),
    Case(name="width_256", heads=16, head_dim=256),
    Case(name="float32", dtype="float32"),
)

QUICK = ("32_heads", "512_tokens", "16384_tokens", "4_heads", "tiny")

TINY = (Case(name="tiny", tokens=3, heads=2, head_dim=16, dtype="float32"),)

# Tokens a program, heads a program, warps, stages.
SWEEP = (
    *((tokens, 8, 1, 3) for tokens in (2, 4, 8, 16, 32)),
    *((tokens, 8, 1, stages) for tokens in (8, 16) for stages in (1, 2, 4)),
    *((tokens, 4, 1, 3) for tokens in (8, 16)),
    *((tokens, 16, 2, 3) for tokens in (8, 16)),
    *((tokens, 8, 2, 3) for tokens in (8, 16)),
)


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sweep", action="store_true", help="other launch choices as well"
    )
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="as `*_heads`")
    options = parse(parser, arguments)
    named_cases = [
        (case.name, case)
        for case in (TINY if options.device == "cpu" else CASES)
        if not options.quick or case.name in QUICK
    ]
    cases = choose_cases(parser, options, named_cases)
    choices = (None, *SWEEP) if options.sweep else (None,)
    runs = [(case, choice) for case in cases for choice in choices]
    environment = describe_environment()
    print_environment(environment)

    if options.device == "cpu":
        print(NOT_MEANINGFUL)

    records = results.write(
        options.output,
        (
            _measure(case, choice, options.device)
            for case, choice in progress(runs, "case")
        ),
        environment,
    )
    print(_HEADER)
    print("\n".join(map(_row, records)))

    return int(not all(record["is_right"] for record in records))


_COLUMNS = {
    "device_us": "us",
    "input_only_us": "input",
    "floor_us": "floor",
    "ratio": "ratio",
    "tb_per_s": "TB/s",
    "compile_us": "compile",
    "host_us": "host",
}

_HEADER = f"{'case':14} {'choice':8} {'right':5}" + "".join(
    f" {title:>8}" for title in _COLUMNS.values()
)


def _row(record):
    numbers = "".join(
        f" {record[name]:8.2f}" if name in record else 9 * " " for name in _COLUMNS
    )

    return f"{record['name']:14} {record['choice']:8} {record['is_right']!s:5}{numbers}"


@contextlib.contextmanager
def _launched_as(choice):
    """For the block's duration, launch with these tokens, heads, warps and stages."""

    tokens_per_program, heads_per_program, num_warps, pipeline_stages = choice
    own = configs.qk_norm_rope_backward_config
    configs.qk_norm_rope_backward_config = lambda **_: configs.QKNormRopeBackwardConfig(
        tokens_per_program=tokens_per_program,
        heads_per_program=heads_per_program,
        num_warps=num_warps,
        pipeline_stages=pipeline_stages,
    )
    _qk_norm_rope_backward.layouts.clear()

    try:
        yield
    finally:
        configs.qk_norm_rope_backward_config = own
        _qk_norm_rope_backward.layouts.clear()


def _measure(case, choice, device):
    with contextlib.nullcontext() if choice is None else _launched_as(choice):
        return _measure_as_launched(case, choice, device)


def _measure_as_launched(case, choice, device):
    device_time = cold_device_time if device == "cuda" else wall_time
    arguments = _make_arguments(case, device)

    def call(of_weight=True):
        return _qk_norm_rope_backward.backward(*arguments, 1e-6, (True, of_weight))

    is_right = _is_right(arguments, call())
    num_bytes = _bytes_that_must_move(case)
    source = torch.ones(num_bytes // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # In turns, so that a drifting clock reaches both alike. The floor is not `copy_`: a
    # captured copy becomes a memcpy node, which is another thing.
    times, floors = [], []

    for _ in range(3):
        times.append(device_time(call))
        floors.append(device_time(lambda: torch.neg(source, out=target)))

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
        times["input_only_us"] = device_time(lambda: call(of_weight=False))[0]

    if choice is None and device == "cuda":
        times["host_us"] = host_time(call)[0]
        times["compile_us"] = device_time(_compiled_backward(arguments))[0]

    return {
        "benchmark": "qk_norm_rope_backward",
        "device": device,
        **dataclasses.asdict(case),
        "choice": "own" if choice is None else "/".join(map(str, choice)),
        "is_right": is_right,
        "bytes": num_bytes,
        **times,
    }


def _make_arguments(case, device):
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    shape = (1, case.tokens, case.heads, case.head_dim)
    angles = 6.28 * torch.rand(
        (case.tokens, case.head_dim // 2), generator=generator, device=device
    )
    rope = torch.polar(torch.ones_like(angles), angles)

    return randn(*shape), randn(*shape), randn(case.head_dim), rope


def _is_right(arguments, actual):
    """Of the first tokens the gradient of the input, and that of the weight if that is all
    of them: the definition in float64 takes 50 times the memory."""

    grad_output, input, weight, rope = arguments
    tokens = slice(0, 4096)
    first = (grad_output[:, tokens], input[:, tokens], weight, rope[tokens])
    expected = reference.qk_norm_rope_gradients(*first)
    tolerances = reference.qk_norm_rope_gradients_tolerance(*first)
    pairs = [(actual[0][:, tokens], expected[0], tolerances[0])]

    if len(rope) <= 4096:
        pairs.append((actual[1], expected[1], tolerances[1]))

    return all(
        bool(((one.double() - other).abs() <= tolerance).all())
        for one, other, tolerance in pairs
    )


def _compiled_backward(arguments):
    """The backward pass of the compiled definition, on a graph that is kept."""

    grad_output, input, weight, rope = arguments
    input = input.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    compiled = torch.compile(reference.qk_norm_rope, dynamic=False)
    output = on_capture_stream(lambda: compiled(input, weight, rope))

    return lambda: torch.autograd.grad(
        output, (input, weight), grad_output, retain_graph=True
    )


def _bytes_that_must_move(case):
    item_size = getattr(torch, case.dtype).itemsize
    heads = case.tokens * case.heads * case.head_dim * item_size

    # Heads and their gradients are read, and the input's are written; the table is read.
    return 3 * heads + case.tokens * case.head_dim * 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

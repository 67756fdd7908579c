"""Time launch choices of gated RMSNorm's gradients that differ in one thing from the chosen ones.

    python scripts/sweep_gated_rms_norm_backward.py [--device cuda|cpu] [--quick] --output FILE.jsonl

For each group size: twice and half the warps, twice and half the programs, fewer and more
stages, what is computed held or not, and the whole group at once where it is held in pieces.
Device time of all three gradients with the L2 cache cleared, beside an element-wise kernel
that moves as many bytes. On a CPU one tiny shape runs in Triton's interpreter, and times mean
nothing.
"""

import contextlib
import dataclasses
import sys

import torch
from benchmark_gated_rms_norm_backward import own_gradients
from command_line import make_parser, parse
from gated_rms_norm_cases import Case
from sweeping import sweep
from timing import cold_device_time, wall_time

from ntops_ext import configs
from ntops_ext.torch import _gated_rms_norm_backward

# (group size, groups a row, rows, whether the norm comes first)
SHAPES = (
    (64, 32, 16384, True),
    (128, 1, 131072, True),
    (256, 16, 4096, False),
    (512, 8, 4096, False),
    (1024, 8, 4096, False),
    (1280, 8, 4096, False),
    (1536, 1, 16384, False),
    (2048, 8, 4096, False),
    (3072, 1, 8192, False),
    (3584, 2, 4096, False),
    (4096, 1, 16384, True),
    (5120, 1, 4096, False),
    (7168, 1, 4096, False),
    (8192, 1, 4096, False),
    (20480, 1, 2048, False),
)

QUICK = (SHAPES[1], SHAPES[4], SHAPES[11])

TINY = (32, 2, 3, True)


def main(arguments):
    options = parse(make_parser(__doc__), arguments)
    shapes = QUICK if options.quick else SHAPES

    return sweep(
        options,
        (TINY,) if options.device == "cpu" else shapes,
        lambda shape: choices(*shape[:2]),
        compile_choice,
        measure,
        print_best,
    )


def choices(group_size, num_groups):
    """The configurations to compare, the chosen one first."""

    own = configs.gated_rms_norm_backward_config(group_size, num_groups)

    if group_size == TINY[0]:
        return [own, dataclasses.replace(own, recomputes=True)]

    others = [
        {"num_warps": 2 * own.num_warps},
        {"num_warps": own.num_warps // 2},
        {"max_row_blocks": 2 * own.max_row_blocks},
        {"max_row_blocks": own.max_row_blocks // 2},
        {"pipeline_stages": own.pipeline_stages - 1},
        {"pipeline_stages": own.pipeline_stages + 1},
        {"recomputes": not own.recomputes},
    ]

    if own.columns_per_piece is not None:
        others.append({"columns_per_piece": None})

    return [
        own,
        *(
            dataclasses.replace(own, **other)
            for other in others
            if 0 not in other.values() and other.get("num_warps", 1) <= 16
        ),
    ]


@contextlib.contextmanager
def launched_as(choice):
    """For the block's duration, gradients are launched like that."""

    own = configs.gated_rms_norm_backward_config
    configs.gated_rms_norm_backward_config = lambda *_, **__: choice
    _gated_rms_norm_backward._layouts_of_calls.clear()

    try:
        yield
    finally:
        configs.gated_rms_norm_backward_config = own
        _gated_rms_norm_backward._layouts_of_calls.clear()


def make_call(shape, device="cuda"):
    """A call for all gradients of random contents, and how many bytes it must move."""

    group_size, num_groups, num_rows, norm_before_gate = shape
    case = Case(
        name="",
        num_columns=num_groups * group_size,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors, keywords = case.make_arguments(num_rows, device=device, dtype=dtype)
    grad_output = torch.randn_like(tensors[0])
    num_bytes = 5 * grad_output.numel() * grad_output.element_size()

    return lambda: own_gradients(grad_output, tensors, keywords), num_bytes


def compile_choice(shape, choice):
    with launched_as(choice):
        make_call(shape)[0]()

    torch.cuda.synchronize()


def measure(shape, device):
    """A record for each choice."""

    time = wall_time if device == "cpu" else cold_device_time
    call, num_bytes = make_call(shape, device)
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    floor, _ = time(lambda: torch.neg(source, out=target))
    records = []

    for choice in choices(*shape[:2]):
        with launched_as(choice):
            microseconds, spread = time(call)

        records.append(
            {
                "benchmark": "gated_rms_norm_backward-sweep",
                "device": device,
                "group_size": shape[0],
                "groups": shape[1],
                "rows": shape[2],
                "norm_before_gate": shape[3],
                **dataclasses.asdict(choice),
                "us": microseconds,
                "spread_us": spread,
                "floor_us": floor,
            }
        )

    return records


def print_best(shape, records):
    own = records[0]
    print(f"{shape}: floor {own['floor_us']:.2f} us")

    for record in sorted(records, key=lambda record: record["us"]):
        differing = {
            name: record[name]
            for name in (
                "num_warps",
                "max_row_blocks",
                "pipeline_stages",
                "recomputes",
                "columns_per_piece",
            )
            if record[name] != own[name]
        }
        print(f"  {record['us'] / own['floor_us']:.3f} x  {differing or 'chosen'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

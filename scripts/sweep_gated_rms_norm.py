"""Time every launch choice of gated RMSNorm, to choose those of `ntops_ext.configs` by.

    python scripts/sweep_gated_rms_norm.py [--device cuda|cpu] [--quick] [--group-sizes D...]
        --output FILE.jsonl

For each group size, rows a program, warps, order of loads, held pieces and, where few rows are
normalized first, the columns of programs that share a row: device time beside
`torch.add` on the same bytes, with the L2 cache cleared for many rows, and 20 launches back
to back for few. Of what is timed here only the pieces can change a bit of a result. On a CPU
one tiny shape runs in Triton's interpreter, and times mean nothing.
"""

import functools
import sys

import torch
from command_line import make_parser, parse
from sweeping import sweep
from timing import cold_device_time, wall_time, warm_device_time

from ntops_ext import configs
from ntops_ext._handles import import_kernels, make_handle

# (group size, groups a row, rows, whether the norm comes first)
MANY_GROUPS = (
    (64, 32, 16384, True),
    (128, 1, 131072, True),
    (128, 1, 4096, True),
    (512, 8, 4096, False),
    (960, 8, 4096, False),
    (1024, 8, 4096, False),
    (1280, 8, 4096, False),
    (1536, 1, 16384, False),
    (2048, 8, 4096, False),
    (3072, 1, 8192, False),
    (3584, 2, 4096, False),
    (4096, 1, 8192, True),
    (5120, 1, 4096, False),
    (7168, 1, 4096, False),
    (8192, 1, 4096, False),
    (10240, 1, 4096, False),
    (16384, 1, 2048, False),
)

FEW_GROUPS = (
    (128, 1, 32, True),
    (1024, 8, 1, False),
    (1280, 8, 64, False),
    (4096, 1, 1, True),
    (5120, 1, 8, False),
)


QUICK = (MANY_GROUPS[1], MANY_GROUPS[5], FEW_GROUPS[0])

TINY = (16, 1, 2, True)


def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--group-sizes", nargs="+", type=int, metavar="D", help="only these"
    )
    options = parse(parser, arguments)

    return sweep(
        options,
        choose_shapes(parser, options),
        choices,
        compile_choice,
        measure,
        print_best,
    )


def choose_shapes(parser, options):
    """Those of the group sizes that were asked for."""

    shapes = QUICK if options.quick else MANY_GROUPS + FEW_GROUPS

    if options.device == "cpu":
        shapes = (TINY,)

    if options.group_sizes is None:
        return shapes

    known = {group_size for group_size, *_ in shapes}
    unknown = set(options.group_sizes) - known

    if unknown:
        parser.error(
            f"--group-sizes: {', '.join(map(str, sorted(unknown)))} not among"
            f" {', '.join(map(str, sorted(known)))}"
        )

    return [shape for shape in shapes if shape[0] in options.group_sizes]


def choices(shape):
    """Rows, warps, order of loads, columns of a piece that is held (None: no pieces), and of a share.

    Without pieces at most 64 columns a thread, and no fewer than 8; of a piece 2 to 8.
    """

    if shape == TINY:
        return [
            (2, 1, True, None, None),
            (2, 1, False, None, None),
            (1, 1, True, None, 8),
        ]

    group_size, num_groups, _, norm_before_gate = shape
    lanes = configs.next_power_of_2(group_size)
    piece = group_size & -group_size
    in_pieces = [
        (1, num_warps, True, piece, None)
        for num_warps in (1, 2, 4, 8, 16)
        if group_size // piece in (3, 5, 7) and 64 <= piece // num_warps <= 256
    ]

    own = configs.gated_rms_norm_config(group_size, 1).columns_per_piece
    shared = [
        (1, num_warps, True, own, share)
        for num_warps in (2, 4, 8, 16)
        for share in (256, 512, 1024, 2048)
        if shape in FEW_GROUPS
        and norm_before_gate
        and num_groups == 1
        and share < group_size
        and (own or lanes) % share == 0
    ]

    return (
        in_pieces
        + shared
        + [
            (rows, num_warps, parameters_first, None, None)
            for rows in (1, 2, 4, 8, 16, 32)
            for num_warps in (1, 2, 4, 8, 16, 32)
            for parameters_first in (True, False)
            if 256 * num_warps <= rows * lanes <= 2048 * num_warps
            and (rows == 1 or rows * lanes <= 8192)
        ]
    )


def make_call(shape, choice, device="cuda"):
    """A call of the kernel with random contents, and its tensors."""

    group_size, num_groups, num_rows, norm_before_gate = shape
    rows_per_program, num_warps, parameters_first, columns_per_piece, share = choice
    kernel = import_kernels().gated_rms_norm
    handle = make_handle(
        kernel.premake,
        num_warps=num_warps,
        num_columns=num_groups * group_size,
        group_size=group_size,
        row_tile=(rows_per_program,),
        parameters_first=parameters_first,
        columns_per_piece=columns_per_piece,
        holds_pieces=columns_per_piece is not None,
        columns_per_share=share,
    )
    random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    input, gate = (random(num_rows, num_groups * group_size) for _ in range(2))
    weight, output = random(num_groups * group_size), torch.empty_like(input)
    scalars = (1 / group_size, 1e-5, 0.0, kernel.SILU, int(norm_before_gate))
    inputs = (input,) if share is None else (input, input)

    def call():
        handle(*inputs, gate, weight, -0.0, output, *scalars)

    return call, (input, gate, output)


def compile_choice(shape, choice):
    make_call(shape, choice)[0]()
    torch.cuda.synchronize()


def measure(shape, device):
    """A record for each choice."""

    group_size, num_groups, num_rows, norm_before_gate = shape
    time = cold_device_time if shape in MANY_GROUPS else warm_device_time

    if device == "cpu":
        time = wall_time

    _, (input, gate, output) = make_call(shape, choices(shape)[0], device)
    floor, _ = time(lambda: torch.add(input, gate, out=output))
    records = []

    for choice in choices(shape):
        call, _ = make_call(shape, choice, device)
        microseconds, spread = time(call)
        records.append(
            {
                "benchmark": "gated_rms_norm-sweep",
                "device": device,
                "group_size": group_size,
                "groups": num_groups,
                "rows": num_rows,
                "norm_before_gate": norm_before_gate,
                "rows_per_program": choice[0],
                "num_warps": choice[1],
                "parameters_first": choice[2],
                "columns_per_piece": choice[3],
                "columns_per_share": choice[4],
                "us": microseconds,
                "spread_us": spread,
                "torch_add_us": floor,
            }
        )

    return records


def print_best(shape, records, most=6):
    records = sorted(records, key=lambda record: record["us"])
    print(f"{shape}: torch.add {records[0]['torch_add_us']:.2f} us")

    for record in records[:most]:
        print(
            f"  {record['us'] / record['torch_add_us']:.3f} x  rows"
            f" {record['rows_per_program']} warps {record['num_warps']}"
            f" parameters {'first' if record['parameters_first'] else 'last'}"
            f" pieces {record['columns_per_piece']}"
            f" share {record['columns_per_share']}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

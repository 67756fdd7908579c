"""The kernel that adds rows, in Triton's interpreter."""

import pytest
import torch
from comparison import assert_equal_bits

from ntops_ext._handles import make_handle
from ntops_ext.kernels import sum_of_rows


@pytest.mark.parametrize(
    ("num_rows", "rows_per_step"), [(1, 16), (40, 16), (40, 4), (600, 512)]
)
def test_rows_are_added_in_the_order_that_is_documented(num_rows, rows_per_step):
    """Block after block, then the rows of a block by a tree; rows behind the last are zeros."""

    rows = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(0))
    output = torch.empty(6)
    handle = make_handle(
        sum_of_rows.premake,
        num_warps=1,
        num_columns=6,
        rows_per_step=rows_per_step,
        columns_per_program=4,
    )
    handle(output, rows)
    blocks = torch.zeros(-(-num_rows // rows_per_step) * rows_per_step, 6)
    blocks[:num_rows] = rows
    sums = torch.zeros(rows_per_step, 6)

    for block in blocks.split(rows_per_step):
        sums = sums + block

    # 256 rows of 4 columns are what 8 warps hold, 4 columns a thread.
    sums = add_halves(sums, until=256)

    if rows_per_step >= 8:
        by_warp = sums.reshape(8, -1, 6)
        sums = torch.stack([add_halves(rows, until=1)[0] for rows in by_warp])

    assert_equal_bits(output, add_halves(sums, until=1)[0])


def add_halves(rows, until):
    while len(rows) > until:
        first, second = rows.chunk(2)
        rows = first + second

    return rows

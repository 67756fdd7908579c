"""The kernel that adds rows, in Triton's interpreter."""

import pytest
import torch
from comparison import assert_equal_bits

from ntops_ext._handles import make_handle
from ntops_ext.kernels import sum_of_rows


@pytest.mark.parametrize("num_rows", [1, 40])
def test_rows_are_added_in_the_order_that_is_documented(num_rows):
    """Block after block, then the rows of a block by halves; rows behind the last are zeros."""

    rows = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(0))
    output = torch.empty(6)
    handle = make_handle(
        sum_of_rows.premake,
        num_warps=1,
        num_columns=6,
        rows_per_step=16,
        columns_per_program=4,
    )
    handle(output, rows)
    blocks = torch.zeros(48, 6)
    blocks[:num_rows] = rows
    sums = torch.zeros(16, 6)

    for block in blocks.split(16):
        sums = sums + block

    while len(sums) > 1:
        first, second = sums.chunk(2)
        sums = first + second

    assert_equal_bits(output, sums[0])

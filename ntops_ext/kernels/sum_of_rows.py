"""The sum of rows of float32, in a fixed order.

The rows are taken in blocks, and each column's blocks are added one after the other; then
the rows of a block, by a tree (see `sum_of_rows_application`). No bit depends on the launch
but for the rows and columns of a block.
"""

import functools

import ninetoothed
import ninetoothed.language as ntl
from ninetoothed import Tensor

from ntops_ext.kernels._applications import begin, beginning, specialize


def arrangement(output, rows, *, rows_per_step, columns_per_program):
    """One program takes some columns of all rows, a block of rows at a time."""

    blocks = rows.tile((rows_per_step, columns_per_program)).tile((-1, 1)).squeeze(0)
    blocks.dtype = blocks.dtype.squeeze(1)

    return output.tile((columns_per_program,)), blocks


def sum_of_rows_application(output, rows):
    begin()
    sums = ntl.zeros_like(rows[0])

    for step in range(rows.shape[0]):
        sums += rows[step]

    # By halves, until 8 warps hold 4 columns of one row a thread: so far a thread adds what it
    # holds.
    for _ in ntl.static_range(16):
        if sums.shape[0] > 8 and sums.shape[0] * sums.shape[1] > 1024:
            sums = ntl.sum(ntl.reshape(sums, (2, sums.shape[0] // 2, sums.shape[1])), 0)

    # Then the rows of a warp, by halves.
    if sums.shape[0] > 8:
        by_warp = ntl.reshape(sums, (8, sums.shape[0] // 8, sums.shape[1]))

        for _ in ntl.static_range(16):
            if by_warp.shape[1] > 1:
                by_warp = ntl.sum(
                    ntl.reshape(
                        by_warp, (8, 2, by_warp.shape[1] // 2, by_warp.shape[2])
                    ),
                    1,
                )

        sums = ntl.reshape(by_warp, (8, by_warp.shape[2]))

    # Then those of the warps, by halves. What is split lies in one thread: so the first split
    # brings them all there, in one exchange through shared memory.
    for _ in ntl.static_range(3):
        if sums.shape[0] > 1:
            halves = ntl.split(
                ntl.permute(
                    ntl.reshape(sums, (2, sums.shape[0] // 2, sums.shape[1])), (1, 2, 0)
                )
            )
            sums = halves[0] + halves[1]

    output = ntl.cast(ntl.reshape(sums, (sums.shape[1],)), output.dtype)


def premake(
    *, num_columns, rows_per_step, columns_per_program, dtype=None, waits=False
):
    """The kernel: output `(num_columns,)`, rows `(any, num_columns)` of float32.

    :param num_columns: The columns of a row.
    :param rows_per_step: How many rows are read at once, a power of two.
    :param columns_per_program: How many columns a program takes, a power of two.
    :param dtype: The element type of the output, for ahead-of-time compilation.
    :param waits: Whether programs wait for the kernel in front of theirs (see `_applications`).
    """

    tensors = (
        Tensor(shape=(num_columns,), dtype=dtype, name="output"),
        Tensor(
            shape=(None, num_columns),
            dtype=None if dtype is None else ninetoothed.float32,
            other=0,
            name="rows",
        ),
    )
    arrangement_ = functools.partial(
        arrangement,
        rows_per_step=rows_per_step,
        columns_per_program=columns_per_program,
    )

    return (
        arrangement_,
        specialize(sum_of_rows_application, begin=beginning(waits)),
        tensors,
    )

"""How a call is cut so that every offset of a launch fits 32 bits.

NineToothed multiplies indices by strides in 32 bits. A chunk is a range of the batch and
a range of packed rows, and is called with slices: their addresses hold what is too large.
"""

import dataclasses

from ntops_ext.torch._rows import MAX_OFFSET

# Triton compiles another kernel for a size that is not divisible by 16.
_DIVISIBILITY = 16


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one tensor: strides, and the elements from a row's first to its last."""

    batch_stride: int
    row_stride: int
    num_rows: int
    row_extent: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The batch entries and packed rows `[start, stop)` of one launch."""

    batch_start: int
    batch_stop: int
    row_start: int
    row_stop: int


def plan_chunks(num_batches, num_rows, tensors, max_offset=MAX_OFFSET):
    """The launches of a call of `num_batches` x `num_rows` packed rows.

    :param tensors: The `Rows` of every tensor. A tensor that has fewer rows than the call
        has some of them in every chunk.
    :return: A list of `Chunk`, one if everything fits.
    """

    last_rows = [
        max(tensor.num_rows - 1, 0) * tensor.row_stride + tensor.row_extent
        for tensor in tensors
    ]
    largest = max(last_rows)

    if largest > max_offset:
        rows_at_most = min(
            (max_offset - tensor.row_extent) // tensor.row_stride + 1
            for tensor in tensors
            if tensor.row_stride
        )

        if rows_at_most > _DIVISIBILITY:
            rows_at_most -= rows_at_most % _DIVISIBILITY

        # A single row is addressed without its stride.
        rows_at_most = max(rows_at_most, 1)

        return [
            Chunk(batch, batch + 1, start, min(start + rows_at_most, num_rows))
            for batch in range(num_batches)
            for start in range(0, num_rows, rows_at_most)
        ]

    batches_at_most = min(
        (
            (max_offset - last_row) // tensor.batch_stride + 1
            for tensor, last_row in zip(tensors, last_rows, strict=True)
            if tensor.batch_stride
        ),
        default=num_batches,
    )

    return [
        Chunk(start, min(start + batches_at_most, num_batches), 0, num_rows)
        for start in range(0, num_batches, batches_at_most)
    ]

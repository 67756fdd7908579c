"""How a call is cut so that offsets fit: every row once, every offset small."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntops_ext.torch import _heads
from ntops_ext.torch._chunks import MAX_OFFSET, Chunk, Rows, plan_chunks


def heads_of(batch, rows, width, padding=0):
    row_stride = width + padding

    return Rows(
        rows * row_stride if batch > 1 else 0,
        row_stride if rows > 1 else 0,
        rows,
        width - 1,
    )


def test_an_ordinary_call_is_one_launch():
    """Nothing is cut that fits."""

    tensors = [heads_of(2, 4096, 4096), heads_of(2, 4123, 4096)]

    assert plan_chunks(2, 4123, tensors) == [Chunk(0, 2, 0, 4123)]


def test_the_largest_offset_that_fits_is_not_cut():
    """2^31 elements are one launch, and 2^31 and a row are two."""

    assert len(plan_chunks(1, 2**19, [heads_of(1, 2**19, 4096)])) == 1
    assert len(plan_chunks(1, 2**19 + 1, [heads_of(1, 2**19 + 1, 4096)])) == 2


def test_a_batch_is_cut_between_its_entries_first():
    """Entries that fit one by one are not cut into rows."""

    chunks = plan_chunks(5, 2**18, [heads_of(5, 2**18, 4096)])

    assert chunks == [
        Chunk(0, 2, 0, 2**18),
        Chunk(2, 4, 0, 2**18),
        Chunk(4, 5, 0, 2**18),
    ]


@pytest.mark.parametrize("max_offset", [100, 1000, MAX_OFFSET])
@given(
    batch=st.integers(1, 5),
    prefix=st.integers(0, 40),
    tokens=st.integers(0, 40),
    width=st.integers(2, 60),
    padding=st.integers(0, 30),
)
def test_chunks_cover_a_call_exactly(max_offset, batch, prefix, tokens, width, padding):
    """Each packed row lies in one chunk, in which no tensor's offsets are too large."""

    num_rows = prefix + tokens

    if num_rows == 0:
        return

    tensors = [
        heads_of(batch, num_rows, width, padding),
        heads_of(batch, tokens, width),
        heads_of(batch, prefix, width, padding),
        Rows(0, width, tokens, width - 1),
    ]
    chunks = plan_chunks(batch, num_rows, tensors, max_offset)
    covered = [
        (entry, row)
        for chunk in chunks
        for entry in range(chunk.batch_start, chunk.batch_stop)
        for row in range(chunk.row_start, chunk.row_stop)
    ]

    assert sorted(covered) == [
        (entry, row) for entry in range(batch) for row in range(num_rows)
    ]

    for chunk in chunks:
        for tensor in tensors:
            entries = chunk.batch_stop - chunk.batch_start
            rows = min(chunk.row_stop - chunk.row_start, max(tensor.num_rows, 1))
            largest = (
                (entries - 1) * tensor.batch_stride
                + (rows - 1) * tensor.row_stride
                + tensor.row_extent
            )

            assert largest <= max_offset


def test_a_table_is_addressed_as_real_numbers():
    """Its rows are twice as far apart as those of complex ones."""

    apart = torch.empty_strided(
        (3, 4), (2**29, 1), dtype=torch.complex64, device="meta"
    )

    assert len(plan_chunks(1, 3, [_heads.rows_of_table(apart)])) == 2

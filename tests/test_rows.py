"""How tensors of rows are addressed: in few dimensions, with offsets that fit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntops_ext.torch import _rows

SETTINGS = settings(max_examples=200)


@st.composite
def _tensors(draw, max_tensors=3):
    """Tensors of one shape, each a view of the numbers 0, 1, 2, ..."""

    row_sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    num_columns = draw(st.integers(1, 3))
    shape = (*row_sizes, num_columns)

    def draw_view():
        order = draw(st.permutations(range(len(shape))))
        steps = draw(
            st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape))
        )
        expanded = draw(st.sets(st.sampled_from(range(len(shape))), max_size=1))
        strides = [0] * len(shape)
        stride = 1

        for dim in order:
            strides[dim] = 0 if dim in expanded else stride * steps[dim]
            stride *= shape[dim] * steps[dim]

        offset = draw(st.integers(0, 3))

        return torch.arange(offset + stride).as_strided(shape, strides, offset)

    return [draw_view() for _ in range(draw(st.integers(1, max_tensors)))]


def addresses(tensors):
    """For each element, in order of the rows, its offset in each of the tensors."""

    return np.stack([tensor.reshape(-1).numpy() for tensor in tensors], -1).tolist()


@SETTINGS
@given(_tensors())
def test_merged_rows_are_the_same_elements(tensors):
    """In the same order, for each of the tensors."""

    merged = _rows.merge_rows(tensors)

    assert addresses(merged) == addresses(tensors)
    assert len({tensor.shape for tensor in merged}) == 1
    assert merged[0].shape[-1] == tensors[0].shape[-1]
    assert 2 <= merged[0].ndim <= max(2, tensors[0].ndim)
    assert all(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(merged, tensors, strict=True)
    )


@SETTINGS
@given(_tensors())
def test_merged_rows_cannot_be_merged_again(tensors):
    """They have the fewest dimensions that neighbours can be merged to."""

    merged = _rows.merge_rows(tensors)
    again = _rows.merge_rows(merged)

    assert [tensor.shape for tensor in again] == [tensor.shape for tensor in merged]

    for dim in range(merged[0].ndim - 2):
        assert merged[0].shape[dim] > 1
        assert not all(
            tensor.stride(dim) == tensor.shape[dim + 1] * tensor.stride(dim + 1)
            for tensor in merged
        )


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((5,), (1, 5)),
        ((1, 5), (1, 5)),
        ((3, 4, 5), (12, 5)),
        ((2, 1, 3, 1, 4, 5), (24, 5)),
        ((1, 1, 1, 5), (1, 5)),
    ],
    ids=str,
)
def test_dense_rows_have_one_dimension(shape, expected):
    """However many they had, sizes of 1 included."""

    tensors = [torch.zeros(shape), torch.zeros(shape)]

    assert [one.shape for one in _rows.merge_rows(tensors)] == [expected] * 2


@SETTINGS
@given(_tensors(), st.integers(1, 40))
def test_split_rows_are_every_row_once(tensors, max_offset):
    """Each part is within the limit, and together they are the whole."""

    tensors = _rows.merge_rows(tensors)
    longest_row = max((one.shape[-1] - 1) * one.stride(-1) for one in tensors)

    if longest_row > max_offset:
        with pytest.raises(ValueError, match=str(max_offset)):
            list(_rows.split_rows(tensors, max_offset))

        return

    parts = list(_rows.split_rows(tensors, max_offset))

    for part in parts:
        assert len({tensor.shape for tensor in part}) == 1
        assert part[0].numel() > 0

        for tensor in part:
            values = tensor.flatten()
            assert (values.max() - values.min()).item() <= max_offset

    rows = [
        row
        for part in parts
        for row in zip(
            *(one.reshape(-1, one.shape[-1]).tolist() for one in part), strict=True
        )
    ]
    expected = zip(
        *(one.reshape(-1, one.shape[-1]).tolist() for one in tensors), strict=True
    )

    assert sorted(rows) == sorted(expected)


def test_what_fits_is_not_split():
    """The largest offset of 2^31 elements is 2^31 - 1, and that is one part."""

    fitting = torch.empty(2**20, 2**11, device="meta")
    (part,) = _rows.split_rows([fitting])

    assert part[0] is fitting

    larger = torch.empty(2**20 + 1, 2**11, device="meta")

    assert [len(part[0]) for part in _rows.split_rows([larger])] == [2**19, 2**19 + 1]


def test_the_tensor_with_the_largest_offset_decides():
    """A gate of a wide projection is split although the input need not be."""

    input = torch.empty(131072, 8192, device="meta")
    gate = torch.empty(131072, 22656, device="meta")[:, :8192]
    parts = list(_rows.split_rows([input, gate]))

    assert [one.shape[0] for one, _ in parts] == [65536, 65536]
    assert all(
        (one.shape[0] - 1) * one.stride(0) + one.shape[1] - 1 <= _rows.MAX_OFFSET
        for part in parts
        for one in part
    )


@pytest.mark.parametrize(
    "tensor, expected",
    [
        (torch.empty(2**31, device="meta"), True),
        (torch.empty(2**31 + 1, device="meta"), False),
        (torch.empty(2, 2**31, device="meta"), True),
        (torch.empty(9, 2**28, device="meta").t(), False),
        (torch.empty(9, 2**28, device="meta")[:, 0], False),
        (torch.empty(8, 2**28, device="meta")[:, 0], True),
        (torch.empty(1, device="meta").expand(2**32), True),
    ],
)
def test_whether_a_row_fits(tensor, expected):
    """Its last column is at most 2^31 - 1 elements from its first."""

    assert _rows.fits(tensor) is expected


@pytest.mark.parametrize(
    "shape, strides, expected",
    [
        ((4, 1536), (3352, 1), 3352),
        ((4, 1000), (1000, 1), 1000),
        ((4, 1536), (3354, 1), 3354),
        # Triton finds this out by itself, and nothing is gained from that.
        ((4, 1536), (3360, 1), None),
        ((4, 1536), (3353, 1), None),
        ((4, 1536), (0, 1), None),
        ((4, 128), (3352, 2), None),
        # Each would make a kernel, and another number of rows other kernels.
        ((1, 1536), (3352, 1), None),
        ((2, 5, 1536), (8 * 3352, 3352, 1), None),
        # Eight rows of it are at most 2^31 - 1 elements, or more.
        ((4, 1536), (2**28 - 2, 1), 2**28 - 2),
        ((4, 1536), (2**28 + 2, 1), None),
    ],
    ids=str,
)
def test_which_row_strides_are_compiled_in(shape, strides, expected):
    """Those without which accesses would be of one element."""

    view = _rows.View(shape, strides, 0, False)

    assert view.row_stride_to_compile_in(rows_of_a_program=8) == expected


def test_a_view_with_a_row_stride_compiled_in_reaches_as_far():
    """A row at each multiple of the stride is that row, and the last ends where it ended."""

    buffer = torch.arange(3 + 4 * 22)
    tensor = buffer.as_strided((4, 16), (22, 1), 3)
    ordinary = torch.arange(4 * 16).view(4, 16)
    views = [_rows.View.of(one, one) for one in (tensor, ordinary)]
    views_of_kernel, row_strides = _rows.compile_in_row_strides(
        ("gate", "out"), views, rows_of_a_program=8
    )
    stepped = views_of_kernel[0].apply(tensor)

    assert row_strides == (("gate", 22),)
    assert views_of_kernel[1] is views[1]
    assert stepped.stride() == (1, 1) and len(stepped) == 3 * 22 + 1
    assert torch.equal(stepped[::22], tensor)

"""Tensors of rows, as the fewest dimensions that address them, in 32-bit offsets."""

import dataclasses

import torch

# Kernels compute offsets, in elements, in 32 bits.
MAX_OFFSET = 2**31 - 1

# No row of more has offsets that all fit, however dense it is, and nor would their number.
MAX_COLUMNS = MAX_OFFSET

# Triton finds out whether it divides a stride that a kernel is given, and nothing else.
_KNOWN_DIVISOR = 16


def fits(tensor):
    """Whether a row of `tensor`, or what is a row itself, has no offset too large."""

    # Where there is no element, strides mean nothing, and a copy has the same.
    return (
        not tensor.numel() or (tensor.shape[-1] - 1) * tensor.stride(-1) <= MAX_OFFSET
    )


def without_data(tensor):
    """A tensor without data that has the strides of `tensor`, to be cut and merged in its place.

    What wraps other tensors, such as `DTensor`, need not know `as_strided`.
    """

    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
    )


def merge_rows(tensors):
    """The same tensors of one shape `(*rows, N)` with the fewest row dimensions.

    Two row dimensions become one where every tensor's strides allow it. Nothing is copied;
    at least one row dimension is left.
    """

    *row_sizes, num_columns = tensors[0].shape
    all_strides = [tensor.stride() for tensor in tensors]

    # From the innermost dimension outwards: sizes and, for each tensor, strides.
    sizes, strides = [], []

    for dim in range(len(row_sizes) - 1, -1, -1):
        size = row_sizes[dim]
        steps = [tensor_strides[dim] for tensor_strides in all_strides]

        if size == 1:
            continue

        if sizes and all(
            step == inner_step * sizes[-1]
            for step, inner_step in zip(steps, strides[-1], strict=True)
        ):
            sizes[-1] *= size

            continue

        sizes.append(size)
        strides.append(steps)

    if not sizes:
        # The stride of a dimension of one row means nothing; this is a dense row's.
        sizes, strides = [1], [[num_columns] * len(tensors)]

    shape = (*reversed(sizes), num_columns)

    return [
        tensor.as_strided(
            shape, (*(steps[index] for steps in reversed(strides)), tensor.stride(-1))
        )
        for index, tensor in enumerate(tensors)
    ]


def split_rows(tensors, max_offset=MAX_OFFSET):
    """Yield the tensors, split along rows so that no offset is beyond `max_offset`.

    Rows are independent, so each part can be computed on its own.
    """

    if all(_last_offset(tensor) <= max_offset for tensor in tensors):
        yield tensors

        return

    shape = tensors[0].shape
    widest = max(
        range(len(shape) - 1),
        key=lambda dim: max(
            (shape[dim] - 1) * tensor.stride(dim) for tensor in tensors
        ),
    )
    half = shape[widest] // 2

    if half == 0:
        raise ValueError(
            f"one row of shape {tuple(shape[-1:])} spans more than {max_offset} elements"
            f" of memory."
        )

    for start, length in ((0, half), (half, shape[widest] - half)):
        yield from split_rows(
            [tensor.narrow(widest, start, length) for tensor in tensors], max_offset
        )


def _last_offset(tensor):
    return sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


@dataclasses.dataclass(frozen=True)
class View:
    """How a tensor of some layout is seen as rows.

    :param offset: Of the first element, from the tensor's own, in elements.
    :param is_whole: Whether the view is the tensor as it is.
    """

    shape: tuple
    strides: tuple
    offset: int
    is_whole: bool

    @classmethod
    def of(cls, view, tensor):
        """The view that `view` is of `tensor`."""

        offset = view.storage_offset() - tensor.storage_offset()
        is_whole = (
            offset == 0
            and view.shape == tensor.shape
            and view.stride() == tensor.stride()
        )

        return cls(tuple(view.shape), view.stride(), offset, is_whole)

    def row_stride_to_compile_in(self, rows_of_a_program):
        """The stride of the rows if accesses are wide only where it is compiled in, else None.

        That makes a kernel of its own for each such stride, so it is one that accesses of two
        elements gain from; and that of rows of a single dimension, for others may change with
        the number of rows.

        :param rows_of_a_program: The most that one may take at once. The kernel multiplies the
            stride by them, in 32 bits.
        """

        if len(self.shape) != 2 or self.shape[0] == 1:
            return None

        row_stride, column_stride = self.strides

        if column_stride != 1 or row_stride % _KNOWN_DIVISOR == 0 or row_stride % 2:
            return None

        if row_stride * rows_of_a_program > MAX_OFFSET:
            return None

        return row_stride

    def with_row_stride_compiled_in(self):
        """The view that a kernel takes then: of rows one element apart, as many as it steps over."""

        (num_rows, num_columns), (row_stride, _) = self.shape, self.strides
        shape = (1 + (num_rows - 1) * row_stride, num_columns)

        return View(shape, (1, 1), self.offset, is_whole=False)

    def apply(self, tensor):
        """The rows of another tensor of the same layout."""

        if self.is_whole:
            return tensor

        return tensor.as_strided(
            self.shape, self.strides, tensor.storage_offset() + self.offset
        )


def compile_in_row_strides(names, views, rows_of_a_program):
    """Views as a kernel takes them that has some row strides compiled in.

    :param names: Those of the kernel's tensors.
    :param views: As many `View`s, of one shape.
    :param rows_of_a_program: The most that one may take at once.
    :return: As many views, and pairs of a name and the stride.
    """

    row_strides = {
        name: row_stride
        for name, view in zip(names, views, strict=True)
        if (row_stride := view.row_stride_to_compile_in(rows_of_a_program)) is not None
    }

    return (
        tuple(
            view.with_row_stride_compiled_in() if name in row_strides else view
            for name, view in zip(names, views, strict=True)
        ),
        tuple(row_strides.items()),
    )

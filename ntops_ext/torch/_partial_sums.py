"""The last step of a weight's gradient: partial sums of rows, added."""

import torch

from ntops_ext.torch import _launch, _rows

# Those that a launch can address.
MAX_ELEMENTS = _rows.MAX_OFFSET + 1


def add(handle, result, partial_sums):
    """Write the sum of the rows of `partial_sums` into `result`, in an order that sizes decide.

    :param handle: Of `ntops_ext.kernels.sum_of_rows`.
    :param result: Of shape (columns,), of any of the dtypes.
    :param partial_sums: Of shape (rows, columns), float32.
    """

    if partial_sums.numel() > MAX_ELEMENTS:
        slabs = partial_sums.split(max(MAX_ELEMENTS // len(result), 1))
        partial_sums = torch.empty(
            (len(slabs), len(result)), dtype=torch.float32, device=result.device
        )

        for row, slab in zip(partial_sums, slabs, strict=True):
            _launch.launch(handle, result.device, row, slab)

    _launch.launch(handle, result.device, result, partial_sums)

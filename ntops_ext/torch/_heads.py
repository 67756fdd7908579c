"""What `qk_norm_rope` and `qk_norm_rope_pack_` share: checks of heads, tables and weights."""

import torch

from ntops_ext.torch import _checks
from ntops_ext.torch._chunks import Rows
from ntops_ext.torch._rows import MAX_COLUMNS

# Kernels hold a head whole, and sum it up in a tree that has no more leaves.
MAX_HEAD_DIM = 2**18


def check_heads(name, tensor, like_name=None, like=None):
    """Rank, size, dtype and device of `(batch, tokens, heads, head_dim)`.

    :raises TypeError: If the dtype is not one of an operator, or not that of `like`.
    :raises ValueError: If the rank or the device is wrong, or a token has too many elements.
    """

    if like is None:
        _checks.check_dtype(name, tensor, _checks.FLOATING_DTYPES)
    else:
        check_like(name, tensor, like_name, like)

    if tensor.ndim != 4:
        raise ValueError(
            f"`{name}` must have four dimensions, (batch, tokens, heads, head_dim), but has"
            f" shape {tuple(tensor.shape)}."
        )

    if tensor.shape[2] * tensor.shape[3] > MAX_COLUMNS:
        raise ValueError(
            f"`{name}` must have at most {MAX_COLUMNS} elements in the heads of a token, for"
            f" kernels compute offsets in 32 bits, but has shape {tuple(tensor.shape)}."
        )

    if tensor.device.type == "meta":
        raise ValueError(f"`{name}` must have data, but is on the device meta.")


def check_like(name, tensor, like_name, like):
    """:raises TypeError: If the dtype differs, :raises ValueError: if the device does."""

    if tensor.dtype != like.dtype:
        raise TypeError(
            f"`{name}` must be of the dtype of `{like_name}`, {like.dtype}, but is of"
            f" {tensor.dtype}."
        )

    _checks.check_device(name, tensor, like_name, like)


def check_head_dim(name, tensor):
    """:raises ValueError: If heads cannot be cut into pairs, or are too wide."""

    head_dim = tensor.shape[3]

    if head_dim == 0 or head_dim % 2:
        raise ValueError(
            f"`{name}` must have heads of an even width, but has shape"
            f" {tuple(tensor.shape)}."
        )

    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"`{name}` must have heads of at most {MAX_HEAD_DIM} elements, which kernels"
            f" hold whole, but has shape {tuple(tensor.shape)}."
        )


def check_dense_heads(name, tensor):
    """:raises ValueError: If the heads of a token do not follow one another densely."""

    if tensor.numel() == 0:
        return

    _, _, num_heads, head_dim = tensor.shape
    _, _, head_stride, stride = tensor.stride()

    if stride != 1 or (num_heads > 1 and head_stride != head_dim):
        raise ValueError(
            f"`{name}` must hold the heads of a token densely, with strides"
            f" (any, any, {head_dim}, 1), but has shape {tuple(tensor.shape)} and strides"
            f" {tensor.stride()}."
        )


def check_weight(name, weight, like_name, like):
    """:raises TypeError, ValueError: If it is not `(head_dim,)` of the heads' dtype."""

    check_like(name, weight, like_name, like)
    _checks.check_shape(
        name, weight, like.shape[3:], f"the width of `{like_name}`'s heads"
    )


def check_rope(rope, like_name, like):
    """:raises TypeError: If the table is not complex64.
    :raises ValueError: If it is not a dense-rowed `(tokens, head_dim / 2)`, or elsewhere.
    """

    if rope.dtype != torch.complex64:
        raise TypeError(
            f"`rope` must be of torch.complex64, cosine + i sine, but is of {rope.dtype}."
        )

    _checks.check_device("rope", rope, like_name, like)
    expected = (like.shape[1], like.shape[3] // 2)

    if rope.ndim != 2:
        raise ValueError(
            f"`rope` must have two dimensions, (tokens, head_dim / 2) = {expected}, but has"
            f" shape {tuple(rope.shape)}."
        )

    _checks.check_shape("rope", rope, expected, "(tokens, head_dim / 2)")

    if rope.shape[1] > 1 and rope.numel() and rope.stride(1) != 1:
        raise ValueError(
            f"`rope` must have dense rows, but has strides {rope.stride()}."
        )


def check_not_lazy(names, arguments):
    """Refuse tensors whose memory does not hold their values.

    A conjugate or a negative is a bit of the tensor object, and no part of its layout.

    :raises ValueError: If a tensor is one.
    """

    for name, tensor in zip(names, arguments, strict=True):
        if tensor is None:
            continue

        _checks.check_tensor(name, tensor)

        if tensor.is_conj():
            raise ValueError(
                f"`{name}` is a view whose elements are conjugated when PyTorch reads"
                f" them: pass `{name}.resolve_conj()`."
            )


def rows_of(tensor):
    """The rows of one tensor of heads, for `plan_chunks`."""

    batch_stride, row_stride = tensor.stride()[:2]
    num_heads, head_dim = tensor.shape[2:]

    return Rows(
        batch_stride if tensor.shape[0] > 1 else 0,
        row_stride if tensor.shape[1] > 1 else 0,
        tensor.shape[1],
        max(num_heads * head_dim - 1, 0),
    )


def rows_of_table(rope):
    """The rows of the table's real view."""

    return Rows(
        0,
        2 * rope.stride(0) if rope.shape[0] > 1 else 0,
        rope.shape[0],
        max(2 * rope.shape[1] - 1, 0),
    )


def real_view(rope):
    """The table as float32 of `(tokens, head_dim)`: cosines and sines alternate."""

    if rope.shape[1] == 1 or rope.numel() == 0:
        # Strides of dimensions of one element or none say nothing, but `view` insists on them.
        return torch.view_as_real(rope).flatten(1)

    return rope.view(torch.float32)

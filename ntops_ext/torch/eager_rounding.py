"""`ntops_ext.torch.eager_rounding`."""

import torch

from ntops_ext.torch import _checks, _heads
from ntops_ext.torch._qk_norm_rope import eager_roundings


def eager_rounding(dtype=torch.bfloat16, head_dim=128, device="cuda"):
    """How PyTorch rounds the chain of `qk_norm_rope`, and whether its kernel does the same.

    Found out at the first question or the first call, for this process and device; that
    synchronises. On a GPU `is_reproduced` is what was seen: the kernel's bits were compared
    with PyTorch's on millions of elements. On a CPU nothing is compared or promised.

    :param dtype: float16, bfloat16 or float32.
    :param head_dim: The width of a head, even.
    :param device: A device; without an index, the current one of its type.
    :return: An object with `is_reproduced`, `reason` (empty if it is), `order_of_rows`,
        `order_of_few_rows`, `real_part` and `imaginary_part`.
    :raises TypeError: If the dtype is another one, the width no int, or the device none.
    :raises ValueError: If the width is not even and positive, or beyond 2^18, or there is no
        such device.
    :raises RuntimeError: While a CUDA graph is captured, unless it is known.

    >>> eager_rounding(device="cpu").is_reproduced
    False
    """

    if dtype not in _checks.FLOATING_DTYPES:
        raise TypeError(
            f"`dtype` must be torch.float16, torch.bfloat16 or torch.float32, but is"
            f" {_checks.shown(dtype)}."
        )

    if type(head_dim) is not int:
        raise TypeError(
            f"`head_dim` must be an int, but is a {_checks.type_name(head_dim)}."
        )

    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"`head_dim` must be even and positive, but is {_checks.shown(head_dim)}."
        )

    if head_dim > _heads.MAX_HEAD_DIM:
        raise ValueError(
            f"`head_dim` must be at most {_heads.MAX_HEAD_DIM}, for kernels hold heads"
            f" whole, but is {_checks.shown(head_dim)}."
        )

    _checks.check_device_is_usable(device)
    # A tensor's device always has an index, where its type has more than one device.
    device = torch.empty(0, device=device).device

    if device.type == "meta":
        raise ValueError("`device` must be one that computes, but is meta.")

    return eager_roundings.get(device, dtype, head_dim)

"""`ntops_ext.torch.eager_rounding`."""

import torch

from ntops_ext.torch._qk_norm_rope import eager_roundings


def eager_rounding(dtype=torch.bfloat16, head_dim=128, device="cuda"):
    """How PyTorch rounds the chain of `qk_norm_rope`, and whether its kernel does the same.

    Found out at the first question or the first call, for this process and device; that
    synchronises. Whatever is found, `is_reproduced` is what was seen: the kernel's bits
    were compared with PyTorch's on millions of elements.

    :param dtype: float16, bfloat16 or float32.
    :param head_dim: The width of a head, even.
    :param device: A device; without an index, the current one of its type.
    :return: An object with `is_reproduced`, `reason` (empty if it is), `order_of_rows`,
        `order_of_few_rows`, `real_part` and `imaginary_part`.
    :raises RuntimeError: While a CUDA graph is captured, unless it is known.

    >>> eager_rounding(device="cpu").is_reproduced
    False
    """

    # A tensor's device always has an index, where its type has more than one device.
    device = torch.empty(0, device=device).device

    return eager_roundings.get(device, dtype, head_dim)

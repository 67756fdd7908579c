"""A fused multiply-add of float32 arrays, which NumPy has not."""

import numpy as np


def fused_multiply_add(first, second, third):
    """`first * second + third` of float32 arrays, rounded once.

    The product of two float32 is exact in float64. Rounding its sum with the third to odd
    in float64 makes the second rounding, to float32, right.
    """

    product = first.astype(np.float64) * second.astype(np.float64)
    third = third.astype(np.float64)
    total = product + third
    virtual = total - product
    error = (product - (total - virtual)) + (third - virtual)
    is_even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(total, towards), total)

    return odd.astype(np.float32)

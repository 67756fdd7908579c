"""How tests compare: bits with bits, and results with a definition in float64.

A result that promises one rounding is not compared within a tolerance of its dtype, but with the rounded ends of the
interval in which its float32 value may lie. Rounding is monotone, so this is the sharpest test of that promise: a
second rounding on the way, or one of a wrong kind, falls outside.
"""

import torch

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

# Unit in the last place of numbers in [1, 2), and the smallest number above 0.
_UNIT = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23}
_SMALLEST = {
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-133,
    torch.float32: 2.0**-149,
}


def bits(tensor):
    """The bits of a tensor's elements as integers, so that -0 and NaN count."""

    return tensor.detach().contiguous().view(_BITS[tensor.dtype])


def assert_equal_bits(actual, expected, name="the tensor"):
    """Require the same shape, dtype, and bits."""

    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name

    differ = bits(actual) != bits(expected)

    assert not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()} elements of {name} differ in their bits; the first at"
        f" {tuple(differ.nonzero()[0].tolist())}: {actual[differ][0]!r} is not"
        f" {expected[differ][0]!r}."
    )


def assert_all_equal_bits(actual, expected):
    """The same of as many tensors, in their order."""

    assert len(actual) == len(expected)

    for position, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_equal_bits(one, other, f"tensor {position}")


def assert_rounded_once(actual, exact, arithmetic_error, *, truncated=False):
    """Require `actual` to be a float32 value near `exact`, rounded once to its dtype.

    NaN and infinities must stand where `exact`, rounded, has them.

    :param actual: The result.
    :param exact: What it stands for, in float64.
    :param arithmetic_error: How far the float32 value may be from `exact`, absolutely.
    :param truncated: Whether the rounding is toward zero, not to the nearest. Triton's interpreter does so where it
        stores bfloat16, and only there.
    """

    assert actual.shape == exact.shape

    actual, exact, arithmetic_error = (
        tensor.detach().cpu() for tensor in (actual, exact, arithmetic_error)
    )
    # Where the exact result is infinite the error is, and nothing else is right.
    error = torch.where(exact.isfinite(), arithmetic_error, 0.0)
    lowest, highest = (
        _round(end, actual.dtype, truncated) for end in (exact - error, exact + error)
    )
    is_right = torch.where(
        exact.isnan(), actual.isnan(), (actual >= lowest) & (actual <= highest)
    )

    if is_right.all():
        return

    units = errors_in_units(actual, exact)
    worst = int(torch.where(is_right, -1.0, units.nan_to_num(float("inf"))).argmax())

    raise AssertionError(
        f"{int((~is_right).sum())} of {is_right.numel()} elements are not the exact result,"
        f" rounded once to {actual.dtype}. The worst, at index {worst} of the flat result, is"
        f" {actual.flatten()[worst].item()!r} for {exact.flatten()[worst].item()!r}:"
        f" {units.flatten()[worst].item():.3f} units in the last place away."
    )


def errors_in_units(actual, exact):
    """Distances from the exact results, in units in the last place of the dtype of `actual`."""

    exponent = torch.frexp(exact.abs()).exponent - 1
    unit = torch.ldexp(torch.full_like(exact, _UNIT[actual.dtype]), exponent).clamp_min(
        _SMALLEST[actual.dtype]
    )

    return (actual.double() - exact).abs() / unit


def _round(value, dtype, truncated):
    # Through float32, as a kernel's store: the second step is what is being tested.
    value = value.to(torch.float32)

    if not truncated:
        return value.to(dtype)

    assert dtype is torch.bfloat16

    return (value.view(torch.int32) & -65536).view(torch.float32).to(dtype)

"""How kernels are launched: pure functions of shapes and dtypes.

Nothing here asks for a device, and nothing is tuned when an operator is called.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRMSNormConfig:
    """How `ntops_ext.kernels.gated_rms_norm` is made for a group size.

    :param rows_per_program: How many rows of one group a program takes.
    :param columns_per_piece: How many columns of a group are read at once; `None` if all.
    :param num_warps: The warps of a program.
    """

    rows_per_program: int
    columns_per_piece: int | None
    num_warps: int


# A program that holds its columns holds at most this many: 32 a thread in 16 warps, of
# which the float32 values of input and gate take 64 registers.
_MAX_HELD_COLUMNS = 16384

_COLUMNS_PER_PIECE = 8192

# 8 elements (16 bytes of a 16-bit type) in each of 4 accesses a thread.
_ELEMENTS_PER_WARP = 1024


def gated_rms_norm_config(group_size):
    """The configuration for groups of `group_size` columns.

    Only `columns_per_piece` can change a bit of a result (it decides the order of
    additions), and it depends on nothing but the group size.
    """

    lanes = next_power_of_2(group_size)

    if lanes > _MAX_HELD_COLUMNS:
        return GatedRMSNormConfig(
            rows_per_program=1,
            columns_per_piece=_COLUMNS_PER_PIECE,
            num_warps=_COLUMNS_PER_PIECE // _ELEMENTS_PER_WARP,
        )

    return GatedRMSNormConfig(
        rows_per_program=max(1, min(_ELEMENTS_PER_WARP // lanes, 32)),
        columns_per_piece=None,
        num_warps=max(1, lanes // _ELEMENTS_PER_WARP),
    )


def row_tile(rows_per_program, row_sizes):
    """The rows of a program along each row dimension, powers of two.

    The innermost dimension is filled first. The outermost takes what is left even where it
    has fewer rows, so that a new number of rows there makes no new kernel.
    """

    tile = []
    remaining = rows_per_program

    for size in reversed(row_sizes[1:]):
        rows = min(remaining, next_power_of_2(size))
        tile.append(rows)
        remaining //= rows

    return (remaining, *reversed(tile))


def next_power_of_2(value):
    """The smallest power of two that is at least `value`."""

    return 1 << (value - 1).bit_length()

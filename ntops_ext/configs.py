"""How kernels are launched: pure functions of shapes and dtypes.

Nothing here asks for a device, and nothing is tuned when an operator is called.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRMSNormConfig:
    """How `ntops_ext.kernels.gated_rms_norm` is made.

    :param rows_per_program: How many rows of one group a program takes.
    :param num_warps: The warps of a program.
    :param parameters_first: Whether weight and bias are read before the sum.
    :param columns_per_piece: How many columns of a group are read at once; `None` if all.
    """

    rows_per_program: int
    num_warps: int
    parameters_first: bool = True
    columns_per_piece: int | None = None


# A program that holds its columns holds at most this many: 32 a thread in 16 warps, of
# which the float32 values of input and gate take 64 registers.
_MAX_HELD_LANES = 16384

_COLUMNS_PER_PIECE = 8192

# Fewer groups than this leave most of a GPU idle: then a program's latency is what counts.
_FEW_GROUPS = 1024


def gated_rms_norm_config(group_size, num_groups):
    """The configuration for `num_groups` groups of `group_size` columns.

    No choice but `columns_per_piece` can change a bit of a result (that one decides the
    order of additions), and `columns_per_piece` depends on the group size alone.

    Each choice was the fastest, or within 2 % of it, of 1 to 32 rows and 1 to 32 warps on
    an H200, in bfloat16, for 50 to 800 MB (many groups) or 1 to 64 rows (few).
    """

    # Columns are padded to this power of two.
    lanes = next_power_of_2(group_size)

    if lanes > _MAX_HELD_LANES:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=8, columns_per_piece=_COLUMNS_PER_PIECE
        )

    # Several warps only where each has columns of its own, 256 or more: where they hold the
    # same ones, one may read what another has already written in place.
    if lanes <= 64:
        return GatedRMSNormConfig(rows_per_program=1024 // lanes, num_warps=4)

    if lanes <= 256:
        return GatedRMSNormConfig(rows_per_program=512 // lanes, num_warps=2)

    if lanes == 512:
        return GatedRMSNormConfig(rows_per_program=1, num_warps=1)

    if lanes == 1024:
        return GatedRMSNormConfig(rows_per_program=2, num_warps=4)

    if num_groups < _FEW_GROUPS:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=8 if lanes <= 8192 else 16
        )

    if group_size <= 1280:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=1, parameters_first=False
        )

    if group_size <= 2048:
        return GatedRMSNormConfig(rows_per_program=1, num_warps=2)

    if group_size <= 3584:
        return GatedRMSNormConfig(rows_per_program=1, num_warps=4)

    if group_size <= 4096:
        return GatedRMSNormConfig(rows_per_program=1, num_warps=8)

    if group_size <= 6144:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=4, parameters_first=False
        )

    if group_size <= 8192:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=16, parameters_first=False
        )

    if group_size <= 12288:
        return GatedRMSNormConfig(rows_per_program=1, num_warps=8)

    return GatedRMSNormConfig(rows_per_program=1, num_warps=16)


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

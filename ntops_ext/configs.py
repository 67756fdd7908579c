"""How kernels are launched: pure functions of shapes and dtypes.

Nothing here asks for a device, and nothing is tuned when an operator is called. "The floor", beside which some choices
were timed, is an element-wise kernel that reads and writes as many bytes.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRMSNormConfig:
    """How `ntops_ext.kernels.gated_rms_norm` is made.

    :param rows_per_program: How many rows of one group a program takes.
    :param num_warps: The warps of a program.
    :param parameters_first: Whether weight and bias are read before the sum.
    :param columns_per_piece: How many columns of a group are read at once; `None` if all.
    :param holds_pieces: Whether the pieces are held, and so read once.
    :param columns_per_share: How many columns of a group each of the programs that share it
        writes; `None` if one program writes all.
    """

    rows_per_program: int
    num_warps: int
    parameters_first: bool = True
    columns_per_piece: int | None = None
    holds_pieces: bool = False
    columns_per_share: int | None = None


# A program that holds its columns holds at most this many: 32 a thread in 16 warps, of
# which the float32 values of input and gate take 64 registers.
_MAX_HELD_LANES = 16384

_COLUMNS_PER_PIECE = 8192

_MAX_WARPS = 16

# 5 pieces of 2048 on 16 warps took 1.05 times `torch.add`, padded on 8 warps 1.04.
_PADDED_ALL_THE_SAME = (10240,)

# Of a piece a thread takes 4 columns. 7 pieces of 1024 took 1.05 times `torch.add` so, by 2 columns 1.02;
# 7 of 512 and 5 of 1024 are slower by 2.
_COLUMNS_OF_A_PIECE = 4
_BY_TWO_COLUMNS = (7168,)

# Fewer columns in a piece are too few for a warp.
_MIN_HELD_PIECE = 128

# Fewer groups than this leave most of a GPU idle: then a program's latency is what counts.
_FEW_GROUPS = 1024


# Where each program has 128 columns a warp of its own. One row of 4096 columns, norm first, took 1.19 times
# `torch.add` so, and 1.59 in one program.
_COLUMNS_OF_A_SHARE = 1024
_MIN_COLUMNS_OF_A_SHARE = 512

# Of more columns in all, enough programs are at work without sharing.
_MAX_SHARED_COLUMNS = 2**18


def gated_rms_norm_config(group_size, num_groups, num_row_dims=1, *, may_share=False):
    """The configuration for `num_groups` groups of `group_size` columns.

    :param num_row_dims: How many dimensions address a row.
    :param may_share: Whether several programs may share a group. Each of them reads all of `input`.

    No choice but `columns_per_piece` can change a bit of a result (that one decides the
    order of additions), and `columns_per_piece` depends on the group size alone.

    Each choice was the fastest, or within 5 % of it, of 1 to 32 rows and 1 to 32 warps on
    an H200, in bfloat16, for 50 to 800 MB (many groups) or 1 to 64 rows (few).
    """

    # Columns that are not held in pieces are padded to this power of two.
    lanes = next_power_of_2(group_size)

    if lanes > _MAX_HELD_LANES:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=8, columns_per_piece=_COLUMNS_PER_PIECE
        )

    piece = _held_piece(group_size)

    if group_size in _PADDED_ALL_THE_SAME:
        piece = None

    # Nothing is padded, so that as many columns are added up as where nothing is shared.
    can_share = may_share and (piece is not None or group_size == lanes)

    if can_share and num_groups * group_size <= _MAX_SHARED_COLUMNS:
        share = min(piece or group_size, _COLUMNS_OF_A_SHARE)

        if _MIN_COLUMNS_OF_A_SHARE <= share < group_size:
            return GatedRMSNormConfig(
                rows_per_program=1,
                num_warps=share // 128,
                columns_per_piece=piece,
                columns_per_share=share,
            )

    if piece is not None:
        columns = 2 if group_size in _BY_TWO_COLUMNS else _COLUMNS_OF_A_PIECE

        return GatedRMSNormConfig(
            rows_per_program=1,
            num_warps=min(piece // (32 * columns), _MAX_WARPS),
            columns_per_piece=piece,
            holds_pieces=True,
        )

    # With several row dimensions a program works out more indices: fewer, larger programs.
    # A gate of strides (12288, 128) beside 131072 rows of 128 took 35.8 us in programs of
    # 2 warps, 30.9 in these.
    if lanes <= 256 and num_row_dims > 1:
        return GatedRMSNormConfig(rows_per_program=1024 // lanes, num_warps=1)

    # Several warps only where each has columns of its own, 256 or more: where they hold the
    # same ones, one may read what another has already written in place.
    if lanes <= 128:
        return GatedRMSNormConfig(rows_per_program=1024 // lanes, num_warps=4)

    if lanes <= 256:
        return GatedRMSNormConfig(rows_per_program=512 // lanes, num_warps=2)

    if lanes == 512 and num_groups >= _FEW_GROUPS:
        return GatedRMSNormConfig(rows_per_program=1, num_warps=1)

    if lanes <= 1024:
        return GatedRMSNormConfig(rows_per_program=2, num_warps=4)

    if num_groups < _FEW_GROUPS:
        return GatedRMSNormConfig(
            rows_per_program=1, num_warps=min(lanes // 256, _MAX_WARPS)
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


def most_rows_of_a_program(group_size):
    """How many rows of a group of this size a program takes at once, at most, in either pass."""

    return max(1024 // next_power_of_2(group_size), 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRMSNormBackwardConfig:
    """How `ntops_ext.kernels.gated_rms_norm_backward` is made.

    :param rows_per_step: How many rows of one group a program takes at once.
    :param num_warps: The warps of a program.
    :param max_row_blocks: How many programs share the rows of one group, at most.
    :param pipeline_stages: Triton's `num_stages` of the loop over steps: one step is computed while the rows of
        the others are loaded.
    :param recomputes: Whether a program, while it adds up the sums of a row, holds only what was
        read and the sigmoid of the gate, and then computes the rest once more.
    :param columns_per_program: How many columns of a group a program takes; `None` if all.
    :param columns_per_piece: In pieces of how many columns it does; `None` if in one.
    """

    rows_per_step: int
    num_warps: int
    max_row_blocks: int
    pipeline_stages: int = 3
    recomputes: bool = False
    columns_per_program: int | None = None
    columns_per_piece: int | None = None


# The rows of one program's columns are added in its registers: beside those of a row of
# more columns there is no room for their sums.
_MAX_SUMMED_LANES = 8192

_COLUMNS_PER_PART = 1024

# 7 pieces of 1024 took 1.32 times the floor, padded 1.15.
_PADDED_IN_BACKWARD = (7168,)

# Wider ones that are summed all the same, where registers are left: 5 pieces of 2048 took 1.28 times the floor,
# parts of 1024 columns 1.88.
_SUMMED_IN_PIECES = (10240,)

# The multiprocessors of the GPU that these choices are for. Nothing asks the device for
# its own: how rows are cut decides the bits of the gradients of weight and bias.
_MULTIPROCESSORS = 132

# More warps of a multiprocessor were slower, in groups of 256 to 1024 columns by 8 to 13 %.
_WARPS_OF_BACKWARD = 16


def gated_rms_norm_backward_config(
    group_size, groups_per_row, *, item_size=2, has_bias=False
):
    """The configuration for rows of `groups_per_row` groups of `group_size` columns.

    :param item_size: The bytes of an element, of the widest of the tensors of rows.
    :param has_bias: Whether there is a bias, whose sums take registers too.

    Nothing depends on the number of rows. `rows_per_step`, `max_row_blocks` and
    `columns_per_program` decide in which order rows are added up for the gradients of
    weight and bias; no choice but the columns of a program and of a piece, which depend on
    the group size alone (of 10240 columns on the others, too), changes a bit of the others.

    Each choice that was timed on an H200, in bfloat16, was the fastest, or within 1 % of it,
    of 1 to 16 warps, 1 to 20 programs a multiprocessor and 2 to 4 stages.
    """

    lanes = next_power_of_2(group_size)
    leaves_registers = item_size == 2 and not has_bias
    is_summed = lanes <= _MAX_SUMMED_LANES or (
        group_size in _SUMMED_IN_PIECES and leaves_registers
    )

    if not is_summed:
        num_warps = max(_COLUMNS_PER_PART // 256, 1)
        groups_per_row = _ceil_div(group_size, _COLUMNS_PER_PART)

        return GatedRMSNormBackwardConfig(
            rows_per_step=1,
            num_warps=num_warps,
            max_row_blocks=_row_blocks(_WARPS_OF_BACKWARD // num_warps, groups_per_row),
            columns_per_program=_COLUMNS_PER_PART,
        )

    piece = _held_piece(group_size)

    if piece is not None and group_size not in _PADDED_IN_BACKWARD:
        # 20 to 28 columns a thread leave room for half the warps. 40 of 5 pieces of 1024 do so too, if they
        # are of 16 bits, have no bias, and most is computed once more: 1.20 times the floor, where 20 took 1.31.
        is_by_eight = group_size // piece == 3 or (piece >= 1024 and leaves_registers)
        num_warps = max(piece // (256 if is_by_eight else 128), 1)

        return GatedRMSNormBackwardConfig(
            rows_per_step=1,
            num_warps=num_warps,
            max_row_blocks=_row_blocks(max(8 // num_warps, 1), groups_per_row),
            recomputes=is_by_eight and group_size // piece == 5,
            columns_per_piece=piece,
        )

    # In one warp nobody waits for anybody: 4 rows of 128 columns took 1.16 times the floor, 8 on two warps
    # 1.17, and of 4096 rows in all 1.50 and 1.68.
    if lanes <= 128:
        return GatedRMSNormBackwardConfig(
            rows_per_step=min(512 // lanes, 16),
            num_warps=1,
            max_row_blocks=_row_blocks(8, groups_per_row),
        )

    # 8 columns a thread; of 4096 and more 16, which take all registers.
    num_warps = lanes // 256 if lanes <= 2048 else lanes // 512
    # Of 4096 one program a multiprocessor leaves half the partial sums: 512 rows took 1.40 times the
    # floor, 1.67 with two, 16384 rows 1.14 and 1.15.
    programs = 1 if lanes == 4096 else _WARPS_OF_BACKWARD // num_warps

    return GatedRMSNormBackwardConfig(
        rows_per_step=1,
        num_warps=num_warps,
        max_row_blocks=_row_blocks(programs, groups_per_row),
        pipeline_stages=4 if lanes in (2048, 4096) else 3,
        # Of 4096, where registers are left, it is slower by 2 %.
        recomputes=lanes == 8192,
    )


# What Triton needs beside the steps on their way and a tile of float32, by which it exchanges
# layouts: the sums of warps, and what it rounds up.
_BYTES_OF_EXCHANGES = 4096


def pipeline_stages(config, group_size, bytes_per_column, shared_memory):
    """`config.pipeline_stages`, or fewer where less fits in shared memory. No bit depends on it.

    :param config: A `GatedRMSNormBackwardConfig` for groups of `group_size`.
    :param bytes_per_column: Of all tensors that are read row by row.
    :param shared_memory: How many bytes a program may use.
    """

    columns = config.columns_per_program or next_power_of_2(group_size)

    if config.columns_per_piece is not None:
        columns = group_size

    columns *= config.rows_per_step
    room = shared_memory - 4 * columns - _BYTES_OF_EXCHANGES

    # One stage fewer is on its way than is held.
    return min(config.pipeline_stages, 1 + max(room // (columns * bytes_per_column), 0))


def _row_blocks(programs_per_multiprocessor, groups_per_row):
    return max(_MULTIPROCESSORS * programs_per_multiprocessor // groups_per_row, 1)


def _held_piece(group_size):
    """The columns of a piece, if a group is 3, 5 or 7 times a power of two."""

    piece = group_size & -group_size

    if piece < _MIN_HELD_PIECE or group_size // piece not in (3, 5, 7):
        return None

    return piece


# Of the kernel that finds the statistics of a group that is taken piece by piece. With 8192 columns on 16 warps
# gradients of 20480 columns took 1.97 times the floor, so 1.78. What is read twice makes 1.6 of it.
STATISTICS_COLUMNS_PER_PIECE, STATISTICS_NUM_WARPS = 4096, 8


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


_LANES_PER_WARP = 32

# What one warp handles of one tensor, and the least that it reads by 16 bytes a lane.
# 2 KiB are 8 heads of 128 in a 16-bit type: on an H200, in place, 40.6 us where half of it
# took 43.9 us, twice of it 41.1 us, and the same on four warps 60.2 us.
_BYTES_PER_WARP = 2048
_BYTES_OF_WIDE_ACCESS = 16 * _LANES_PER_WARP


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNormRopeConfig:
    """How `qk_norm_rope` and `qk_norm_rope_pack_` are launched.

    A program owns `heads_per_program` heads of one token of Q and `kv_heads_per_program`
    heads of one token of K and of V, on `num_warps` warps. Both are powers of two.
    """

    heads_per_program: int
    kv_heads_per_program: int
    num_warps: int


def qk_norm_rope_config(*, num_heads, num_kv_heads, head_dim, item_size):
    """The launch of these heads.

    :param num_heads: The heads of Q.
    :param num_kv_heads: The heads of K and V; 0 for `qk_norm_rope`, which has none.
    :param head_dim: The width of a head.
    :param item_size: The bytes of an element.
    """

    head_size = next_power_of_2(head_dim) * item_size
    heads_per_warp = max(_BYTES_PER_WARP // head_size, 1)
    num_warps = min(max(head_size // _BYTES_PER_WARP, 1), _MAX_WARPS)

    # Q and K are cut into the same number of blocks. Few heads of K in many blocks would
    # be narrow ones, so that of grouped queries a program owns twice as many.
    for heads_at_most in (heads_per_warp, 2 * heads_per_warp):
        num_blocks = max(
            _ceil_div(num_heads, heads_at_most),
            _ceil_div(num_kv_heads, heads_at_most),
        )
        config = QKNormRopeConfig(
            heads_per_program=next_power_of_2(_ceil_div(num_heads, num_blocks)),
            kv_heads_per_program=next_power_of_2(
                max(_ceil_div(num_kv_heads, num_blocks), 1)
            ),
            num_warps=num_warps,
        )
        narrowest = min(
            config.heads_per_program,
            config.kv_heads_per_program if num_kv_heads else config.heads_per_program,
        )

        if narrowest * head_size >= _BYTES_OF_WIDE_ACCESS:
            break

    return config


# A program of the backward pass takes several tokens, which leaves fewer partial sums to
# add; but no more than leaves this many programs, 6 a multiprocessor of an H200. Of 4096 tokens
# of 32 heads, 1024 programs took 1.25 times the floor, 2048 took 1.30, 512 1.40; of 4608 tokens of
# 24 heads 864 took 1.23, 1728 took 1.27.
_PROGRAMS_OF_BACKWARD = 6 * _MULTIPROCESSORS
_MAX_TOKENS_OF_BACKWARD = 16

# Shared memory of a program, of which every GPU has more.
_MAX_BYTES_ON_THEIR_WAY = 32 * 1024

# Partial sums are addressed, in elements, in 32 bits.
_MAX_PARTIAL_SUMS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNormRopeBackwardConfig:
    """How `ntops_ext.kernels.qk_norm_rope_backward` is launched.

    A program takes `heads_per_program` heads of `tokens_per_program` tokens, on `num_warps`
    warps. Both are powers of two. `pipeline_stages` is Triton's `num_stages` of the loop over
    tokens: one token is computed while the heads of the others are loaded.
    """

    tokens_per_program: int
    heads_per_program: int
    num_warps: int
    pipeline_stages: int


def qk_norm_rope_backward_config(*, batch, tokens, num_heads, head_dim, item_size):
    """The launch for these sizes: which heads a sum over programs adds depends on them alone.

    :param batch: The entries of the batch.
    :param tokens: The tokens of an entry.
    :param num_heads: The heads of a token.
    :param head_dim: The width of a head.
    :param item_size: The bytes of an element.
    """

    forward = qk_norm_rope_config(
        num_heads=num_heads, num_kv_heads=0, head_dim=head_dim, item_size=item_size
    )
    num_blocks = batch * _ceil_div(num_heads, forward.heads_per_program)
    tokens_per_program = 1

    while (
        tokens_per_program < _MAX_TOKENS_OF_BACKWARD
        and num_blocks * tokens >= 2 * tokens_per_program * _PROGRAMS_OF_BACKWARD
    ) or num_blocks * _ceil_div(
        tokens, tokens_per_program
    ) * head_dim > _MAX_PARTIAL_SUMS:
        if tokens_per_program >= tokens:
            break

        tokens_per_program *= 2

    # Of a token: heads, their gradients, a row of the table.
    bytes_per_token = next_power_of_2(head_dim) * (
        2 * forward.heads_per_program * item_size + 4
    )

    return QKNormRopeBackwardConfig(
        tokens_per_program=tokens_per_program,
        heads_per_program=forward.heads_per_program,
        num_warps=forward.num_warps,
        pipeline_stages=3 if 2 * bytes_per_token <= _MAX_BYTES_ON_THEIR_WAY else 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumOfRowsConfig:
    """How `ntops_ext.kernels.sum_of_rows` is made.

    :param rows_per_step: How many rows a program reads at once, a power of two.
    :param columns_per_program: How many columns it takes, a power of two.
    :param num_warps: The warps of a program.
    """

    rows_per_step: int
    columns_per_program: int
    num_warps: int


def sum_of_rows_config(num_rows, num_columns):
    """The configuration for `num_rows` rows of `num_columns` float32 columns.

    4 columns are the 16 bytes of a wide access: so as many programs as can be read the rows
    at once, and each reads many rows between two waits.
    """

    return SumOfRowsConfig(
        rows_per_step=min(max(next_power_of_2(num_rows), 16), 512),
        columns_per_program=min(next_power_of_2(num_columns), 4),
        num_warps=8,
    )


def gated_rms_norm_sum_config(num_columns):
    """The configuration for the partial sums of `gated_rms_norm_backward`, of rows of `num_columns`.

    No number of rows changes it, nor the order of additions with it. Each was the fastest, or within 10 % of
    it, of 128 to 1024 rows and 4 to 32 columns on an H200.
    """

    if num_columns <= 512:
        return SumOfRowsConfig(rows_per_step=512, columns_per_program=4, num_warps=8)

    return SumOfRowsConfig(rows_per_step=256, columns_per_program=16, num_warps=8)


def next_power_of_2(value):
    """The smallest power of two that is at least `value`."""

    return 1 << (value - 1).bit_length()


def _ceil_div(dividend, divisor):
    return -(-dividend // divisor)

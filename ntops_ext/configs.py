"""Launch choices, as pure functions of shapes and element sizes.

None of them changes a bit of a result: the kernels fix the order of every sum.
"""

import dataclasses

_LANES_PER_WARP = 32

# What one warp handles of one tensor, and the least that it reads by 16 bytes a lane.
# 2 KiB are 8 heads of 128 in a 16-bit type: on an H200, in place, 40.6 us where half of it
# took 43.9 us, twice of it 41.1 us, and the same on four warps 60.2 us.
_BYTES_PER_WARP = 2048
_BYTES_OF_WIDE_ACCESS = 16 * _LANES_PER_WARP

_MAX_WARPS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkNormRopeConfig:
    """How `qk_norm_rope` and `qk_norm_rope_pack_` are launched.

    A program owns `heads_per_program` heads of one token of Q and `kv_heads_per_program`
    heads of one token of K and of V, on `num_warps` warps. Both are powers of two.
    """

    heads_per_program: int
    kv_heads_per_program: int
    num_warps: int


def choose_qk_norm_rope(*, num_heads, num_kv_heads, head_dim, item_size):
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
            1,
        )
        config = QkNormRopeConfig(
            heads_per_program=next_power_of_2(_ceil_div(num_heads, num_blocks)),
            kv_heads_per_program=next_power_of_2(_ceil_div(num_kv_heads, num_blocks)),
            num_warps=num_warps,
        )
        narrowest = min(
            config.heads_per_program,
            config.kv_heads_per_program if num_kv_heads else config.heads_per_program,
        )

        if narrowest * head_size >= _BYTES_OF_WIDE_ACCESS:
            break

    return config


def next_power_of_2(value):
    """The least power of two that is not less than `value`; 1 for 0."""

    return 1 << max(value - 1, 0).bit_length()


def _ceil_div(dividend, divisor):
    return -(-dividend // divisor)

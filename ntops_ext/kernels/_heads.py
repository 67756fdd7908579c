"""What the kernels of `qk_norm_rope` and `qk_norm_rope_pack_` share.

One program handles one token and a block of its heads. How every step rounds is fixed,
whatever Triton makes of it. The squares of a head are added by steps of two numbers each,
in an order that is chosen by name (`ORDERS`); where a sum follows a product, an `fma` says
which of the products is rounded (`REAL_PARTS`, `IMAGINARY_PARTS`).
`ntops_ext.torch.eager_rounding` finds out which of them PyTorch uses.
"""

import ninetoothed
import ninetoothed.language as ntl
from ninetoothed import Tensor

from ntops_ext.kernels._applications import specialize


def arrange(*tensors, places, heads_per_program, grid):
    """Give every tensor the grid (batch, token of the packed result, block of heads).

    :param tensors: Symbolic tensors: `(batch, tokens, heads, head_dim)`, the table
        `(tokens, head_dim)`, weights `(head_dim,)`, scalars.
    :param places: For each tensor how many tokens the grid has before and behind its own.
    :param heads_per_program: For each tensor how many of its heads a program owns.
    :param grid: The sizes of the grid.
    """

    return tuple(
        _arrange(tensor, place, num_heads, grid)
        for tensor, place, num_heads in zip(
            tensors, places, heads_per_program, strict=True
        )
    )


def _arrange(tensor, place, num_heads, grid):
    if tensor.ndim == 0:
        return tensor

    if tensor.ndim == 4:
        absent_heads = grid[2] * num_heads - tensor.shape[2]
        padded = tensor.pad(((0, 0), place, (0, absent_heads), (0, 0)))
        arranged = padded.tile((1, 1, num_heads, tensor.shape[3])).squeeze(3)
        arranged.dtype = arranged.dtype.squeeze((0, 1))

        return arranged

    # The table and the weights stay one-dimensional inside: where they meet a block of
    # heads it is they that are brought into its layout. As a row of two dimensions they
    # impose theirs on the block, which is then shuffled through the warp twice.
    if tensor.ndim == 2:
        arranged = tensor.pad((place, (0, 0))).tile((1, tensor.shape[1]))
        arranged = arranged.unsqueeze(0).expand((grid[0], -1, grid[2]))
        arranged.dtype = arranged.dtype.squeeze(0)

        return arranged

    return tensor.tile((-1,)).unsqueeze(0).unsqueeze(0).expand(grid)


# -- The orders in which the squares of a head are added. ------------------------------
# A head is padded with zeros to a power of two: zero added to a sum of squares changes
# no bit of it.


def _chain_of_four(terms):
    # ((first + second) + third) + fourth along the last of three axes.
    as_pairs = ntl.reshape(terms, (terms.shape[0], terms.shape[1], 2, 2))
    first_and_third, second_and_fourth = ntl.split(as_pairs)
    first, third = ntl.split(first_and_third)
    second, fourth = ntl.split(second_and_fourth)

    return ((first + second) + third) + fourth


def _group_by_nothing(squares):
    return squares


def _group_by_lanes(squares):
    # Lane t of 32 adds the squares t, t + 32, t + 64 and t + 96 of a head of 128.
    by_quarters = ntl.reshape(squares, (squares.shape[0], 4, squares.shape[1] // 4))
    sums_of_lanes = _chain_of_four(ntl.permute(by_quarters, (0, 2, 1)))

    return sums_of_lanes


def _group_by_vectors(squares):
    # Each lane adds the four squares that it loads at once.
    vectors = ntl.reshape(squares, (squares.shape[0], squares.shape[1] // 4, 4))
    sums_of_vectors = _chain_of_four(vectors)

    return sums_of_vectors


def _group_by_folded_vectors(squares):
    # 32 lanes of four accumulators each add the halves of a head of 256 first.
    halves = ntl.reshape(squares, (squares.shape[0], 2, squares.shape[1] // 2))
    accumulators = ntl.sum(halves, 1)
    vectors_of_sums = ntl.reshape(
        accumulators, (accumulators.shape[0], accumulators.shape[1] // 4, 4)
    )
    sums_of_folded_vectors = _chain_of_four(vectors_of_sums)

    return sums_of_folded_vectors


def _add_by_decreasing_distance(partial_sums):
    remaining = partial_sums

    for _ in ntl.static_range(18):
        if remaining.shape[1] > 1:
            remaining = ntl.sum(
                ntl.reshape(
                    remaining, (remaining.shape[0], 2, remaining.shape[1] // 2)
                ),
                1,
            )

    return remaining


def _add_by_increasing_distance(partial_sums):
    # Within a warp by increasing distance; what is wider than a warp is halved first.
    remaining = partial_sums

    for _ in ntl.static_range(16):
        if remaining.shape[1] > 32:
            remaining = ntl.sum(
                ntl.reshape(
                    remaining, (remaining.shape[0], 2, remaining.shape[1] // 2)
                ),
                1,
            )

    for _ in ntl.static_range(5):
        if remaining.shape[1] > 1:
            remaining = ntl.sum(
                ntl.reshape(
                    remaining, (remaining.shape[0], remaining.shape[1] // 2, 2)
                ),
                2,
            )

    return remaining


_GROUPINGS = {
    "vectors": _group_by_vectors,
    "folded_vectors": _group_by_folded_vectors,
    "lanes": _group_by_lanes,
    "nothing": _group_by_nothing,
}

_DISTANCES = {
    "decreasing": _add_by_decreasing_distance,
    "increasing": _add_by_increasing_distance,
}

# What is added within a lane, then how the lanes are added.
ORDERS = tuple(
    (grouping, distances) for distances in _DISTANCES for grouping in _GROUPINGS
)


# -- The products that are rounded before they are added. ------------------------------


def _square_exactly(values):
    # The square of a 16-bit number is exact in float32, added to or not.
    return values * values


def _square_and_round(values):
    return ntl.fma(values, values, 0.0)


# A product with -1 changes the sign and nothing else. Up to Triton 3.7 a unary minus is a
# subtraction from +0, which leaves +0 as it is.


def _real_part_rounding_the_imaginary_product(real, imaginary, cosine, sine):
    return ntl.fma(real, cosine, imaginary * (sine * -1.0))


def _real_part_rounding_the_real_product(real, imaginary, cosine, sine):
    return ntl.fma(imaginary, sine * -1.0, real * cosine)


def _imaginary_part_rounding_the_cosine_product(real, imaginary, cosine, sine):
    return ntl.fma(real, sine, imaginary * cosine)


def _imaginary_part_rounding_the_sine_product(real, imaginary, cosine, sine):
    return ntl.fma(imaginary, cosine, real * sine)


# Named by the product that is not rounded.
REAL_PARTS = {
    "real*cosine": _real_part_rounding_the_imaginary_product,
    "imaginary*sine": _real_part_rounding_the_real_product,
}

IMAGINARY_PARTS = {
    "real*sine": _imaginary_part_rounding_the_cosine_product,
    "imaginary*cosine": _imaginary_part_rounding_the_sine_product,
}


# -- A block of heads. ------------------------------------------------------------------
# The functions of these names are what `specialize_rounding` puts others in the place of.

square = _square_exactly
group = _group_by_vectors
add_lanes = _add_by_decreasing_distance
rotate_real = _real_part_rounding_the_imaginary_product
rotate_imaginary = _imaginary_part_rounding_the_cosine_product


def normalize_and_rotate(heads, weights, table, eps, head_dim):
    weight_row = weights[None, :]
    cosines, sines = ntl.split(ntl.reshape(table, (table.shape[0] // 2, 2)))
    cosine = cosines[None, :]
    sine = sines[None, :]
    wide = ntl.cast(heads, ntl.float32)
    squares = square(wide)
    sums_in_lanes = group(squares)
    sum_of_squares = add_lanes(sums_in_lanes)
    scale = ntl.rsqrt(ntl.fma(sum_of_squares, 1.0 / head_dim, 0.0) + eps)
    normalized = ntl.cast(wide * scale, heads.dtype)
    weighted = ntl.cast(
        ntl.cast(normalized, ntl.float32) * ntl.cast(weight_row, ntl.float32),
        heads.dtype,
    )
    pairs = ntl.reshape(weighted, (weighted.shape[0], weighted.shape[1] // 2, 2))
    narrow_real, narrow_imaginary = ntl.split(pairs)
    real = ntl.cast(narrow_real, ntl.float32)
    imaginary = ntl.cast(narrow_imaginary, ntl.float32)
    rotated_real = rotate_real(real, imaginary, cosine, sine)
    rotated_imaginary = rotate_imaginary(real, imaginary, cosine, sine)
    rotated = ntl.reshape(
        ntl.join(rotated_real, rotated_imaginary),
        (weighted.shape[0], weighted.shape[1]),
    )

    return ntl.cast(rotated, heads.dtype)


def specialize_rounding(squares_are_exact, order, real_part, imaginary_part):
    grouping, distances = order

    return specialize(
        normalize_and_rotate,
        square=_square_exactly if squares_are_exact else _square_and_round,
        group=_GROUPINGS[grouping],
        add_lanes=_DISTANCES[distances],
        rotate_real=REAL_PARTS[real_part],
        rotate_imaginary=IMAGINARY_PARTS[imaginary_part],
    )


def heads_tensor(head_dim, dtype, name, shape):
    # The columns that pad a head to a power of two enter the sum of its squares: zeros.
    is_padded = head_dim & (head_dim - 1) != 0

    return Tensor(
        shape=(*shape, head_dim),
        dtype=dtype,
        other=0 if is_padded else None,
        name=name,
    )


def table_tensor(tokens, head_dim, dtype):
    return Tensor(
        shape=(tokens, head_dim),
        dtype=None if dtype is None else ninetoothed.float32,
        name="rope",
    )

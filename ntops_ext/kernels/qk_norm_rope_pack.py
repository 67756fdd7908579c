"""RMSNorm per head and complex rotation of Q and K, and the packing of K and V.

One program handles one token of the packed result and a block of its heads. Tokens of the
prefix are copied; those behind it are normalised and rotated (Q and K) or copied (V).
Tensors without a prefix are padded in front by its length, and prefixes behind by the
number of tokens: so every tensor has the same grid, and the masks let a program touch
only what its token comes from.

How every step rounds is fixed, whatever Triton makes of it. The squares of a head are
added by steps of two numbers each, in an order that is chosen by name (`ORDERS`); where a
sum follows a product, an `fma` says which of the products is rounded (`REAL_PARTS`,
`IMAGINARY_PARTS`). `ntops_ext.torch.eager_rounding` finds out which of them PyTorch uses.
"""

import functools
import types

import ninetoothed.language as ntl
from ninetoothed import Tensor


def arrangement(*tensors, places, heads_per_program, grid):
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
    by_quarters = ntl.reshape(squares, (squares.shape[0], 4, 32))
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

    for _ in ntl.static_range(16):
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


def _real_part_rounding_the_imaginary_product(real, imaginary, cosine, sine):
    return ntl.fma(real, cosine, -(imaginary * sine))


def _real_part_rounding_the_real_product(real, imaginary, cosine, sine):
    return ntl.fma(-imaginary, sine, real * cosine)


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


# -- The applications. -----------------------------------------------------------------
# The functions named below are chosen by `_specialize`.


def _normalize_and_rotate(heads, weight, cosine, sine, eps, head_dim):
    wide = ntl.cast(heads, ntl.float32)
    squares = square(wide)  # noqa: F821
    sums_in_lanes = group(squares)  # noqa: F821
    sum_of_squares = add_lanes(sums_in_lanes)  # noqa: F821
    scale = ntl.rsqrt(ntl.fma(sum_of_squares, 1.0 / head_dim, 0.0) + eps)
    normalized = ntl.cast(wide * scale, heads.dtype)
    weighted = ntl.cast(
        ntl.cast(normalized, ntl.float32) * ntl.cast(weight, ntl.float32),
        heads.dtype,
    )
    pairs = ntl.reshape(weighted, (weighted.shape[0], weighted.shape[1] // 2, 2))
    narrow_real, narrow_imaginary = ntl.split(pairs)
    real = ntl.cast(narrow_real, ntl.float32)
    imaginary = ntl.cast(narrow_imaginary, ntl.float32)
    rotated_real = rotate_real(real, imaginary, cosine, sine)  # noqa: F821
    rotated_imaginary = rotate_imaginary(real, imaginary, cosine, sine)  # noqa: F821
    rotated = ntl.reshape(
        ntl.join(rotated_real, rotated_imaginary),
        (weighted.shape[0], weighted.shape[1]),
    )

    return ntl.cast(rotated, heads.dtype)


def qk_norm_rope_of_one_tensor(input, output, weight, rope, eps):
    heads = input
    weights = weight
    weight_row = weights[None, :]
    table = rope
    cosines, sines = ntl.split(ntl.reshape(table, (table.shape[0] // 2, 2)))
    cosine = cosines[None, :]
    sine = sines[None, :]
    output_heads = normalize_and_rotate_q(  # noqa: F821
        heads, weight_row, cosine, sine, eps, input.shape[1]
    )
    output = output_heads  # noqa: F841


def qk_norm_rope_pack_in_place(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, eps
):
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
        k_out = k_prefix
        v_out = v_prefix  # noqa: F841
    else:
        q_heads = q
        k_heads = k_out
        table = rope
        q_weights = q_weight
        k_weights = k_weight
        q_weight_row = q_weights[None, :]
        k_weight_row = k_weights[None, :]
        cosines, sines = ntl.split(ntl.reshape(table, (table.shape[0] // 2, 2)))
        cosine = cosines[None, :]
        sine = sines[None, :]
        q_rotated = normalize_and_rotate_q(  # noqa: F821
            q_heads, q_weight_row, cosine, sine, eps, q.shape[1]
        )
        q = q_rotated
        k_rotated = normalize_and_rotate_k(  # noqa: F821
            k_heads, k_weight_row, cosine, sine, eps, q.shape[1]
        )
        k_out = k_rotated


def qk_norm_rope_pack_from_k(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, eps
):
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
        k_out = k_prefix
        v_out = v_prefix  # noqa: F841
    else:
        q_heads = q
        k_heads = k_src
        table = rope
        q_weights = q_weight
        k_weights = k_weight
        q_weight_row = q_weights[None, :]
        k_weight_row = k_weights[None, :]
        cosines, sines = ntl.split(ntl.reshape(table, (table.shape[0] // 2, 2)))
        cosine = cosines[None, :]
        sine = sines[None, :]
        q_rotated = normalize_and_rotate_q(  # noqa: F821
            q_heads, q_weight_row, cosine, sine, eps, q.shape[1]
        )
        q = q_rotated
        k_rotated = normalize_and_rotate_k(  # noqa: F821
            k_heads, k_weight_row, cosine, sine, eps, q.shape[1]
        )
        k_out = k_rotated  # noqa: F841


def qk_norm_rope_pack_from_v(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, v_src, eps
):
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
        k_out = k_prefix
        v_out = v_prefix
    else:
        q_heads = q
        k_heads = k_out
        v_heads = v_src
        table = rope
        q_weights = q_weight
        k_weights = k_weight
        q_weight_row = q_weights[None, :]
        k_weight_row = k_weights[None, :]
        v_out = v_heads  # noqa: F841
        cosines, sines = ntl.split(ntl.reshape(table, (table.shape[0] // 2, 2)))
        cosine = cosines[None, :]
        sine = sines[None, :]
        q_rotated = normalize_and_rotate_q(  # noqa: F821
            q_heads, q_weight_row, cosine, sine, eps, q.shape[1]
        )
        q = q_rotated
        k_rotated = normalize_and_rotate_k(  # noqa: F821
            k_heads, k_weight_row, cosine, sine, eps, q.shape[1]
        )
        k_out = k_rotated


def qk_norm_rope_pack_from_k_and_v(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src, eps
):
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
        k_out = k_prefix
        v_out = v_prefix
    else:
        q_heads = q
        k_heads = k_src
        v_heads = v_src
        table = rope
        q_weights = q_weight
        k_weights = k_weight
        q_weight_row = q_weights[None, :]
        k_weight_row = k_weights[None, :]
        v_out = v_heads  # noqa: F841
        cosines, sines = ntl.split(ntl.reshape(table, (table.shape[0] // 2, 2)))
        cosine = cosines[None, :]
        sine = sines[None, :]
        q_rotated = normalize_and_rotate_q(  # noqa: F821
            q_heads, q_weight_row, cosine, sine, eps, q.shape[1]
        )
        q = q_rotated
        k_rotated = normalize_and_rotate_k(  # noqa: F821
            k_heads, k_weight_row, cosine, sine, eps, q.shape[1]
        )
        k_out = k_rotated  # noqa: F841


def _specialize(function, **names):
    # NineToothed inlines the functions that an application calls by looking their names up
    # in its globals. The copy is also what keeps two kernels of one application apart:
    # `ninetoothed.make` writes the arrangement into the application's annotations.
    return types.FunctionType(function.__code__, {**function.__globals__, **names})


def _specialize_rounding(squares_are_exact, order, real_part, imaginary_part):
    grouping, distances = order

    return _specialize(
        _normalize_and_rotate,
        square=_square_exactly if squares_are_exact else _square_and_round,
        group=_GROUPINGS[grouping],
        add_lanes=_DISTANCES[distances],
        rotate_real=REAL_PARTS[real_part],
        rotate_imaginary=IMAGINARY_PARTS[imaginary_part],
    )


def premake_one_tensor(
    *,
    num_heads,
    head_dim,
    heads_per_program,
    order,
    real_part,
    imaginary_part,
    squares_are_exact,
    dtype=None,
    eps_dtype=None,
):
    """The kernel of `qk_norm_rope`: input, output, weight, rope, eps.

    `rope` is the real view `(tokens, head_dim)` of the table, float32.

    :param num_heads: The heads of a token.
    :param head_dim: The width of a head, even.
    :param heads_per_program: How many heads a program owns, a power of two.
    :param order: One of `ORDERS`.
    :param real_part: One of `REAL_PARTS`.
    :param imaginary_part: One of `IMAGINARY_PARTS`.
    :param squares_are_exact: Whether the element type is a 16-bit one.
    :param dtype: The element type, for ahead-of-time compilation.
    :param eps_dtype: The type of `eps`, for ahead-of-time compilation.
    """

    make_tensor = functools.partial(_heads_tensor, head_dim, dtype)
    input = make_tensor("input", (None, None, num_heads))
    batch, tokens = input.shape[:2]
    tensors = (
        input,
        make_tensor("output", (batch, tokens, num_heads)),
        Tensor(shape=(head_dim,), dtype=dtype, name="weight"),
        _table(tokens, head_dim, dtype),
        Tensor(0, dtype=eps_dtype, name="eps"),
    )
    num_blocks = -(-num_heads // heads_per_program)
    arrangement_ = functools.partial(
        arrangement,
        places=((0, 0),) * len(tensors),
        heads_per_program=(heads_per_program,) * len(tensors),
        grid=(batch, tokens, num_blocks),
    )
    application = _specialize(
        qk_norm_rope_of_one_tensor,
        normalize_and_rotate_q=_specialize_rounding(
            squares_are_exact, order, real_part, imaginary_part
        ),
    )

    return arrangement_, application, tensors


_PACK_APPLICATIONS = {
    (False, False): qk_norm_rope_pack_in_place,
    (True, False): qk_norm_rope_pack_from_k,
    (False, True): qk_norm_rope_pack_from_v,
    (True, True): qk_norm_rope_pack_from_k_and_v,
}


def premake(
    *,
    num_heads,
    num_kv_heads,
    head_dim,
    heads_per_program,
    kv_heads_per_program,
    q_order,
    k_order,
    real_part,
    imaginary_part,
    squares_are_exact,
    has_k_src=False,
    has_v_src=False,
    dtype=None,
    eps_dtype=None,
):
    """The kernel of `qk_norm_rope_pack_`, in its arguments' order.

    `k_src` and `v_src` are arguments of the kernel only if it has them. `rope` is the real
    view `(tokens, head_dim)` of the table, float32.

    :param num_heads: The heads of `q`.
    :param num_kv_heads: The heads of K and V.
    :param head_dim: The width of a head, even.
    :param heads_per_program: How many heads of `q` a program owns, a power of two.
    :param kv_heads_per_program: How many heads of K and of V, a power of two.
    :param q_order: One of `ORDERS`, for Q.
    :param k_order: One of `ORDERS`, for K.
    :param real_part: One of `REAL_PARTS`.
    :param imaginary_part: One of `IMAGINARY_PARTS`.
    :param squares_are_exact: Whether the element type is a 16-bit one.
    :param has_k_src: Whether K is read from `k_src` and not from `k_out`.
    :param has_v_src: Whether V is copied from `v_src` to `v_out`.
    :param dtype: The element type, for ahead-of-time compilation.
    :param eps_dtype: The type of `eps`, for ahead-of-time compilation.
    """

    make_tensor = functools.partial(_heads_tensor, head_dim, dtype)
    q = make_tensor("q", (None, None, num_heads))
    batch, tokens = q.shape[:2]
    k_prefix = make_tensor("k_prefix", (batch, None, num_kv_heads))
    prefix = k_prefix.shape[1]
    packed = prefix + tokens
    everywhere, in_front, behind = (0, 0), (0, tokens), (prefix, 0)
    make_weight = functools.partial(Tensor, shape=(head_dim,), dtype=dtype)

    placed = [
        (q, behind),
        (make_tensor("k_out", (batch, packed, num_kv_heads)), everywhere),
        (make_tensor("v_out", (batch, packed, num_kv_heads)), everywhere),
        (make_weight(name="q_weight"), everywhere),
        (make_weight(name="k_weight"), everywhere),
        (_table(tokens, head_dim, dtype), behind),
        (k_prefix, in_front),
        (make_tensor("v_prefix", (batch, prefix, num_kv_heads)), in_front),
    ]

    if has_k_src:
        placed.append((make_tensor("k_src", (batch, tokens, num_kv_heads)), behind))

    if has_v_src:
        placed.append((make_tensor("v_src", (batch, tokens, num_kv_heads)), behind))

    placed.append((Tensor(0, dtype=eps_dtype, name="eps"), everywhere))
    tensors, places = zip(*placed, strict=True)
    num_blocks = max(
        -(-num_heads // heads_per_program), -(-num_kv_heads // kv_heads_per_program)
    )
    arrangement_ = functools.partial(
        arrangement,
        places=places,
        heads_per_program=(
            heads_per_program,
            *[kv_heads_per_program] * (len(tensors) - 1),
        ),
        grid=(batch, packed, num_blocks),
    )
    specialize = functools.partial(
        _specialize_rounding,
        squares_are_exact,
        real_part=real_part,
        imaginary_part=imaginary_part,
    )
    application = _specialize(
        _PACK_APPLICATIONS[has_k_src, has_v_src],
        normalize_and_rotate_q=specialize(q_order),
        normalize_and_rotate_k=specialize(k_order),
    )

    return arrangement_, application, tensors


def _heads_tensor(head_dim, dtype, name, shape):
    # The columns that pad a head to a power of two enter the sum of its squares: zeros.
    is_padded = head_dim & (head_dim - 1) != 0

    return Tensor(
        shape=(*shape, head_dim),
        dtype=dtype,
        other=0 if is_padded else None,
        name=name,
    )


def _table(tokens, head_dim, dtype):
    import ninetoothed

    return Tensor(
        shape=(tokens, head_dim),
        dtype=None if dtype is None else ninetoothed.float32,
        name="rope",
    )

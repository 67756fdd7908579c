"""RMSNorm per head and complex rotation of Q and K, and the packing of K and V.

One program handles one token of the packed result and a block of its heads. Tokens of the
prefix are copied; those behind it are normalised and rotated (Q and K) or copied (V).
Tensors without a prefix are padded in front by its length, and prefixes behind by the
number of tokens: so every tensor has the same grid, and the masks let a program touch
only what its token comes from. A program loads its rows before it stores them, so that
source and result may be the same rows.
"""

import functools

from ninetoothed import Tensor

from ntops_ext.kernels import _heads
from ntops_ext.kernels._applications import begin, beginning, specialize


def arrangement(*tensors, places, heads_per_program, kv_heads_per_program, grid):
    """Give every tensor the grid (batch, token of the packed result, block of heads).

    :param tensors: `q`, then the others in the order of the application.
    :param places: For each tensor how many tokens the grid has before and behind its own.
    :param heads_per_program: How many heads of `q` a program owns.
    :param kv_heads_per_program: How many heads of K and of V.
    :param grid: The sizes of the grid.
    """

    return _heads.arrange(
        *tensors,
        places=places,
        heads_per_program=(
            heads_per_program,
            *[kv_heads_per_program] * (len(tensors) - 1),
        ),
        grid=grid,
    )


# `premake` puts ones with the rounding that is asked for in their place.
normalize_and_rotate_q = _heads.normalize_and_rotate
normalize_and_rotate_k = _heads.normalize_and_rotate


def qk_norm_rope_pack_in_place(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, eps
):
    begin()
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
        k_out = k_prefix
        v_out = v_prefix
    else:
        q_heads = q
        k_heads = k_out
        table = rope
        q_weights = q_weight
        k_weights = k_weight
        q_rotated = normalize_and_rotate_q(q_heads, q_weights, table, eps, q.shape[1])
        q = q_rotated
        k_rotated = normalize_and_rotate_k(k_heads, k_weights, table, eps, q.shape[1])
        k_out = k_rotated


def qk_norm_rope_pack_from_k(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, eps
):
    begin()
    if k_prefix.offsets(1) < k_prefix.source.shape[1]:
        k_out = k_prefix
        v_out = v_prefix
    else:
        q_heads = q
        k_heads = k_src
        table = rope
        q_weights = q_weight
        k_weights = k_weight
        q_rotated = normalize_and_rotate_q(q_heads, q_weights, table, eps, q.shape[1])
        q = q_rotated
        k_rotated = normalize_and_rotate_k(k_heads, k_weights, table, eps, q.shape[1])
        k_out = k_rotated


def qk_norm_rope_pack_from_v(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, v_src, eps
):
    begin()
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
        v_out = v_heads
        q_rotated = normalize_and_rotate_q(q_heads, q_weights, table, eps, q.shape[1])
        q = q_rotated
        k_rotated = normalize_and_rotate_k(k_heads, k_weights, table, eps, q.shape[1])
        k_out = k_rotated


def qk_norm_rope_pack_from_k_and_v(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src, eps
):
    begin()
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
        v_out = v_heads
        q_rotated = normalize_and_rotate_q(q_heads, q_weights, table, eps, q.shape[1])
        q = q_rotated
        k_rotated = normalize_and_rotate_k(k_heads, k_weights, table, eps, q.shape[1])
        k_out = k_rotated


_APPLICATIONS = {
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
    waits=False,
):
    """The kernel of `qk_norm_rope_pack_`, in its arguments' order.

    `k_src` and `v_src` are arguments of the kernel only if it has them. `rope` is the real
    view `(tokens, head_dim)` of the table, float32.

    :param num_heads: The heads of `q`.
    :param num_kv_heads: The heads of K and V.
    :param head_dim: The width of a head, even.
    :param heads_per_program: How many heads of `q` a program owns, a power of two.
    :param kv_heads_per_program: How many heads of K and of V, a power of two.
    :param q_order: One of `_heads.ORDERS`, for Q.
    :param k_order: One of `_heads.ORDERS`, for K.
    :param real_part: One of `_heads.REAL_PARTS`.
    :param imaginary_part: One of `_heads.IMAGINARY_PARTS`.
    :param squares_are_exact: Whether the element type is a 16-bit one.
    :param has_k_src: Whether K is read from `k_src` and not from `k_out`.
    :param has_v_src: Whether V is copied from `v_src` to `v_out`.
    :param dtype: The element type, for ahead-of-time compilation.
    :param eps_dtype: The type of `eps`, for ahead-of-time compilation.
    :param waits: Whether programs wait for the kernel in front of theirs (see `_applications`).
    """

    make_tensor = functools.partial(_heads.heads_tensor, head_dim, dtype)
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
        (_heads.table_tensor(tokens, head_dim, dtype), behind),
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
        heads_per_program=heads_per_program,
        kv_heads_per_program=kv_heads_per_program,
        grid=(batch, packed, num_blocks),
    )
    normalize_and_rotate = functools.partial(
        _heads.specialize_rounding,
        squares_are_exact,
        real_part=real_part,
        imaginary_part=imaginary_part,
    )
    application = specialize(
        _APPLICATIONS[has_k_src, has_v_src],
        begin=beginning(waits),
        normalize_and_rotate_q=normalize_and_rotate(q_order),
        normalize_and_rotate_k=normalize_and_rotate(k_order),
    )

    return arrangement_, application, tensors

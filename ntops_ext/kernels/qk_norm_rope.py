"""RMSNorm per head and complex rotation of one tensor, out of place or exactly in place."""

import functools

from ninetoothed import Tensor

from ntops_ext.kernels import _heads
from ntops_ext.kernels._applications import begin, beginning, specialize


def arrangement(*tensors, heads_per_program, grid):
    """Give every tensor the grid (batch, token, block of heads).

    :param tensors: `input`, `output`, `weight`, `rope`, `eps`.
    :param heads_per_program: How many heads of a token a program owns.
    :param grid: The sizes of the grid.
    """

    num_tensors = len(tensors)

    return _heads.arrange(
        *tensors,
        places=((0, 0),) * num_tensors,
        heads_per_program=(heads_per_program,) * num_tensors,
        grid=grid,
    )


# `premake` puts one with the rounding that is asked for in its place.
normalize_and_rotate = _heads.normalize_and_rotate


def qk_norm_rope_application(input, output, weight, rope, eps):
    begin()
    heads = input
    weights = weight
    table = rope
    output_heads = normalize_and_rotate(heads, weights, table, eps, input.shape[1])
    output = output_heads


def premake(
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
    waits=False,
):
    """The kernel of `qk_norm_rope`: input, output, weight, rope, eps.

    `rope` is the real view `(tokens, head_dim)` of the table, float32.

    :param num_heads: The heads of a token.
    :param head_dim: The width of a head, even.
    :param heads_per_program: How many heads a program owns, a power of two.
    :param order: One of `_heads.ORDERS`.
    :param real_part: One of `_heads.REAL_PARTS`.
    :param imaginary_part: One of `_heads.IMAGINARY_PARTS`.
    :param squares_are_exact: Whether the element type is a 16-bit one.
    :param dtype: The element type, for ahead-of-time compilation.
    :param eps_dtype: The type of `eps`, for ahead-of-time compilation.
    :param waits: Whether programs wait for the kernel in front of theirs (see `_applications`).
    """

    make_tensor = functools.partial(_heads.heads_tensor, head_dim, dtype)
    input = make_tensor("input", (None, None, num_heads))
    batch, tokens = input.shape[:2]
    tensors = (
        input,
        make_tensor("output", (batch, tokens, num_heads)),
        Tensor(shape=(head_dim,), dtype=dtype, name="weight"),
        _heads.table_tensor(tokens, head_dim, dtype),
        Tensor(0, dtype=eps_dtype, name="eps"),
    )
    num_blocks = -(-num_heads // heads_per_program)
    arrangement_ = functools.partial(
        arrangement,
        heads_per_program=heads_per_program,
        grid=(batch, tokens, num_blocks),
    )
    application = specialize(
        qk_norm_rope_application,
        begin=beginning(waits),
        normalize_and_rotate=_heads.specialize_rounding(
            squares_are_exact, order, real_part, imaginary_part
        ),
    )

    return arrangement_, application, tensors

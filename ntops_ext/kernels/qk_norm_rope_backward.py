"""The gradients of `qk_norm_rope`: of its input, and of its weight as partial sums.

With `n = x * rsqrt(mean(x * x) + eps)` and `y = (n * weight) rotated by rope`, and `g` the
gradient of `y` turned back, by the conjugate of rope:

    gradient of weight = the sum of g * n over all heads
    gradient of x      = rsqrt(...) * (h - n * mean(h * n)), with h = g * weight

Everything is computed anew from `x`, in float32, without the roundings in between that
`qk_norm_rope` has. One program takes a block of heads of several tokens, one token after
the other, and writes one row of partial sums: nothing is added by two programs. Every
addition is one of two numbers, in an order that no layout changes, and where a sum follows a
product an `fma` fixes how they round.
"""

import functools
import inspect

import ninetoothed
import ninetoothed.language as ntl
from ninetoothed import Tensor

from ntops_ext.kernels._applications import begin, beginning, specialize


def arrangement(*tensors, names, tokens_per_program, heads_per_program):
    """Give every tensor the grid (batch, run of tokens, block of heads).

    A program sees of heads a list of (heads, head_dim), of the table one of (head_dim,).

    :param tensors: Symbolic tensors: heads `(batch, tokens, heads, head_dim)`, the partial
        sums `(*grid, head_dim)`, the table `(tokens, head_dim)`, the weight, a scalar.
    :param names: What each of them is, by its name in the applications.
    :param tokens_per_program: How many tokens a program takes.
    :param heads_per_program: How many heads of each it takes.
    """

    def arrange_heads(tensor):
        head_dim = tensor.shape[3]
        arranged = tensor.tile((1, tokens_per_program, heads_per_program, head_dim))
        arranged = arranged.squeeze(3)
        by_token = arranged.dtype.tile((1, 1, heads_per_program, head_dim))
        by_token = by_token.squeeze((0, 2, 3))
        by_token.dtype = by_token.dtype.squeeze((0, 1))
        arranged.dtype = by_token

        return arranged

    def arrange_partial_sums(tensor):
        arranged = tensor.tile((1, 1, 1, tensor.shape[3])).squeeze(3)
        arranged.dtype = arranged.dtype.squeeze((0, 1, 2))

        return arranged

    def arrange_table(tensor):
        head_dim = tensor.shape[1]
        arranged = tensor.tile((tokens_per_program, head_dim))
        by_token = arranged.dtype.tile((1, head_dim)).squeeze(1)
        by_token.dtype = by_token.dtype.squeeze(0)
        arranged = arranged.unsqueeze(0).expand((grid[0], -1, grid[2]))
        arranged.dtype = by_token

        return arranged

    def arrange_weight(tensor):
        return tensor.tile((-1,)).unsqueeze(0).unsqueeze(0).expand(grid)

    grid = arrange_heads(tensors[0]).shape
    arrange = {
        "grad_output": arrange_heads,
        "input": arrange_heads,
        "weight": arrange_weight,
        "rope": arrange_table,
        "grad_input": arrange_heads,
        "partial_sums": arrange_partial_sums,
        "eps": lambda tensor: tensor,
        "pipeline_stages": lambda tensor: tensor,
    }

    return tuple(
        arrange[name](tensor) for name, tensor in zip(names, tensors, strict=True)
    )


# Each function's names are its own: the source of a called one is pasted in.


def _turn_back(grad_loaded, table_loaded):
    grad_pairs = ntl.reshape(
        grad_loaded, (grad_loaded.shape[0], grad_loaded.shape[1] // 2, 2)
    )
    narrow_grad_real, narrow_grad_imaginary = ntl.split(grad_pairs)
    cosines, sines = ntl.split(
        ntl.reshape(table_loaded, (table_loaded.shape[0] // 2, 2))
    )
    cosine = cosines[None, :]
    sine = sines[None, :]
    grad_real = ntl.cast(narrow_grad_real, ntl.float32)
    grad_imaginary = ntl.cast(narrow_grad_imaginary, ntl.float32)
    turned_real = ntl.fma(grad_real, cosine, grad_imaginary * sine)
    turned_imaginary = ntl.fma(grad_imaginary, cosine, grad_real * (sine * -1.0))

    return ntl.reshape(
        ntl.join(turned_real, turned_imaginary),
        (grad_loaded.shape[0], grad_loaded.shape[1]),
    )


def _group_terms(terms_of_heads):
    # Four neighbours lie in one lane.
    if terms_of_heads.shape[1] >= 4:
        vectors_of_terms = ntl.reshape(
            terms_of_heads, (terms_of_heads.shape[0], terms_of_heads.shape[1] // 4, 4)
        )
        pairs_of_terms = ntl.reshape(
            vectors_of_terms,
            (vectors_of_terms.shape[0], vectors_of_terms.shape[1], 2, 2),
        )
        even_terms, odd_terms = ntl.split(pairs_of_terms)
        first_terms, third_terms = ntl.split(even_terms)
        second_terms, fourth_terms = ntl.split(odd_terms)
        grouped_terms = (first_terms + second_terms) + (third_terms + fourth_terms)
    else:
        grouped_terms = terms_of_heads

    return grouped_terms


def _add_lanes(grouped_by_lane):
    remaining_lanes = grouped_by_lane

    for _ in ntl.static_range(16):
        if remaining_lanes.shape[1] > 1:
            remaining_lanes = ntl.sum(
                ntl.reshape(
                    remaining_lanes,
                    (remaining_lanes.shape[0], 2, remaining_lanes.shape[1] // 2),
                ),
                1,
            )

    return remaining_lanes


def _add_heads(sums_by_head):
    remaining_heads = sums_by_head

    for _ in ntl.static_range(16):
        if remaining_heads.shape[0] > 1:
            remaining_heads = ntl.sum(
                ntl.reshape(
                    remaining_heads,
                    (2, remaining_heads.shape[0] // 2, remaining_heads.shape[1]),
                ),
                0,
            )

    return ntl.reshape(remaining_heads, (remaining_heads.shape[1],))


# Heads and tokens that pad a block are read as zeros. Where `eps` is 0 their inverse root is
# infinite, and would make NaN of the zeros: it is 0 instead, so that they add nothing.


def qk_norm_rope_backward_of_both(
    grad_output, input, weight, rope, grad_input, partial_sums, eps, pipeline_stages
):
    begin()
    weight_row = ntl.cast(weight, ntl.float32)
    sums = ntl.zeros_like(ntl.cast(input[0], ntl.float32))

    for token in ntl.range(0, input.shape[0], num_stages=pipeline_stages):
        heads = ntl.cast(input[token], ntl.float32)
        grads = grad_output[token]
        table = rope[token]
        is_present = (input[token].offsets(1) < input.source.shape[1]) & (
            input[token].offsets(2) < input.source.shape[2]
        )
        squares = _group_terms(ntl.fma(heads, heads, 0.0))
        sum_of_squares = _add_lanes(squares)
        mean_square = ntl.fma(sum_of_squares, 1.0 / input.source.shape[3], 0.0)
        scale = ntl.where(is_present[:, None], ntl.rsqrt(mean_square + eps), 0.0)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        sums = ntl.fma(turned, normalized, sums)
        weighted = turned * weight_row[None, :]
        products = _group_terms(ntl.fma(weighted, normalized, 0.0))
        sum_of_products = _add_lanes(products)
        mean_product = sum_of_products * (-1.0 / input.source.shape[3])
        across = ntl.fma(normalized, mean_product, weighted)
        grad_input[token] = ntl.cast(across * scale, input.dtype.dtype)

    total = _add_heads(sums)
    partial_sums = total


def qk_norm_rope_backward_of_input(
    grad_output, input, weight, rope, grad_input, eps, pipeline_stages
):
    begin()
    weight_row = ntl.cast(weight, ntl.float32)

    for token in ntl.range(0, input.shape[0], num_stages=pipeline_stages):
        heads = ntl.cast(input[token], ntl.float32)
        grads = grad_output[token]
        table = rope[token]
        squares = _group_terms(ntl.fma(heads, heads, 0.0))
        sum_of_squares = _add_lanes(squares)
        mean_square = ntl.fma(sum_of_squares, 1.0 / input.source.shape[3], 0.0)
        scale = ntl.rsqrt(mean_square + eps)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        weighted = turned * weight_row[None, :]
        products = _group_terms(ntl.fma(weighted, normalized, 0.0))
        sum_of_products = _add_lanes(products)
        mean_product = sum_of_products * (-1.0 / input.source.shape[3])
        across = ntl.fma(normalized, mean_product, weighted)
        grad_input[token] = ntl.cast(across * scale, input.dtype.dtype)


def qk_norm_rope_backward_of_weight(
    grad_output, input, rope, partial_sums, eps, pipeline_stages
):
    begin()
    sums = ntl.zeros_like(ntl.cast(input[0], ntl.float32))

    for token in ntl.range(0, input.shape[0], num_stages=pipeline_stages):
        heads = ntl.cast(input[token], ntl.float32)
        grads = grad_output[token]
        table = rope[token]
        is_present = (input[token].offsets(1) < input.source.shape[1]) & (
            input[token].offsets(2) < input.source.shape[2]
        )
        squares = _group_terms(ntl.fma(heads, heads, 0.0))
        sum_of_squares = _add_lanes(squares)
        mean_square = ntl.fma(sum_of_squares, 1.0 / input.source.shape[3], 0.0)
        scale = ntl.where(is_present[:, None], ntl.rsqrt(mean_square + eps), 0.0)
        normalized = heads * scale
        turned = _turn_back(grads, table)
        sums = ntl.fma(turned, normalized, sums)

    total = _add_heads(sums)
    partial_sums = total


# Which gradients are asked for, of the input and of the weight.
_APPLICATIONS = {
    (True, True): qk_norm_rope_backward_of_both,
    (True, False): qk_norm_rope_backward_of_input,
    (False, True): qk_norm_rope_backward_of_weight,
}


def premake(
    *,
    num_heads,
    head_dim,
    tokens_per_program,
    heads_per_program,
    of_input,
    of_weight,
    dtype=None,
    eps_dtype=None,
    waits=False,
):
    """The kernel: grad_output, input, weight, rope, grad_input, partial_sums, eps, stages.

    The last is compiled in: the pipeline stages of the loop over tokens.
    `weight` and `grad_input` are absent without `of_input`, `partial_sums` without
    `of_weight`. `rope` is the real view `(tokens, head_dim)` of the table, `partial_sums`
    `(batch, runs of tokens, blocks of heads, head_dim)`; both are float32.

    :param num_heads: The heads of a token.
    :param head_dim: The width of a head, even.
    :param tokens_per_program: How many tokens a program takes.
    :param heads_per_program: How many heads of each it takes, a power of two.
    :param of_input: Whether the gradient of the input is asked for.
    :param of_weight: Whether that of the weight is.
    :param dtype: The element type, for ahead-of-time compilation.
    :param eps_dtype: The type of `eps`, for ahead-of-time compilation.
    :param waits: Whether programs wait for the kernel in front of theirs (see `_applications`).
    """

    wide_dtype = None if dtype is None else ninetoothed.float32
    grad_output = Tensor(
        shape=(None, None, num_heads, head_dim),
        dtype=dtype,
        other=0,
        name="grad_output",
    )
    batch, tokens = grad_output.shape[:2]
    num_blocks = -(-num_heads // heads_per_program)
    heads_shape = (batch, tokens, num_heads, head_dim)
    input = Tensor(shape=heads_shape, dtype=dtype, other=0, name="input")
    weight = Tensor(shape=(head_dim,), dtype=dtype, other=0, name="weight")
    rope = Tensor(shape=(tokens, head_dim), dtype=wide_dtype, other=0, name="rope")
    grad_input = Tensor(shape=heads_shape, dtype=dtype, name="grad_input")
    partial_sums = Tensor(
        shape=(batch, None, num_blocks, head_dim),
        dtype=wide_dtype,
        name="partial_sums",
    )
    eps = Tensor(0, dtype=eps_dtype, name="eps")
    named = {
        "grad_output": grad_output,
        "input": input,
        "weight": weight,
        "rope": rope,
        "grad_input": grad_input,
        "partial_sums": partial_sums,
        "eps": eps,
        "pipeline_stages": Tensor(0, constexpr=True, name="pipeline_stages"),
    }
    application = specialize(_APPLICATIONS[of_input, of_weight], begin=beginning(waits))
    names = tuple(inspect.signature(application).parameters)
    arrangement_ = functools.partial(
        arrangement,
        names=names,
        tokens_per_program=tokens_per_program,
        heads_per_program=heads_per_program,
    )

    return arrangement_, application, tuple(named[name] for name in names)

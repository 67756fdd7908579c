"""The gradients of a gated RMSNorm.

With `v` the input (times `act(gate)` where the gate comes first), `v_hat = v / rms` and `s`
the incoming gradient (times `act(gate)` where it comes last), over each group of D columns:

    h = (weight_offset + weight) * s
    d_v = (h - v_hat * mean(v_hat * h)) / rms
    d_weight = sum over rows of s * v_hat
    d_bias = sum over rows of s
    d_gate = act'(gate) * (v_hat * (weight_offset + weight) + bias) * grad_output
        where the gate comes last, act'(gate) * input * d_v where it comes first

A program takes one group of a run of rows, some rows at a time, while those of the next
steps are on their way to shared memory. While it finds the two means it may hold nothing but
what it read, and compute the rest once more: then two programs share a multiprocessor whose
registers one would fill. It keeps its sums over rows in registers and writes them, once, as
one row of a workspace of partial sums, which `sum_of_rows` adds. Of a group too wide to be
held, a kernel finds the two means, and then programs take pieces of it.

All arithmetic is in float32. Rows are added one after the other, then by a tree; columns by
the trees of the forward kernel, but for the last additions of several narrow rows at once.
"""

import functools

import ninetoothed
import ninetoothed.language as ntl
from ninetoothed import Tensor

from ntops_ext.kernels import gated_rms_norm
from ntops_ext.kernels._applications import begin, beginning, specialize
from ntops_ext.kernels.gated_rms_norm import (
    _inverse_root,
    _one_plus_exp,
    _sum_of_columns,
)

_STATISTICS = ("scales", "mean_products")


def arrangement(
    *tensors,
    row_tile,
    columns_per_program,
    columns_per_piece,
    max_row_blocks,
    row_strides,
):
    """One program takes some columns, a group or a part of one, of a run of tiles of rows.

    It sees of a tensor tiles of (rows, columns) by step and piece, of a parameter
    (columns,) by piece, of statistics (rows, 1) by step and 0, and of partial sums
    (1, columns) by piece.

    :param tensors: Tensors of one shape `(*rows, N)`, of which the first is one, parameters
        `(N,)`, statistics `(*rows, 1)`, partial sums `(row_blocks, N)`, whose names end in
        `_partials`, and scalars.
    :param row_tile: The rows of a tile along each of the row dimensions.
    :param columns_per_program: The columns of a program.
    :param columns_per_piece: The columns of a tile, which divide those of a program.
    :param max_row_blocks: The most runs that rows are cut into.
    :param row_strides: As for `gated_rms_norm.tile_rows`.
    """

    num_row_dims = len(row_tile)
    num_pieces = columns_per_program // columns_per_piece

    def arrange_rows(tensor, columns):
        tiles = gated_rms_norm.tile_rows(tensor, row_tile, columns, row_strides)

        if num_row_dims > 1:
            tiles.dtype = tiles.dtype.flatten(0, num_row_dims)
            tiles = tiles.flatten(0, num_row_dims)

        tiles_per_program = (tiles.shape[0] + max_row_blocks - 1) // max_row_blocks

        return tiles.tile((tiles_per_program, 1 if columns == 1 else num_pieces))

    grid = arrange_rows(tensors[0], columns_per_piece).shape

    def arrange(tensor):
        if tensor.ndim == 0:
            return tensor

        if tensor.ndim == 1:
            arranged = tensor.tile((columns_per_piece,)).tile((num_pieces,))

            return arranged.unsqueeze(0).expand((grid[0], -1))

        if tensor.source.name.endswith("_partials"):
            arranged = tensor.tile((1, columns_per_piece)).tile((1, num_pieces))
            arranged.dtype = arranged.dtype.squeeze(0)

            return arranged

        if tensor.shape[-1] == 1 and tensor is not tensors[0]:
            return arrange_rows(tensor, 1).expand((-1, grid[1]))

        return arrange_rows(tensor, columns_per_piece)

    return tuple(arrange(tensor) for tensor in tensors)


def statistics_arrangement(
    *tensors, num_row_dims, group_size, columns_per_piece, row_strides
):
    """One program takes one row, piece by piece.

    :param tensors: As `arrangement` takes them, but for partial sums.
    """

    row_tile = (1,) * num_row_dims

    def arrange_statistics(tensor):
        arranged = tensor.tile((*row_tile, 1))

        if num_row_dims > 1:
            arranged.dtype = arranged.dtype.flatten(0, num_row_dims)

        return arranged

    others = [one for one in tensors if one.source.name not in _STATISTICS]
    arranged = iter(
        gated_rms_norm.arrangement(
            *others,
            row_tile=row_tile,
            group_size=group_size,
            columns_per_piece=columns_per_piece,
            row_strides=row_strides,
        )
    )

    return tuple(
        arrange_statistics(one) if one.source.name in _STATISTICS else next(arranged)
        for one in tensors
    )


def _sigmoid(sigmoid_argument, is_precise):
    if is_precise:
        sigmoid_divisor = _one_plus_exp(sigmoid_argument * -1.0)
        sigmoid_value = ntl.div_rn(1.0, sigmoid_divisor)
    else:
        # A quotient takes 7 instructions, this 2; either is 2 units of a float32 off.
        sigmoid_root = ntl.rsqrt(1.0 + ntl.exp2(sigmoid_argument * -1.4426950408889634))
        sigmoid_value = sigmoid_root * sigmoid_root

    return sigmoid_value


def _sum_of_rows(terms):
    # The sum along the first axis, whose length is a power of two, with that axis kept.
    row_sums = terms

    for _ in ntl.static_range(12):
        if row_sums.shape[0] > 1:
            row_sums = ntl.sum(
                ntl.reshape(row_sums, (2, row_sums.shape[0] // 2, row_sums.shape[1])), 0
            )

    return row_sums


def _sum_of_few_columns(few_terms):
    # Of several rows. The last additions, of up to 16 sums that lie in the lanes of one
    # warp, are Triton's. A tree of steps leaves the sum in a layout in which, spread over
    # columns again, a thread holds all of them, and Triton then computes the gradients in
    # that, in local memory: groups of 512 columns took 70 to 230 times the time.
    few = few_terms

    for _ in ntl.static_range(3):
        if few.shape[1] > 1:
            few = ntl.sum(ntl.reshape(few, (few.shape[0], few.shape[1] // 2, 2)), 2)

    few_total = ntl.sum(few, 1)
    few_total = few_total[:, None]

    return few_total


def _two_sums_of_columns(first_terms, second_terms, are_by_four):
    # `_sum_of_columns` of both; side by side, so that warps wait for one another half as
    # often, where there are several warps and registers are left.
    if first_terms.shape[1] >= 1024 and first_terms.shape[1] <= 4096:
        pair = ntl.permute(ntl.join(first_terms, second_terms), (2, 0, 1))
        pair = ntl.reshape(pair, (2 * first_terms.shape[0], first_terms.shape[1]))
        pair_totals = _sum_of_columns(pair, are_by_four)
        pair_totals = ntl.reshape(pair_totals, (2, first_terms.shape[0], 1))
        both_totals = ntl.split(ntl.permute(pair_totals, (1, 2, 0)))
    elif first_terms.shape[0] > 1:
        first_total = _sum_of_few_columns(first_terms)
        second_total = _sum_of_few_columns(second_terms)
        both_totals = (first_total, second_total)
    else:
        first_total = _sum_of_columns(first_terms, are_by_four)
        second_total = _sum_of_columns(second_terms, are_by_four)
        both_totals = (first_total, second_total)

    return both_totals


def _widened(narrow, hidden_zero):
    # In float32. A compiler takes a second widening for the first, and holds its result from
    # the one to the other, in twice the registers, unless it cannot tell that the bits are
    # the same.
    if narrow.dtype == ntl.float32:
        wide_bits = ntl.cast(narrow, ntl.int32, bitcast=True) ^ ntl.cast(
            hidden_zero, ntl.int32
        )
        widened = ntl.cast(wide_bits, ntl.float32, bitcast=True)
    else:
        narrow_bits = ntl.cast(narrow, ntl.int16, bitcast=True) ^ hidden_zero
        narrow_again = ntl.cast(narrow_bits, narrow.dtype, bitcast=True)
        widened = ntl.cast(narrow_again, ntl.float32)

    return widened


def gated_rms_norm_backward_application(
    grad_output,
    input,
    gate,
    weight,
    bias,
    scales,
    mean_products,
    grad_input,
    grad_gate,
    weight_partials,
    bias_partials,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
    needs_input,
    needs_gate,
    needs_weight,
    needs_bias,
    holds_statistics,
    recomputes,
    num_columns_held,
    pipeline_stages,
):
    begin()
    # Not used for what it holds: for its shape.
    first_tile = input[0, 0]
    column = ntl.arange(0, first_tile.shape[1])
    weights = ()
    biases = ()
    weight_sums = ()
    bias_sums = ()

    for initial_piece in ntl.static_range(input.shape[1]):
        weights = weights + (
            weight_offset + ntl.cast(weight[initial_piece], ntl.float32),
        )
        biases = biases + (ntl.cast(bias[initial_piece], ntl.float32),)

        if needs_weight:
            weight_sums = weight_sums + (ntl.zeros(first_tile.shape, ntl.float32),)

        if needs_bias:
            bias_sums = bias_sums + (ntl.zeros(first_tile.shape, ntl.float32),)

    for step in ntl.range(0, input.shape[0], num_stages=pipeline_stages):
        squares = ntl.zeros(first_tile.shape, ntl.float32)
        products = ntl.zeros(first_tile.shape, ntl.float32)
        inputs = ()
        gates = ()
        sigmoids = ()
        incomings = ()

        # Triton 3.3 and 3.4 do not compile a loop that goes from an empty tuple to another.
        if needs_bias:
            bias_sums_so_far = bias_sums
            bias_sums = ()

        for piece in ntl.static_range(input.shape[1]):
            input_loaded = input[step, piece]
            incoming_loaded = grad_output[step, piece]
            incoming = ntl.cast(incoming_loaded, ntl.float32)
            value = ntl.cast(input_loaded, ntl.float32)
            scaled = incoming

            if activation != 0:
                gate_loaded = gate[step, piece]
                factor = ntl.cast(gate_loaded, ntl.float32)
                # Not `or`, which Triton 3.3 has not for what a comparison of dtypes gives, and no name
                # for both places: after the sums it would take that for no constant.
                sigmoid = _sigmoid(
                    factor,
                    (input_loaded.dtype == ntl.float32)
                    | (gate_loaded.dtype == ntl.float32),
                )

                if activation == 1:
                    factor = factor * sigmoid
                else:
                    factor = sigmoid

                if norm_before_gate:
                    scaled = incoming * factor
                else:
                    value = value * factor

                gates = gates + (gate_loaded,)
                sigmoids = sigmoids + (sigmoid,)

            if first_tile.shape[1] != num_columns_held:
                value = ntl.where(column[None, :] < num_columns_held, value, 0.0)

            if holds_statistics == 0:
                squares = ntl.fma(value, value, squares)
                products = ntl.fma(value, scaled * weights[piece], products)

            if needs_bias:
                if activation != 0 and norm_before_gate:
                    bias_sums = bias_sums + (
                        ntl.fma(incoming, factor, bias_sums_so_far[piece]),
                    )
                else:
                    bias_sums = bias_sums + (bias_sums_so_far[piece] + incoming,)

            inputs = inputs + (input_loaded,)
            incomings = incomings + (incoming_loaded,)

        if holds_statistics:
            scale = scales[step, 0]
            mean_product = mean_products[step, 0]
        else:
            # A thread holds 4 columns of a piece where there are 5 or 7 of fewer than 1024, 8
            # otherwise (see `ntops_ext.configs`).
            totals = _two_sums_of_columns(
                squares, products, input.shape[1] > 3 and squares.shape[1] < 1024
            )
            square_total = totals[0]
            product_total = totals[1]

            if first_tile.shape[0] == 1:
                # A number has no layout that the gradients could take on.
                square_total = ntl.sum(square_total)
                product_total = ntl.sum(product_total)

            scale = _inverse_root(
                ntl.fma(square_total, inverse_group_size, eps),
                input_loaded.dtype == ntl.float32,
            )
            mean_product = product_total * scale * inverse_group_size

        zero = ntl.cast(0, ntl.int16)

        if recomputes:
            # Always 0, of NaN too. A compiler does not know that, and has it only after the
            # sums.
            zero = ntl.cast(scale < 0.0, ntl.int16)

        if needs_weight:
            weight_sums_so_far = weight_sums
            weight_sums = ()

        for last_piece in ntl.static_range(input.shape[1]):
            # What was computed above, once more, but for the sigmoid, which takes longest.
            # Where the compiler knows `zero`, it finds it in registers.
            wide_input = _widened(inputs[last_piece], zero)
            last_incoming = _widened(incomings[last_piece], zero)
            last_value = wide_input
            last_scaled = last_incoming

            if activation != 0:
                last_sigmoid = sigmoids[last_piece]
                last_factor = _widened(gates[last_piece], zero)

                if activation == 1:
                    last_factor = last_factor * last_sigmoid
                    slope = ntl.fma(last_factor, 1.0 - last_sigmoid, last_sigmoid)
                else:
                    # Not 1 - sigmoid(z), which cancels, and here is a factor.
                    complement = _sigmoid(
                        last_factor * -1.0,
                        (inputs[last_piece].dtype == ntl.float32)
                        | (gates[last_piece].dtype == ntl.float32),
                    )
                    last_factor = last_sigmoid
                    slope = last_sigmoid * complement

                if norm_before_gate:
                    last_scaled = last_incoming * last_factor
                else:
                    last_value = wide_input * last_factor

            if first_tile.shape[1] != num_columns_held:
                last_value = ntl.where(
                    column[None, :] < num_columns_held, last_value, 0.0
                )

            normalized = last_value * scale

            if needs_weight:
                weight_sums = weight_sums + (
                    ntl.fma(last_scaled, normalized, weight_sums_so_far[last_piece]),
                )

            weighted = last_scaled * weights[last_piece]
            grad_value = ntl.fma(normalized, mean_product * -1.0, weighted) * scale

            if needs_gate:
                if norm_before_gate:
                    ungated = ntl.fma(
                        normalized, weights[last_piece], biases[last_piece]
                    )
                    grad_gate[step, last_piece] = last_incoming * ungated * slope
                else:
                    grad_gate[step, last_piece] = grad_value * wide_input * slope

            if needs_input:
                if activation != 0 and norm_before_gate == 0:
                    grad_input[step, last_piece] = grad_value * last_factor
                else:
                    grad_input[step, last_piece] = grad_value

    for summed_piece in ntl.static_range(input.shape[1]):
        if needs_weight:
            weight_partials[summed_piece] = _sum_of_rows(weight_sums[summed_piece])

        if needs_bias:
            bias_partials[summed_piece] = _sum_of_rows(bias_sums[summed_piece])


def gated_rms_norm_statistics_application(
    grad_output,
    input,
    gate,
    weight,
    scales,
    mean_products,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
):
    """1 / rms of a row, and the mean of `v_hat * h`."""
    begin()
    squares = ntl.zeros(input.dtype.shape, ntl.float32)
    products = ntl.zeros(input.dtype.shape, ntl.float32)

    for piece in range(input.shape[0]):
        value_loaded = input[piece]
        value = ntl.cast(value_loaded, ntl.float32)
        scaled = ntl.cast(grad_output[piece], ntl.float32)
        scaled_weight = weight_offset + ntl.cast(weight[piece], ntl.float32)

        if activation != 0:
            gate_loaded = gate[piece]
            # Not `or`, which Triton 3.3 has not for what a comparison of dtypes gives.
            is_precise = (value_loaded.dtype == ntl.float32) | (
                gate_loaded.dtype == ntl.float32
            )
            factor = ntl.cast(gate_loaded, ntl.float32)
            sigmoid = _sigmoid(factor, is_precise)

            if activation == 1:
                factor = factor * sigmoid
            else:
                factor = sigmoid

            if norm_before_gate:
                scaled = scaled * factor
            else:
                value = value * factor

        squares = ntl.fma(value, value, squares)
        products = ntl.fma(value, scaled * scaled_weight, products)

    square_total = _sum_of_columns(squares, False)
    product_total = _sum_of_columns(products, False)
    scale = _inverse_root(
        ntl.fma(square_total, inverse_group_size, eps),
        input.dtype.dtype == ntl.float32,
    )
    mean_product = product_total * scale * inverse_group_size
    scales = scale
    mean_products = mean_product


def _scalar(name):
    return Tensor(0, dtype=ninetoothed.float64, name=name)


def _choice(name):
    return Tensor(0, constexpr=True, name=name)


def _row_sizes(grad_output, row_strides):
    # Those of `grad_output`: fewer arguments, and fewer divisions by them. Where a row stride is
    # compiled in they differ, and each tensor has its own.
    return tuple(None if row_strides else size for size in grad_output.shape[:-1])


def _inputs(num_row_dims, num_columns, padding, gate, weight, row_strides):
    grad_output = Tensor(
        shape=(*(None for _ in range(num_row_dims)), num_columns),
        name="grad_output",
        other=0,
    )
    shape = (*_row_sizes(grad_output, row_strides), num_columns)

    return (
        grad_output,
        Tensor(shape=shape, name="input", other=padding),
        Tensor(shape=shape, name="gate", other=padding) if gate else _scalar("gate"),
        # What lies behind the last column enters the sum of products.
        Tensor(shape=(num_columns,), name="weight", other=0)
        if weight
        else _scalar("weight"),
    )


def premake(
    num_columns,
    columns_per_program,
    *,
    row_tile,
    max_row_blocks,
    row_strides=(),
    columns_per_piece=None,
    statistics=False,
    padding=0,
    gate=True,
    weight=True,
    bias=False,
    waits=False,
):
    """The arrangement, the application and the tensors of the gradients.

    The handle takes `grad_output`, `input`, `gate`, `weight`, `bias`, `scales`,
    `mean_products`, `grad_input`, `grad_gate`, `weight_partials`, `bias_partials`; the
    scalars `inverse_group_size` (1 / D), `eps`, `weight_offset`; and, compiled in,
    `activation`, `norm_before_gate` (0 or 1), which gradients are needed (likewise, four),
    `holds_statistics` (whether `statistics`), `recomputes` (whether what was computed does
    not stay in registers while sums are added up), `num_columns_held` (of a piece) and
    `pipeline_stages` (of the loop over steps). What is absent is a number, as for the
    forward kernel; a gradient that is not needed is any tensor of its shape, and is not
    written.

    :param num_columns: N, the size of the last dimension.
    :param columns_per_program: D, which divides N; or fewer, a power of two, of a single
        group whose `statistics` are given.
    :param row_tile: The rows of a tile along each row dimension, powers of two.
    :param max_row_blocks: The most runs that rows are cut into, with a partial sum each.
    :param row_strides: Pairs of the name of a tensor of rows and its row stride, for those that
        are compiled in (see `gated_rms_norm.tile_rows`).
    :param columns_per_piece: The columns of a tile, a power of two that divides
        `columns_per_program`; `None` if all, which are then padded to a power of two.
    :param statistics: Whether `scales` and `mean_products` are given, not found.
    :param padding: What stands for input and gate in rows behind the last. Zeros have no
        norm where `eps` is 0: then it is 1, and `num_columns_held` must be D, so that
        columns behind the last are zeros still; otherwise it is D, rounded up to a power of
        two.
    :param gate: Whether there is a gate; likewise `weight` and `bias`.
    :param waits: Whether programs wait for the kernel in front of theirs (see `_applications`).
    """

    inputs = _inputs(len(row_tile), num_columns, padding, gate, weight, row_strides)
    row_sizes = _row_sizes(inputs[0], row_strides)

    def statistic(name):
        if not statistics:
            return _scalar(name)

        return Tensor(shape=(*row_sizes, 1), name=name, other=0)

    def partials(name):
        return Tensor(shape=(None, num_columns), name=name)

    tensors = (
        *inputs,
        Tensor(shape=(num_columns,), name="bias") if bias else _scalar("bias"),
        statistic("scales"),
        statistic("mean_products"),
        Tensor(shape=(*row_sizes, num_columns), name="grad_input"),
        Tensor(shape=(*row_sizes, num_columns), name="grad_gate"),
        partials("weight_partials"),
        partials("bias_partials"),
        _scalar("inverse_group_size"),
        _scalar("eps"),
        _scalar("weight_offset"),
        _choice("activation"),
        _choice("norm_before_gate"),
        _choice("needs_input"),
        _choice("needs_gate"),
        _choice("needs_weight"),
        _choice("needs_bias"),
        _choice("holds_statistics"),
        _choice("recomputes"),
        _choice("num_columns_held"),
        _choice("pipeline_stages"),
    )
    arrangement_ = functools.partial(
        arrangement,
        row_tile=tuple(row_tile),
        columns_per_program=columns_per_program,
        columns_per_piece=columns_per_piece or columns_per_program,
        max_row_blocks=max_row_blocks,
        row_strides=dict(row_strides),
    )

    return (
        arrangement_,
        specialize(gated_rms_norm_backward_application, begin=beginning(waits)),
        tensors,
    )


def premake_statistics(
    group_size,
    *,
    num_row_dims,
    columns_per_piece,
    row_strides=(),
    gate=True,
    weight=True,
    waits=False,
):
    """What `premake` may be given, of one group that is read piece by piece.

    The handle takes `grad_output`, `input`, `gate`, `weight`, `scales`, `mean_products`,
    `inverse_group_size`, `eps`, `weight_offset`, `activation`, `norm_before_gate`.
    """

    inputs = _inputs(num_row_dims, group_size, 0, gate, weight, row_strides)
    row_sizes = _row_sizes(inputs[0], row_strides)
    tensors = (
        *inputs,
        *(Tensor(shape=(*row_sizes, 1), name=name) for name in _STATISTICS),
        _scalar("inverse_group_size"),
        _scalar("eps"),
        _scalar("weight_offset"),
        _choice("activation"),
        _choice("norm_before_gate"),
    )
    arrangement_ = functools.partial(
        statistics_arrangement,
        num_row_dims=num_row_dims,
        group_size=group_size,
        columns_per_piece=columns_per_piece,
        row_strides=dict(row_strides),
    )

    return (
        arrangement_,
        specialize(gated_rms_norm_statistics_application, begin=beginning(waits)),
        tensors,
    )

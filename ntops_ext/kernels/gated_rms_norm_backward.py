"""The gradients of a gated RMSNorm.

With `v` the input (times `act(gate)` where the gate comes first), `v_hat = v / rms` and `s`
the incoming gradient (times `act(gate)` where it comes last), over each group of D columns:

    h = (weight_offset + weight) * s
    d_v = (h - v_hat * mean(v_hat * h)) / rms
    d_weight = sum over rows of s * v_hat
    d_bias = sum over rows of s
    d_gate = act'(gate) * (v_hat * (weight_offset + weight) + bias) * grad_output
        where the gate comes last, act'(gate) * input * d_v where it comes first

A program takes one group of a run of rows, some rows at a time. It keeps its sums over rows
in registers and writes them, once, as one row of a workspace of partial sums, which a second
kernel adds. As in the forward kernel, all arithmetic is in float32 and no order of additions
is left to a compiler: rows are added one after the other, or by a tree.
"""

import functools

import ninetoothed
import ninetoothed.language as ntl
from ninetoothed import Tensor

from ntops_ext.kernels.gated_rms_norm import (
    _inverse_root,
    _one_plus_exp,
    _sum_of_columns,
)


def arrangement(*tensors, row_tile, group_size, max_row_blocks):
    """One program takes one group of a run of blocks of rows.

    It sees of a tensor a list of tiles of (rows, columns), of a parameter (columns,), and
    of partial sums (1, columns).

    :param tensors: Tensors of one shape `(*rows, N)`, of which the first is one, parameters
        `(N,)`, partial sums `(row_blocks, N)`, whose names end in `_partials`, and scalars.
    :param row_tile: The rows of a tile along each of the row dimensions.
    :param group_size: D.
    :param max_row_blocks: The most runs that rows are cut into.
    """

    num_row_dims = len(row_tile)

    def arrange_rows(tensor):
        tiles = tensor.tile((*row_tile, group_size))

        if num_row_dims > 1:
            tiles.dtype = tiles.dtype.flatten(0, num_row_dims)
            tiles = tiles.flatten(0, num_row_dims)

        num_steps = (tiles.shape[0] + max_row_blocks - 1) // max_row_blocks
        arranged = tiles.tile((num_steps, 1))
        arranged.dtype = arranged.dtype.squeeze(1)

        return arranged

    num_row_blocks = arrange_rows(tensors[0]).shape[0]

    def arrange(tensor):
        if tensor.ndim == 0:
            return tensor

        if tensor.ndim == 1:
            arranged = tensor.tile((group_size,)).unsqueeze(0)

            return arranged.expand((num_row_blocks, -1))

        if tensor.source.name.endswith("_partials"):
            return tensor.tile((1, group_size))

        return arrange_rows(tensor)

    return tuple(arrange(tensor) for tensor in tensors)


def sum_arrangement(partials, output, *, rows_per_step, columns_per_program):
    """One program takes some columns of all rows, in steps."""

    arranged = partials.tile((rows_per_step, columns_per_program)).tile((-1, 1))
    arranged.dtype = arranged.dtype.squeeze(1)

    return arranged, output.tile((columns_per_program,)).unsqueeze(0)


def _sigmoid(sigmoid_argument, is_precise):
    if is_precise:
        sigmoid_divisor = _one_plus_exp(sigmoid_argument * -1.0)
        sigmoid_value = ntl.div_rn(1.0, sigmoid_divisor)
    else:
        # A quotient takes 7 instructions, this 2; either is 2 units of a float32 off.
        sigmoid_root = ntl.rsqrt(1.0 + ntl.exp(sigmoid_argument * -1.0))
        sigmoid_value = sigmoid_root * sigmoid_root

    return sigmoid_value


def _complement_of_sigmoid(complement_argument, activation, is_precise):
    # 1 - sigmoid(z). That of silu is added to what is larger; that of a sigmoid is a factor,
    # which may not cancel: it is sigmoid(-z).
    if is_precise:
        if activation == 1:
            complement_divisor = _one_plus_exp(complement_argument * -1.0)
            complement = 1.0 - ntl.div_rn(1.0, complement_divisor)
        else:
            complement_divisor = _one_plus_exp(complement_argument)
            complement = ntl.div_rn(1.0, complement_divisor)
    else:
        if activation == 1:
            complement_root = ntl.rsqrt(1.0 + ntl.exp(complement_argument * -1.0))
            complement = ntl.fma(complement_root * -1.0, complement_root, 1.0)
        else:
            complement_root = ntl.rsqrt(1.0 + ntl.exp(complement_argument))
            complement = complement_root * complement_root

    return complement


def _sum_of_rows(terms):
    # The sum along the first axis, whose length is a power of two, with that axis kept.
    row_sums = terms

    for _ in ntl.static_range(12):
        if row_sums.shape[0] > 1:
            row_sums = ntl.sum(
                ntl.reshape(row_sums, (2, row_sums.shape[0] // 2, row_sums.shape[1])), 0
            )

    return row_sums


def gated_rms_norm_backward_application(
    grad_output,
    input,
    gate,
    weight,
    bias,
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
    group_size,
    holds_parameters,
    pipeline_stages,
):
    first_tile = input[0]
    column = ntl.arange(0, first_tile.shape[1])

    if holds_parameters:
        scaled_weight = weight_offset + ntl.cast(weight, ntl.float32)
        wide_bias = ntl.cast(bias, ntl.float32)

    if needs_weight:
        weight_sum = ntl.zeros(first_tile.shape, ntl.float32)

    if needs_bias:
        bias_sum = ntl.zeros(first_tile.shape, ntl.float32)

    for step in ntl.range(0, input.shape[0], num_stages=pipeline_stages):
        input_loaded = input[step]
        incoming = ntl.cast(grad_output[step], ntl.float32)
        wide_input = ntl.cast(input_loaded, ntl.float32)
        value = wide_input
        scaled = incoming

        if activation != 0:
            gate_loaded = gate[step]
            is_precise = (
                input_loaded.dtype == ntl.float32 or gate_loaded.dtype == ntl.float32
            )
            wide_gate = ntl.cast(gate_loaded, ntl.float32)
            sigmoid = _sigmoid(wide_gate, is_precise)
            complement = _complement_of_sigmoid(wide_gate, activation, is_precise)

            if activation == 1:
                factor = wide_gate * sigmoid
                slope = ntl.fma(factor, complement, sigmoid)
            else:
                factor = sigmoid
                slope = sigmoid * complement

            if norm_before_gate:
                scaled = incoming * factor
            else:
                value = wide_input * factor

        if first_tile.shape[1] != group_size:
            value = ntl.where(column[None, :] < group_size, value, 0.0)

        if holds_parameters == 0:
            scaled_weight = weight_offset + ntl.cast(weight, ntl.float32)
            wide_bias = ntl.cast(bias, ntl.float32)

        weighted = scaled * scaled_weight
        square_total = _sum_of_columns(ntl.fma(value, value, 0.0))
        product_total = _sum_of_columns(ntl.fma(value, weighted, 0.0))
        scale = _inverse_root(
            ntl.fma(square_total, inverse_group_size, eps),
            input_loaded.dtype == ntl.float32,
        )
        normalized = value * scale

        if needs_weight:
            weight_sum = ntl.fma(scaled, normalized, weight_sum)

        if needs_bias:
            if activation != 0 and norm_before_gate:
                bias_sum = ntl.fma(incoming, factor, bias_sum)
            else:
                bias_sum = bias_sum + incoming

        mean_product = product_total * scale * inverse_group_size * -1.0
        grad_value = ntl.fma(normalized, mean_product, weighted) * scale

        if needs_gate:
            if norm_before_gate:
                ungated = ntl.fma(normalized, scaled_weight, wide_bias)
                grad_gate[step] = incoming * ungated * slope
            else:
                grad_gate[step] = grad_value * wide_input * slope

        if needs_input:
            if activation != 0 and norm_before_gate == 0:
                grad_input[step] = grad_value * factor
            else:
                grad_input[step] = grad_value

    if needs_weight:
        weight_total = _sum_of_rows(weight_sum)
        weight_partials = weight_total  # noqa: F841

    if needs_bias:
        bias_total = _sum_of_rows(bias_sum)
        bias_partials = bias_total  # noqa: F841


def sum_of_partials_application(partials, output):
    first_tile = partials[0]
    column_sum = ntl.zeros(first_tile.shape, ntl.float32)

    for step in range(partials.shape[0]):
        column_sum = column_sum + partials[step]

    total = _sum_of_rows(column_sum)
    output = ntl.reshape(total, (total.shape[1],))  # noqa: F841


def premake(
    num_columns,
    group_size,
    *,
    row_tile,
    max_row_blocks,
    gate=True,
    weight=True,
    bias=False,
):
    grad_output = Tensor(
        shape=(*(None for _ in row_tile), num_columns), name="grad_output", other=0
    )

    def rows(name, **options):
        return Tensor(shape=grad_output.shape, name=name, **options)

    def parameter(name, is_present, **options):
        return Tensor(
            shape=(num_columns,) if is_present else (), name=name, **options
        )

    def partials(name):
        return Tensor(shape=(None, num_columns), name=name)

    def scalar(name):
        return Tensor(0, dtype=ninetoothed.float64, name=name)

    def choice(name):
        return Tensor(0, constexpr=True, name=name)

    tensors = (
        grad_output,
        rows("input", other=1),
        rows("gate", other=1) if gate else scalar("gate"),
        parameter("weight", weight, other=0),
        parameter("bias", bias),
        rows("grad_input"),
        rows("grad_gate"),
        partials("weight_partials"),
        partials("bias_partials"),
        scalar("inverse_group_size"),
        scalar("eps"),
        scalar("weight_offset"),
        choice("activation"),
        choice("norm_before_gate"),
        choice("needs_input"),
        choice("needs_gate"),
        choice("needs_weight"),
        choice("needs_bias"),
        choice("group_size"),
        choice("holds_parameters"),
        choice("pipeline_stages"),
    )
    arrangement_ = functools.partial(
        arrangement,
        row_tile=tuple(row_tile),
        group_size=group_size,
        max_row_blocks=max_row_blocks,
    )

    return arrangement_, gated_rms_norm_backward_application, tensors


def premake_sum(num_columns, *, rows_per_step, columns_per_program):
    arrangement_ = functools.partial(
        sum_arrangement,
        rows_per_step=rows_per_step,
        columns_per_program=columns_per_program,
    )
    tensors = (
        Tensor(shape=(None, num_columns), name="partials", other=0),
        Tensor(shape=(num_columns,), name="output"),
    )

    return arrangement_, sum_of_partials_application, tensors

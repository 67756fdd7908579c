"""RMSNorm over groups of columns, with a gate before or after it.

A row of N columns is N / D groups of D. All arithmetic is in float32, with one rounding,
at the store. No bit of a result depends on the number of warps, on the rows of a program
or on strides: squares are added by a tree whose every step adds two numbers (where a group
is in pieces, those of its pieces before, one after the other), and where a sum follows a
product, an `fma` fixes how they round.
"""

import functools

import ninetoothed
import ninetoothed.language as ntl
from ninetoothed import Tensor

from ntops_ext.kernels._applications import begin, beginning, specialize

# What `activation` stands for in the kernels.
NO_GATE, SILU, SIGMOID = range(3)


def activation_code(activation):
    """What a kernel is given for the activation of that name, or for None: no gate."""

    if activation is None:
        return NO_GATE

    return SIGMOID if activation == "sigmoid" else SILU


def tile_rows(tensor, row_tile, num_columns, row_strides):
    """Tiles of (*row_tile, num_columns) of `tensor`.

    :param row_strides: By a tensor's name the stride of its rows, in elements, where that is
        compiled in: the tensor then has one row dimension, whose stride is 1, and a row at
        every `row_strides[name]`-th place of it. Triton, which knows no more of a stride than
        whether 16 divides it, sees by what such a constant can be divided.
    """

    row_stride = row_strides.get(tensor.source.name)

    if row_stride is None:
        return tensor.tile((*row_tile, num_columns))

    (num_rows,) = row_tile

    return tensor.tile(
        (num_rows, num_columns),
        strides=(num_rows * row_stride, num_columns),
        dilation=(row_stride, 1),
    )


def arrangement(*tensors, row_tile, group_size, row_strides, columns_per_piece=None):
    """One program takes one group of a block of rows.

    It sees of a tensor a tile of (rows, columns), of a parameter one of (columns,); where
    a group is read in pieces, lists of such tiles.

    :param tensors: `input`, then tensors of its shape `(*rows, N)`, parameters of shape
        `(N,)`, and scalars, in any order.
    :param row_tile: The rows of a program along each of the row dimensions.
    :param group_size: D.
    :param row_strides: As for `tile_rows`.
    :param columns_per_piece: The columns of a piece; `None` if a group is read at once.
    """

    row_grid = tile_rows(tensors[0], row_tile, group_size, row_strides).shape[:-1]
    num_row_dims = len(row_tile)
    is_in_pieces = columns_per_piece is not None

    def arrange_rows(tensor):
        arranged = tile_rows(tensor, row_tile, group_size, row_strides)

        if is_in_pieces:
            pieces = arranged.dtype.tile((*row_tile, columns_per_piece))

            for _ in row_tile:
                pieces = pieces.squeeze(0)

            arranged.dtype = pieces

        if num_row_dims > 1:
            parent = arranged.dtype if is_in_pieces else arranged
            parent.dtype = parent.dtype.flatten(0, num_row_dims)

        return arranged

    def arrange_parameter(tensor):
        arranged = tensor.tile((group_size,))

        for _ in row_tile:
            arranged = arranged.unsqueeze(0)

        arranged = arranged.expand((*row_grid, -1))

        if is_in_pieces:
            arranged.dtype = arranged.dtype.tile((columns_per_piece,))

        return arranged

    def arrange(tensor):
        if tensor.ndim == 0:
            return tensor

        return arrange_parameter(tensor) if tensor.ndim == 1 else arrange_rows(tensor)

    return tuple(arrange(tensor) for tensor in tensors)


def shared_arrangement(
    whole_input,
    *tensors,
    row_tile,
    group_size,
    row_strides,
    columns_per_piece,
    columns_per_share,
):
    """Some programs share a row that is one group: each takes its own columns, and for the sum all.

    It sees of `whole_input` the list of all pieces, of the others what `arrangement` shows of a
    group.

    :param whole_input: `input` once more.
    :param tensors: As `arrangement` takes them; likewise the other parameters.
    :param columns_per_share: How many columns are a program's own: a power of two that divides D.
    """

    (pieces,) = arrangement(
        whole_input,
        row_tile=row_tile,
        group_size=group_size,
        row_strides=row_strides,
        columns_per_piece=columns_per_piece,
    )
    num_shares = group_size // columns_per_share

    return (
        pieces.expand((*(-1 for _ in row_tile), num_shares)),
        *arrangement(
            *tensors,
            row_tile=row_tile,
            group_size=columns_per_share,
            row_strides=row_strides,
        ),
    )


def _one_plus_exp(exponent):
    # 1 + `exp` in float32, the latter to one unit in the last place: 2 to the nearest whole
    # power, made from its bits, times a polynomial (Taylor's) of the rest. Triton's own
    # rounds `exponent * log2(e)`, which costs up to `exponent` units.
    bounded = ntl.where(exponent > 89.0, 89.0, exponent)
    bounded = ntl.where(bounded < -87.0, -87.0, bounded)
    power = ntl.floor(ntl.fma(bounded, 1.4426950408889634, 0.5))
    # ln(2) in two parts; the products with the first are exact.
    rest = ntl.fma(power, -0.693145751953125, bounded)
    rest = ntl.fma(power, -1.428606765330187e-06, rest)
    series = ntl.fma(rest, 1.0 / 5040.0, 1.0 / 720.0)
    series = ntl.fma(series, rest, 1.0 / 120.0)
    series = ntl.fma(series, rest, 1.0 / 24.0)
    series = ntl.fma(series, rest, 1.0 / 6.0)
    series = ntl.fma(series, rest, 0.5)
    series = ntl.fma(series, rest, 1.0)
    series = ntl.fma(series, rest, 1.0)
    # The power is -126 to 128. 2 ** 128 would be infinite, where `exp` need not be; half of
    # 2 ** -126, which becomes 0, is too little beside 1.
    bits = (ntl.cast(power, ntl.int32) + 126) << 23
    half_power_of_two = ntl.cast(bits, ntl.float32, bitcast=True)

    return ntl.fma(series, half_power_of_two, 0.5) * 2.0


def _gating(gate_value, activation, is_float32):
    # What `_apply_gating` takes: silu(z) = z / (1 + exp(-z)) or sigmoid(z) = 1 / (1 + exp(-z))
    # as a factor; in float32, of a sigmoid the divisor, which saves a rounding.
    if is_float32:
        gating = _one_plus_exp(-gate_value)

        if activation == 1:
            gating = ntl.div_rn(gate_value, gating)
    else:
        # The square of an inverse root is as far off as a quotient, 2 units of a float32, and
        # `exp2`, unlike `exp`, makes no subnormal numbers: 7 instructions in place of 12.
        gating_root = ntl.rsqrt(1.0 + ntl.exp2(gate_value * -1.4426950408889634))

        if activation == 1:
            gating = gate_value * gating_root * gating_root
        else:
            gating = gating_root * gating_root

    return gating


def _apply_gating(ungated, factor_or_divisor, activation, is_float32):
    if activation != 1 and is_float32:
        gated = ntl.div_rn(ungated, factor_or_divisor)
    else:
        gated = ungated * factor_or_divisor

    return gated


def _inverse_root(mean_square, is_float32):
    # The GPU's own inverse root is 2 units in the last place of a float32 off.
    if is_float32:
        inverse_root = ntl.div_rn(1.0, ntl.sqrt_rn(mean_square))
    else:
        inverse_root = ntl.rsqrt(mean_square)

    return inverse_root


def _sum_of_columns(terms, is_by_four):
    # The sum along the second axis, whose length is a power of two, with that axis kept.
    # Any order of these steps would do; this one suits a GPU. 8 neighbours lie in one
    # thread (16 bytes of a 16-bit type), or 4 (of a piece that is held); of their sums, those 512
    # or more apart lie in one thread too (16 warps at most); those up to 16 apart in one warp.
    partial = terms

    for neighbour_step in ntl.static_range(3):
        if partial.shape[1] > 1 and not (is_by_four and neighbour_step == 2):
            partial = ntl.sum(
                ntl.reshape(partial, (partial.shape[0], partial.shape[1] // 2, 2)), 2
            )

    for _ in ntl.static_range(9):
        if partial.shape[1] > 512:
            partial = ntl.sum(
                ntl.reshape(partial, (partial.shape[0], 2, partial.shape[1] // 2)), 1
            )

    if partial.shape[1] > 32:
        lanes = ntl.reshape(partial, (partial.shape[0], partial.shape[1] // 32, 32))

        for _ in ntl.static_range(5):
            lanes = ntl.sum(
                ntl.reshape(
                    lanes, (lanes.shape[0], lanes.shape[1], 2, lanes.shape[2] // 2)
                ),
                2,
            )

        partial = ntl.reshape(lanes, (lanes.shape[0], lanes.shape[1]))

        # These lie in different warps. What is split lies in one thread: so the first split
        # brings them all to every thread, in one exchange through shared memory.
        for _ in ntl.static_range(4):
            if partial.shape[1] > 1:
                halves = ntl.reshape(
                    partial, (partial.shape[0], 2, partial.shape[1] // 2)
                )
                halves = ntl.split(ntl.permute(halves, (0, 2, 1)))
                partial = halves[0] + halves[1]

    for _ in ntl.static_range(5):
        if partial.shape[1] > 1:
            partial = ntl.sum(
                ntl.reshape(partial, (partial.shape[0], 2, partial.shape[1] // 2)), 1
            )

    return partial


# In what follows each mention of a tensor is a load, so what is used twice is bound to a
# name first; and no two functions share a name, for the source of a called one is pasted
# in. An absent weight is the number 1, an absent bias -0, the one number that leaves every
# other, +0 and -0 included, as it is when added.


def _normalize_held(
    input,
    gate,
    weight,
    bias,
    output,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
    parameters_first,
):
    input_loaded = input
    held = ntl.cast(input_loaded, ntl.float32)

    if parameters_first:
        first_weight = weight
        first_bias = bias

    if activation != 0:
        held_gate = ntl.cast(gate, ntl.float32)
        held_gating = _gating(held_gate, activation, output.dtype == ntl.float32)

        if norm_before_gate == 0:
            held = _apply_gating(
                held, held_gating, activation, output.dtype == ntl.float32
            )

    held_total = _sum_of_columns(ntl.fma(held, held, 0.0), False)
    held_mean = ntl.fma(held_total, inverse_group_size, eps)
    held_scale = _inverse_root(held_mean, output.dtype == ntl.float32)

    if parameters_first:
        held_weight = weight_offset + ntl.cast(first_weight, ntl.float32)
        held_bias = ntl.cast(first_bias, ntl.float32)
    else:
        held_weight = weight_offset + ntl.cast(weight, ntl.float32)
        held_bias = ntl.cast(bias, ntl.float32)

    held_result = ntl.fma(held * held_scale, held_weight, held_bias)

    if activation != 0:
        if norm_before_gate != 0:
            held_result = _apply_gating(
                held_result, held_gating, activation, output.dtype == ntl.float32
            )

    return held_result


def gated_rms_norm_application(
    input,
    gate,
    weight,
    bias,
    output,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
):
    """The columns of a group are held: they are read once."""
    begin()
    result = _normalize_held(
        input,
        gate,
        weight,
        bias,
        output,
        inverse_group_size,
        eps,
        weight_offset,
        activation,
        norm_before_gate,
        False,
    )
    output = result


def gated_rms_norm_parameters_first_application(
    input,
    gate,
    weight,
    bias,
    output,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
):
    """Likewise, with weight and bias read before the sum, which they need not wait for.

    That shortens a program and takes registers: see `ntops_ext.configs`.
    """
    begin()
    result = _normalize_held(
        input,
        gate,
        weight,
        bias,
        output,
        inverse_group_size,
        eps,
        weight_offset,
        activation,
        norm_before_gate,
        True,
    )
    output = result


def gated_rms_norm_held_pieces_application(
    input,
    gate,
    weight,
    bias,
    output,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
):
    """The columns of a group are held in pieces: they are read once, parameters with them.

    Pieces are powers of two, so that no lane is idle where a group is no power of two.
    """
    begin()
    squares = ntl.zeros(input.dtype.shape, ntl.float32)
    values = ()
    gatings = ()
    weights = ()
    biases = ()

    for held_piece in ntl.static_range(input.shape[0]):
        piece_value = ntl.cast(input[held_piece], ntl.float32)

        if activation != 0:
            piece_gating = _gating(
                ntl.cast(gate[held_piece], ntl.float32),
                activation,
                output.dtype.dtype == ntl.float32,
            )
            gatings = gatings + (piece_gating,)

            if norm_before_gate == 0:
                piece_value = _apply_gating(
                    piece_value,
                    piece_gating,
                    activation,
                    output.dtype.dtype == ntl.float32,
                )

        values = values + (piece_value,)
        weights = weights + (weight[held_piece],)
        biases = biases + (bias[held_piece],)
        squares = ntl.fma(piece_value, piece_value, squares)

    square_total = _sum_of_columns(squares, True)
    scale_of_pieces = _inverse_root(
        ntl.fma(square_total, inverse_group_size, eps),
        output.dtype.dtype == ntl.float32,
    )

    for stored_piece in ntl.static_range(input.shape[0]):
        piece_result = ntl.fma(
            values[stored_piece] * scale_of_pieces,
            weight_offset + ntl.cast(weights[stored_piece], ntl.float32),
            ntl.cast(biases[stored_piece], ntl.float32),
        )

        if activation != 0:
            if norm_before_gate != 0:
                piece_result = _apply_gating(
                    piece_result,
                    gatings[stored_piece],
                    activation,
                    output.dtype.dtype == ntl.float32,
                )

        output[stored_piece] = piece_result


def gated_rms_norm_shared_application(
    whole_input,
    input,
    gate,
    weight,
    bias,
    output,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
):
    """The columns of a group are shared out among programs, each of which adds up all squares.

    For that it needs `input` alone, because there is no gate, or the norm comes first; and so
    `output` must lie elsewhere, for others still read what a program would overwrite.
    """
    begin()
    squares_of_all = ntl.zeros(whole_input.dtype.shape, ntl.float32)

    for piece_of_all in ntl.static_range(whole_input.shape[0]):
        value_of_all = ntl.cast(whole_input[piece_of_all], ntl.float32)
        squares_of_all = ntl.fma(value_of_all, value_of_all, squares_of_all)

    own_value = ntl.cast(input, ntl.float32)
    own_weight = weight_offset + ntl.cast(weight, ntl.float32)
    own_bias = ntl.cast(bias, ntl.float32)

    if activation != 0:
        own_gating = _gating(
            ntl.cast(gate, ntl.float32), activation, output.dtype == ntl.float32
        )

    total_of_all = _sum_of_columns(squares_of_all, whole_input.shape[0] > 1)
    scale_of_all = _inverse_root(
        ntl.fma(total_of_all, inverse_group_size, eps), output.dtype == ntl.float32
    )
    own_result = ntl.fma(own_value * scale_of_all, own_weight, own_bias)

    if activation != 0:
        own_result = _apply_gating(
            own_result, own_gating, activation, output.dtype == ntl.float32
        )

    output = own_result


def gated_rms_norm_by_pieces_application(
    input,
    gate,
    weight,
    bias,
    output,
    inverse_group_size,
    eps,
    weight_offset,
    activation,
    norm_before_gate,
):
    """The columns of a group are read piece by piece, twice."""
    begin()
    terms = ntl.zeros(input.dtype.shape, ntl.float32)

    for first_pass in range(input.shape[0]):
        term = ntl.cast(input[first_pass], ntl.float32)

        if activation != 0:
            if norm_before_gate == 0:
                term_gate = ntl.cast(gate[first_pass], ntl.float32)
                term_gating = _gating(
                    term_gate, activation, output.dtype.dtype == ntl.float32
                )
                term = _apply_gating(
                    term, term_gating, activation, output.dtype.dtype == ntl.float32
                )

        terms = ntl.fma(term, term, terms)

    total = _sum_of_columns(terms, False)
    mean = ntl.fma(total, inverse_group_size, eps)
    scale = _inverse_root(mean, output.dtype.dtype == ntl.float32)

    for piece in range(input.shape[0]):
        value = ntl.cast(input[piece], ntl.float32)

        if activation != 0:
            gate_loaded = ntl.cast(gate[piece], ntl.float32)
            piece_gating = _gating(
                gate_loaded, activation, output.dtype.dtype == ntl.float32
            )

            if norm_before_gate == 0:
                value = _apply_gating(
                    value, piece_gating, activation, output.dtype.dtype == ntl.float32
                )

        scaled_weight = weight_offset + ntl.cast(weight[piece], ntl.float32)
        result = ntl.fma(
            value * scale, scaled_weight, ntl.cast(bias[piece], ntl.float32)
        )

        if activation != 0:
            if norm_before_gate != 0:
                result = _apply_gating(
                    result, piece_gating, activation, output.dtype.dtype == ntl.float32
                )

        output[piece] = result


def premake(
    num_columns,
    group_size,
    *,
    row_tile=(1,),
    row_strides=(),
    columns_per_piece=None,
    holds_pieces=False,
    columns_per_share=None,
    parameters_first=True,
    gate=True,
    weight=True,
    bias=False,
    activation=None,
    norm_before_gate=None,
    input_dtype=None,
    gate_dtype=None,
    weight_dtype=None,
    bias_dtype=None,
    output_dtype=None,
    waits=False,
):
    """The arrangement, the application and the tensors of a gated RMSNorm.

    The handle takes `input`, `gate`, `weight`, `bias`, `output`, then the scalars
    `inverse_group_size` (1 / D), `eps`, `weight_offset`, `activation` and
    `norm_before_gate` (0 or 1). What is absent is a number: any for a gate, 1.0 for a
    weight (and 0.0 for its offset), -0.0 for a bias. Where programs share a group, `input`
    comes twice in front.

    :param num_columns: N, the size of the last dimension.
    :param group_size: D, which divides N.
    :param row_tile: The rows of a program along each row dimension, powers of two.
    :param row_strides: Pairs of "input", "gate" or "output" and the row stride of that tensor
        that is compiled in (see `tile_rows`), for tensors of one row dimension.
    :param columns_per_piece: A power of two, if a group is read piece by piece.
    :param holds_pieces: Whether the pieces, which then divide D, are held and read once.
    :param columns_per_share: If several programs share a group, how many columns each writes: a
        power of two that divides D. Then D is N and a power of two or a multiple of the piece, the
        norm comes first or there is no gate, `output` is not `input`, and a program takes one row.
    :param parameters_first: Whether weight and bias are read before the sum.
    :param gate: Whether there is a gate; likewise `weight` and `bias`.
    :param waits: Whether programs wait for the kernel in front of theirs (see `_applications`).
    :param activation: `NO_GATE`, `SILU` or `SIGMOID`, for ahead-of-time compilation, which
        compiles it in; likewise `norm_before_gate`.
    :param input_dtype: For ahead-of-time compilation; likewise the other dtypes.
    """

    shape = (*(None for _ in row_tile), num_columns)

    def rows(name, dtype, **options):
        return Tensor(shape=shape, dtype=dtype, name=name, **options)

    def parameter(name, dtype, is_present):
        return Tensor(shape=shape[-1:] if is_present else (), dtype=dtype, name=name)

    def scalar(name):
        return Tensor(0, dtype=ninetoothed.float64, name=name)

    def choice(name, value):
        return Tensor(0, constexpr=True, value=value, name=name)

    is_shared = columns_per_share is not None
    tensors = (
        *((rows("whole_input", input_dtype),) if is_shared else ()),
        # Lanes behind the last column are added with the others: they must hold 0, and,
        # where the gate comes first, so must the gate's.
        rows("input", input_dtype, other=0),
        rows("gate", gate_dtype, other=0) if gate else scalar("gate"),
        parameter("weight", weight_dtype, weight),
        parameter("bias", bias_dtype, bias),
        rows("output", output_dtype),
        scalar("inverse_group_size"),
        scalar("eps"),
        scalar("weight_offset"),
        choice("activation", activation),
        choice("norm_before_gate", norm_before_gate),
    )

    choices = {
        "row_tile": tuple(row_tile),
        "group_size": group_size,
        "row_strides": dict(row_strides),
    }

    if is_shared:
        if "input" in choices["row_strides"]:
            choices["row_strides"]["whole_input"] = choices["row_strides"]["input"]

        shared_arrangement_ = functools.partial(
            shared_arrangement,
            columns_per_piece=columns_per_piece or group_size,
            columns_per_share=columns_per_share,
            **choices,
        )

        return (
            shared_arrangement_,
            specialize(gated_rms_norm_shared_application, begin=beginning(waits)),
            tensors,
        )

    is_by_pieces = columns_per_piece is not None and columns_per_piece < group_size
    arrangement_ = functools.partial(
        arrangement,
        columns_per_piece=columns_per_piece if is_by_pieces else None,
        **choices,
    )

    if is_by_pieces and holds_pieces:
        application = gated_rms_norm_held_pieces_application
    elif is_by_pieces:
        application = gated_rms_norm_by_pieces_application
    elif parameters_first:
        application = gated_rms_norm_parameters_first_application
    else:
        application = gated_rms_norm_application

    return arrangement_, specialize(application, begin=beginning(waits)), tensors

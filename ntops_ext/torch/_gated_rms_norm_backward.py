"""The gradients of `ntops_ext.torch.gated_rms_norm`: what autograd calls, and its launches."""

import dataclasses
import math

import torch

from ntops_ext import configs, reference
from ntops_ext._handles import import_kernels, make_handle
from ntops_ext.torch import _checks, _launch, _layouts, _partial_sums, _rows

_NAMES = ("grad_output", "input", "weight", "gate", "bias")

# Below, a float32 is subnormal, which an inverse root on a GPU takes for 0.
_SMALLEST_EPS = 2.0**-126


class GatedRMSNorm(torch.autograd.Function):
    """`gated_rms_norm` with gradients, once.

    Of a call only its tensors are kept: what the gradients need besides is computed anew.
    """

    @staticmethod
    def forward(ctx, compute, input, weight, gate, bias, *options):
        ctx.save_for_backward(input, weight, gate, bias)
        ctx.options = options

        return compute(input, weight, gate, bias, *options, None)

    @staticmethod
    def backward(ctx, grad_output):
        tensors = ctx.saved_tensors
        needs_input_grad = ctx.needs_input_grad[1:5]

        if torch.is_grad_enabled():
            # A graph of the gradients is asked for.
            gradients = _NoGraph.apply(
                grad_output, *tensors, ctx.options, needs_input_grad
            )
        else:
            gradients = backward(grad_output, *tensors, *ctx.options, needs_input_grad)

        return None, *gradients, *(None for _ in ctx.options)


class _NoGraph(torch.autograd.Function):
    """The gradients, and behind them the node that says that they have none."""

    @staticmethod
    def forward(ctx, grad_output, input, weight, gate, bias, options, needs_input_grad):
        grad_input, grad_weight, grad_gate, grad_bias = backward(
            grad_output, input, weight, gate, bias, *options, needs_input_grad
        )

        return grad_input, grad_weight, grad_gate, grad_bias

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "gated_rms_norm has first gradients only: its backward pass is a kernel, which"
            " has no gradients of its own. Leave out `create_graph=True`, or differentiate"
            " `ntops_ext.reference.gated_rms_norm`."
        )


@dataclasses.dataclass(frozen=True)
class _Part:
    """One launch, or two: a run of rows, and all columns or those of one wide group.

    :param views: Of `grad_output`, `input`, a gradient, and `gate`, as the kernels take them.
    :param row_shape: The sizes of the row dimensions.
    :param row_strides: Those that are compiled in, as the kernels' `premake` takes them.
    :param row_tile: The rows that a program takes at once, along each row dimension.
    :param columns: The slice of the columns; `None` if all.
    :param first_block: The first row of the workspace that is this part's.
    :param num_blocks: How many rows of it are.
    """

    views: tuple
    row_shape: tuple
    row_strides: tuple
    row_tile: tuple
    columns: slice | None
    first_block: int
    num_blocks: int

    def own_columns(self, tensor):
        return tensor if self.columns is None else tensor[..., self.columns]

    def own_partials(self, partials):
        """The rows and columns of the workspace that are this part's; none of one without rows."""

        if len(partials) > self.num_blocks:
            partials = partials[self.first_block : self.first_block + self.num_blocks]

        return self.own_columns(partials)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """What is known of all calls with these layouts and options."""

    group_size: int
    eps: float
    weight_offset: float
    unaddressable: tuple
    config: configs.GatedRMSNormBackwardConfig
    parts: list
    num_blocks: int
    # The handles of each part, that of the sums, and what else is compiled in, once they were made.
    handles: list = dataclasses.field(default_factory=list)


def backward(
    grad_output,
    input,
    weight,
    gate,
    bias,
    eps,
    group_size,
    norm_before_gate,
    activation,
    weight_offset,
    needs_input_grad,
):
    """The gradients of input, weight, gate and bias, in that order.

    The arguments are those of a call of `gated_rms_norm` that was checked.

    :param grad_output: The gradient of its result: of any strides, and of any of its dtypes.
    :param needs_input_grad: Which of the four are needed.
    :return: New contiguous tensors, each of the dtype of its own tensor; None where none is
        needed, or the tensor is absent.
    :raises TypeError: If a tensor is not a dense one of one of the dtypes.
    :raises ValueError: If one is of another shape than its call could have, or on another device than `input`, or if
        one that was saved is a lazily negated view.
    :raises NotImplementedError: If a kernel is to compute the gradients of several at once.
    """

    if _launch.runs_kernel(input):
        _launch.check_gradients_are_not_batched("gated_rms_norm", grad_output)

    options = (eps, group_size, norm_before_gate, activation, weight_offset)
    given = [
        tensor
        for tensor in (input, weight, gate, bias, grad_output)
        if tensor is not None
    ]
    as_operator = _launch.dispatched("gated_rms_norm_backward", given, False)

    if as_operator is not None:
        return as_operator(
            grad_output, input, weight, gate, bias, *options, needs_input_grad
        )

    if grad_output.is_neg():
        grad_output = grad_output.resolve_neg()

    arguments = (grad_output, input, weight, gate, bias)
    tensors = [tensor for tensor in arguments if tensor is not None]

    if any(map(torch.Tensor.is_neg, tensors)):
        _checks.check_tensors(_NAMES, arguments)

    is_present = tuple(tensor is not None for tensor in arguments)
    mode = (*options, *map(type, options), *is_present)
    layout = _layouts_of_calls.get(mode, tensors, arguments, *options)
    needs = tuple(
        is_needed and tensor is not None
        for is_needed, tensor in zip(needs_input_grad, arguments[1:], strict=True)
    )

    if not _launch.runs_kernel(input):
        gradients = reference.gated_rms_norm_backward(
            grad_output,
            input,
            weight,
            gate,
            bias=bias,
            eps=layout.eps,
            group_size=layout.group_size,
            norm_before_gate=norm_before_gate,
            activation=activation,
            weight_offset=layout.weight_offset,
        )

        return tuple(
            gradient.contiguous() if is_needed else None
            for gradient, is_needed in zip(gradients, needs, strict=True)
        )

    if layout.unaddressable:
        copied = [
            tensor.contiguous() if name in layout.unaddressable else tensor
            for name, tensor in zip(_NAMES, arguments, strict=True)
        ]

        return backward(*copied, *options, needs_input_grad)

    is_computed = layout.parts and not input.is_meta
    make = torch.empty if is_computed else torch.zeros
    gradients = tuple(
        make(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if is_needed
        else None
        for tensor, is_needed in zip(arguments[1:], needs, strict=True)
    )

    if is_computed and any(needs):
        _run_kernels(layout, arguments, norm_before_gate, activation, needs, gradients)

    return gradients


def _check_layout(
    grad_output,
    input,
    weight,
    gate,
    bias,
    eps,
    group_size,
    norm_before_gate,
    activation,
    weight_offset,
):
    """Check what autograd does not know of, and work out the launches.

    What was saved was checked by the call, but a hook may have put something else in its place.
    """

    _checks.check_dtype("input", input, _checks.FLOATING_DTYPES)

    _checks.check_operands(
        input,
        rows=(("grad_output", grad_output), ("gate", gate)),
        parameters=(("weight", weight), ("bias", bias)),
    )

    num_columns = input.shape[-1]
    group_size = num_columns if group_size is None else int(group_size)
    arguments = (grad_output, input, weight, gate, bias)
    unaddressable = tuple(
        name
        for name, tensor in zip(_NAMES, arguments, strict=True)
        if tensor is not None and not _rows.fits(tensor)
    )
    parts, config = [], None

    if input.numel() > 0 and not unaddressable:
        config = configs.gated_rms_norm_backward_config(
            group_size,
            num_columns // group_size,
            item_size=max(
                tensor.element_size()
                for tensor in (grad_output, input, gate)
                if tensor is not None
            ),
            has_bias=bias is not None,
        )
        parts = list(_split(grad_output, input, gate, group_size, config))

    return _Layout(
        group_size=group_size,
        eps=float(eps),
        weight_offset=float(weight_offset) + 0.0,
        unaddressable=unaddressable,
        config=config,
        parts=parts,
        num_blocks=max(
            (part.first_block + part.num_blocks for part in parts), default=0
        ),
    )


_layouts_of_calls = _layouts.Layouts(_NAMES, ("weight", "gate", "bias"), _check_layout)


def _split(grad_output, input, gate, group_size, config):
    num_columns = input.shape[-1]
    gradient = torch.empty(input.shape, device="meta")
    tensors = [grad_output, input, gradient]

    if gate is not None:
        tensors.append(gate)

    tensors = [_rows.without_data(tensor) for tensor in tensors]
    columns_of_parts = [None]

    if config.columns_per_program is not None:
        columns_of_parts = [
            slice(start, start + group_size)
            for start in range(0, num_columns, group_size)
        ]

    first_block = 0

    for rows in _rows.split_rows(_rows.merge_rows(tensors)):
        *row_sizes, _ = rows[0].shape
        row_tile = configs.row_tile(config.rows_per_step, row_sizes)
        num_tiles = math.prod(
            -(-size // tile) for size, tile in zip(row_sizes, row_tile, strict=True)
        )
        # As `arrangement` of the kernel cuts them.
        tiles_per_program = -(-num_tiles // config.max_row_blocks)
        num_blocks = -(-num_tiles // tiles_per_program)

        for columns in columns_of_parts:
            parts = (
                rows if columns is None else [tensor[..., columns] for tensor in rows]
            )

            views, row_strides = _rows.compile_in_row_strides(
                ("grad_output", "input", "gradient", "gate")[: len(tensors)],
                [
                    _rows.View.of(part, tensor)
                    for part, tensor in zip(parts, tensors, strict=True)
                ],
                configs.most_rows_of_a_program(group_size),
            )

            yield _Part(
                views=views,
                row_shape=tuple(row_sizes),
                row_strides=_of_kernel(row_strides),
                row_tile=row_tile,
                columns=columns,
                first_block=first_block,
                num_blocks=num_blocks,
            )

        first_block += num_blocks


def _of_kernel(row_strides):
    """The pairs with the gradients of input and gate, which have one layout, by their names."""

    return tuple(
        (name_of_kernel, row_stride)
        for name, row_stride in row_strides
        for name_of_kernel in (
            ("grad_input", "grad_gate") if name == "gradient" else (name,)
        )
    )


def _run_kernels(layout, arguments, norm_before_gate, activation, needs, gradients):
    _, input, _, gate, _ = arguments
    device = input.device
    kernels = import_kernels()

    if not layout.handles:
        # At once: another thread may be here, too.
        layout.handles[:] = [_make_handles(kernels, layout, arguments)]

    ((handles_of_parts, sum_handle, choices),) = layout.handles
    options = (
        1.0 / layout.group_size,
        layout.eps,
        layout.weight_offset,
        kernels.gated_rms_norm.activation_code(None if gate is None else activation),
        int(norm_before_gate),
    )
    needs_input, needs_weight, needs_gate, needs_bias = needs
    grad_input, grad_weight, grad_gate, grad_bias = gradients
    # What is not needed is not written, and is of no size.
    partials = tuple(
        torch.empty(
            (layout.num_blocks if is_needed else 0, input.shape[-1]),
            dtype=torch.float32,
            device=device,
        )
        for is_needed in (needs_weight, needs_bias)
    )

    for (handle, statistics_handle), part in zip(
        handles_of_parts, layout.parts, strict=True
    ):
        grad_output, rows, *others = _as_the_kernel_takes_them(part, arguments)
        statistics = (0.0, 0.0)

        if statistics_handle is not None:
            statistics = tuple(
                torch.empty((*part.row_shape, 1), dtype=torch.float32, device=device)
                for _ in range(2)
            )
            _launch.launch(
                statistics_handle,
                device,
                grad_output,
                rows,
                *others[:2],
                *statistics,
                *options,
            )

        _launch.launch(
            handle,
            device,
            grad_output,
            rows,
            *others,
            *statistics,
            rows if grad_input is None else part.views[2].apply(grad_input),
            rows if grad_gate is None else part.views[2].apply(grad_gate),
            *(part.own_partials(tensor) for tensor in partials),
            *options,
            int(needs_input),
            int(needs_gate),
            int(needs_weight),
            int(needs_bias),
            int(statistics_handle is not None),
            *choices,
        )

    for gradient, tensor in zip((grad_weight, grad_bias), partials, strict=True):
        if gradient is not None:
            _partial_sums.add(sum_handle, gradient, tensor)


def _as_the_kernel_takes_them(part, arguments):
    """Of `grad_output`, `input`, `gate`, `weight` and `bias` what is this part's."""

    grad_output, input, weight, gate, bias = arguments

    # An absent tensor is a number for the kernel (see `premake`).
    return (
        part.views[0].apply(grad_output),
        part.views[1].apply(input),
        0.0 if gate is None else part.views[3].apply(gate),
        1.0 if weight is None else part.own_columns(weight),
        -0.0 if bias is None else part.own_columns(bias),
    )


def _pipeline_stages(layout, arguments):
    grad_output, input, _, gate, _ = arguments
    rows = [tensor for tensor in (grad_output, input, gate) if tensor is not None]

    return configs.pipeline_stages(
        layout.config,
        layout.group_size,
        sum(tensor.element_size() for tensor in rows),
        _launch.shared_memory(input.device),
    )


def _pads_with_ones(layout):
    # Rows behind the last are zeros, whose norm is 0 / 0 where `eps` is 0.
    return layout.eps < _SMALLEST_EPS and layout.config.columns_per_program is None


def _num_columns_held(layout):
    config = layout.config
    columns = config.columns_per_piece or config.columns_per_program

    if columns is not None:
        return columns

    if _pads_with_ones(layout):
        return layout.group_size

    return configs.next_power_of_2(layout.group_size)


def _make_handles(kernels, layout, arguments):
    _, input, weight, gate, bias = arguments
    kernel, config = kernels.gated_rms_norm_backward, layout.config
    num_columns = input.shape[-1]
    is_in_parts = config.columns_per_program is not None
    present = {"gate": gate is not None, "weight": weight is not None}
    waits = _launch.waits(input.device)
    handles = []

    for part in layout.parts:
        handle = make_handle(
            kernel.premake,
            num_warps=config.num_warps,
            num_columns=layout.group_size if is_in_parts else num_columns,
            columns_per_program=config.columns_per_program or layout.group_size,
            columns_per_piece=config.columns_per_piece,
            row_tile=part.row_tile,
            row_strides=part.row_strides,
            max_row_blocks=config.max_row_blocks,
            statistics=is_in_parts,
            # A float: Triton's interpreter takes the int 1 for the bits of a bfloat16.
            padding=1.0 if _pads_with_ones(layout) else 0,
            bias=bias is not None,
            waits=waits,
            **present,
        )
        statistics_handle = None

        if is_in_parts:
            statistics_handle = make_handle(
                kernel.premake_statistics,
                num_warps=configs.STATISTICS_NUM_WARPS,
                group_size=layout.group_size,
                num_row_dims=len(part.row_tile),
                row_strides=part.row_strides,
                columns_per_piece=configs.STATISTICS_COLUMNS_PER_PIECE,
                waits=waits,
                **present,
            )

        handles.append((handle, statistics_handle))

    sum_handle = make_handle(
        kernels.sum_of_rows.premake,
        num_columns=num_columns,
        **dataclasses.asdict(configs.gated_rms_norm_sum_config(num_columns)),
        waits=waits,
    )

    choices = (
        int(config.recomputes),
        _num_columns_held(layout),
        _pipeline_stages(layout, arguments),
    )

    return handles, sum_handle, choices

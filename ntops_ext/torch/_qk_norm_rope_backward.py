"""The gradients of `qk_norm_rope`: checks, allocation, launches."""

import dataclasses

import torch

from ntops_ext import configs
from ntops_ext._handles import import_kernels, make_handle
from ntops_ext.torch import _checks, _heads, _layouts, _partial_sums, _rows
from ntops_ext.torch._chunks import MAX_OFFSET, plan_chunks
from ntops_ext.torch._launch import (
    check_gradients_are_not_batched,
    dispatched,
    launch,
    runs_kernel,
    waits,
)

_NAMES = ("grad_output", "input", "weight", "rope")


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """What is known of all calls with these shapes, strides, dtypes and devices."""

    # None if there is nothing to compute.
    config: configs.QKNormRopeBackwardConfig | None
    # Whether a kernel can compute the offsets of a token's gradients, and of the weights.
    gradients_fit: bool
    weights_fit: bool
    # The launches of a call; none if there is nothing to compute.
    chunks: list
    # The rows of partial sums of each launch, by batch entry, run of tokens, block of heads.
    partial_shapes: list
    # The handles of the gradients and of the sum of partial sums, once they were made.
    handles: list = dataclasses.field(default_factory=list)


def backward(grad_output, input, weight, rope, eps, needs_input_grad):
    """The gradients of `qk_norm_rope` for `input` and `weight`.

    Computed anew from `input` in float32 and rounded once, to `input.dtype`. The bits
    depend on nothing but the arguments: no two programs add to one number, and which
    heads a program adds depends on the shape (and, where a tensor spans more than 2^31
    elements, on the strides, by which the call is cut). The gradient of a head depends on
    that head alone.

    :param grad_output: `(batch, tokens, heads, head_dim)`, of `input`'s dtype, of any
        strides: expanded, transposed. It is copied where it is a lazily negated view, or
        where one token of it spans more than 2^31 elements.
    :param input: As in the forward call; so are `weight`, `rope` and `eps`.
    :param needs_input_grad: Whether the gradient of `input` is needed, and that of
        `weight`.
    :return: The gradient of `input`, contiguous, and that of `weight`, `(head_dim,)`; None
        where it is not needed.
    :raises TypeError, ValueError: As `qk_norm_rope` does.
    :raises NotImplementedError: If a kernel is to compute the gradients of several at once.
    """

    of_input, of_weight = needs_input_grad[:2]

    if not (of_input or of_weight):
        return None, None

    if runs_kernel(input):
        check_gradients_are_not_batched("qk_norm_rope", grad_output)

    as_operator = dispatched(
        "qk_norm_rope_backward", (input, weight, rope, grad_output), False
    )

    if as_operator is not None:
        return as_operator(grad_output, input, weight, rope, eps, needs_input_grad)

    if isinstance(grad_output, torch.Tensor):
        grad_output = grad_output.resolve_neg()

    arguments = (grad_output, input, weight, rope)
    layout = layouts.get((of_input, of_weight), arguments, arguments)
    eps = _checks.check_eps(eps)

    if rope.is_conj() or any(map(torch.Tensor.is_neg, arguments)):
        _heads.check_not_lazy(_NAMES, arguments)

    if not runs_kernel(input):
        return _differentiate_definition(*arguments, eps, of_input, of_weight)

    grad_input = grad_weight = None

    if of_input:
        grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)

    if not layout.chunks:
        if of_weight:
            grad_weight = torch.zeros(
                weight.shape, dtype=weight.dtype, device=weight.device
            )

        return grad_input, grad_weight

    if not layout.handles:
        _make_handles(layout, input, of_input, of_weight)

    if not layout.gradients_fit:
        grad_output = grad_output.contiguous()

    if not layout.weights_fit:
        weight = weight.contiguous()

    partial_sums = _run(
        layout, grad_output, input, weight, _heads.real_view(rope), grad_input, eps
    )

    if of_weight:
        grad_weight = torch.empty(
            weight.shape, dtype=weight.dtype, device=weight.device
        )
        _partial_sums.add(layout.handles[1], grad_weight, partial_sums)

    return grad_input, grad_weight


def _differentiate_definition(
    grad_output, input, weight, rope, eps, of_input, of_weight
):
    # Written out, and not by autograd: where `torch.compile` gets here, PyTorch's
    # dispatcher is below autograd and records nothing. Nor does it know lazy conjugates
    # there: `conj()` would be taken for no conjugate.
    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normalized = wide * scale
    pairs = torch.view_as_complex(
        grad_output.float().contiguous().unflatten(-1, (-1, 2))
    )
    turned_back = torch.view_as_real(pairs * rope[:, None, :].conj_physical()).flatten(
        -2
    )
    weighted = turned_back * weight.float()
    mean_product = (weighted * normalized).mean(-1, keepdim=True)
    grad_input = (weighted - normalized * mean_product) * scale
    grad_weight = (turned_back * normalized).sum((0, 1, 2))

    return (
        grad_input.to(input.dtype).contiguous() if of_input else None,
        grad_weight.to(weight.dtype) if of_weight else None,
    )


def _check_layout(grad_output, input, weight, rope):
    """Check what the layouts alone decide."""

    _heads.check_heads("input", input)
    _heads.check_head_dim("input", input)
    _heads.check_dense_heads("input", input)
    _heads.check_weight("weight", weight, "input", input)
    _heads.check_rope(rope, "input", input)
    _heads.check_heads("grad_output", grad_output, "input", input)
    _checks.check_shape("grad_output", grad_output, input.shape, "the shape of `input`")
    batch, tokens, num_heads, head_dim = input.shape

    if input.numel() == 0:
        return _Layout(
            config=None,
            gradients_fit=True,
            weights_fit=True,
            chunks=[],
            partial_shapes=[],
        )

    config = configs.qk_norm_rope_backward_config(
        batch=batch,
        tokens=tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        item_size=input.element_size(),
    )
    # Of the shape of the gradient of `input`, which is contiguous.
    grad_input = torch.empty(input.shape, device="meta")
    gradient_rows = _rows_of_strided(grad_output)
    gradients_fit = gradient_rows.row_extent <= MAX_OFFSET
    chunks = plan_chunks(
        batch,
        tokens,
        [
            gradient_rows if gradients_fit else _heads.rows_of(grad_input),
            _heads.rows_of(input),
            _heads.rows_of(grad_input),
            _heads.rows_of_table(rope),
        ],
    )

    return _Layout(
        config=config,
        gradients_fit=gradients_fit,
        weights_fit=_rows.fits(weight),
        chunks=chunks,
        partial_shapes=[
            (
                chunk.batch_stop - chunk.batch_start,
                -(-(chunk.row_stop - chunk.row_start) // config.tokens_per_program),
                -(-num_heads // config.heads_per_program),
            )
            for chunk in chunks
        ],
    )


layouts = _layouts.Layouts(_NAMES, (), _check_layout)


def _rows_of_strided(tensor):
    """As `_heads.rows_of`, for heads that need not be dense."""

    _, _, num_heads, head_dim = tensor.shape
    _, _, head_stride, stride = tensor.stride()

    return dataclasses.replace(
        _heads.rows_of(tensor),
        row_extent=(num_heads - 1) * head_stride + (head_dim - 1) * stride,
    )


def _make_handles(layout, input, of_input, of_weight):
    kernels = import_kernels()
    config = layout.config
    num_heads, head_dim = input.shape[2:]
    handles = [
        make_handle(
            kernels.qk_norm_rope_backward.premake,
            num_heads=num_heads,
            head_dim=head_dim,
            of_input=of_input,
            of_weight=of_weight,
            tokens_per_program=config.tokens_per_program,
            heads_per_program=config.heads_per_program,
            num_warps=config.num_warps,
            waits=waits(input.device),
        )
    ]

    if of_weight:
        sum_config = configs.sum_of_rows_config(_num_partial_sums(layout), head_dim)
        handles.append(
            make_handle(
                kernels.sum_of_rows.premake,
                num_columns=head_dim,
                **dataclasses.asdict(sum_config),
                waits=waits(input.device),
            )
        )

    # At once: another thread may be here, too.
    layout.handles[:] = handles


def _num_partial_sums(layout):
    return sum(
        batch * num_runs * num_blocks
        for batch, num_runs, num_blocks in layout.partial_shapes
    )


def _run(layout, grad_output, input, weight, table, grad_input, eps):
    """Launch, and return the partial sums, `(any, head_dim)`, if the weight's are needed."""

    of_input = grad_input is not None
    of_weight = len(layout.handles) > 1
    head_dim = input.shape[3]
    partial_sums = None
    start = 0

    if of_weight:
        partial_sums = torch.empty(
            (_num_partial_sums(layout), head_dim),
            dtype=torch.float32,
            device=input.device,
        )

    for chunk, shape in zip(layout.chunks, layout.partial_shapes, strict=True):
        batch = slice(chunk.batch_start, chunk.batch_stop)
        rows = slice(chunk.row_start, chunk.row_stop)
        arguments = [grad_output[batch, rows], input[batch, rows]]

        if of_input:
            arguments.append(weight)

        arguments.append(table[rows])

        if of_input:
            arguments.append(grad_input[batch, rows])

        if of_weight:
            stop = start + shape[0] * shape[1] * shape[2]
            arguments.append(partial_sums[start:stop].view(*shape, head_dim))
            start = stop

        launch(
            layout.handles[0],
            input.device,
            *arguments,
            eps,
            layout.config.pipeline_stages,
        )

    return partial_sums

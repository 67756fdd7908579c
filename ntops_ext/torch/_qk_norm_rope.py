"""The machinery of `qk_norm_rope`: checks, allocation, dispatch."""

import dataclasses

import torch
from torch.autograd.function import once_differentiable

from ntops_ext import configs, reference
from ntops_ext._handles import import_kernels, make_handle
from ntops_ext.torch import (
    _checks,
    _heads,
    _layouts,
    _prepared,
    _qk_norm_rope_backward,
    _rows,
)
from ntops_ext.torch._chunks import plan_chunks
from ntops_ext.torch._eager import RoundingCache
from ntops_ext.torch._launch import dispatched, launch, runs_kernel, waits

_NAMES = ("input", "weight", "rope", "out")

_prepared_calls = _prepared.PreparedCalls(
    ("input", "weight", "rope", "eps", "out"), result="out", optional=("out",)
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """What is known of all calls with these shapes, strides, dtypes and devices."""

    # Whether a kernel can compute the offsets of the weights.
    weights_fit: bool
    # The launches of a call; none if there is nothing to compute.
    chunks: list
    # The addresses of the tensors that were checked.
    addresses: dict = dataclasses.field(default_factory=dict)
    # The handle, once it was made.
    handles: list = dataclasses.field(default_factory=list)
    prepared: _prepared.OfLayout = dataclasses.field(default_factory=_prepared.OfLayout)


def qk_norm_rope(input, weight, rope, eps, out):
    """See `ntops_ext.torch.qk_norm_rope`."""

    for prepared_call in _prepared_calls.recent:
        result = prepared_call(input, weight, rope, eps, out)

        if result is not None:
            return result

    whole_call = (input, weight, rope, eps, out)
    arguments = (input, weight, rope, out)
    tensors = arguments[:3] if out is None else arguments

    as_operator = dispatched("qk_norm_rope", tensors, out is not None)

    if as_operator is not None:
        return as_operator(*whole_call)

    layout = layouts.get(out is None, tensors, arguments)

    result = _prepared_calls.repeat(layout.prepared, whole_call)

    if result is not None:
        return result

    eps = _checks.check_eps(eps)

    if rope.is_conj() or any(map(torch.Tensor.is_neg, tensors)):
        _heads.check_not_lazy(_NAMES, arguments)

    if _layouts.requires_grad(tensors):
        return _differentiable(input, weight, rope, eps, out)

    if out is not None:
        addresses = tuple(map(torch.Tensor.data_ptr, tensors))

        if addresses not in layout.addresses:
            _check_aliases(*arguments)
            layouts.remember_addresses(layout.addresses, addresses, True)

    return _compute(layout, input, weight, rope, eps, out, whole_call)


def _differentiable(input, weight, rope, eps, out):
    """A call that autograd records."""

    if _layouts.carries_tangents([input, weight, rope]):
        raise NotImplementedError(
            "`qk_norm_rope` has no forward-mode gradient (an argument carries a tangent):"
            " use `ntops_ext.reference.qk_norm_rope`, which has one."
        )

    check_gradients(rope, out)
    _layouts.check_can_be_saved(_NAMES[:3], (input, weight, rope))

    if not runs_kernel(input):
        result = reference.qk_norm_rope(input, weight, rope, eps)
        result.register_hook(_as_pairs)

        return result

    return _QKNormRope.apply(input, weight, rope, eps)


def _as_pairs(gradient):
    # PyTorch views a float32 gradient as complex numbers, whose addresses are those of pairs.
    steps = gradient.storage_offset(), *gradient.stride()[:-1]

    return gradient.clone() if any(step % 2 for step in steps) else gradient


def check_gradients(rope, out):
    """Refuse what has no gradient, in a call that autograd records."""

    if out is not None:
        raise ValueError(
            "`out` must be None where gradients are recorded: what is written into it has"
            " none. Use `torch.no_grad()`, or leave `out` out."
        )

    if rope.requires_grad:
        raise NotImplementedError(
            "`rope` requires grad, but `qk_norm_rope` has no gradient for it: pass"
            " `rope.detach()`, or use `ntops_ext.reference.qk_norm_rope`, which has one."
        )


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, rope, eps):
        ctx.save_for_backward(input, weight, rope)
        ctx.eps = eps
        tensors = (input, weight, rope)
        layout = layouts.get(True, tensors, (*tensors, None))

        return _compute(layout, input, weight, rope, eps, None)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        grad_input, grad_weight = _qk_norm_rope_backward.backward(
            grad_output, *ctx.saved_tensors, ctx.eps, ctx.needs_input_grad[:2]
        )

        return grad_input, grad_weight, None, None


def _compute(layout, input, weight, rope, eps, out, whole_call=None):
    """The result of a call that was checked.

    :param whole_call: The operator's arguments, if a call is to be prepared from them.
    """

    if not runs_kernel(input):
        if out is not None:
            _layouts.check_writable(("out",), (out,))

        result = reference.qk_norm_rope(input, weight, rope, eps)

        if out is None:
            return result

        # What `copy_` returns would be of the class of `result`, which that of any argument may decide.
        out.copy_(result)

        return out

    output = out

    if out is None:
        output = torch.empty(input.shape, dtype=input.dtype, device=input.device)

    if layout.chunks:
        if not layout.handles:
            rounding = eager_roundings.get(input.device, input.dtype, input.shape[3])
            layout.handles.append(_make_handle(input, rounding))

        if not layout.weights_fit:
            weight = weight.contiguous()

        handle = layout.handles[0]
        launches = _launches(layout.chunks, input, output, weight, rope, eps)

        for launched in launches:
            launch(handle, input.device, *launched)

        if out is not None:
            _layouts.mark_as_written(out)

        if whole_call is not None and len(launches) == 1 and layout.weights_fit:
            _prepare(layout, whole_call, handle, launches[0])

    return output


def _prepare(layout, whole_call, handle, launched):
    _prepared_calls.prepare(
        layout.prepared,
        whole_call,
        handle,
        launched,
        addressed=("input", "out", "weight", "rope"),
        **_prepared.for_result(
            whole_call[-1],
            launched[1],
            found=layout.addresses,
            verdict=True,
            remember=layouts.remember_addresses,
        ),
    )


def _check_layout(input, weight, rope, out):
    """Check what the layouts alone decide, and work out the launches."""

    check_call(input, weight, rope, out)

    if out is not None:
        _checks.check_no_self_overlap("out", out)

    written = torch.empty(input.shape, device="meta") if out is None else out
    rows = [
        _heads.rows_of(input),
        _heads.rows_of_table(rope),
        _heads.rows_of(written),
    ]

    return _Layout(
        weights_fit=_rows.fits(weight),
        chunks=plan_chunks(*input.shape[:2], rows) if input.numel() else [],
    )


def check_call(input, weight, rope, out):
    """Refuse what the layouts alone decide to be wrong. `torch.compile` traces it."""

    _heads.check_heads("input", input)
    _heads.check_head_dim("input", input)
    _heads.check_dense_heads("input", input)
    _heads.check_weight("weight", weight, "input", input)
    _heads.check_rope(rope, "input", input)

    if out is not None:
        _heads.check_heads("out", out, "input", input)
        _checks.check_shape("out", out, input.shape, "the shape of `input`")
        _heads.check_dense_heads("out", out)


layouts = _layouts.Layouts(_NAMES, ("out",), _check_layout)


def _check_aliases(input, weight, rope, out):
    """:raises ValueError: If `out` shares memory with an argument, and is not `input` itself."""

    for name, tensor in (("input", input), ("weight", weight), ("rope", rope)):
        if _checks.overlap("out", out, name, tensor) and not (
            tensor is input and _checks.is_same_view(out, input)
        ):
            raise ValueError(
                f"`out` must be `input` itself or share no memory with `{name}`, but"
                f" overlaps it."
            )


def _launches(chunks, input, output, weight, rope, eps):
    """The arguments to call the handle with, launch by launch."""

    table = _heads.real_view(rope)

    if len(chunks) == 1:
        return [(input, output, weight, table, eps)]

    launches = []

    for chunk in chunks:
        batch = slice(chunk.batch_start, chunk.batch_stop)
        rows = slice(chunk.row_start, chunk.row_stop)
        launches.append(
            (input[batch, rows], output[batch, rows], weight, table[rows], eps)
        )

    return launches


def _make_handle(input, rounding):
    kernels = import_kernels()
    batch, tokens, num_heads, head_dim = input.shape
    config = configs.qk_norm_rope_config(
        num_heads=num_heads,
        num_kv_heads=0,
        head_dim=head_dim,
        item_size=input.element_size(),
    )

    return make_handle(
        kernels.qk_norm_rope.premake,
        num_warps=config.num_warps,
        num_heads=num_heads,
        head_dim=head_dim,
        heads_per_program=config.heads_per_program,
        order=rounding.order(batch * tokens * num_heads),
        real_part=rounding.real_part,
        imaginary_part=rounding.imaginary_part,
        squares_are_exact=input.element_size() == 2,
        waits=waits(input.device),
    )


def _run_for_comparison(input, weight, rope, rounding):
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    layout = _check_layout(input, weight, rope, output)
    handle = _make_handle(input, rounding)

    for launched in _launches(layout.chunks, input, output, weight, rope, 1e-6):
        launch(handle, input.device, *launched)

    return output


eager_roundings = RoundingCache(_run_for_comparison)

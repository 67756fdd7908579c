"""The operators as PyTorch's dispatcher sees them: in graphs, and where a call is not for a kernel.

Each goes through the eager call's own checks to one custom operator, which makes the eager
call when it runs: in a graph of `torch.compile` or `torch.export`, or under a mode or a
transform (`_launch.dispatched`). What a trace cannot see, addresses and lazy negatives, is
checked by that call, before it writes anything.
"""

import torch

from ntops_ext.torch import (
    _checks,
    _custom_ops,
    _gated_rms_norm,
    _gated_rms_norm_backward,
    _heads,
    _qk_norm_rope,
    _qk_norm_rope_backward,
    _qk_norm_rope_pack,
)


def gated_rms_norm(
    input,
    weight,
    gate,
    bias,
    eps,
    group_size,
    norm_before_gate,
    activation,
    weight_offset,
    out,
):
    """`ntops_ext.torch.gated_rms_norm`, traced."""

    _check_kinds(
        {"input": input},
        {"weight": weight, "gate": gate, "bias": bias, "out": out},
    )
    eps, group_size, weight_offset = _gated_rms_norm.check_call(
        input,
        weight,
        gate,
        bias,
        out,
        eps,
        group_size,
        norm_before_gate,
        activation,
        weight_offset,
    )
    arguments = (
        input,
        weight,
        gate,
        bias,
        eps,
        group_size,
        norm_before_gate,
        activation,
        weight_offset,
    )

    if out is None:
        return _gated_rms_norm_operator(*arguments)

    if _is_differentiated(input, weight, gate, bias, out):
        raise _gated_rms_norm.no_gradients_into_out()

    _gated_rms_norm_out_operator(*arguments, out)

    return out


def gated_rms_norm_backward(
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
    """The gradients of a call of plain tensors, where the dispatcher has to see them."""

    tensors = (input, weight, gate, bias)
    eps, group_size, weight_offset = _gated_rms_norm.check_call(
        *tensors,
        None,
        eps,
        group_size,
        norm_before_gate,
        activation,
        weight_offset,
    )
    options = (eps, group_size, norm_before_gate, activation, weight_offset)
    needs = [
        is_needed and tensor is not None
        for is_needed, tensor in zip(needs_input_grad, tensors, strict=True)
    ]

    return _where_needed(
        _gated_rms_norm_backward_operator(grad_output, *tensors, *options, needs), needs
    )


def qk_norm_rope(input, weight, rope, eps, out):
    """`ntops_ext.torch.qk_norm_rope`, traced."""

    _check_kinds({"input": input, "weight": weight, "rope": rope}, {"out": out})
    _qk_norm_rope.check_call(input, weight, rope, out)
    eps = _checks.check_eps(eps)

    if _is_differentiated(input, weight, rope, out):
        _qk_norm_rope.check_gradients(rope, out)

    table = _real_table(rope)

    if out is None:
        return _qk_norm_rope_operator(input, weight, table, eps)

    _qk_norm_rope_out_operator(input, weight, table, eps, out)

    return out


def qk_norm_rope_backward(grad_output, input, weight, rope, eps, needs_input_grad):
    """Likewise of `qk_norm_rope`."""

    _qk_norm_rope.check_call(input, weight, rope, None)
    needs = needs_input_grad[:2]

    return _where_needed(
        _qk_norm_rope_backward_operator(
            grad_output, input, weight, _real_table(rope), _checks.check_eps(eps), needs
        ),
        needs,
    )


def qk_norm_rope_pack_(
    q,
    k_out,
    v_out,
    q_weight,
    k_weight,
    rope,
    k_prefix,
    v_prefix,
    k_src,
    v_src,
    eps,
):
    """`ntops_ext.torch.qk_norm_rope_pack_`, traced."""

    tensors = {
        "q": q,
        "k_out": k_out,
        "v_out": v_out,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "rope": rope,
        "k_prefix": k_prefix,
        "v_prefix": v_prefix,
    }
    sources = {"k_src": k_src, "v_src": v_src}
    _check_kinds(tensors, sources)
    arguments = (*tensors.values(), *sources.values())
    _qk_norm_rope_pack.check_call(*arguments)
    eps = _checks.check_eps(eps)

    if _is_differentiated(*arguments):
        raise _qk_norm_rope_pack.no_gradients()

    tensors["rope"] = _real_table(rope)
    _qk_norm_rope_pack_operator(*tensors.values(), *sources.values(), eps)

    return q, k_out, v_out


def _real_table(rope):
    # Dynamo cannot trace the question; what PyTorch says of the view then tells what to do.
    if not torch.compiler.is_compiling():
        _heads.check_not_lazy(("rope",), (rope,))

    return torch.view_as_real(rope)


def _check_kinds(required, optional):
    for name, tensor in required.items():
        _checks.check_kind(name, tensor)

    for name, tensor in optional.items():
        if tensor is not None:
            _checks.check_kind(name, tensor)


def _is_differentiated(*tensors):
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


# -- What custom operators have in common. ---------------------------------------------


def _contiguous_like(tensor):
    return tensor.new_empty(tensor.shape)


def _returning_nothing(_):
    return None


def _present(tensors):
    return [tensor for tensor in tensors if tensor is not None]


def _where_needed(gradients, needs_input_grad):
    """Those that a custom operator returns, and None in the places of the others."""

    gradients = iter(gradients)

    return tuple(
        next(gradients) if is_needed else None for is_needed in needs_input_grad
    )


def _fake_gradients(tensors, needs_input_grad):
    return [
        _contiguous_like(tensor)
        for tensor, is_needed in zip(tensors, needs_input_grad, strict=True)
        if is_needed
    ]


def _differentiate(operator, backward_operator, num_tensors, num_differentiable):
    """Give `operator` the gradients that `backward_operator` computes, once.

    :param num_tensors: How many of the first arguments are tensors, which are kept.
    :param num_differentiable: How many of these may have gradients.
    """

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:num_tensors])
        ctx.options = inputs[num_tensors:]

    def backward(ctx, grad_output):
        needs_input_grad = ctx.needs_input_grad[:num_differentiable]
        gradients = backward_operator(
            grad_output, *ctx.saved_tensors, *ctx.options, needs_input_grad
        )

        return (
            *_where_needed(gradients, needs_input_grad),
            *(None for _ in ctx.needs_input_grad[num_differentiable:]),
        )

    def refuse(ctx, *grad_outputs):
        raise NotImplementedError(
            f"{operator.name()} has first gradients only: its backward pass is a kernel,"
            f" which has no gradients of its own. Leave out `create_graph=True`, or"
            f" differentiate the definition in `ntops_ext.reference`."
        )

    _custom_ops.differentiate(operator, setup_context, backward)
    _custom_ops.differentiate(backward_operator, None, refuse)


# -- `gated_rms_norm`. -----------------------------------------------------------------

_GATED_RMS_NORM_ARGUMENTS = (
    "Tensor input, Tensor? weight, Tensor? gate, Tensor? bias, float eps,"
    " SymInt group_size, bool norm_before_gate, str activation, float weight_offset"
)


_gated_rms_norm_operator = _custom_ops.define(
    f"gated_rms_norm({_GATED_RMS_NORM_ARGUMENTS}) -> Tensor",
    lambda *arguments: _gated_rms_norm.compute(*arguments, None),
    lambda input, *_: _contiguous_like(input),
)

_gated_rms_norm_out_operator = _custom_ops.define(
    f"gated_rms_norm_out({_GATED_RMS_NORM_ARGUMENTS}, Tensor(a!) out) -> ()",
    lambda *arguments: _returning_nothing(_gated_rms_norm.compute(*arguments)),
    lambda *_: None,
)

_gated_rms_norm_backward_operator = _custom_ops.define(
    f"gated_rms_norm_backward(Tensor grad_output, {_GATED_RMS_NORM_ARGUMENTS},"
    " bool[] needs_input_grad) -> Tensor[]",
    lambda *arguments: _present(_gated_rms_norm_backward.backward(*arguments)),
    lambda _, *arguments: _fake_gradients(arguments[:4], arguments[-1]),
)

_differentiate(_gated_rms_norm_operator, _gated_rms_norm_backward_operator, 4, 4)

# -- `qk_norm_rope` and `qk_norm_rope_pack_`. ------------------------------------------
# They take the table as real numbers, `(tokens, head_dim / 2, 2)`: Inductor cannot take apart
# what writes its arguments and reads complex ones.


def _with_rope(function, position):
    """`function`, for a table of real numbers in this position."""

    def run(*arguments):
        return function(
            *arguments[:position],
            torch.view_as_complex(arguments[position]),
            *arguments[position + 1 :],
        )

    return run


_compute_qk_norm_rope = _with_rope(_qk_norm_rope.qk_norm_rope, 2)
_compute_qk_norm_rope_pack_ = _with_rope(_qk_norm_rope_pack.qk_norm_rope_pack_, 5)
_compute_qk_norm_rope_gradients = _with_rope(_qk_norm_rope_backward.backward, 3)

_qk_norm_rope_operator = _custom_ops.define(
    "qk_norm_rope(Tensor input, Tensor weight, Tensor table, float eps) -> Tensor",
    lambda *arguments: _compute_qk_norm_rope(*arguments, None),
    lambda input, *_: _contiguous_like(input),
)

_qk_norm_rope_backward_operator = _custom_ops.define(
    "qk_norm_rope_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor table,"
    " float eps, bool[] needs_input_grad) -> Tensor[]",
    lambda *arguments: _present(_compute_qk_norm_rope_gradients(*arguments)),
    lambda _, input, weight, *arguments: _fake_gradients(
        (input, weight), arguments[-1]
    ),
)

_differentiate(_qk_norm_rope_operator, _qk_norm_rope_backward_operator, 3, 2)

_qk_norm_rope_out_operator = _custom_ops.define(
    "qk_norm_rope_out(Tensor input, Tensor weight, Tensor table, float eps,"
    " Tensor(a!) out) -> ()",
    lambda *arguments: _returning_nothing(_compute_qk_norm_rope(*arguments)),
    lambda *_: None,
)

_qk_norm_rope_pack_operator = _custom_ops.define(
    "qk_norm_rope_pack(Tensor(a!) q, Tensor(b!) k_out, Tensor(c!) v_out,"
    " Tensor q_weight, Tensor k_weight, Tensor table, Tensor k_prefix, Tensor v_prefix,"
    " Tensor? k_src, Tensor? v_src, float eps) -> ()",
    lambda *arguments: _returning_nothing(_compute_qk_norm_rope_pack_(*arguments)),
    lambda *_: None,
)

"""The parts of `ntops_ext.torch.gated_rms_norm`: its checks, its result, its launch."""

import math
import numbers

import torch

from ntops_ext import configs, reference
from ntops_ext._handles import import_kernels, make_handle
from ntops_ext.torch import _checks, _launch, _rows


def check(
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
    """Raise the documented error for the first argument that is wrong."""

    _checks.check_tensor("input", input)
    _checks.check_dtype("input", input, _checks.FLOATING_DTYPES)

    if input.ndim == 0:
        raise ValueError(
            "`input` must have a dimension of columns, but is a scalar of shape ()."
        )

    num_columns = input.shape[-1]

    if gate is not None:
        _check_operand("gate", gate, input)
        _checks.check_shape("gate", gate, input.shape, "the shape of `input`")

    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_operand(name, parameter, input)
            _checks.check_shape(
                name, parameter, (num_columns,), "one element a column of `input`"
            )

    _check_group_size(group_size, num_columns)
    _check_number("eps", eps)

    if eps < 0:
        raise ValueError(f"`eps` must not be negative, but is {eps}.")

    _check_number("weight_offset", weight_offset)

    if weight is None and weight_offset != 0:
        raise ValueError(
            f"`weight_offset` is {weight_offset}, but there is no `weight` to add it to:"
            f" it must be 0 then."
        )

    if not isinstance(norm_before_gate, bool):
        raise TypeError(
            f"`norm_before_gate` must be a bool, but is a"
            f" {type(norm_before_gate).__name__}."
        )

    if not isinstance(activation, str) or activation not in reference.ACTIVATIONS:
        raise ValueError(
            f"`activation` must be one of"
            f" {', '.join(map(repr, reference.ACTIVATIONS))}, but is {activation!r}."
        )

    if out is not None:
        _check_out(out, input, {"gate": gate, "weight": weight, "bias": bias})


def _check_operand(name, tensor, input):
    _checks.check_tensor(name, tensor)
    _checks.check_dtype(name, tensor, _checks.FLOATING_DTYPES)
    _checks.check_device(name, tensor, "input", input)


def _check_group_size(group_size, num_columns):
    if group_size is None:
        return

    if not isinstance(group_size, numbers.Integral) or isinstance(group_size, bool):
        raise TypeError(
            f"`group_size` must be an int or None, but is a {type(group_size).__name__}."
        )

    if group_size < 1 or num_columns % group_size != 0:
        raise ValueError(
            f"`group_size` must be positive and divide the {num_columns} columns of"
            f" `input`, but is {group_size}."
        )


def _check_number(name, value):
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, but is a {type(value).__name__}.")

    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        # An int or a fraction that no float holds; the int's digits may be too many, too.
        raise ValueError(f"`{name}` must be finite as a float, but is not.") from None

    if not is_finite:
        raise ValueError(f"`{name}` must be finite, but is {value}.")


def _check_out(out, input, others):
    _checks.check_tensor("out", out)
    _checks.check_dtype("out", out, (input.dtype,))
    _checks.check_device("out", out, "input", input)
    _checks.check_shape("out", out, input.shape, "the shape of `input`")
    _checks.check_no_self_overlap("out", out)

    if not _checks.is_same_view(out, input) and _checks.overlap(out, input):
        raise ValueError(
            "`out` shares memory with `input`, element by other element. It may be"
            " `input` itself, or must not overlap it."
        )

    for name, tensor in others.items():
        if tensor is not None and _checks.overlap(out, tensor):
            raise ValueError(f"`out` must not share memory with `{name}`.")


def compute(
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
    """What `ntops_ext.torch.gated_rms_norm` returns."""

    check(
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
    )
    is_differentiated = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (input, weight, gate, bias, out)
    )

    if is_differentiated and out is not None:
        raise ValueError(
            "`out` must be None where gradients are recorded: what is written into it has"
            " none. Use torch.no_grad(), or leave `out` out."
        )

    if not _launch.runs_kernel(input):
        result = reference.gated_rms_norm(
            input,
            weight,
            gate,
            bias=bias,
            eps=float(eps),
            group_size=group_size,
            norm_before_gate=norm_before_gate,
            activation=activation,
            weight_offset=float(weight_offset),
        )

        return result.contiguous() if out is None else out.copy_(result)

    if is_differentiated:
        raise NotImplementedError(
            "gated_rms_norm has no gradients on a GPU yet. Call it under torch.no_grad(),"
            " or detach the arguments that require grad."
        )

    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    elif not _rows.fits(out):
        raise ValueError(
            f"`out` must have rows that span at most {_rows.MAX_OFFSET} elements of"
            f" memory, but has shape {tuple(out.shape)} and strides {out.stride()}."
        )

    if out.numel() > 0 and out.device.type != "meta":
        _run_kernel(
            input,
            weight,
            gate,
            bias,
            eps,
            input.shape[-1] if group_size is None else int(group_size),
            norm_before_gate,
            activation,
            weight_offset,
            out,
        )

    return out


def _run_kernel(
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
    kernel = import_kernels().gated_rms_norm

    if gate is None:
        activation_code = kernel.NO_GATE
    else:
        activation_code = kernel.SIGMOID if activation == "sigmoid" else kernel.SILU

    # An absent tensor is a number for the kernel (see `premake`).
    scalars = (
        1.0 / group_size,
        float(eps),
        float(weight_offset),
        activation_code,
        int(norm_before_gate),
    )
    input, weight, gate, bias = map(_addressable, (input, weight, gate, bias))
    tensors = [input, out] if gate is None else [input, out, gate]

    for part in _rows.split_rows(_rows.merge_rows(tensors)):
        input_part, out_part, *gate_parts = part
        config = configs.gated_rms_norm_config(
            group_size, input_part.numel() // group_size, input_part.ndim - 1
        )
        handle = make_handle(
            kernel.premake,
            num_warps=config.num_warps,
            num_columns=input.shape[-1],
            group_size=group_size,
            row_tile=configs.row_tile(config.rows_per_program, input_part.shape[:-1]),
            columns_per_piece=config.columns_per_piece,
            parameters_first=config.parameters_first,
            gate=gate is not None,
            weight=weight is not None,
            bias=bias is not None,
        )
        _launch.launch(
            handle,
            input.device,
            input_part,
            gate_parts[0] if gate_parts else 0.0,
            1.0 if weight is None else weight,
            -0.0 if bias is None else bias,
            out_part,
            *scalars,
        )


def _addressable(tensor):
    """`tensor`, or a copy of it where one row has offsets that no kernel can compute."""

    return tensor if tensor is None or _rows.fits(tensor) else tensor.contiguous()

"""The parts of `ntops_ext.torch.gated_rms_norm`: its checks, its result, its launch."""

import dataclasses
import math
import numbers

import torch

from ntops_ext import configs, reference
from ntops_ext._handles import import_kernels, make_handle
from ntops_ext.torch import (
    _checks,
    _gated_rms_norm_backward,
    _launch,
    _layouts,
    _prepared,
    _rows,
)

_NAMES = ("input", "weight", "gate", "bias", "out")
_NAMES_IN_ORDER_OF_KERNEL = ("input", "gate", "weight", "bias", "out")

# PyTorch's operators take tensors of 64 dimensions, and groups of columns are one more.
_MAX_DIMENSIONS = 63

_prepared_calls = _prepared.PreparedCalls(
    (
        "input",
        "weight",
        "gate",
        "bias",
        "eps",
        "group_size",
        "norm_before_gate",
        "activation",
        "weight_offset",
        "out",
    ),
    result="out",
    optional=("weight", "gate", "bias", "out"),
)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One launch.

    :param shape: Of its rows.
    :param views: Of `input`, `out` and `gate`, as the kernel takes them.
    :param row_strides: Those that are compiled in, as the kernel's `premake` takes them.
    """

    shape: tuple
    views: tuple
    row_strides: tuple

    @classmethod
    def of(cls, views, group_size):
        names = ("input", "output", "gate")[: len(views)]
        views_of_kernel, row_strides = _rows.compile_in_row_strides(
            names, views, configs.most_rows_of_a_program(group_size)
        )

        return cls(views[0].shape, views_of_kernel, row_strides)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """What is known of all calls with these layouts and options."""

    group_size: int
    eps: float
    weight_offset: float
    # Which tensors have rows with offsets that no kernel can compute.
    unaddressable: tuple
    # The launches; empty if there is nothing to compute.
    parts: list
    # Whether several programs may share a row, unless `out` is `input`.
    may_share: bool
    # The addresses with which `out` was checked for overlap, and whether programs may share a row.
    addresses: dict = dataclasses.field(default_factory=dict)
    # By whether they may: the handle of each launch, and whether they do.
    handles: dict = dataclasses.field(default_factory=dict)
    prepared: _prepared.OfLayout = dataclasses.field(default_factory=_prepared.OfLayout)


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

    for prepared_call in _prepared_calls.recent:
        result = prepared_call(
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

        if result is not None:
            return result

    arguments = (input, weight, gate, bias, out)
    tensors = [tensor for tensor in arguments if tensor is not None]
    options = (eps, group_size, norm_before_gate, activation, weight_offset)

    as_operator = _launch.dispatched("gated_rms_norm", tensors, out is not None)

    if as_operator is not None:
        return as_operator(input, weight, gate, bias, *options, out)

    # Types, because 1 equals True and 1.0.
    mode = (*options, *map(type, options), *[tensor is None for tensor in arguments])
    layout = _layouts_of_calls.get(mode, tensors, arguments, *options)
    whole_call = (input, weight, gate, bias, *options, out)

    result = _prepared_calls.repeat(layout.prepared, whole_call)

    if result is not None:
        return result

    if any(map(torch.Tensor.is_neg, tensors)):
        _checks.check_tensors(_NAMES, arguments)

    may_share = layout.may_share
    is_differentiated = _layouts.requires_grad(tensors)

    if is_differentiated:
        _layouts.check_can_be_saved(_NAMES, arguments)

    if out is not None:
        if is_differentiated:
            raise no_gradients_into_out()

        addresses = tuple(map(torch.Tensor.data_ptr, tensors))
        may_share = may_share and out.data_ptr() != input.data_ptr()

        if addresses not in layout.addresses:
            _check_overlap(input, weight, gate, bias, out)
            _layouts_of_calls.remember_addresses(layout.addresses, addresses, may_share)

    if not _launch.runs_kernel(input):
        if out is not None:
            _layouts.check_writable(("out",), (out,))

        result = reference.gated_rms_norm(
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

        if out is None:
            return result.contiguous()

        # What `copy_` returns would be of the class of `result`, which that of any argument may decide.
        out.copy_(result)

        return out

    if is_differentiated:
        if _layouts.carries_tangents(tensors):
            raise NotImplementedError(
                "gated_rms_norm has no forward-mode gradients (tangents) as a kernel: it"
                " has those of a backward pass."
            )

        return _gated_rms_norm_backward.GatedRMSNorm.apply(
            compute, input, weight, gate, bias, *options
        )

    if layout.unaddressable:
        copied = {name: None for name in _NAMES} | {
            name: tensor.contiguous() if name in layout.unaddressable else tensor
            for name, tensor in zip(_NAMES, arguments, strict=True)
            if tensor is not None
        }

        return compute(
            copied["input"],
            copied["weight"],
            copied["gate"],
            copied["bias"],
            eps,
            group_size,
            norm_before_gate,
            activation,
            weight_offset,
            out,
        )

    result = out

    if out is None:
        result = torch.empty(input.shape, dtype=input.dtype, device=input.device)

    if layout.parts and not result.is_meta:
        launches = _launches(
            layout,
            may_share,
            input,
            weight,
            gate,
            bias,
            norm_before_gate,
            activation,
            result,
        )

        for handle, launched, _ in launches:
            _launch.launch(handle, input.device, *launched)

        if out is not None:
            _layouts.mark_as_written(out)

        if len(launches) == 1:
            _prepare(layout, may_share, whole_call, *launches[0], result)

    return result


def no_gradients_into_out():
    """The error to raise where gradients are recorded and a result is given."""

    return ValueError(
        "`out` must be None where gradients are recorded: what is written into it has"
        " none. Use torch.no_grad(), or leave `out` out."
    )


def _prepare(layout, may_share, whole_call, handle, launched, names, result):
    _prepared_calls.prepare(
        layout.prepared,
        whole_call,
        handle,
        launched,
        addressed=[
            name
            for name, argument in zip(names, launched, strict=False)
            if isinstance(argument, torch.Tensor)
        ],
        **_prepared.for_result(
            whole_call[-1],
            result,
            found=layout.addresses,
            verdict=may_share,
            remember=_layouts_of_calls.remember_addresses,
        ),
    )


def _check_layout(
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
):
    """Check what layouts and options decide, and work out the launches."""

    eps, group_size, weight_offset = check_call(
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

    if out is not None:
        _check_memory_of_out(out)

    unaddressable = tuple(
        name
        for name, tensor in zip(_NAMES[:4], (input, weight, gate, bias), strict=True)
        if tensor is not None and not _rows.fits(tensor)
    )
    parts = []

    if input.numel() > 0 and not unaddressable:
        written = torch.empty(input.shape, device="meta") if out is None else out
        tensors = [input, written] if gate is None else [input, written, gate]
        rows = [_rows.without_data(tensor) for tensor in tensors]
        parts = [
            _Part.of(
                [
                    _rows.View.of(part, tensor)
                    for part, tensor in zip(parts_of_rows, rows, strict=True)
                ],
                # A size is a tensor while `torch.jit.trace` looks on.
                int(group_size),
            )
            for parts_of_rows in _rows.split_rows(_rows.merge_rows(rows))
        ]

    return _Layout(
        group_size=group_size,
        eps=eps,
        weight_offset=weight_offset,
        unaddressable=unaddressable,
        parts=parts,
        may_share=group_size == input.shape[-1] and (gate is None or norm_before_gate),
    )


def check_call(
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
):
    """Refuse what layouts and options decide to be wrong.

    `torch.compile` traces it, with sizes and strides that may be unknown: nothing here
    sorts them or looks at addresses.

    :return: `eps`, `group_size` and `weight_offset` as numbers.
    """

    _checks.check_dtype("input", input, _checks.FLOATING_DTYPES)

    if input.ndim == 0:
        raise ValueError(
            "`input` must have a dimension of columns, but is a scalar of shape ()."
        )

    if input.ndim > _MAX_DIMENSIONS:
        raise ValueError(
            f"`input` must have at most {_MAX_DIMENSIONS} dimensions, but has"
            f" {input.ndim}."
        )

    num_columns = input.shape[-1]

    if num_columns > _rows.MAX_COLUMNS:
        raise ValueError(
            f"`input` must have at most {_rows.MAX_COLUMNS} columns, for kernels compute"
            f" offsets in 32 bits, but has shape {tuple(input.shape)}."
        )

    _checks.check_operands(
        input,
        rows=(("gate", gate),),
        parameters=(("weight", weight), ("bias", bias)),
    )
    _check_group_size(group_size, num_columns)
    eps = _checks.check_eps(eps)
    _checks.check_number("weight_offset", weight_offset)

    if weight is None and weight_offset != 0:
        raise ValueError(
            f"`weight_offset` is {_checks.shown(weight_offset)}, but there is no `weight`"
            f" to add it to: it must be 0 then."
        )

    if not isinstance(norm_before_gate, bool):
        raise TypeError(
            f"`norm_before_gate` must be a bool, but is a"
            f" {_checks.type_name(norm_before_gate)}."
        )

    if not isinstance(activation, str) or activation not in reference.ACTIVATIONS:
        raise ValueError(
            f"`activation` must be one of"
            f" {', '.join(map(repr, reference.ACTIVATIONS))}, but is"
            f" {_checks.shown(activation, repr)}."
        )

    if out is not None:
        _check_out(out, input)

    return (
        eps,
        num_columns if group_size is None else int(group_size),
        # -0.0 becomes 0.0: the two are equal, and a layout is remembered for both.
        float(weight_offset) + 0.0,
    )


_layouts_of_calls = _layouts.Layouts(
    _NAMES, ("weight", "gate", "bias", "out"), _check_layout
)


def _check_group_size(group_size, num_columns):
    if group_size is None:
        return

    if not isinstance(group_size, numbers.Integral) or isinstance(
        group_size, _checks.NO_NUMBERS
    ):
        raise TypeError(
            f"`group_size` must be an int or None, but is a"
            f" {_checks.type_name(group_size)}."
        )

    # As an int: a NumPy scalar may be too narrow for the number of columns.
    if int(group_size) < 1 or num_columns % int(group_size) != 0:
        raise ValueError(
            f"`group_size` must be positive and divide the {num_columns} columns of"
            f" `input`, but is {_checks.shown(group_size)}."
        )


def _check_out(out, input):
    _checks.check_dtype("out", out, (input.dtype,))
    _checks.check_device("out", out, "input", input)
    _checks.check_shape("out", out, input.shape, "the shape of `input`")


def _check_memory_of_out(out):
    _checks.check_no_self_overlap("out", out)

    if not _rows.fits(out):
        raise ValueError(
            f"`out` must have rows that span at most {_rows.MAX_OFFSET} elements of"
            f" memory, but has shape {tuple(out.shape)} and strides {out.stride()}."
        )


def _check_overlap(input, weight, gate, bias, out):
    if not _checks.is_same_view(out, input) and _checks.overlap(
        "out", out, "input", input
    ):
        raise ValueError(
            "`out` shares memory with `input`, element by other element. It may be"
            " `input` itself, or must not overlap it."
        )

    for name, tensor in (("gate", gate), ("weight", weight), ("bias", bias)):
        if tensor is not None and _checks.overlap("out", out, name, tensor):
            raise ValueError(f"`out` must not share memory with `{name}`.")


def _launches(
    layout, may_share, input, weight, gate, bias, norm_before_gate, activation, out
):
    """Of each a handle, the arguments to call it with, and the names of those that may be tensors."""

    kernel = import_kernels().gated_rms_norm

    if may_share not in layout.handles:
        # At once: another thread may be here, too.
        layout.handles[may_share] = [
            _make_handle(
                kernel, layout.group_size, part, input, weight, gate, bias, may_share
            )
            for part in layout.parts
        ]

    return [
        (
            handle,
            # An absent tensor is a number for the kernel (see `premake`).
            (
                *((part.views[0].apply(input),) if is_shared else ()),
                part.views[0].apply(input),
                0.0 if gate is None else part.views[2].apply(gate),
                1.0 if weight is None else weight,
                -0.0 if bias is None else bias,
                part.views[1].apply(out),
                1.0 / layout.group_size,
                layout.eps,
                layout.weight_offset,
                kernel.activation_code(None if gate is None else activation),
                int(norm_before_gate),
            ),
            (*(("input",) if is_shared else ()), *_NAMES_IN_ORDER_OF_KERNEL),
        )
        for (handle, is_shared), part in zip(
            layout.handles[may_share], layout.parts, strict=True
        )
    ]


def _make_handle(kernel, group_size, part, input, weight, gate, bias, may_share):
    *row_sizes, num_columns = part.shape
    config = configs.gated_rms_norm_config(
        group_size,
        math.prod(part.shape) // group_size,
        len(row_sizes),
        may_share=may_share,
    )

    handle = make_handle(
        kernel.premake,
        num_warps=config.num_warps,
        num_columns=num_columns,
        group_size=group_size,
        row_tile=configs.row_tile(config.rows_per_program, row_sizes),
        row_strides=part.row_strides,
        columns_per_piece=config.columns_per_piece,
        holds_pieces=config.holds_pieces,
        columns_per_share=config.columns_per_share,
        parameters_first=config.parameters_first,
        gate=gate is not None,
        weight=weight is not None,
        bias=bias is not None,
        waits=_launch.waits(input.device),
    )

    return handle, config.columns_per_share is not None

"""Calls of `gated_rms_norm` for its tests: arguments, layouts, what is right, what must stay as it is."""

import dataclasses

import torch
from comparison import assert_rounded_once, bits

from ninetoothed_patches import host_driver
from ntops_ext import reference
from ntops_ext.torch import gated_rms_norm

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}

# Mode -> what the call is given. Both orders, both activations, and no gate.
MODES = {
    "plain": {},
    "norm_first-silu": {"activation": "silu", "norm_before_gate": True},
    "norm_first-sigmoid": {"activation": "sigmoid", "norm_before_gate": True},
    "gate_first-silu": {"activation": "silu", "norm_before_gate": False},
    "gate_first-sigmoid": {"activation": "sigmoid", "norm_before_gate": False},
}

# A value that no computation here gives: what lies around a tensor is filled with it.
_CANARY = -11.375


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call.

    :param tensors: `input`, and, where they are given, `weight`, `gate` and `bias`.
    :param options: The other keywords.
    """

    tensors: dict
    options: dict

    def run(self, **overrides):
        """What the operator returns."""

        return gated_rms_norm(**{**self.tensors, **self.options, **overrides})

    def with_tensors(self, **tensors):
        return Call({**self.tensors, **tensors}, self.options)

    def with_options(self, **options):
        return Call(self.tensors, {**self.options, **options})

    def rows(self, index):
        """The same call of some of the rows."""

        return self.with_tensors(
            **{
                name: self.tensors[name][index]
                for name in ("input", "gate")
                if name in self.tensors
            }
        )

    def contiguous(self):
        """The same call of tensors that are dense, aligned, and share nothing."""

        return self.with_tensors(
            **{
                name: tensor.clone(memory_format=torch.contiguous_format)
                for name, tensor in self.tensors.items()
            }
        )

    def definition(self, arithmetic_dtype, output_dtype=None, **overrides):
        return reference.gated_rms_norm(
            **{**self.tensors, **self.options, **overrides},
            arithmetic_dtype=arithmetic_dtype,
            output_dtype=output_dtype,
        )

    def exact(self):
        """The result in float64, and how far a float32 computation may be from it.

        A float32 chain without a bias is within 4.5 x 2^-24 of the result, one with a bias within as much
        of the two terms' magnitudes, as they may cancel. 16 leaves room for another order of additions.
        """

        exact = self.definition(torch.float64, torch.float64)
        magnitude = self.definition(torch.float64, torch.float64, bias=None).abs()
        gate = self.tensors.get("gate")
        units = 16.0

        if "bias" in self.tensors:
            bias = self.tensors["bias"].double().abs()

            if gate is not None and self.options.get("norm_before_gate", True):
                activation = self.options.get("activation", "silu")
                bias = bias * reference.ACTIVATIONS[activation](gate.double()).abs()

            magnitude = magnitude + bias

        if gate is not None and self.tensors["input"].dtype is not torch.float32:
            # exp(-z) is exp2 of a rounded product, which is wrong by up to z units.
            units = units + 2 * gate.double().neg().clamp(0, 110)

        return exact, units * 2.0**-24 * magnitude

    def check(self, actual):
        """Require `actual` to be the right result, with one rounding."""

        input = self.tensors["input"]

        assert (actual.dtype, actual.device) == (input.dtype, input.device)

        assert_rounded_once(
            actual,
            *self.exact(),
            truncated=actual.dtype is torch.bfloat16
            and actual.device.type == "cpu"
            and host_driver.interpreter_is_on(),
        )


def make_call(
    *shape,
    dtype=torch.float32,
    mode="norm_first-silu",
    gate_dtype=None,
    weight=True,
    weight_dtype=None,
    bias=False,
    bias_dtype=None,
    device="cpu",
    seed=0,
    **options,
):
    """A call of standard normal tensors; a dtype that is not given is that of the input."""

    generator = torch.Generator(device).manual_seed(seed)

    def draw(sizes, own_dtype):
        return torch.randn(sizes, generator=generator, device=device).to(
            own_dtype or dtype
        )

    tensors = {"input": draw(shape, dtype)}

    if weight:
        tensors["weight"] = draw(shape[-1:], weight_dtype)

    if mode != "plain":
        tensors["gate"] = draw(shape, gate_dtype)

    if bias:
        tensors["bias"] = draw(shape[-1:], bias_dtype)

    return Call(tensors, {**MODES[mode], **options})


def lay_out(tensor, layout):
    """`tensor`'s values in another layout, as a view of a larger buffer of canaries, and that buffer."""

    *row_sizes, num_columns = tensor.shape
    extra = 16

    def buffer(*shape):
        return tensor.new_full(shape, _CANARY)

    if layout == "dense":
        base = buffer(extra + tensor.numel() + extra)
        view = base[extra:-extra].view(tensor.shape)
    elif layout == "misaligned":
        base = buffer(extra + 1 + tensor.numel() + extra)
        view = base[extra + 1 : -extra].view(tensor.shape)
    elif layout == "column_slice":
        base = buffer(*row_sizes, extra + num_columns + extra)
        view = base[..., extra : extra + num_columns]
    elif layout == "odd_column_slice":
        base = buffer(*row_sizes, 3 + num_columns + 2)
        view = base[..., 3 : 3 + num_columns]
    elif layout == "every_second_row":
        base = buffer(2 * row_sizes[0] + 1, *tensor.shape[1:])
        view = base[1::2]
    elif layout == "every_second_column":
        base = buffer(*row_sizes, 2 * num_columns + 1)
        view = base[..., 1::2]
    elif layout == "columns_first":
        base = buffer(num_columns + 2, *reversed(row_sizes))
        view = base[1:-1].permute(*reversed(range(tensor.ndim)))
    elif layout == "rows_reversed":
        # Dense, with the row dimensions in the opposite order.
        base = buffer(*reversed(row_sizes), num_columns + extra)
        dims = (*reversed(range(tensor.ndim - 1)), tensor.ndim - 1)
        view = base.permute(dims)[..., :num_columns]
    else:
        raise ValueError(layout)

    view.copy_(tensor)

    return view, base


# What a single row can be laid out as, too.
LAYOUTS = (
    "dense",
    "misaligned",
    "column_slice",
    "odd_column_slice",
    "every_second_row",
    "every_second_column",
    "columns_first",
    "rows_reversed",
)


class Untouched:
    """A block in which the memory of some tensors, beyond what they show of it too, must not change."""

    def __init__(self, *tensors):
        self._tensors = [tensor for tensor in tensors if tensor is not None]

    def __enter__(self):
        self._before = [self._memory(tensor).clone() for tensor in self._tensors]

        return self

    def __exit__(self, exception_type, exception, traceback):
        if exception_type is not None:
            return

        for tensor, before in zip(self._tensors, self._before, strict=True):
            assert torch.equal(self._memory(tensor), before)

    @staticmethod
    def _memory(tensor):
        storage = tensor.untyped_storage()

        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def assert_only_written(base, view):
    """Require a buffer from `lay_out` to hold canaries wherever `view` does not look."""

    view.fill_(_CANARY)

    assert (bits(base) == bits(torch.full_like(base, _CANARY))).all()

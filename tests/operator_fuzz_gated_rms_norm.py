"""Calls of `gated_rms_norm` under fuzz: each argument right in some way, and at most a few of them wrong."""

import numbers

import gated_rms_norm_calls
import operator_fuzz as fuzz
import torch
from hypothesis import strategies as st

from ntops_ext import reference
from ntops_ext.torch import gated_rms_norm


@st.composite
def calls(draw, *, max_rows=5, columns=(8, 1, 12, 16, 3, 64), is_right=False):
    """A `fuzz.Call`."""

    num_columns = draw(st.sampled_from([*columns, 0]))
    rows = draw(
        st.sampled_from([(), (1,), (max_rows,), (2, 3), (0,), (1, 1, 2), (3, 0)])
    )
    shape = (*rows, num_columns)
    wrong = set()

    if not is_right:
        wrong = set(
            draw(
                st.lists(
                    st.sampled_from(
                        ["input", "weight", "gate", "bias", "out", "eps", "group_size"]
                        + ["norm_before_gate", "activation", "weight_offset", "overlap"]
                    ),
                    max_size=2,
                )
            )
        )

    right = fuzz.tensors
    drawn, errors = {}, {}

    for name, own_shape in (
        ("input", shape),
        ("weight", (num_columns,)),
        ("gate", shape),
        ("bias", (num_columns,)),
    ):
        if name in wrong:
            drawn[name] = draw(
                fuzz.no_right_tensors(own_shape, is_optional=name != "input")
            )
        elif name == "input" or draw(st.booleans()):
            drawn[name] = fuzz.right(draw(right(own_shape)))
        elif draw(st.booleans()):
            drawn[name] = fuzz.right(None)

    if "eps" in wrong:
        drawn["eps"] = draw(fuzz.no_eps)
    elif draw(st.booleans()):
        drawn["eps"] = draw(fuzz.eps)

    if "group_size" in wrong:
        drawn["group_size"] = draw(fuzz.no_group_sizes(num_columns))

        if num_columns == 0 and drawn["group_size"].error is ValueError:
            # Every positive number divides no columns.
            if drawn["group_size"].value > 0:
                drawn["group_size"] = fuzz.unsure(drawn["group_size"].value)
    elif draw(st.booleans()) and num_columns:
        drawn["group_size"] = draw(fuzz.group_sizes(num_columns))

    if "norm_before_gate" in wrong:
        drawn["norm_before_gate"] = draw(fuzz.no_flags)
    elif draw(st.booleans()):
        drawn["norm_before_gate"] = fuzz.right(draw(st.booleans()))

    if "activation" in wrong:
        drawn["activation"] = draw(fuzz.no_activations)
    elif draw(st.booleans()):
        drawn["activation"] = fuzz.right(draw(st.sampled_from(fuzz.RIGHT_ACTIVATIONS)))

    if "weight_offset" in wrong:
        drawn["weight_offset"] = draw(fuzz.no_offsets)
    elif draw(st.booleans()):
        drawn["weight_offset"] = draw(fuzz.offsets)
        weight = drawn.get("weight", fuzz.right(None))

        if weight.value is None and drawn["weight_offset"].value != 0:
            errors["weight_offset"] = ValueError

    if not wrong and draw(st.integers(0, 3)) == 0:
        draw(_aliases(drawn))

    input = drawn["input"].value

    if "out" in wrong:
        dtype = getattr(input, "dtype", torch.float32)
        out = draw(
            fuzz.no_right_tensors(
                shape, dtype=dtype if dtype in fuzz.FLOATS else torch.float32
            )
        )

        if out.value is not None:
            drawn["out"] = out
    elif "overlap" in wrong:
        _overlap(draw, drawn, errors)
    elif (
        drawn["input"].error is None
        and not drawn["input"].is_unsure
        and draw(st.booleans())
    ):
        if draw(st.booleans()) and _is_writable(input):
            drawn["out"] = fuzz.right(input)

            if input.numel() and any(
                _shares_storage(drawn[name].value, input)
                for name in ("gate", "weight", "bias")
                if name in drawn and not wrong
            ):
                errors["out"] = ValueError
        else:
            drawn["out"] = fuzz.right(
                draw(right(shape, dtypes=(input.dtype,), is_written=True))
            )

    mode = "no grad"

    if not is_right:
        mode = draw(
            fuzz.modes_and_leaves(
                drawn,
                errors,
                of_leaves=lambda leaves: {"out": ValueError} if "out" in drawn else {},
            )
        )

    return fuzz.Call.of(drawn, errors, mode)


@st.composite
def _aliases(draw, drawn):
    """Two arguments in the same memory, which are only read."""

    input = drawn["input"].value
    what = draw(st.sampled_from(["gate", "bias", "row", "projection"]))

    if what == "gate":
        drawn["gate"] = drawn["input"]
    elif what == "bias" and "weight" in drawn:
        drawn["bias"] = drawn["weight"]
    elif what == "row" and input.ndim > 1 and input.numel():
        drawn["bias"] = fuzz.right(input[(0,) * (input.ndim - 1)])
    elif what == "projection" and not input.is_inference():
        columns = input.shape[-1]
        projection = torch.randn(*input.shape[:-1], 2 * columns + 3).to(input.dtype)
        drawn["input"] = fuzz.right(projection[..., :columns])
        drawn["gate"] = fuzz.right(projection[..., columns + 3 :])


def _shares_storage(tensor, other):
    # Those of `_aliases` that share elements with the input.
    return tensor is not None and (
        tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and tensor.storage_offset() == other.storage_offset()
    )


def _is_writable(tensor):
    """Whether no two elements share memory."""

    strides = sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    )
    extent = 0

    for stride, size in strides:
        if stride <= extent and tensor.numel():
            return False

        extent += stride * (size - 1)

    return not tensor.is_inference()


def _overlap(draw, drawn, errors):
    """An `out` that shares memory with an argument, or with itself."""

    input = drawn["input"].value

    if not isinstance(input, torch.Tensor) or drawn["input"].error or input.numel() < 2:
        return

    name = draw(st.sampled_from(["input", "gate", "weight", "bias", "itself"]))
    shape, strides = tuple(input.shape), input.contiguous().stride()

    if name == "itself":
        if shape[0] < 2:
            return

        buffer = torch.zeros(input.numel() + 8, dtype=input.dtype)
        drawn["out"] = fuzz.wrong(
            ValueError, buffer.as_strided(shape, (0, *strides[1:]), 1)
        )

        return

    buffer = torch.randn(2 * input.numel() + 8).to(input.dtype)
    own_shape = shape if name in ("input", "gate") else shape[-1:]
    own_strides = strides if name in ("input", "gate") else strides[-1:]
    other = buffer.as_strided(own_shape, own_strides, 0)
    drawn[name] = fuzz.right(other)
    shift = (
        draw(st.integers(0 if name != "input" else 1, other.numel() - 1))
        if (name != "input" or other.numel() > 1)
        else 1
    )
    drawn["out"] = fuzz.right(buffer.as_strided(shape, strides, shift))
    errors["out"] = ValueError

    if name in ("weight", "bias") and "weight_offset" in errors and name == "weight":
        del errors["weight_offset"]


def check_call(call, *, is_truncated=False):
    """Make the call, and require what must become of it."""

    arguments = dict(call.arguments)
    expected = None

    if not call.errors:
        # Copies, for the output may be an argument.
        expected = gated_rms_norm_calls.Call(
            {
                name: value.detach().clone().as_subclass(torch.Tensor)
                for name, value in arguments.items()
                if isinstance(value, torch.Tensor) and name != "out"
            }
            if not call.is_unsure
            else {},
            {
                name: _plain(value)
                for name, value in arguments.items()
                if not isinstance(value, torch.Tensor)
                and name != "out"
                and value is not None
            },
        )

    def check(result):
        input, out = arguments["input"], arguments.get("out")

        if out is not None:
            assert result is out
        else:
            assert result.is_contiguous()

        assert result.shape == input.shape
        assert result.dtype == input.dtype

        if call.is_unsure:
            return

        # A definition in float64 of an eps that float32 takes for 0 says nothing of zeros.
        exact, error = expected.exact()
        fuzz.assert_near(
            result,
            exact,
            error,
            truncated=is_truncated and input.dtype is torch.bfloat16,
        )

    return fuzz.run(gated_rms_norm, call, check, written=("out",))


@st.composite
def calls_with_gradients(draw):
    """A right call, its leaves, and a gradient of the result."""

    call = draw(calls(is_right=True))
    call.arguments.pop("out", None)
    call.errors.pop("out", None)
    call.mode = "grad"
    names = ["input", "weight", "gate", "bias"]
    fuzz.make_leaves(call, draw(st.sets(st.sampled_from(names), min_size=1)))
    input = call.arguments["input"]
    layouts = st.sampled_from(fuzz.LAYOUTS)
    gradient = fuzz.embedded(input.shape, input.dtype, draw(layouts), 7)

    return call, gradient


def check_gradients(call_and_gradient, *, is_truncated=False):
    """The gradients of a call are right, or it is refused for a named reason.

    Those of the definition in PyTorch are what its own formulas give: they are compared in float32.
    """

    call, gradient = call_and_gradient
    leaves = fuzz.leaves_of(call)
    memory = fuzz.Memory([gradient])
    options = {
        name: _plain(value)
        for name, value in call.arguments.items()
        if name not in ("input", "weight", "gate", "bias") and value is not None
    }
    # Where the root is of almost nothing, float32 has another one.
    eps = options.get("eps", 1e-5)

    def check(result):
        if not leaves:
            return

        found = torch.autograd.grad(result, list(leaves.values()), gradient)
        tensors = [
            None if value is None else value.detach().as_subclass(torch.Tensor).double()
            for value in (
                call.arguments.get(name) for name in ("input", "weight", "gate", "bias")
            )
        ]
        *three, bias = tensors
        arguments = (gradient.double(), *three)
        options["bias"] = bias
        exact = reference.gated_rms_norm_backward(
            *arguments, **options, arithmetic_dtype=torch.float64
        )
        errors = reference.gated_rms_norm_backward_errors(*arguments, **options)
        wanted = dict(
            zip(
                ("input", "weight", "gate", "bias"),
                zip(exact, errors, strict=True),
                strict=True,
            )
        )

        for (name, leaf), one in zip(leaves.items(), found, strict=True):
            assert (one.shape, one.dtype) == (leaf.shape, leaf.dtype)

            if eps > 1e-20:
                expected, error = wanted[name]
                fuzz.assert_near(
                    one,
                    expected.reshape(one.shape),
                    error.reshape(one.shape),
                    truncated=is_truncated and one.dtype is torch.bfloat16,
                )

    outcome = fuzz.run(gated_rms_norm, call, check)
    memory.assert_unchanged()

    return outcome


def _plain(value):
    if isinstance(value, bool | str):
        return value

    # PyTorch adds no int of more than 64 bits.
    is_int = isinstance(value, numbers.Integral) and abs(value) < 2**31

    return int(value) if is_int else float(value)


__all__ = ["calls", "check_call", "reference"]

"""`ntops_ext.nn.GatedRMSNorm` under fuzz: its constructor, and its calls."""

import numpy as np
import operator_fuzz as fuzz
import torch
from hypothesis import strategies as st

from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import gated_rms_norm

_NO_SIZES = [0, -1, -(10**30), 2**31, 2**62, 2**63, 10**30]
_NO_SIZE_KINDS = [1.0, True, "8", None, (8,), [8], torch.tensor(8), fuzz.Size.FOUR]
_NO_SIZE_KINDS += [np.int64(8), 8j, torch.Size([8]), np.array(8), range(8)]
_NO_DTYPES = [torch.float64, torch.int32, torch.complex64, torch.float8_e5m2, "float32"]
_NO_DTYPES += [float, 1, torch.quint8, [], {}, object(), np.float32, torch.complex32]
_NO_DTYPES += [
    torch.bits8,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.strided,
    torch.ones(1),
]
_NO_DEVICES = ["nowhere", "", "cpu:x", 1.5, [], {}, object(), "privateuseone", -7]
_NO_DEVICES += [2**70, "cpu:-1", "hpu", True, torch.float32, torch.ones(1)]


def _wrong(error, values):
    return st.sampled_from(values).map(lambda value: fuzz.wrong(error, value))


@st.composite
def constructions(draw):
    """A `fuzz.Call` of the constructor."""

    size = draw(st.sampled_from([8, 1, 12, 64]))
    names = ["hidden_size", "eps", "group_size", "norm_before_gate", "activation"]
    names += ["bias", "elementwise_affine", "weight_offset", "device", "dtype"]
    wrong = set(draw(st.lists(st.sampled_from(names), max_size=2)))
    drawn, errors = {"hidden_size": fuzz.right(size)}, {}
    choices = {
        "hidden_size": (
            st.just(fuzz.right(size)),
            _wrong(ValueError, _NO_SIZES) | _wrong(TypeError, _NO_SIZE_KINDS),
        ),
        "eps": (fuzz.eps, fuzz.no_eps),
        "group_size": (fuzz.group_sizes(size), fuzz.no_group_sizes(size)),
        "norm_before_gate": (st.booleans().map(fuzz.right), fuzz.no_flags),
        "activation": (
            st.sampled_from(fuzz.RIGHT_ACTIVATIONS).map(fuzz.right),
            fuzz.no_activations,
        ),
        "bias": (st.booleans().map(fuzz.right), fuzz.no_flags),
        "elementwise_affine": (st.booleans().map(fuzz.right), fuzz.no_flags),
        "weight_offset": (fuzz.offsets, fuzz.no_offsets),
        "device": (
            st.sampled_from([None, "cpu", torch.device("cpu"), "meta"]).map(fuzz.right),
            _wrong((TypeError, ValueError, RuntimeError), _NO_DEVICES),
        ),
        "dtype": (
            st.sampled_from([None, *fuzz.FLOATS]).map(fuzz.right),
            _wrong(TypeError, _NO_DTYPES),
        ),
    }

    for name, (right, wrong_values) in choices.items():
        if name in wrong:
            drawn[name] = draw(wrong_values)
        elif draw(st.booleans()):
            drawn[name] = draw(right)

    values = {name: argument.value for name, argument in drawn.items()}
    has_weight = values.get("elementwise_affine", True)

    if has_weight is False and values.get("bias") is True:
        errors["bias"] = ValueError

    if (
        has_weight is False
        and drawn.get("weight_offset", fuzz.right(0)).error is None
        and values.get("weight_offset", 0) != 0
    ):
        errors["weight_offset"] = ValueError

    return fuzz.Call.of(drawn, errors)


def check_construction(call):
    """Make the module, and require what must become of it."""

    arguments = call.arguments

    def check(module):
        size = arguments["hidden_size"]
        expected = set()

        if arguments.get("elementwise_affine", True):
            expected = {"weight", "bias"} if arguments.get("bias") else {"weight"}

        parameters = dict(module.named_parameters())
        assert parameters.keys() == expected
        dtype = arguments.get("dtype") or torch.get_default_dtype()

        for parameter in parameters.values():
            assert (parameter.shape, parameter.dtype) == ((size,), dtype)

        if not any(parameter.is_meta for parameter in parameters.values()):
            assert module(torch.ones(2, size)).shape == (2, size)

        assert str(size) in repr(module)

    return fuzz.run(GatedRMSNorm, call, check)


@st.composite
def forwards(draw):
    """A module, and a `fuzz.Call` of it."""

    size = draw(st.sampled_from([8, 1, 12]))
    has_weight = draw(st.booleans())
    module = GatedRMSNorm(
        size,
        norm_before_gate=draw(st.booleans()),
        elementwise_affine=has_weight,
        bias=has_weight and draw(st.booleans()),
        dtype=draw(st.sampled_from(fuzz.FLOATS)),
    )
    shape = (*draw(st.sampled_from([(), (2,), (2, 3), (0,)])), size)
    wrong = draw(st.sampled_from(["input", "gate", "width", "nothing", "nothing"]))
    drawn, errors = {}, {}

    if wrong == "width":
        other = (*shape[:-1], size + 1)
        drawn["input"] = fuzz.right(draw(fuzz.tensors(other)))
        errors = {"input": ValueError, "weight": ValueError}
    elif wrong == "input":
        drawn["input"] = draw(fuzz.no_right_tensors(shape, is_optional=False))
    else:
        drawn["input"] = fuzz.right(draw(fuzz.tensors(shape)))

    if wrong == "gate":
        drawn["gate"] = draw(fuzz.no_right_tensors(shape))
    elif draw(st.booleans()):
        drawn["gate"] = fuzz.right(draw(fuzz.tensors(shape)))

    if wrong == "width":
        drawn.pop("gate", None)

    return module, fuzz.Call.of(drawn, errors, draw(fuzz.modes))


def check_forward(module_and_call):
    """What the operator gives with the module's parameters, or an error of it."""

    module, call = module_and_call

    def check(result):
        if not call.is_unsure:
            with torch.no_grad():
                expected = gated_rms_norm(
                    call.arguments["input"],
                    module.weight,
                    call.arguments.get("gate"),
                    bias=module.bias,
                    norm_before_gate=module.norm_before_gate,
                )

            assert torch.equal(result, expected)

    call.arguments = dict(call.arguments)

    if call.is_unsure:
        # The parameters go with the module, not with the call.
        call.arguments_named = {"weight", "bias"}

    if call.mode == "grad" and module.weight is not None:
        call.errors |= fuzz.of_inference(call.arguments)

    return fuzz.run(module, call, check)

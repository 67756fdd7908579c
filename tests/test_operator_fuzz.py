"""The operators under fuzz, on CPU tensors: right calls give what the definition gives, wrong ones say what is wrong.

`tests/operator_fuzz.py` has what is drawn and what is required. The long run takes its size from the environment:

    OPERATOR_FUZZ_EXAMPLES=2000 OPERATOR_FUZZ_SEED=0 python -m pytest -m slow tests/test_operator_fuzz.py
"""

import os

import hypothesis
import numpy as np
import operator_fuzz as fuzz
import operator_fuzz_gated_rms_norm as of_norm
import operator_fuzz_module as of_module
import operator_fuzz_qk_norm_rope as of_rope
import operator_fuzz_rounding as of_rounding
import pytest
import torch

from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import eager_rounding, gated_rms_norm, qk_norm_rope

pytestmark = [
    # Of the kinds of tensors that are tried.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

# What is called: calls, what is required of one, examples in each run of the tests.
FUZZED = {
    "gated_rms_norm": (of_norm.calls, of_norm.check_call, 100),
    "gated_rms_norm, gradients": (
        of_norm.calls_with_gradients,
        of_norm.check_gradients,
        30,
    ),
    "qk_norm_rope": (of_rope.calls, of_rope.check_call, 40),
    "qk_norm_rope, gradients": (
        of_rope.calls_with_gradients,
        of_rope.check_gradients,
        20,
    ),
    "qk_norm_rope_pack_": (of_rope.calls_of_pack, of_rope.check_pack, 25),
    "GatedRMSNorm": (of_module.constructions, of_module.check_construction, 60),
    "GatedRMSNorm, calls": (of_module.forwards, of_module.check_forward, 40),
    "eager_rounding": (of_rounding.calls, of_rounding.check_call, 40),
}


def fuzzed(name, **options):
    calls, check, _ = FUZZED[name]

    @hypothesis.settings(**options)
    @hypothesis.given(calls())
    def run(call):
        check(call)

    return run


@pytest.mark.parametrize("name", FUZZED)
def test_calls_are_right_or_refused(name):
    """The same examples each time."""

    fuzzed(name, max_examples=FUZZED[name][2])()


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZED)
def test_very_many_calls_are_right_or_refused(name):
    examples = int(os.environ.get("OPERATOR_FUZZ_EXAMPLES", "2000"))
    seed = int(os.environ.get("OPERATOR_FUZZ_SEED", "0"))
    run = fuzzed(name, derandomize=False, max_examples=examples)
    hypothesis.seed(seed)(run)()


# What was found.


def test_a_nested_tensor_is_refused_by_name():
    """Its layout says strided, and PyTorch knows no sizes of it."""

    nested = torch.nested.nested_tensor([torch.ones(4), torch.ones(2)])

    for keywords in ({"weight": nested}, {"gate": nested}, {"bias": nested}):
        with pytest.raises(TypeError, match=f"`{[*keywords][0]}`.*nested"):
            gated_rms_norm(torch.ones(2, 8), **keywords)

    with pytest.raises(TypeError, match="`input`.*nested"):
        GatedRMSNorm(8, elementwise_affine=False)(nested)

    with pytest.raises(TypeError, match="`weight`.*nested"):
        qk_norm_rope(torch.ones(1, 1, 1, 2), nested, torch.ones(1, 1) + 0j)


def test_out_is_returned_whatever_the_classes_of_the_arguments():
    """PyTorch's `copy_` returns a tensor of the class of what is copied."""

    weight = torch.ones(8).as_subclass(fuzz.Subclass)
    input, out = torch.ones(2, 8), torch.empty(2, 8)
    assert gated_rms_norm(input, weight, out=out) is out
    heads, out = torch.ones(1, 2, 1, 8), torch.empty(1, 2, 1, 8)
    assert qk_norm_rope(heads, weight, torch.ones(2, 4) + 0j, out=out) is out


@pytest.mark.parametrize("name", ["input", "weight", "gate", "bias"])
def test_what_cannot_be_saved_for_a_backward_pass_is_refused_by_name(name):
    """Tensors of inference mode, where autograd records the call; elsewhere they are taken."""

    tensors = {"input": torch.ones(2, 8), "gate": torch.ones(2, 8)}
    tensors |= {"weight": torch.ones(8), "bias": torch.ones(8)}

    for other in tensors:
        tensors[other].requires_grad_(other != name)

    with torch.inference_mode():
        tensors[name] = tensors[name].clone()

    with pytest.raises(ValueError, match=f"`{name}` was made in inference mode"):
        gated_rms_norm(**tensors)

    with torch.no_grad():
        assert gated_rms_norm(**tensors).shape == (2, 8)


def test_a_table_of_inference_mode_is_refused_by_name():
    with torch.inference_mode():
        rope = torch.ones(2, 4) + 0j

    heads = torch.ones(1, 2, 1, 8, requires_grad=True)

    with pytest.raises(ValueError, match="`rope` was made in inference mode"):
        qk_norm_rope(heads, torch.ones(8), rope)

    with torch.no_grad():
        assert qk_norm_rope(heads, torch.ones(8), rope).shape == heads.shape


def test_a_gradient_at_an_odd_offset_is_taken():
    """PyTorch refuses to see pairs in it, as complex numbers."""

    heads = torch.randn(1, 2, 1, 8, requires_grad=True)
    result = qk_norm_rope(heads, torch.ones(8), torch.ones(2, 4) + 0j)
    gradient = torch.randn(17)[1:].view(result.shape)
    (expected,) = torch.autograd.grad(
        result, heads, gradient.clone(), retain_graph=True
    )
    (actual,) = torch.autograd.grad(result, heads, gradient)
    assert torch.equal(actual, expected)


NO_DEVICES = ["nowhere", 1.5, [], object(), "privateuseone", -7, 2**70]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("device", NO_DEVICES)
def test_a_device_that_there_is_not_is_refused_by_name(device, affine):
    with pytest.raises((TypeError, ValueError), match="`device`"):
        GatedRMSNorm(8, device=device, elementwise_affine=affine)


@pytest.mark.parametrize("device", [*NO_DEVICES, "meta"])
def test_no_rounding_is_found_out_on_a_device_that_there_is_not(device):
    with pytest.raises((TypeError, ValueError), match="`device`"):
        eager_rounding(device=device)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_a_group_size_may_be_narrower_than_the_number_of_columns(kind):
    """NumPy 2 divides by no scalar whose type does not hold the dividend."""

    input = torch.randn(2, 512)
    expected = gated_rms_norm(input, group_size=64)
    assert torch.equal(gated_rms_norm(input, group_size=kind(64)), expected)

    with pytest.raises(ValueError, match="`group_size`.*512"):
        gated_rms_norm(input, group_size=kind(0))


@pytest.mark.parametrize(
    "name", ["eps", "group_size", "norm_before_gate", "weight_offset", "activation"]
)
def test_an_option_that_has_no_hash_is_refused_by_name(name):
    """Whatever it raises instead."""

    for option in ([1], np.timedelta64(1), np.timedelta64(1, "s"), {}):
        with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
            gated_rms_norm(torch.ones(2, 8), **{name: option})


@pytest.mark.parametrize("is_recorded", [True, False])
def test_an_out_of_inference_mode_is_refused_by_name(is_recorded):
    """PyTorch writes it in inference mode only, and names no argument."""

    input, heads, rope = torch.ones(2, 8), torch.ones(1, 2, 1, 8), torch.ones(2, 4) + 0j

    with torch.inference_mode():
        out, out_of_heads = torch.empty(2, 8), torch.empty(1, 2, 1, 8)
        assert gated_rms_norm(input, out=out) is out
        assert qk_norm_rope(heads, torch.ones(8), rope, out=out_of_heads) is (
            out_of_heads
        )
        out.fill_(fuzz.CANARY)

    with torch.set_grad_enabled(is_recorded):
        with pytest.raises(ValueError, match="`out` is an inference tensor"):
            gated_rms_norm(input, out=out)

        with pytest.raises(ValueError, match="`out` is an inference tensor"):
            qk_norm_rope(heads, torch.ones(8), rope, out=out_of_heads)

    assert (out == fuzz.CANARY).all()


@pytest.mark.parametrize("name", ["input", "weight", "gate", "bias", "out"])
@pytest.mark.parametrize(
    "lazy",
    [
        torch.nn.parameter.UninitializedParameter,
        torch.nn.parameter.UninitializedBuffer,
    ],
)
def test_a_parameter_of_a_lazy_module_is_refused_by_name(name, lazy):
    """It has no shape before its module runs."""

    arguments = {"input": torch.ones(2, 8)} | {name: lazy()}

    with pytest.raises(ValueError, match=f"`{name}` must have data.*Uninitialized"):
        gated_rms_norm(**arguments)

    if name == "input":
        with pytest.raises(ValueError, match="`input` must have data"):
            GatedRMSNorm(8, elementwise_affine=False)(lazy())


def test_rows_whose_offsets_pass_32_bits_are_refused_by_name():
    """However dense they are: there is nothing to copy that would help."""

    def on_meta(*shape, dtype=torch.float16):
        return torch.empty(shape, dtype=dtype, device="meta")

    for rows in (0, 1):
        with pytest.raises(ValueError, match="`input`.*2147483647 columns"):
            gated_rms_norm(on_meta(rows, 2**31))

        assert gated_rms_norm(on_meta(rows, 2**31 - 1)).shape == (rows, 2**31 - 1)

    for size in (2**31, 2**62, 10**30):
        with pytest.raises(ValueError, match="`hidden_size`.*2147483647"):
            GatedRMSNorm(size)

    heads = on_meta(1, 1, 2**25, 128)
    table = on_meta(1, 64, dtype=torch.complex64)

    with pytest.raises(ValueError, match="`input`.*2147483647 elements"):
        qk_norm_rope(heads, on_meta(128), table)


def test_as_many_dimensions_as_pytorch_takes():
    """Groups are one more."""

    row = torch.randn(8)
    most = row.view(*(1,) * 62, 8)
    assert torch.equal(gated_rms_norm(most).flatten(), gated_rms_norm(row))

    with pytest.raises(ValueError, match="`input`.*63 dimensions.*64"):
        gated_rms_norm(most[None])


# A requirement that cannot fail says nothing.


def run(function, *, errors=(), **arguments):
    call = fuzz.Call(arguments, dict(errors), is_unsure=False)

    return fuzz.run(function, call, lambda result: None, written=("out",))


def test_memory_beside_the_output_is_looked_at():
    buffer = torch.zeros(8)

    def writes_too_much(input, out):
        buffer.fill_(1)

    with pytest.raises(AssertionError, match="memory"):
        run(writes_too_much, input=torch.ones(4), out=buffer[2:4])

    with pytest.raises(AssertionError, match="memory"):
        run(lambda input: input.zero_(), input=torch.ones(4))

    for hide in (fuzz._Wrapper, fuzz._Disguised):
        with pytest.raises(AssertionError, match="memory"):
            run(lambda input: hidden.zero_(), input=hide(hidden := torch.ones(4)))

    # What is written may be a wrapper.
    assert run(lambda out: out.zero_(), out=fuzz._Wrapper(torch.ones(4))) == "computed"


@pytest.mark.parametrize("are_heads", [False, True])
def test_memory_beside_rows_far_apart_is_looked_at(are_heads):
    """Where there is too much to look at all of it."""

    out = fuzz.embedded((3, 4), torch.float16, "far apart")
    assert out.stride(0) > 2**30
    out = out.view(3, 2, 2)[None] if are_heads else out
    run(lambda out: out.fill_(1), out=out)

    def writes_beside(out):
        out.as_strided((1,), (1,), out.storage_offset() + 2 * (2**30 + 16) + 4).fill_(1)

    with pytest.raises(AssertionError, match="memory"):
        run(writes_beside, out=out)

    with pytest.raises(AssertionError, match="memory"):
        run(lambda input: input.fill_(2), input=out)


def test_errors_that_are_not_documented_are_noticed():
    def raising(error):
        def function(input):
            raise error

        return function

    errors = {"input": TypeError}
    assert run(raising(TypeError("`input` is")), errors=errors, input=3) == "TypeError"

    for error in (
        AttributeError("`input`"),
        TypeError("internal"),
        TypeError("`gate`"),
        ValueError("`input`"),
    ):
        with pytest.raises(AssertionError):
            run(raising(error), errors=errors, input=3)

    with pytest.raises(AssertionError, match="refused though right"):
        run(raising(TypeError("`input`")), input=torch.ones(2))

    with pytest.raises(AssertionError, match="not refused"):
        run(lambda input: None, errors=errors, input=3)

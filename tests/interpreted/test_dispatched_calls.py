"""Tensors that PyTorch's dispatcher takes apart: without memory of their own, in a mode, in a transform of `torch.func`."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from wrapped import Wrapper

from ntops_ext.torch import gated_rms_norm, qk_norm_rope, qk_norm_rope_pack_

OPERATORS = ["gated_rms_norm", "qk_norm_rope"]


class Seen(TorchDispatchMode):
    """Notes the operators of this library that pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ntops_ext":
            self.names.append(function.name())

        return function(*args, **(kwargs or {}))


def call(name, *leading):
    """A function of the first argument of an operator, that argument, and a function of the second, the weight."""

    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    weight = draw(4)

    if name == "gated_rms_norm":
        return gated_rms_norm, draw(*leading, 2, 4), weight, ()

    rope = torch.polar(torch.ones(2, 2), draw(2, 2))

    return qk_norm_rope, draw(*leading, 1, 2, 1, 4), weight, (rope,)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("position", [0, 1])
def test_a_wrapper_is_computed_by_what_it_wraps(name, position):
    """No kernel gets the address of a tensor that has no memory."""

    function, *tensors, others = call(name)
    expected = function(*tensors, *others)
    tensors[position] = Wrapper(tensors[position])
    result = function(*tensors, *others)

    assert type(result) is Wrapper
    assert torch.equal(result.inner, expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrapper_has_gradients(name):
    """Those of what it wraps."""

    function, input, weight, others = call(name)
    wrapped = Wrapper(input).requires_grad_()
    function(wrapped, weight, *others).sum().backward()
    input.requires_grad_()
    function(input, weight, *others).sum().backward()

    assert torch.equal(wrapped.grad.inner, input.grad)


def test_what_is_written_may_be_a_wrapper():
    """A result that was given, and the three tensors of the pack."""

    input, out = torch.randn(2, 2, 4)
    gated_rms_norm(Wrapper(input), out=Wrapper(out))

    assert torch.equal(out, gated_rms_norm(input))

    weight, rope = torch.ones(4), torch.full((2, 2), 1j)
    written = [torch.randn(1, 2, 1, 4) for _ in range(3)]
    twins = [tensor.clone() for tensor in written]
    prefix = torch.zeros(1, 0, 1, 4)
    others = weight, weight, rope, prefix, prefix
    qk_norm_rope_pack_(*map(Wrapper, written), *others)
    qk_norm_rope_pack_(*twins, *others)

    for tensor, twin in zip(written, twins, strict=True):
        assert torch.equal(tensor, twin)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_fake_tensor_gives_a_fake_one(name):
    """Of the right layout, and nothing is launched, whatever was called before."""

    function, input, weight, others = call(name)

    for _ in range(3):
        expected = function(input, weight, *others)

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (input, weight, *others)]
        result = function(*fakes)

    assert isinstance(result, FakeTensor)
    assert (result.shape, result.stride()) == (expected.shape, expected.stride())
    assert result.dtype == expected.dtype


@pytest.mark.parametrize("name", OPERATORS)
def test_a_mode_sees_the_operator(name):
    """Counters of operations and policies of checkpointing do; however often the call came before."""

    function, input, weight, others = call(name)

    for _ in range(3):
        expected = function(input, weight, *others)

    with Seen() as seen:
        result = function(input, weight, *others)

    assert seen.names == [f"ntops_ext::{name}"]
    assert torch.equal(result, expected)


def recorded(name):
    """A result of a plain call, its two leaves, and their gradients for an incoming one of ones."""

    function, input, weight, others = call(name)
    leaves = input.requires_grad_(), weight.requires_grad_()
    output = function(*leaves, *others)
    expected = torch.autograd.grad(function(*leaves, *others).sum(), leaves)

    return output, leaves, expected


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_mode_sees_the_gradients(name, create_graph):
    """Also of a call that was made outside of it."""

    output, leaves, expected = recorded(name)
    incoming = torch.ones_like(output)

    with Seen() as seen:
        gradients = torch.autograd.grad(
            output, leaves, incoming, create_graph=create_graph
        )

    assert seen.names == [f"ntops_ext::{name}_backward"]

    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, other)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("place", ["incoming", "saved"])
def test_a_wrapper_in_the_backward_pass_is_computed_by_what_it_wraps(name, place):
    """An incoming gradient of a plain call, or what a hook makes of the tensors that it saves."""

    _, _, expected = recorded(name)
    incoming = torch.ones_like(expected[0])

    if place == "incoming":
        output, leaves, _ = recorded(name)
        incoming = Wrapper(incoming)
    else:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, Wrapper):
            output, leaves, _ = recorded(name)

    gradients = torch.autograd.grad(output, leaves, incoming)

    for gradient, other in zip(gradients, expected, strict=True):
        assert type(gradient) is Wrapper
        assert torch.equal(gradient.inner, other)


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_gradients(name):
    """Of a call that was made outside of the mode: nothing is launched."""

    output, leaves, _ = recorded(name)

    with FakeTensorMode(allow_non_fake_inputs=True):
        gradients = torch.autograd.grad(output, leaves, torch.ones(output.shape))

    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert isinstance(gradient, FakeTensor)
        assert gradient.shape == leaf.shape
        assert gradient.is_contiguous()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_of_plain_tensors_does_not_go_through_the_dispatcher(name):
    """It calls no custom operator, which would cost more than the launch; in a mode it does, however often it came before."""

    function, input, weight, others = call(name)

    for _ in range(3):
        assert operators_called(function, input, weight, *others) == set()

        with Seen():
            called = operators_called(function, input, weight, *others)

        assert called == {f"ntops_ext::{name}"}


def operators_called(function, *arguments):
    """The names of this library's custom operators that PyTorch's profiler sees during a call."""

    activities = [torch.profiler.ProfilerActivity.CPU]

    with torch.profiler.profile(activities=activities) as profile:
        function(*arguments)

    return {
        event.name for event in profile.events() if event.name.startswith("ntops_ext::")
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_torch_func_are_refused(name):
    """PyTorch has none of custom operators; the message says what has them."""

    function, input, weight, others = call(name)

    with pytest.raises(NotImplementedError, match=f"`{name}`.*torch.func.*autograd"):
        torch.func.grad(lambda one: function(one, weight, *others).sum())(input)


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_wrong_is_refused_in_a_mode(name):
    """With the messages of any other call."""

    function, _, weight, others = call(name)

    for wrong in (None, [1.0]):
        with Seen(), pytest.raises(TypeError, match="`input` must be a tensor"):
            function(wrong, weight, *others)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(name):
    """One call after another."""

    function, inputs, weight, others = call(name, 2)
    result = torch.func.vmap(lambda input: function(input, weight, *others))(inputs)
    expected = torch.stack([function(input, weight, *others) for input in inputs])

    assert torch.equal(result, expected)


def test_vmap_of_what_writes_is_refused():
    """By name, before anything is written: PyTorch has no rule for it."""

    inputs, outs = torch.randn(3, 2, 8), torch.full((3, 2, 8), 7.5)

    with pytest.raises(NotImplementedError, match="`gated_rms_norm` cannot write"):
        torch.func.vmap(lambda input, out: gated_rms_norm(input, out=out))(inputs, outs)

    heads, empty = torch.randn(3, 1, 2, 1, 8), torch.empty(3, 1, 0, 1, 8)
    weight, rope = torch.ones(8), torch.ones(2, 4, dtype=torch.complex64)

    with pytest.raises(NotImplementedError, match="`qk_norm_rope_pack_` cannot write"):
        torch.func.vmap(
            lambda q, prefix: qk_norm_rope_pack_(
                q, q.clone(), q.clone(), weight, weight, rope, prefix, prefix
            )
        )(heads, empty)

    assert (outs == 7.5).all()


@pytest.mark.parametrize("name", OPERATORS)
def test_batched_gradients_are_refused(name):
    """One at a time they are computed; several at once have no memory of their own."""

    function, input, weight, others = call(name)
    input.requires_grad_()
    output = function(input, weight, *others)
    gradients = torch.ones(2, *output.shape)

    with pytest.raises(NotImplementedError, match=f"`{name}` are computed one at a"):
        torch.autograd.grad(output, input, gradients, is_grads_batched=True)


def test_a_conjugated_table_is_named():
    """Also where the call is a custom operator."""

    table = torch.ones(2, 4, dtype=torch.complex64).conj()

    with Seen(), pytest.raises(ValueError, match="`rope`.*resolve_conj"):
        qk_norm_rope(torch.randn(1, 2, 1, 8), torch.ones(8), table)


@pytest.mark.parametrize("name", OPERATORS)
def test_tangents_of_others_do_not_matter_in_a_mode(name):
    """The level of forward mode is one for all tensors of a thread, with tangents or without."""

    function, input, weight, others = call(name)
    expected = function(input, weight, *others)

    with forward_ad.dual_level(), Seen():
        result = function(input, weight, *others)

    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("position", [0, 1])
def test_tangents_are_refused_in_a_mode(name, position):
    """Custom operators have none; what is to be written stays what it was."""

    function, *tensors, others = call(name)
    out = torch.full_like(tensors[0], 7.0)

    with forward_ad.dual_level():
        tensors[position] = forward_ad.make_dual(
            tensors[position], torch.ones_like(tensors[position])
        )

        with Seen() as seen:
            for keywords in ({}, {"out": out}):
                with pytest.raises(NotImplementedError, match=f"{name}.*tangent"):
                    function(*tensors, *others, **keywords)

    assert not seen.names
    assert torch.equal(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("name", OPERATORS)
def test_linearize_is_refused(name):
    function, input, weight, others = call(name)

    with pytest.raises(NotImplementedError, match=f"{name}.*tangent"):
        torch.func.linearize(lambda weight: function(input, weight, *others), weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_jit_trace_records_the_operator(name):
    """It sees no launch: a graph without the operator would return what an allocation held."""

    function, input, weight, others = call(name)

    for _ in range(3):
        function(input, weight, *others)

    traced = torch.jit.trace(
        lambda input: function(input, weight, *others), (input,), check_trace=False
    )

    assert f"ntops_ext::{name}" in str(traced.graph)
    assert torch.equal(traced(2 * input), function(2 * input, weight, *others))

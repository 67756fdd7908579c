"""What the operators promise under `torch.compile`, for the modules that run it: on a CPU, under the interpreter, on a GPU.

Each gives the fixtures `device` and `backend`.
"""

import pytest
import torch
from comparison import assert_equal_bits
from gated_rms_norm_calls import MODES, make_call

from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import (
    _gated_rms_norm_backward,
    gated_rms_norm,
    qk_norm_rope,
    qk_norm_rope_pack_,
)

each_tracing = pytest.mark.parametrize(
    "dynamic", [False, True], ids=["static", "dynamic"]
)


# Every mode with known sizes, and one with unknown ones: a trace takes a second.
each_mode_and_tracing = pytest.mark.parametrize(
    "mode, dynamic",
    [*((mode, False) for mode in MODES), ("gate_first-silu", True)],
    ids=[*(f"{mode}-static" for mode in MODES), "gate_first-silu-dynamic"],
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


@pytest.fixture
def compiled(backend):
    """`torch.compile` without graph breaks."""

    def compile(function, **options):
        return torch.compile(function, backend=backend, fullgraph=True, **options)

    return compile


def heads_and_table(device, tokens=6, heads=2, width=8, dtype=torch.float32):
    """Heads, a weight and a table for `qk_norm_rope`."""

    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device)

    return (
        draw(1, tokens, heads, width).to(dtype),
        draw(width).to(dtype),
        torch.polar(
            torch.ones(tokens, width // 2, device=device), draw(tokens, width // 2)
        ),
    )


def pack_arguments(device, tokens=6, prefix=2, packed=False, **options):
    """Arguments of `qk_norm_rope_pack_`; `packed` makes q, k_out and v_out views of one tensor."""

    heads, weight, rope = heads_and_table(device, tokens=prefix + tokens, **options)
    buffer = torch.stack([heads, 2 * heads, 3 * heads], 2)
    q, k_out, v_out = buffer.unbind(2)

    if not packed:
        q, k_out, v_out = (tensor.clone() for tensor in (q, k_out, v_out))

    prefixes = torch.full_like(heads[:, :prefix], 7.0)

    return [
        q[:, prefix:],
        k_out,
        v_out,
        weight,
        weight,
        rope[prefix:],
        prefixes,
        prefixes,
    ]


@each_mode_and_tracing
def test_a_compiled_call_has_the_bits_of_an_eager_one(device, compiled, mode, dynamic):
    """Case C2: whether sizes and scalars are known or not."""

    call = make_call(4, 3, 8, mode=mode, bias=True, group_size=4, device=device)
    function = compiled(
        lambda tensors: gated_rms_norm(**tensors, **call.options), dynamic=dynamic
    )

    assert_equal_bits(function(call.tensors), call.run())


def test_scalars_that_vary(device, compiled):
    """A value is part of a graph; another one makes another graph, and is not mistaken."""

    call = make_call(4, 8, device=device)
    function = compiled(lambda eps: gated_rms_norm(**call.tensors, eps=eps))

    for eps in (1e-5, 1.0, 4.0, 1):
        assert_equal_bits(function(eps), call.run(eps=eps))


def test_a_slice_of_a_projection_stays_where_it_is(device, compiled):
    """The layouts of an eager call get to the operator, between other operations too."""

    def function(projection):
        gate = projection[:, 8:16].view(4, 2, 4)

        return gated_rms_norm(projection[:, :8].view(4, 2, 4).mul(2), gate=gate) + 1

    projection = torch.randn(4, 24, device=device)

    torch.testing.assert_close(compiled(function)(projection), function(projection))


def test_a_module_whose_first_call_is_compiled(device, compiled):
    """Case A2: nothing is made by an eager call that a compiled one needs."""

    for activation in ("silu", "swish", "sigmoid"):
        norm = GatedRMSNorm(8, activation=activation, device=device)
        input, gate = torch.randn(2, 4, 8, device=device)
        twin = GatedRMSNorm(8, activation=activation, device=device)

        with torch.no_grad():
            assert_equal_bits(compiled(norm)(input, gate), twin(input, gate))


# One graph for all numbers of rows.


class Model(torch.nn.Module):
    """A norm between two matrices."""

    def __init__(self, device):
        super().__init__()
        self.before = torch.nn.Linear(8, 16, device=device)
        self.norm = GatedRMSNorm(8, group_size=4, device=device)
        self.after = torch.nn.Linear(8, 8, device=device)

    def forward(self, input):
        scan, gate = self.before(input).chunk(2, -1)

        return self.after(self.norm(scan, gate))


@pytest.mark.parametrize("is_training", [False, True], ids=["no_grad", "training"])
def test_a_model_is_traced_once_for_all_numbers_of_rows(device, compiled, is_training):
    """Where they are marked as dynamic there is one graph."""

    model = Model(device)
    function = compiled(model)
    rows_and_options = [(3, False), *((rows, True) for rows in (2, 5, 16, 33, 257))]

    for rows, error_on_recompile in rows_and_options:
        input = torch.randn(rows, 8, device=device)
        torch._dynamo.mark_dynamic(input, 0)

        with (
            torch.set_grad_enabled(is_training),
            torch._dynamo.config.patch(error_on_recompile=error_on_recompile),
        ):
            result = function(input)
            torch.testing.assert_close(result, model(input))

            if is_training:
                result.sum().backward()


def test_a_model_is_traced_twice_without_a_mark(device, compiled):
    """PyTorch's default: what has varied once may vary."""

    model = Model(device)
    function = compiled(model)

    for number, rows in enumerate((3, 5, 2, 16, 33, 257)):
        input = torch.randn(rows, 8, device=device)

        with (
            torch.no_grad(),
            torch._dynamo.config.patch(error_on_recompile=number > 1),
        ):
            torch.testing.assert_close(function(input), model(input))


def test_rope_is_traced_once_for_all_numbers_of_tokens(device, compiled):
    """The same for the rotation."""

    function = compiled(qk_norm_rope)

    for number, tokens in enumerate((3, 5, 2, 16, 33)):
        input, weight, rope = heads_and_table(device, tokens)

        for tensor, dim in ((input, 1), (rope, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)

        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            assert_equal_bits(
                function(input, weight, rope), qk_norm_rope(input, weight, rope)
            )


def test_pack_is_traced_twice_for_all_numbers_of_tokens(device, compiled):
    """The same for the pack, where PyTorch finds out what varies."""

    function = compiled(qk_norm_rope_pack_)

    for number, (tokens, prefix) in enumerate(((3, 4), (5, 6), (2, 3), (16, 5))):
        arguments = pack_arguments(device, tokens, prefix)
        twins = [tensor.clone() for tensor in arguments]

        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            function(*arguments)

        qk_norm_rope_pack_(*twins)

        for tensor, twin in zip(arguments[:3], twins[:3], strict=True):
            assert_equal_bits(tensor, twin)


# What is written.


@each_tracing
@pytest.mark.parametrize("is_in_place", [False, True], ids=["out", "in_place"])
def test_a_given_result_is_written(device, compiled, is_in_place, dynamic):
    """And returned; what is computed before and after it is in order."""

    def function(input, out):
        out.add_(1)
        result = gated_rms_norm(input, out=out)
        out.mul_(2)

        return result, out.sum()

    input = torch.randn(4, 8, device=device)
    out = input if is_in_place else torch.zeros(4, 8, device=device)
    twin_input = input.clone()
    twin_out = twin_input if is_in_place else out.clone()
    result, total = compiled(function, dynamic=dynamic)(input, out)
    twin_result, twin_total = function(twin_input, twin_out)

    assert_equal_bits(out, twin_out)
    assert_equal_bits(result, twin_result)
    assert_equal_bits(total, twin_total)


def test_a_given_result_of_rope_is_written(device, compiled):
    """In place too."""

    input, weight, rope = heads_and_table(device)
    expected = qk_norm_rope(input, weight, rope)
    out = torch.empty_like(input)
    function = compiled(lambda input, out: qk_norm_rope(input, weight, rope, out=out))

    assert_equal_bits(function(input, out), expected)
    assert_equal_bits(out, expected)

    function(input, input)

    assert_equal_bits(input, expected)


@pytest.mark.parametrize(
    "packed, sources, prefixes, dynamic",
    [
        (packed, sources, prefixes, False)
        for packed in (False, True)
        for sources in ("in_place", "from_sources")
        for prefixes in ("copied", "kept")
    ]
    + [(True, "from_sources", "kept", True), (False, "in_place", "copied", True)],
    ids=lambda value: str(value),
)
def test_pack_writes_in_place(device, compiled, packed, sources, prefixes, dynamic):
    """Separate tensors or views of one, prefixes elsewhere or the buffers' own rows."""

    def function(q, k_out, v_out, *others):
        if prefixes == "kept":
            others = [*others[:3], k_out[:, :2], v_out[:, :2], *others[5:]]

        q, k_out, v_out = qk_norm_rope_pack_(q, k_out, v_out, *others)

        return q + 1, k_out, v_out

    def arguments():
        made = pack_arguments(device, packed=packed)

        if sources == "from_sources":
            made += [torch.full_like(made[1][:, 2:], value) for value in (2.0, 5.0)]

        return made

    actual, expected = arguments(), arguments()
    results = compiled(function, dynamic=dynamic)(*actual)
    twins = function(*expected)

    for tensor, twin in (
        *zip(results, twins, strict=True),
        *zip(actual, expected, strict=True),
    ):
        assert torch.equal(tensor, twin)


# Gradients.


@each_mode_and_tracing
def test_gradients_are_those_of_an_eager_call(device, compiled, mode, dynamic):
    """Of every tensor, with gates that are slices."""

    call = make_call(4, 3, 8, mode=mode, bias=True, group_size=4, device=device)
    tensors = {name: one.requires_grad_() for name, one in call.tensors.items()}
    weights = torch.randn(4, 3, 8, device=device)

    def function(tensors):
        return (gated_rms_norm(**tensors, **call.options) * weights).sum()

    expected = torch.autograd.grad(function(tensors), tensors.values())
    actual = torch.autograd.grad(
        compiled(function, dynamic=dynamic)(tensors), tensors.values()
    )

    # The definition's, on a CPU, are PyTorch's own where the call is an eager one.
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@each_tracing
def test_gradients_of_rope_are_those_of_an_eager_call(device, compiled, dynamic):
    """Of both tensors that have one, together and alone."""

    input, weight, rope = heads_and_table(device)
    weights = torch.randn(input.shape, device=device)
    function = compiled(
        lambda *tensors: (qk_norm_rope(*tensors, rope) * weights).sum(),
        dynamic=dynamic,
    )

    for input_requires_grad, weight_requires_grad in (
        (True, True),
        (False, True),
        (True, False),
    ):
        tensors = [
            input.clone().requires_grad_(input_requires_grad),
            weight.clone().requires_grad_(weight_requires_grad),
        ]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        loss = (qk_norm_rope(*tensors, rope) * weights).sum()
        expected = torch.autograd.grad(loss, wanted)
        actual = torch.autograd.grad(function(*tensors), wanted)

        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wanted", ["input", "weight", "gate", "bias"])
def test_only_the_gradients_that_are_asked_for(device, compiled, wanted, monkeypatch):
    """One tensor alone may require one, and no other is computed."""

    needs = set()
    backward = _gated_rms_norm_backward.backward

    def watch(*arguments):
        needs.add(tuple(arguments[-1]))

        return backward(*arguments)

    monkeypatch.setattr(_gated_rms_norm_backward, "backward", watch)
    call = make_call(4, 8, bias=True, device=device)
    call.tensors[wanted].requires_grad_()
    function = compiled(lambda tensors: gated_rms_norm(**tensors))
    function(call.tensors).square().sum().backward()
    actual, call.tensors[wanted].grad = call.tensors[wanted].grad, None
    call.run().square().sum().backward()

    torch.testing.assert_close(actual, call.tensors[wanted].grad)
    assert all(
        tensor.grad is None for name, tensor in call.tensors.items() if name != wanted
    )
    assert needs == {
        tuple(name == wanted for name in ("input", "weight", "gate", "bias"))
    }


# Errors.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"input": [1.0]}, "`input` must be a tensor, but is a list"),
        (
            {"input": torch.ones(4, 8, dtype=torch.int32)},
            "`input` must be of torch.float16",
        ),
        ({"input": torch.tensor(1.0)}, "`input` must have a dimension of columns"),
        ({"weight": torch.ones(7)}, "`weight` must have one element a column"),
        ({"weight": None, "weight_offset": 1.0}, "there is no `weight`"),
        ({"gate": torch.ones(8)}, "`gate` must have the shape of `input`"),
        ({"group_size": 3}, "`group_size` must be positive and divide"),
        ({"group_size": 2.0}, "`group_size` must be an int or None"),
        ({"eps": -1.0}, "`eps` must not be negative"),
        ({"eps": "1"}, "`eps` must be a number, but is a str"),
        ({"norm_before_gate": 1}, "`norm_before_gate` must be a bool"),
        ({"activation": "gelu"}, "`activation` must be one of"),
        ({"out": torch.ones(4, 7)}, "`out` must have the shape of `input`"),
    ],
)
def test_errors_say_what_they_say_eagerly(device, compiled, changes, message):
    """`torch.compile` wraps them, or leaves them; the message is there."""

    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {
            "input": torch.ones(4, 8),
            "weight": torch.ones(8),
            "gate": torch.ones(4, 8),
            **changes,
        }.items()
    }

    with pytest.raises((TypeError, ValueError)) as eager:
        gated_rms_norm(**arguments)

    assert message in str(eager.value)

    with pytest.raises(Exception) as traced:
        compiled(lambda: gated_rms_norm(**arguments))()

    assert message in str(traced.value)


def test_an_error_outside_of_a_full_graph_is_the_eager_one(device, backend):
    """Where graphs may break, tracing stops at the call, which then raises by itself."""

    function = torch.compile(
        lambda input: gated_rms_norm(input, activation="gelu"), backend=backend
    )

    with pytest.raises(ValueError, match="`activation` must be one of"):
        function(torch.ones(4, 8, device=device))


def test_overlaps_are_refused_when_a_graph_runs(device, compiled):
    """Addresses are no part of a trace: the error is the eager one, and nothing is written."""

    buffer = torch.randn(6, 8, device=device)
    before = buffer.clone()

    @compiled
    def function(gate, out):
        return qk_norm_rope_pack_(gate, *out)

    heads, k_out, v_out, *others = pack_arguments(device)

    with pytest.raises(ValueError, match="`q`.*share no memory with `k_out`"):
        function(k_out[:, 2:], [k_out, v_out, *others])

    assert_equal_bits(buffer, before)


def test_gradients_into_what_is_given_are_refused(device, compiled):
    """As they are eagerly."""

    input = torch.ones(2, 8, device=device, requires_grad=True)

    with pytest.raises(Exception, match="`out` must be None where gradients"):
        compiled(gated_rms_norm)(input, out=torch.zeros(2, 8, device=device))

    arguments = pack_arguments(device)
    arguments[3].requires_grad_()

    with pytest.raises(Exception, match="`qk_norm_rope_pack_` writes in place"):
        compiled(qk_norm_rope_pack_)(*arguments)

"""The operators on a GPU under `torch.compile`: on the device's own kernels, in CUDA graphs, and nothing beside them."""

import copy

import pytest
import torch
from comparison import assert_equal_bits
from compiled_behaviour import *  # noqa: F403
from compiled_behaviour import Model, heads_and_table, pack_arguments
from gated_rms_norm_calls import make_call
from gpu_events import gpu_events

from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import gated_rms_norm, qk_norm_rope, qk_norm_rope_pack_

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return f"cuda:{torch.cuda.current_device()}"


@pytest.fixture(scope="module")
def backend():
    """Traces as Inductor does, and generates no code, which takes seconds a graph."""

    return "aot_eager"


def cast_heads(device):
    return heads_and_table(device, tokens=64, heads=8, width=128, dtype=torch.bfloat16)


def cast_pack(device):
    return pack_arguments(
        device, tokens=64, prefix=5, heads=8, width=128, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_gives_the_bits_of_eager_calls(device, dynamic):
    """Case C2: the default backend; nothing of an operator is generated anew."""

    call = make_call(
        64, 5120, mode="gate_first-silu", dtype=torch.bfloat16, device=device
    )
    function = torch.compile(
        lambda tensors: gated_rms_norm(**tensors, **call.options),
        fullgraph=True,
        dynamic=dynamic,
    )

    assert_equal_bits(function(call.tensors), call.run())

    rope_arguments = cast_heads(device)
    function = torch.compile(qk_norm_rope, fullgraph=True, dynamic=dynamic)

    assert_equal_bits(function(*rope_arguments), qk_norm_rope(*rope_arguments))

    actual, expected = cast_pack(device), cast_pack(device)
    torch.compile(qk_norm_rope_pack_, fullgraph=True, dynamic=dynamic)(*actual)
    qk_norm_rope_pack_(*expected)

    for tensor, twin in zip(actual[:3], expected[:3], strict=True):
        assert_equal_bits(tensor, twin)


def test_a_device_that_is_not_current(compiled):
    """Case C1: the graph runs on the tensors' device."""

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    model = Model("cuda:1")
    input = torch.randn(4, 8, device="cuda:1")

    with torch.cuda.device(0), torch.no_grad():
        result = compiled(model)(input)

    torch.testing.assert_close(result, model(input))


# One kernel a call.


@pytest.fixture(params=["eager", "inductor"])
def maybe_compiled(request):
    """Calls an operator as it is, or in a graph."""

    if request.param == "eager":
        return lambda function: function

    return lambda function: torch.compile(function, fullgraph=True)


def test_gated_rms_norm_is_one_kernel(device, maybe_compiled):
    """No cast, no copy of the gate that is a slice, no fill."""

    projection = torch.randn(512, 12288, device=device).to(torch.bfloat16)
    call = make_call(
        512, 32, 128, dtype=torch.bfloat16, weight_dtype=torch.float32, device=device
    ).with_tensors(gate=projection[:, 8192:].view(512, 32, 128))
    function = maybe_compiled(lambda: gated_rms_norm(**call.tensors))
    (name,) = gpu_events(function)

    assert "gated_rms_norm" in name


def test_qk_norm_rope_is_one_kernel(device, maybe_compiled):
    """The table is not copied, nor are heads with gaps between their tokens."""

    input, weight, rope = cast_heads(device)
    padded = torch.zeros(1, 64, 9, 128, dtype=torch.bfloat16, device=device)
    padded[:, :, :8] = input
    function = maybe_compiled(lambda: qk_norm_rope(padded[:, :, :8], weight, rope))
    (name,) = gpu_events(function)

    assert "qk_norm_rope" in name


@pytest.mark.parametrize("sources", ["in_place", "from_sources"])
def test_qk_norm_rope_pack_is_one_kernel(device, maybe_compiled, sources):
    """Whichever sources are given; Inductor writes the arguments themselves."""

    arguments = cast_pack(device)

    if sources == "from_sources":
        arguments += [torch.ones_like(arguments[1][:, 5:]) for _ in range(2)]

    function = maybe_compiled(qk_norm_rope_pack_)
    (name,) = gpu_events(lambda: function(*arguments))

    assert "qk_norm_rope_pack" in name


# CUDA graphs.


def replayed(call, tensors):
    """Capture a call after a warm-up, and yield its result after replays with new contents."""

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        result = call()

    for seed in range(2):
        generator = torch.Generator(tensors[0].device).manual_seed(seed)

        for tensor in tensors:
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator, device=tensor.device)
            )

        graph.replay()
        torch.cuda.synchronize()

        yield result


def test_rope_is_replayed_with_new_contents(device):
    """A graph computes from what its inputs hold when it is replayed."""

    input, weight, rope = cast_heads(device)

    for result in replayed(lambda: qk_norm_rope(input, weight, rope), [input, weight]):
        assert_equal_bits(result, qk_norm_rope(input, weight, rope))


def test_training_is_replayed_with_new_contents(device):
    """Forward and backward in one graph, as for a captured training step."""

    norm = GatedRMSNorm(1024, norm_before_gate=False, device=device)
    input, gate = (
        torch.randn(64, 1024, device=device, requires_grad=True) for _ in range(2)
    )
    parameters = [input, gate, norm.weight]

    def step():
        return torch.autograd.grad(norm(input, gate).square().sum(), parameters)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))

    with torch.cuda.stream(stream):
        step()

    torch.cuda.current_stream(device).wait_stream(stream)
    contents = [tensor.detach() for tensor in parameters]

    for gradients in replayed(step, contents):
        for actual, expected in zip(gradients, step(), strict=True):
            torch.testing.assert_close(actual, expected)


def reduce_overhead(function):
    return torch.compile(function, fullgraph=True, mode="reduce-overhead")


def test_reduce_overhead_of_gated_rms_norm(device):
    """PyTorch's own CUDA graphs: warm-up, capture and replays give the bits of eager calls."""

    call = make_call(33, 5120, dtype=torch.bfloat16, device=device)
    function = reduce_overhead(lambda tensors: gated_rms_norm(**tensors) * 2)

    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = make_call(
            33, 5120, dtype=torch.bfloat16, device=device, seed=seed
        ).tensors

        assert_equal_bits(function(tensors), call.with_tensors(**tensors).run() * 2)


def test_reduce_overhead_of_rope_and_pack(device):
    """Of the rotation, and of the pack, which writes within the graph."""

    rope_arguments = cast_heads(device)
    function = reduce_overhead(qk_norm_rope)

    def pack(q, k_out, v_out, *others):
        return qk_norm_rope_pack_(q + 0, k_out + 0, v_out + 0, *others)

    packing = reduce_overhead(pack)
    arguments = cast_pack(device)

    for number in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        rope_arguments[0].add_(number)

        assert_equal_bits(function(*rope_arguments), qk_norm_rope(*rope_arguments))

        arguments[0].add_(number)
        torch.compiler.cudagraph_mark_step_begin()

        for tensor, twin in zip(packing(*arguments), pack(*arguments), strict=True):
            assert_equal_bits(tensor, twin)


def test_reduce_overhead_of_training(device):
    """A module in train mode between two matrices, for some steps."""

    model = Model(device)
    twin = copy.deepcopy(model)
    function = reduce_overhead(model)

    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        input = torch.randn(64, 8, device=device)

        for one, run in ((model, function), (twin, twin)):
            one.zero_grad()
            run(input).square().sum().backward()

        for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad)

"""The operators under `torch.compile` and `torch.export`, on CPU tensors: one operator in the graph, real layouts, one
graph for all numbers of rows, what is written, gradients, and errors.
"""

import shutil

import pytest
import torch
import torch._dynamo.testing
from comparison import assert_equal_bits
from compiled_behaviour import *  # noqa: F403
from compiled_behaviour import pack_arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import ntops_ext.torch
from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import gated_rms_norm, qk_norm_rope, qk_norm_rope_pack_

OPERATORS = torch.ops.ntops_ext

needs_inductor = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor generates C++ for CPU tensors"
)


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module")
def backend():
    """Traces, functionalises and decomposes as every backend does, and generates no code."""

    return "aot_eager"


def requiring_grad(arguments):
    return tuple(
        argument.detach().clone().requires_grad_()
        if isinstance(argument, torch.Tensor) and argument.dtype.is_floating_point
        else argument
        for argument in arguments
    )


def gated_arguments():
    input, gate = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.ones(8), torch.zeros(8)

    return {
        "all": (input, weight, gate, bias, 1e-5, 4, False, "silu", 1.0),
        "least": (input, None, None, None, 1e-5, 8, True, "silu", 0.0),
        "strided": (input.t().contiguous().t(), weight, gate.expand(4, 8), None, 1e-5)
        + (8, True, "sigmoid", 0.0),
        "no_rows": (input[:0], weight, gate[:0], None, 1e-5, 8, True, "silu", 0.0),
    }


def samples():
    """Name -> a custom operator and arguments for it."""

    found = {}

    for name, arguments in gated_arguments().items():
        grad_output = torch.ones_like(arguments[0])
        needs = [argument is not None for argument in arguments[:4]]
        found[f"gated-{name}"] = OPERATORS.gated_rms_norm, arguments
        found[f"gated_out-{name}"] = (
            OPERATORS.gated_rms_norm_out,
            (*arguments, torch.empty(arguments[0].shape)),
        )
        found[f"gated_backward-{name}"] = (
            OPERATORS.gated_rms_norm_backward,
            (grad_output, *arguments, needs),
        )

    found["gated-gradients"] = (
        OPERATORS.gated_rms_norm,
        requiring_grad(gated_arguments()["all"]),
    )
    heads = torch.randn(1, 6, 2, 4, generator=torch.Generator().manual_seed(0))
    # The table, as real numbers: turns of a quarter.
    weight, rope = torch.ones(4), torch.tensor([0.0, 1.0]).expand(6, 2, 2).clone()
    found["rope"] = OPERATORS.qk_norm_rope, (heads, weight, rope, 1e-6)
    found["rope-gradients"] = (
        OPERATORS.qk_norm_rope,
        requiring_grad((heads, weight))
        + (
            rope,
            1e-6,
        ),
    )
    found["rope_backward"] = (
        OPERATORS.qk_norm_rope_backward,
        (torch.ones_like(heads), heads, weight, rope, 1e-6, [True, True]),
    )
    found["rope_out"] = (
        OPERATORS.qk_norm_rope_out,
        (heads, weight, rope, 1e-6, torch.empty_like(heads)),
    )
    k_out, v_out, prefix = (torch.zeros(1, size, 1, 4) for size in (8, 8, 2))
    source = heads[:, :, :1].contiguous()

    for name, sources in {
        "in_place": (None, None),
        "from_k": (source, None),
        "from_k_and_v": (source, source),
    }.items():
        found[f"pack-{name}"] = (
            OPERATORS.qk_norm_rope_pack,
            (heads, k_out, v_out, weight, weight, rope, prefix, prefix, *sources, 1e-6),
        )

    return found


SAMPLES = samples()


@pytest.mark.parametrize("name", SAMPLES)
def test_custom_operators_keep_pytorchs_rules(name):
    """Schemas tell what is written, fakes have the real layouts, gradients are registered."""

    operator, arguments = SAMPLES[name]
    opcheck(operator, arguments)


def test_each_custom_operator_has_a_sample():
    """So that the rules are checked for all."""

    names = {
        qualified.removeprefix("ntops_ext::").partition(".")[0]
        for qualified in torch._C._dispatch_get_all_op_names()
        if qualified.startswith("ntops_ext::")
    }

    assert names == {operator.__name__ for operator, _ in SAMPLES.values()}


@pytest.mark.parametrize("name", SAMPLES)
def test_inductor_hands_over_the_strides_of_eager_code(name):
    """It chooses layouts for operators that do not say otherwise; which, depends on its release."""

    operator, _ = SAMPLES[name]
    exact = getattr(
        torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order
    )

    assert exact in operator.default.tags


LAYOUTS = {
    "dense": lambda: torch.empty(17, 2, 4, 128),
    "transposed": lambda: torch.empty(17, 2, 4, 128).transpose(0, 1),
    "expanded": lambda: torch.empty(1, 2, 4, 128).expand(17, 2, 4, 128),
    "column_slice": lambda: torch.empty(17, 2, 4, 300)[..., 100:228],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_have_the_strides_of_results(layout):
    """Case C3: whatever the strides of the input, a result is contiguous, in a trace too."""

    input = LAYOUTS[layout]()
    real = gated_rms_norm(input)

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = OPERATORS.gated_rms_norm(
            mode.from_tensor(input), None, None, None, 1e-5, 128, True, "silu", 0.0
        )

    assert (fake.shape, fake.stride()) == (real.shape, real.stride())
    assert real.is_contiguous()


@pytest.mark.parametrize("layout", ["dense", "transposed"])
def test_fakes_of_rope_have_the_strides_of_results(layout):
    """The same for the rotation."""

    input = LAYOUTS[layout]()
    weight = torch.ones(128)
    rope = torch.ones(input.shape[1], 64, dtype=torch.complex64)
    real = qk_norm_rope(input, weight, rope)
    tensors = (input, weight, torch.view_as_real(rope))

    with FakeTensorMode() as mode:
        fake = OPERATORS.qk_norm_rope(*map(mode.from_tensor, tensors), 1e-6)

    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


# What is traced.


def graphs_of(function, *arguments, **options):
    """The graphs that Dynamo makes of a call, and how often each operator is in them."""

    backend = torch._dynamo.testing.EagerAndRecordGraphs()
    torch.compile(function, backend=backend, fullgraph=True, **options)(*arguments)

    return [
        [node.target for node in graph.graph.nodes if node.op == "call_function"]
        for graph in backend.graphs
    ]


def test_a_call_is_one_operator_in_the_graph():
    """Its checks leave nothing behind; the table of a rotation is seen as real numbers."""

    input = torch.ones(4, 8)

    assert graphs_of(gated_rms_norm, input) == [[OPERATORS.gated_rms_norm.default]]

    heads, weight, rope = torch.ones(1, 6, 2, 4), torch.ones(4), torch.full((6, 2), 1j)

    assert graphs_of(qk_norm_rope, heads, weight, rope) == [
        [torch.view_as_real, OPERATORS.qk_norm_rope.default]
    ]

    k_out, v_out, prefix = (torch.zeros(1, size, 1, 4) for size in (8, 8, 2))

    assert graphs_of(
        qk_norm_rope_pack_, heads, k_out, v_out, weight, weight, rope, prefix, prefix
    ) == [[torch.view_as_real, OPERATORS.qk_norm_rope_pack.default]]


def test_an_exported_module_has_the_operator():
    """`torch.export` keeps it whole, for any number of rows."""

    norm = GatedRMSNorm(8, activation="sigmoid")
    rows = torch.export.Dim("rows", min=2)
    input, gate = torch.randn(2, 4, 8)
    program = torch.export.export(
        norm, (input, gate), dynamic_shapes=({0: rows}, {0: rows})
    )
    targets = [node.target for node in program.graph.nodes]

    assert targets.count(OPERATORS.gated_rms_norm.default) == 1

    input, gate = torch.randn(2, 33, 8)

    assert_equal_bits(program.module()(input, gate), norm(input, gate))


@needs_inductor
def test_inductor():
    """The default backend, between operations that it generates, and its gradients."""

    def function(input, gate):
        return norm(input * 2, gate).square().sum()

    norm = GatedRMSNorm(8, norm_before_gate=False)
    projection = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    input, gate = (
        projection[:, start : start + 8].detach().requires_grad_() for start in (0, 16)
    )
    expected = torch.autograd.grad(function(input, gate), [input, gate, norm.weight])
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    actual = torch.autograd.grad(compiled(input, gate), [input, gate, norm.weight])

    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@needs_inductor
def test_inductor_packs_in_place():
    """Views of one tensor and prefixes that are its own rows: what is complex is no hindrance."""

    def function(q, k_out, v_out, *others):
        prefixes = k_out[:, :2], v_out[:, :2]

        return qk_norm_rope_pack_(q, k_out, v_out, *others[:3], *prefixes)[0] + 1

    actual, expected = (pack_arguments("cpu", packed=True) for _ in range(2))
    result = torch.compile(function, fullgraph=True)(*actual)

    assert_equal_bits(result, function(*expected))

    for tensor, twin in zip(actual[:3], expected[:3], strict=True):
        assert_equal_bits(tensor, twin)


@pytest.mark.slow
@needs_inductor
def test_inductor_keeps_apart_what_is_written():
    """Results that are allocated in the graph, a clone of what is written, and views from outside of one buffer."""

    def function(input, weight, first, second):
        clone = input[1:].clone()
        gated_rms_norm(clone, weight, out=clone)
        one, other = torch.empty_like(input), torch.empty_like(input)
        gated_rms_norm(input, weight, out=one)
        gated_rms_norm(input, weight, weight_offset=1.0, out=other)
        columns = torch.tanh(input)
        gated_rms_norm(columns[:, :4], out=columns[:, :4])
        gated_rms_norm(first, weight, out=first)
        gated_rms_norm(first, weight, out=second)

        return clone, one, other, columns, first + second

    generator = torch.Generator().manual_seed(0)
    input, weight = torch.randn(5, 8, generator=generator), torch.ones(8)
    buffers = [torch.arange(32.0).view(2, 2, 8) for _ in range(2)]
    torch._dynamo.reset()
    actual = torch.compile(function, fullgraph=True)(input, weight, *buffers[0])
    expected = function(input, weight, *buffers[1])

    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)

    torch.testing.assert_close(buffers[0], buffers[1])


def test_one_memory_for_two_arguments_is_refused_in_a_graph():
    """Where a compiler drops the clone of what is written, the operator gets one memory twice: no wrong result."""

    rows, weight = torch.randn(4, 8), torch.ones(8)
    options = 1e-5, 8, True, "silu", 0.0
    before = rows.clone()

    with pytest.raises(ValueError, match="`out`.*`gate`"):
        OPERATORS.gated_rms_norm_out(
            torch.ones(4, 8), weight, rows, None, *options, rows
        )

    assert torch.equal(rows, before)

    expected = gated_rms_norm(rows, weight)
    OPERATORS.gated_rms_norm_out(rows, weight, None, None, *options, rows)

    assert torch.equal(rows, expected)

    q, *others = pack_arguments("cpu")
    others[5:] = others[5:7] + [q, None]
    others[4] = torch.view_as_real(others[4])
    before = q.clone()

    with pytest.raises(ValueError, match="`q`.*`k_src`"):
        OPERATORS.qk_norm_rope_pack(q, *others, 1e-6)

    assert torch.equal(q, before)


def test_regions_of_a_graph():
    """A region that is compiled once and called twice, and the branches of a condition."""

    @torch.compiler.nested_compile_region
    def region(input):
        return 1 + gated_rms_norm(input)

    def function(input):
        input = torch.cond(
            input.sum() > 0,
            lambda input: gated_rms_norm(input.t().contiguous().t()),
            lambda input: gated_rms_norm(input, eps=1.0),
            (input,),
        )

        return region(region(input))

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)

    for sign in (1, -1):
        input = sign * torch.rand(4, 8)

        torch.testing.assert_close(compiled(input), function(input))


def test_second_gradients_are_refused():
    """By an error, of the operator or of `torch.compile`, not by a wrong number."""

    input = torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(gated_rms_norm, backend="aot_eager", fullgraph=True)

    with pytest.raises(RuntimeError, match="double backward"):
        (gradient,) = torch.autograd.grad(
            compiled(input).square().sum(), input, create_graph=True
        )
        gradient.sum().backward()

    arguments = gated_arguments()["all"]
    result = OPERATORS.gated_rms_norm(*requiring_grad(arguments))

    with pytest.raises(NotImplementedError, match="first gradients only"):
        leaf = requiring_grad(arguments)[0]
        result = OPERATORS.gated_rms_norm(leaf, *arguments[1:])
        (gradient,) = torch.autograd.grad(
            result.square().sum(), leaf, create_graph=True
        )
        gradient.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_without_a_trace(device):
    """On a device that this machine need not have: the shapes and strides of results, and no kernel."""

    with FakeTensorMode():

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=device)

        input, weight = empty(8, 4).t(), empty(8)
        norm = GatedRMSNorm(8, device=device).requires_grad_(False)
        heads, rope = empty(1, 3, 2, 8), empty(3, 4, dtype=torch.complex64)
        prefix = empty(1, 0, 2, 8)
        packed = [empty(1, 3, 2, 8) for _ in range(3)]
        results = [
            gated_rms_norm(input, weight, input),
            norm(input),
            qk_norm_rope(heads.expand(2, -1, -1, -1), weight, rope),
            gated_rms_norm(input, out=empty(4, 8)),
        ]

        assert qk_norm_rope_pack_(
            *packed, weight, weight, rope, prefix, prefix
        ) == tuple(packed)

    for result, shape in zip(
        results, ((4, 8), (4, 8), (2, 3, 2, 8), (4, 8)), strict=True
    ):
        assert (result.shape, result.dtype) == (shape, torch.bfloat16)
        assert result.device.type == device
        assert result.is_contiguous()


@pytest.mark.parametrize("is_rope", [False, True])
def test_a_symbolic_trace_outside_of_torch_compile(is_rope):
    """`make_fx` finds out nothing of sizes that it leaves open."""

    def draw(rows):
        return torch.randn(1, rows, 2, 8)

    def compute(input):
        if not is_rope:
            return ntops_ext.torch.gated_rms_norm(input, gate=input)

        table = torch.ones(input.shape[1], 4, dtype=torch.complex64)

        return ntops_ext.torch.qk_norm_rope(input, torch.ones(8), table)

    traced = make_fx(compute, tracing_mode="symbolic")(draw(3))

    for rows in (3, 5):
        input = draw(rows)

        assert torch.equal(traced(input), compute(input))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("group_size", [None, 8])
def test_a_trace_of_torch_jit(group_size):
    """It makes tensors of all sizes."""

    def compute(input):
        return gated_rms_norm(input, gate=input, group_size=group_size)

    input = torch.randn(2, 3, 16)
    traced = torch.jit.trace(compute, (input,), check_trace=False)

    assert torch.equal(traced(2 * input), compute(2 * input))

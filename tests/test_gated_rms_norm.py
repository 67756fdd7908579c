"""`gated_rms_norm` on CPU tensors without the interpreter: its definition, its refusals."""

import doctest
import sys

import pytest
import torch
from comparison import assert_equal_bits
from gated_rms_norm_behaviour import *  # noqa: F403
from gated_rms_norm_calls import Untouched, lay_out, make_call
from wrapped import Wrapper

import ntops_ext.torch
from ntops_ext.torch import gated_rms_norm


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module")
def is_kernel():
    """Whether the NineToothed kernel runs, with what it alone promises."""

    return False


def test_the_example_of_the_docstring():
    """It runs as it is written."""

    module = sys.modules["ntops_ext.torch.gated_rms_norm"]
    results = doctest.testmod(module)

    assert results.attempted >= 2
    assert results.failed == 0


def test_the_definition_has_gradients():
    """On CPU tensors the definition is differentiated by PyTorch."""

    call = make_call(3, 24, dtype=torch.float32, bias=True, group_size=8)
    tensors = {name: one.requires_grad_() for name, one in call.tensors.items()}
    call.with_tensors(**tensors).run().sum().backward()

    assert all(one.grad.isfinite().all() for one in tensors.values())


class WithoutStrides(Wrapper):
    """As `DTensor`, it makes no view of given strides."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten.as_strided.default

        return super().__torch_dispatch__(function, types, args, kwargs)


def test_the_definition_of_what_makes_no_view_of_given_strides():
    """What wraps a tensor is computed by its own operators, whatever its rank."""

    call = make_call(4, 3, 32, dtype=torch.float32)
    wrapped = call.with_tensors(
        **{name: WithoutStrides(one) for name, one in call.tensors.items()}
    )

    assert_equal_bits(wrapped.run().inner, call.run())


def test_the_result_on_the_meta_device():
    """A result without memory, of the right shape, dtype and strides."""

    call = make_call(4, 3, 32, dtype=torch.bfloat16, weight_dtype=torch.float32)
    call = call.with_tensors(
        **{name: one.to("meta") for name, one in call.tensors.items()}
    )
    result = call.run()

    assert (result.device.type, result.shape, result.dtype) == (
        "meta",
        (4, 3, 32),
        torch.bfloat16,
    )
    assert result.is_contiguous()


def test_out_on_the_meta_device():
    """Tensors without memory share none."""

    call = make_call(4, 32, bias=True)
    call = call.with_tensors(
        **{name: one.to("meta") for name, one in call.tensors.items()}
    )
    out = torch.empty(4, 32, device="meta")

    assert call.run(out=out) is out


# Refusals.

NUM_ROWS, NUM_COLUMNS = 6, 64


def _zeros(*shape, **options):
    return torch.zeros(shape, **options)


def _ints(*shape):
    return torch.zeros(shape, dtype=torch.int8)


def _negated(*shape):
    """A view that PyTorch negates when it reads it."""

    return torch.ones(shape, dtype=torch.complex64).conj().imag


ROWS = (NUM_ROWS, NUM_COLUMNS)

# An id: what is passed instead, the error, and what its message must say.
WRONG = {
    # Kinds.
    "input-None": ({"input": None}, TypeError, ["`input`", "NoneType", "tensor"]),
    "input-list": ({"input": [1.0]}, TypeError, ["`input`", "list", "tensor"]),
    "gate-float": ({"gate": 1.0}, TypeError, ["`gate`", "float", "tensor"]),
    "weight-bool": ({"weight": True}, TypeError, ["`weight`", "bool", "tensor"]),
    "bias-array": (
        {"bias": _zeros(NUM_COLUMNS).numpy()},
        TypeError,
        ["`bias`", "ndarray", "tensor"],
    ),
    "out-str": ({"out": "out"}, TypeError, ["`out`", "str", "tensor"]),
    "input-sparse": (
        {"input": _zeros(*ROWS).to_sparse()},
        TypeError,
        ["`input`", "sparse_coo", "strided"],
    ),
    "gate-sparse": (
        {"gate": _zeros(*ROWS).to_sparse_csr()},
        TypeError,
        ["`gate`", "sparse_csr", "strided"],
    ),
    "input-negated": (
        {"input": _negated(*ROWS)},
        ValueError,
        ["`input`", "resolve_neg"],
    ),
    "gate-negated": ({"gate": _negated(*ROWS)}, ValueError, ["`gate`", "resolve_neg"]),
    "weight-negated": (
        {"weight": _negated(NUM_COLUMNS)},
        ValueError,
        ["`weight`", "resolve_neg"],
    ),
    "out-negated": ({"out": _negated(*ROWS)}, ValueError, ["`out`", "resolve_neg"]),
    # Dtypes.
    **{
        f"{name}-{dtype}".replace("torch.", ""): (
            {name: _zeros(*shape, dtype=dtype)},
            TypeError,
            [f"`{name}`", str(dtype), "torch.float16, torch.bfloat16 or torch.float32"],
        )
        for name, shape in (
            ("input", ROWS),
            ("gate", ROWS),
            ("weight", (NUM_COLUMNS,)),
            ("bias", (NUM_COLUMNS,)),
        )
        for dtype in (
            torch.int8,
            torch.float64,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    },
    "out-of-another-dtype": (
        {"out": _zeros(*ROWS, dtype=torch.float32)},
        TypeError,
        ["`out`", "torch.float32", "torch.float16"],
    ),
    # Devices.
    **{
        f"{name}-elsewhere": (
            {name: _zeros(*shape, device="meta", dtype=torch.float16)},
            ValueError,
            [f"`{name}`", "meta", "`input`", "cpu"],
        )
        for name, shape in (
            ("gate", ROWS),
            ("weight", (NUM_COLUMNS,)),
            ("bias", (NUM_COLUMNS,)),
            ("out", ROWS),
        )
    },
    # Shapes.
    "input-scalar": ({"input": torch.tensor(1.0)}, ValueError, ["`input`", "()"]),
    "gate-a-row-less": (
        {"gate": _zeros(NUM_ROWS - 1, NUM_COLUMNS)},
        ValueError,
        ["`gate`", "(5, 64)", "(6, 64)"],
    ),
    "gate-one-row": (
        {"gate": _zeros(1, NUM_COLUMNS)},
        ValueError,
        ["`gate`", "(1, 64)", "(6, 64)"],
    ),
    "gate-of-columns": (
        {"gate": _zeros(NUM_COLUMNS)},
        ValueError,
        ["`gate`", "(64,)", "(6, 64)"],
    ),
    # Case L2: the same number of elements is not the same shape.
    "gate-of-as-many-elements": (
        {"gate": _zeros(2, 3, NUM_COLUMNS)},
        ValueError,
        ["`gate`", "(2, 3, 64)", "(6, 64)"],
    ),
    "gate-transposed": (
        {"gate": _zeros(NUM_COLUMNS, NUM_ROWS)},
        ValueError,
        ["`gate`", "(64, 6)", "(6, 64)"],
    ),
    "weight-short": (
        {"weight": _zeros(63)},
        ValueError,
        ["`weight`", "(63,)", "(64,)"],
    ),
    "weight-of-a-group": (
        {"weight": _zeros(32), "group_size": 32},
        ValueError,
        ["`weight`", "(32,)", "(64,)"],
    ),
    "weight-single": ({"weight": _zeros(1)}, ValueError, ["`weight`", "(1,)", "(64,)"]),
    "weight-scalar": (
        {"weight": torch.tensor(1.0)},
        ValueError,
        ["`weight`", "()", "(64,)"],
    ),
    "weight-of-two-dimensions": (
        {"weight": _zeros(1, NUM_COLUMNS)},
        ValueError,
        ["`weight`", "(1, 64)", "(64,)"],
    ),
    "bias-long": ({"bias": _zeros(65)}, ValueError, ["`bias`", "(65,)", "(64,)"]),
    "bias-of-rows": (
        {"bias": _zeros(*ROWS)},
        ValueError,
        ["`bias`", "(6, 64)", "(64,)"],
    ),
    "out-of-another-shape": (
        {"out": _zeros(NUM_ROWS, 65, dtype=torch.float16)},
        ValueError,
        ["`out`", "(6, 65)", "(6, 64)"],
    ),
    # Values.
    "group_size-no-divisor": (
        {"group_size": 48},
        ValueError,
        ["`group_size`", "48", "64"],
    ),
    "group_size-0": ({"group_size": 0}, ValueError, ["`group_size`", "0", "64"]),
    "group_size-negative": (
        {"group_size": -1},
        ValueError,
        ["`group_size`", "-1", "64"],
    ),
    "group_size-too-large": (
        {"group_size": 65},
        ValueError,
        ["`group_size`", "65", "64"],
    ),
    "group_size-twice": (
        {"group_size": 128},
        ValueError,
        ["`group_size`", "128", "64"],
    ),
    "group_size-float": (
        {"group_size": 64.0},
        TypeError,
        ["`group_size`", "float", "int"],
    ),
    "group_size-bool": (
        {"group_size": True},
        TypeError,
        ["`group_size`", "bool", "int"],
    ),
    "group_size-tensor": (
        {"group_size": torch.tensor(64)},
        TypeError,
        ["`group_size`", "Tensor", "int"],
    ),
    "eps-negative": ({"eps": -1e-6}, ValueError, ["`eps`", "-1e-06", "negative"]),
    "eps-nan": ({"eps": float("nan")}, ValueError, ["`eps`", "nan", "finite"]),
    "eps-inf": ({"eps": float("inf")}, ValueError, ["`eps`", "inf", "finite"]),
    "eps-beyond-floats": ({"eps": 10**400}, ValueError, ["`eps`", "finite"]),
    "eps-None": ({"eps": None}, TypeError, ["`eps`", "NoneType", "number"]),
    "eps-str": ({"eps": "1e-5"}, TypeError, ["`eps`", "str", "number"]),
    "eps-bool": ({"eps": True}, TypeError, ["`eps`", "bool", "number"]),
    "eps-complex": ({"eps": 1e-5j}, TypeError, ["`eps`", "complex", "number"]),
    "eps-tensor": (
        {"eps": torch.tensor(1e-5)},
        TypeError,
        ["`eps`", "Tensor", "number"],
    ),
    "weight_offset-inf": (
        {"weight_offset": float("inf")},
        ValueError,
        ["`weight_offset`", "inf", "finite"],
    ),
    "weight_offset-beyond-floats": (
        {"weight_offset": -(10**400)},
        ValueError,
        ["`weight_offset`", "finite"],
    ),
    "weight_offset-tensor": (
        {"weight_offset": torch.tensor(1.0)},
        TypeError,
        ["`weight_offset`", "Tensor", "number"],
    ),
    "weight_offset-without-weight": (
        {"weight": None, "weight_offset": 1.0},
        ValueError,
        ["`weight_offset`", "1.0", "`weight`"],
    ),
    "norm_before_gate-None": (
        {"norm_before_gate": None},
        TypeError,
        ["`norm_before_gate`", "NoneType", "bool"],
    ),
    "norm_before_gate-int": (
        {"norm_before_gate": 1},
        TypeError,
        ["`norm_before_gate`", "int", "bool"],
    ),
    # Case X6.
    **{
        f"activation-{activation!r}": (
            {"activation": activation},
            ValueError,
            ["`activation`", repr(activation), "'silu', 'swish', 'sigmoid'"],
        )
        for activation in ("gelu", "", None, "SiLU", "relu", "silu ", 1, ["silu"])
    },
    "activation-without-gate": (
        {"gate": None, "activation": "gelu"},
        ValueError,
        ["`activation`", "'gelu'", "'silu', 'swish', 'sigmoid'"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_before_anything_is_written(wrong):
    """Cases I2, L2, X6, X7, X9: the message names the argument, what it got and needs."""

    instead, error, fragments = WRONG[wrong]
    call = make_call(*ROWS, dtype=torch.float16, bias=True, seed=3)
    out, base = lay_out(torch.zeros(ROWS, dtype=torch.float16), "column_slice")
    arguments = {**call.tensors, "out": out, **instead}

    with Untouched(base, *call.tensors.values()):
        with pytest.raises(error) as raised:
            gated_rms_norm(**arguments)

    for fragment in fragments:
        assert fragment in str(raised.value)


def test_a_gate_of_as_many_elements():
    """Case L2: `[512, 128]` with a gate of `[64, 8, 128]`; as a view, it is computed."""

    call = make_call(512, 128, dtype=torch.float16)
    gate = call.tensors["gate"].view(64, 8, 128)

    with pytest.raises(ValueError, match=r"`gate`.*\(512, 128\).*\(64, 8, 128\)"):
        call.run(gate=gate)

    strided = torch.zeros(64, 1536, dtype=torch.float16)[:, 512:].view(64, 8, 128)
    strided.copy_(gate)
    viewed = call.with_tensors(
        input=call.tensors["input"].view(64, 8, 128), gate=strided
    )
    viewed.check(viewed.run())


# An id: the argument, and how it shares memory with `out`, which begins at `OUT_START`.
OUT_START, OUT_END = 512, 512 + NUM_ROWS * NUM_COLUMNS

OVERLAPPING = {
    "input-a-row-before": (
        "input",
        lambda buffer: buffer[OUT_START - 64 : OUT_END - 64].view(ROWS),
    ),
    "input-an-element-behind": (
        "input",
        lambda buffer: buffer[OUT_START + 1 : OUT_END + 1].view(ROWS),
    ),
    "input-ends-in-its-first-element": (
        "input",
        lambda buffer: buffer[OUT_START - 383 : OUT_START + 1].view(ROWS),
    ),
    "input-of-other-strides": (
        "input",
        lambda buffer: buffer[OUT_START:].as_strided(ROWS, (1, 6)),
    ),
    "input-expanded": (
        "input",
        lambda buffer: buffer[OUT_START : OUT_START + 64].expand(ROWS),
    ),
    "gate-itself": ("gate", lambda buffer: buffer[OUT_START:OUT_END].view(ROWS)),
    "gate-ends-in-it": (
        "gate",
        lambda buffer: buffer[OUT_START - 64 : OUT_END - 64].view(ROWS),
    ),
    "gate-expanded": (
        "gate",
        lambda buffer: buffer[OUT_END - 64 : OUT_END].expand(ROWS),
    ),
    "weight-a-row": ("weight", lambda buffer: buffer[OUT_START + 128 :][:64]),
    "weight-a-column": (
        "weight",
        lambda buffer: buffer.as_strided((64,), (8,), OUT_START - 63 * 8),
    ),
    "weight-one-element": (
        "weight",
        lambda buffer: buffer[OUT_END - 1 : OUT_END].expand(64),
    ),
    "bias-of-another-dtype": (
        "bias",
        lambda buffer: buffer[OUT_END - 2 : OUT_END + 126].view(torch.float32),
    ),
    "bias-a-row": ("bias", lambda buffer: buffer[OUT_START + 320 :][:64]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_an_overlapping_out_is_refused(name):
    """Case I3: the message names `out` and whose memory it shares."""

    argument, share = OVERLAPPING[name]
    buffer = torch.zeros(2 * OUT_END, dtype=torch.float16)
    out = buffer[OUT_START:OUT_END].view(ROWS)
    call = make_call(*ROWS, dtype=torch.float16, bias=True)
    call = call.with_tensors(**{argument: share(buffer)})

    with Untouched(buffer):
        with pytest.raises(ValueError, match=rf"`out`.*share.*`{argument}`"):
            call.run(out=out)


@pytest.mark.parametrize(
    "strides", [(0, 1), (1, 1), (63, 1), (64, 0), (1, 0), (0, 0)], ids=str
)
def test_an_out_that_overlaps_itself_is_refused(strides):
    """No two elements of what is written may be one."""

    call = make_call(*ROWS)
    buffer = torch.zeros(6 * 64)

    with Untouched(buffer):
        with pytest.raises(ValueError, match="`out`.*share memory.*strides"):
            call.run(out=buffer.as_strided(ROWS, strides))


def test_an_empty_out_overlaps_nothing():
    """Strides of a tensor without elements mean nothing."""

    call = make_call(0, 4)
    out = torch.zeros(4).as_strided((0, 4), (1, 0))

    assert call.run(out=out) is out


def test_out_is_refused_where_gradients_are_recorded():
    """What is written into it has none."""

    call = make_call(*ROWS)
    weight = call.tensors["weight"].clone().requires_grad_()
    out = torch.zeros(ROWS)

    with Untouched(out), pytest.raises(ValueError, match="`out`.*gradients"):
        call.run(weight=weight, out=out)

    with torch.no_grad():
        assert_equal_bits(call.run(weight=weight, out=out), call.run())


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
def test_numbers_of_every_kind(name):
    """Whatever is a real number is taken as one."""

    import fractions

    import numpy as np

    call = make_call(3, 32)
    expected = call.run(**{name: 0.25})

    for value in (np.float64(0.25), np.float32(0.25), fractions.Fraction(1, 4)):
        assert_equal_bits(call.run(**{name: value}), expected)

    assert_equal_bits(call.run(group_size=np.int64(8)), call.run(group_size=8))


def test_keywords_only():
    """Only `input`, `weight` and `gate` are positional."""

    call = make_call(2, 8)
    tensors = call.tensors

    assert_equal_bits(
        gated_rms_norm(tensors["input"], tensors["weight"], tensors["gate"]), call.run()
    )

    with pytest.raises(TypeError, match="positional"):
        gated_rms_norm(*tensors.values(), None)


def test_the_module_and_the_function_share_a_name():
    """`ntops_ext.torch.gated_rms_norm` is the function."""

    assert ntops_ext.torch.gated_rms_norm is gated_rms_norm
    assert gated_rms_norm.__module__ == "ntops_ext.torch.gated_rms_norm"

"""What `gated_rms_norm` promises wherever it runs.

A test module imports these tests and defines the fixture `device`: the kernel under the
interpreter, the kernel on a GPU, and the definition all pass the same ones.
"""

import itertools

import pytest
import torch
from comparison import assert_equal_bits, bits, errors_in_units
from gated_rms_norm_calls import (
    DTYPES,
    LAYOUTS,
    MODES,
    Untouched,
    assert_only_written,
    lay_out,
    make_call,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ntops_ext import reference
from ntops_ext.torch import gated_rms_norm

GATED_MODES = [mode for mode in MODES if mode != "plain"]

# Each kernel: groups that are held, with and without lanes that pad them, in every mode,
# and groups that are read piece by piece (20000 = 2 x 8192 + 3616) in those that differ.
BY_PIECES = 20000

MODES_AND_GROUPS = [
    *itertools.product(MODES, [32, 24]),
    ("plain", BY_PIECES),
    ("norm_first-silu", BY_PIECES),
    ("gate_first-sigmoid", BY_PIECES),
]

each_mode_and_kernel = pytest.mark.parametrize("mode, group_size", MODES_AND_GROUPS)


# Modes and dtypes.


@pytest.mark.parametrize("group_size", [None, 24, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_rounded_once(device, mode, dtype, group_size):
    """All arithmetic is in float32, and the result is rounded once."""

    call = make_call(
        5,
        96,
        mode=mode,
        dtype=DTYPES[dtype],
        bias=True,
        group_size=group_size,
        weight_offset=1.0,
        device=device,
    )
    call.check(call.run())


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(DTYPES, repeat=4)), ids="-".join
)
def test_each_tensor_may_have_its_own_dtype(device, dtypes):
    """Cases T1, T2: any mix of dtypes; the result has the input's, rounded once."""

    input, gate, weight, bias = (DTYPES[name] for name in dtypes)
    call = make_call(
        2,
        3,
        32,
        dtype=input,
        gate_dtype=gate,
        weight_dtype=weight,
        bias=True,
        bias_dtype=bias,
        device=device,
    )
    call.check(call.run())


def test_a_wide_call_of_three_dimensions_with_mixed_dtypes(device):
    """Case T2: bf16 [4, 7, 4096] with a float32 weight and a float16 bias."""

    call = make_call(
        4,
        7,
        4096,
        dtype=torch.bfloat16,
        mode="plain",
        weight_dtype=torch.float32,
        bias=True,
        bias_dtype=torch.float16,
        device=device,
    )
    call.check(call.run())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_further_off_than_one_rounding_of_float32(device, dtype, mode):
    """The yardstick: at most a unit further from float64 than a float32 computation."""

    call = make_call(16, 128, mode=mode, dtype=DTYPES[dtype], seed=1, device=device)
    exact, _ = call.exact()
    errors = errors_in_units(call.run().cpu(), exact.cpu())
    yardstick = errors_in_units(call.definition(torch.float32).cpu(), exact.cpu())

    assert errors.max() <= yardstick.max() + 1

    if dtype != "fp32":
        # Where the arithmetic is finer than the result, this holds of each element.
        assert (errors <= yardstick + 1).all()


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", ["plain", "norm_first-silu", "gate_first-silu"])
def test_weight_and_bias_may_be_absent(device, mode, weight, bias):
    """Case L5: `None` is a weight of ones, a bias of zeros."""

    call = make_call(4, 48, mode=mode, weight=weight, bias=bias, device=device)
    result = call.run()
    call.check(result)

    spelt_out = {}

    if not weight:
        spelt_out["weight"] = torch.ones(48, device=device)

    if not bias:
        spelt_out["bias"] = torch.zeros(48, device=device)

    # A bias of +0 turns -0 into +0, so that values are compared.
    assert torch.equal(call.with_tensors(**spelt_out).run(), result)


def test_no_bias_keeps_the_sign_of_zero(device):
    """Without a bias a zero has the sign of its factors."""

    zeros = torch.tensor([[0.0, -0.0, 1.0, -1.0]], device=device)
    weight = torch.tensor([-1.0, 1.0, 0.0, 0.0], device=device)

    assert torch.signbit(gated_rms_norm(zeros, weight)).tolist() == [
        [True, True, False, True]
    ]


def test_a_call_does_not_depend_on_the_one_before(device):
    """Options that are equal and not the same leave no trace in what is remembered."""

    weight = torch.full((17,), -0.0, device=device)
    # Two layouts, each of which meets the two zeros in another order.
    first, second = (
        [
            gated_rms_norm(
                torch.ones(rows, 17, device=device), weight, weight_offset=zero
            )
            for zero in zeros
        ]
        for rows, zeros in ((1, (0.0, -0.0)), (2, (-0.0, 0.0)))
    )

    assert_equal_bits(first[0], second[1][:1])
    assert_equal_bits(first[1], second[0][:1])


def test_one_layout_with_different_options(device):
    """Everything that decides the result is part of what a call is recognised by."""

    call = make_call(4, 64, dtype=torch.float16, bias=True, device=device)

    for _ in range(2):
        for options in (
            {},
            {"eps": 1},
            {"eps": 1.5},
            {"group_size": 16},
            {"group_size": 64},
            {"norm_before_gate": False},
            {"activation": "sigmoid"},
            {"weight_offset": 1.0},
            {"weight_offset": 2},
        ):
            one = call.with_options(**options)
            one.check(one.run())

        for name in ("weight", "gate", "bias"):
            tensors = {key: one for key, one in call.tensors.items() if key != name}
            one = type(call)(tensors, call.options)
            one.check(one.run())


def test_one_layout_with_different_memory(device):
    """Overlap is a matter of addresses, not of layouts."""

    buffer = torch.zeros(3, 4, 64, device=device)
    call = make_call(4, 64, device=device)

    for out in (buffer[0], buffer[1]):
        call.check(call.run(out=out))

    for gate, out in ((buffer[2], buffer[2]), (buffer[1], buffer[1])):
        with pytest.raises(ValueError, match="`out`.*`gate`"):
            call.run(gate=gate, out=out)

    call.with_tensors(gate=buffer[0]).run(out=buffer[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_activations(device, norm_before_gate, dtype):
    """Case A1: "silu" is "swish", "sigmoid" is another."""

    call = make_call(
        4, 64, dtype=DTYPES[dtype], device=device, norm_before_gate=norm_before_gate
    )
    results = {}

    for activation in ("silu", "swish", "sigmoid"):
        one = call.with_options(activation=activation)
        results[activation] = one.run()
        one.check(results[activation])

    assert_equal_bits(results["silu"], results["swish"])

    assert not torch.allclose(
        results["silu"].float(), results["sigmoid"].float(), rtol=0.1
    )


def test_a_sigmoid_gate_of_another_dtype(device):
    """Case A3: float16 input, bfloat16 gate, float32 weight."""

    call = make_call(
        9,
        128,
        dtype=torch.float16,
        mode="norm_first-sigmoid",
        gate_dtype=torch.bfloat16,
        weight_dtype=torch.float32,
        device=device,
    )
    call.check(call.run())


def test_the_order_means_nothing_without_a_gate(device):
    """`gate=None` is plain RMSNorm, whatever the flag."""

    call = make_call(4, 64, mode="plain", dtype=torch.float16, device=device)

    assert_equal_bits(
        call.with_options(norm_before_gate=True).run(),
        call.with_options(norm_before_gate=False).run(),
    )


def test_a_bias_is_gated_only_where_the_gate_comes_last(device):
    """`(x_hat * w + b) * act(z)`, but `u_hat * w + b`."""

    call = make_call(
        3, 32, mode="norm_first-silu", weight=False, bias=True, device=device
    ).with_tensors(input=torch.zeros(3, 32, device=device))
    gate, bias = call.tensors["gate"], call.tensors["bias"]

    torch.testing.assert_close(
        call.run(), torch.nn.functional.silu(gate) * bias, rtol=1e-6, atol=1e-7
    )
    assert torch.equal(
        call.with_options(norm_before_gate=False).run(), bias.expand(3, 32)
    )


def test_the_weight_offset_is_added_in_float32(device):
    """1 + w of a bfloat16 weight is not rounded to bfloat16."""

    call = make_call(
        4,
        64,
        dtype=torch.float32,
        mode="plain",
        weight_dtype=torch.bfloat16,
        weight_offset=1.0,
        device=device,
    )
    call = call.with_tensors(weight=call.tensors["weight"] / 256)
    result = call.run()
    call.check(result)

    rounded = (1 + call.tensors["weight"]).float()
    assert not torch.allclose(
        result, call.definition(torch.float32, weight=rounded, weight_offset=0.0), 1e-5
    )


# eps.


@pytest.mark.parametrize(
    "rms, expected", [(1e-3, 0.3015), (1e-4, 0.0316), (1e-2, 0.9535)]
)
def test_eps_is_inside_the_root(device, rms, expected):
    """Case N2: small rows tell `1 / sqrt(var + eps)` from `1 / (sqrt(var) + eps)`."""

    input = torch.full((3, 128), rms, device=device)
    result = gated_rms_norm(input, eps=1e-5)

    torch.testing.assert_close(
        result, torch.full_like(result, expected), rtol=1e-3, atol=5e-5
    )


@pytest.mark.parametrize("eps", [0, 1, 1e-30, 1e300])
def test_eps_may_be_any_number_that_is_not_negative(device, eps):
    """An int, one below and one above what float32 holds."""

    call = make_call(3, 64, dtype=torch.float32, device=device, eps=eps)
    result = call.run()

    if eps == 1e300:
        assert (result == 0).all()
    else:
        call.check(result)


# Widths, rows, groups.


@pytest.mark.parametrize("width", [1, 2, 3, 7, 96, 100, 129, 960])
@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-sigmoid"])
def test_any_width(device, width, mode):
    """Lanes behind the last column add nothing, and write nothing."""

    call = make_call(3, width, mode=mode, dtype=torch.float16, device=device)
    out, base = lay_out(torch.empty_like(call.tensors["input"]), "dense")
    call.check(call.run(out=out))
    assert_only_written(base, out)


@pytest.mark.parametrize("width", [100, 128])
@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 63])
def test_any_number_of_rows(device, num_rows, width):
    """Case S7: what a block of rows has too many is neither read nor written."""

    call = make_call(num_rows, width, dtype=torch.float16, device=device)
    call = call.with_tensors(
        **{name: lay_out(one, "dense")[0] for name, one in call.tensors.items()}
    )
    out, base = lay_out(call.tensors["input"], "dense")
    call.check(call.run(out=out))
    assert_only_written(base, out)


@pytest.mark.parametrize(
    "width, dtype", [(65536, "bf16"), (32768, "fp32"), (131072, "bf16")]
)
@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
def test_wide_rows(device, width, dtype, mode):
    """Case S8: no width is too large."""

    call = make_call(2, width, dtype=DTYPES[dtype], mode=mode, device=device, bias=True)
    call.check(call.run())


@each_mode_and_kernel
def test_groups_are_told_apart_at_their_ends(device, mode, group_size):
    """Case G5: the lanes that pad a group read and write nothing of the next one."""

    call = make_call(
        2,
        3 * group_size,
        mode=mode,
        dtype=torch.float16,
        group_size=group_size,
        device=device,
    )
    input = call.tensors["input"]
    scales = torch.tensor([1.0, 100.0, 0.01], device=device).to(torch.float16)
    call = call.with_tensors(
        input=(input.view(2, 3, -1) * scales[:, None]).view_as(input)
    )
    out, base = lay_out(torch.empty_like(input), "odd_column_slice")
    call.check(call.run(out=out))
    assert_only_written(base, out)


@pytest.mark.parametrize(
    "num_columns, group_size", [(7168, 3584), (10240, 1280), (4096, 2048), (8192, 1024)]
)
def test_groups_of_real_models(device, num_columns, group_size):
    """Cases G1, G4, G5: forward, gate first."""

    call = make_call(
        2,
        num_columns,
        mode="gate_first-silu",
        dtype=torch.bfloat16,
        group_size=group_size,
        device=device,
    )
    call.check(call.run())


def test_the_strides_of_no_elements_mean_nothing(device):
    """However far they reach, there is nothing to address, and nothing to copy."""

    input = torch.empty(0, device=device).as_strided((3, 0, 16), (0, 3, 2**40))
    weight = torch.ones(16, device=device, requires_grad=True)
    result = gated_rms_norm(input, weight)
    (gradient,) = torch.autograd.grad(result.sum(), weight)

    assert result.shape == (3, 0, 16)
    assert torch.equal(gradient, torch.zeros(16, device=device))


def test_a_group_is_not_the_row(device):
    """Cases G3, G6: each group has a statistic of its own, and `None` one of all."""

    call = make_call(4, 256, mode="plain", weight=False, group_size=64, device=device)
    call.tensors["input"][:, :64] *= 100

    by_groups, whole = call.run(), call.with_options(group_size=None).run()
    call.check(by_groups)
    call.with_options(group_size=None).check(whole)

    means = by_groups.view(4, 4, 64).square().mean(-1)
    torch.testing.assert_close(means, torch.ones_like(means), rtol=1e-3, atol=1e-3)
    assert (whole[:, 64:].square().mean(-1) < 1e-2).all()


@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
def test_whole_groups_can_be_computed_apart(device, mode, is_kernel):
    """Case G2: halves of the columns, as views, give the bits of the whole."""

    call = make_call(
        3, 512, mode=mode, dtype=torch.float32, group_size=64, device=device
    )
    whole = call.run()

    for half in (slice(0, 256), slice(256, 512)):
        part = call.with_tensors(
            **{name: one[..., half] for name, one in call.tensors.items()}
        ).run()

        if is_kernel:
            assert_equal_bits(part, whole[:, half])
        else:
            torch.testing.assert_close(part, whole[:, half])


# Layouts.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["input", "gate", "out"])
def test_a_layout_changes_no_bit(device, name, layout, is_kernel):
    """Cases L1, L3, L4: views are computed as contiguous copies are."""

    call = make_call(3, 5, 64, dtype=torch.float16, device=device, group_size=32)
    expected = call.run()
    call.check(expected)

    if name == "out":
        out, base = lay_out(torch.empty_like(expected), layout)

        with Untouched(*call.tensors.values()):
            assert call.run(out=out) is out

        actual = out.clone(memory_format=torch.contiguous_format)
        assert_only_written(base, out)
    else:
        view, base = lay_out(call.tensors[name], layout)

        with Untouched(view, *call.tensors.values()):
            actual = call.with_tensors(**{name: view}).run()

    assert actual.is_contiguous()

    if is_kernel:
        assert_equal_bits(actual, expected)
    else:
        call.check(actual)


@pytest.mark.parametrize(
    "layouts",
    [
        ("rows_reversed", "every_second_row", "column_slice"),
        ("column_slice", "rows_reversed", "columns_first"),
        ("every_second_column", "misaligned", "rows_reversed"),
        ("every_second_row", "columns_first", "odd_column_slice"),
    ],
    ids="-".join,
)
def test_each_tensor_may_have_its_own_layout(device, layouts, is_kernel):
    """Case L3: rows that no two tensors merge in the same way."""

    call = make_call(2, 3, 4, 48, dtype=torch.bfloat16, device=device)
    expected = call.run()
    input_layout, gate_layout, out_layout = layouts
    input, _ = lay_out(call.tensors["input"], input_layout)
    gate, _ = lay_out(call.tensors["gate"], gate_layout)
    out, base = lay_out(torch.empty_like(expected), out_layout)

    with Untouched(input, gate):
        call.with_tensors(input=input, gate=gate).run(out=out)

    if is_kernel:
        assert_equal_bits(out, expected)
    else:
        call.check(out)

    assert_only_written(base, out)


@pytest.mark.parametrize("name", ["input", "gate"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_expanded_tensor(device, name, dim):
    """Case L3: a dimension of stride 0, columns included."""

    call = make_call(3, 4, 32, dtype=torch.float16, device=device)
    one = call.tensors[name].narrow(dim, 0, 1).expand(3, 4, 32)
    call = call.with_tensors(**{name: one})

    with Untouched(one):
        result = call.run()

    call.check(result)
    call.contiguous().check(result)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_strided_parameters(device, name):
    """Cases L3, L5: every second element, a column, and one element for all."""

    call = make_call(3, 64, dtype=torch.float16, bias=True, device=device)
    parameter = call.tensors[name]
    every_second = torch.stack([parameter, -parameter], 1).flatten()[::2]
    column = torch.stack([parameter, -parameter, -parameter], 1)[:, 0]
    single = parameter[:1].expand(64)

    for view in (every_second, column, single):
        one = call.with_tensors(**{name: view})

        with Untouched(view):
            result = one.run()

        one.check(result)
        one.contiguous().check(result)


def test_the_gate_of_a_fused_projection(device, is_kernel):
    """Case L1: `[T, H, 128]` with gaps, from `[T, 12288]`."""

    tokens = 2
    projection = torch.randn(tokens, 12288, device=device).to(torch.bfloat16)
    gate = projection[:, 8192:].view(tokens, 32, 128)
    call = make_call(tokens, 32, 128, dtype=torch.bfloat16, device=device)
    call = call.with_tensors(gate=gate)

    assert gate.stride() == (12288, 128, 1)

    with Untouched(gate):
        result = call.run()

    call.check(result)

    if is_kernel:
        assert_equal_bits(result, call.contiguous().run())


def test_the_interleaved_gate_of_a_fused_projection(device, is_kernel):
    """Strides (12288, 768, 128, 1): groups of heads, with other columns between them."""

    projection = torch.randn(3, 16, 6, 128, device=device).to(torch.bfloat16)
    gate = projection[:, :, 4:]
    call = make_call(3, 16, 2, 128, dtype=torch.bfloat16, device=device)
    call = call.with_tensors(gate=gate)

    assert gate.stride() == (12288, 768, 128, 1)

    result = call.run()
    call.check(result)

    if is_kernel:
        assert_equal_bits(result, call.contiguous().run())


@pytest.mark.parametrize("row_stride", [22656, 18560, 10304, 3352])
def test_column_slices_of_real_models(device, row_stride):
    """Row strides of fused projections, one of them not a multiple of 16."""

    call = make_call(
        3, 1280, mode="gate_first-silu", dtype=torch.bfloat16, device=device
    )
    gate = torch.zeros(3, row_stride, device=device, dtype=torch.bfloat16)[:, 64:1344]
    gate.copy_(call.tensors["gate"])
    call = call.with_tensors(gate=gate)
    call.check(call.run())


@pytest.mark.parametrize(
    "rows, columns, row_stride",
    [(40, 32, 38), (40, 20, 48), (5, 520, 1046), (3, 640, 646)],
)
@pytest.mark.parametrize("sliced", ["input", "gate", "out"])
def test_row_strides_that_are_compiled_in_beside_others(
    device, is_kernel, rows, columns, row_stride, sliced
):
    """All but 32, 48 and 640 are: of one tensor one, of the others the other. Rows fill programs, and do not."""

    call = make_call(rows, columns, mode="gate_first-silu", device=device)
    out = torch.full((rows, columns), float("nan"), device=device)
    expected = call.run(out=out).clone()
    wide = torch.full((rows, row_stride), float("nan"), device=device)
    view = wide[:, :columns]

    if sliced == "out":
        result = call.run(out=view)
    else:
        view.copy_(call.tensors[sliced])
        result = call.with_tensors(**{sliced: view}).run(out=out.fill_(float("nan")))

    call.check(result)
    assert wide[:, columns:].isnan().all()

    if is_kernel:
        assert_equal_bits(result, expected)


def test_five_dimensions_that_do_not_merge(device):
    """Any number of dimensions, in any order."""

    call = make_call(2, 3, 2, 2, 40, dtype=torch.float16, device=device)
    gate = (
        call.tensors["gate"].permute(3, 1, 2, 0, 4).contiguous().permute(3, 1, 2, 0, 4)
    )
    call = call.with_tensors(gate=gate)
    call.check(call.run())


@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 7), (2, 1, 3, 7)])
def test_few_and_single_dimensions(device, shape):
    """One row without a dimension of rows, and sizes of 1 with senseless strides."""

    call = make_call(*shape, dtype=torch.float16, device=device)
    senseless = call.tensors["gate"].as_strided(
        shape,
        [
            999 if size == 1 else stride
            for size, stride in zip(shape, call.tensors["gate"].stride(), strict=True)
        ],
    )
    call = call.with_tensors(gate=senseless)
    result = call.run()

    assert result.is_contiguous()
    call.check(result)


@pytest.mark.parametrize("shape", [(1, 64), (1, 1, 64), (64,)], ids=str)
def test_the_stride_of_a_single_row_means_nothing(device, shape, is_kernel):
    """However large it is: nothing is ever that far away."""

    call = make_call(*shape, dtype=torch.float16, device=device)
    expected = call.run()
    strides = (2**40, 2**31 + 5, 1)[-len(shape) :]

    def senseless(tensor):
        return tensor.as_strided(shape, strides)

    out = senseless(torch.empty_like(expected))
    call = call.with_tensors(
        input=senseless(call.tensors["input"]), gate=senseless(call.tensors["gate"])
    )

    for actual in (call.run(), call.run(out=out)):
        call.check(actual)
        assert torch.equal(actual, expected) or not is_kernel


def test_columns_apart_in_both_passes(device):
    """A group that is read twice is read in the same places."""

    call = make_call(2, BY_PIECES, dtype=torch.float16, bias=True, device=device)
    views = {
        name: lay_out(call.tensors[name], "every_second_column")[0]
        for name in ("input", "gate")
    }
    call = call.with_tensors(**views)
    out, base = lay_out(torch.empty_like(views["input"]), "columns_first")
    call.check(call.run(out=out))
    assert_only_written(base, out)


@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
@pytest.mark.parametrize("group_size", [8192 + 24, 16384 + 8])
def test_layouts_of_wide_groups(device, group_size, mode):
    """What is read piece by piece may have any strides, too."""

    call = make_call(
        2, 2, group_size, mode=mode, dtype=torch.float16, bias=True, device=device
    )
    gate, _ = lay_out(call.tensors["gate"], "rows_reversed")
    input, _ = lay_out(call.tensors["input"], "odd_column_slice")
    out, base = lay_out(torch.empty_like(input), "every_second_row")
    call = call.with_tensors(input=input, gate=gate)
    call.check(call.run(out=out))
    assert_only_written(base, out)


# What is written.


@each_mode_and_kernel
def test_in_place_on_the_input(device, mode, group_size):
    """Case I3: `out=input` gives the bits of a call without."""

    call = make_call(
        3,
        2 * group_size,
        mode=mode,
        dtype=torch.float16,
        group_size=group_size,
        device=device,
    )
    expected = call.run()
    others = [one for name, one in call.tensors.items() if name != "input"]

    with Untouched(*others):
        assert call.run(out=call.tensors["input"]) is call.tensors["input"]

    assert_equal_bits(call.tensors["input"], expected)


def test_in_place_on_a_view_of_the_input(device):
    """Case I3: another tensor object of the same elements is the same."""

    call = make_call(4, 64, dtype=torch.float16, device=device)
    view, base = lay_out(call.tensors["input"], "column_slice")
    expected = call.run()
    out = base[:, 16:80]

    assert call.with_tensors(input=view).run(out=out) is out
    assert_equal_bits(view, expected)
    assert_only_written(base, view)


def test_out_may_lie_between_the_elements_of_an_argument(device):
    """No byte is shared, although the extents overlap."""

    pairs = torch.randn(6, 2, 64, device=device)
    call = make_call(6, 64, device=device).with_tensors(input=pairs[:, 0])
    expected = call.run()

    assert torch.equal(call.run(out=pairs[:, 1]), expected)


def test_inputs_may_share_memory(device):
    """Arguments that are only read may overlap in any way."""

    base = torch.randn(40, 64, device=device)
    call = make_call(32, 64, device=device).with_tensors(
        input=base[:32], gate=base[8:], weight=base[4], bias=base[3]
    )

    with Untouched(base):
        call.check(call.run())


def test_an_argument_is_not_written(device):
    """Only the result is written."""

    call = make_call(4, 3, 100, dtype=torch.bfloat16, bias=True, device=device)

    with Untouched(*call.tensors.values()):
        result = call.run()

    for tensor in call.tensors.values():
        assert (
            result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize(
    "shape", [(0, 128), (3, 0, 128), (0, 0), (4, 0), (0,), (2, 0, 3, 0)]
)
@pytest.mark.parametrize("mode", ["plain", "gate_first-silu"])
def test_an_empty_input_gives_an_empty_result(device, shape, mode):
    """Case E1: the right shape and dtype, and no launch."""

    call = make_call(*shape, dtype=torch.float16, mode=mode, device=device, bias=True)
    result = call.run()

    assert (result.shape, result.dtype, result.device) == (
        shape,
        torch.float16,
        call.tensors["input"].device,
    )
    assert result.is_contiguous()
    assert call.run(out=result) is result

    following = make_call(2, 32, device=device)
    following.check(following.run())


def test_a_call_repeats(device):
    """Bits do not depend on the run."""

    call = make_call(5, 3000, dtype=torch.float32, bias=True, device=device)
    expected = call.run()

    for _ in range(3):
        assert_equal_bits(call.run(), expected)


# Against what other modules compute, written out.


def _distance(first, second):
    """How many representable numbers lie between the elements of two tensors."""

    def ordered(tensor):
        value = bits(tensor).long()

        return torch.where(value < 0, -(value & 0x7FFF), value)

    return (ordered(first) - ordered(second)).abs().max().item()


# The interpreter truncates bfloat16; float16 it rounds as a GPU does.
@pytest.mark.parametrize("weight_dtype", ["fp16", "fp32"])
def test_near_the_chain_that_rounds_thrice(device, weight_dtype):
    """Case N3: within 2 units of Qwen3-Next's module in `transformers`."""

    call = make_call(
        16,
        128,
        dtype=torch.float16,
        weight_dtype=DTYPES[weight_dtype],
        eps=1e-6,
        device=device,
    )
    input, gate, weight = (call.tensors[one] for one in ("input", "gate", "weight"))

    value = input.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)
    value = weight * value.to(torch.float16)
    value = value * torch.nn.functional.silu(gate.float())

    assert _distance(call.run(), value.to(torch.float16)) <= 2


def test_near_the_chain_that_rounds_twice(device):
    """Case N3: within a unit of Mamba-2's module in `transformers`."""

    call = make_call(
        16, 128, mode="gate_first-silu", dtype=torch.float16, device=device
    )
    input, gate, weight = (call.tensors[one] for one in ("input", "gate", "weight"))

    value = input.float() * torch.nn.functional.silu(gate.float())
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5)
    value = weight * value.to(torch.float16)

    assert _distance(call.run(), value) <= 1


# Special values.


@each_mode_and_kernel
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_stays_in_its_group(device, value, mode, group_size):
    """Case X8: NaN fills its group; an infinity is NaN and makes the others 0."""

    call = make_call(
        2, 3 * group_size, mode=mode, weight=False, group_size=group_size, device=device
    )
    clean = call.run()
    call.tensors["input"][1, group_size + 3] = value
    result = call.run()
    group = result[1, group_size : 2 * group_size]
    others = [result[0], result[1, :group_size], result[1, 2 * group_size :]]
    expected = [clean[0], clean[1, :group_size], clean[1, 2 * group_size :]]

    assert torch.equal(torch.cat(others), torch.cat(expected))

    if value != value:
        assert group.isnan().all()
    else:
        assert group[3].isnan()
        assert (torch.cat([group[:3], group[4:]]) == 0).all()


@each_mode_and_kernel
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_group_of_zeros(device, eps, mode, group_size):
    """Case X5: with eps = 0 that group is NaN, with any other it is 0."""

    call = make_call(
        2, 2 * group_size, mode=mode, group_size=group_size, eps=eps, device=device
    )
    call.tensors["input"][1, :group_size] = 0
    result = call.run()
    zeros = result[1, :group_size]

    assert zeros.isnan().all() if eps == 0 else (zeros == 0).all()
    assert result[0].isfinite().all() and result[1, group_size:].isfinite().all()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gates_far_from_zero(device, activation, dtype):
    """silu(-inf) is NaN, silu(inf) infinite, and far below 0 the gate is -0."""

    gate = torch.tensor(
        [
            -float("inf"),
            -1e30,
            -1000.0,
            -120.0,
            1000.0,
            1e30,
            float("inf"),
            float("nan"),
        ],
        device=device,
        dtype=DTYPES[dtype],
    )
    input = torch.ones(1, 8, device=device, dtype=DTYPES[dtype])
    result = gated_rms_norm(input, gate=gate[None], activation=activation, eps=0.0)[0]
    expected = reference.ACTIVATIONS[activation](gate)

    if activation == "silu":
        assert expected[0].isnan() and expected[6] == float("inf")

    torch.testing.assert_close(result, expected, equal_nan=True)
    assert torch.equal(torch.signbit(result[1:7]), torch.signbit(expected[1:7]))


@pytest.mark.parametrize("mode", GATED_MODES)
def test_moderate_gates_keep_their_digits(device, mode):
    """float32 results hold to 2^-20 for gates down to where `exp` overflows."""

    call = make_call(1, 176, mode=mode, weight=False, device=device)
    gate = torch.linspace(-87.5, 87.5, 176, device=device)[None]
    call = call.with_tensors(gate=gate, input=torch.ones_like(gate))
    call.check(call.run())


@pytest.mark.parametrize("mode", GATED_MODES)
def test_gates_just_before_exp_overflows(device, mode):
    """The largest float32 is exp(88.72): what is divided by less is no zero."""

    call = make_call(1, 16, mode=mode, device=device)
    gate = torch.linspace(-88.7, -87.0, 16, device=device)[None]
    # Large enough that a result is no subnormal.
    large = {"input": torch.full_like(gate, 1e36)}

    if mode.startswith("norm_first"):
        large = {"weight": torch.full((16,), 1e30, device=device)}

    call = call.with_tensors(gate=gate, **large)
    result = call.run()

    assert (result != 0).all()
    call.check(result)


def test_a_square_that_overflows(device):
    """Numbers above 1.8e19 have no float32 square: the result is 0, as everywhere."""

    input = torch.ones(1, 16, device=device)
    input[0, 5] = 1e30

    assert (gated_rms_norm(input) == 0).all()


def test_the_largest_float16(device):
    """float16 cannot overflow on the way."""

    call = make_call(
        2, 64, mode="plain", weight=False, dtype=torch.float16, device=device
    )
    call = call.with_tensors(input=torch.full_like(call.tensors["input"], 65504.0))
    call.check(call.run())


def test_a_result_beyond_the_range_is_infinite(device):
    """One rounding, also where it leads to infinity."""

    call = make_call(2, 64, mode="plain", dtype=torch.float16, device=device)
    call = call.with_tensors(
        weight=torch.full((64,), 60000.0, device=device, dtype=torch.float16)
    )
    result = call.run()

    assert result.isinf().any()
    call.check(result)


def test_subnormal_inputs_are_kept(device):
    """Case X11: 1e-39 in bfloat16 is not flushed before it is scaled."""

    input = torch.zeros(1, 32, device=device, dtype=torch.bfloat16)
    input[0, 3] = 1e-39
    result = gated_rms_norm(input, eps=1e-6)[0, 3].item()

    assert result == pytest.approx(1e-36, rel=2**-6)


# Anything together.

_SIZES = st.integers(1, 3)


@st.composite
def _calls(draw):
    group_size = draw(st.sampled_from([1, 2, 5, 8, 12, 32, 33]))
    num_groups = draw(st.integers(1, 3))
    row_sizes = draw(st.lists(_SIZES, max_size=3))
    dtypes = st.sampled_from(list(DTYPES.values()))
    weight = draw(st.booleans())
    call = make_call(
        *row_sizes,
        num_groups * group_size,
        dtype=draw(dtypes),
        mode=draw(st.sampled_from(list(MODES))),
        gate_dtype=draw(dtypes),
        weight=weight,
        weight_dtype=draw(dtypes),
        bias=draw(st.booleans()),
        bias_dtype=draw(dtypes),
        seed=draw(st.integers(0, 2**16)),
        eps=draw(st.sampled_from([0.0, 1e-6, 1e-2])),
        group_size=draw(st.sampled_from([group_size, None])),
        weight_offset=draw(st.sampled_from([0.0, 1.0, -0.5])) if weight else 0.0,
    )
    layouts = [
        one
        for one in LAYOUTS
        if row_sizes or one not in ("every_second_row", "rows_reversed")
    ]

    return call, [draw(st.sampled_from(layouts)) for _ in range(3)], draw(st.booleans())


@settings(max_examples=60)
@given(drawn=_calls())
def test_any_call(device, is_kernel, drawn):
    """Modes, dtypes, groups and layouts together: right, and nothing else is touched."""

    call, layouts, in_place = drawn
    call = call.with_tensors(
        **{name: one.to(device) for name, one in call.tensors.items()}
    )
    expected = call.run()
    call.check(expected)

    input, input_base = lay_out(call.tensors["input"], layouts[0])
    strided = {"input": input}
    bases = []

    if "gate" in call.tensors:
        strided["gate"], base = lay_out(call.tensors["gate"], layouts[1])
        bases.append(base)

    out, out_base = (
        (input, input_base)
        if in_place
        else lay_out(torch.empty_like(expected), layouts[2])
    )

    if not in_place:
        bases.append(input_base)

    with Untouched(*bases, call.tensors.get("weight"), call.tensors.get("bias")):
        call.with_tensors(**strided).run(out=out)

    if is_kernel:
        assert_equal_bits(out, expected)
    else:
        call.check(out)

    assert_only_written(out_base, out)

"""What the kernel of `gated_rms_norm` promises beyond its definition: bits.

To be imported as `gated_rms_norm_behaviour` is.
"""

import pytest
import torch
from comparison import assert_equal_bits
from gated_rms_norm_calls import DTYPES, lay_out, make_call

from ntops_ext import configs
from ntops_ext.torch import _gated_rms_norm, _rows


@pytest.fixture
def choose_anew():
    """A function that forgets what was chosen for layouts, as a test changes choices."""

    forget = _gated_rms_norm._layouts_of_calls.clear
    yield forget
    forget()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
@pytest.mark.parametrize("num_rows", [2, 8, 15, 16, 17, 31, 32, 33])
def test_a_row_does_not_depend_on_its_company(device, num_rows, mode, dtype):
    """Case N1: the bits of rows together are those of each alone."""

    call = make_call(
        num_rows, 128, mode=mode, dtype=DTYPES[dtype], device=device, seed=num_rows
    )
    together = call.run()

    for row in sorted({0, num_rows // 2, num_rows - 1}):
        assert_equal_bits(together[row : row + 1], call.rows(slice(row, row + 1)).run())


@pytest.mark.parametrize(
    "choices",
    [
        {"rows_per_program": 1, "num_warps": 1},
        {"rows_per_program": 2, "num_warps": 1, "parameters_first": False},
        {"rows_per_program": 8, "num_warps": 1},
        {"rows_per_program": 16, "num_warps": 1, "parameters_first": False},
    ],
    ids=lambda choices: str(choices["rows_per_program"]),
)
@pytest.mark.parametrize("mode", ["plain", "gate_first-silu"])
@pytest.mark.parametrize("width", [24, 128, 300])
def test_launch_choices_change_no_bit(
    device, width, mode, choices, monkeypatch, choose_anew
):
    """Case N1: neither the rows of a program nor when it reads what reaches the bits."""

    call = make_call(
        17, width, mode=mode, dtype=torch.float32, bias=True, device=device
    )
    expected = call.run()
    monkeypatch.setattr(
        configs,
        "gated_rms_norm_config",
        lambda *_, **__: configs.GatedRMSNormConfig(**choices),
    )
    choose_anew()

    assert_equal_bits(call.run(), expected)


@pytest.mark.parametrize("mode", ["plain", "norm_first-silu", "gate_first-sigmoid"])
def test_groups_that_are_held_in_pieces(device, mode):
    """Each piece is its own columns of every tensor, and the root is of all of them."""

    call = make_call(
        *(2, 768),
        mode=mode,
        dtype=torch.float32,
        bias=True,
        group_size=384,
        device=device,
    )

    assert configs.gated_rms_norm_config(384, 4).holds_pieces

    call.check(call.run())


@pytest.mark.parametrize("group_size", [1025, 1280, 3000, 16384])
def test_the_number_of_groups_changes_no_bit(
    device, group_size, monkeypatch, choose_anew
):
    """Case N1: calls of many, of few and of very few groups are launched differently."""

    call = make_call(2, group_size, dtype=torch.float32, bias=True, device=device)
    results = []

    for few_groups, shared_columns in ((0, 0), (1024, 0), (1024, 2**18)):
        monkeypatch.setattr(configs, "_FEW_GROUPS", few_groups)
        monkeypatch.setattr(configs, "_MAX_SHARED_COLUMNS", shared_columns)
        choose_anew()
        results.append(call.run())

    for result in results[1:]:
        assert_equal_bits(result, results[0])


@pytest.mark.parametrize(
    "shape, dtype, mode",
    [
        ((2, 2048), "bf16", "plain"),
        ((2, 2048), "fp32", "norm_first-sigmoid"),
        ((1, 1536), "fp32", "plain"),
        ((2, 1536), "bf16", "norm_first-silu"),
    ],
)
def test_a_row_that_programs_share(
    device, shape, dtype, mode, monkeypatch, choose_anew
):
    """Each writes its own columns, with the sum of all; into the row itself one program writes it."""

    call = make_call(*shape, mode=mode, dtype=DTYPES[dtype], bias=True, device=device)

    assert configs.gated_rms_norm_config(
        shape[-1], shape[0], may_share=True
    ).columns_per_share

    shared = call.run()
    out = call.run(out=torch.empty_like(shared))
    in_place = call.with_tensors(input=call.tensors["input"].clone())
    call.check(shared)

    for result in (out, in_place.run(out=in_place.tensors["input"])):
        assert_equal_bits(result, shared)

    monkeypatch.setattr(configs, "_MAX_SHARED_COLUMNS", 0)
    choose_anew()

    assert_equal_bits(call.run(), shared)


@pytest.mark.parametrize(
    "mode, columns, group_size",
    [("gate_first-silu", 2048, None), ("plain", 4096, 2048)],
)
def test_rows_that_programs_do_not_share(device, mode, columns, group_size):
    """Where the gate enters the sum, or a row is several groups."""

    call = make_call(1, columns, mode=mode, group_size=group_size, device=device)
    call.check(call.run())


@pytest.mark.parametrize("layout", ["every_second_row", "rows_reversed", "even_stride"])
def test_shared_rows_of_any_layout(device, layout):
    """Rows of several dimensions; rows whose stride is compiled in."""

    call = make_call(2, 2, 1536, dtype=torch.bfloat16, device=device)
    dense = call.run()

    if layout == "even_stride":
        buffers = {
            name: torch.zeros(4, stride, dtype=torch.bfloat16, device=device)
            for name, stride in (("input", 1538), ("gate", 1546), ("out", 1554))
        }
        views = {name: buffer[:, :1536] for name, buffer in buffers.items()}

        for name in ("input", "gate"):
            views[name].copy_(call.tensors[name].view(4, 1536))

        dense = dense.view(4, 1536)
    else:
        views = {
            name: lay_out(tensor, layout)[0]
            for name, tensor in (
                *call.tensors.items(),
                ("out", torch.zeros_like(dense)),
            )
            if name != "weight"
        }

    out = views.pop("out")

    assert_equal_bits(call.with_tensors(**views).run(out=out), dense)


# Offsets past 2^31. `huge` is a fixture of the importing module: a float16 vector of zeros
# that is a little longer than 2^31.


@pytest.mark.parametrize("name", ["input", "gate", "out"])
@pytest.mark.parametrize(
    "shape, strides",
    [
        ((3, 32), (2**30, 1)),
        ((2, 3, 32), (2**31 - 64, 64, 1)),
        ((3, 2, 32), (64, 2**31 - 64, 1)),
        ((9, 32), (2**28, 1)),
        # Of strides that would be compiled in if the rows of a program did not reach so far.
        ((2, 32), (2**30 + 2, 1)),
        ((9, 32), (2**26 + 2, 1)),
    ],
    ids=str,
)
def test_rows_past_2_to_the_31(device, huge, name, shape, strides):
    """Cases S1, S3, S5: no offset wraps, whichever tensor and dimension it is."""

    call = make_call(*shape, dtype=torch.float16, device=device)
    expected = call.run()
    view = huge.as_strided(shape, strides)

    if name == "out":
        actual = call.run(out=view)
    else:
        view.copy_(call.tensors[name])
        actual = call.with_tensors(**{name: view}).run()

    assert_equal_bits(actual.clone(), expected)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_past_2_to_the_31(device, huge, name):
    """A column of a large matrix is a parameter like any other."""

    call = make_call(3, 9, dtype=torch.float16, bias=True, device=device)
    expected = call.run()
    view = huge.as_strided((9,), (2**28,))
    view.copy_(call.tensors[name])

    assert_equal_bits(call.with_tensors(**{name: view}).run(), expected)


@pytest.mark.parametrize("name", ["input", "gate"])
def test_a_row_past_2_to_the_31(device, huge, name):
    """A row that spans more than a kernel can address is copied."""

    call = make_call(3, 9, dtype=torch.float16, device=device)
    expected = call.run()
    view = huge.as_strided((3, 9), (1, 2**28))
    view.copy_(call.tensors[name])

    assert_equal_bits(call.with_tensors(**{name: view}).run(), expected)


def test_an_out_whose_row_is_past_2_to_the_31(device, huge):
    """What is written cannot be copied: it is refused by name, and not written."""

    call = make_call(3, 9, dtype=torch.float16, device=device)
    view = huge.as_strided((3, 9), (1, 2**28))
    view.fill_(7)

    with pytest.raises(ValueError, match=r"`out`.*2147483647.*\(1, 268435456\)"):
        call.run(out=view)

    assert (view == 7).all()


def test_parts_of_a_call_give_the_bits_of_the_whole(device, monkeypatch, choose_anew):
    """How a call is split to keep offsets small cannot be seen in its result."""

    call = make_call(7, 5, 32, dtype=torch.float16, bias=True, device=device)
    gate, _ = lay_out(call.tensors["gate"], "rows_reversed")
    call = call.with_tensors(gate=gate)
    expected = call.run()
    monkeypatch.setattr(_rows.split_rows, "__defaults__", (600,))
    choose_anew()

    assert_equal_bits(call.run(), expected)

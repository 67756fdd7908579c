"""The gradients of `gated_rms_norm` by its kernels: for the interpreter and for a GPU."""

import dataclasses
import math

import pytest
import torch
import torch.utils.checkpoint
from comparison import assert_equal_bits

from ntops_ext import configs, reference
from ntops_ext.torch import (
    _gated_rms_norm_backward,
    _launch,
    _rows,
    gated_rms_norm,
)
from ntops_ext.torch._gated_rms_norm_backward import backward

NAMES = ("input", "weight", "gate", "bias")

MODES = {
    "norm first": {},
    "norm first, bias": {"bias": True},
    "norm first, sigmoid, groups": {"activation": "sigmoid", "group_size": 16},
    "gate first": {"norm_before_gate": False},
    "gate first, groups, bias": {
        "norm_before_gate": False,
        "group_size": 32,
        "bias": True,
    },
    "gate first, sigmoid": {"norm_before_gate": False, "activation": "sigmoid"},
    "no gate": {"gate": False},
    "no weight": {"weight": False},
    "no weight, gate first, bias": {
        "weight": False,
        "norm_before_gate": False,
        "bias": True,
    },
    "input alone": {"weight": False, "gate": False},
    "offset": {"weight_offset": 1.0},
    "width of no power of two": {"columns": 96, "group_size": 48},
    "three pieces": {"columns": 384, "bias": True, "rows": (2,)},
    "groups of five pieces, gate first": {
        "columns": 1280,
        "group_size": 640,
        "norm_before_gate": False,
        "rows": (2,),
    },
}


def make(
    device,
    *,
    rows=(5,),
    columns=64,
    dtypes=(torch.float32,) * 4,
    weight=True,
    gate=True,
    bias=False,
    seed=0,
    **options,
):
    """An incoming gradient, the four tensors (None where absent), and the options of a call."""

    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    input_dtype, weight_dtype, gate_dtype, bias_dtype = dtypes
    tensors = (
        randn(*rows, columns, dtype=input_dtype),
        randn(columns, dtype=weight_dtype) if weight else None,
        randn(*rows, columns, dtype=gate_dtype) if gate else None,
        randn(columns, dtype=bias_dtype) if bias else None,
    )

    return randn(*rows, columns, dtype=input_dtype), tensors, options


def gradients(grad_output, tensors, options, needed=(True,) * 4):
    """By autograd, through the public operator."""

    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needed, strict=True)
    ]
    input, weight, gate, bias = leaves
    output = gated_rms_norm(input, weight, gate, bias=bias, **options)
    asked = [
        index
        for index, leaf in enumerate(leaves)
        if leaf is not None and leaf.requires_grad
    ]
    found = torch.autograd.grad(output, [leaves[index] for index in asked], grad_output)
    found = dict(zip(asked, found, strict=True))

    return [found.get(index) for index in range(4)]


def assert_right(grad_output, tensors, options, actual):
    input, weight, gate, bias = tensors
    options = {**options, "bias": bias}
    # Tensors of float64, so that nothing is rounded.
    wide = [None if one is None else one.double() for one in (input, weight, gate)]
    exact = reference.gated_rms_norm_backward(
        grad_output.double(),
        *wide,
        **{**options, "bias": None if bias is None else bias.double()},
        arithmetic_dtype=torch.float64,
    )
    errors = reference.gated_rms_norm_backward_errors(
        grad_output.double(),
        *wide,
        **{**options, "bias": None if bias is None else bias.double()},
    )

    for name, tensor, gradient, expected, error in zip(
        NAMES, tensors, actual, exact, errors, strict=True
    ):
        if tensor is None:
            assert gradient is None

            continue

        assert gradient.dtype == tensor.dtype, name
        assert gradient.shape == tensor.shape, name
        assert gradient.is_contiguous(), name
        unit = torch.finfo(tensor.dtype)
        # One rounding of the result, which may be subnormal.
        # Triton's interpreter truncates on the way to bfloat16.
        rounding = unit.eps if _truncates(tensor) else unit.eps / 2
        tolerance = error + expected.abs() * rounding + unit.smallest_normal * unit.eps
        excess = ((gradient.double() - expected).abs() / tolerance).nan_to_num()
        assert not gradient.isnan().any(), name
        assert excess.numel() == 0 or excess.max() <= 1, (name, excess.max())


def _truncates(tensor):
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


@pytest.fixture
def choose_anew():
    """A function that forgets what was chosen for layouts, as a test changes choices."""

    forget = _gated_rms_norm_backward._layouts_of_calls.clear
    yield forget
    forget()


@pytest.fixture
def small_pieces(monkeypatch, choose_anew):
    """Groups of more than 16 columns are taken in pieces of 16."""

    monkeypatch.setattr(configs, "_MAX_SUMMED_LANES", 16)
    monkeypatch.setattr(configs, "_COLUMNS_PER_PART", 16)
    monkeypatch.setattr(configs, "STATISTICS_COLUMNS_PER_PIECE", 16)
    choose_anew()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_right(device, mode):
    """Each mode, against float64."""

    call = make(device, **MODES[mode])
    assert_right(*call, gradients(*call))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gradients_are_right_in_16_bits(device, dtype, norm_before_gate):
    call = make(
        device,
        dtypes=(dtype, torch.float32, dtype, dtype),
        bias=True,
        norm_before_gate=norm_before_gate,
    )
    assert_right(*call, gradients(*call))


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 0), (2, 3), ()])
def test_any_number_of_rows(device, rows):
    """Without rows the gradients of the parameters are zeros."""

    call = make(device, rows=rows, bias=True)
    assert_right(*call, gradients(*call))


@pytest.mark.parametrize(
    "num_rows",
    [2, 4, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (16, 32))],
)
def test_fewer_rows_than_multiprocessors(device, num_rows):
    """Case D1: programs without a row of their own read and write nothing."""

    call = make(device, rows=(num_rows,), columns=512, bias=True)
    assert_right(*call, gradients(*call))


def test_sums_over_rows_are_in_float32(device):
    """In bfloat16 the gradients of the parameters would lose most of these rows."""

    call = make(device, rows=(64,), columns=16, bias=True, dtypes=(torch.bfloat16,) * 4)
    assert_right(*call, gradients(*call))


@pytest.mark.parametrize("odd_one", NAMES)
def test_a_gradient_has_the_dtype_of_its_tensor(device, odd_one):
    """Case X10: float32 among bfloat16 is rounded to float32."""

    dtypes = [torch.float32 if name == odd_one else torch.bfloat16 for name in NAMES]
    call = make(device, rows=(3,), columns=16, bias=True, dtypes=dtypes)
    actual = gradients(*call)
    assert_right(*call, actual)
    assert [gradient.dtype for gradient in actual] == dtypes


@pytest.mark.parametrize("columns", [64, 1024])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gates_of_zero(device, columns, norm_before_gate):
    """Case D2: where silu is 0 a quotient by it would be NaN, and what is saved is the gated result."""

    grad_output, tensors, options = make(
        device, rows=(2,), columns=columns, norm_before_gate=norm_before_gate
    )
    tensors[2][:, ::3] = 0.0
    tensors[2][1, 1::3] = -0.0
    actual = gradients(grad_output, tensors, options)
    assert_right(grad_output, tensors, options, actual)

    input, weight, gate, _ = tensors
    matrix = torch.ones(columns, 2, device=device, requires_grad=True)
    output = gated_rms_norm(input, weight, gate, **options)
    (output @ matrix).sum().backward()
    torch.testing.assert_close(
        matrix.grad, output.sum(0)[:, None].expand(-1, 2), rtol=1e-4, atol=1e-4
    )


def test_an_incoming_gradient_is_only_read(device):
    """Case D5: a sum hands one gradient to both of its terms; a second pass doubles all."""

    grad_output, tensors, _ = make(device)
    before = grad_output.clone()
    expected = gradients(grad_output, tensors, {})
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    other = torch.zeros_like(grad_output, requires_grad=True)
    total = gated_rms_norm(*leaves) + other

    for passes in (1, 2):
        total.backward(grad_output, retain_graph=True)

        assert torch.equal(grad_output, before)
        assert torch.equal(other.grad, passes * grad_output)

        for leaf, gradient in zip(leaves, expected, strict=False):
            assert torch.equal(leaf.grad, passes * gradient)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_call_has_the_same_gradients(device, use_reentrant):
    """What is computed again is computed from the saved input, once."""

    grad_output, tensors, _ = make(device, rows=(3,))
    expected = gradients(grad_output, tensors, {})
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    output = torch.utils.checkpoint.checkpoint(
        gated_rms_norm, *leaves, use_reentrant=use_reentrant
    )
    output.backward(grad_output)

    for leaf, gradient in zip(leaves, expected, strict=False):
        assert torch.equal(leaf.grad, gradient)


def test_steps_of_training(device):
    """Case G1: groups, first gated: gradients of the same groups make the loss fall, and nothing is NaN."""

    # A step takes the interpreter a second.
    num_steps = 5 if device == "cpu" else 100
    grad_output, (input, weight, gate, _), _ = make(device, rows=(2,), columns=16)
    leaves = [tensor.requires_grad_() for tensor in (input, weight, gate)]
    losses = []

    for _ in range(num_steps):
        output = gated_rms_norm(
            input, weight, gate, group_size=8, norm_before_gate=False
        )
        loss = (output - grad_output).square().mean()
        loss.backward()
        losses.append(loss.item())

        with torch.no_grad():
            for leaf in leaves:
                leaf -= 0.05 * leaf.grad
                leaf.grad = None

    assert all(leaf.isfinite().all() for leaf in leaves)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_only_what_is_needed_is_computed(device):
    """Each alone, and the two of rows, have the bits that they have when all are asked for."""

    call = make(device, bias=True)
    everything = gradients(*call)

    for asked in ("input", "weight", "gate", "bias", "input gate"):
        needed = [name in asked for name in NAMES]

        for gradient, expected, need in zip(
            gradients(*call, needed), everything, needed, strict=True
        ):
            assert (gradient is not None) == need
            assert gradient is None or torch.equal(gradient, expected)


def test_strides_do_not_change_a_rows_bits(device):
    """Columns of wider tensors, transposed rows, an expanded gradient."""

    grad_output, (input, weight, gate, _), _ = make(device, rows=(2, 3))
    grad_output = grad_output[:1, :1].expand(2, 3, 64)
    dense = (grad_output.contiguous(), (input, weight, gate, None), {})
    wide = torch.zeros(2, 3, 192, device=device)
    wide[..., 100:164] = gate
    strided = (
        grad_output,
        (
            input.transpose(0, 1).contiguous().transpose(0, 1),
            torch.stack([weight, weight], 1)[:, 0],
            wide[..., 100:164],
            None,
        ),
        {},
    )

    actual = gradients(*strided)
    assert_right(*strided, actual)
    expected = gradients(*dense)
    # What is added over rows is added in an order that depends on how rows can be merged.
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[2], expected[2])


@pytest.mark.parametrize(
    "columns, row_stride, sliced, is_in_parts",
    [
        (32, 38, (0,), False),
        (32, 38, (1, 2), False),
        (20, 48, (0,), False),
        (20, 48, (1, 2), False),
        (20, 48, (1, 2), True),
    ],
)
def test_row_strides_that_are_compiled_in_beside_others(
    device, request, columns, row_stride, sliced, is_in_parts
):
    """38 and 20 are, 32 and 48 are not: of some tensors one, of the others the other."""

    if is_in_parts:
        request.getfixturevalue("small_pieces")

    grad_output, (input, weight, gate, _), options = make(
        device, rows=(5,), columns=columns
    )
    tensors = [grad_output, input, gate]
    expected = gradients(grad_output, (input, weight, gate, None), options)

    for index in sliced:
        wide = torch.full((5, row_stride), float("nan"), device=device)
        tensors[index] = wide[:, :columns].copy_(tensors[index])

    grad_output, input, gate = tensors
    actual = gradients(grad_output, (input, weight, gate, None), options)

    for one, other in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(one, other)


def test_columns_apart(device):
    """Case L3: every tensor with a stride between its columns, and the gradient transposed; none is changed."""

    grad_output, (input, weight, gate, bias), _ = make(
        device, rows=(3,), columns=64, bias=True
    )

    def apart(tensor):
        return torch.stack([tensor, torch.full_like(tensor, 1e4)], -1)[..., 0]

    strided = (
        grad_output.t().contiguous().t(),
        (
            apart(input),
            apart(weight),
            gate.t().contiguous().t(),
            bias[:1].expand(64),
        ),
        {},
    )
    memory = [strided[0], *strided[1]]
    before = [tensor.clone() for tensor in memory]
    actual = gradients(*strided)
    assert_right(*strided, actual)

    # Several narrow rows at once are added, at last, in the order of Triton's layout, which
    # strides of columns may change. They change nothing from one call to the next.
    for one, other in zip(actual, gradients(*strided), strict=True):
        assert torch.equal(one, other)

    for tensor, old in zip(memory, before, strict=True):
        assert torch.equal(tensor, old)


def test_a_rows_gradients_depend_on_the_row_alone(device):
    """Of input and gate: the bits of a row are the same in a call of that row."""

    grad_output, (input, weight, gate, _), options = make(device, rows=(7,))
    whole = gradients(grad_output, (input, weight, gate, None), options)
    alone = gradients(grad_output[4:5], (input[4:5], weight, gate[4:5], None), options)
    assert torch.equal(whole[0][4:5], alone[0])
    assert torch.equal(whole[2][4:5], alone[2])


def test_second_derivatives_are_refused(device):
    _, (input, weight, gate, _), _ = make(device)
    output = gated_rms_norm(input.requires_grad_(), weight, gate)
    (gradient,) = torch.autograd.grad(output.sum(), input, create_graph=True)

    with pytest.raises(NotImplementedError, match="first gradients only"):
        torch.autograd.grad(gradient.sum(), input)


def test_a_gradient_of_another_shape_is_refused(device):
    grad_output, tensors, _ = make(device)
    options = (1e-5, None, True, "silu", 0.0)

    with pytest.raises(ValueError, match="grad_output"):
        backward(grad_output[:2], *tensors, *options, (True,) * 4)


@pytest.mark.parametrize("position", range(4), ids=NAMES)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param(lambda saved: saved.double(), TypeError, id="dtype"),
        pytest.param(lambda saved: saved[..., :32], ValueError, id="shape"),
        pytest.param(lambda saved: saved.flatten()[0], ValueError, id="scalar"),
        pytest.param(torch._neg_view, ValueError, id="negated"),
        pytest.param(lambda saved: saved.to("meta"), ValueError, id="device"),
    ],
)
def test_what_a_hook_makes_of_saved_tensors_is_checked(device, position, change, error):
    """No kernel reads behind a tensor that a hook has made shorter, or takes a value for its negative."""

    grad_output, tensors, options = make(device, bias=True)
    # A negative has the layout of what it is the negative of.
    gradients(grad_output, tensors, options)
    input, weight, gate, bias = (tensor.requires_grad_() for tensor in tensors)
    unpacked = iter(range(4))

    def unpack(saved):
        return change(saved) if next(unpacked) == position else saved

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack):
        output = gated_rms_norm(input, weight, gate, bias=bias)

    # Where the input is another one, the gradient is what differs.
    with pytest.raises(error, match=f"`{NAMES[position]}`"):
        output.backward(grad_output)

    assert all(tensor.grad is None for tensor in tensors)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_wide_groups(device, small_pieces, norm_before_gate):
    """Taken in pieces, of which the last is not whole; each group has its own parameters."""

    call = make(
        device,
        rows=(1,),
        columns=48,
        group_size=24,
        bias=True,
        norm_before_gate=norm_before_gate,
    )
    assert_right(*call, gradients(*call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_no_eps(device, norm_before_gate, dtype):
    """What pads rows and columns has no norm, and makes NaN of no gradient."""

    call = make(
        device,
        columns=12,
        dtypes=(dtype,) * 4,
        eps=0.0,
        norm_before_gate=norm_before_gate,
    )
    assert_right(*call, gradients(*call))


def test_an_eps_that_a_gpu_takes_for_zero(device, monkeypatch, choose_anew):
    """A subnormal one is added, and rows behind the last are padded as if there were none."""

    make_handle = _gated_rms_norm_backward.make_handle
    paddings = []

    def watch(premake, **keywords):
        paddings.append(keywords.get("padding"))

        return make_handle(premake, **keywords)

    monkeypatch.setattr(_gated_rms_norm_backward, "make_handle", watch)
    choose_anew()

    for eps, padding in ((2.0**-126, 0), (2.0**-127, 1)):
        paddings.clear()
        call = make(device, columns=16, gate=False, eps=eps)
        assert_right(*call, gradients(*call))
        # The sum of partial sums has none.
        assert paddings == [padding, None]


def test_a_wide_open_sigmoid(device):
    """Its slope, however small, keeps its digits."""

    grad_output, (input, weight, gate, _), options = make(
        device, columns=16, activation="sigmoid"
    )
    call = (grad_output, (input, weight, gate + 14, None), options)
    assert_right(*call, gradients(*call))


def test_every_partial_sum_is_written(device, monkeypatch, choose_anew):
    """Of more rows than there are programs; memory that nobody writes is NaN."""

    monkeypatch.setattr(configs, "_MULTIPROCESSORS", 1)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    choose_anew()
    # 5 tiles of 64 rows, by 4 programs at most: 3 programs take up to 2 each.
    call = make(device, rows=(301,), columns=16, gate=False, bias=True)
    torch.use_deterministic_algorithms(True, warn_only=True)

    try:
        assert torch.empty(1, device=device).isnan()

        actual = gradients(*call)
    finally:
        torch.use_deterministic_algorithms(False)

    assert_right(*call, actual)


def test_pieces_of_more_rows_than_programs(device, monkeypatch, choose_anew):
    """Step by step, each piece goes on with its own sums."""

    monkeypatch.setattr(configs, "_row_blocks", lambda *_: 1)
    choose_anew()
    call = make(device, rows=(2,), columns=384, gate=False)
    assert_right(*call, gradients(*call))


@pytest.mark.parametrize(
    "columns, rows_per_step, dtype",
    [
        (16, 1, torch.bfloat16),
        pytest.param(16, 64, torch.float16, marks=pytest.mark.slow),
        pytest.param(384, 1, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_no_bit_depends_on_what_is_held(
    device, monkeypatch, choose_anew, columns, rows_per_step, dtype
):
    """What a program computes once more is what it was, in the row after one of NaN too."""

    own = configs.gated_rms_norm_backward_config(columns, 1)
    grad_output, tensors, options = make(
        device, rows=(3,), columns=columns, dtypes=(dtype,) * 4, bias=True
    )
    broken = tensors[0].clone()
    broken[1] = math.nan
    found = []

    for recomputes in (False, True):
        config = dataclasses.replace(
            own,
            rows_per_step=rows_per_step,
            max_row_blocks=1,
            recomputes=recomputes,
        )
        monkeypatch.setattr(
            configs,
            "gated_rms_norm_backward_config",
            lambda *_, own=config, **__: own,
        )
        choose_anew()
        found.append(
            gradients(grad_output, tensors, options)
            + gradients(grad_output, (broken, *tensors[1:]), options)
        )

    held, recomputed = found

    assert held[4][1].isnan().all() and not held[4][2].isnan().any()

    for one, other in zip(recomputed, held, strict=True):
        assert_equal_bits(one.nan_to_num(), other.nan_to_num())


def test_a_call_that_is_cut(device, monkeypatch, choose_anew):
    """Where offsets would pass the bound, in launches whose partial sums are all added."""

    call = make(device, rows=(5,), columns=16, bias=True)
    whole = gradients(*call)
    launches = []
    launch = _launch.launch

    def counting_launch(handle, *arguments):
        launches.append(handle)
        launch(handle, *arguments)

    monkeypatch.setattr(_rows.split_rows, "__defaults__", (50,))
    choose_anew()

    with monkeypatch.context() as patch:
        leaves = [one.detach().requires_grad_() for one in call[1]]
        output = gated_rms_norm(*leaves[:3], bias=leaves[3])
        patch.setattr(_launch, "launch", counting_launch)
        cut = torch.autograd.grad(output, leaves, call[0])

    # Of 2 rows and of 3, then the sums for weight and bias.
    assert len(launches) == 4
    assert_right(*call, cut)
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[2], whole[2])

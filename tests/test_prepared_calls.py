"""Operators: a call that was prepared launches what the same call launches when it goes the whole way."""

import collections
import functools
import gc
import itertools
import random
import weakref

import pytest
import torch
from operator_calls import forget, recording_operators
from rope_inputs import make_pack, make_rope
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import ninetoothed_patches
import ntops_ext
from ntops_ext.torch import (
    _gated_rms_norm,
    _layouts,
    _prepared,
    _qk_norm_rope,
    _qk_norm_rope_pack,
    _rows,
)

# Module, and the name of its layouts.
MODULES = {
    "gated_rms_norm": (_gated_rms_norm, "_layouts_of_calls"),
    "qk_norm_rope": (_qk_norm_rope, "layouts"),
    "qk_norm_rope_pack_": (_qk_norm_rope_pack, "layouts"),
}


@pytest.fixture(scope="module")
def recorder():
    """One for all tests: for another driver each kernel is compiled again."""

    with recording_operators() as driver:
        yield driver


@pytest.fixture
def driver(recorder):
    """A recording driver; what was known of calls is forgotten."""

    forget()
    recorder.clear()

    return recorder


def whole_way(monkeypatch, name, arguments, keywords):
    """The result of a call that nothing is known of."""

    module, layouts = MODULES[name]
    prepared_calls, known = module._prepared_calls, getattr(module, layouts)

    with monkeypatch.context() as patch:
        patch.setattr(module._prepared_calls, "recent", ())
        patch.setattr(known, "_kept", {})
        assert prepared_calls.recent == ()

        return getattr(ntops_ext.torch, name)(*arguments, **keywords)


def launches(driver, call, *, given):
    """What a call launched, with names in place of the addresses of its tensors."""

    driver.clear()
    result = call()
    results = result if isinstance(result, tuple) else (result,)
    names = {
        tensor.data_ptr(): position
        for position, tensor in enumerate((*results, *given))
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    }

    return [
        (
            record.grid,
            record.stream,
            record.function,
            [names.get(value, value) for value in record.values],
            [kind for kind, _ in record.rest],
        )
        for record in driver.take()
    ], result


def check(driver, monkeypatch, name, arguments, keywords=None):
    """Call both ways, and assert that they launch the same and return tensors alike."""

    keywords = keywords or {}
    given = (*arguments, *keywords.values())
    expected, one = launches(
        driver, lambda: whole_way(monkeypatch, name, arguments, keywords), given=given
    )
    actual, other = launches(
        driver,
        lambda: getattr(ntops_ext.torch, name)(*arguments, **keywords),
        given=given,
    )
    assert expected == actual
    assert len(actual) == 1
    both = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]

    for result, other_result in both:
        assert result.shape == other_result.shape
        assert result.stride() == other_result.stride()
        assert result.dtype == other_result.dtype
        assert result.device == other_result.device
        assert result.requires_grad == other_result.requires_grad
        assert result.is_inference() == other_result.is_inference()

    return other


def is_prepared(name, arguments, keywords=None):
    """Whether a call would not go the whole way."""

    module, layouts = MODULES[name]
    known = getattr(module, layouts)
    went = []
    original = known.get

    def get(*given):
        went.append(given)

        return original(*given)

    known.get = get

    try:
        getattr(ntops_ext.torch, name)(*arguments, **(keywords or {}))
    finally:
        del known.get

    return not went


def norm_arguments(*, rows=6, columns=128, dtype=torch.bfloat16, gate=True, **keywords):
    """Positional arguments and keywords; tensors are new each time."""

    input = torch.zeros(rows, columns, dtype=dtype)
    weight = torch.zeros(columns, dtype=dtype)

    return (input, weight, torch.zeros_like(input) if gate else None), keywords


def norm_out(**keywords):
    arguments, keywords = norm_arguments(**keywords)

    return arguments, keywords | {"out": torch.zeros_like(arguments[0])}


def norm_in_place(**keywords):
    arguments, keywords = norm_arguments(**keywords)

    return arguments, keywords | {"out": arguments[0]}


def norm_of_slices(width=640):
    projection = torch.zeros(6, width, dtype=torch.bfloat16)

    return (projection[:, :128], None, projection[:, 256:384]), {"group_size": 64}


def rope_arguments(*, tokens=5, with_out=False):
    heads = torch.zeros(2, tokens, 4, 64, dtype=torch.bfloat16)
    arguments = heads, torch.ones(64, dtype=torch.bfloat16), make_rope(tokens, 64)

    return arguments, {"out": torch.zeros_like(heads)} if with_out else {}


def pack_arguments(*, keep_prefixes=False, **options):
    inputs = make_pack(heads=4, kv_heads=2, head_dim=64, tokens=5, **options)

    if keep_prefixes:
        inputs.k_prefix = inputs.k_out[:, :5]
        inputs.v_prefix = inputs.v_out[:, :5]

    return tuple(inputs.arguments()), {}


CALLS = {
    "norm": ("gated_rms_norm", norm_arguments),
    "norm, out": ("gated_rms_norm", norm_out),
    "norm, in place": ("gated_rms_norm", norm_in_place),
    "norm, slices": ("gated_rms_norm", norm_of_slices),
    # Row strides that 16 does not divide are compiled in.
    "norm, slices of 648 columns": ("gated_rms_norm", lambda: norm_of_slices(648)),
    "norm, 120 columns": ("gated_rms_norm", lambda: norm_out(columns=120)),
    "norm, no gate": ("gated_rms_norm", lambda: norm_arguments(gate=False)),
    # Programs share a row, but where it is overwritten.
    "norm, 2048 columns": ("gated_rms_norm", lambda: norm_arguments(columns=2048)),
    "norm, 2048 columns, in place": (
        "gated_rms_norm",
        lambda: norm_in_place(columns=2048),
    ),
    "norm, bias": (
        "gated_rms_norm",
        lambda: norm_arguments(bias=torch.zeros(128), norm_before_gate=False),
    ),
    "norm, float32": (
        "gated_rms_norm",
        lambda: norm_arguments(dtype=torch.float32, weight_offset=1.0, eps=1e-6),
    ),
    "rope": ("qk_norm_rope", rope_arguments),
    "rope, out": ("qk_norm_rope", lambda: rope_arguments(with_out=True)),
    "pack": ("qk_norm_rope_pack_", pack_arguments),
    "pack, in place": ("qk_norm_rope_pack_", lambda: pack_arguments(sources="")),
    "pack, no prefix": ("qk_norm_rope_pack_", lambda: pack_arguments(prefix=0)),
    "pack, prefixes kept": (
        "qk_norm_rope_pack_",
        lambda: pack_arguments(keep_prefixes=True),
    ),
    "pack, padded": ("qk_norm_rope_pack_", lambda: pack_arguments(padding=16)),
}


@pytest.mark.parametrize("case", CALLS)
def test_prepared_calls_launch_the_same(driver, monkeypatch, case):
    """Each mode, called again with the same tensors and with others of their layout."""

    name, make = CALLS[case]
    first, second = make(), make()

    with torch.no_grad():
        for arguments, keywords in [first, second] * 4:
            check(driver, monkeypatch, name, arguments, keywords)

        assert is_prepared(name, *first)
        assert is_prepared(name, *second)


def test_programs_share_no_row_that_is_overwritten(driver):
    """Of one layout, whichever was called before: two programs a row elsewhere, one in place."""

    first, second = torch.zeros(2, 3, 2048, dtype=torch.bfloat16)

    for out, programs in [(second, 6), (first, 3), (None, 6)] * 4:
        driver.clear()
        ntops_ext.torch.gated_rms_norm(first, out=out)
        (record,) = driver.take()

        assert record.grid[0] == programs


def test_calls_in_random_order_launch_the_same(driver, monkeypatch):
    """More kinds of calls than are compared with first, in grad mode and without, in inference mode."""

    generator = random.Random(0)
    cases = [(name, *make()) for name, make in CALLS.values() for make in (make, make)]
    modes = (torch.no_grad, torch.enable_grad, torch.inference_mode)

    for _ in range(300):
        with generator.choice(modes)():
            check(driver, monkeypatch, *generator.choice(cases))

    for module, _ in MODULES.values():
        assert 0 < len(module._prepared_calls.recent) <= 4


@pytest.mark.parametrize("case", ["norm", "rope", "pack"])
def test_a_whole_number_for_eps_is_prepared_for(driver, case):
    """It is compared as it was given, not as the float that the kernel takes."""

    name, make = CALLS[case]
    arguments, keywords = make()

    with torch.no_grad():
        warm(name, arguments, keywords | {"eps": 1})


# What differs from `norm_out()` in one thing, and must not be taken for it.
def _other_strides(arguments, keywords):
    input, weight, gate = arguments

    return (torch.zeros(128, 6, dtype=input.dtype).t(), weight, gate), keywords


def _other_dtype(arguments, keywords):
    input, weight, gate = arguments

    return (input, weight.float(), gate), keywords


def _misaligned(arguments, keywords):
    input, weight, gate = arguments
    buffer = torch.zeros(gate.numel() + 1, dtype=gate.dtype)

    return (input, weight, buffer[1:].view(gate.shape)), keywords


def _option(**options):
    return lambda arguments, keywords: (arguments, keywords | options)


OTHERS = {
    "shape": lambda arguments, keywords: norm_out(rows=7),
    "strides": _other_strides,
    "dtype": _other_dtype,
    "misaligned": _misaligned,
    "no gate": lambda arguments, keywords: ((*arguments[:2], None), keywords),
    "no weight": lambda arguments, keywords: (
        (arguments[0], None, arguments[2]),
        keywords,
    ),
    "bias": _option(bias=torch.zeros(128)),
    "eps": _option(eps=1e-6),
    "integer eps": _option(eps=1),
    "group_size": _option(group_size=64),
    "order": _option(norm_before_gate=False),
    "activation": _option(activation="sigmoid"),
    "weight_offset": _option(weight_offset=1.0),
    "no out": lambda arguments, keywords: (arguments, {}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_is_not_taken_for_the_same(driver, monkeypatch, other):
    """One thing is not as in the calls before."""

    call = norm_out()

    for _ in range(3):
        check(driver, monkeypatch, "gated_rms_norm", *call)

    for _ in range(4):
        check(driver, monkeypatch, "gated_rms_norm", *OTHERS[other](*call))
        check(driver, monkeypatch, "gated_rms_norm", *call)


def warm(name, arguments, keywords):
    for _ in range(3):
        getattr(ntops_ext.torch, name)(*arguments, **keywords)

    assert is_prepared(name, arguments, keywords)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"norm_before_gate": 1}, TypeError, "norm_before_gate"),
        ({"eps": True}, TypeError, "eps"),
        ({"group_size": 128.0}, TypeError, "group_size"),
        ({"activation": "gelu"}, ValueError, "activation"),
    ],
)
def test_values_that_are_equal_and_wrong_are_refused(driver, keywords, error, message):
    """True equals 1: what was right before must not let through what is not."""

    arguments, options = norm_arguments(eps=1.0, group_size=128)
    warm("gated_rms_norm", arguments, options)
    driver.clear()

    with pytest.raises(error, match=message):
        ntops_ext.torch.gated_rms_norm(*arguments, **(options | keywords))

    assert driver.take() == []


def test_an_overlap_at_new_addresses_is_refused(driver):
    """The same layouts, but the output now lies across the gate."""

    buffer = torch.zeros(12, 128, dtype=torch.bfloat16)
    input, weight = torch.zeros(6, 128, dtype=torch.bfloat16), torch.zeros(128)
    warm("gated_rms_norm", (input, weight, buffer[:6]), {"out": buffer[6:]})
    driver.clear()

    with pytest.raises(ValueError, match="gate"):
        ntops_ext.torch.gated_rms_norm(input, weight, buffer[:6], out=buffer[3:9])

    assert driver.take() == []


@pytest.mark.parametrize("case", CALLS)
def test_new_addresses_are_prepared_for(driver, monkeypatch, case):
    """Tensors that lie apart, or to each other as before, are not compared element by element again."""

    name, make = CALLS[case]
    warm(name, *make())
    others = [make() for _ in range(8)]
    driver.clear()

    for arguments, keywords in others:
        assert is_prepared(name, arguments, keywords)

    assert len(driver.take()) == len(others)

    for arguments, keywords in others:
        check(driver, monkeypatch, name, arguments, keywords)


def outcome(driver, call, given):
    """What a call launched, or what it raised, having launched nothing."""

    try:
        return launches(driver, call, given=given)[0]
    except ValueError as error:
        assert driver.take() == []

        return str(error)


def norm_in_one_buffer(generator, buffer):
    """Rows of 128 columns, 256 apart: others fit in between."""

    def at(offset):
        return buffer.as_strided((6, 128), (256, 1), 64 * offset)

    input, gate, out = (at(generator.randrange(64)) for _ in range(3))
    weight = buffer[64 * generator.randrange(80) :][:128]

    return (input, weight, gate), {"out": generator.choice([out, out, input])}


def pack_in_one_buffer(generator, buffer):
    """Each tensor in a place of its own, but for one that lies anywhere."""

    inputs, _ = pack_arguments()
    arguments = []
    moved = generator.choice([None, *range(len(inputs))])

    for position, tensor in enumerate(inputs):
        offset = 1536 * position

        if position == moved:
            offset = 64 * generator.randrange(240)
        elif position in (6, 7) and generator.randrange(2):
            # The rows of the packed tensor itself.
            offset = 1536 * (position - 5)

        offset //= 4 if tensor.is_complex() else 1
        arguments.append(
            buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
        )

    return tuple(arguments), {}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gated_rms_norm", norm_in_one_buffer),
        ("qk_norm_rope_pack_", pack_in_one_buffer),
    ],
)
def test_tensors_anywhere_in_one_buffer(driver, monkeypatch, name, place):
    """The same layouts: one call is as right or as wrong as if nothing were known."""

    generator = random.Random(0)
    buffer = torch.zeros(20480, dtype=torch.bfloat16)
    outcomes = collections.Counter()

    for _ in range(300):
        arguments, keywords = place(generator, buffer)
        given = (*arguments, *keywords.values())
        expected, actual = (
            outcome(
                driver, functools.partial(function, *way, arguments, keywords), given
            )
            for function, way in (
                (whole_way, (monkeypatch, name)),
                (known_way, (name,)),
            )
        )
        assert expected == actual
        outcomes[isinstance(actual, str)] += 1

    assert min(outcomes[True], outcomes[False]) > 50


def known_way(name, arguments, keywords):
    return getattr(ntops_ext.torch, name)(*arguments, **keywords)


def test_prefixes_that_lie_elsewhere_are_copied(driver, monkeypatch):
    """The same layouts: whether prefixes are the buffers' own rows is seen by addresses."""

    arguments, _ = pack_arguments(keep_prefixes=True)
    warm("qk_norm_rope_pack_", arguments, {})
    elsewhere = list(arguments)
    elsewhere[6] = torch.zeros_like(arguments[1])[:, :5]
    elsewhere[7] = torch.zeros_like(arguments[2])[:, :5]

    for _ in range(4):
        check(driver, monkeypatch, "qk_norm_rope_pack_", elsewhere)
        check(driver, monkeypatch, "qk_norm_rope_pack_", arguments)


@pytest.mark.parametrize("case", ["norm", "rope", "pack, in place"])
def test_lazy_negatives_are_refused(driver, case):
    """A negative is a bit of the tensor object, not of its layout."""

    name, make = CALLS[case]
    arguments, keywords = make()
    warm(name, arguments, keywords)
    negative = (torch._neg_view(arguments[0]), *arguments[1:])

    with pytest.raises(ValueError, match="neg"):
        getattr(ntops_ext.torch, name)(*negative, **keywords)


@pytest.mark.parametrize("case", ["norm", "rope"])
def test_gradients_are_not_lost(driver, case):
    """A parameter is taken without gradients, and not taken as such where they are recorded."""

    name, make = CALLS[case]
    (input, weight, *rest), keywords = make()
    arguments = (input, torch.nn.Parameter(weight), *rest)

    with torch.no_grad():
        warm(name, arguments, keywords)

    assert not is_recorded_as_constant(name, arguments, keywords)


def is_recorded_as_constant(name, arguments, keywords):
    try:
        result = getattr(ntops_ext.torch, name)(*arguments, **keywords)
    except NotImplementedError:
        return False

    return not result.requires_grad


@pytest.mark.parametrize("case", ["norm", "rope", "pack, in place"])
def test_tangents_are_not_lost(driver, case):
    """They are refused, as before the call was prepared."""

    name, make = CALLS[case]
    arguments, keywords = make()
    warm(name, arguments, keywords)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(arguments[0], torch.ones_like(arguments[0]))

        with pytest.raises(NotImplementedError):
            getattr(ntops_ext.torch, name)(dual, *arguments[1:], **keywords)


@pytest.mark.parametrize("case", ["norm, out", "rope, out", "pack"])
def test_written_tensors_count_a_version(driver, monkeypatch, case):
    """As if PyTorch had written them, so that autograd notices."""

    name, make = CALLS[case]
    arguments, keywords = make()
    warm(name, arguments, keywords)
    written = arguments[:3] if name == "qk_norm_rope_pack_" else [keywords["out"]]
    before = [tensor._version for tensor in written]
    assert is_prepared(name, arguments, keywords)
    assert [tensor._version for tensor in written] == [one + 1 for one in before]


@pytest.mark.parametrize("case", ["norm, out", "rope, out", "pack"])
@pytest.mark.parametrize(
    ("mode", "other_mode"),
    [
        (torch.no_grad, torch.inference_mode),
        (torch.inference_mode, torch.no_grad),
    ],
)
def test_tensors_of_inference_mode_are_told_from_others(driver, case, mode, other_mode):
    """Also in the other mode, where they look like these: only the others count versions."""

    name, make = CALLS[case]

    with torch.inference_mode():
        of_inference = make()

    normal = make()
    first, second = (
        (of_inference, normal) if mode is torch.no_grad else (normal, of_inference)
    )

    with mode():
        warm(name, *first)

    arguments, keywords = second
    written = arguments[:3] if name == "qk_norm_rope_pack_" else [keywords["out"]]
    counted = [tensor for tensor in written if not tensor.is_inference()]
    before = [tensor._version for tensor in counted]

    with other_mode():
        getattr(ntops_ext.torch, name)(*arguments, **keywords)

    assert [tensor._version for tensor in counted] == [one + 1 for one in before]


@pytest.mark.parametrize("case", ["norm", "rope", "pack"])
def test_a_call_of_several_launches_is_not_prepared(driver, monkeypatch, case):
    """It is cut where offsets are too large; the first of its launches is not the call."""

    monkeypatch.setattr(_rows.split_rows, "__defaults__", (500,))

    for module in (_qk_norm_rope, _qk_norm_rope_pack):
        cut = functools.partial(module.plan_chunks, max_offset=500)
        monkeypatch.setattr(module, "plan_chunks", cut)

    name, make = CALLS[case]
    arguments, keywords = make()
    counts = set()

    for _ in range(5):
        driver.clear()

        with torch.no_grad():
            getattr(ntops_ext.torch, name)(*arguments, **keywords)

        counts.add(len(driver.take()))

    assert len(counts) == 1
    assert counts.pop() > 1


def test_a_row_of_plans_that_are_dropped(driver, monkeypatch):
    """After `clear_plans` a call goes the whole way again, and is prepared again."""

    call = norm_arguments()

    for _ in range(3):
        warm("gated_rms_norm", *call)
        ninetoothed_patches.clear_plans()
        assert not is_prepared("gated_rms_norm", *call)
        check(driver, monkeypatch, "gated_rms_norm", *call)
        check(driver, monkeypatch, "gated_rms_norm", *call)
        check(driver, monkeypatch, "gated_rms_norm", *call)


def test_prepared_calls_hold_no_tensor(driver):
    """Nothing keeps the arguments or the result of a call alive."""

    for name, make in CALLS.values():
        arguments, keywords = make()

        with torch.no_grad():
            warm(name, arguments, keywords)
            result = getattr(ntops_ext.torch, name)(*arguments, **keywords)

        results = result if isinstance(result, tuple) else (result,)
        tensors = [
            weakref.ref(tensor)
            for tensor in (*arguments, *results, *keywords.values())
            if isinstance(tensor, torch.Tensor)
        ]
        del arguments, keywords, result, results
        gc.collect()
        assert [tensor for tensor in tensors if tensor() is not None] == []


def test_arguments_of_other_kinds_are_refused_as_ever(driver):
    """A comparison with a prepared call is no place to fail."""

    arguments, keywords = norm_arguments()
    warm("gated_rms_norm", arguments, keywords)

    for position, wrong in itertools.product(range(3), ["text", 3, [1.0], object()]):
        given = list(arguments)
        given[position] = wrong

        with pytest.raises(TypeError, match=("input", "weight", "gate")[position]):
            ntops_ext.torch.gated_rms_norm(*given, **keywords)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", ["norm, out", "rope", "pack"])
def test_nested_tensors_are_refused_as_ever(driver, case):
    """Each is a strided tensor without strides: PyTorch's guard would end the process at one."""

    name, make = CALLS[case]
    arguments, keywords = make()
    warm(name, arguments, keywords)

    for position, argument in enumerate(arguments):
        nested = torch.nested.nested_tensor([argument, argument])
        given = (*arguments[:position], nested, *arguments[position + 1 :])

        with pytest.raises(TypeError, match="is a nested one"):
            getattr(ntops_ext.torch, name)(*given, **keywords)


def test_few_calls_are_kept(driver):
    """Of a layout, and of all."""

    layout = _prepared.OfLayout()
    dues = [layout.is_due() for _ in range(64)]
    assert [index + 1 for index, due in enumerate(dues) if due] == [2, 4, 8, 16, 32, 64]

    for call in range(9):
        layout.add(call)

    assert layout.calls == (8, 7, 6, 5)
    calls = _prepared.PreparedCalls(("x",), "x", ())

    for call in (*range(9), 6):
        calls.use(call)

    assert calls.recent == (6, 8, 7, 5)


def test_the_number_of_remembered_layouts_bounds_prepared_calls(driver, monkeypatch):
    """What belongs to a layout goes with it."""

    monkeypatch.setattr(_layouts, "_MAX_REMEMBERED", 2)

    for rows in range(1, 6):
        warm("gated_rms_norm", *norm_arguments(rows=rows))

    assert len(_gated_rms_norm._layouts_of_calls._kept) <= 2


def test_addresses_of_layouts_that_were_forgotten_are_bounded(driver, monkeypatch):
    """A prepared call outlives its layout, and goes on remembering addresses."""

    monkeypatch.setattr(_layouts, "_MAX_REMEMBERED", 3)
    monkeypatch.setattr(_layouts, "_MAX_ADDRESSES", 16)
    warm("gated_rms_norm", *norm_out())
    (layout,) = _gated_rms_norm._layouts_of_calls._kept.values()
    # All at once, so that no two have one address.
    calls = [norm_out() for _ in range(60)]
    met = []

    for index, call in enumerate(calls):
        assert is_prepared("gated_rms_norm", *call)
        met.append(len(layout.addresses))

        if index % 12 == 11:
            for rows in range(4):
                arguments, keywords = norm_out(rows=10 + 4 * index + rows)
                ntops_ext.torch.gated_rms_norm(*arguments, **keywords)

    assert layout not in _gated_rms_norm._layouts_of_calls._kept.values()
    assert 4 < max(met) <= 16


class Nothing(TorchDispatchMode):
    """Notes what passes, and does not do it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())


def test_any_number_of_groups_is_one_launch(driver):
    """Case G7: one group or many, by one kernel: none is computed by PyTorch's operators."""

    arguments, _ = norm_arguments(columns=1024)

    for groups in (1, 2, 8):
        driver.clear()
        ntops_ext.torch.gated_rms_norm(*arguments, group_size=1024 // groups)

        assert len(driver.take()) == 1


@pytest.mark.parametrize("case", ["norm, out", "rope, out", "pack"])
def test_a_mode_is_not_passed_over(driver, case):
    """It sees the operator, and a call that was prepared launches nothing behind its back."""

    name, make = CALLS[case]
    arguments, keywords = make()
    operator = getattr(ntops_ext.torch, name)

    for _ in range(3):
        operator(*arguments, **keywords)

    assert is_prepared(name, arguments, keywords)

    driver.clear()

    with Nothing() as mode:
        operator(*arguments, **keywords)

    assert not driver.take()
    assert any(seen.startswith(f"ntops_ext::{name.rstrip('_')}") for seen in mode.names)


@pytest.mark.parametrize("name", MODULES)
def test_a_fake_tensor_is_not_taken_for_a_prepared_one(driver, name):
    """Nothing is launched: it has no address."""

    make = {
        "gated_rms_norm": norm_arguments,
        "qk_norm_rope": rope_arguments,
        "qk_norm_rope_pack_": pack_arguments,
    }[name]
    arguments, keywords = make()
    operator = getattr(ntops_ext.torch, name)

    for _ in range(3):
        operator(*arguments, **keywords)

    assert is_prepared(name, arguments, keywords)

    driver.clear()

    with FakeTensorMode() as mode:
        fakes = [
            mode.from_tensor(argument)
            if isinstance(argument, torch.Tensor)
            else argument
            for argument in arguments
        ]
        operator(*fakes, **keywords)

    assert not driver.take()

"""Random calls: a planned handle launches exactly what its unpatched twin launches.

The layouts are drawn from a small set, so that calls meet plans of all kinds, and compilations stay few.
"""

import random

import hypothesis
import launch_kernels
import pytest
import torch
from hypothesis import strategies
from launch_helpers import Pair, outcome, rows
from recording_driver import recording

import ninetoothed_patches
from ninetoothed_patches import call_key

_dtypes = strategies.sampled_from([torch.bfloat16, torch.float16, torch.float32])
_counts = strategies.sampled_from([0, 1, 5, 16])


@strategies.composite
def matrices(draw, dtype=None, count=None):
    """[count, 128] in one of the layouts that Triton tells apart, and some that it does not."""

    dtype = draw(_dtypes) if dtype is None else dtype
    count = draw(_counts) if count is None else count
    kind = draw(
        strategies.sampled_from(
            ["dense", "dense", "padded", "odd", "offset", "expanded", "columns"]
        )
    )

    if kind == "padded":
        return rows(count, dtype=dtype, stride=256)

    if kind == "odd":
        return rows(count, dtype=dtype, stride=131)

    if kind == "offset":
        return rows(count, dtype=dtype, offset=draw(strategies.sampled_from([1, 8])))

    if kind == "expanded":
        return rows(1, dtype=dtype).expand(count, 128)

    if kind == "columns":
        return torch.zeros(128, count, dtype=dtype).t()

    tensor = rows(count, dtype=dtype)

    return torch.nn.Parameter(tensor) if draw(strategies.booleans()) else tensor


# Values that are equal, or nearly, and of another kind.
scalars = strategies.sampled_from(
    [0.0, -0.0, 0.5, 1.0, float("nan"), float("inf"), 0, 1, 2, 16, 17, -1]
    + [2**31 - 1, 2**31, True, False]
)

forms = strategies.integers(0, 3)


def spoken(form, names, values):
    """One of the ways to write down a call."""

    if form == 0:
        return values, {}

    if form == 1:
        return (), dict(zip(names, values, strict=True))

    if form == 2:
        return (), dict(reversed(list(zip(names, values, strict=True))))

    return values[:1], dict(zip(names[1:], values[1:], strict=True))


@strategies.composite
def calls_of_scale(draw):
    count, dtype = draw(_counts), draw(_dtypes)
    x, o = draw(matrices(dtype, count)), draw(matrices(dtype, count))

    # In place, now and then.
    return ("x", "s", "o"), (x, draw(scalars), draw(strategies.sampled_from([o, o, x])))


@strategies.composite
def calls_of_spare(draw):
    (_, (x, s, o)) = draw(calls_of_scale())

    return ("x", "s", "b", "o"), (x, s, draw(scalars | strategies.none()), o)


@strategies.composite
def calls_of_axpy(draw):
    count = draw(_counts)
    dtypes = strategies.sampled_from([torch.bfloat16, torch.float32])
    x, y, o = (draw(matrices(draw(dtypes), count)) for _ in range(3))

    return ("x", "y", "o", "a"), (x, y, o, draw(strategies.sampled_from([0.5, 2])))


@strategies.composite
def calls_of_scale_t(draw):
    length = draw(strategies.sampled_from([0, 1, 100, 1000, 1024]))
    step = draw(strategies.sampled_from([1, 2]))
    x, o = (
        torch.zeros(step * length + 1, dtype=torch.bfloat16)[offset:][
            : step * length : step
        ]
        for offset in draw(strategies.sampled_from([(0, 0), (1, 0)]))
    )

    return ("x", "s", "o"), (x, draw(strategies.sampled_from([0.5, 2, True])), o)


KERNELS = {
    "scale": calls_of_scale(),
    "scale_strided": calls_of_scale(),
    "scale_c": calls_of_scale(),
    "spare": calls_of_spare(),
    "axpy": calls_of_axpy(),
    "scale_t": calls_of_scale_t(),
}


@pytest.fixture(scope="module", params=["C launcher", "plain launcher"])
def driver(request):
    with recording(plain_launcher=request.param == "plain launcher") as driver:
        yield driver


@pytest.mark.parametrize("name", KERNELS)
def test_random_calls_launch_what_the_twin_launches(driver, name):
    """Same grid, stream, function, metadata and arguments, or the same error; and each call is counted once."""

    pair = Pair(name, driver, max_plans=16)
    calls = 0

    @hypothesis.settings(max_examples=40)
    @hypothesis.given(data=strategies.data())
    def random_calls(data):
        nonlocal calls
        drawn = data.draw(strategies.lists(KERNELS[name], min_size=2, max_size=4))
        order = data.draw(
            strategies.lists(
                strategies.integers(0, len(drawn) - 1), min_size=4, max_size=8
            )
        )

        for index in order:
            names, values = drawn[index]
            args, kwargs = spoken(data.draw(forms), names, values)
            pair.call(*args, **kwargs)
            calls += 1

        assert sum(pair.counts) == calls
        assert pair.info.plans <= 16

    random_calls()

    # It would say nothing about a fast way that nobody took.
    assert calls > 160
    assert pair.info.hits > calls / 3
    assert pair.info.misses > 10


def test_without_tensor_guards_the_key_decides_alone(driver, monkeypatch):
    """A PyTorch that lacks them, or whose guards tell too little apart, costs time and nothing else."""

    monkeypatch.setattr(call_key, "_tensor_guards", lambda: None)
    pair = Pair("scale", driver)

    for offset in (0, 1):
        for s in (0.5, 2):
            for _ in range(3):
                pair.call(rows(offset=offset), s, rows())

    assert pair.counts == (8, 4, 0)
    assert pair.planned._cache.last.successors == ()


def test_more_layouts_than_are_compared_at_once(driver):
    """Layouts in no order: some are found among the successors of the last plan, some by their keys."""

    pair = Pair("scale", driver)
    choose = random.Random(0)

    for count in (*range(1, 13), *choose.choices(range(1, 13), k=60)):
        pair.call(rows(count), 0.5, rows(count))

    assert pair.counts == (60, 12, 0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_autograd_modes_change_nothing(driver, mode):
    """A guard made in one mode may refuse tensors in another; the plan is found all the same."""

    pair = Pair("scale", driver)
    x, o = rows(), rows()

    for _ in range(3):
        pair.call(x, 0.5, o)

        with mode():
            pair.call(x, 0.5, o)
            pair.call(rows(), 0.5, rows())

    assert pair.counts == (8, 1, 0)


def test_a_tensor_passed_twice_is_still_compared_fast(driver):
    """In place and not in place share a plan, and both are found without a key."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    twin = launch_kernels.scale()
    x, o = rows(), rows()

    for first, second in ((x, o), (x, o), (x, x), (x, x), (x, o), (o, o)):
        expected = outcome(driver, twin, first, 0.5, second)
        assert outcome(driver, handle, first, 0.5, second) == expected

    assert handle.cache_info().hits == 5
    plan = handle._cache.last
    assert plan.fits(x, x) and plan.fits(x, o)
    assert not plan.fits(x, rows(9))

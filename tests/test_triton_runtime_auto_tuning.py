"""Auto-tuned kernels: planned once tuning has chosen, and from then on launched like any other."""

import gc
import time
import weakref

import launch_kernels
import pytest
import torch
from launch_helpers import Pair, rows, tuner_of, vector
from recording_driver import recording
from threads import in_threads

import ninetoothed_patches
from ninetoothed_patches.plan_cache import UNUSED_PLANS


@pytest.fixture
def driver():
    with recording() as driver:
        yield driver


@pytest.fixture
def pair(driver):
    return Pair("scale_t", driver)


def test_the_first_call_tunes_and_the_second_is_one_launch(driver, pair):
    """LP18: one plan, for the winner; none from the candidates."""

    x, o = vector(), vector()
    pair.planned(x, 0.5, o)
    candidates = len(tuner_of(pair.planned).configs)
    assert candidates > 2
    assert len(driver.take()) == candidates + 1
    pair.planned(x, 0.5, o)
    assert len(driver.take()) == 1
    assert pair.counts == (1, 1, 0)
    assert pair.info.plans == 1


def test_the_winner_is_launched_with_all_that_it_chose(driver):
    """LP44: packed metadata, grid and meta values are the winner's, not those of the first or the default."""

    pair = Pair("scale_tuned_warps", driver)
    x, o = vector(), vector()
    first = pair.call(x, 0.5, o)
    winner = tuner_of(pair.planned).best_config
    configs = tuner_of(pair.planned).configs
    assert winner.all_kwargs() != configs[0].all_kwargs()
    assert len({config.num_warps for config in configs}) > 1

    for _ in range(3):
        assert pair.call(x, 0.5, o) == first

    (block,) = winner.kwargs.values()
    assert first.grid == (-(-1000 // block), 1, 1)
    packed = next(value for value in first.values if isinstance(value, tuple))
    assert packed[0] == winner.num_warps


def test_other_lengths_tune_again_and_each_has_its_winner(pair):
    """LP44: sizes, strides and scalars are in the tuner's key, and in ours."""

    lengths = (100, 1000, 4096)

    for _ in range(3):
        for length in lengths:
            for s in (0.5, 2):
                pair.call(vector(length), s, vector(length))

    assert pair.counts == (12, 6, 0)


def test_a_hundred_calls_are_one_miss(pair):
    """LP53: the fast way is really taken."""

    x, o = vector(), vector()

    for _ in range(100):
        pair.planned(x, 0.5, o)

    assert pair.counts == (99, 1, 0)


def test_tuning_keeps_no_argument_alive(driver):
    """LP17: neither the tuner nor what watches it holds on to the arguments of the tuning call."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_t())
    x, o = vector(), vector()
    alive = [weakref.ref(x), weakref.ref(o)]
    handle(x, 0.5, o)
    del x, o
    driver.clear()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_in_place_a_planned_call_launches_once(driver, pair):
    """LP43: the tuning call writes the live buffer as often as unpatched; a planned call exactly once."""

    x = vector()
    pair.call(x, 0.5, x)
    driver.clear()
    pair.planned(x, 0.5, x)
    assert len(driver.take()) == 1


def test_a_cleared_tuner_tunes_again(driver, pair):
    """LP45: whoever clears the tuner's results does not meet the old winner."""

    x, o = vector(), vector()

    for _ in range(3):
        pair.call(x, 0.5, o)

    for handle in (pair.twin, pair.planned):
        tuner_of(handle).cache.clear()

    pair.call(x, 0.5, o)
    pair.call(x, 0.5, o)
    assert pair.counts == (3, 2, 0)


def test_a_tuner_that_was_cleared_before_a_call_without_a_plan_tunes_again(
    driver, pair
):
    """LP45: a call that gets no plan does not hide that there are fewer results than before it."""

    x, o = vector(), vector()

    for _ in range(2):
        pair.call(x, 0.5, o)

    lengths = range(100, 100 + UNUSED_PLANS + 1)

    for length in lengths:
        pair.call(vector(length), 0.5, vector(length))

    for handle in (pair.twin, pair.planned):
        tuner_of(handle).cache.clear()

    # As many results as before; no plan is made for layouts that come once by now.
    for length in lengths:
        pair.call(vector(length + 200), 0.5, vector(length + 200))

    pair.call(vector(99), 0.5, vector(99))
    pair.call(x, 0.5, o)
    assert pair.info.hits == 1


def test_a_tuner_that_was_cleared_before_a_nested_call_tunes_again(driver, pair):
    """LP45: nor does one that comes in the middle of another handle's call."""

    x, o = vector(), vector()

    for _ in range(2):
        pair.call(x, 0.5, o)

    tuner = tuner_of(pair.planned)
    tuner.cache.clear()

    def call_once():
        driver.on_launch = None
        pair.planned(vector(100), 0.5, vector(100))

    driver.on_launch = call_once
    ninetoothed_patches.planned(launch_kernels.scale())(x := rows(), 0.5, x)
    assert len(tuner.cache) == 1
    assert pair.info.bypasses == {"nested call": 1}
    tuner_of(pair.twin).cache.clear()
    pair.call(vector(), 0.5, o)
    assert pair.info.hits == 1


def test_a_winner_that_was_replaced_is_taken_after_clear_plans(driver, pair):
    """LP45: what the number of results does not show, `clear_plans` is for."""

    x, o = vector(), vector()

    for _ in range(2):
        pair.call(x, 0.5, o)

    for handle in (pair.twin, pair.planned):
        tuner = tuner_of(handle)
        (key,) = tuner.cache
        tuner.cache[key] = next(
            config for config in tuner.configs if config is not tuner.cache[key]
        )

    ninetoothed_patches.clear_plans()

    for _ in range(2):
        pair.call(x, 0.5, o)

    assert pair.counts == (2, 2, 0)


def test_a_configuration_with_a_pre_hook_is_never_planned(driver):
    """A configuration's own pre-hook is called on every run."""

    seen = []
    pair = Pair("scale_t", driver)

    for handle in (pair.twin, pair.planned):
        for config in tuner_of(handle).configs:
            config.pre_hook = seen.append

    x, o = vector(), vector()
    pair.planned(x, 0.5, o)
    seen.clear()

    for _ in range(3):
        pair.planned(x, 0.5, o)

    assert len(seen) == 3
    assert pair.info.bypasses == {"configuration with a pre-hook": 4}
    assert pair.info.plans == 0


def test_threads_that_tune_at_once_find_one_winner(driver):
    """LP36: the tuner keeps a call's state in itself; unpatched, two threads break each other."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_t())
    x, o = vector(), vector()

    def call(index):
        for _ in range(20):
            handle(x, 0.5, o)

    assert in_threads(8, call) == []
    info = handle.cache_info()
    assert (info.hits, info.misses, info.bypasses, info.plans) == (159, 1, {}, 1)
    candidates = len(tuner_of(handle).configs)
    assert len(driver.records) == candidates + 160
    assert len(set(driver.records[candidates:])) == 1


def test_threads_that_tune_other_lengths_do_not_lose_plans(driver):
    """LP36: a result that another thread's tuning adds is not taken for somebody's interference."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_t())
    layouts = [(vector(length), vector(length)) for length in (64, 128, 256, 512)]

    def call(index):
        x, o = layouts[index]

        for _ in range(50):
            handle(x, 0.5, o)

    assert in_threads(4, call) == []
    info = handle.cache_info()
    assert (info.hits, info.misses, info.plans) == (196, 4, 4)


def test_threads_that_tune_past_the_plans_do_not_break_each_other():
    """LP36: a call that cannot be planned waits for a tuning that is under way."""

    with recording(load=lambda: time.sleep(0.01)) as driver:
        handle = ninetoothed_patches.planned(launch_kernels.scale_t())
        layouts = [
            (vector(length).as_subclass(Annotated), vector(length))
            for length in (64, 128, 256, 512)
        ]

        def call(index):
            x, o = layouts[index]

            for s in (0.5, 0.25, 2):
                handle(x, s, o)

        assert in_threads(4, call) == []
        assert handle.cache_info().bypasses == {"tensor subclass": 12}
        assert driver.records


def test_threads_that_tune_by_two_handles_do_not_break_each_other():
    """LP36: of one kernel, which has one tuner."""

    with recording(load=lambda: time.sleep(0.01)) as driver:
        raw = launch_kernels.scale_t()
        handles = [ninetoothed_patches.planned(raw) for _ in range(2)]
        layouts = [vector(length) for length in (64, 128, 256, 512)]

        def call(index):
            for x in layouts:
                handles[index](x, 0.5, x)

        assert in_threads(2, call) == []
        # Each length is tuned once, and the other handle finds the result.
        candidates = len(tuner_of(raw).configs)
        assert len(driver.records) == len(layouts) * (candidates + 2)


class Annotated(torch.Tensor):
    """A subclass that adds nothing, and is never planned."""


def test_a_tuned_hit_calls_no_more_than_a_plain_one(driver):
    """One control flow: after tuning, the same functions are called but for the tuner's one `len`."""

    from test_launch_hazards import calls_of

    plain, tuned = Pair("scale", driver), Pair("scale_t", driver)
    matrix, line = torch.zeros(8, 128, dtype=torch.bfloat16), vector()

    for _ in range(3):
        plain.planned(matrix, 0.5, matrix)
        tuned.planned(line, 0.5, line)

    plain_calls = calls_of(plain.planned, matrix, 0.5, matrix)
    tuned_calls = calls_of(tuned.planned, line, 0.5, line)
    assert sorted(plain_calls[1:] + ["len"]) == sorted(tuned_calls[1:])


@pytest.mark.gpu
def test_on_a_gpu_a_tuned_kernel_computes_what_its_twin_does():
    """LP43, LP53: with the real tuner, launcher and results."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_t())
    twin = launch_kernels.scale_t()
    x = torch.randn(100_003, device="cuda")
    o, expected = torch.empty_like(x), torch.empty_like(x)
    twin(x, 3.0, expected)

    for _ in range(5):
        o.zero_()
        handle(x, 3.0, o)
        assert torch.equal(expected, o)

    x = torch.ones(100_003, device="cuda")
    handle(x, 3.0, x)
    x.fill_(1.0)
    handle(x, 3.0, x)
    assert torch.equal(x, torch.full_like(x, 3.0))
    info = handle.cache_info()
    assert (info.misses, info.bypasses) == (1, {})

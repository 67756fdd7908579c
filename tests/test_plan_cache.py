"""The cache of one handle: bounded, counted, dropped."""

import functools
import gc
import itertools
import sys
import threading
import weakref

import launch_kernels
import pytest
from launch_helpers import Pair, rows
from recording_driver import recording
from triton.compiler import CompiledKernel

import ninetoothed_patches
from ninetoothed_patches import locks, plan_cache, triton_abi
from ninetoothed_patches.launch_plan import Plan
from ninetoothed_patches.plan_cache import MAX_SUCCESSORS, UNUSED_PLANS


@pytest.fixture
def driver():
    with recording() as driver:
        yield driver


def counts(handle):
    info = handle.cache_info()

    return info.hits, info.misses, info.evictions, info.plans


def test_the_bound_is_kept_whatever_comes(driver):
    """LP19: 1,000 layouts thrice, room for 8: never more than 8 plans."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=8)
    most = 0

    for _ in range(3):
        for count in range(1, 1001):
            handle(x := rows(1).expand(count, 128), 0.5, x)
            most = max(most, len(handle._cache._plans), len(handle._cache._queue))

    hits, misses, evictions, plans = counts(handle)
    assert most == plans == 8
    assert hits + misses == 3000
    assert evictions > UNUSED_PLANS


def test_the_least_recently_used_plan_goes_first(driver):
    """LP19: a layout called after every fourth other one is never evicted."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=8)
    kept = rows(2000)

    for count in range(1, 1001):
        handle(x := rows(1).expand(count, 128), 0.5, x)

        if count % 4 == 0:
            handle(kept, 0.5, kept)

    hits, misses, evictions, plans = counts(handle)
    assert (hits, misses, plans) == (249, 1001, 8)
    assert evictions > 8


def test_the_order_of_use_is_exact(driver):
    """Hits count as use: with room for three, the one not used for longest is evicted each time."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=3)
    tensors = {count: rows(count) for count in range(1, 7)}

    def use(*order):
        """Which of these calls were hits."""

        hits = []

        for count in order:
            before = handle.cache_info().hits
            handle(tensors[count], 0.5, tensors[count])
            hits.append(handle.cache_info().hits - before)

        return hits

    assert use(1, 2, 3, 1, 1, 4) == [0, 0, 0, 1, 1, 0]
    # 2 is gone; 3 is the oldest, then 1, then 4.
    assert use(3, 1, 2) == [1, 1, 0]
    # 4 is gone.
    assert use(3, 1, 2, 4) == [1, 1, 1, 0]
    assert use(3) == [0]


def call_once(pair, counts):
    for count in counts:
        pair.call(x := rows(1).expand(count, 128), 0.5, x)


def test_calls_that_never_come_back_get_no_plans(driver):
    """Once many plans in a row were made for nothing, a call has to come twice before it gets one."""

    pair = Pair("scale", driver)
    call_once(pair, range(1, 101))
    assert pair.info.plans == UNUSED_PLANS + 1
    assert pair.counts == (0, 100, 0)

    # Each comes back: its plan is made, and used from then on.
    call_once(pair, [90, 91, 90, 91])
    assert pair.info.plans == UNUSED_PLANS + 3
    assert pair.counts == (2, 102, 0)


def test_a_plan_that_is_used_ends_that(driver):
    """What comes back is a sign that other calls will, too: the next new one gets a plan at once."""

    pair = Pair("scale", driver)
    call_once(pair, range(1, 101))
    call_once(pair, [1, 101, 101])
    assert pair.counts == (2, 101, 0)


def test_a_call_that_has_a_plan_is_never_new(driver, monkeypatch):
    """What is remembered of calls that came once is bounded; calls with plans are not forgotten with them."""

    monkeypatch.setattr(plan_cache, "MAX_SEEN", 4)
    pair = Pair("scale", driver)
    call_once(pair, range(1, 101))
    assert len(pair.planned._cache.seen) <= 4 + UNUSED_PLANS + 1
    assert pair.info.plans == UNUSED_PLANS + 1

    # The first use of a plan, and a plan made before any was used.
    call_once(pair, [UNUSED_PLANS, UNUSED_PLANS])
    assert pair.counts == (2, 100, 0)


def test_the_last_plan_made_for_nothing_is_used(driver):
    """The plan that makes the cache sparing is one of those that it has."""

    pair = Pair("scale", driver)
    call_once(pair, range(1, UNUSED_PLANS + 2))
    call_once(pair, [UNUSED_PLANS + 1])
    assert pair.counts == (1, UNUSED_PLANS + 1, 0)


def test_a_scalar_that_changes_every_time_gets_no_plans(driver):
    """A seed, say: the tensors come back, the call does not."""

    pair = Pair("scale", driver)
    x = rows()

    for step in range(100):
        pair.call(x, 0.5 + step, x)

    assert pair.info.plans == UNUSED_PLANS + 1
    pair.call(x, 80.5, x)
    pair.call(x, 80.5, x)
    assert pair.counts == (1, 101, 0)


def test_an_unplannable_call_is_still_told_by_its_reason(driver):
    """When it comes back: the first time it is only new."""

    pair = Pair("scale", driver)
    call_once(pair, range(1, 101))
    x = rows(200)
    view = x.as_subclass(type("Subclass", (type(x),), {}))

    for _ in range(2):
        pair.call(view, 0.5, x)

    assert pair.info.bypasses == {"tensor subclass": 1}


def test_constants_do_not_grow_our_cache(driver):
    """LP20: Triton keeps a kernel for each value; our plans stay at their bound."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_c(), max_plans=4)
    x = rows()

    for s in range(2, 12):
        handle(x, s, x)

    assert counts(handle) == (0, 10, 6, 4)


@pytest.mark.skipif(
    not hasattr(CompiledKernel, "__del__"),
    reason="before 3.8 Triton never unloads a module",
)
def test_an_evicted_kernel_can_be_unloaded_and_a_live_one_is_not(driver):
    """LP21: a plan keeps its kernel alive; without plan and store nothing does."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=2)
    x, misaligned = rows(), rows(offset=1)

    for _ in range(3):
        handle(misaligned, 0.5, x)

    for _ in range(3):
        handle(x, 0.5, x)

    (store,) = (entry[0] for entry in handle._kernel.device_caches.values())
    first, second = map(weakref.ref, store.values())
    functions = first().function, second().function
    store.clear()
    handle(x, 2, x)
    driver.clear()
    gc.collect()
    assert first() is None
    assert driver.unloaded == [functions[0]]
    assert second() is not None
    handle(x, 0.5, x)
    assert driver.take()[-1].function == functions[1]


def test_clear_plans_drops_plans_and_keeps_counters(driver):
    """The next call is a miss, and works."""

    pair = Pair("scale", driver)
    x = rows()

    for _ in range(3):
        pair.call(x, 0.5, x)

    ninetoothed_patches.clear_plans()
    assert pair.info.plans == 0
    assert pair.counts == (2, 1, 0)
    pair.call(x, 0.5, x)
    assert pair.counts == (2, 2, 0)


def test_looking_at_the_counters_does_not_change_them(driver):
    """Hits are counted by a clock that looking turns."""

    pair = Pair("scale", driver)
    x = rows()
    assert [pair.counts for _ in range(3)] == [(0, 0, 0)] * 3

    for _ in range(3):
        pair.call(x, 0.5, x)

    assert [pair.counts for _ in range(3)] == [(2, 1, 0)] * 3


def test_calls_that_raise_are_counted_as_what_they_were(driver):
    """A miss, a hit, a bypass; and a call with wrong arguments, which is none of these, not at all."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    x = rows()

    def fail(*arguments, error):
        with pytest.raises(error):
            handle(*arguments)

        info = handle.cache_info()

        return info.misses, info.hits, sum(info.bypasses.values())

    driver.launch_error = RuntimeError("no launch")
    assert fail(x, 0.5, x, error=RuntimeError) == (1, 0, 0)
    assert handle.cache_info().plans == 0
    driver.launch_error = None
    handle(x, 0.5, x)
    driver.launch_error = RuntimeError("no launch")
    assert fail(x, 0.5, x, error=RuntimeError) == (2, 1, 0)
    assert fail(x, 0.5, None, error=AttributeError) == (2, 1, 1)
    assert fail(x, 0.5, error=TypeError) == (2, 1, 1)
    assert fail(x, 0.5, x, x, error=TypeError) == (2, 1, 1)


def test_the_total_is_the_sum_of_the_handles(driver):
    """`cache_info()` names each handle by its kernel and a number."""

    gc.collect()
    before = ninetoothed_patches.cache_info()
    first = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=1)
    second = ninetoothed_patches.planned(launch_kernels.scale())

    for count in (1, 2, 2):
        first(x := rows(count), 0.5, x)

    total = ninetoothed_patches.cache_info()
    name = first._kernel.__name__
    names = [key for key in total.handles if key not in before.handles]
    assert all(key.startswith(f"{name}#") for key in names)
    assert [total.handles[key] for key in names] == [
        first.cache_info(),
        second.cache_info(),
    ]
    assert total.hits - before.hits == 1
    assert total.misses - before.misses == 2
    assert total.evictions - before.evictions == 1
    assert total.plans - before.plans == 1


def test_a_handle_that_dies_takes_its_plans_along(driver):
    """The registry of caches holds none of them alive."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    cache = weakref.ref(handle._cache)

    for _ in range(3):
        handle(x := rows(), 0.5, x)

    del handle
    gc.collect()
    assert cache() is None


def keys_made(handle, monkeypatch):
    """A list that grows with each call that no successor of the last plan fits."""

    made = []
    cache = handle._cache
    original = cache.call

    def call(*arguments):
        made.append(arguments[0])

        return original(*arguments)

    monkeypatch.setattr(cache, "call", call)

    return made


def test_an_order_that_comes_again_needs_no_keys(driver, monkeypatch):
    """However many layouts a kernel meets: each call is compared with what came next before."""

    pair = Pair("scale", driver)
    keys = keys_made(pair.planned, monkeypatch)
    # One layout twice in a row, and two that other ones follow in their second place.
    order = [*range(1, 13), 12, 3, 5]

    for lap in range(5):
        for count in order:
            pair.call(rows(count), 0.5, rows(count))

        assert lap < 2 or not keys
        keys.clear()

    assert pair.counts == (5 * len(order) - 12, 12, 0)


@pytest.mark.parametrize("scalar", ["0.5", "0.0", "-0.0", "nan", "7000"])
def test_another_autograd_mode_needs_a_key_once(driver, monkeypatch, scalar):
    """Also where each call computes its scalars anew."""

    pair = Pair("scale", driver)
    keys = keys_made(pair.planned, monkeypatch)
    s = int if scalar.isdigit() else float
    constant = s(scalar)
    x = rows()
    parameter = rows().requires_grad_()

    for _ in range(3):
        pair.call(parameter, constant, x)

    keys.clear()

    for _ in range(5):
        pair.call(x, constant, rows())

    assert len(keys) == 1

    if constant and constant == constant:
        for _ in range(3):
            pair.call(parameter, s(scalar), x)

        assert len(keys) == 2


def test_few_plans_are_compared_before_a_key_is_made(driver):
    """However many layouts come after one, a call is compared with few of them."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())

    for count in (*range(1, 9), *range(1, 9)):
        handle(x := rows(count), 0.5, x)
        handle(x := rows(100), 0.5, x)

    assert len(handle._cache.last.successors) == MAX_SUCCESSORS
    assert handle._cache.info().plans == 9


def test_an_evicted_plan_launches_nothing(driver):
    """Although it came next before: its layout is a miss again, and gets a plan."""

    pair = Pair("scale", driver, max_plans=2)

    for count in (1, 2, 1, 2, 1, 2, 1, 3, 1):
        pair.call(rows(count), 0.5, rows(count))

    assert pair.info.evictions == 1
    before = pair.info.misses
    pair.call(rows(2), 0.5, rows(2))
    assert pair.info.misses == before + 1


def count_alive(keys):
    """How many plans with one of these keys there are."""

    return sum(plan.key in keys for plan in gc.get_objects() if type(plan) is Plan)


def test_plans_that_are_dropped_keep_no_others(driver):
    """What was evicted long ago is gone, although each plan was the next of another."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=2)
    keys = []

    for count in range(1, 16):
        for _ in range(3):
            handle(x := rows(count), 0.5, x)

        keys.append(handle._cache.last.key)
        assert count_alive(keys) <= 4

    assert handle._cache.info().evictions == 13


def test_last_plans_that_are_dropped_keep_no_others(driver):
    """A thread may launch from a plan while another drops it, and leave it the last one; a repeater may hold it."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=1)
    keys = []
    first = last = None

    for count in range(1, 16):
        for _ in range(3):
            if last is not None:
                handle._cache.last = last

            handle(x := rows(count), 0.5, x)

        last = handle._cache.last
        first = first or last
        keys.append(last.key)
        assert count_alive(keys) <= 4

    assert handle._cache.info().evictions == 14


def test_a_plan_that_a_repeater_used_first_needs_a_key_once(driver, monkeypatch):
    """The handle's own calls are compared with it, too."""

    pair = Pair("scale", driver)
    keys = keys_made(pair.planned, monkeypatch)
    pair.call(x := rows(), 0.5, x)
    repeat = ninetoothed_patches.repeater(pair.planned, x, 0.5, x)
    assert repeat(x.data_ptr(), x.data_ptr())

    for _ in range(2):
        pair.call(x, 0.5, x)

    keys.clear()

    for _ in range(5):
        pair.call(x, 0.5, x)

    assert keys == []


# A finalizer, or a signal handler, in the middle of a change: here it comes at each line of one.


def interrupt_change(position, function, interrupt):
    """Call `function`, and `interrupt` at the line that comes as number `position` while plans change.

    :return: Whether there is such a line.
    """

    remaining = position

    def trace(frame, event, argument):
        nonlocal remaining

        if frame.f_code.co_filename != plan_cache.__file__:
            return None

        if event == "line" and locks.is_held_here(plan_cache._CHANGING):
            if remaining == 0:
                sys.settrace(None)
                interrupt()

            remaining -= 1

        return trace

    before = sys.gettrace()
    sys.settrace(trace)

    try:
        function()
    finally:
        sys.settrace(before)

    return remaining < 0


def check(cache):
    """That what a cache holds fits together."""

    assert len(cache._plans) <= cache.bound
    assert {id(plan) for _, plan in cache._queue} == set(map(id, cache._plans.values()))
    assert len(cache._queue) == len(cache._plans)
    assert all(plan.is_kept for plan in cache._plans.values())
    plans = [cache.last, *cache._plans.values()]
    successors = [plan for last in plans for plan in last.successors]
    assert all(
        (cache._plans.get(plan.key) is plan) == plan.is_kept for plan in successors
    )


@pytest.mark.parametrize("change", ["make", "use", "clear"])
@pytest.mark.parametrize("interruption", ["new", "known", "clear"])
def test_a_change_may_be_interrupted_anywhere(driver, change, interruption):
    """By calls and by `clear_plans`: each call launches once, and no plan that was dropped comes back."""

    raw = launch_kernels.scale()
    tensors = {count: rows(count) for count in range(1, 5)}

    def is_interrupted(position):
        handle = ninetoothed_patches.planned(raw, max_plans=2)
        driver.clear()

        def call(*counts):
            for count in counts:
                handle(tensors[count], 0.5, tensors[count])

        changes = {
            "make": lambda: call(3),
            "use": lambda: call(2),
            "clear": handle._cache.clear,
        }
        interruptions = {
            "new": lambda: call(4),
            "known": lambda: call(1),
            "clear": handle._cache.clear,
        }
        call(1, 1, 1, 2)
        was_interrupted = interrupt_change(
            position, changes[change], interruptions[interruption]
        )
        check(handle._cache)

        if change == "clear":
            assert handle._cache.info().plans == 0

        for count in (1, 2, 3, 4, 1, 2, 3, 4):
            call(count)
            check(handle._cache)

        num_calls = 12 + (change != "clear")
        num_calls += was_interrupted and interruption != "clear"
        info = handle.cache_info()
        assert info.hits + info.misses + sum(info.bypasses.values()) == num_calls
        assert len(driver.take()) == num_calls

        return was_interrupted

    positions = itertools.takewhile(is_interrupted, itertools.count())
    assert len(list(positions)) > 3


@pytest.mark.parametrize("change", ["heappop", "heappush", "drop"])
def test_a_change_that_a_signal_ends_leaves_a_cache_that_works(
    driver, monkeypatch, change
):
    """A handler of signals, Python's own of Ctrl-C, raises wherever it comes."""

    pair = Pair("scale", driver, max_plans=1)
    tensors = [rows(count) for count in range(1, 6)]
    pair.call(tensors[0], 0.5, tensors[0])

    with monkeypatch.context() as patch:
        owner = Plan if change == "drop" else plan_cache.heapq
        function = getattr(owner, change)

        def end(*arguments):
            # Before it puts something there, after it has taken something away.
            if change != "heappush":
                function(*arguments)

            raise KeyboardInterrupt

        patch.setattr(owner, change, end)

        with pytest.raises(KeyboardInterrupt):
            pair.planned(tensors[1], 0.5, tensors[1])

    for tensor in (*tensors, *tensors):
        for _ in range(3):
            pair.call(tensor, 0.5, tensor)
            assert pair.info.plans <= 1

    assert pair.info.hits == 20
    check(pair.planned._cache)


def test_an_interrupted_change_waits_for_no_other_thread(driver):
    """One that is in its first call, and may need the change to end."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    tensors = [rows(count) for count in range(1, 9)]
    is_launching, may_launch = threading.Event(), threading.Event()
    interrupted = []

    def call(index):
        handle(tensors[index], 0.5, tensors[index])

    # More than are compared before a key is made.
    for index in range(6):
        call(index)

    def launch_late():
        if threading.current_thread() is other:
            is_launching.set()
            may_launch.wait(30)

    def interrupt():
        call(7)
        interrupted.append(not may_launch.is_set())

    def change():
        for position in range(12):
            interrupt_change(position, functools.partial(call, position % 6), interrupt)

        interrupt_change(3, handle._cache.clear, interrupt)

    driver.on_launch = launch_late
    other, changing = (
        threading.Thread(target=target, args=args, daemon=True)
        for target, args in ((call, (6,)), (change, ()))
    )
    other.start()
    assert is_launching.wait(30)
    changing.start()
    changing.join(20)
    may_launch.set()

    for thread in (changing, other):
        thread.join(20)
        assert not thread.is_alive()

    assert len(interrupted) > 3
    assert all(interrupted)
    check(handle._cache)


def test_what_is_built_for_a_plan_is_built_while_nothing_is_held(driver, monkeypatch):
    """Guards and launches are many objects, and so the collector's usual occasion to run finalizers."""

    held = []

    def note(function):
        def noting(*arguments):
            held.append(locks.is_held_here(plan_cache._CHANGING))

            return function(*arguments)

        return noting

    for name in ("tensor_guard", "LaunchForm"):
        monkeypatch.setattr(plan_cache, name, note(getattr(plan_cache, name)))

    handle = ninetoothed_patches.planned(launch_kernels.scale())

    for offset in (0, 0, 1, 1):
        x = rows(offset=offset)
        handle(x, 0.5, x)

    x = rows(4)
    handle(x, 0.5, x)
    assert ninetoothed_patches.repeater(handle, x, 0.5, x) is not None
    assert held == [False] * 4


def test_dropped_plans_are_freed_while_nothing_is_held(driver):
    """Their kernels, which may be the last to go, have finalizers."""

    held = []
    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=2)
    cache = handle._cache

    def watch_plans():
        for plan in cache._plans.values():
            weakref.finalize(
                plan.launch,
                lambda: held.append(locks.is_held_here(plan_cache._CHANGING)),
            )

    for count in (1, 1, 2, 2):
        handle(x := rows(count), 0.5, x)

    watch_plans()
    handle(x := rows(3), 0.5, x)
    assert held == [False]
    cache.clear()
    assert held == [False] * 2


# What else the backend specialises on.


def test_a_call_that_waited_has_the_key_of_one_that_did_not(driver, monkeypatch):
    """The backend's classes of its tensors stand in it once."""

    monkeypatch.setattr(triton_abi, "tensor_rule", lambda store: lambda tensor: "S")
    handle = ninetoothed_patches.planned(launch_kernels.scale())
    is_launching, is_waiting = threading.Event(), threading.Event()
    x, other = rows(8), rows(4)
    lock = handle._cache._calling
    run = lock.run

    def launch_late():
        driver.on_launch = None
        is_launching.set()
        is_waiting.wait(30)

    def run_after_another(*arguments):
        if threading.current_thread() is late:
            is_waiting.set()

        return run(*arguments)

    lock.run = run_after_another
    driver.on_launch = launch_late
    early, late = (
        threading.Thread(target=handle, args=(tensor, 0.5, tensor))
        for tensor in (other, x)
    )
    early.start()
    assert is_launching.wait(30)
    late.start()
    early.join(30)
    late.join(30)
    handle(x, 0.5, x)
    assert counts(handle) == (1, 2, 0, 2)

"""Threads and processes, as far as they need no GPU: what is launched is what a serial run launches."""

import collections
import multiprocessing
import os
import random
import signal
import sys
import threading
import types

import launch_kernels
import pytest
import torch
from launch_helpers import rows
from operator_calls import recording_operators
from recording_driver import recording
from rope_inputs import make_pack, make_rope
from threads import in_threads

import ninetoothed_patches
import ntops_ext
from ninetoothed_patches import host_driver, materializer
from ninetoothed_patches.locks import ProcessLock
from ntops_ext import _handles
from ntops_ext.torch import _gated_rms_norm, _qk_norm_rope_pack

needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="no fork on this platform"
)


@pytest.fixture
def driver():
    with recording_operators() as driver:
        yield driver


# What threads call: functions that make a call with tensors of its own, whose addresses tell its launches from others.


def handle_call(handle, count):
    x, o = rows(count), rows(count)

    return lambda: handle(x, 0.5, o)


def tuned_call(handle, count):
    x, o = (torch.zeros(16 * count, dtype=torch.bfloat16) for _ in range(2))

    return lambda: handle(x, 2.0, o)


def norm_call(count):
    x, gate, out = torch.zeros(3, count, 128, dtype=torch.bfloat16)
    weight = torch.zeros(128)

    return lambda: ntops_ext.torch.gated_rms_norm(x, weight, gate, out=out)


def rope_call(count):
    heads, out = torch.zeros(2, 1, count, 2, 64, dtype=torch.bfloat16)
    weight, table = torch.ones(64, dtype=torch.bfloat16), make_rope(count, 64)

    return lambda: ntops_ext.torch.qk_norm_rope(heads, weight, table, out=out)


def pack_call(count):
    inputs = make_pack(tokens=count, prefix=2, heads=2, kv_heads=2, head_dim=64)

    return lambda: ntops_ext.torch.qk_norm_rope_pack_(*inputs.arguments())


def make_calls(counts):
    """Calls of two handles that evict, of one that is tuned, and of the operators."""

    scale = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=2)
    spacious = ninetoothed_patches.planned(launch_kernels.scale())
    tuned = ninetoothed_patches.planned(launch_kernels.scale_t(), max_plans=2)

    return [
        call
        for count in counts
        for call in (
            handle_call(scale, count),
            handle_call(spacious, count),
            tuned_call(tuned, count),
            norm_call(count),
            rope_call(count),
            pack_call(count),
        )
    ]


def serial_records(driver, calls):
    """What each call launches, when it is made alone and goes the ordinary way."""

    expected = []

    for call in calls:
        # Tuning launches candidates, too.
        call()
        driver.clear()
        ninetoothed_patches.clear_plans()
        call()
        (record,) = driver.take()
        expected.append(record)

    return expected


def test_sixteen_threads_of_mixed_calls(driver):
    """Handles and operators, while plans are dropped, evicted and counted, and the patch comes and goes."""

    with torch.no_grad():
        calls = make_calls((1, 2, 3, 5, 16))
        expected = serial_records(driver, calls)
        made = collections.Counter()
        raw = launch_kernels.scale()
        disturbances = [
            ninetoothed_patches.clear_plans,
            ninetoothed_patches.cache_info,
            ninetoothed_patches.apply,
            ninetoothed_patches.revert,
            lambda: ninetoothed_patches.planned(raw),
            _gated_rms_norm._prepared_calls.clear,
            _qk_norm_rope_pack.layouts.clear,
        ]

    @torch.no_grad()
    def run(index):
        generator = random.Random(index)
        own = collections.Counter()

        for _ in range(60):
            if generator.random() < 0.1:
                generator.choice(disturbances)()

            position = generator.randrange(len(calls))
            calls[position]()
            own[position] += 1

        with counting:
            made.update(own)

    counting = threading.Lock()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    try:
        assert in_threads(16, run) == []
    finally:
        sys.setswitchinterval(interval)
        ninetoothed_patches.revert()

    assert sum(made.values()) == 16 * 60
    assert collections.Counter(driver.take()) == {
        expected[position]: count for position, count in made.items()
    }


# The patch.


def test_applying_in_two_threads_is_applying_once(monkeypatch):
    """The second waits for the first, and `revert` finds NineToothed's own attribute again."""

    is_set = [threading.Event(), threading.Event()]
    first_is_through = threading.Event()

    class SlowToSet(type):
        def __setattr__(cls, name, value):
            super().__setattr__(name, value)

            # Both have found the patch missing, if they can; then the second is the last to finish.
            if not is_set[0].is_set():
                is_set[0].set()
                is_set[1].wait(0.5)
            else:
                is_set[1].set()
                first_is_through.wait(0.5)

    original = materializer._jit_module.JIT.__call__
    jit = SlowToSet("JIT", (), {"__call__": original})
    monkeypatch.setattr(materializer, "_jit_module", types.SimpleNamespace(JIT=jit))

    def apply(index):
        if index == 1:
            assert is_set[0].wait(10)

        ninetoothed_patches.apply()

        if index == 0:
            first_is_through.set()

    assert not ninetoothed_patches.is_applied()
    assert in_threads(2, apply) == []
    assert jit.__call__ is not original
    ninetoothed_patches.revert()
    assert jit.__call__ is original
    assert not ninetoothed_patches.is_applied()


def test_handles_are_listed_while_others_are_made(driver):
    """Another thread may make one at any line of Python that goes through them: here this one does."""

    raw = launch_kernels.scale()
    alive = [ninetoothed_patches.planned(raw) for _ in range(3)]
    made = []

    def make_at_each_line(frame, event, argument):
        is_going_through = "weakref" in frame.f_code.co_filename

        if event == "line" and is_going_through and len(made) < 40:
            made.append(ninetoothed_patches.planned(raw))

        return make_at_each_line

    before = sys.gettrace()
    sys.settrace(make_at_each_line)

    try:
        info = ninetoothed_patches.cache_info()
        ninetoothed_patches.clear_plans()
    finally:
        sys.settrace(before)

    assert made
    assert len(info.handles) >= len(alive)


def test_making_a_kernel_of_an_operator_within_stand_in(monkeypatch):
    """One thread is in `stand_in()` and calls an operator, while another has begun to call one."""

    is_making, is_standing = threading.Event(), threading.Event()
    original = _handles._make

    def make_late(premake, *options):
        # By now whatever lock there is has been taken.
        is_making.set()
        is_standing.wait(0.5)

        return original(premake, *options)

    def premake(name):
        raise LookupError(name)

    def stand_in():
        assert is_making.wait(10)

        with host_driver.stand_in():
            is_standing.set()
            make("within")

    def make(name):
        with pytest.raises(LookupError, match=name):
            _handles.make_handle(premake, num_warps=1, name=name)

    monkeypatch.setattr(_handles, "_make", make_late)

    threads = [
        threading.Thread(target=target, args=args, daemon=True)
        for target, args in ((make, ("waits",)), (stand_in, ()))
    ]

    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(20)

    assert not any(thread.is_alive() for thread in threads)


# Processes.


def run_in_fork(function):
    """The exit status of a child that runs `function`; it is killed after 20 seconds."""

    child = os.fork()

    if child == 0:
        status = 1

        try:
            signal.alarm(20)
            function()
            status = 0
        finally:
            os._exit(status)

    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.parametrize("where", ["make_handle", "stand_in", "apply"])
def test_a_child_forked_while_a_thread_holds_a_lock_is_not_stuck(where, monkeypatch):
    """The thread that would give it back is not there."""

    driver_is_present = host_driver.driver_is_present()
    is_held, may_go = threading.Event(), threading.Event()

    def hold(**_):
        is_held.set()
        may_go.wait(60)

        raise LookupError

    def hold_until_told():
        with pytest.raises(LookupError):
            if where == "make_handle":
                _handles.make_handle(hold, num_warps=1, num_columns=1)
            elif where == "apply":
                ninetoothed_patches.apply()
            else:
                with host_driver.stand_in():
                    hold()

    if where == "apply":
        monkeypatch.setattr(materializer, "check", hold)

    def use_all():
        monkeypatch.undo()
        assert host_driver.driver_is_present() == driver_is_present

        with host_driver.stand_in():
            handle = launch_kernels.scale()

        assert host_driver.driver_is_present() == driver_is_present
        assert ninetoothed_patches.apply()
        assert ninetoothed_patches.planned(handle).cache_info().plans == 0
        _handles.make_handle(
            _handles.import_kernels().sum_of_rows.premake,
            num_warps=1,
            num_columns=8,
            rows_per_step=16,
            columns_per_program=24,
        )

    thread = threading.Thread(target=hold_until_told, daemon=True)
    thread.start()
    assert is_held.wait(30)
    status = run_in_fork(use_all)
    may_go.set()
    thread.join(30)
    assert status == 0
    assert not thread.is_alive()
    assert not ninetoothed_patches.is_applied()


@needs_fork
def test_a_child_of_the_thread_that_stands_in(monkeypatch):
    """It forks within the block, and is within it in the child, too."""

    driver_is_present = host_driver.driver_is_present()

    def leave():
        assert host_driver.driver_is_present()

        with host_driver.stand_in():
            assert host_driver.driver_is_present()

        assert host_driver.driver_is_present()

    def fork():
        with host_driver.stand_in():
            status = run_in_fork(leave)

        assert status == 0
        assert host_driver.driver_is_present() == driver_is_present

    fork()
    assert in_threads(1, lambda index: fork()) == []


@needs_fork
def test_a_child_leaves_the_block_that_it_was_forked_in():
    """By the lock that was taken: that of the child is another, which nobody holds."""

    lock = ProcessLock()
    child, status = -1, 1

    try:
        with lock.held():
            child = os.fork()

        with lock.held():
            status = 0
    finally:
        if child == 0:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_fork
def test_children_forked_while_threads_call(driver):
    """Each child launches what a serial run launches, whatever a thread of the parent was in the middle of."""

    is_done = threading.Event()

    with torch.no_grad():
        calls = make_calls((1, 4))
        expected = serial_records(driver, calls)

    @torch.no_grad()
    def call_in_child():
        for _ in range(3):
            for call, record in zip(calls, expected, strict=True):
                driver.clear()
                call()
                # The tuner's candidates may come first, as in any process.
                assert driver.take()[-1] == record

    @torch.no_grad()
    def run(index):
        if index == 0:
            try:
                statuses = [run_in_fork(call_in_child) for _ in range(4)]
            finally:
                is_done.set()

            assert statuses == [0] * 4

        while not is_done.is_set():
            for call in calls:
                call()

            ninetoothed_patches.clear_plans()

    assert in_threads(5, run) == []


def calls_in_a_spawned_child(results):
    with recording() as driver:
        results.put((ninetoothed_patches.is_applied(), os.getppid()))
        handle = ninetoothed_patches.planned(launch_kernels.scale())

        for _ in range(3):
            handle_call(handle, 8)()

        results.put((handle.cache_info().hits, len(driver.records)))


@pytest.mark.slow
def test_a_spawned_child_starts_afresh(driver):
    """It has neither the patch nor the plans of its parent, and makes its own."""

    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()
    child = processes.Process(target=calls_in_a_spawned_child, args=(results,))

    try:
        assert ninetoothed_patches.apply()
        handle_call(launch_kernels.scale(), 8)()
        child.start()
        assert results.get(timeout=120) == (False, os.getpid())
        assert results.get(timeout=120) == (2, 3)
    finally:
        ninetoothed_patches.revert()
        child.join(30)

    assert child.exitcode == 0

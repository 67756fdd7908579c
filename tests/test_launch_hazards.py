"""One test for each situation that broke other launch caches, as far as it can be had without a GPU.

Every `Pair.call` asserts that the planned call launches, argument by argument, what its unpatched twin launches.
"""

import enum
import gc
import json
import os
import sys
import threading
import time
import types
import weakref

import launch_kernels
import numpy
import pytest
import torch
import triton
from launch_helpers import Pair, each_after_each, outcome, rows, tuner_of, vector
from recording_driver import GFX942, SM_80, SM_90, RecordingDriver, active, recording
from threads import in_threads

import ninetoothed_patches


@pytest.fixture
def driver():
    with recording() as driver:
        yield driver


@pytest.fixture
def scale(driver):
    return Pair("scale", driver)


@pytest.fixture
def spare(driver):
    return Pair("spare", driver)


# Pointer alignment and storage class.


def test_a_misaligned_input_has_its_own_plan(scale):
    """LP01: an address that is not 16-byte aligned never meets a kernel with 16-byte accesses."""

    aligned, misaligned, o = rows(), rows(offset=1), rows()
    first = scale.call(aligned, 0.5, o)
    other = scale.call(misaligned, 0.5, o)
    assert scale.counts == (0, 2, 0)
    assert first.function != other.function
    scale.call(aligned, 0.5, o)
    assert scale.counts == (1, 2, 0)


def test_a_misaligned_output_has_its_own_plan(scale):
    """LP02: the alignment of outputs counts as that of inputs."""

    scale.call(rows(), 0.5, rows())
    scale.call(rows(), 0.5, rows())
    scale.call(rows(), 0.5, rows(offset=3))
    assert scale.counts == (1, 2, 0)


def test_alternating_alignments_cost_two_misses(scale):
    """LP03: byte offsets 0 and 8, a thousand calls, two plans and two compilations."""

    x, o = rows(), rows()
    tensors = [x, rows(offset=4)]

    for index in range(1000):
        scale.planned(tensors[index % 2], 0.5, o)

    assert scale.counts == (998, 2, 0)
    assert compilations(scale.planned) == 2
    scale.call(tensors[1], 0.5, o)


def compilations(handle):
    """How many kernels Triton holds for a handle."""

    (store,) = stores(handle).values()

    return len(store if isinstance(store, dict) else store[0])


def stores(handle):
    kernel = handle._kernel

    return kernel.device_caches if hasattr(kernel, "device_caches") else kernel.cache


@pytest.mark.skipif(
    not hasattr(triton.backends.compiler.BaseBackend, "get_tensor_specialization"),
    reason="before 3.6 the AMD backend looks at the storage only if asked by an environment variable",
)
def test_storage_size_counts_where_the_backend_says_so():
    """LP04: for AMD a storage beyond 2 GiB is another kernel; for NVIDIA it is not."""

    def with_storage(gibibytes):
        # Address space only: the pages are never touched.
        return torch.empty(gibibytes * 2**29, dtype=torch.bfloat16)[: 8 * 128].view(
            8, 128
        )

    for target, plans in ((GFX942, 2), (SM_90, 1)):
        with recording(target) as driver:
            pair, small, large = Pair("scale", driver), with_storage(1), with_storage(3)
            o = rows()
            functions = [
                pair.call(x, 0.5, o).function for x in (small, large, small, small)
            ]
            assert len(set(functions)) == plans
            assert pair.counts == (4 - plans, plans, 0)


# Integers, grid and argument positions.


@pytest.mark.parametrize("first, second", [(2**31 - 1, 2**31), (2**31, 2**31 - 1)])
def test_an_integer_beyond_32_bits_has_its_own_plan(spare, first, second):
    """LP05: an i32 plan is never used for a value that needs an i64."""

    for b in (first, second, first, second):
        assert spare.call(rows(), 0.5, b, rows()).function

    assert spare.counts == (2, 2, 0)


@pytest.mark.parametrize("count", [1, 5, 17])
@pytest.mark.parametrize("stride", [128, 136])
def test_folded_sizes_and_strides_keep_their_places(driver, count, stride):
    """LP06: a size or stride of 1 is folded out of the kernel; the arguments around it stay where the launcher looks."""

    pair = Pair("scale_strided", driver)
    columns = torch.zeros(128, count, dtype=torch.bfloat16).t()

    for x in (rows(count, stride=stride), columns, rows(count)):
        for _ in range(3):
            pair.call(x, 0.5, rows(count))


def test_every_class_of_integer_has_the_type_the_twin_gives_it(spare):
    """LP07: i32, folded 1, divisible by 16, i64, u64."""

    values = (-1, 0, 1, 16, 17, 2**40, 2**63, -(2**31))

    for _ in range(3):
        for b in values:
            spare.call(rows(), 0.5, b, rows())

    assert spare.counts == (2 * len(values), len(values), 0)


def test_an_integer_that_no_kernel_takes_does_what_the_twin_does(driver, spare):
    """LP07: 2**64 is refused while it is typed (3.6 and later, and then nothing is kept), or by the launcher."""

    for _ in range(3):
        spare.call(rows(), 0.5, 2**64, rows())

    _, raised = outcome(driver, spare.planned, rows(), 0.5, 2**64, rows())
    assert spare.info.plans == (0 if raised else 1)


def test_no_rows_launch_an_empty_grid(scale):
    """LP08: zero rows reach the launcher with grid 0, and raise nothing."""

    for _ in range(3):
        record = scale.call(rows(0), 0.5, rows(0))
        assert record.grid == (0, 1, 1)

    assert scale.counts == (2, 1, 0)


def test_a_grid_beyond_32_bits_is_handed_over_unchanged(scale):
    """LP08: the launcher, which refuses it, sees the twin's number."""

    x, o = (rows(1).expand(2**34, 128) for _ in range(2))

    for _ in range(3):
        assert scale.call(x, 0.5, o).grid == (2**32, 1, 1)


# Scalars.


@pytest.mark.parametrize("s", [0.5, 65504.0, 1e-7, 1e300, float("inf")])
def test_a_float_is_handed_over_unrounded(driver, s):
    """LP09: the record holds the Python float itself."""

    pair = Pair("scale", driver)

    for _ in range(3):
        record = pair.call(rows(dtype=torch.float16), s, rows(dtype=torch.float16))
        assert s.hex() in record.values


def test_true_is_not_one_and_one_is_not_one_point_zero(scale):
    """LP10: three types, three plans; the fourth call is a hit on the first."""

    x, o = rows(), rows()
    scalars = (True, 1, 1.0, True)
    functions = [scale.call(x, s, o).function for s in scalars]
    assert len(set(functions)) == 3
    assert functions[0] == functions[3]
    assert scale.counts == (1, 3, 0)

    for position in each_after_each(range(3)):
        assert scale.call(x, scalars[position], o).function == functions[position]


def test_the_zeros_are_told_apart(scale):
    """LP11: 0.0 and -0.0 are equal and hash alike, and give different results."""

    x, o = rows(), rows()

    for s in each_after_each((0.0, -0.0)):
        assert s.hex() in scale.call(x, s, o).values

    assert scale.counts == (14, 2, 0)


def test_equal_floats_that_are_other_objects_hit(scale):
    """LP11: a float worked out anew for each call finds its plan."""

    x, o = rows(), rows()

    for _ in range(5):
        scale.call(x, float("0.25"), o)
        scale.call(x, float("-0.0"), o)

    assert scale.counts == (8, 2, 0)


def test_nan_finds_its_plan(scale):
    """LP11: NaN does not equal itself; its bits do."""

    x, o = rows(), rows()

    for _ in range(4):
        scale.call(x, float("nan"), o)

    assert scale.counts == (3, 1, 0)
    scale.call(x, -float("nan"), o)
    assert scale.counts == (3, 2, 0)


@pytest.mark.parametrize("values", [(1, True, 1.0), (1.0, True, 1), (0.0, -0.0)])
def test_equal_constants_do_what_the_twin_does_in_that_order(driver, values):
    """LP12: Triton 3.5 to 3.9 share one kernel among them, whichever came first; our key keeps them apart."""

    pair = Pair("scale_c", driver)
    x, o = rows(), rows()

    order = [*values, *each_after_each(values)]

    for s in order:
        pair.call(x, s, o)

    assert pair.counts == (len(order) - len(values), len(values), 0)


class Precision(enum.IntEnum):
    HIGH = 2
    LOW = 3


class Other(enum.IntEnum):
    HIGH = 2


def test_members_of_an_integer_enumeration_are_planned(driver):
    """LP12: ntops passes them as constants; a member is neither its value nor a like member of another class."""

    pair = Pair("scale_c", driver)
    x, o = rows(), rows()

    for _ in range(3):
        for s in (Precision.HIGH, Precision.LOW, 2, Other.HIGH):
            pair.call(x, s, o)

    assert pair.counts == (8, 4, 0)


class Ten(enum.IntEnum):
    """Two members that call themselves equal, and hash alike."""

    ONE = 10
    OTHER = 11

    def __eq__(self, other):
        return int(self) // 10 == int(other) // 10

    def __hash__(self):
        return 10


def test_an_enumeration_with_an_equality_of_its_own_goes_the_ordinary_way(driver):
    """Members that are equal need not be the same number."""

    pair = Pair("scale_c", driver)
    x, o = rows(), rows()

    for _ in range(3):
        for s in Ten:
            pair.call(x, s, o)

    assert pair.counts == (0, 0, 6)
    assert pair.info.bypasses == {"unknown scalar type": 6}


# None.


def test_none_and_a_number_alternate(spare):
    """LP14: None is folded, the number is passed."""

    x, o = rows(), rows()
    records = [spare.call(x, 0.5, b, o) for b in (2.0, None, 2.0, None)]
    assert spare.counts == (2, 2, 0)
    assert records[0].function != records[1].function


def test_a_number_after_none_is_a_miss(spare):
    """LP15: the plan for None is not used for a number."""

    x, o = rows(), rows()
    spare.call(x, 0.5, None, o)
    spare.call(x, 0.5, 3, o)
    assert spare.counts == (0, 2, 0)


# Lifetime.


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_no_call_keeps_its_tensors_alive(driver, calls):
    """LP16: neither a miss nor a hit holds on to an argument."""

    handle = ninetoothed_patches.planned(launch_kernels.axpy())
    alive = []

    for _ in range(calls):
        tensors = [rows() for _ in range(3)]
        alive += map(weakref.ref, tensors)
        alive += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        handle(*tensors, 2.0)

    del tensors
    driver.clear()
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_a_call_that_fails_keeps_its_tensors_no_longer_than_its_error(driver):
    """LP16: what was watched of it is forgotten."""

    handle = ninetoothed_patches.planned(launch_kernels.axpy())
    tensors = [rows() for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    driver.launch_error = ValueError("cannot be accessed")

    with pytest.raises(ValueError, match="cannot be accessed"):
        handle(*tensors, 2.0)

    # Its traceback holds the call's frames.
    driver.launch_error = None
    del tensors
    driver.clear()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    assert handle.cache_info().plans == 0


def test_a_tensor_set_to_another_storage_is_read_there(driver):
    """LP16: addresses are read at each call."""

    pair = Pair("axpy", driver)
    x, y, o = rows(), rows(), rows()

    for _ in range(3):
        pair.call(x, y, o, 2.0)

    other = rows()
    x.set_(other)
    assert other.data_ptr() in pair.call(x, y, o, 2.0).values
    x.data = y
    assert pair.call(x, y, o, 2.0).values.count(y.data_ptr()) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.resize_(4, 128), id="resize_"),
        pytest.param(lambda x: x.set_(rows(8, stride=256)), id="set_"),
        pytest.param(
            lambda x: setattr(x, "data", rows(dtype=torch.float16)), id="data"
        ),
        pytest.param(lambda x: x.t_(), id="t_"),
        pytest.param(lambda x: x.as_strided_((8, 128), (0, 1)), id="as_strided_"),
    ],
)
def test_a_tensor_changed_in_place_is_another_layout(driver, change):
    """LP16: the very same object with another layout does not find the old plan."""

    pair = Pair("scale_strided", driver)
    x, o = rows(), rows()

    for _ in range(3):
        pair.call(x, 0.5, o)

    change(x)
    pair.call(x, 0.5, o)
    assert pair.info.misses == 2


# Identity.


def test_one_address_with_three_layouts_has_three_plans(scale):
    """LP22: an address decides nothing."""

    buffer, o = torch.zeros(8 * 128, dtype=torch.bfloat16), rows()

    for _ in range(2):
        scale.call(buffer.view(8, 128), 0.5, o)
        scale.call(buffer.as_strided((4, 128), (256, 1)), 0.5, o)
        scale.call(buffer.view(torch.float16).view(8, 128), 0.5, o)

    assert scale.counts == (3, 3, 0)


def test_shapes_of_as_many_elements_and_the_same_strides_have_their_own_plans(driver):
    """LP22: rows may overlap, and then strides and the number of elements are not the shape."""

    pair = Pair("scale_strided", driver)
    x, o = torch.zeros(2, 1024, dtype=torch.bfloat16)

    for _ in range(2):
        for shape in ((8, 128), (4, 256)):
            views = [tensor.as_strided(shape, (128, 1)) for tensor in (x, o)]
            pair.call(views[0], 0.5, views[1])

    assert pair.counts == (2, 2, 0)


# Devices.


def test_each_device_has_its_own_plan():
    """LP24, LP26: a kernel belongs to the device it was loaded on, and nothing of one device is used on another."""

    with recording(devices=(132, 64)) as driver:
        pair, x, o = Pair("scale", driver), rows(), rows()
        records = []

        for device in (0, 1, 0, 1, 1, 0):
            driver.device = device
            records.append(pair.call(x, 0.5, o))
            assert records[-1].stream == 7 + 100 * device

        assert len({record.function for record in records}) == 2
        assert pair.counts == (4, 2, 0)


@pytest.mark.parametrize("home", ["cuda:0", "cpu:1"])
def test_tensors_on_another_device_go_the_ordinary_way(driver, scale, home):
    """LP25: no plan is made or used, and the call is counted; also on another one of the same type."""

    driver.get_active_torch_device = lambda: torch.device(home)

    for _ in range(2):
        scale.call(rows(), 0.5, rows())

    assert scale.info.bypasses == {"foreign device": 2}
    assert scale.info.plans == 0


def test_a_plan_is_not_for_tensors_on_another_device(driver, scale):
    """LP25: the same layout at home has a plan, and it is not used."""

    for device in ("cpu", "cpu", "meta", "meta"):
        tensors = [tensor.to(device) for tensor in (rows(), rows())]
        scale.call(tensors[0], 0.5, tensors[1])

    assert scale.info.bypasses == {"foreign device": 2}
    assert scale.counts == (1, 1, 2)


# Streams and capture.


def test_the_stream_is_the_one_of_the_call(driver, scale):
    """LP27: no stream is kept."""

    x, o = rows(), rows()

    for stream in (7, 8, 9, 2**63, 7):
        driver.stream = stream
        assert scale.call(x, 0.5, o).stream == stream

    assert scale.counts == (4, 1, 0)


def test_a_first_call_that_raises_leaves_nothing(driver):
    """LP28: a tuning that fails (as it does inside a capture) leaves no half a plan; later calls work."""

    pair = Pair("scale_t", driver)
    x, o = vector(), vector()
    driver.benchmark_error = RuntimeError("not permitted when stream is capturing")
    pair.call(x, 0.5, o)
    assert pair.info.plans == 0
    driver.benchmark_error = None

    for _ in range(3):
        assert pair.call(x, 0.5, o) is not None

    assert pair.counts == (2, 2, 0)


def test_nothing_is_evicted_during_a_capture(driver, monkeypatch):
    """LP29: while a graph is captured a full cache keeps what it has, and evicts again afterwards."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=1)
    capturing = True
    module = torch.get_device_module()
    monkeypatch.setattr(module, "is_initialized", lambda: True, raising=False)
    monkeypatch.setattr(
        module, "is_current_stream_capturing", lambda: capturing, raising=False
    )

    for count in (1, 2, 3, 1):
        handle(rows(count), 0.5, rows(count))

    info = handle.cache_info()
    assert (info.hits, info.misses, info.evictions, info.plans) == (1, 3, 0, 1)
    capturing = False
    handle(rows(2), 0.5, rows(2))
    assert handle.cache_info().evictions == 1
    handle(rows(2), 0.5, rows(2))
    assert handle.cache_info().hits == 2


def test_a_device_that_is_not_in_use_is_not_asked_for_a_capture(driver, monkeypatch):
    """A build of PyTorch for a GPU raises there, where it has none."""

    def raises():
        raise RuntimeError("no device")

    module = types.SimpleNamespace(
        is_initialized=lambda: False, is_current_stream_capturing=raises
    )
    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=1)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: module)

    for count in (1, 2):
        handle(rows(count), 0.5, rows(count))

    assert handle.cache_info().evictions == 1


# Invalidation.


def test_a_replaced_source_is_not_launched_from_an_old_plan(scale):
    """LP30: after `_unsafe_update_src` a call does what the twin's does."""

    if not hasattr(scale.planned._kernel, "_unsafe_update_src"):
        pytest.skip("this Triton replaces a source by assigning to `src`: next test")

    x, o = rows(), rows()

    for _ in range(3):
        before = scale.call(x, 0.5, o)

    for handle in (scale.twin, scale.planned):
        source = handle._kernel.src
        assert " * " in source
        handle._kernel._unsafe_update_src(source.replace("* s", "+ s"))

    for _ in range(2):
        scale.call(x, 0.5, o)

    assert scale.info.bypasses == {"source changed": 2}

    for handle in (scale.twin, scale.planned):
        handle._kernel.device_caches.clear()

    for _ in range(3):
        after = scale.call(x, 0.5, o)

    assert before.function != after.function
    assert scale.counts == (4, 2, 2)


def test_a_source_that_was_put_back_finds_no_plan_of_before(driver):
    """LP30: and room for few plans stays room for few."""

    pair = Pair("scale", driver, max_plans=2)

    if not hasattr(pair.planned._kernel, "_unsafe_update_src"):
        pytest.skip("this Triton replaces a source by assigning to `src`")

    x, o = rows(), rows()
    source = pair.planned._kernel.src

    for changed in (source, source.replace("* s", "+ s"), source, source):
        for handle in (pair.twin, pair.planned):
            handle._kernel._unsafe_update_src(changed)
            stores(handle).clear()

        for _ in range(2):
            pair.call(x, 0.5, o)

    for s in (1.5, 2.5, 3.5):
        pair.call(x, s, o)

    assert pair.info.plans == 2


def test_cleared_kernels_are_compiled_again(scale):
    """LP30: whoever clears Triton's kernels expects the next call to compile."""

    x, o = rows(), rows()

    for _ in range(3):
        scale.call(x, 0.5, o)

    for handle in (scale.twin, scale.planned):
        stores(handle).clear()

    scale.call(x, 0.5, o)
    assert compilations(scale.planned) == 1
    assert scale.counts == (2, 2, 0)


def test_a_changed_global_does_what_the_twin_does(driver):
    """LP31: a kernel that reads a global of its module is not planned where Triton watches that global."""

    pair = Pair("scale_by_global", driver)
    x, o = rows(), rows()

    for _ in range(2):
        pair.call(x, 0.5, o)

    is_watched = bool(pair.planned._kernel.used_global_vals)
    assert pair.info.bypasses == ({"captured globals": 2} if is_watched else {})

    for handle in (pair.twin, pair.planned):
        handle._launch.__globals__["FACTOR"] = triton.language.constexpr(4)

    _, raised = outcome(driver, pair.planned, x, 0.5, o)
    assert raised is None or "FACTOR has changed" in raised[1]
    assert (raised is not None) == is_watched
    pair.call(x, 0.5, o)


def test_another_driver_is_another_plan(driver, scale):
    """LP32: a binary for sm_90 is not launched after the driver was replaced by one for sm_80."""

    x, o = rows(), rows()

    for _ in range(3):
        scale.call(x, 0.5, o)

    other = RecordingDriver(SM_80)

    with active(other):
        for handle in (scale.twin, scale.planned):
            # Triton itself looks at the target only when it first meets a device.
            stores(handle).clear()

        handles = Pair("scale", other)
        handles.twin, handles.planned = scale.twin, scale.planned

        for _ in range(3):
            handles.call(x, 0.5, o)

    assert driver.take() == []
    assert scale.counts == (4, 2, 0)
    scale.call(x, 0.5, o)


def test_another_driver_gives_device_and_stream(driver, scale):
    """LP32: also where Triton goes on with the kernels it has."""

    x, o = rows(), rows()

    for _ in range(3):
        scale.call(x, 0.5, o)

    driver.clear()

    with active(RecordingDriver()) as other:
        other.stream = 99
        records = []

        for handle in (scale.twin, scale.planned):
            handle(x, 0.5, o)
            records.append(driver.take() + other.take())

    assert records[0] == records[1]
    assert [record.stream for record in records[1]] == [99]


# Hooks.


def test_no_hook_is_no_bypass(scale):
    """LP33, LP53: chains without links are no hooks."""

    x, o = rows(), rows()

    for _ in range(100):
        scale.planned(x, 0.5, o)

    assert scale.counts == (99, 1, 0)


@pytest.fixture
def hooks():
    """Adds hooks that run at the launch, and takes them away."""

    knobs = getattr(triton, "knobs", None)
    owner = triton.compiler.CompiledKernel if knobs is None else knobs.runtime
    added = []

    def add(kind, function):
        name = f"launch_{kind}_hook"

        if hasattr(knobs, "HookChain"):
            getattr(owner, name).add(function)
        else:
            setattr(owner, name, function)

        added.append((name, function))

    def remove():
        while added:
            name, function = added.pop()

            if hasattr(knobs, "HookChain"):
                getattr(owner, name).remove(function)
            else:
                setattr(owner, name, None)

    add.remove = remove

    yield add

    remove()


def test_hooks_see_every_launch(driver, scale, hooks):
    """LP34: with a hook installed calls go the ordinary way, and are counted; afterwards they hit again."""

    x, o = rows(), rows()
    seen = []

    for _ in range(2):
        scale.planned(x, 0.5, o)

    hooks("enter", lambda metadata: seen.append(("enter", metadata.get()["name"])))
    hooks("exit", lambda metadata: seen.append(("exit", metadata.get()["name"])))

    for _ in range(3):
        scale.planned(x, 0.5, o)

    hooks.remove()
    name = scale.planned._kernel.__name__
    assert seen == [("enter", name), ("exit", name)] * 3
    assert scale.info.bypasses == {"launch hook": 3}

    for _ in range(3):
        scale.call(x, 0.5, o)

    assert scale.counts == (4, 1, 3)


def test_an_exit_hook_alone_is_a_hook(scale, hooks):
    """LP34: either of the two is enough."""

    hooks("exit", lambda metadata: None)
    scale.planned(rows(), 0.5, rows())
    assert scale.info.bypasses == {"launch hook": 1}


def test_whatever_stands_in_a_hooks_place_is_a_hook(scale, monkeypatch):
    """LP34: some profilers put a plain function where Triton 3.5 and later keep a chain."""

    if not hasattr(triton, "knobs"):
        pytest.skip("before 3.4 hooks are plain functions anyway")

    x, o = rows(), rows()
    seen = []

    for _ in range(2):
        scale.planned(x, 0.5, o)

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", seen.append)
        scale.planned(x, 0.5, o)

    assert len(seen) == 1
    assert scale.info.bypasses == {"launch hook": 1}


def test_a_pre_run_hook_sees_every_call(scale):
    """LP34: `JITFunction.add_pre_run_hook` as well."""

    seen = []
    x, o = rows(), rows()

    for _ in range(2):
        scale.planned(x, 0.5, o)

    scale.planned._kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))

    for _ in range(2):
        scale.planned(x, 0.5, o)

    assert len(seen) == 2
    assert scale.counts == (1, 1, 2)


def test_debug_is_another_kernel(scale, monkeypatch):
    """LP34: what Triton reads on each call is part of the key."""

    x, o = rows(), rows()
    knobs = getattr(triton, "knobs", None)

    for _ in range(2):
        plain = scale.call(x, 0.5, o)

    if knobs is None:
        monkeypatch.setenv("TRITON_DEBUG", "1")
    else:
        monkeypatch.setattr(knobs.runtime, "debug", True)

    for _ in range(2):
        debug = scale.call(x, 0.5, o)

    monkeypatch.undo()
    assert plain == scale.call(x, 0.5, o)
    assert scale.counts == (3, 2, 0)
    assert compilations(scale.planned) == 2
    assert debug.grid == plain.grid


@pytest.mark.parametrize(
    "knob, value",
    [("instrumentation_mode", "other"), ("fpsan_homomorphic_casts", True)],
)
def test_what_triton_reads_on_each_call_is_another_plan(
    scale, monkeypatch, knob, value
):
    """LP44: a plan is not used while a knob stands otherwise, and is used again afterwards."""

    if knob not in triton.runtime.JITFunction.run.__code__.co_names:
        pytest.skip(f"this Triton does not read {knob} on each call")

    x, o = rows(), rows()

    for _ in range(2):
        scale.planned(x, 0.5, o)

    assert scale.counts == (1, 1, 0)

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.compilation, knob, value)
        scale.planned(x, 0.5, o)

    assert scale.counts == (1, 2, 0)

    scale.planned(x, 0.5, o)

    assert scale.counts == (2, 2, 0)


# Calls that launch nothing, or in whose middle there is another.


@pytest.fixture
def cancel_compilations(monkeypatch):
    """A hook by which Triton is told that a kernel is compiled elsewhere. What undoes it is returned."""

    knobs = getattr(triton, "knobs", None)

    if knobs is None:
        monkeypatch.setattr(triton.runtime.JITFunction, "cache_hook", lambda **_: True)
    else:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **_: True)

    return monkeypatch.undo


def test_a_cancelled_compilation_is_no_launch(driver, cancel_compilations):
    """The twin launches nothing and raises nothing, and there is nothing to make a plan from."""

    pair = Pair("scale", driver)
    x, o = rows(), rows()

    assert pair.call(x, 0.5, o) is None
    assert pair.info.bypasses == {"not launched": 1}

    cancel_compilations()

    for _ in range(2):
        assert pair.call(x, 0.5, o) is not None

    assert pair.counts == (1, 1, 1)


def call_once_within_the_launch(driver, call):
    """Let the next launch be interrupted by `call`, as by a finalizer."""

    def interrupt():
        driver.on_launch = None
        call()

    driver.on_launch = interrupt


@pytest.mark.parametrize("count", [8, 4])
def test_a_call_within_a_call(driver, count):
    """A finalizer calls the handle while a call of it is watched: both launch, and the outer one has its plan."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    outer, inner = (rows(8), 0.5, rows(8)), (rows(count), 0.5, rows(count))
    call_once_within_the_launch(driver, lambda: handle(*inner))
    handle(*outer)
    records = driver.take()

    for record, (x, _, o) in zip(records, (inner, outer), strict=True):
        assert {x.data_ptr(), o.data_ptr()} <= set(record.values)

    assert handle.cache_info().bypasses == {"nested call": 1}
    handle(*outer)
    assert driver.take() == records[1:]
    handle(*inner)
    assert driver.take() == records[:1]
    assert handle.cache_info().hits >= 1


def test_a_call_within_a_tuning(driver):
    """It has the tuner's results, and no state in common with the call that it interrupts."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_t())
    outer, inner = (vector(), 0.5, vector()), (vector(16), 2.0, vector(16))
    call_once_within_the_launch(driver, lambda: handle(*inner))
    handle(*outer)
    records = driver.take()

    for x, _, o in (inner, outer):
        assert any({x.data_ptr(), o.data_ptr()} <= set(one.values) for one in records)

    assert handle.cache_info().bypasses == {"nested call": 1}

    for arguments in (outer, inner):
        handle(*arguments)
        handle(*arguments)
        assert len(set(driver.take())) == 1


@pytest.mark.parametrize("name", ["scale", "scale_t"])
def test_calls_within_calls_wait_for_no_other_thread(driver, name):
    """Two threads are in the first call of a handle each, and each calls the other's there."""

    make = vector if name == "scale_t" else rows
    unpatched = [getattr(launch_kernels, name)() for _ in range(2)]

    for handle in unpatched:
        # Compiled here: in CPython 3.11.2 one of two threads that parse at once may fail.
        handle(make(), 0.5, make())

        if name == "scale_t":
            tuner_of(handle).cache.clear()

    handles = [ninetoothed_patches.planned(handle) for handle in unpatched]
    both_launch = threading.Barrier(2)
    of_thread = threading.local()

    def interrupt():
        index, of_thread.index = of_thread.index, None

        if index is not None:
            both_launch.wait(30)
            handles[1 - index](make(), 0.5, make())

    def call(index):
        of_thread.index = index
        handles[index](make(), 0.5, make())
        is_done[index] = True

    driver.on_launch = interrupt
    is_done = [False, False]
    threads = [
        threading.Thread(target=call, args=(index,), daemon=True) for index in range(2)
    ]

    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(30)

    assert is_done == [True, True]

    for handle in handles:
        assert handle.cache_info().bypasses == {"nested call": 1}


# Threads. Tuned kernels are in test_triton_runtime_auto_tuning.


def test_no_thread_launches_a_kernel_that_is_being_loaded():
    """LP37: while one thread loads the binary, another waits or goes the ordinary way."""

    with recording(load=lambda: time.sleep(0.2)) as driver:
        handle = ninetoothed_patches.planned(launch_kernels.scale())
        raised = in_threads(4, lambda index: handle(rows(), 0.5, rows()))
        records = driver.take()

    assert raised == []
    assert len(records) == 4
    assert all(type(record.function) is int for record in records)


def test_threads_never_lose_a_count_or_exceed_the_bound(driver):
    """LP38: 16 threads, 500 calls each, 5 layouts, room for 3."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=3)
    layouts = [(rows(count), rows(count)) for count in (1, 2, 3, 4, 5)]
    wrong = []

    for x, o in layouts:
        handle(x, 0.5, o)

    def calls(index):
        for step in range(500):
            x, o = layouts[(index * 7 + step * (index + 1)) % 5]
            handle(x, 0.5, o)

            if handle._cache.info().plans > 3:
                wrong.append(step)

    assert in_threads(16, calls) == []
    info = handle.cache_info()
    assert wrong == []
    assert info.hits + info.misses == 5 + 16 * 500
    assert info.bypasses == {}
    assert len(driver.records) == 5 + 16 * 500

    expected = {(x.data_ptr(), o.data_ptr(), (x.shape[0] + 3) // 4) for x, o in layouts}
    addresses = {x.data_ptr() for x, _ in layouts} | {o.data_ptr() for _, o in layouts}

    for record in driver.records:
        o, x = (value for value in record.values if value in addresses)
        assert (x, o, record.grid[0]) in expected


def test_eight_threads_of_mixed_calls_launch_what_they_were_given(driver):
    """LP38: 8 threads, 1,000 calls each, layouts, alignments and scalars mixed."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    layouts = [
        (rows(count, offset=offset), s, rows(count))
        for count in (1, 4, 9)
        for offset in (0, 1)
        for s in (0.5, 2, True)
    ]

    for layout in layouts:
        handle(*layout)

    expected = {record.values for record in driver.take()}

    def calls(index):
        for step in range(1000):
            handle(*layouts[(index * 5 + step * 7) % len(layouts)])

    assert in_threads(8, calls) == []
    assert {record.values for record in driver.take()} == expected
    assert handle.cache_info().hits == 8000


def test_a_key_that_two_threads_prepare_has_one_plan(driver):
    """LP39: both are past the look-up when the first prepares."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    x, o = rows(), rows()
    assert in_threads(8, lambda index: handle(x, 0.5, o)) == []
    info = handle.cache_info()
    assert (info.plans, info.misses, info.hits) == (1, 1, 7)

    for _ in range(100):
        handle(x, 0.5, o)

    assert handle.cache_info().hits == 107
    assert len({record for record in driver.records}) == 1


# Processes.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_prepares_its_own_plans(driver, scale):
    """LP40: the parent's modules mean nothing in the child."""

    x, o = rows(), rows()

    for _ in range(3):
        scale.call(x, 0.5, o)

    reading, writing = os.pipe()
    child = os.fork()

    if child == 0:
        status = 1

        try:
            counts = [scale.info.plans]

            for _ in range(3):
                scale.planned(x, 0.5, o)
                counts.append(scale.counts)

            os.write(writing, json.dumps(counts).encode())
            status = 0
        finally:
            os._exit(status)

    os.close(writing)

    with os.fdopen(reading) as pipe:
        counts = json.loads(pipe.read())

    assert os.waitpid(child, 0)[1] == 0
    assert counts == [0, [2, 2, 0], [3, 2, 0], [4, 2, 0]]
    assert scale.info.plans == 1
    scale.call(x, 0.5, o)
    assert scale.counts == (3, 1, 0)


def test_plans_that_are_cleared_within_a_call_are_gone_after_it():
    """LP45: what was launched may be what plans were cleared for."""

    with recording(load=ninetoothed_patches.clear_plans):
        handle = ninetoothed_patches.planned(launch_kernels.scale())
        plans = []

        for _ in range(3):
            handle(rows(), 0.5, rows())
            plans.append(handle.cache_info().plans)

    assert plans == [0, 1, 1]
    assert handle.cache_info().misses == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_forked_within_a_call_keeps_no_plan_of_it():
    """LP40: what the parent began belongs to the parent, also where the child ends it."""

    children = []
    status = 1

    with recording(load=lambda: children.append(os.fork())):
        handle = ninetoothed_patches.planned(launch_kernels.scale())

        try:
            handle(rows(), 0.5, rows())
            plans = [handle.cache_info().plans]
            handle(rows(), 0.5, rows())
            plans.append(handle.cache_info().plans)
            status = 0 if plans == [0, 1] else 2
        finally:
            if children == [0]:
                os._exit(status)

        assert plans == [1, 1]
        assert os.waitpid(children[0], 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_forked_while_a_thread_compiles_is_not_stuck():
    """LP40: the thread that held the lock is not there."""

    loading, forked = threading.Event(), threading.Event()

    def load():
        loading.set()
        forked.wait()

    with recording(load=load) as driver:
        handle = ninetoothed_patches.planned(launch_kernels.scale())
        thread = threading.Thread(target=handle, args=(rows(), 0.5, rows()))
        thread.start()
        loading.wait()
        child = os.fork()

        if child == 0:
            status = 1

            try:
                forked.set()
                # A layout of its own: the half-loaded kernel is Triton's, not ours.
                handle(rows(offset=1), 2, rows())
                status = 0 if handle.cache_info().plans == 1 else 2
            finally:
                os._exit(status)

        forked.set()
        thread.join()
        deadline = time.monotonic() + 60

        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)

            if done:
                break

            time.sleep(0.05)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child waits for a lock of its parent")

    assert os.waitstatus_to_exitcode(status) == 0
    assert len(driver.records) == 1


# Call forms.


def test_positional_and_keyword_calls_meet_in_one_plan(scale):
    """LP41: the order of keywords changes nothing."""

    x, o = rows(), rows()
    first = scale.call(x, 0.5, o)
    assert scale.call(o=o, s=0.5, x=x) == first
    assert scale.call(x, o=o, s=0.5) == first
    assert scale.counts == (2, 1, 0)


def test_parameters_may_have_any_name(driver):
    """LP41: a tensor called `key`, `type` or `next` is no local variable or builtin of ours."""

    pair = Pair("names_of_ours", driver)

    for offset in (0, 1):
        for s in (0.5, 0.0, 2):
            for _ in range(3):
                pair.call(
                    rows(offset=offset),
                    s,
                    rows(),
                    next=s,
                    len=s,
                    jit=rows(),
                    cache=rows(),
                )

    assert pair.counts == (12, 6, 0)


@pytest.mark.parametrize("name", ["scale", "scale_t"])
def test_wrong_calls_raise_the_twins_error(driver, name):
    """LP42: missing, unknown and doubled arguments; nothing is kept from them."""

    pair = Pair(name, driver)
    x, o = (vector(), vector()) if name == "scale_t" else (rows(), rows())
    pair.call(s=0.5, o=o, x=x)

    for args, kwargs in (
        ((x, 0.5), {}),
        ((x, 0.5, o, o), {}),
        ((x, 0.5, o), {"unknown": 1}),
        ((x, 0.5, o), {"x": x}),
        ((), {}),
    ):
        assert outcome(driver, pair.planned, *args, **kwargs)[1][0] is TypeError
        pair.call(*args, **kwargs)

    assert pair.info.plans == 1
    assert pair.counts == (0, 1, 0)


# Kinds of tensors.


class WithoutStorage(torch.Tensor):
    """A wrapper whose address is none."""

    @staticmethod
    def __new__(cls, wrapped):
        return torch.Tensor._make_wrapper_subclass(
            cls, wrapped.shape, dtype=wrapped.dtype, strides=wrapped.stride()
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


class Annotated(torch.Tensor):
    """A subclass that adds nothing."""


def test_a_wrapper_without_storage_goes_the_ordinary_way(scale):
    """LP46: the twin's result or error, and no null pointer from a plan."""

    for _ in range(2):
        scale.call(WithoutStorage(rows()), 0.5, rows())

    assert scale.info.plans == 0
    assert scale.info.bypasses == {"tensor subclass": 2}


def test_other_subclasses_go_the_ordinary_way_and_parameters_do_not(scale):
    """LP46: a Parameter is the one subclass that is planned."""

    x, o = rows(), rows()
    scale.call(x.as_subclass(Annotated), 0.5, o)
    assert scale.info.bypasses == {"tensor subclass": 1}

    for _ in range(3):
        scale.call(torch.nn.Parameter(x), 0.5, o)

    assert scale.counts == (2, 1, 1)


def test_empty_then_not_empty(scale):
    """LP47: the address of an empty tensor is 0."""

    for count in (0, 4, 0, 4):
        scale.call(rows(count), 0.5, rows(count))

    assert scale.counts == (2, 2, 0)


def test_an_expanded_row_is_not_a_dense_one(scale):
    """LP48: stride 0 is divisible by 16 as well."""

    for x in (rows(1).expand(4, 128), rows(4), rows(1).expand(4, 128), rows(4)):
        scale.call(x, 0.5, rows(4))

    assert scale.counts == (2, 2, 0)


def test_scalars_of_other_kinds_do_not_disturb_the_plan(scale):
    """LP49: numpy scalars and 0-d tensors do what the twin does, and are never looked up."""

    x, o = rows(), rows()
    scale.call(x, 0.5, o)

    for s in (
        numpy.float64(0.5),
        numpy.float32(0.5),
        numpy.int64(2),
        torch.tensor(0.5),
        numpy.bool_(True),
    ):
        scale.call(x, s, o)

    scale.call(x, 0.5, o)
    assert scale.counts == (1, 1, 5)
    assert scale.info.bypasses == {"numpy scalar": 4, "tensor as scalar": 1}


def test_wrong_kinds_of_arguments_raise_the_twins_error(scale):
    """LP49: None, a list or a number where a tensor belongs; a list or a string where a scalar does."""

    x, o = rows(), rows()

    for arguments in (
        (None, 0.5, o),
        ([1], 0.5, o),
        (1, 0.5, o),
        (x, [1], o),
        (x, "half", o),
        (x, object(), o),
    ):
        assert scale.call(*arguments) is None

    assert scale.info.plans == 0


def test_sparse_tensors_raise_the_twins_error(scale):
    """LP49: a tensor without strides."""

    scale.call(rows().to_sparse(), 0.5, rows())
    assert scale.info.plans == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_raise_the_twins_error(scale):
    """LP49: a strided tensor without strides, beside plans; PyTorch's guard would end the process at one."""

    x, o, nested = rows(), rows(), torch.nested.nested_tensor([rows(), rows()])
    x_again = rows()

    for tensor in (x, x, x_again, x):
        scale.call(tensor, 0.5, o)

    assert scale.call(nested, 0.5, o) is None
    assert scale.call(x, 0.5, nested) is None
    assert scale.counts == (3, 1, 2)


def test_jagged_lengths_are_read_at_each_call(driver):
    """LP50: a jagged kernel is never planned."""

    pair = Pair("jagged", driver)

    def nested(*lengths):
        return torch.nested.nested_tensor(
            [torch.zeros(length, 128) for length in lengths], layout=torch.jagged
        )

    grids = [
        pair.call(nested(*lengths), 0.5, nested(*lengths)).grid
        for lengths in ((5, 3), (9, 1), (5, 3))
    ]
    assert len(set(grids)) == 2
    assert pair.info.bypasses == {"jagged": 3}


# What a hit costs, counted in calls: no busy machine changes that.


def calls_of(function, *args):
    """The names of all functions called, up to the driver's record."""

    called = []

    def note(frame, event, argument):
        if called and called[-1] == "_record":
            return

        if event == "call":
            called.append(frame.f_code.co_name)
        elif event == "c_call":
            called.append(argument.__name__)

    gc.disable()
    sys.setprofile(note)

    try:
        function(*args)
    finally:
        sys.setprofile(None)
        gc.enable()

    return called


def test_what_a_collection_calls_is_not_counted():
    """Hypothesis, among others, has itself told of each: it may fall into any call."""

    def be_told(phase, information):
        pass

    thresholds = gc.get_threshold()
    gc.callbacks.append(be_told)
    gc.set_threshold(1)

    try:
        called = calls_of(lambda: [[number] for number in range(1000)])
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(be_told)

    assert be_told.__name__ not in called
    assert gc.isenabled()


def test_a_hit_imports_nothing_and_builds_no_strings(driver, scale):
    """LP54: what a hit calls is listed here, and it is short."""

    x, o = rows(), rows()

    for _ in range(3):
        scale.planned(x, 0.5, o)

    # How Triton's knobs and its lazy driver are read, in some versions from the environment: as the twin does.
    tritons_own = {"__get__", "get", "getenv_bool", "transform", "cast"}
    tritons_own |= {"__getitem__", "encode", "encodekey", "__getattr__", "getattr"}
    tritons_own |= {"get_current_device", "get_current_stream", "device"}
    tritons_own |= {"_initialize_obj", "toenv", "setenv", "active", "isinstance"}
    ours = {"is_dynamo_compiling", "data_ptr", "check", "launch_plan"}
    called = calls_of(scale.planned, x, 0.5, o)
    assert "check" in called
    assert set(called) - tritons_own - {"<lambda>", "_record", "next"} <= ours | {
        scale.planned._launch.__name__
    }
    assert len(called) < 40


def test_a_hit_does_less_than_half_of_what_the_twin_does(scale):
    """LP54: a way that is short on paper only would show here."""

    x, o = rows(), rows()

    for _ in range(3):
        scale.call(x, 0.5, o)

    planned, unpatched = (
        len(calls_of(handle, x, 0.5, o)) for handle in (scale.planned, scale.twin)
    )
    assert 2 * planned < unpatched


# Counting.


def test_every_reason_is_counted_under_its_own_name(driver, hooks):
    """LP55: hook, numpy scalar, subclass, tensor as scalar, foreign device; the others have tests of their own."""

    pair = Pair("scale", driver)
    x, o = rows(), rows()
    pair.call(x, numpy.float64(0.5), o)
    pair.call(x, torch.tensor(0.5), o)
    pair.call(x.as_subclass(Annotated), 0.5, o)
    hooks("enter", lambda metadata: None)
    pair.planned(x, 0.5, o)
    hooks.remove()
    driver.get_active_torch_device = lambda: torch.device("meta")
    pair.call(x, 0.5, o)
    assert pair.info.bypasses == {
        "numpy scalar": 1,
        "tensor as scalar": 1,
        "tensor subclass": 1,
        "launch hook": 1,
        "foreign device": 1,
    }
    assert pair.counts == (0, 0, 5)


def test_a_launch_function_that_passes_other_tensors_has_no_plans(driver):
    """A plan would launch with the addresses of the call's own tensors."""

    handle = launch_kernels.scale()
    launch, kernel = handle._launch, handle._kernel.__name__
    sizes = "{0}, {0}.size(0), {0}.stride(0), {0}.stride(1)"
    source = (
        f"def {launch.__name__}(x, s, o):\n"
        f"    y = x.clone()\n"
        f"    {kernel}[lambda meta: (2,)]("
        f"{sizes.format('o')}, {sizes.format('y')}, s, num_warps=4, num_stages=2)\n"
    )
    names = dict(launch.__globals__)
    exec(source, names)
    handle._launch = names[launch.__name__]
    planned = ninetoothed_patches.planned(handle)

    for _ in range(2):
        planned(rows(), 0.5, rows())

    assert len(driver.take()) == 2
    assert planned.cache_info().bypasses == {"unexpected kernel arguments": 2}


def test_dynamo_traces_through_the_unpatched_launch_function(driver):
    """LP55: a traced call is the twin's, and is counted when it is traced."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    twin = launch_kernels.scale()

    def traced(handle):
        graphs = []

        def backend(graph, inputs):
            graphs.append([str(node.target) for node in graph.graph.nodes])

            return graph.forward

        @torch.compile(backend=backend, fullgraph=True)
        def call(x, o):
            handle(x, 0.5, o)

            return o

        try:
            call(rows(), rows())
        except Exception as error:
            graphs.append(type(error))

        return graphs

    expected = traced(twin)
    torch.compiler.reset()
    assert traced(handle) == expected
    torch.compiler.reset()
    assert handle.cache_info().bypasses == {"tracing": 1}

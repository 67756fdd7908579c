"""A repeater launches what its call launches, with other addresses, or says that it cannot."""

import os

import launch_kernels
import pytest
import torch
import triton
from launch_helpers import outcome, rows
from recording_driver import GFX942, recording

import ninetoothed_patches
from ninetoothed_patches import triton_abi


@pytest.fixture
def driver():
    with recording(devices=(132, 132)) as driver:
        yield driver


@pytest.fixture
def handle(driver):
    """`scale(x, s, o)`, which has a plan for `rows()`."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=2)
    x = rows()
    handle(x, 0.5, x)

    return handle


@pytest.fixture
def repeat(handle):
    x = rows()

    return ninetoothed_patches.repeater(handle, x, 0.5, x)


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def assert_refused(driver, repeat):
    driver.clear()
    assert repeat(*addresses(rows(), rows())) is False
    assert driver.take() == []


def test_it_launches_what_the_call_launches(driver, handle, repeat):
    """With the addresses of other tensors, on the stream that is current, counted as a hit."""

    x, out = rows(), rows()
    expected = outcome(driver, handle, x, 0.5, out)
    hits = handle.cache_info().hits
    driver.clear()
    assert repeat(*addresses(x, out)) is True
    assert (driver.take(), None) == expected
    assert handle.cache_info().hits == hits + 1
    driver.stream = 9
    assert repeat(*addresses(x, out)) is True
    assert driver.take()[-1].stream == 9


def test_use_keeps_the_plan_from_eviction(driver, handle, repeat):
    """With room for two, the one that is not used goes."""

    x = rows(16)
    handle(x, 0.5, x)
    assert repeat(*addresses(rows(), rows()))
    x = rows(32)
    handle(x, 0.5, x)
    assert repeat(*addresses(rows(), rows()))


def test_other_alignments_are_refused(driver, repeat):
    """The kernel was compiled for addresses that are divisible by 16."""

    assert repeat(rows(offset=1).data_ptr(), rows().data_ptr()) is False


def test_alignments_need_only_be_those_of_the_call(driver):
    """One of two addresses was not divisible by 16."""

    handle = ninetoothed_patches.planned(launch_kernels.scale())
    x, out = rows(offset=1), rows()
    handle(x, 0.5, out)
    repeat = ninetoothed_patches.repeater(handle, x, 0.5, out)
    assert repeat(*addresses(x, out))
    assert not repeat(*addresses(out, x))
    assert not repeat(*addresses(out, out))


def test_another_current_device_is_refused(driver, repeat):
    driver.device = 1
    assert_refused(driver, repeat)


def test_another_driver_is_refused(driver, repeat):
    with recording() as other:
        assert_refused(other, repeat)


def test_a_hook_is_not_passed_over(driver, handle, repeat):
    handle._kernel.pre_run_hooks.append(lambda *args, **kwargs: None)
    assert_refused(driver, repeat)


def test_a_hook_that_is_no_chain_is_not_passed_over(driver, repeat, monkeypatch):
    """A plain function in the place of Triton's chain of hooks."""

    knobs = getattr(triton_abi.triton, "knobs", None)
    owner = triton_abi.CompiledKernel if knobs is None else knobs.runtime
    monkeypatch.setattr(owner, "launch_enter_hook", lambda metadata: None)
    assert_refused(driver, repeat)


def test_another_source_is_refused(driver, handle, repeat):
    handle._kernel.hash = "another"
    assert_refused(driver, repeat)


def test_kernels_that_triton_forgot_are_refused(driver, handle, repeat):
    store = getattr(handle._kernel, triton_abi._store_attribute())
    store.clear()
    assert_refused(driver, repeat)


def test_a_dropped_plan_is_refused(driver, handle, repeat):
    ninetoothed_patches.clear_plans()
    assert_refused(driver, repeat)


def test_an_evicted_plan_is_refused(driver, handle, repeat):
    for count in (16, 32):
        x = rows(count)
        handle(x, 0.5, x)

    assert_refused(driver, repeat)


def test_a_child_process_is_refused(driver, repeat):
    """What the parent loaded means nothing in the child."""

    child = os.fork()

    if child == 0:
        # Whatever happens, the child must not go on with the parent's tests.
        try:
            launched = repeat(*addresses(rows(), rows()))
        except BaseException:
            launched = 2

        os._exit(launched)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert repeat(*addresses(rows(), rows()))


def test_a_tuner_that_forgot_is_refused(driver):
    """What would be chosen now may be another configuration."""

    handle = ninetoothed_patches.planned(launch_kernels.scale_t())
    x = torch.zeros(1000, dtype=torch.bfloat16)

    for _ in range(2):
        handle(x, 0.5, x)

    repeat = ninetoothed_patches.repeater(handle, x, 0.5, x)
    expected = outcome(driver, handle, x, 0.5, x)
    driver.clear()
    assert repeat(*addresses(x, x))
    assert (driver.take(), None) == expected
    handle._cache._tuner.cache.clear()
    assert not repeat(*addresses(x, x))


def test_there_is_none_without_a_plan(driver, handle):
    """A call that was not made, one that cannot be planned, or none at all."""

    x = rows(16)
    assert ninetoothed_patches.repeater(handle, x, 0.5, x) is None
    subclass = x.as_subclass(type("Subclass", (torch.Tensor,), {}))
    handle(x, 0.5, subclass)
    # What has no address raises, each by its own error.
    without_data = torch.nn.UninitializedParameter()

    for arguments in [
        (x, 0.5, subclass),
        (x, 0.5, without_data),
        (x, [0.5], x),
        ("text", 0.5, x),
        (x, 0.5),
    ]:
        assert ninetoothed_patches.repeater(handle, *arguments) is None


@pytest.mark.skipif(
    not hasattr(triton.backends.compiler.BaseBackend, "get_tensor_specialization"),
    reason="before 3.6 the AMD backend looks at the storage only if asked by an environment variable",
)
def test_there_is_none_where_addresses_do_not_tell_enough():
    """For AMD a storage beyond 2 GiB is another kernel, whatever the address."""

    with recording(GFX942):
        handle = ninetoothed_patches.planned(launch_kernels.scale())
        x = rows()

        for _ in range(2):
            handle(x, 0.5, x)

        assert handle.cache_info().hits == 1
        assert ninetoothed_patches.repeater(handle, x, 0.5, x) is None


def test_there_is_none_for_a_handle_without_plans(driver):
    x = rows()
    handle = launch_kernels.scale()
    handle(x, 0.5, x)
    assert ninetoothed_patches.repeater(handle, x, 0.5, x) is None


@pytest.mark.parametrize("handle", [print, None, "scale"], ids=str)
def test_what_is_no_handle_is_refused(handle):
    with pytest.raises(TypeError, match=f"`handle` .* {type(handle).__qualname__}"):
        ninetoothed_patches.repeater(handle, torch.zeros(1))

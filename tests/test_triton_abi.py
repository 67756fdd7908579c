"""The adapter to the running Triton: what it refuses, and what it asks the launcher."""

import types

import pytest
import torch
import triton
from launch_helpers import Pair, outcome, rows
from recording_driver import recording
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import ninetoothed_patches
from ninetoothed_patches import plan_cache, triton_abi
from ninetoothed_patches.launch_plan import Watcher


def without(function, name):
    """A copy of a function's code object in which a name does not occur."""

    code = function.__code__
    names = tuple("renamed" if other == name else other for other in code.co_names)

    return types.FunctionType(
        code.replace(co_names=names), function.__globals__, function.__name__
    )


@pytest.mark.parametrize(
    "owner, method, name",
    [
        pytest.param(JITFunction, "run", "stores", id="device_caches"),
        pytest.param(JITFunction, "run", "packed_metadata", id="packed_metadata"),
        pytest.param(JITFunction, "run", "used_global_vals", id="used_global_vals"),
        pytest.param(CompiledKernel, "__init__", "function", id="function"),
        pytest.param(triton.runtime.Autotuner, "run", "best_config", id="best_config"),
    ],
)
def test_a_triton_without_what_plans_need_is_refused(monkeypatch, owner, method, name):
    """LP51: the message names what is missing, and nothing is changed."""

    if name == "stores":
        name = (
            "device_caches"
            if "device_caches" in JITFunction.run.__code__.co_names
            else "cache"
        )

    monkeypatch.setattr(owner, method, without(getattr(owner, method), name))

    with pytest.raises(
        ninetoothed_patches.UnsupportedVersionError,
        match="device_caches" if name == "cache" else name,
    ) as raised:
        ninetoothed_patches.apply()

    assert triton.__version__ in str(raised.value)
    assert not ninetoothed_patches.is_applied()


@pytest.mark.skipif(
    not hasattr(getattr(triton, "knobs", None), "HookChain"),
    reason="before 3.5 hooks are plain functions",
)
def test_a_hook_chain_without_calls_is_refused(monkeypatch):
    """LP51: the test for an empty chain would never be true."""

    monkeypatch.setattr(triton.knobs, "HookChain", type("HookChain", (), {}))

    with pytest.raises(
        ninetoothed_patches.UnsupportedVersionError, match="HookChain.calls"
    ):
        ninetoothed_patches.apply()


def test_this_triton_has_everything():
    """The checks above do not refuse what they should accept."""

    assert triton_abi.missing_features() == []


class Launcher:
    """What Triton's launchers look like, for a vendor that is none."""

    __module__ = "triton.backends.none.driver"

    def __init__(self, **state):
        self.launch = state.pop("launch", None)
        self.__dict__.update(state)

    def __call__(self, *args):
        self.launch("first", *args, "last")


def test_what_a_launcher_adds_is_found_by_asking_it():
    """No order of arguments is written down for any version or vendor."""

    calls = []
    launcher = Launcher(launch=lambda *args: calls.append(args), scratch_size=0)
    function, arguments = triton_abi.c_launch(launcher, (1, 2, 3))
    assert function is launcher.launch
    assert arguments == ("first", 1, 2, 3, "last")
    assert calls == []


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"global_scratch_size": 64}, id="global scratch"),
        pytest.param({"profile_scratch_size": 1}, id="profile scratch"),
        pytest.param({"gsan_enabled": True}, id="sanitizer"),
    ],
)
def test_a_launcher_that_works_on_every_call_is_called_itself(state):
    """Scratch memory is allocated per call; nothing of it can be kept."""

    launcher = Launcher(launch=lambda *args: None, **state)
    assert triton_abi.c_launch(launcher, (1,)) is None


def test_a_launcher_of_unknown_kind_is_called_itself():
    """What a stranger's `__call__` does is not known."""

    class Stranger(Launcher):
        __module__ = "elsewhere"

    assert triton_abi.c_launch(Stranger(launch=print), (1,)) is None
    assert triton_abi.c_launch(print, (1,)) is None


class Computing(Launcher):
    """Launches unless `is_empty` of the grid."""

    __module__ = Launcher.__module__

    def __init__(self, is_empty):
        super().__init__(launch=lambda *args: active_driver()._record(*args))
        self.is_empty = is_empty

    def __call__(self, *args):
        if not self.is_empty(*args[:3]):
            self.launch(*args)


def active_driver():
    return triton.runtime.driver.active


@pytest.mark.parametrize(
    "is_empty",
    [
        pytest.param(lambda x, y, z: x * y * z == 0, id="product"),
        pytest.param(lambda x, y, z: x == 0, id="comparison"),
        pytest.param(lambda x, y, z: not x, id="truth"),
        pytest.param(lambda *grid: 0 in grid, id="membership"),
    ],
)
def test_a_launcher_that_computes_with_the_grid_is_called_itself(is_empty):
    """At each call, with the grid of that call."""

    with recording() as driver:
        driver.launcher_cls = lambda source, metadata: Computing(is_empty)
        pair = Pair("scale", driver)

        for _ in range(3):
            assert pair.call(rows(), 0.5, rows()) is not None
            assert pair.call(rows(0), 0.5, rows(0)) is None

        assert pair.counts == (4, 2, 0)


@pytest.mark.parametrize("times", [0, 2])
def test_a_launcher_that_does_not_launch_once_is_called_itself(times):
    """A plan launches once."""

    class Repeating(Launcher):
        __module__ = Launcher.__module__

        def __call__(self, *args):
            for _ in range(times):
                self.launch(*args)

    assert triton_abi.c_launch(Repeating(launch=print), (1,)) is None


def test_a_kernel_with_scratch_memory_allocates_it_on_each_call():
    """The allocator that is set at the call is asked at the call."""

    if not hasattr(triton, "set_allocator"):
        pytest.skip("this Triton's kernels have no scratch memory")

    with recording() as driver:
        pair = Pair("scale", driver)
        x = rows()
        launchers = []
        make = driver.launcher_cls

        def launcher_cls(source, metadata):
            launcher = make(source, metadata)

            if not hasattr(launcher, "global_scratch_size"):
                pytest.skip("this Triton's kernels have no scratch memory")

            launcher.global_scratch_size = 16
            launcher.global_scratch_align = 1
            launchers.append(launcher)

            return launcher

        driver.launcher_cls = launcher_cls
        allocations = []

        def allocate(size, alignment, stream):
            allocations.append((size, stream))

            return torch.zeros(size, dtype=torch.int8)

        triton.set_allocator(allocate)

        try:
            for _ in range(3):
                pair.planned(x, 0.5, x)
        finally:
            triton.set_allocator(triton.runtime._allocation.NullAllocator())

        assert launchers
        assert allocations == [(32, driver.stream)] * 3
        assert pair.counts == (2, 1, 0)


def test_a_kernel_that_could_not_be_loaded_is_not_planned():
    """Too many threads: the twin's error, and no plan."""

    if "n_max_threads" not in CompiledKernel._init_handles.__code__.co_names:
        pytest.skip("this Triton does not ask how many threads a kernel may have")

    with recording() as driver:
        driver.max_threads = 32
        pair = Pair("scale", driver)
        x = rows()

        pair.call(x, 0.5, x)
        assert pair.info.plans == 0

        for _ in range(3):
            pair.call(x, 0.5, x)

        # 3.4 raises once, and then launches what it loaded.
        _, raised = outcome(driver, pair.planned, x, 0.5, x)
        assert raised is None or "threads" in raised[1]
        assert pair.info.plans == (0 if raised else 1)


def test_a_kernel_without_a_loaded_function_is_not_planned(monkeypatch):
    """A plan launches that function: a Triton that loads later is left to do so."""

    class WatcherOfUnloaded(Watcher):
        def watch(self, *arguments):
            bound, grid, _ = super().watch(*arguments)

            return bound, grid, types.SimpleNamespace(function=None)

    monkeypatch.setattr(plan_cache, "Watcher", WatcherOfUnloaded)

    with recording() as driver:
        pair = Pair("scale", driver)
        x = rows()
        pair.call(x, 0.5, x)

        assert pair.info.bypasses == {"not loaded": 1}
        assert pair.info.plans == 0

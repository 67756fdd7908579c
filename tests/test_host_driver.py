"""NineToothed without a GPU: the stand-in driver, and what is compiled with it."""

import ninetoothed
import pytest
import torch
import triton
from ninetoothed import Tensor, block_size
from recording_driver import GFX942, SM_90, recording
from threads import in_threads
from triton.backends.compiler import GPUTarget

from ninetoothed_patches import host_driver

without_a_driver = pytest.mark.skipif(
    host_driver.driver_is_present(), reason="Triton has a driver here"
)

needs_a_linker_for_amd = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5),
    reason="before 3.5 Triton has no linker for AMD's code",
)


def host_driver_arrangement(x, y):
    return x.tile((4, 64)), y.tile((4, 64))


def host_driver_application(x, y):
    y = x  # noqa: F841


def make(**options):
    with host_driver.stand_in():
        return ninetoothed.make(
            host_driver_arrangement,
            host_driver_application,
            (Tensor(shape=(None, 64), name="x"), Tensor(shape=(None, 64), name="y")),
            **{"num_warps": 1, "num_stages": 1, **options},
        )


def active_driver():
    """What was set, without asking for the default driver, which may not exist."""

    config = triton.runtime.driver

    return config._active if hasattr(config, "_active") else config.active


@without_a_driver
def test_nothing_can_be_made_without_it():
    """What the stand-in is for."""

    with pytest.raises(RuntimeError):
        ninetoothed.make(
            host_driver_arrangement,
            host_driver_application,
            (Tensor(shape=(None, 64), name="x"), Tensor(shape=(None, 64), name="y")),
            num_warps=1,
            num_stages=1,
        )


@without_a_driver
def test_it_is_gone_after_the_block():
    """Whether the block ends well or not, and when blocks are nested."""

    before = active_driver()

    with host_driver.stand_in():
        outer = active_driver()

        with host_driver.stand_in():
            assert active_driver() is outer

        assert active_driver() is outer is not before

    assert active_driver() is before
    assert not host_driver.driver_is_present()

    with pytest.raises(ZeroDivisionError):
        with host_driver.stand_in():
            raise ZeroDivisionError

    assert active_driver() is before


class _Driver:
    """A driver that somebody has set."""

    def get_current_device(self):
        raise AssertionError("not asked here")


@without_a_driver
def test_it_never_replaces_a_driver_that_is_set():
    """Neither a GPU's nor one set by hand."""

    config = triton.runtime.driver
    before = active_driver()
    driver = _Driver()
    config.set_active(driver)

    try:
        assert host_driver.driver_is_present()

        with host_driver.stand_in():
            assert active_driver() is driver

        assert active_driver() is driver
    finally:
        if hasattr(config, "_active"):
            config._active = before
        else:
            config.active = before


def test_it_never_replaces_the_driver_of_a_gpu(monkeypatch):
    """Where a backend has a driver, nothing is set."""

    monkeypatch.setattr(host_driver, "driver_is_present", lambda: True)
    before = (
        active_driver()
        if not hasattr(triton.runtime.driver, "_active")
        else (triton.runtime.driver._active)
    )

    def refuse(driver):
        raise AssertionError("a driver was set")

    monkeypatch.setattr(triton.runtime.driver, "set_active", refuse)

    with host_driver.stand_in():
        assert getattr(triton.runtime.driver, "_active", before) is before


@without_a_driver
def test_threads_wait_for_each_other():
    """One thread's block does not end while another's still needs the driver."""

    before = active_driver()

    def use(index):
        for _ in range(50):
            with host_driver.stand_in():
                triton.runtime.driver.active.get_current_device()

    assert in_threads(4, use) == []
    assert active_driver() is before


def test_the_interpreter_is_off_here():
    """And a process that has it on says so: see `tests/interpreted`."""

    assert not host_driver.interpreter_is_on()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_named_target(target):
    """The assembly is for it."""

    x = torch.zeros(8, 64)
    compiled = host_driver.compile_call(make(), x, x, target=target)

    assert f".target {target}" in compiled.asm["ptx"]


@needs_a_linker_for_amd
def test_a_target_of_another_kind():
    """A `GPUTarget` serves as well as a name."""

    x = torch.zeros(8, 64)
    compiled = host_driver.compile_call(
        make(), x, x, target=GPUTarget("hip", "gfx942", 64)
    )

    assert "gfx942" in compiled.asm["amdgcn"]


def test_an_unknown_target_is_refused():
    """By name, with those that are known."""

    x = torch.zeros(8, 64)

    with pytest.raises(ValueError, match="`target`.*'sm_1'.*'sm_90'.*GPUTarget"):
        host_driver.compile_call(make(), x, x, target="sm_1")

    with pytest.raises(TypeError, match="`target`.*GPUTarget.*is a int"):
        host_driver.compile_call(make(), x, x, target=90)


def test_what_is_no_handle_is_refused():
    """By name, before anything is called."""

    with pytest.raises(TypeError, match="`handle`.*ninetoothed.make.*function"):
        host_driver.compile_call(make, target="sm_90")


def test_nothing_is_launched():
    """The tensors keep what they hold."""

    x, y = torch.ones(8, 64), torch.zeros(8, 64)
    host_driver.compile_call(make(), x, y, target="sm_90")

    assert not y.any()


def test_alignment_reaches_the_compiler():
    """A tensor that is not 16-byte aligned is not accessed 16 bytes at once."""

    handle = make()
    aligned, buffer = torch.zeros(8, 64), torch.zeros(8 * 64 + 1)
    ptx = [
        host_driver.compile_call(handle, x, aligned, target="sm_90").asm["ptx"]
        for x in (aligned, buffer[1:].view(8, 64))
    ]

    assert "ld.global.v4" in ptx[0]
    assert "ld.global.v4" not in ptx[1]
    assert all("st.global.v4" in one for one in ptx)


def test_keywords_are_arguments_too():
    """As for the handle itself."""

    handle = make()
    x, y = torch.zeros(8, 64), torch.zeros(8, 64)
    by_position = host_driver.compile_call(handle, x, y, target="sm_90")
    by_name = host_driver.compile_call(handle, y=y, x=x, target="sm_90")

    assert by_position.asm["ptx"] == by_name.asm["ptx"]


def host_driver_tuned_arrangement(x, y, size=None):
    size = block_size(32, 64) if size is None else size

    return x.tile((size,)), y.tile((size,))


def host_driver_tuned_application(x, y):
    y = x  # noqa: F841


def test_it_is_the_binary_of_a_launch(monkeypatch, tmp_path):
    """The options that a launch does not give, and that make compiling shorter, change nothing."""

    # A binary holds the path of its source, and one in the cache may be of another's.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    handle = make()
    x, y = torch.zeros(8, 64), torch.zeros(8, 64)
    offline = host_driver.compile_call(handle, x, y, target="sm_90")
    compile_with = triton.compile

    def compile_as_for_a_launch(source, target, options):
        given_to_a_launch = {"num_warps": 1, "num_stages": 1}
        assert given_to_a_launch.items() < options.items()

        return compile_with(source, target=target, options=given_to_a_launch)

    monkeypatch.setattr(triton, "compile", compile_as_for_a_launch)
    launched = host_driver.compile_call(handle, x, y, target="sm_90")

    assert offline.asm["cubin"] == launched.asm["cubin"]


def tensors_for_a_launch(layout):
    if layout == "misaligned":
        return torch.zeros(1025)[1:].view(16, 64), torch.zeros(16, 64)

    if layout == "storage beyond 2 GiB":
        # Address space only: the pages are never touched.
        return torch.empty(3 * 2**28)[:1024].view(16, 64), torch.zeros(16, 64)

    # Neither divisible by 16 nor 1, or both.
    count = {"aligned": 16, "7 rows": 7, "1 row": 1}[layout]

    return torch.zeros(count, 64), torch.zeros(count, 64)


@pytest.mark.parametrize(
    "layout", ["aligned", "7 rows", "1 row", "misaligned", "storage beyond 2 GiB"]
)
@pytest.mark.parametrize(
    "target",
    [SM_90, pytest.param(GFX942, marks=needs_a_linker_for_amd)],
    ids=["sm_90", "gfx942"],
)
def test_the_compiler_is_told_what_a_launch_tells_it(monkeypatch, target, layout):
    """Types, constants, and what the backend wants to know of tensors: on an AMD GPU the size of their storages."""

    # The default from Triton 3.6 on.
    monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", "1")
    handle = make()
    x, y = tensors_for_a_launch(layout)

    with recording(target):
        handle(x, y)
        (launched,) = compiled_kernels(handle)
        offline = host_driver.compile_call(handle, x, y, target=target)

    sources = [
        (
            source.signature,
            source.constants,
            {index: value for index, value in source.attrs.items() if value},
        )
        for source in (launched.src, offline.src)
    ]

    assert sources[0] == sources[1]

    assembly = "ptx" if target is SM_90 else "amdgcn"

    assert launched.asm[assembly] == offline.asm[assembly]


def compiled_kernels(handle):
    (store,) = handle._kernel.device_caches.values()

    return store[0].values()


def make_tuned():
    with host_driver.stand_in():
        return ninetoothed.make(
            host_driver_tuned_arrangement,
            host_driver_tuned_application,
            (Tensor(1, name="x"), Tensor(1, name="y")),
            num_warps=1,
            num_stages=1,
        )


def test_an_auto_tuned_handle_is_refused():
    """Which binary it launches is known on a GPU only."""

    handle, x = make_tuned(), torch.zeros(64)

    with pytest.raises(TypeError, match="`handle`.*host_driver_tuned.*auto-tuned"):
        host_driver.compile_call(handle, x, x, target="sm_90")


@without_a_driver
def test_an_auto_tuned_handle_is_tuned_by_a_later_driver():
    """What it was made with without a GPU can measure nothing."""

    handle, x = make_tuned(), torch.zeros(64)

    with recording() as driver:
        handle(x, x)

        # Every candidate, and the winner.
        assert len(driver.records) > 2

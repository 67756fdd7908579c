"""Applying and reverting the patch, and what it refuses."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import textwrap

import launch_kernels
import ninetoothed
import pytest
import triton
from launch_helpers import applied, outcome, rows
from recording_driver import recording

import ninetoothed_patches
from ninetoothed_patches import materializer, triton_abi

ROOT = pathlib.Path(__file__).resolve().parent.parent
JIT_MODULE = sys.modules["ninetoothed.jit"]


@pytest.fixture
def driver():
    with recording() as driver:
        yield driver


def everything():
    """Every attribute that a patch of NineToothed or Triton could touch, by identity."""

    owners = [
        ninetoothed,
        JIT_MODULE,
        JIT_MODULE.JIT,
        JIT_MODULE._Handle,
        sys.modules["ninetoothed.make"],
        sys.modules["ninetoothed.aot"],
        sys.modules["ninetoothed.debugging"]
        if "ninetoothed.debugging" in sys.modules
        else ninetoothed,
        triton.runtime.jit,
        triton.runtime.JITFunction,
        triton.runtime.autotuner.Autotuner,
        triton.compiler.CompiledKernel,
        triton.runtime.driver,
    ]

    return [
        (owner, name, id(value))
        for owner in owners
        for name, value in list(vars(owner).items())
    ]


def test_revert_restores_every_attribute():
    """LP56: identity, not equality."""

    ninetoothed_patches.revert()
    before = everything()

    with applied():
        assert ninetoothed_patches.is_applied()
        assert everything() != before

    assert not ninetoothed_patches.is_applied()
    assert everything() == before


def test_a_handle_made_in_between_goes_on_working(driver):
    """LP56: it keeps its plans after `revert()`."""

    with applied():
        handle = launch_kernels.scale()

    twin = launch_kernels.scale()
    x = rows()

    for _ in range(3):
        expected = outcome(driver, twin, x, 0.5, x)
        assert outcome(driver, handle, x, 0.5, x) == expected

    assert handle.cache_info().hits == 2


def test_only_handles_made_while_applied_have_plans(driver):
    """Handles made before are left alone; both kinds are NineToothed's `_Handle`."""

    before = launch_kernels.scale()

    with applied():
        between = launch_kernels.scale()

    after = launch_kernels.scale()
    assert isinstance(between, materializer.PlannedHandle)

    for handle in (before, after):
        assert type(handle) is JIT_MODULE._Handle

    assert isinstance(between, JIT_MODULE._Handle)
    assert between._source == before._source
    assert callable(between._launch)
    assert between._kernel.__name__ == before._kernel.__name__


def test_applying_twice_is_applying_once(driver):
    """And one `revert()` undoes it; another does nothing."""

    before = everything()

    with applied(max_plans=5):
        installed = everything()
        assert ninetoothed_patches.apply()
        assert everything() == installed
        assert launch_kernels.scale().cache_info().bound == 5
        assert ninetoothed_patches.apply(max_plans=6)
        assert launch_kernels.scale().cache_info().bound == 6

    assert everything() == before
    ninetoothed_patches.revert()
    assert everything() == before


def test_planned_patches_nothing(driver):
    """Plans for one's own handles, and for nobody else's."""

    before = everything()
    handle = ninetoothed_patches.planned(twin := launch_kernels.scale())
    assert everything() == before
    assert type(twin) is JIT_MODULE._Handle
    assert ninetoothed_patches.planned(handle) is handle


def test_the_decorator_is_covered_as_well(driver):
    """`ninetoothed.jit`, which `make` calls, makes planned handles too."""

    with applied():
        decorated = ninetoothed.jit(num_warps=4, num_stages=2)(_annotated())

    assert isinstance(decorated, materializer.PlannedHandle)


def test_the_decorator_for_another_caller_is_left_alone(driver):
    """LP13: its launch function is not one that PyTorch's tensors are passed to."""

    with applied():
        decorated = ninetoothed.jit(caller="cuda", num_warps=4, num_stages=2)(
            _annotated()
        )

    assert not isinstance(decorated, materializer.PlannedHandle)


def _annotated():
    x, s, o = launch_kernels._rows(
        ninetoothed.Tensor(shape=(None, 128), name="x"),
        ninetoothed.Tensor(0, name="s"),
        ninetoothed.Tensor(shape=(None, 128), name="o"),
    )
    launch_kernels.launch_scale_application.__annotations__ = {"x": x, "s": s, "o": o}

    return launch_kernels.launch_scale_application


def test_ahead_of_time_kernels_are_left_alone(driver, tmp_path, monkeypatch):
    """LP13: what `caller="cuda"` writes and returns is the same before and after, and never a planned handle."""

    aot = sys.modules["ninetoothed.aot"]
    # Left out are the compiler, and the library that would be loaded.
    monkeypatch.setattr(aot, "_aot", lambda func, *args: {"source": repr(args)})
    monkeypatch.setattr(aot, "_generate_launch_func", lambda **options: sorted(options))

    def made(folder):
        folder.mkdir()
        result = ninetoothed.make(
            launch_kernels._rows,
            launch_kernels.launch_scale_application,
            (
                ninetoothed.Tensor(shape=(None, 128), name="x"),
                ninetoothed.Tensor(0, name="s"),
                ninetoothed.Tensor(shape=(None, 128), name="o"),
            ),
            caller="cuda",
            kernel_name="launch_ahead",
            output_dir=folder,
            num_warps=4,
            num_stages=2,
        )

        return result, {path.name: path.read_bytes() for path in folder.iterdir()}

    before = made(tmp_path / "before")
    assert before[1]

    with applied():
        assert made(tmp_path / "after") == before


@pytest.mark.parametrize("version", ["3.1.0", "3.10.0", "4.0.0", "2.3.1", "unknown"])
def test_an_unknown_triton_is_refused(version, monkeypatch):
    """LP52: the message names what was found and what is supported; nothing is changed."""

    monkeypatch.setattr(triton, "__version__", version)
    before = everything()

    with pytest.raises(
        ninetoothed_patches.UnsupportedVersionError, match=version
    ) as raised:
        ninetoothed_patches.apply()

    assert "3.2 to 3.9" in str(raised.value)
    assert "NineToothed 0.26" in str(raised.value)
    assert everything() == before
    assert not ninetoothed_patches.is_applied()


@pytest.mark.parametrize("version", ["0.25.0", "0.27.0", "1.0.0", "0.260.0"])
def test_an_unknown_ninetoothed_is_refused(version, monkeypatch, driver):
    """LP52: for `planned` as well."""

    handle = launch_kernels.scale()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    before = everything()

    for refused in (
        ninetoothed_patches.apply,
        lambda: ninetoothed_patches.planned(handle),
    ):
        with pytest.raises(
            ninetoothed_patches.UnsupportedVersionError, match=version
        ) as raised:
            refused()

        assert "0.26" in str(raised.value)
        assert triton.__version__ in str(raised.value)

    assert everything() == before


@pytest.mark.parametrize(
    "version", ["3.2.0", "3.3.1", "3.9.0", "3.9.0+git1234", "3.6.0.post1"]
)
def test_every_supported_triton_is_accepted(version):
    """Local and post releases of a known version are that version."""

    assert triton_abi.version_is_supported(version)


def test_zero_in_the_environment_switches_it_off(monkeypatch, driver):
    """`NINETOOTHED_PATCHES=0`: apply and planned do nothing, and say so."""

    monkeypatch.setenv("NINETOOTHED_PATCHES", "0")
    before = everything()
    assert ninetoothed_patches.apply() is False
    assert everything() == before
    handle = launch_kernels.scale()
    assert ninetoothed_patches.planned(handle) is handle


def test_the_environment_sets_the_bound(monkeypatch, driver):
    """An argument goes before it."""

    monkeypatch.setenv("NINETOOTHED_PATCHES_MAX_PLANS", "3")
    handle = ninetoothed_patches.planned(launch_kernels.scale())
    assert handle.cache_info().bound == 3

    with applied():
        assert launch_kernels.scale().cache_info().bound == 3

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=4)
    assert handle.cache_info().bound == 4


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ""])
def test_a_bound_that_is_none_is_refused(value, monkeypatch):
    """The message names where it came from and what it must be; nothing is changed."""

    before = everything()
    monkeypatch.setenv("NINETOOTHED_PATCHES_MAX_PLANS", value)

    with pytest.raises(ValueError, match="NINETOOTHED_PATCHES_MAX_PLANS.*positive"):
        ninetoothed_patches.apply()

    monkeypatch.delenv("NINETOOTHED_PATCHES_MAX_PLANS")

    for bound in (0, -3, True, 2.0, "8"):
        with pytest.raises(ValueError, match="`max_plans`.*positive"):
            ninetoothed_patches.apply(max_plans=bound)

    assert everything() == before


def test_the_public_names_are_listed_in_order():
    """What is not in `__all__` is not public."""

    assert ninetoothed_patches.__all__ == sorted(ninetoothed_patches.__all__)

    for name in ninetoothed_patches.__all__:
        assert getattr(ninetoothed_patches, name).__doc__


def test_importing_needs_no_triton_and_no_home(tmp_path):
    """NineToothed makes a folder in the home when it is imported; this package does not import it."""

    (tmp_path / "file").touch()
    program = """\
        import sys
        import ninetoothed_patches
        assert not ninetoothed_patches.is_applied()
        ninetoothed_patches.revert()
        ninetoothed_patches.clear_plans()
        assert ninetoothed_patches.cache_info().plans == 0
        assert not {"triton", "ninetoothed", "torch"} & set(sys.modules)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        env={**os.environ, "HOME": str(tmp_path / "file")},
        cwd=ROOT,
    )


def test_applying_needs_no_gpu():
    """Nothing asks for a driver before a kernel is made."""

    program = """\
        import ninetoothed_patches
        assert ninetoothed_patches.apply()
        import triton
        assert getattr(triton.runtime.driver, "_active", None) is None
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=ROOT
    )

"""NineToothed's folder of generated sources: shared, half written, tampered with, not writable."""

import importlib.util
import inspect
import os
import pathlib
import py_compile
import subprocess
import sys
import textwrap

import launch_kernels
import ninetoothed.generation
import pytest
import torch
from gated_rms_norm_binaries import compile_call
from gated_rms_norm_calls import make_call
from launch_helpers import applied
from operator_calls import recording_operators
from recording_driver import recording

import ninetoothed_patches
from ninetoothed_patches import SourceFolderError, host_driver, source_files
from ntops_ext import _handles
from ntops_ext.torch import _launch

TESTS = pathlib.Path(__file__).resolve().parent

# 8 processes make one kernel as a user of the patch does, and one as the operators do. They
# are forked after the imports, which take seconds, from a process without a thread.
EIGHT_PROCESSES = """
    import pathlib

    # The first handle with plans does.
    import torch._dynamo

    import ninetoothed_patches
    from ninetoothed_patches import host_driver
    from ntops_ext._handles import import_kernels, make_handle

    import launch_kernels
    from forks import in_forks

    ninetoothed_patches.apply()

    def make_both():
        with host_driver.stand_in():
            first = launch_kernels.scale()

        second = make_handle(
            import_kernels().sum_of_rows.premake,
            num_warps=1,
            num_columns=8,
            rows_per_step=16,
            columns_per_program=8,
        )

        return [hash(first._kernel.src), hash(second._kernel.src)]

    folder = pathlib.Path.home() / ".ninetoothed"
    expected = in_forks(1, make_both, timeout=30)
    sources = {source: source.read_text() for source in folder.glob("*.py")}
    assert len(sources) == 2, sources
    half, absent = sources
    half.write_text(sources[half][:200])
    absent.unlink()
    assert in_forks(8, make_both, timeout=30) == expected * 8
    assert {file: file.read_text() for file in folder.iterdir()} == sources
"""


# 8 processes make their first call of two operators, in Triton's interpreter. Forked likewise.
EIGHT_INTERPRETERS = """
    import pathlib

    import torch

    import ninetoothed_patches
    from ninetoothed_patches import host_driver
    from ntops_ext import reference
    from ntops_ext._handles import import_kernels
    from ntops_ext.torch import gated_rms_norm, qk_norm_rope
    from forks import in_forks

    import_kernels()
    assert ninetoothed_patches.apply()
    assert host_driver.interpreter_is_on()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, generator=generator)
    heads = torch.randn(1, 3, 2, 8, generator=generator)
    weight, rope = torch.ones(8), torch.ones(3, 4, dtype=torch.complex64)
    expected = (
        reference.gated_rms_norm(x, gate=x),
        reference.qk_norm_rope(heads, weight, rope),
    )

    def call_both():
        actual = gated_rms_norm(x, gate=x), qk_norm_rope(heads, weight, rope)

        for one, other in zip(actual, expected):
            torch.testing.assert_close(one, other)

        return "right"

    def run(number):
        answers = in_forks(number, call_both, timeout=60)
        assert answers == ["right"] * number, answers

    run(1)
    folder = pathlib.Path.home() / ".ninetoothed"
    sources = {source: source.read_text() for source in folder.glob("*.py")}
    assert len(sources) == 2, sources
    half, absent = sources
    half.write_text(sources[half][:200])
    absent.unlink()
    run(8)
    assert {file: file.read_text() for file in folder.iterdir()} == sources
"""


def start(script, home, **environment):
    """A process of its own, with this home, and without an interpreter unless it is asked for."""

    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        **environment,
    }

    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make_scale():
    with applied(), host_driver.stand_in():
        return launch_kernels.scale()


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """NineToothed's folder, empty."""

    monkeypatch.setattr(ninetoothed.generation, "CACHE_DIR", tmp_path)

    return tmp_path


@pytest.fixture
def source(folder):
    """The file of a kernel that was made."""

    make_scale()
    (source,) = folder.glob("*.py")

    return source


def test_first_calls_of_eight_processes(tmp_path):
    """All make their kernels, from nothing and from what a process left by half."""

    process = start(EIGHT_PROCESSES, tmp_path)
    _, errors = process.communicate(timeout=100)

    assert process.returncode == 0, errors


@pytest.mark.slow
def test_first_calls_of_eight_interpreters(tmp_path):
    """The operators' results are right; Triton's cache, which may be anywhere, is not used."""

    process = start(
        EIGHT_INTERPRETERS,
        tmp_path,
        TRITON_INTERPRET="1",
        TRITON_CACHE_DIR="/dev/null/cache",
    )
    _, errors = process.communicate(timeout=200)

    assert process.returncode == 0, errors


def test_what_is_compiled_offline_is_what_was_generated(folder, monkeypatch):
    """The call's source was left by half, and is replaced before its binary is compiled."""

    def compile_anew():
        _handles._make.cache_clear()

        return compile_call(monkeypatch, make_call(4, 56), "sm_90").asm["ptx"]

    expected = compile_anew()
    (source,) = folder.glob("*.py")
    whole = source.read_text()
    source.write_text(whole[:200])

    assert compile_anew() == expected
    assert source.read_text() == whole


def test_what_is_executed_is_what_was_generated(source):
    """Neither the file nor bytecode beside it, whatever they hold."""

    whole = source.read_text()
    planted = "raise SystemExit('a planted file was executed')\n"
    source.write_text(planted)
    # Bytecode that Python would not even compare with its source.
    py_compile.compile(
        str(source),
        cfile=importlib.util.cache_from_source(str(source)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    handle = make_scale()

    assert source.read_text() == whole
    assert handle._source == str(source)
    assert inspect.getsource(handle._launch) in whole


def test_a_file_changed_later_does_not_reach_a_kernel(source, monkeypatch):
    """Triton reads a kernel's source when it is made: that is not the file, either."""

    load = source_files.load

    def load_late(name, path, text):
        pathlib.Path(path).write_text("# Another process is at it.\n")

        return load(name, path, text)

    monkeypatch.setattr(source_files, "load", load_late)
    handle = make_scale()

    assert handle._kernel.src.startswith("def launch_scale_application")


def test_a_file_is_replaced_at_once(folder, monkeypatch):
    """Whoever reads meanwhile finds the old file, and then the whole of the new one."""

    path = folder / "source.py"
    path.write_text("half")
    seen = []
    replace = os.replace

    def watching_replace(new, old):
        seen.append((pathlib.Path(new).read_text(), pathlib.Path(old).read_text()))
        replace(new, old)

    monkeypatch.setattr(os, "replace", watching_replace)
    source_files.keep(path, "the whole")

    assert seen == [("the whole", "half")]
    assert path.read_text() == "the whole"

    source_files.keep(path, "the whole")

    assert len(seen) == 1


def test_a_complete_folder_need_not_be_writable(source, monkeypatch):
    """A home that can only be read will do once the sources are there."""

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(pathlib.Path, "write_bytes", refuse)
    monkeypatch.setattr(os, "replace", refuse)

    assert make_scale()._source == str(source)


def test_a_disk_that_is_full_leaves_nothing(folder, monkeypatch):
    """The error names the folder; the file is what it was, and there is no other."""

    path = folder / "source.py"
    path.write_text("old")

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)

    with pytest.raises(SourceFolderError, match=rf"{folder}.*no space left.*HOME"):
        source_files.keep(path, "new")

    assert [one.name for one in folder.iterdir()] == ["source.py"]
    assert path.read_text() == "old"


def test_apply_without_a_home():
    """Applying, and making a kernel of an operator, name the folder and what helps."""

    script = """
        import ninetoothed_patches
        from ntops_ext._handles import import_kernels

        for call in (ninetoothed_patches.apply, import_kernels):
            try:
                call()
            except ninetoothed_patches.SourceFolderError as error:
                print(error)

        assert not ninetoothed_patches.is_applied()
    """
    process = start(script, "/dev/null/home")
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors

    lines = output.splitlines()

    assert len(lines) == 2
    assert all("/dev/null/home/.ninetoothed" in line for line in lines)
    assert all("HOME" in line for line in lines)


def test_a_triton_cache_that_cannot_be_written_to(monkeypatch, tmp_path):
    """Triton's error names the folder; once it can be used the same call works."""

    folder = tmp_path / "a_file" / "cache"
    folder.parent.write_text("not a folder")
    x = torch.ones(4, 128)

    with recording() as driver, applied():
        handle = launch_kernels.scale()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))

        with pytest.raises(OSError, match=str(folder)):
            handle(x, 2.0, torch.empty_like(x))

        assert not driver.records
        assert handle.cache_info().plans == 0

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        handle(x, 2.0, torch.empty_like(x))

        assert len(driver.records) == 1


def test_operators_name_the_variable_of_tritons_cache(monkeypatch, tmp_path):
    """Launched or compiled offline: the folder, why it cannot be used, and which variable sets it."""

    folder = tmp_path / "a_file" / "cache"
    folder.parent.write_text("not a folder")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    message = rf"TRITON_CACHE_DIR.*{folder}"
    call = make_call(4, 72)
    out = torch.full((4, 72), 7.0)
    _handles._make.cache_clear()

    with pytest.raises(NotADirectoryError, match=message):
        compile_call(monkeypatch, call, "sm_90")

    with recording_operators() as driver:
        with pytest.raises(NotADirectoryError, match=message):
            call.run(out=out)

        assert not driver.records
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        call.run(out=out)

        assert len(driver.records) == 1


def test_other_errors_of_the_system_are_left_alone(monkeypatch):
    """What fails for another reason, with or without a file, does not blame the cache."""

    for error in (OSError("no reason"), FileNotFoundError(2, "none", "/usr/bin/ptxas")):

        def fail(*args, error=error):
            raise error

        with pytest.raises(type(error)) as raised:
            _launch.launch(fail, torch.device("cpu"))

        assert raised.value is error


def test_make_is_what_ninetoothed_makes_with_plans(source):
    """`ninetoothed_patches.make` patches nothing, and takes the arguments of the other."""

    ninetoothed_patches.revert()
    premake = _handles.import_kernels().sum_of_rows.premake
    kernel = premake(num_columns=8, rows_per_step=16, columns_per_program=8)

    with host_driver.stand_in():
        handle = ninetoothed_patches.make(
            *kernel,
            num_warps=2,
            num_stages=1,
            kernel_name="launch_renamed",
            max_plans=3,
        )
        again = ninetoothed.make(*kernel, num_warps=2, num_stages=1)

    assert handle._kernel.__name__ == "launch_renamed"
    assert handle.cache_info().bound == 3
    assert not hasattr(again, "cache_info")
    assert not ninetoothed_patches.is_applied()

    with pytest.raises(ValueError, match="`max_plans`"):
        ninetoothed_patches.make(*kernel, max_plans=0)


@pytest.mark.parametrize("handle", [3, None, len], ids=repr)
def test_what_is_no_handle_gets_no_plans(handle):
    """The message names the argument and what it got."""

    with pytest.raises(TypeError, match=f"`handle`.*{type(handle).__qualname__}"):
        ninetoothed_patches.planned(handle)

"""Kernels made once and kept."""

import ninetoothed.generation
import pytest
from threads import in_threads

from ntops_ext._handles import import_kernels, make_handle


def make(**keywords):
    premake = import_kernels().gated_rms_norm.premake

    return make_handle(
        premake, **{"num_warps": 1, "num_columns": 40, "group_size": 40, **keywords}
    )


def test_a_handle_is_made_once():
    """The same choices, the same handle; others, another."""

    assert make() is make()
    assert make() is not make(num_warps=2)
    assert make() is not make(gate=False)


def test_threads_that_make_one_kernel():
    """All get the same handle."""

    handles = []

    assert in_threads(4, lambda index: handles.append(make(num_columns=80))) == []
    assert len(handles) == 4
    assert len({id(handle) for handle in handles}) == 1


def test_a_folder_that_cannot_be_written_to(monkeypatch, tmp_path):
    """The error names the folder, and what helps."""

    folder = tmp_path / "a_file" / ".ninetoothed"
    folder.parent.write_text("not a folder")
    monkeypatch.setattr(ninetoothed.generation, "CACHE_DIR", folder)

    with pytest.raises(RuntimeError, match=rf"{folder}.*HOME"):
        make(num_columns=160)


def test_a_source_that_is_not_yet_written(monkeypatch, tmp_path):
    """What another process is writing, or has left by half, is made anew."""

    monkeypatch.setattr(ninetoothed.generation, "CACHE_DIR", tmp_path)
    make(num_columns=120)
    (source,) = tmp_path.glob("*.py")
    whole = source.read_text()
    # As it is between its creation and its first flush.
    source.write_text("")

    # Another key of the same kernel, so that it is not found among the handles.
    make(num_columns=120, row_tile=(1,))

    assert source.read_text() == whole

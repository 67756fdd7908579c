"""The operators as members of ntops, against a stand-in with ntops' two lists."""

import importlib
import sys
import types
import warnings

import pytest
import torch
from ntops_stand_in import PACKAGES, make_ntops

import ntops_ext
import ntops_ext.kernels
import ntops_ext.torch
from ntops_ext import registry

KERNELS = ntops_ext.kernels.__all__
FUNCTIONS = [name for name in ntops_ext.torch.__all__ if name != "eager_rounding"]


@pytest.fixture(autouse=True)
def unregistered():
    yield

    ntops_ext.unregister()


@pytest.fixture
def ntops(monkeypatch):
    return make_ntops(monkeypatch)


def state(ntops):
    """Every attribute and list of both packages."""

    return {
        name: {**vars(sys.modules[name]), "__all__": [*sys.modules[name].__all__]}
        for name in PACKAGES
    }


def test_registered_operators_are_members_and_listed(ntops):
    """Each is ours itself, under ntops' name, and the return value names it."""

    names = ntops_ext.register()

    assert ntops.torch.gated_rms_norm is ntops_ext.torch.gated_rms_norm
    assert ntops.kernels.gated_rms_norm is ntops_ext.kernels.gated_rms_norm
    assert ntops.torch.__all__ == ["add", *FUNCTIONS]
    assert ntops.kernels.__all__ == ["add", *KERNELS]
    assert names == (
        *[f"ntops.kernels.{name}" for name in KERNELS],
        *[f"ntops.torch.{name}" for name in FUNCTIONS],
    )


def test_the_import_registers_nothing(ntops):
    """Only `register` does."""

    before = state(ntops)
    importlib.reload(registry)

    assert state(ntops) == before


def test_registering_again_changes_nothing(ntops):
    """Names are listed once, nothing is warned of, and one `unregister` undoes it."""

    before = state(ntops)
    names = ntops_ext.register()
    once = state(ntops)

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert ntops_ext.register() == names

    assert state(ntops) == once

    ntops_ext.unregister()

    assert state(ntops) == before


def test_unregistering_restores_every_attribute(ntops):
    """And the lists are the same objects: others may hold them."""

    lists = [sys.modules[name].__all__ for name in PACKAGES]
    before = state(ntops)
    ntops_ext.register()
    ntops_ext.unregister()

    assert state(ntops) == before
    assert all(
        sys.modules[name].__all__ is kept
        for name, kept in zip(PACKAGES, lists, strict=True)
    )

    ntops_ext.unregister()

    assert state(ntops) == before


def test_an_operator_that_ntops_ships_stays(monkeypatch):
    """A warning says so, and the others are registered."""

    theirs = object()
    ntops = make_ntops(monkeypatch, gated_rms_norm=theirs)

    with pytest.warns(RuntimeWarning, match="ntops.torch has a gated_rms_norm"):
        names = ntops_ext.register()

    assert ntops.torch.gated_rms_norm is theirs
    assert ntops.torch.__all__.count("gated_rms_norm") == 1
    assert "ntops.torch.gated_rms_norm" not in names
    assert {"ntops.torch.qk_norm_rope", "ntops.kernels.gated_rms_norm"} <= set(names)

    ntops_ext.unregister()

    assert ntops.torch.gated_rms_norm is theirs
    assert ntops.torch.__all__ == ["add", "gated_rms_norm"]


def test_an_operator_that_ntops_lists_and_makes_later_stays(ntops):
    """A listed name is taken, though nothing stands under it yet."""

    ntops.torch.__all__.append("gated_rms_norm")

    with pytest.warns(RuntimeWarning, match="ntops.torch has a gated_rms_norm"):
        names = ntops_ext.register()

    assert "ntops.torch.gated_rms_norm" not in names
    assert not hasattr(ntops.torch, "gated_rms_norm")

    ntops_ext.unregister()

    assert ntops.torch.__all__ == ["add", "gated_rms_norm"]


def test_replacing_is_asked_for_and_undone(monkeypatch):
    """With `replace=True` ours is there, and afterwards theirs again, in its place."""

    theirs = object()
    ntops = make_ntops(monkeypatch, gated_rms_norm=theirs)
    before = state(ntops)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ntops_ext.register(replace=True)

    assert ntops.torch.gated_rms_norm is ntops_ext.torch.gated_rms_norm
    assert ntops.torch.__all__.count("gated_rms_norm") == 1

    ntops_ext.unregister()

    assert state(ntops) == before


def test_what_others_put_there_since_is_left(ntops):
    """It is not ours to take away."""

    ntops_ext.register()
    theirs = object()
    ntops.torch.gated_rms_norm = theirs
    ntops_ext.unregister()

    assert ntops.torch.gated_rms_norm is theirs
    assert "gated_rms_norm" in ntops.torch.__all__
    assert not hasattr(ntops.torch, "qk_norm_rope")


def test_a_reloaded_package_is_completed(ntops):
    """A reload makes a new list, which registering again fills."""

    ntops_ext.register()
    ntops.torch.__all__ = ["add"]
    ntops_ext.register()

    assert ntops.torch.__all__ == ["add", *FUNCTIONS]


def test_a_package_that_was_imported_anew_is_another(ntops, monkeypatch):
    """What was registered with the former one is undone there, too."""

    before = state(ntops)
    ntops_ext.register()
    other = make_ntops(monkeypatch)
    ntops_ext.register()

    assert "gated_rms_norm" in other.torch.__all__

    ntops_ext.unregister()

    for packages in (other, ntops):
        assert not hasattr(packages.torch, "gated_rms_norm")
        assert packages.torch.__all__ == before["ntops.torch"]["__all__"]
        assert packages.kernels.__all__ == before["ntops.kernels"]["__all__"]


@pytest.mark.parametrize("is_registered_again", [False, True])
def test_a_member_that_was_deleted(ntops, is_registered_again):
    """Its name is still in the list, because of us: registering again restores it, unregistering takes it out."""

    before = state(ntops)
    ntops_ext.register()
    del ntops.torch.gated_rms_norm

    if is_registered_again:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ntops_ext.register()

        assert ntops.torch.gated_rms_norm is ntops_ext.torch.gated_rms_norm

    ntops_ext.unregister()

    assert state(ntops) == before


def replace_torch(ntops):
    """What InfiniCore does when it is imported."""

    replacement = types.SimpleNamespace()

    for name in ntops.torch.__all__:
        function = getattr(ntops.torch, name)

        if isinstance(function, types.FunctionType):
            function.__globals__["torch"] = replacement

    return replacement


@pytest.fixture
def restored_torch():
    """The functions' global `torch` after the test."""

    yield

    for name in FUNCTIONS:
        getattr(ntops_ext.torch, name).__globals__["torch"] = torch


def results():
    """What the operators compute, and the errors that they raise."""

    input = torch.linspace(-1, 1, 16).reshape(2, 8)
    heads = input.reshape(1, 2, 2, 4).clone()
    rope = torch.ones(2, 2, dtype=torch.complex64)
    weight = torch.ones(4)
    k_out, v_out = torch.zeros(2, 1, 3, 2, 4)
    prefix = torch.full((1, 1, 2, 4), 7.0)

    with pytest.raises(ValueError, match="`weight`"):
        ntops_ext.torch.gated_rms_norm(input, weight)

    return torch.cat(
        [
            tensor.flatten()
            for tensor in (
                ntops_ext.torch.gated_rms_norm(input, gate=input),
                ntops_ext.torch.qk_norm_rope(heads, weight, rope),
                *ntops_ext.torch.qk_norm_rope_pack_(
                    heads, k_out, v_out, weight, weight, rope, prefix, prefix
                ),
            )
        ]
    )


def test_functions_work_with_another_torch(ntops, restored_torch):
    """InfiniCore puts itself in place of their modules' global `torch`; nothing changes."""

    expected = results()
    ntops_ext.register()
    replacement = replace_torch(ntops)

    for name in FUNCTIONS:
        assert vars(sys.modules[f"ntops_ext.torch.{name}"])["torch"] is replacement

    assert torch.equal(results(), expected)
    assert ntops_ext.torch.eager_rounding(device="cpu").reason


def test_each_operator_has_a_global_torch():
    """So that what InfiniCore replaces is there, and is PyTorch before."""

    for name in FUNCTIONS:
        assert vars(sys.modules[f"ntops_ext.torch.{name}"])["torch"] is torch


def test_a_replaced_torch_in_infinicores_order(ntops, restored_torch):
    """After its import, it sees nothing of ours, and ours is as it was."""

    replace_torch(ntops)
    ntops_ext.register()

    for name in FUNCTIONS:
        assert vars(sys.modules[f"ntops_ext.torch.{name}"])["torch"] is torch


def test_without_ntops(monkeypatch):
    """The error says what is missing, and where the operators are."""

    monkeypatch.setitem(sys.modules, "ntops", None)

    with pytest.raises(ModuleNotFoundError, match="ntops is not installed.*ntops_ext"):
        ntops_ext.register()

    ntops_ext.unregister()


def test_what_ntops_misses_is_its_own_error(monkeypatch):
    """A module that ntops itself cannot import is not reported as ntops missing."""

    for name in ("ntops", *PACKAGES):
        monkeypatch.delitem(sys.modules, name, raising=False)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "ntops":
                raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])

    with pytest.raises(ModuleNotFoundError, match="^No module named 'other'$"):
        ntops_ext.register()


def test_an_unknown_ntops_is_refused(ntops):
    """Nothing is changed where there are no lists to add to."""

    del ntops.torch.__all__
    kernels = [*ntops.kernels.__all__]

    with pytest.raises(RuntimeError, match="`ntops.torch.__all__`"):
        ntops_ext.register()

    assert ntops.kernels.__all__ == kernels

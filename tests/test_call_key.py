"""What of a call stands in its key, and what a tensor guard tells apart."""

import gc
import math
import weakref

import pytest
import torch

from ninetoothed_patches import call_key


@pytest.mark.parametrize(
    "left, right",
    [(0.0, -0.0), (math.nan, -math.nan), (0.0, math.nan), (1.0, 1.5), (0.5, None)],
)
def test_floats_are_told_apart_by_their_bits(left, right):
    """Also where `==` says they are equal, or never does."""

    assert call_key.bits(left) != call_key.bits(right)
    assert call_key.bits(left) == call_key.bits(left)


def test_a_nan_worked_out_anew_has_the_same_bits():
    """NaN is not equal to itself; its bits are."""

    assert call_key.bits(float("nan")) == call_key.bits(float("nan"))


@pytest.mark.parametrize("value", [[1], {}, object(), torch.zeros(())])
def test_nothing_is_kept_of_what_is_no_scalar(value):
    """It may not be hashable, or keep memory alive."""

    assert call_key.bits(value) is None


def guard(*tensors):
    made = call_key.tensor_guard(tensors)

    if made is None:
        pytest.skip("this PyTorch has no tensor guards")

    return made


BASE = torch.zeros(64, 64, dtype=torch.float16)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(BASE[:32], id="shape"),
        pytest.param(BASE.t(), id="strides"),
        pytest.param(BASE.view(64, 64, 1), id="dimensions"),
        pytest.param(BASE.view(torch.bfloat16), id="dtype"),
        pytest.param(torch.nn.Parameter(BASE, requires_grad=False), id="Parameter"),
        pytest.param(BASE.to("meta"), id="device"),
        pytest.param(BASE.to_sparse(), id="layout"),
    ],
)
def test_a_guard_refuses_other_tensors(other):
    """In each place."""

    fits = guard(BASE, BASE.clone())
    assert fits(BASE.clone(), BASE)
    assert not fits(other, BASE)
    assert not fits(BASE, other)


def test_a_guard_for_a_tensor_passed_twice_takes_two_as_well():
    """PyTorch's guard of a list refuses a list that has a tensor twice; ours for such a call takes either."""

    fits = guard(BASE, BASE)
    assert fits(BASE, BASE)
    assert fits(BASE, BASE.clone())
    assert not fits(BASE, BASE[:32])


def test_a_guard_keeps_no_tensor_alive():
    """Neither the tensor nor its memory."""

    tensor = torch.zeros(4)
    alive = weakref.ref(tensor), weakref.ref(tensor.untyped_storage())
    fits = guard(tensor)
    del tensor
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert fits(torch.zeros(4))


def test_guards_that_tell_too_little_apart_are_not_used(monkeypatch):
    """The guards are no public interface: what is relied on is tried before they are used."""

    class Careless:
        def __init__(self, *tensors, **dimensions):
            pass

        def check(self, *tensors):
            return True

    class Module:
        TensorGuards = Careless

    monkeypatch.setattr(torch._C._dynamo, "guards", Module)
    assert call_key._tensor_guards.__wrapped__() is None
    monkeypatch.delattr(Module, "TensorGuards")
    assert call_key._tensor_guards.__wrapped__() is None

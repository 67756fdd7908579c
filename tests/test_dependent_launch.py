"""Kernels that wait themselves for the one in front of them are launched early, and no others."""

import contextlib
import ctypes
import re

import pytest
import torch
import triton
from launch_helpers import Pair, outcome, rows
from operator_calls import (
    LAUNCHING_MODULES,
    forget,
    launching_cpu_tensors,
    recording_operators,
)
from qk_norm_rope_backward_behaviour import make_arguments
from recording_driver import GFX942, SM_80, SM_90, recording
from rope_inputs import make_pack, make_rope
from triton.backends.compiler import GPUTarget

import ninetoothed_patches
from ninetoothed_patches import dependent_launch, host_driver, triton_abi
from ntops_ext.torch import (
    _gated_rms_norm_backward,
    _launch,
    _qk_norm_rope_backward,
    gated_rms_norm,
    qk_norm_rope,
    qk_norm_rope_pack_,
)

HAS_DEPENDENT_LAUNCH = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 5)

needs_dependent_launch = pytest.mark.skipif(
    not HAS_DEPENDENT_LAUNCH, reason="Triton knows dependent launch from 3.5 on"
)


@pytest.mark.parametrize(
    "target, is_known",
    [
        (SM_80, False),
        (GPUTarget("cuda", 89, 32), False),
        (SM_90, True),
        (GPUTarget("cuda", 100, 32), False),
        (GPUTarget("cuda", 120, 32), False),
        (GFX942, False),
    ],
    ids=str,
)
def test_which_gpus_have_it(target, is_known):
    """NVIDIA's of compute capability 9.0; others have it, but nobody has tried them."""

    assert triton_abi.has_dependent_launch(target) == (
        is_known and HAS_DEPENDENT_LAUNCH
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_other_device_has_it(device):
    """Nobody is asked for a GPU that is not there."""

    assert not ninetoothed_patches.has_dependent_launch(torch.device(device))


@pytest.mark.parametrize("device", ["cuda", 0, None])
def test_what_is_no_device_is_refused(device):
    """By name."""

    with pytest.raises(TypeError, match="`device` must be a torch.device, but is a"):
        ninetoothed_patches.has_dependent_launch(device)


@pytest.mark.parametrize(
    "capability, driver, is_interpreted, expected",
    [
        ((8, 9), 13000, False, False),
        ((9, 0), 12030, False, True),
        ((9, 0), 12020, False, False),
        ((9, 0), 13000, True, False),
    ],
)
def test_the_device_is_asked(monkeypatch, capability, driver, is_interpreted, expected):
    """Not the current one; the driver, whether a graph can have such a launch; and the interpreter, which cannot wait."""

    monkeypatch.setattr(dependent_launch, "driver_version", lambda: driver)
    monkeypatch.setattr(host_driver, "interpreter_is_on", lambda: is_interpreted)
    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda one: {device: capability}[one]
    )
    has_it = ninetoothed_patches.has_dependent_launch(device)

    assert has_it == (expected and HAS_DEPENDENT_LAUNCH)


def test_where_there_is_no_driver(monkeypatch):
    """Nothing raises; there nothing is launched early."""

    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)

    assert dependent_launch.driver_version() == 0


@pytest.fixture
def driver_knows_it(monkeypatch):
    """The driver is one that has such launches in graphs: here there may be none."""

    monkeypatch.setattr(dependent_launch, "driver_version", lambda: 12030)


@needs_dependent_launch
def test_a_plan_launches_early_what_waits(driver_knows_it):
    """Everything else of the launch is the unpatched one's, which the first call is."""

    with recording() as driver:
        pair = Pair("waiting", driver)
        pair.call(rows(), 0.5, rows())

        for count in (8, 3):
            x, o = rows(count), rows(count)
            pair.planned(x, 0.5, o)
            ((expected,), _) = outcome(driver, pair.twin, x, 0.5, o)
            ((actual,), _) = outcome(driver, pair.planned, x, 0.5, o)
            differing = [
                (one, other)
                for one, other in zip(expected.values, actual.values, strict=True)
                if one != other
            ]

            assert differing == [(False, True)]
            assert (actual.grid, actual.stream, actual.function) == (
                expected.grid,
                expected.stream,
                expected.function,
            )

        assert pair.info.hits == 3


@pytest.mark.parametrize(
    "target, driver",
    [(GPUTarget("cuda", 100, 32), 13000), (SM_90, 12020)],
    ids=["later GPU", "older driver"],
)
@needs_dependent_launch
def test_what_waits_is_not_early_where_nobody_tried(monkeypatch, target, driver):
    """A plan launches as the ordinary way does where `has_dependent_launch` says no."""

    monkeypatch.setattr(dependent_launch, "driver_version", lambda: driver)

    with recording(target) as recorder:
        pair = Pair("waiting", recorder)

        for _ in range(3):
            pair.call(rows(), 0.5, rows())

        assert pair.info.hits == 2


@pytest.fixture
def devices_have_dependent_launch(monkeypatch):
    """A function that says whether all devices have it."""

    def decide(have_it):
        monkeypatch.setattr(
            ninetoothed_patches, "has_dependent_launch", lambda device: have_it
        )
        _launch.waits.cache_clear()

    yield decide

    _launch.waits.cache_clear()


@contextlib.contextmanager
def collected_launches():
    """The handle and arguments of every launch within the block, which are not made."""

    launches = []
    forget()

    with launching_cpu_tensors(), pytest.MonkeyPatch.context() as patch:
        for module in LAUNCHING_MODULES:
            patch.setattr(
                module,
                "launch",
                lambda handle, device, *args: launches.append((handle, args)),
            )

        yield launches

    forget()


def norm(*, num_rows=64, columns=256, dtype=torch.bfloat16, **options):
    input, gate = torch.zeros(2, num_rows, columns, dtype=dtype)

    return lambda: gated_rms_norm(input, input[0], gate, **options)


def norm_backward(columns):
    input, gate, grad_output = torch.zeros(3, 8, columns, dtype=torch.bfloat16)
    options = 1e-5, None, False, "silu", 0.0, (True,) * 4

    return lambda: _gated_rms_norm_backward.backward(
        grad_output, input, input[0], gate, input[0], *options
    )


def rope(head_dim=64):
    heads = torch.zeros(1, 8, 4, head_dim, dtype=torch.bfloat16)
    table = make_rope(8, head_dim, "cpu", torch.Generator().manual_seed(0))

    return lambda: qk_norm_rope(heads, torch.zeros_like(heads[0, 0, 0]), table)


def rope_backward(needs):
    arguments = make_arguments("cpu", tokens=4, head_dim=64, dtype=torch.bfloat16)

    return lambda: _qk_norm_rope_backward.backward(*arguments, 1e-6, needs)


def pack(sources):
    inputs = make_pack(sources=sources, tokens=8, prefix=2, heads=4, head_dim=64)

    return lambda: qk_norm_rope_pack_(*inputs.arguments())


CALLS = {
    "norm": norm(),
    "norm, parameters last": norm(num_rows=1024, columns=8192),
    "norm, held in pieces": norm(columns=1280),
    "norm, shared": norm(num_rows=1, columns=4096, norm_before_gate=True),
    "norm, by pieces": norm(columns=2**16),
    "norm's gradients": norm_backward(512),
    "norm's gradients, by parts": norm_backward(20480),
    "rope": rope(),
    "rope's gradients": rope_backward((True, True)),
    "rope's gradient of the input": rope_backward((True, False)),
    "rope's gradient of the weight": rope_backward((False, True)),
    **{
        f"pack of {sources or 'none'}": pack(sources)
        for sources in ("", "k", "v", "kv")
    },
}


# In machine code: a load, a store, a copy to shared memory, an atomic operation.
_ACCESS = re.compile(r"\b(?:LDG|STG|LDGSTS|LD|ST|UBLKCP|ATOMG?|RED)\b")


@pytest.mark.parametrize("name", CALLS)
@needs_dependent_launch
def test_each_kernel_waits_before_it_touches_memory(
    devices_have_dependent_launch, name
):
    """Every access follows the wait: what is read may still be written, and what is written read."""

    devices_have_dependent_launch(True)

    with collected_launches() as launches:
        CALLS[name]()

    assert launches

    for handle, arguments in launches:
        binary = host_driver.compile_call(handle, *arguments, target="sm_90")
        before, wait, behind = binary.asm["sass"].partition("ACQBULK")

        assert wait and triton_abi.waits_for_previous_kernel(binary)
        assert not _ACCESS.search(before) and _ACCESS.search(behind)


@pytest.mark.parametrize("name", ["norm", "norm's gradients", "rope", "pack of kv"])
@needs_dependent_launch
def test_no_kernel_waits_elsewhere(devices_have_dependent_launch, name):
    """Other GPUs have no instruction for it."""

    devices_have_dependent_launch(False)

    with collected_launches() as launches:
        CALLS[name]()

    for handle, arguments in launches:
        binary = host_driver.compile_call(handle, *arguments, target="sm_80")

        assert not triton_abi.waits_for_previous_kernel(binary)


@needs_dependent_launch
def test_operators_are_launched_early(devices_have_dependent_launch, driver_knows_it):
    """All kernels of a call, by their plans: so from the second call on."""

    devices_have_dependent_launch(True)
    call = CALLS["rope's gradients"]

    with recording_operators() as driver:
        for is_early in (False, True, True):
            call()
            launches = driver.take()

            assert len(launches) == 2
            assert [one.rest.count((bool, True)) for one in launches] == [is_early] * 2

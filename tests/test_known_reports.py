"""Situations of public reports that no other module's subject is, and the page that lists all of them.

docs/known_reports.md has where each was reported, and which test keeps it.
"""

import ast
import gc
import pathlib
import re
import weakref

import launch_kernels
import pytest
import torch
import triton
import triton.language
from launch_helpers import Pair, rows, vector
from recording_driver import recording
from triton.compiler import CompiledKernel

import ninetoothed_patches
from ntops_ext.nn import GatedRMSNorm
from ntops_ext.torch import gated_rms_norm, qk_norm_rope

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/known_reports.md").read_text()


# The page.


def named_tests():
    """The tests that the page names, as `module::test`."""

    return sorted(set(re.findall(r"`([\w/]+)::(test_\w+)`", PAGE)))


def functions_of(module):
    """The test functions of a module of `tests/`, whatever other modules import from it."""

    tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())

    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    """A test that is renamed is renamed there, too."""

    missing = [
        f"{module}::{name}"
        for module, name in named_tests()
        if name not in functions_of(module)
    ]

    assert len(named_tests()) > 100
    assert missing == []


def test_every_row_names_a_test():
    """No situation is kept by nothing."""

    table_rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("|") and not re.match(r"\|( case| report|[ -]*-)", line)
    ]
    kept_by_nothing = [row for row in table_rows if "::test_" not in row]

    assert len(table_rows) > 150
    assert kept_by_nothing == []


# Operators.


def test_the_default_device_does_not_reach_in():
    """What is made within a call is made where its tensors are."""

    input, weight = torch.randn(3, 8), torch.ones(8)
    heads, rope = torch.randn(1, 2, 1, 8), torch.full((2, 4), 1j)
    norm = GatedRMSNorm(8)

    def call():
        leaf = input.clone().requires_grad_()
        gated_rms_norm(leaf, weight, input, group_size=4).sum().backward()

        return leaf.grad, norm(input), qk_norm_rope(heads, weight, rope)

    expected = call()
    torch.set_default_device("meta")

    try:
        actual = call()
    finally:
        torch.set_default_device(None)

    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


# Launch plans.


@pytest.fixture
def driver():
    with recording() as driver:
        yield driver


def test_a_candidate_that_fails_keeps_no_argument_alive(driver):
    """The error of one that needs too much holds the frames of the tuning call, and they its tensors."""

    if "n_max_threads" not in CompiledKernel._init_handles.__code__.co_names:
        pytest.skip("this Triton does not ask how many threads a kernel may have")

    handle = ninetoothed_patches.planned(launch_kernels.scale_tuned_warps())
    driver.max_threads = 64
    x, o = vector(), vector()
    alive = [weakref.ref(x), weakref.ref(o)]
    handle(x, 0.5, o)
    name = f"{handle._kernel.__name__}_with_auto_tuning"
    tuner = handle._launch.__globals__[name]

    assert max(config.num_warps for config in tuner.configs) > 2
    assert tuner.best_config.num_warps <= 2

    del x, o
    driver.clear()
    gc.collect()

    assert [reference() for reference in alive] == [None, None]
    assert handle.cache_info().plans == 1


def test_a_finalizer_may_call_a_kernel_at_any_time(driver):
    """The collector runs finalizers wherever something is allocated, in a held lock too: nothing waits, or is lost."""

    handle = ninetoothed_patches.planned(launch_kernels.scale(), max_plans=2)
    layouts = [(rows(count), rows(count)) for count in range(1, 6)]
    calls = 0

    def call():
        nonlocal calls
        x, o = layouts[calls % 5]
        calls += 1
        handle(x, 0.5, o)

    class Finalized:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            call()
            ninetoothed_patches.cache_info()

    thresholds = gc.get_threshold()
    gc.set_threshold(5, 1, 1)

    try:
        for step in range(200):
            Finalized()
            call()

            if step % 50 == 49:
                ninetoothed_patches.clear_plans()
    finally:
        gc.set_threshold(*thresholds)

    gc.collect()
    info = handle.cache_info()

    assert calls == 400
    assert info.bypasses.keys() <= {"nested call"}
    assert info.hits + info.misses + sum(info.bypasses.values()) == calls
    assert len(driver.take()) == calls
    assert info.plans <= 2


def test_a_reinterpreted_tensor_goes_the_ordinary_way(driver):
    """Triton's own wrapper of another dtype is no tensor: its kernel is the twin's."""

    pair = Pair("scale", driver)
    x, o = rows(dtype=torch.float16), rows()
    plain = pair.call(x, 0.5, o)

    for _ in range(3):
        wrapped = pair.call(triton.reinterpret(x, triton.language.bfloat16), 0.5, o)

        assert wrapped is None or wrapped.function != plain.function

    assert pair.info.bypasses == {"not a tensor": 3}

"""Calls of the operators for tests on a GPU, each a function of a device and a seed that returns a call; launches of
CPU tensors; and what operators know of calls.
"""

import contextlib

import pytest
import torch
from recording_driver import recording
from rope_inputs import make_pack, make_rope

import ntops_ext
from ntops_ext import _handles
from ntops_ext.torch import (
    _gated_rms_norm,
    _gated_rms_norm_backward,
    _launch,
    _qk_norm_rope,
    _qk_norm_rope_backward,
    _qk_norm_rope_pack,
)

# Those that prepare calls.
MODULES = (_gated_rms_norm, _qk_norm_rope, _qk_norm_rope_pack)

# Those that launch, each by names of its own.
LAUNCHING_MODULES = (_launch, _qk_norm_rope, _qk_norm_rope_backward, _qk_norm_rope_pack)

LAYOUTS = (
    _gated_rms_norm._layouts_of_calls,
    _gated_rms_norm_backward._layouts_of_calls,
    _qk_norm_rope.layouts,
    _qk_norm_rope_backward.layouts,
    _qk_norm_rope_pack.layouts,
)


def norm(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    projection = torch.randn(64, 1024, generator=generator, device=device).half()
    weight = torch.nn.Parameter(torch.randn(256, generator=generator, device=device))

    return lambda: ntops_ext.torch.gated_rms_norm(
        projection[:, :256], weight, projection[:, 512:768], group_size=128
    )


def norm_out(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    input, gate = torch.randn(2, 64, 256, generator=generator, device=device)
    out = torch.empty_like(input)

    return lambda: ntops_ext.torch.gated_rms_norm(input, gate=gate, out=out)


def rope(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    heads = torch.randn(2, 33, 8, 128, generator=generator, device=device).bfloat16()
    weight = torch.ones(128, dtype=torch.bfloat16, device=device)
    table = make_rope(33, 128, device, generator)

    return lambda: ntops_ext.torch.qk_norm_rope(heads, weight, table)


def pack(device, seed):
    inputs = make_pack(device=device, seed=seed, heads=8, kv_heads=4)
    original = [tensor.clone() for tensor in inputs.written()]

    def call():
        for tensor, values in zip(inputs.written(), original, strict=True):
            tensor.copy_(values)

        return ntops_ext.torch.qk_norm_rope_pack_(*inputs.arguments())

    return call


CALLS = {"norm": norm, "norm, out": norm_out, "rope": rope, "pack": pack}


def forget():
    """Let the next call of each operator go the whole way."""

    for module in MODULES:
        module._prepared_calls.clear()

    for layouts in LAYOUTS:
        layouts.clear()


@contextlib.contextmanager
def launching_cpu_tensors():
    """Operators launch what they are given on the CPU, for the block's duration."""

    with pytest.MonkeyPatch.context() as patch:
        for module in LAUNCHING_MODULES:
            patch.setattr(module, "runs_kernel", lambda tensor: True)

        yield


@contextlib.contextmanager
def recording_operators():
    """A recording driver that CPU tensors are launched by, for the block's duration."""

    with launching_cpu_tensors(), recording() as driver:
        # Compiled kernels belong to a driver for good: handles are made for this one alone.
        _handles._make.cache_clear()
        forget()

        try:
            yield driver
        finally:
            _handles._make.cache_clear()
            forget()


def copies(result):
    results = result if isinstance(result, tuple) else (result,)

    return [tensor.clone() for tensor in results]


def whole_way(call):
    forget()

    return copies(call())

"""Lanes that a block has beyond its tensor: what they hold reaches no result.

A GPU leaves in them what was in its registers, unless the kernel says what stands for them.
Triton's interpreter leaves zeros, and would hide that a kernel says nothing: here it leaves NaN.
"""

import numpy as np
import pytest
import torch
from comparison import assert_all_equal_bits
from gated_rms_norm_backward_behaviour import (  # noqa: F401
    choose_anew,
    gradients,
    make,
    small_pieces,
)
from gated_rms_norm_calls import make_call
from qk_norm_rope_backward_behaviour import backward, make_arguments
from rope_inputs import make_pack
from triton.runtime.interpreter import InterpreterBuilder

from ntops_ext import configs
from ntops_ext.torch import qk_norm_rope_pack_

# How the interpreter holds a bfloat16.
_BFLOAT16_NAN = 0x7FC0


@pytest.fixture
def poison(monkeypatch):
    """A function from which on lanes that are masked, and for which nothing stands, are NaN."""

    load = InterpreterBuilder.create_masked_load

    def load_poisoned(self, ptrs, mask, other, *rest):
        loaded = load(self, ptrs, mask, other, *rest)

        if other is None:
            is_absent = ~mask.data.astype(bool)
            is_float = loaded.data.dtype.kind == "f"
            loaded.data[is_absent] = np.nan if is_float else _BFLOAT16_NAN

        return loaded

    return lambda: monkeypatch.setattr(
        InterpreterBuilder, "create_masked_load", load_poisoned
    )


def assert_padding_is_harmless(poison, run):
    """`run` gives the same bits when masked lanes hold NaN."""

    expected = run()
    poison()
    assert_all_equal_bits(run(), expected)


def test_the_poison_is_seen(poison):
    """The tests below can fail: a kernel that adds up masked lanes gives NaN."""

    import triton
    import triton.language as tl

    @triton.jit
    def add_up(source, target):
        lanes = tl.arange(0, 4)
        tl.store(target, tl.sum(tl.load(source + lanes, mask=lanes < 3).to(tl.float32)))

    for dtype in (torch.float32, torch.bfloat16):
        target = torch.zeros(1)
        add_up[(1,)](torch.ones(4, dtype=dtype), target)

        assert target == 3

    poison()

    for dtype in (torch.float32, torch.bfloat16):
        add_up[(1,)](torch.ones(4, dtype=dtype), target)

        assert target.isnan()


def test_gated_rms_norm(poison):
    """Columns of no power of two, rows that fill no program; in pieces the last is not whole."""

    call = make_call(5, 12, mode="gate_first-silu", bias=True)
    wide = make_call(1, 16400, mode="gate_first-sigmoid", dtype=torch.float16)
    assert_padding_is_harmless(poison, lambda: [call.run(), wide.run()])


def test_gradients_of_gated_rms_norm(poison):
    """Columns of no power of two, rows that fill no program."""

    call = make("cpu", columns=12, bias=True)
    assert_padding_is_harmless(poison, lambda: gradients(*call))


@pytest.mark.slow
def test_gradients_of_wide_groups(poison, small_pieces):  # noqa: F811
    """A last piece that is not whole, of statistics and of gradients."""

    call = make("cpu", rows=(1,), columns=24, norm_before_gate=False)
    assert_padding_is_harmless(poison, lambda: gradients(*call)[:3])


def test_qk_norm_rope_pack(poison):
    """Heads of no power of two, and too few for a program."""

    inputs = make_pack(tokens=1, prefix=1, heads=3, kv_heads=3, head_dim=6)
    written = [tensor.clone() for tensor in inputs.written()]

    def run():
        for tensor, content in zip(inputs.written(), written, strict=True):
            tensor.copy_(content)

        qk_norm_rope_pack_(*inputs.arguments())

        return [tensor.clone() for tensor in inputs.written()]

    assert_padding_is_harmless(poison, run)
    inputs.assert_canaries()


def test_gradients_of_qk_norm_rope(poison, monkeypatch):
    """Heads, their columns, and tokens; without an `eps`, what is absent has no norm."""

    monkeypatch.setattr(configs, "_PROGRAMS_OF_BACKWARD", 1)
    arguments = make_arguments("cpu", tokens=3, heads=3, head_dim=6)
    assert_padding_is_harmless(
        poison, lambda: [backward(arguments, 0.0, (False, True))[1]]
    )

"""The gradients of `qk_norm_rope` as kernels, in Triton's interpreter."""

import pytest
import torch
from comparison import assert_all_equal_bits
from huge_storage import reserve
from qk_norm_rope_backward_behaviour import *  # noqa: F403
from qk_norm_rope_backward_behaviour import backward, make_arguments

from ntops_ext.torch import _qk_norm_rope_backward


@pytest.fixture(scope="module")
def device():
    return "cpu"


def test_strides_past_32_bits():
    """Tokens, heads, and weights so far apart that offsets pass 2^31 elements."""

    grad_output, input, weight, rope = make_arguments(
        "cpu", tokens=2, head_dim=4, dtype=torch.float16
    )
    expected = backward((grad_output, input, weight, rope))

    def spread(tensor, strides):
        last = sum(
            (size - 1) * stride
            for size, stride in zip(tensor.shape, strides, strict=True)
        )
        spread = reserve(last + 1).as_strided(tensor.shape, strides)

        return spread.copy_(tensor)

    far_input = spread(input, (1, 2**31 + 16, 4, 1))
    far_weight = spread(weight, (2**30,))
    far_heads = spread(grad_output, (1, 16, 2**31, 1))

    assert_all_equal_bits(
        backward((grad_output, far_input, far_weight, rope)), expected
    )
    assert_all_equal_bits(backward((far_heads, input, weight, rope)), expected)


def test_another_thread_sees_all_handles_or_none(monkeypatch):
    """Where a thread makes them, another that finds some would take them for all."""

    make_handle = _qk_norm_rope_backward.make_handle
    seen = []

    def watch(*args, **keywords):
        seen.extend(
            len(layout.handles)
            for layout in _qk_norm_rope_backward.layouts._kept.values()
        )

        return make_handle(*args, **keywords)

    monkeypatch.setattr(_qk_norm_rope_backward, "make_handle", watch)
    _qk_norm_rope_backward.layouts.clear()
    backward(make_arguments("cpu"))
    assert seen == [0, 0]

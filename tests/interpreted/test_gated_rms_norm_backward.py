"""The gradients of `gated_rms_norm` as kernels, in Triton's interpreter."""

import pytest
import torch
from comparison import assert_equal_bits
from gated_rms_norm_backward_behaviour import *  # noqa: F403
from huge_storage import reserve

from ntops_ext.torch import gated_rms_norm


@pytest.fixture(scope="module")
def device():
    return "cpu"


def test_rows_far_apart():
    """The rows of a program may reach past 2^31, whichever tensor they are of."""

    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(size, generator=generator, dtype=torch.float16)
        for size in ((9, 32), (32,))
    )
    far = reserve(2**30 + 1024).as_strided((9, 32), (2**27 + 2, 1))
    far.copy_(rows)

    def gradients(input, gate, grad_output):
        tensors = [one.detach().requires_grad_() for one in (input, weight, gate)]
        gated_rms_norm(*tensors).backward(grad_output)

        return [one.grad for one in tensors]

    expected = gradients(rows, rows, rows)

    for position in range(3):
        given = [far if index == position else rows for index in range(3)]

        for actual, gradient in zip(gradients(*given), expected, strict=True):
            assert_equal_bits(actual, gradient)

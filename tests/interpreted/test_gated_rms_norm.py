"""The kernel of `gated_rms_norm` under Triton's interpreter, on CPU tensors."""

import pytest
import torch
from gated_rms_norm_behaviour import *  # noqa: F403
from gated_rms_norm_kernel_behaviour import *  # noqa: F403
from huge_storage import reserve

from ntops_ext.torch import gated_rms_norm


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module")
def is_kernel():
    """Whether the NineToothed kernel runs, with what it alone promises."""

    return True


@pytest.fixture
def huge():
    return reserve(2**31 + 1024)


def test_a_tangent_is_refused():
    """The kernel has no forward-mode derivative, and drops none silently."""

    input = torch.ones(2, 8)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input, torch.ones_like(input))

        with pytest.raises(NotImplementedError, match="gradients"):
            gated_rms_norm(dual)

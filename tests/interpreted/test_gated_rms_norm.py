"""The kernel of `gated_rms_norm` under Triton's interpreter, on CPU tensors."""

import pytest
from gated_rms_norm_behaviour import *  # noqa: F403
from gated_rms_norm_kernel_behaviour import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module")
def is_kernel():
    """Whether the NineToothed kernel runs, with what it alone promises."""

    return True

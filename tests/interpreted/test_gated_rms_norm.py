"""The kernel of `gated_rms_norm` under Triton's interpreter, on CPU tensors."""

import pytest
from gated_rms_norm_behaviour import *  # noqa: F403
from gated_rms_norm_kernel_behaviour import *  # noqa: F403
from huge_storage import reserve


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

"""The gradients of `gated_rms_norm` as kernels, in Triton's interpreter."""

import pytest
from gated_rms_norm_backward_behaviour import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"

"""The gradients of `gated_rms_norm` as kernels, on a GPU."""

import pytest
import torch
from gated_rms_norm_backward_behaviour import *  # noqa: F403
from gated_rms_norm_backward_behaviour import assert_right, gradients, make

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return "cuda"


@pytest.mark.parametrize(
    ("rows", "columns", "options"),
    [
        (4096, 128, {}),
        (1000, 4096, {"group_size": 64}),
        (500, 4096, {"norm_before_gate": False, "group_size": 256}),
        (500, 4096, {"norm_before_gate": False, "group_size": 512}),
        (512, 1536, {"bias": True}),
        (512, 4096, {}),
        (300, 5120, {"norm_before_gate": False}),
        (257, 8192, {"norm_before_gate": False, "group_size": 1024}),
        (64, 10240, {"norm_before_gate": False, "group_size": 1280}),
        (64, 7168, {"norm_before_gate": False, "group_size": 3584}),
        (17, 7168, {"norm_before_gate": False, "bias": True}),
        (3, 20000, {"bias": True}),
    ],
)
def test_gradients_are_right_at_sizes_of_models(device, rows, columns, options):
    """Against float64, and the same bits on each run."""

    dtypes = (torch.bfloat16,) * 4
    call = make(device, rows=(rows,), columns=columns, dtypes=dtypes, **options)
    actual = gradients(*call)
    assert_right(*call, actual)

    for one, other in zip(actual, gradients(*call), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)

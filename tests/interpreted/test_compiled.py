"""The kernels under `torch.compile`: the custom operators run them in Triton's interpreter."""

import pytest
import torch
from compiled_behaviour import (  # noqa: F401
    compiled,
    nothing_compiled,
    pack_arguments,
    test_a_given_result_is_written,
    test_a_given_result_of_rope_is_written,
    test_only_the_gradients_that_are_asked_for,
    test_overlaps_are_refused_when_a_graph_runs,
)

from ntops_ext.torch import qk_norm_rope_pack_


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module")
def backend():
    return "aot_eager"


def test_pack_writes_in_place(device, compiled):  # noqa: F811
    """Views of one tensor, in one launch of the kernel."""

    actual, expected = (pack_arguments(device, 2, 1, packed=True) for _ in range(2))
    compiled(qk_norm_rope_pack_)(*actual)
    qk_norm_rope_pack_(*expected)

    for tensor, twin in zip(actual, expected, strict=True):
        assert torch.equal(tensor, twin)

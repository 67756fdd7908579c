"""Calls from several threads, of kernels in Triton's interpreter, which is one for the process."""

import torch
from comparison import assert_equal_bits
from threads import in_threads

from ntops_ext.torch import gated_rms_norm


def test_threads_take_turns():
    """The interpreter puts its own functions in the place of Triton's while a kernel runs."""

    inputs = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(-1, 1, 8)
    expected = [gated_rms_norm(input, weight) for input in inputs]
    results = {}

    def call(number):
        results[number] = [gated_rms_norm(inputs[number], weight) for _ in range(5)]

    assert in_threads(8, call) == []

    for number, result in enumerate(expected):
        for actual in results[number]:
            assert_equal_bits(actual, result)

"""Calls from several threads, or in the midst of another, of kernels in Triton's interpreter, which is one for the process."""

import sys

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


def test_a_call_in_the_midst_of_another():
    """Python runs finalizers and signal handlers anywhere; here a profiler calls, of fewer programs than the other."""

    generator = torch.Generator().manual_seed(0)
    outer = torch.randn(2, 2048, generator=generator)
    inner = torch.randn(2, 8, generator=generator)
    expected, expected_of_inner = gated_rms_norm(outer), gated_rms_norm(inner)
    programs, results = "gated_rms_norm_shared_application", []

    def interrupt(frame, event, argument):
        # When a program begins; two programs share a row.
        if (event, frame.f_code.co_name) == ("call", programs):
            results.append(gated_rms_norm(inner))

    sys.setprofile(interrupt)

    try:
        actual = gated_rms_norm(outer)
    finally:
        sys.setprofile(None)

    assert_equal_bits(actual, expected)
    assert len(results) == 4

    for result in results:
        assert_equal_bits(result, expected_of_inner)

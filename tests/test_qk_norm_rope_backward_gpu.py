"""The gradients of `qk_norm_rope` as kernels on a GPU."""

import pytest
import torch
from comparison import assert_all_equal_bits
from qk_norm_rope_backward_behaviour import *  # noqa: F403
from qk_norm_rope_backward_behaviour import backward, check, make_arguments

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return f"cuda:{torch.cuda.current_device()}"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 4096, "heads": 32, "head_dim": 128},
        {"tokens": 4099, "heads": 30, "head_dim": 128},
        {"batch": 3, "tokens": 1001, "heads": 4, "head_dim": 64},
        {"tokens": 2000, "heads": 16, "head_dim": 256},
        {"tokens": 2000, "heads": 24, "head_dim": 96},
        {"tokens": 30011, "heads": 1, "head_dim": 128},
    ],
    ids=str,
)
def test_large_gradients_are_those_of_the_definition(device, sizes, dtype):
    """Several tokens a program, ragged ends, thousands of partial sums."""

    check(make_arguments(device, dtype=dtype, **sizes))


def test_every_run_has_the_same_bits(device):
    """Nothing is added in an order that a run decides."""

    arguments = make_arguments(
        device, tokens=4099, heads=32, head_dim=128, dtype=torch.bfloat16
    )
    first = backward(arguments)

    for _ in range(20):
        assert_all_equal_bits(backward(arguments), first)


def test_gradients_in_a_graph(device):
    """The backward pass is captured, and replayed with other contents."""

    arguments = make_arguments(device, tokens=64, heads=32, head_dim=128)
    backward(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        captured = backward(arguments)

    arguments[0].neg_()
    graph.replay()

    assert_all_equal_bits(captured, backward(arguments))


@pytest.mark.slow
def test_more_than_2_31_elements(device):
    """Offsets past 32 bits: the gradients of the last tokens, and sums over all of them."""

    tokens = 2**31 // (32 * 128) + 100
    grad_output, input, weight, rope = make_arguments(
        device, tokens=tokens, heads=32, head_dim=128, dtype=torch.float16
    )
    last = slice(tokens - 64, tokens)
    grad_output[:, :-64] = 0
    grad_input, grad_weight = backward((grad_output, input, weight, rope))
    arguments = (grad_output[:, last], input[:, last], weight, rope[last])
    expected = check(arguments)

    assert_all_equal_bits([grad_input[:, last]], expected[:1])
    assert not grad_input[:, :-64].any()
    assert (grad_weight - expected[1]).abs().max() <= 2**-8 * expected[1].abs().max()

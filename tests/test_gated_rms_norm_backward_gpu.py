"""The gradients of `gated_rms_norm` as kernels, on a GPU."""

import pytest
import torch
from gated_rms_norm_backward_behaviour import *  # noqa: F403
from gated_rms_norm_backward_behaviour import assert_right, gradients, make

from ntops_ext import reference
from ntops_ext.torch import gated_rms_norm

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


def test_a_device_that_is_not_current():
    """Case V1: backward, with the current device changed between the two passes; it stays what it is."""

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    grad_output, tensors, options = make("cuda:1", bias=True)
    input, weight, gate, bias = (tensor.requires_grad_() for tensor in tensors)

    for forward_device, backward_device in ((0, 0), (1, 0), (0, 1)):
        with torch.cuda.device(forward_device):
            output = gated_rms_norm(input, weight, gate, bias=bias)

            assert torch.cuda.current_device() == forward_device

        with torch.cuda.device(backward_device):
            actual = torch.autograd.grad(
                output, (input, weight, gate, bias), grad_output
            )

            assert torch.cuda.current_device() == backward_device

        assert all(gradient.device == torch.device("cuda:1") for gradient in actual)
        assert_right(
            grad_output, [tensor.detach() for tensor in tensors], options, actual
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "columns", "rows_per_part"),
    [(2**20 + 1, 2048, 2**17), (2**23 + 16, 256, 2**20), (256 * 12 * 6144, 128, 2**21)],
)
def test_past_2_to_the_31_elements(device, num_rows, columns, rows_per_part):
    """Cases S1, S2: gradients of rows around 2^31 are right, and those of the weight are sums of all rows."""

    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(
            generator=generator
        )

    grad_output, input, gate = (draw(num_rows, columns) for _ in range(3))
    weight = draw(columns)
    grad_input, grad_weight, grad_gate, _ = gradients(
        grad_output, (input, weight, gate, None), {}
    )
    total = torch.zeros(columns, dtype=torch.float64, device=device)
    error = torch.zeros_like(total)

    for start in range(0, num_rows, rows_per_part):
        part = slice(start, start + rows_per_part)
        of_part = gradients(
            grad_output[part], (input[part], weight, gate[part], None), {}
        )

        # A row's gradients depend on the row alone.
        assert torch.equal(of_part[0], grad_input[part])
        assert torch.equal(of_part[2], grad_gate[part])

        wide = [
            tensor.double()
            for tensor in (grad_output[part], input[part], weight, gate[part])
        ]
        total += reference.gated_rms_norm_backward(
            *wide, arithmetic_dtype=torch.float64
        )[1]
        error += reference.gated_rms_norm_backward_errors(*wide)[1]

    tolerance = error + total.abs() * 2**-8

    assert ((grad_weight.double() - total).abs() <= tolerance).all()

    boundary = 2**31 // columns

    for rows in (slice(boundary - 1, boundary + 1), slice(num_rows - 1, num_rows)):
        one = (
            grad_output[rows],
            (input[rows], weight, gate[rows], None),
            {},
        )
        assert_right(
            *one, [grad_input[rows], gradients(*one)[1], grad_gate[rows], None]
        )

"""Finding out how PyTorch rounds: every answer is recognised, and none is assumed."""

import numpy as np
import pytest
import torch
from fused_multiply_add import fused_multiply_add

from ntops_ext import reference
from ntops_ext.torch import _eager, eager_rounding

CPU = torch.device("cpu")


PARTS = {
    "real*cosine": lambda a, b, c, d: fused_multiply_add(a, c, -(b * d)),
    "imaginary*sine": lambda a, b, c, d: fused_multiply_add(-b, d, a * c),
    "real*sine": lambda a, b, c, d: fused_multiply_add(a, d, b * c),
    "imaginary*cosine": lambda a, b, c, d: fused_multiply_add(b, c, a * d),
    "no real": lambda a, b, c, d: a * c - b * d,
    "no imaginary": lambda a, b, c, d: a * d + b * c,
}


def multiply_as(real_part, imaginary_part):
    """A complex multiplication that rounds as the named forms do."""

    def multiply(left, right):
        left, right = torch.broadcast_tensors(left, right)
        numbers = [
            part.contiguous().numpy()
            for part in (left.real, left.imag, right.real, right.imag)
        ]

        return torch.complex(
            torch.from_numpy(PARTS[real_part](*numbers)),
            torch.from_numpy(PARTS[imaginary_part](*numbers)),
        )

    return multiply


@pytest.mark.parametrize("real_part", ["real*cosine", "imaginary*sine", "no real"])
@pytest.mark.parametrize(
    "imaginary_part", ["real*sine", "imaginary*cosine", "no imaginary"]
)
def test_every_form_of_a_product_is_recognised(real_part, imaginary_part):
    """Either product of either part; both rounded is unknown to the kernel."""

    found = _eager.observe_products(
        CPU, 8, multiply=multiply_as(real_part, imaginary_part)
    )

    assert found == {
        "real": None if real_part == "no real" else real_part,
        "imaginary": None if imaginary_part == "no imaginary" else imaginary_part,
    }


def test_kernels_that_disagree_are_no_answer():
    """A form that holds for some broadcasts only is not taken for all."""

    fused = multiply_as("real*cosine", "real*sine")
    other = multiply_as("imaginary*sine", "imaginary*cosine")
    found = _eager.observe_products(
        CPU,
        8,
        multiply=lambda left, right: (fused if left.shape[2] > 1 else other)(
            left, right
        ),
    )

    assert found == {"real": None, "imaginary": None}


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256, 512])
def test_every_order_of_a_mean_is_recognised(head_dim):
    """Each order that the kernel knows is told from the others of its width."""

    orders = _eager.candidate_orders(head_dim)

    for order in orders:
        found = _eager.observe_order(
            CPU,
            head_dim,
            num_rows=8,
            num_calls=16,
            mean=lambda rows, order=order: (
                reference.sum_in_order(rows, order) * (1 / head_dim)
            ),
        )

        assert found == order

    assert len(set(orders)) == len(orders)


def test_an_unknown_order_is_reported():
    """A mean that adds otherwise is no answer, and `observe` says which it missed."""

    def backwards(rows):
        total = rows[..., -1]

        for column in range(rows.shape[-1] - 2, -1, -1):
            total = total + rows[..., column]

        return total * (1 / rows.shape[-1])

    assert (
        _eager.observe_order(CPU, 128, num_rows=8, num_calls=16, mean=backwards) is None
    )

    found = _eager.observe(
        CPU, 128, mean=backwards, multiply=multiply_as("no real", "real*sine")
    )

    assert not found.is_reproduced
    assert "the order of the mean of fewer than 16 heads" in found.reason
    assert "the order of the mean of 16 heads and more" in found.reason
    assert "the real part" in found.reason
    assert "the imaginary part" not in found.reason


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sum_in_order_adds_in_that_order(head_dim):
    """The vectorised order, written out lane by lane."""

    terms = np.random.default_rng(0).random((50, head_dim), dtype=np.float32)
    lanes = [
        ((terms[:, at] + terms[:, at + 1]) + terms[:, at + 2]) + terms[:, at + 3]
        for at in range(0, head_dim, 4)
    ]

    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[at] + lanes[at + half] for at in range(half)]

    actual = reference.sum_in_order(torch.from_numpy(terms), ("vectors", "decreasing"))

    assert (actual.numpy() == lanes[0]).all()


class FakeDevice:
    """Stands for a GPU: not the CPU, for which nothing is found out."""

    type = "fake"


def make_cache(monkeypatch, run_kernel, **observed):
    """A cache whose observations are given and whose comparisons run on the CPU."""

    rounding = _eager.EagerRounding(
        **{
            "order_of_few_rows": ("vectors", "decreasing"),
            "order_of_rows": ("vectors", "decreasing"),
            "real_part": "real*cosine",
            "imaginary_part": "real*sine",
            "is_reproduced": True,
            "reason": "",
            **observed,
        }
    )
    cases = _eager._cases
    monkeypatch.setattr(_eager, "observe", lambda device, head_dim: rounding)
    monkeypatch.setattr(
        _eager, "_cases", lambda device, *others: list(cases(CPU, *others))[1:3]
    )
    monkeypatch.setattr(_eager, "_no_modes", lambda device: torch.no_grad())

    return _eager.RoundingCache(run_kernel)


def test_agreement_is_remembered(monkeypatch):
    """The kernel is compared once; later calls pay a look-up."""

    calls = []

    def run_kernel(input, weight, rope, rounding):
        calls.append(rounding)

        return reference.qk_norm_rope(input, weight, rope)

    cache = make_cache(monkeypatch, run_kernel)
    first = cache.get(FakeDevice, torch.bfloat16, 128)
    num_comparisons = len(calls)

    assert first.is_reproduced
    assert cache.get(FakeDevice, torch.bfloat16, 128) is first
    assert len(calls) == num_comparisons > 0


def test_each_dtype_is_compared_by_itself(monkeypatch):
    """What agrees in one dtype need not in another."""

    dtypes = []

    def run_kernel(input, weight, rope, rounding):
        dtypes.append(input.dtype)

        return reference.qk_norm_rope(input, weight, rope)

    cache = make_cache(monkeypatch, run_kernel)

    for dtype in (torch.bfloat16, torch.float16):
        cache.get(FakeDevice, dtype, 128)

    assert set(dtypes) == {torch.bfloat16, torch.float16}


def test_the_modes_of_the_caller_do_not_reach_in():
    """Nothing is observed under autocast, in inference mode or with gradients."""

    with (
        torch.inference_mode(),
        torch.enable_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        with _eager._no_modes(CPU):
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")


def test_disagreement_is_said_once(monkeypatch):
    """A kernel that differs in one bit is not called equal, and a warning says where."""

    def run_kernel(input, weight, rope, rounding):
        result = reference.qk_norm_rope(input, weight, rope)
        result.view(torch.int16)[0, 0, 0, 0] ^= 1

        return result

    cache = make_cache(monkeypatch, run_kernel)

    with pytest.warns(RuntimeWarning, match="differs from PyTorch on random heads"):
        found = cache.get(FakeDevice, torch.bfloat16, 128)

    assert not found.is_reproduced
    assert "random heads" in found.reason
    assert cache.get(FakeDevice, torch.bfloat16, 128) is found


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_does_not_reach_in(monkeypatch, default):
    """Model loaders set it: rows stay float32 and tables complex64, whenever the first call comes."""

    order = ("vectors", "decreasing")
    seen = []

    def mean(rows):
        # PyTorch's mean of another dtype is another kernel, with an order of its own.
        return reference.sum_in_order(
            rows if rows.dtype is torch.float32 else rows.flip(-1), order
        ) * (1 / 128)

    def run_kernel(input, weight, rope, rounding):
        seen.append((input.dtype, weight.dtype, rope.dtype))

        return reference.qk_norm_rope(input, weight, rope)

    cache = make_cache(monkeypatch, run_kernel)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)

    try:
        found = _eager.observe_order(CPU, 128, num_rows=8, num_calls=16, mean=mean)
        rounding = cache.get(FakeDevice, torch.float16, 128)
    finally:
        torch.set_default_dtype(before)

    assert found == order
    assert rounding.is_reproduced
    assert set(seen) == {(torch.float16, torch.float16, torch.complex64)}


def test_what_is_unknown_is_not_compared(monkeypatch):
    """Where an observation failed there is nothing that could be equal."""

    cache = make_cache(
        monkeypatch, lambda *_: pytest.fail("compared"), is_reproduced=False, reason="x"
    )

    # A width for which nothing is promised: no warning.
    assert not cache.get(FakeDevice, torch.bfloat16, 96).is_reproduced


def test_cpu_promises_nothing():
    """On the CPU the answer is no, with its reason, and nothing is run."""

    found = eager_rounding(torch.bfloat16, 128, "cpu")

    assert not found.is_reproduced
    assert "interpreter" in found.reason
    assert found.order(8) == ("vectors", "decreasing")


def test_the_order_depends_on_the_number_of_heads():
    """Fewer than 16 heads in a call are added in the order for few."""

    rounding = _eager.EagerRounding(
        order_of_few_rows=("nothing", "decreasing"),
        order_of_rows=("lanes", "decreasing"),
        real_part="real*cosine",
        imaginary_part="real*sine",
        is_reproduced=True,
        reason="",
    )

    assert rounding.order(15) == ("nothing", "decreasing")
    assert rounding.order(16) == ("lanes", "decreasing")


@pytest.mark.parametrize(
    ("question", "error", "name"),
    [
        ({"dtype": torch.float64}, TypeError, "`dtype`"),
        ({"head_dim": 64.0}, TypeError, "`head_dim`"),
        ({"head_dim": 63}, ValueError, "`head_dim`"),
        ({"head_dim": 0}, ValueError, "`head_dim`"),
    ],
)
def test_a_question_without_an_answer_is_refused(question, error, name):
    """Only heads that the operators take are asked about."""

    with pytest.raises(error, match=name):
        eager_rounding(device="cpu", **question)

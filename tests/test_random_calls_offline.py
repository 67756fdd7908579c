"""Random calls of the operators and of their gradients, compiled for a GPU that is not there.

    OFFLINE_CALLS=200 OFFLINE_SEED=0 python -m pytest -m slow tests/test_random_calls_offline.py

The interpreter runs what a compiler refuses, and what one version of Triton compiles, another may refuse. A call takes two
seconds.
"""

import os
import random

import pytest
import torch
from operator_calls import recording_operators
from rope_inputs import make_pack, make_rope

import ntops_ext
from ntops_ext.torch import _gated_rms_norm_backward, _qk_norm_rope_backward

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

GROUP_SIZES = (8, 64, 96, 128, 192, 256, 384, 512, 640, 896, 1024, 1280, 1536, 2048)
WIDE_GROUP_SIZES = (3584, 4096, 5120, 7168, 8192, 16384, 20480)


@pytest.fixture
def driver():
    with recording_operators() as driver:
        yield driver


class Choices(random.Random):
    def maybe(self, probability):
        return self.random() < probability


def norm_arguments(choose):
    """The tensors of a call by name, with None for those that are absent, and its options."""

    group_size = choose.choice((*GROUP_SIZES, *WIDE_GROUP_SIZES))
    groups = choose.choice((1, 1, 3)) if group_size <= 1024 else 1
    columns = groups * group_size
    rows = choose.choice((1, 3, 40))
    # Row strides that 16 divides, that 2 divides, and that neither does.
    padding = choose.choice((0, 0, 1, 2, 16))
    dtypes = [choose.choice(DTYPES)] * 5

    if choose.maybe(0.3):
        dtypes = choose.choices(DTYPES, k=5)

    def tensor_of_rows(dtype):
        return torch.ones(rows, columns + padding, dtype=dtype)[:, :columns]

    weight = torch.ones(columns, dtype=dtypes[0]) if choose.maybe(0.7) else None
    tensors = {
        "input": tensor_of_rows(dtypes[1]),
        "weight": weight,
        "gate": tensor_of_rows(dtypes[2]) if choose.maybe(0.8) else None,
        "bias": torch.ones(columns, dtype=dtypes[3]) if choose.maybe(0.4) else None,
        "grad_output": tensor_of_rows(dtypes[4]),
    }
    options = {
        "eps": choose.choice((1e-5, 0.0)),
        "group_size": group_size if groups > 1 else None,
        "norm_before_gate": choose.maybe(0.5),
        "activation": choose.choice(("silu", "sigmoid")),
        "weight_offset": 0.0 if weight is None else choose.choice((0.0, 1.0)),
    }

    return tensors, options


def norm(choose):
    tensors, options = norm_arguments(choose)
    del tensors["grad_output"]
    ntops_ext.torch.gated_rms_norm(**tensors, **options)


def gradients_of_norm(choose):
    tensors, options = norm_arguments(choose)
    needs = [choose.maybe(0.6) for _ in range(4)]
    _gated_rms_norm_backward.backward(**tensors, **options, needs_input_grad=needs)


def heads_and_table(choose):
    tokens, head_dim = choose.choice((1, 5, 33)), choose.choice((2, 40, 64, 128, 256))
    shape = choose.choice((1, 2)), tokens, choose.choice((1, 3, 8, 24)), head_dim
    dtype = choose.choice(DTYPES)

    return (
        torch.ones(shape, dtype=dtype),
        torch.ones(head_dim, dtype=dtype),
        make_rope(tokens, head_dim),
    )


def rope(choose):
    ntops_ext.torch.qk_norm_rope(*heads_and_table(choose))


def gradients_of_rope(choose):
    input, weight, table = heads_and_table(choose)
    needs = choose.choice(((True, True), (True, False), (False, True)))
    _qk_norm_rope_backward.backward(
        torch.ones_like(input), input, weight, table, 1e-6, needs
    )


def pack(choose):
    inputs = make_pack(
        batch=choose.choice((1, 2)),
        tokens=choose.choice((1, 5, 33)),
        prefix=choose.choice((0, 5)),
        heads=choose.choice((1, 4, 24)),
        kv_heads=choose.choice((1, 2, 8)),
        head_dim=choose.choice((64, 96, 128, 256)),
        dtype=choose.choice(DTYPES),
        sources=choose.choice(("kv", "k", "v", "")),
        padding=choose.choice((0, 16)),
    )
    ntops_ext.torch.qk_norm_rope_pack_(*inputs.arguments())


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, share",
    [
        (norm, 0.3),
        (gradients_of_norm, 0.4),
        (rope, 0.1),
        (gradients_of_rope, 0.1),
        (pack, 0.1),
    ],
)
def test_random_calls_compile(driver, call, share):
    num_calls = int(int(os.environ.get("OFFLINE_CALLS", "100")) * share)
    seed = int(os.environ.get("OFFLINE_SEED", "0"))

    with torch.no_grad():
        for number in range(num_calls):
            # The one to call again with where this fails.
            print(f"{call.__name__}(Choices({seed + number}))")
            call(Choices(seed + number))

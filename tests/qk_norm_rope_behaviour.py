"""What `qk_norm_rope` and `qk_norm_rope_pack_` promise wherever they run: the definition, the interpreter, a GPU.

A test module imports these tests and defines the fixture `device`.
"""

import pytest
import torch
from comparison import assert_equal_bits
from rope_inputs import make_pack, make_rope

from ntops_ext import configs, reference
from ntops_ext.torch import (
    _qk_norm_rope,
    _qk_norm_rope_pack,
    qk_norm_rope,
    qk_norm_rope_pack_,
)


@pytest.fixture
def launch_as(monkeypatch):
    """Let the operators launch with a named choice."""

    def choose(heads_per_program, kv_heads_per_program, num_warps=1):
        config = configs.QKNormRopeConfig(
            heads_per_program=heads_per_program,
            kv_heads_per_program=kv_heads_per_program,
            num_warps=num_warps,
        )
        monkeypatch.setattr(configs, "qk_norm_rope_config", lambda **_: config)
        forget_layouts()

    yield choose

    forget_layouts()


def forget_layouts():
    """Let the next call of each layout choose its launch anew."""

    _qk_norm_rope.layouts.clear()
    _qk_norm_rope_pack.layouts.clear()


def test_strides_of_single_dimensions_mean_nothing(device):
    """One batch entry and one token, however far away their next would be."""

    heads, weight = (
        torch.randn(1, 1, 1, 8, device=device),
        torch.randn(8, device=device),
    )
    rope = make_rope(1, 8, device)
    senseless = heads.as_strided(heads.shape, (2**40, 2**33, 2**32 + 5, 1))
    table = rope.as_strided(rope.shape, (2**35, 1), rope.storage_offset())
    out = torch.empty(8, device=device).as_strided(heads.shape, (2**41, 2**31, 3, 1))
    expected = qk_norm_rope(heads, weight, rope)

    assert_equal_bits(qk_norm_rope(senseless, weight, table), expected)
    assert_equal_bits(qk_norm_rope(senseless, weight, table, out=out), expected)


def test_a_cache_is_longer_than_what_is_written(device):
    """Entries lie a whole cache apart; the tokens behind those of the call stay as they are."""

    inputs = make_pack(
        batch=2,
        head_dim=8,
        tokens=2,
        prefix=1,
        heads=1,
        kv_heads=1,
        dtype=torch.float32,
        device=device,
    )
    expected = inputs.expected(reference.qk_norm_rope_pack_)
    caches = [torch.full((2, 9, 1, 8), 7.5, device=device) for _ in range(2)]
    arguments = inputs.arguments()
    arguments[1:3] = [cache[:, :3] for cache in caches]
    actual = qk_norm_rope_pack_(*arguments)

    for one, other in zip(actual, expected, strict=True):
        assert reference.rotation_error(one, other) <= 8

    assert all((cache[:, 3:] == 7.5).all() for cache in caches)

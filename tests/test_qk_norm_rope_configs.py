"""The launch choices of `qk_norm_rope` and `qk_norm_rope_pack_`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntops_ext.configs import QKNormRopeConfig, next_power_of_2, qk_norm_rope_config


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, item_size, expected",
    [
        (32, 32, 128, 2, (8, 8, 1)),
        (32, 0, 128, 2, (8, 1, 1)),
        (30, 30, 128, 2, (8, 8, 1)),
        (6, 6, 128, 2, (8, 8, 1)),
        (1, 1, 128, 2, (1, 1, 1)),
        (32, 4, 128, 2, (16, 2, 1)),
        (64, 8, 128, 2, (16, 2, 1)),
        (24, 24, 64, 2, (16, 16, 1)),
        (16, 16, 256, 2, (4, 4, 1)),
        (16, 16, 96, 2, (8, 8, 1)),
        (32, 32, 128, 4, (4, 4, 1)),
        (4, 4, 4096, 2, (1, 1, 4)),
    ],
)
def test_choices(heads, kv_heads, head_dim, item_size, expected):
    """2 KiB of a tensor a warp; of grouped queries, K no narrower than can be helped."""

    config = qk_norm_rope_config(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, item_size=item_size
    )

    assert config == QKNormRopeConfig(
        heads_per_program=expected[0],
        kv_heads_per_program=expected[1],
        num_warps=expected[2],
    )


@given(
    heads=st.integers(1, 300),
    kv_heads=st.integers(0, 300),
    head_dim=st.integers(1, 3000).map(lambda half: 2 * half),
    item_size=st.sampled_from([2, 4]),
)
def test_choices_are_such_that_every_head_has_a_program(
    heads, kv_heads, head_dim, item_size
):
    """Powers of two, so that Q and K are covered by one number of blocks, not twice."""

    config = qk_norm_rope_config(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, item_size=item_size
    )
    owned = (config.heads_per_program, config.kv_heads_per_program, config.num_warps)

    assert all(number == next_power_of_2(number) for number in owned)
    assert config.num_warps <= 16

    block = config.heads_per_program * next_power_of_2(head_dim) * item_size

    assert config.heads_per_program == 1 or block <= 4096

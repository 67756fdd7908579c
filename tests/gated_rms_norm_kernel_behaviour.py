"""What the kernel of `gated_rms_norm` promises beyond its definition: bits.

To be imported as `gated_rms_norm_behaviour` is.
"""

import pytest
import torch
from comparison import assert_equal_bits
from gated_rms_norm_calls import DTYPES, make_call

from ntops_ext import configs


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mode", ["norm_first-silu", "gate_first-silu"])
@pytest.mark.parametrize("num_rows", [2, 8, 15, 16, 17, 31, 32, 33])
def test_a_row_does_not_depend_on_its_company(device, num_rows, mode, dtype):
    """Case N1: the bits of rows together are those of each alone."""

    call = make_call(
        num_rows, 128, mode=mode, dtype=DTYPES[dtype], device=device, seed=num_rows
    )
    together = call.run()

    for row in sorted({0, num_rows // 2, num_rows - 1}):
        assert_equal_bits(together[row : row + 1], call.rows(slice(row, row + 1)).run())


@pytest.mark.parametrize(
    "rows_per_program, num_warps", [(1, 1), (2, 1), (8, 4), (16, 2)]
)
@pytest.mark.parametrize("mode", ["plain", "gate_first-silu"])
@pytest.mark.parametrize("width", [24, 128, 300])
def test_launch_choices_change_no_bit(
    device, width, mode, rows_per_program, num_warps, monkeypatch
):
    """Case N1: neither the rows of a program nor its warps reach the bits."""

    call = make_call(
        17, width, mode=mode, dtype=torch.float32, bias=True, device=device
    )
    expected = call.run()
    monkeypatch.setattr(
        configs,
        "gated_rms_norm_config",
        lambda group_size: configs.GatedRMSNormConfig(
            rows_per_program=rows_per_program,
            columns_per_piece=None,
            num_warps=num_warps,
        ),
    )

    assert_equal_bits(call.run(), expected)

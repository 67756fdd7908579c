from ntops_ext.kernels import (
    gated_rms_norm,
    gated_rms_norm_backward,
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_pack,
    sum_of_rows,
)

__all__ = [
    "gated_rms_norm",
    "gated_rms_norm_backward",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "qk_norm_rope_pack",
    "sum_of_rows",
]

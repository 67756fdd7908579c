from ntops_ext.torch.eager_rounding import eager_rounding
from ntops_ext.torch.gated_rms_norm import gated_rms_norm
from ntops_ext.torch.qk_norm_rope import qk_norm_rope
from ntops_ext.torch.qk_norm_rope_pack_ import qk_norm_rope_pack_

__all__ = ["eager_rounding", "gated_rms_norm", "qk_norm_rope", "qk_norm_rope_pack_"]

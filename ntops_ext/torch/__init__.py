from ntops_ext.torch.gated_rms_norm import gated_rms_norm

__all__ = ["gated_rms_norm"]

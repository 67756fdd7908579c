from ntops_ext.kernels import gated_rms_norm

__all__ = ["gated_rms_norm"]

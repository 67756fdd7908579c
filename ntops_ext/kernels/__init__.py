"""The kernels, one a module: arrangement, application, premake."""

from ntops_ext.kernels import qk_norm_rope, qk_norm_rope_pack

__all__ = ["qk_norm_rope", "qk_norm_rope_pack"]

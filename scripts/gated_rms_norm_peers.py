"""What gated RMSNorm is compared with: other libraries' kernels, where they are installed.

A peer is a function of the arguments of a call that returns the call, or None where the peer
lacks the mode. Peers are called as they are: where they copy a strided gate, that is part of
what they cost.
"""

import torch

from ntops_ext import reference


def find_peers(device):
    """The peers by name, and for each that is missing the reason."""

    peers, missing = {}, {}

    for name, make in (
        ("torch.compile", _torch_compile),
        ("fla rms_norm_gated", _fla_rms_norm_gated),
        ("fla/mamba rmsnorm_fn", _fla_rmsnorm_fn),
        ("mamba rmsnorm_fn", _mamba_rmsnorm_fn),
    ):
        if device == "cpu":
            missing[name] = "needs a GPU"

            continue

        try:
            peers[name] = make()
        except ImportError as error:
            missing[name] = f"not installed: {error}"

    return peers, missing


def _torch_compile():
    compiled = torch.compile(reference.gated_rms_norm, dynamic=False)

    def peer(tensors, keywords):
        # One specialisation a case, as a model would have, without the limit on them.
        torch._dynamo.reset()

        return lambda: compiled(*tensors, **keywords)

    return peer


def _fla_rms_norm_gated():
    from fla.modules.fused_norm_gate import rms_norm_gated

    def peer(tensors, keywords):
        input, weight, gate = tensors

        if (
            gate is None
            or not keywords["norm_before_gate"]
            or keywords["group_size"] != input.shape[-1]
            or keywords["weight_offset"]
            or "bias" in keywords
        ):
            return None

        return lambda: rms_norm_gated(
            input,
            gate,
            weight,
            None,
            activation=keywords["activation"],
            eps=keywords["eps"],
        )

    return peer


def _fla_rmsnorm_fn():
    from fla.modules.layernorm_gated import rmsnorm_fn

    return _of_rmsnorm_fn(rmsnorm_fn)


def _mamba_rmsnorm_fn():
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    return _of_rmsnorm_fn(rmsnorm_fn)


def _of_rmsnorm_fn(rmsnorm_fn):
    def peer(tensors, keywords):
        input, weight, gate = tensors

        if keywords["activation"] == "sigmoid" or keywords["weight_offset"]:
            return None

        return lambda: rmsnorm_fn(
            input,
            weight,
            keywords.get("bias"),
            z=gate,
            eps=keywords["eps"],
            group_size=keywords["group_size"],
            norm_before_gate=keywords["norm_before_gate"],
        )

    return peer

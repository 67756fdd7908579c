"""`ntops_ext.torch.qk_norm_rope_pack_`."""

import torch
from torch.compiler import is_compiling

from ntops_ext.torch import _compiled, _qk_norm_rope_pack


def qk_norm_rope_pack_(
    q: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: torch.Tensor,
    k_prefix: torch.Tensor,
    v_prefix: torch.Tensor,
    k_src: torch.Tensor | None = None,
    v_src: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate Q and K, and put K and V behind their prefixes, in one kernel.

    B batch entries, S tokens behind a prefix of P, H heads of Q and `Hkv` of K and V, of
    width D. After the call `q` is the `qk_norm_rope` of itself; rows `[0, P)` of `k_out`
    and `v_out` are `k_prefix` and `v_prefix`; rows `[P, P + S)` of `k_out` are the
    `qk_norm_rope` of `k_src`, or of what lay there; those of `v_out` are `v_src`, or are
    neither read nor written. Any of P, S and B may be 0. The bits are those of
    `qk_norm_rope`, with the same promises.

    :param q: `(B, S, H, D)`, float16, bfloat16 or float32, D even. Written in place.
    :param k_out: `(B, P + S, Hkv, D)`. Written.
    :param v_out: `(B, P + S, Hkv, D)`. Written.
    :param q_weight: `(D,)`.
    :param k_weight: `(D,)`.
    :param rope: `(S, D / 2)`, complex64, with dense rows.
    :param k_prefix: `(B, P, Hkv, D)`, or `k_out[:, :P]`: the prefix is in place already.
    :param v_prefix: `(B, P, Hkv, D)`, or `v_out[:, :P]`.
    :param k_src: `(B, S, Hkv, D)`. `None`: K lies, raw, in `k_out[:, P:]`.
    :param v_src: `(B, S, Hkv, D)`. `None`: `v_out[:, P:]` is not touched.
    :param eps: What is added to the mean of squares, inside the root.
    :return: `(q, k_out, v_out)`.
    :raises TypeError: If an argument is of the wrong kind, or not of `q`'s dtype.
    :raises ValueError: If a shape, a stride, a device or a value is wrong, if `rope` is a
        lazy conjugate, or if what is written shares memory with another argument. Allowed
        are the rows named above, and `k_src`, `v_src` that are exactly the rows they go to.
    :raises NotImplementedError: If gradients are enabled and an argument requires one: use
        `qk_norm_rope` and `torch.cat`.
    :raises RuntimeError: If the rounding is not known yet while a CUDA graph is captured.

    All tensors of heads hold the heads of a token densely; their batch and token strides
    are free, so views of one packed `(B, P + S, 3, H, D)` tensor will do. Everything is
    checked before anything is written, and nothing is copied or allocated.

    >>> import torch
    >>> q, k, v = (torch.ones(1, 1, 1, 2) for _ in range(3))
    >>> k_out, v_out = torch.zeros(2, 1, 2, 1, 2)
    >>> prefix = torch.full((1, 1, 1, 2), 7.0)
    >>> weight, rope = torch.ones(2), torch.ones(1, 1, dtype=torch.complex64)
    >>> _ = qk_norm_rope_pack_(
    ...     q, k_out, v_out, weight, weight, rope, prefix, prefix, k, v, eps=0.0
    ... )
    >>> k_out.flatten(), v_out.flatten()
    (tensor([7., 7., 1., 1.]), tensor([7., 7., 1., 1.]))
    """

    if is_compiling():
        return _compiled.qk_norm_rope_pack_(
            q,
            k_out,
            v_out,
            q_weight,
            k_weight,
            rope,
            k_prefix,
            v_prefix,
            k_src,
            v_src,
            eps,
        )

    return _qk_norm_rope_pack.qk_norm_rope_pack_(
        q,
        k_out,
        v_out,
        q_weight,
        k_weight,
        rope,
        k_prefix,
        v_prefix,
        k_src,
        v_src,
        eps,
    )

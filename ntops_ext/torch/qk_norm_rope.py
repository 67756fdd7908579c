"""`ntops_ext.torch.qk_norm_rope`."""

import torch
from torch.compiler import is_compiling

from ntops_ext.torch import _compiled, _qk_norm_rope


def qk_norm_rope(
    input: torch.Tensor,
    weight: torch.Tensor,
    rope: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of every head, then the rotation of its pairs by a complex table.

    With `x` a head in float32 and `round` a rounding to `input.dtype`::

        normalized = round(x * rsqrt(mean(x * x) + eps))
        weighted = round(weight * normalized)
        result = round((weighted[0::2] + i weighted[1::2]) * rope)

    On a GPU this is one kernel. For float16 and bfloat16 with `head_dim` 64 or 128 its
    result equals, bit for bit, what PyTorch gives for the chain in
    `ntops_ext.reference.qk_norm_rope` on that device and build: how PyTorch rounds is found
    out at the first call, and checked; where it cannot be reproduced, a `RuntimeWarning`
    says so once. `ntops_ext.torch.eager_rounding` tells for any dtype and width. Where
    the bits are not equal they are within one rounding. The first call of a dtype and
    width on a device synchronises, and is refused while a CUDA graph is captured.

    Differentiable by autograd for `input` and `weight`, once, and not in forward mode. The
    gradients are those of the definition without the two roundings inside, computed anew
    from `input` in float32 and rounded once. They are deterministic: the gradient of a head
    depends on that head alone; which heads are added to one partial sum of the weight's, and
    in which order, depends on the shapes (and, where a tensor spans more than 2^31 elements,
    on its strides). Where the gradient is expanded or transposed, it is not copied.

    A row's bits depend on nothing else in the call but, for widths other than 64 and 128,
    on whether there are fewer than 16 heads in it, as those of PyTorch do.

    :param input: `(batch, tokens, heads, head_dim)`, float16, bfloat16 or float32, with an
        even `head_dim`. The heads of a token are dense; batch and token strides are free.
    :param weight: `(head_dim,)`, of `input`'s dtype.
    :param rope: `(tokens, head_dim / 2)`, complex64, for every batch entry and head alike.
        Its rows are dense; a slice of a longer table is fine.
    :param eps: What is added to the mean of squares, inside the root.
    :param out: Where the result goes: a tensor like `input`, or `input` itself.
    :return: `out`, or a new contiguous tensor, whatever `input`'s strides are.
    :raises TypeError: If an argument is of the wrong kind or dtype.
    :raises ValueError: If a shape, a stride, a device or a value is wrong, if `rope` is a
        lazy conjugate, or if `out` shares memory with an argument it is not; where
        gradients are recorded, if `out` is given or a tensor was made in inference mode;
        on a CPU, if `out` was made in inference mode and is written elsewhere.
    :raises NotImplementedError: If `rope` requires a gradient while they are enabled, or if
        an argument carries a forward-mode tangent.
    :raises RuntimeError: If the rounding is not known yet while a CUDA graph is captured.

    >>> import torch
    >>> heads = torch.ones(1, 2, 1, 4)
    >>> quarter_turn = torch.full((2, 2), 1j)
    >>> qk_norm_rope(heads, torch.ones(4), quarter_turn, eps=0.0)[0, 0, 0]
    tensor([-1.,  1., -1.,  1.])
    """

    if is_compiling():
        return _compiled.qk_norm_rope(input, weight, rope, eps, out)

    return _qk_norm_rope.qk_norm_rope(input, weight, rope, eps, out)

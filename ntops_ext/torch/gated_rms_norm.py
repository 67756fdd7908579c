"""`ntops_ext.torch.gated_rms_norm`."""

import torch
from torch.compiler import is_compiling

from ntops_ext.torch import _compiled, _gated_rms_norm


def gated_rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm over groups of columns, with a gate before or after it.

    With `x_hat = x / sqrt(mean(x ** 2) + eps)` over each group (Zhang and Sennrich, "Root
    Mean Square Layer Normalization", 2019) and the gate as in Mamba-2 (Dao and Gu, 2024):

    - `norm_before_gate=True`: `(input_hat * (weight_offset + weight) + bias) * act(gate)`;
    - `norm_before_gate=False`: with `u = input * act(gate)`,
      `u_hat * (weight_offset + weight) + bias`;
    - `gate=None`: `input_hat * (weight_offset + weight) + bias`, whatever the flag.

    All arithmetic is in float32 and the result is rounded once, to the dtype of `input`. A
    row's bits depend on that row alone: not on the other rows, on strides, or on the run.

    Tensors are float16, bfloat16 or float32, each of its own dtype, on one device, and of
    any strides: no layout is copied, but one in which the columns of a row span more than
    2**31 elements of memory. Accesses are 16 bytes wide (8 or 4 in groups of some sizes: see
    docs/gated_rms_norm.md) where the last dimension is dense, the data is 16-byte aligned and
    the other strides are multiples of 16 elements; of rows with one stride, of 16 bytes.

    A CPU tensor is computed by `ntops_ext.reference.gated_rms_norm`, whose bits may depend
    on the other rows and on strides as PyTorch's sums do; or, if Triton's interpreter is
    on (`TRITON_INTERPRET=1`), by the kernel under the interpreter.

    :param input: A tensor of shape `(..., N)`, of any size: 0 rows, or more than 2**31
        elements. N is less than 2**31, and there are at most 63 dimensions.
    :param weight: A tensor of shape `(N,)`, or `None` for no scale.
    :param gate: A tensor of the shape of `input`, or `None`.
    :param bias: A tensor of shape `(N,)`, or `None`.
    :param eps: What is added to the mean square, inside the root. Not negative.
    :param group_size: The number of columns that are normalised together. It divides N;
        `None` means N.
    :param norm_before_gate: Whether the gate multiplies the result or the input.
    :param activation: `"silu"` (the same as `"swish"`) or `"sigmoid"`.
    :param weight_offset: What is added to `weight`, in float32. Must be 0 without one.
    :param out: Where the result is written: a tensor of the shape, dtype and device of
        `input`. It may be `input` itself and must not overlap an argument otherwise; the
        columns of one of its rows span at most 2**31 elements of memory.
    :return: `out`, or a new contiguous tensor of the shape and dtype of `input`.
    :raises TypeError: If an argument is of a wrong kind or dtype.
    :raises ValueError: If a shape, device, overlap or value is wrong, or a tensor was made in
        inference mode while gradients are recorded, or, on a CPU, `out` was and is written
        elsewhere.
    :raises NotImplementedError: If a kernel would have to carry tangents (forward mode), or
        to give second derivatives.

    Gradients for input, weight, gate and bias are kernels, too: without atomics, in float32,
    rounded once. Those of input and gate depend on their row alone; those of weight and bias
    are added over rows in an order that layouts and shapes fix.

    Nothing is written when an error is raised.

    >>> import torch
    >>> gated_rms_norm(torch.tensor([[1.0, 7.0]]), eps=0.0)
    tensor([[0.2000, 1.4000]])
    """

    if is_compiling():
        return _compiled.gated_rms_norm(
            input,
            weight,
            gate,
            bias,
            eps,
            group_size,
            norm_before_gate,
            activation,
            weight_offset,
            out,
        )

    return _gated_rms_norm.compute(
        input,
        weight,
        gate,
        bias,
        eps,
        group_size,
        norm_before_gate,
        activation,
        weight_offset,
        out,
    )

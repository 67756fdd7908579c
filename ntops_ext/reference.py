"""The definitions of the operators, in plain PyTorch.

They say what is right, to tests, smoke scripts and benchmarks alike; CPU tensors are
computed by them where Triton's interpreter is off. They check nothing and allocate freely.
"""

import torch
import torch.nn.functional as F

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}

# The largest relative error of one rounding to nearest.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}

# The smallest normal magnitudes: below, a rounding has an absolute error.
_SMALLEST_NORMAL = {
    torch.bfloat16: 2**-126,
    torch.float16: 2**-14,
    torch.float32: 2**-126,
}


def gated_rms_norm(
    input,
    weight=None,
    gate=None,
    *,
    bias=None,
    eps=1e-5,
    group_size=None,
    norm_before_gate=True,
    activation="silu",
    weight_offset=0.0,
    arithmetic_dtype=torch.float32,
    output_dtype=None,
):
    """RMSNorm over groups of columns (Zhang and Sennrich, 2019), gated as in Mamba-2.

    With a gate, `act(z)` multiplies the result (`norm_before_gate=True`) or the input.
    See `ntops_ext.torch.gated_rms_norm` for the arguments.

    :param arithmetic_dtype: What everything is computed in.
    :param output_dtype: What the result is rounded to, once; the input's dtype if `None`.
    """

    num_columns = input.shape[-1]
    group_size = max(num_columns if group_size is None else group_size, 1)

    value = input.to(arithmetic_dtype)

    if gate is not None:
        factor = ACTIVATIONS[activation](gate.to(arithmetic_dtype))

        if not norm_before_gate:
            value = value * factor

    groups = value.reshape(*value.shape[:-1], num_columns // group_size, group_size)
    mean_square = groups.square().mean(-1, keepdim=True)
    result = (groups * torch.rsqrt(mean_square + eps)).reshape(value.shape)

    if weight is not None:
        result = result * (weight_offset + weight.to(arithmetic_dtype))

    if bias is not None:
        result = result + bias.to(arithmetic_dtype)

    if gate is not None and norm_before_gate:
        result = result * factor

    return result.to(input.dtype if output_dtype is None else output_dtype)


def gated_rms_norm_tolerance(
    input, weight=None, gate=None, *, bias=None, weight_offset=0.0, **options
):
    """How far a right result may be from the definition in float64, element by element.

    One rounding to the dtype of `input`, and 16 roundings in float32 of each of the two
    terms that are added (they may cancel). The bound on the latter is from simulation: a
    float32 chain stays within 4.5, and a GPU's exponential, division and root add a few.

    :param options: The other arguments of `gated_rms_norm`.
    :return: A float64 tensor of the shape of `input`.
    """

    options = {
        "arithmetic_dtype": torch.float64,
        "output_dtype": torch.float64,
        **options,
    }
    terms = {"weight_offset": weight_offset, **options}
    exact = gated_rms_norm(input, weight, gate, bias=bias, **terms)
    magnitude = gated_rms_norm(input, weight, gate, **terms).abs()

    if bias is not None:
        size = bias.double().abs().expand_as(exact)

        if gate is not None and options.get("norm_before_gate", True):
            activation = ACTIVATIONS[options.get("activation", "silu")]
            size = size * activation(gate.double()).abs()

        magnitude = magnitude + size

    rounding = ROUNDING[input.dtype]
    normal = exact.abs().clamp_min(_SMALLEST_NORMAL[input.dtype])

    return rounding * (1 + 2**-10) * normal + 16 * 2**-24 * magnitude

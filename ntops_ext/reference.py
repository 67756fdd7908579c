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


def gated_rms_norm_backward(
    grad_output,
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
    of_magnitudes=False,
):
    """The gradients of `gated_rms_norm` for a gradient of its result.

    docs/gated_rms_norm.md has the formulas. The arguments before `arithmetic_dtype` are those of the call.

    :param grad_output: The gradient of its result, of its shape.
    :param arithmetic_dtype: What everything is computed in; float64 is not rounded.
    :param of_magnitudes: Whether every term stands for its magnitude, and what would be
        subtracted is added: how large the terms of the gradients are, not what they give.
    :return: The gradients of input, weight, gate and bias, each in the dtype of its tensor;
        None for what is absent.
    """

    num_columns = input.shape[-1]
    group_size = max(num_columns if group_size is None else group_size, 1)

    def wide(tensor):
        tensor = tensor.to(arithmetic_dtype)

        return tensor.abs() if of_magnitudes else tensor

    def mean_of_groups(tensor):
        sizes = (num_columns // group_size, group_size)
        groups = tensor.unflatten(-1, sizes)
        means = groups.mean(-1, keepdim=True).expand_as(groups)

        return means.reshape(tensor.shape)

    def sum_of_rows(tensor):
        return (
            tensor.reshape(-1, num_columns).sum(0)
            if num_columns
            else tensor.new_zeros(0)
        )

    incoming, wide_input = wide(grad_output), wide(input)
    value, scaled, factor = wide_input, incoming, 1.0
    scale = 1.0 if weight is None else weight_offset + weight.to(arithmetic_dtype)
    shift = 0.0 if bias is None else wide(bias)
    sign = 1.0 if of_magnitudes else -1.0

    if of_magnitudes and weight is not None:
        scale = scale.abs()

    if gate is not None:
        wide_gate = gate.to(arithmetic_dtype)
        sigmoid, complement = torch.sigmoid(wide_gate), torch.sigmoid(-wide_gate)
        factor, slope = sigmoid, sigmoid * complement

        if activation != "sigmoid":
            factor = wide(gate) * sigmoid
            slope = sigmoid + factor * complement

        if of_magnitudes:
            # exp(-z) may be taken as exp2 of a rounded product, wrong by |z| roundings: a
            # 16th of what `gated_rms_norm_backward_errors` allows for all others.
            inflation = 1 + wide_gate.abs().clamp(0, 110) / 16
            factor, slope = factor * inflation, slope * inflation

        if norm_before_gate:
            scaled = incoming * factor
        else:
            value = wide_input * factor

    exact_value = value

    if of_magnitudes and gate is not None and not norm_before_gate:
        exact_value = wide_input * factor / inflation

    root = torch.rsqrt(mean_of_groups(exact_value.square()) + eps)
    normalized, weighted = value * root, scaled * scale
    mean_product = mean_of_groups(normalized * weighted)
    grad_input = (weighted + sign * normalized * mean_product) * root
    grad_gate = None

    if gate is not None:
        if norm_before_gate:
            grad_gate = incoming * (normalized * scale + shift) * slope
        else:
            grad_gate = grad_input * wide_input * slope
            grad_input = grad_input * factor

    return tuple(
        None
        if tensor is None
        else gradient
        if arithmetic_dtype is torch.float64
        else gradient.to(tensor.dtype)
        for tensor, gradient in (
            (input, grad_input),
            (weight, sum_of_rows(scaled * normalized)),
            (gate, grad_gate),
            (bias, sum_of_rows(scaled)),
        )
    )


def gated_rms_norm_backward_errors(grad_output, input, *args, **options):
    """How far right gradients may be from those in float64, before they are rounded.

    32 roundings in float32 of each of the terms that are added (they may cancel): the chain
    up to the norm takes 8, and so does the one from it; the logarithm of the group's size
    is up to 14. What is added over rows takes at most one more for each, and no more than
    256, as programs and steps share the rows.

    :param options: The other arguments of `gated_rms_norm_backward`.
    :return: Float64 tensors of the shapes of input, weight, gate and bias, or None.
    """

    options = {**options, "arithmetic_dtype": torch.float64, "of_magnitudes": True}
    magnitudes = gated_rms_norm_backward(grad_output, input, *args, **options)
    num_rows = input.numel() // max(input.shape[-1], 1)
    units = 32, 32 + min(num_rows, 256), 32, 32 + min(num_rows, 256)

    return tuple(
        None if magnitude is None else count * 2**-24 * magnitude
        for count, magnitude in zip(units, magnitudes, strict=True)
    )


def qk_norm_rope(input, weight, rope, eps=1e-6):
    """RMSNorm of every head, then the rotation of its pairs by a complex table.

    `normalized = round(x / sqrt(mean(x^2) + eps))`, `weighted = round(weight * normalized)`,
    `result = round((weighted[2i] + j weighted[2i + 1]) * rope[i])`: in float32, and
    rounded to the input's dtype where it says so.

    :param input: `(batch, tokens, heads, head_dim)`, float16, bfloat16 or float32.
    :param weight: `(head_dim,)`, of the input's dtype.
    :param rope: `(tokens, head_dim / 2)`, complex64.
    :return: A contiguous tensor of the input's shape and dtype.
    """

    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normalized = (wide * scale).to(input.dtype)
    weighted = weight * normalized
    pairs = torch.view_as_complex(weighted.float().contiguous().unflatten(-1, (-1, 2)))
    rotated = pairs * rope[:, None, :]

    return torch.view_as_real(rotated).flatten(-2).to(input.dtype).contiguous()


def qk_norm_rope_in_float64(input, weight, rope, eps=1e-6):
    """`qk_norm_rope` with the same three roundings, and float64 between them."""

    wide = input.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normalized = (wide * scale).to(input.dtype)
    weighted = (weight.double() * normalized.double()).to(input.dtype)
    pairs = torch.view_as_complex(weighted.double().contiguous().unflatten(-1, (-1, 2)))
    rotated = pairs * rope[:, None, :].to(torch.complex128)

    return torch.view_as_real(rotated).flatten(-2).to(input.dtype)


def qk_norm_rope_gradients(grad_output, input, weight, rope, eps=1e-6):
    """The gradients of `qk_norm_rope` for input and weight, in float64.

    By autograd, of the definition without its roundings.
    """

    with torch.enable_grad():
        input = input.detach().double().requires_grad_()
        weight = weight.detach().double().requires_grad_()
        scale = torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps)
        weighted = weight * (input * scale)
        pairs = torch.view_as_complex(weighted.unflatten(-1, (-1, 2)))
        rotated = pairs * rope[:, None, :].to(torch.complex128)
        output = torch.view_as_real(rotated).flatten(-2)

    return torch.autograd.grad(output, (input, weight), grad_output.double())


def qk_norm_rope_gradients_tolerance(grad_output, input, weight, rope, eps=1e-6):
    """How far right gradients may be from `qk_norm_rope_gradients`, element by element.

    One rounding to the dtype of `input`. Before it, in float32, 16 roundings of each of the
    terms that are added (their magnitudes, since they may cancel): the rotation has 3, the
    root 4, the mean at most 10 with a dozen terms a lane, the rest 3 products. The weight's
    terms are added in at most 80 more steps while there are fewer than 2^14 partial sums.

    :return: Two float64 tensors, for the input and for the weight.
    """

    exact = qk_norm_rope_gradients(grad_output, input, weight, rope, eps)
    wide = input.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normalized = (wide * scale).abs()
    pairs = grad_output.double().abs().unflatten(-1, (-1, 2))
    cosine, sine = (part.double().abs()[:, None, :] for part in (rope.real, rope.imag))
    real, imaginary = pairs.unbind(-1)
    turned = torch.stack(
        (real * cosine + imaginary * sine, imaginary * cosine + real * sine), -1
    ).flatten(-2)
    weighted = turned * weight.double().abs()
    mean = (weighted * normalized).mean(-1, keepdim=True)
    magnitudes = (
        16 * scale * (weighted + normalized * mean),
        96 * (turned * normalized).sum((0, 1, 2)),
    )
    rounding = ROUNDING[input.dtype]
    smallest = _SMALLEST_NORMAL[input.dtype]

    return tuple(
        rounding * (1 + 2**-10) * gradient.abs().clamp_min(smallest)
        + 2**-24 * magnitude
        for gradient, magnitude in zip(exact, magnitudes, strict=True)
    )


def qk_norm_rope_pack_(
    q,
    k_out,
    v_out,
    q_weight,
    k_weight,
    rope,
    k_prefix,
    v_prefix,
    k_src=None,
    v_src=None,
    eps=1e-6,
):
    """Q and K through `qk_norm_rope`, K and V behind their prefixes, all in place.

    :param q: `(batch, tokens, heads, head_dim)`; receives its own `qk_norm_rope`.
    :param k_out: `(batch, prefix + tokens, kv_heads, head_dim)`; receives `k_prefix`, and
        behind it the `qk_norm_rope` of `k_src`, or of what lies there if that is None.
    :param v_out: As `k_out`; receives `v_prefix`, and behind it `v_src`, if that is given.
    :return: `(q, k_out, v_out)`.
    """

    prefix = k_prefix.shape[1]
    k = k_out[:, prefix:] if k_src is None else k_src
    rotated_k = qk_norm_rope(k, k_weight, rope, eps)
    q.copy_(qk_norm_rope(q, q_weight, rope, eps))
    k_out[:, :prefix].copy_(k_prefix)
    k_out[:, prefix:].copy_(rotated_k)
    v_out[:, :prefix].copy_(v_prefix)

    if v_src is not None:
        v_out[:, prefix:].copy_(v_src)

    return q, k_out, v_out


def sum_in_order(terms, order):
    """The sum of float32 `terms` over the last dimension, in a named order.

    Every step is an element-wise addition of two tensors, so that no device and no
    library chooses an order of its own.

    :param order: One of `ntops_ext.kernels._heads.ORDERS`: what is added within
        a lane, then whether the lanes are added by decreasing or by increasing distance.
    """

    grouping, distances = order
    width = terms.shape[-1]
    padded_width = 1 << (width - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, padded_width - width))

    if grouping == "folded_vectors":
        terms = _halve(terms)

    if grouping in ("vectors", "folded_vectors"):
        first, second, third, fourth = terms.unflatten(-1, (-1, 4)).unbind(-1)
        terms = ((first + second) + third) + fourth
    elif grouping == "lanes":
        first, second, third, fourth = terms.unflatten(-1, (4, -1)).unbind(-2)
        terms = ((first + second) + third) + fourth

    while terms.shape[-1] > (1 if distances == "decreasing" else 32):
        terms = _halve(terms)

    while terms.shape[-1] > 1:
        terms = terms[..., 0::2] + terms[..., 1::2]

    return terms.squeeze(-1)


def _halve(terms):
    half = terms.shape[-1] // 2

    return terms[..., :half] + terms[..., half:]


def rotation_error(actual, expected):
    """The largest distance of two results of `qk_norm_rope`, in units of their dtype.

    The unit is that of the length of the pair that an element belongs to: a rotation mixes
    the roundings of both, and its parts may cancel. NaN is at no distance from NaN.
    """

    if actual.numel() == 0:
        return 0.0

    actual, wanted = actual.double(), expected.double()
    lengths = torch.linalg.vector_norm(wanted.unflatten(-1, (-1, 2)), dim=-1)
    unit = torch.finfo(expected.dtype).eps * lengths.repeat_interleave(2, -1)
    smallest = torch.finfo(expected.dtype).smallest_normal
    distances = (actual - wanted).abs() / unit.clamp_min(smallest)
    is_equal = (actual == wanted) | (actual.isnan() & wanted.isnan())

    return torch.where(is_equal, 0.0, distances).max().item()

"""Modules over the operators of `ntops_ext.torch`."""

import torch

from ntops_ext.torch import _checks, _rows, gated_rms_norm


class GatedRMSNorm(torch.nn.Module):
    """`ntops_ext.torch.gated_rms_norm` with its parameters.

    The state is `weight`, and `bias` if there is one, both of shape `(hidden_size,)`: as in
    the gated norms of mamba, vLLM, Hugging Face and FLA, so that their checkpoints load
    unchanged. Their defaults differ from these: docs/gated_rms_norm_module.md has, for
    each, the arguments to pass and where it rounds otherwise.

    :param hidden_size: N, the number of columns.
    :param eps: What is added to the mean square, inside the root. Not negative.
    :param group_size: The number of columns that are normalised together. It divides
        `hidden_size`; `None` means all.
    :param norm_before_gate: Whether the gate multiplies the result or the input.
    :param activation: `"silu"` (the same as `"swish"`) or `"sigmoid"`.
    :param bias: Whether there is a bias. Only with `elementwise_affine`.
    :param elementwise_affine: Whether there are parameters at all.
    :param weight_offset: What is added to `weight`, in float32. Must be 0 without one.
    :param device: Where the parameters are made.
    :param dtype: Of the parameters: float16, bfloat16 or float32; `None` means PyTorch's
        default. It may differ from that of the input, which is that of the result.
    :raises TypeError, ValueError: If an argument is of a wrong kind, dtype or value, or a
        device that there is not. The message names it.

    >>> norm = GatedRMSNorm(4, norm_before_gate=False)
    >>> norm
    GatedRMSNorm(4, eps=1e-05, norm_before_gate=False)
    >>> norm(torch.ones(1, 4), torch.ones(1, 4)).detach()
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: str = "silu",
        bias: bool = False,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        device=None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()

        if type(hidden_size) is not int:
            raise TypeError(
                f"`hidden_size` must be an int, but is a {type(hidden_size).__name__}."
            )

        if hidden_size < 1:
            raise ValueError(
                f"`hidden_size` must be positive, but is {_checks.shown(hidden_size)}."
            )

        if hidden_size > _rows.MAX_COLUMNS:
            raise ValueError(
                f"`hidden_size` must be at most {_rows.MAX_COLUMNS}, for kernels compute"
                f" offsets in 32 bits, but is {_checks.shown(hidden_size)}."
            )

        for name, value in (("bias", bias), ("elementwise_affine", elementwise_affine)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"`{name}` must be a bool, but is a {type(value).__name__}."
                )

        if bias and not elementwise_affine:
            raise ValueError(
                "`bias` must be False with `elementwise_affine=False`, which means no"
                " parameters, but is True."
            )

        self.hidden_size = hidden_size
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.activation = activation
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset

        dtype = torch.get_default_dtype() if dtype is None else dtype

        if dtype not in _checks.FLOATING_DTYPES:
            raise TypeError(
                f"`dtype` must be torch.float16, torch.bfloat16 or torch.float32, but is"
                f" {_checks.shown(dtype)}."
            )

        self._check(bias, dtype)
        _checks.check_device_is_usable(device)

        for name, is_present in (("weight", elementwise_affine), ("bias", bias)):
            parameter = None

            if is_present:
                parameter = torch.nn.Parameter(
                    torch.empty(hidden_size, device=device, dtype=dtype)
                )

            self.register_parameter(name, parameter)

        self.reset_parameters()

    def _check(self, bias, dtype):
        # The operator's own checks of what does not change from call to call, on no rows.
        rows = torch.empty(0, self.hidden_size, device="meta", dtype=torch.float32)
        parameter = torch.empty(self.hidden_size, device="meta", dtype=dtype)

        with torch.no_grad():
            self._compute(
                rows,
                parameter if self.elementwise_affine else None,
                rows,
                parameter if bias else None,
            )

    def reset_parameters(self):
        """Make the scale `weight_offset + weight` one, and the bias zero."""

        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, input, gate=None):
        """The norm of `input`, gated if there is a gate.

        :param input: A tensor of shape `(..., hidden_size)` and any strides.
        :param gate: A tensor of the shape of `input`, or `None`.
        :return: A new contiguous tensor of the shape and dtype of `input`.
        :raises TypeError, ValueError: As `ntops_ext.torch.gated_rms_norm`.
        """

        # With parameters, their shape is checked against the input's.
        if self.weight is None:
            _checks.check_kind("input", input)

            if input.shape[-1:] != (self.hidden_size,):
                raise ValueError(
                    f"`input` must have {self.hidden_size} columns, the module's"
                    f" `hidden_size`, but has shape {tuple(input.shape)}."
                )

        return self._compute(input, self.weight, gate, self.bias)

    def _compute(self, input, weight, gate, bias):
        return gated_rms_norm(
            input,
            weight,
            gate,
            bias=bias,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            activation=self.activation,
            weight_offset=self.weight_offset,
        )

    def extra_repr(self):
        """The arguments that differ from their defaults, and `eps`."""

        options = [
            f"{name}={getattr(self, name)!r}"
            for name, default in (
                ("group_size", None),
                ("norm_before_gate", True),
                ("activation", "silu"),
                ("elementwise_affine", True),
                ("weight_offset", 0.0),
            )
            if getattr(self, name) != default
        ]

        if self.bias is not None:
            options.append("bias=True")

        return ", ".join([str(self.hidden_size), f"eps={self.eps!r}", *options])

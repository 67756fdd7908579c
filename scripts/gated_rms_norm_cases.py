"""Shapes and layouts in which real models call gated RMSNorm, for smoke and benchmarks.

Dimensions are those of the models' published configurations and of their fused input
projections; `layout` says how the gate lies in memory.
"""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way of calling gated RMSNorm.

    :param name: The model, and what is special.
    :param row_shape: What a token's rows are shaped like: `()` or `(heads,)`.
    :param num_columns: N.
    :param group_size: D.
    :param norm_before_gate: The order.
    :param activation: The activation of the gate; `None` for no gate.
    :param gate_strides: The gate's strides in front of the last dimension, the outermost
        being a token's, if it is a slice of a projection; `None` if it is dense.
    :param gate_offset: Where the slice begins in the projection, in elements.
    :param input_is_slice: Whether the input is such a slice too (behind the gate's).
    :param bias: Whether there is a bias.
    :param weight_offset: What is added to the weight.
    :param eps: What is added to the mean square.
    """

    name: str
    num_columns: int
    group_size: int
    row_shape: tuple = ()
    norm_before_gate: bool = False
    activation: str | None = "silu"
    gate_strides: tuple | None = None
    gate_offset: int = 0
    input_is_slice: bool = False
    bias: bool = False
    weight_offset: float = 0.0
    eps: float = 1e-5

    @property
    def layout(self):
        if self.gate_strides is None:
            return "dense"

        where = "input and gate" if self.input_is_slice else "gate"

        return f"{where} {'x'.join(map(str, self.gate_strides))}"

    @property
    def mode(self):
        parts = []

        if self.activation is None:
            parts.append("plain")
        else:
            order = "norm first" if self.norm_before_gate else "gate first"
            parts.append(f"{order}, {self.activation}")

        if self.group_size != self.num_columns:
            parts.append(f"groups of {self.group_size}")

        if self.bias:
            parts.append("bias")

        if self.weight_offset:
            parts.append(f"weight + {self.weight_offset:g}")

        return ", ".join(parts)

    def num_elements(self, num_tokens):
        """How many elements the input has."""

        return num_tokens * math.prod(self.row_shape) * self.num_columns

    def make_arguments(self, num_tokens, *, device, dtype, seed=0):
        """The positional and keyword arguments of a call with random contents."""

        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        shape = (num_tokens, *self.row_shape, self.num_columns)
        input, gate = None, None

        if self.activation is not None:
            if self.gate_strides is None:
                gate = random(*shape)
            else:
                projection = random(num_tokens, self.gate_strides[0])
                strides = (*self.gate_strides, 1)
                gate = projection.as_strided(shape, strides, self.gate_offset)

                if self.input_is_slice:
                    offset = self.gate_offset + math.prod(shape[1:])
                    input = projection.as_strided(shape, strides, offset)

        if input is None:
            input = random(*shape)

        keywords = {
            "eps": self.eps,
            "group_size": self.group_size,
            "norm_before_gate": self.norm_before_gate,
            "activation": self.activation or "silu",
            "weight_offset": self.weight_offset,
        }

        if self.bias:
            keywords["bias"] = random(self.num_columns)

        return (input, random(self.num_columns), gate), keywords


CASES = (
    Case(name="mamba-2-130m", num_columns=1536, group_size=1536, gate_strides=(3352,)),
    Case(name="mamba-2-2.7b", num_columns=5120, group_size=5120, gate_strides=(10576,)),
    Case(
        name="codestral-mamba-7b",
        num_columns=8192,
        group_size=1024,
        gate_strides=(18560,),
    ),
    Case(name="zamba2-7b", num_columns=7168, group_size=3584, gate_strides=(14704,)),
    Case(name="granite-4-h-tiny", num_columns=3072, group_size=3072),
    Case(name="nemotron-h-47b", num_columns=16384, group_size=2048),
    Case(
        name="nemotron-nano-9b-v2",
        num_columns=10240,
        group_size=1280,
        gate_strides=(22656,),
    ),
    Case(
        name="nemotron-nano-9b-v2-slices",
        num_columns=10240,
        group_size=1280,
        gate_strides=(22656,),
        input_is_slice=True,
    ),
    Case(
        name="nemotron-3-nano-4b",
        num_columns=7680,
        group_size=960,
        gate_strides=(17504,),
    ),
    Case(
        name="nemotron-3-nano-30b",
        num_columns=4096,
        group_size=512,
        gate_strides=(10304,),
    ),
    Case(
        name="qwen3-next",
        row_shape=(32,),
        num_columns=128,
        group_size=128,
        norm_before_gate=True,
        gate_strides=(12288, 128),
        gate_offset=8192,
        eps=1e-6,
    ),
    Case(
        name="qwen3-next-interleaved",
        row_shape=(16, 2),
        num_columns=128,
        group_size=128,
        norm_before_gate=True,
        gate_strides=(12288, 768, 128),
        gate_offset=512,
        eps=1e-6,
    ),
    Case(
        name="qwen3-next-zero-centered",
        num_columns=2048,
        group_size=2048,
        activation=None,
        weight_offset=1.0,
        eps=1e-6,
    ),
    Case(
        name="kimi-linear",
        row_shape=(32,),
        num_columns=128,
        group_size=128,
        norm_before_gate=True,
        activation="sigmoid",
    ),
    Case(
        name="ling-2.5",
        num_columns=4096,
        group_size=512,
        norm_before_gate=True,
        activation="sigmoid",
    ),
    Case(name="mamba-3", num_columns=2048, group_size=64, norm_before_gate=True),
    Case(
        name="gated-deltanet",
        row_shape=(6,),
        num_columns=512,
        group_size=512,
        norm_before_gate=True,
    ),
    Case(
        name="bias-norm-first",
        num_columns=1024,
        group_size=1024,
        norm_before_gate=True,
        bias=True,
    ),
    Case(name="bias-gate-first", num_columns=1024, group_size=256, bias=True),
    Case(name="widest", num_columns=131072, group_size=131072, activation=None),
)

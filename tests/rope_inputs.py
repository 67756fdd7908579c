"""Arguments of `qk_norm_rope` and `qk_norm_rope_pack_` for tests."""

import dataclasses

import torch

GUARD = 64
CANARY = 7.5


@dataclasses.dataclass
class PackInputs:
    """The arguments of one call, in their order, and what lies around them."""

    q: torch.Tensor
    k_out: torch.Tensor
    v_out: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    rope: torch.Tensor
    k_prefix: torch.Tensor
    v_prefix: torch.Tensor
    k_src: torch.Tensor | None
    v_src: torch.Tensor | None
    guarded: dict = dataclasses.field(default_factory=dict)

    def arguments(self):
        return [
            getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "guarded"
        ]

    def written(self):
        return [self.q, self.k_out, self.v_out]

    def expected(self, pack):
        """What `pack` makes of copies of the written tensors."""

        arguments = self.arguments()

        return pack(*[tensor.clone() for tensor in arguments[:3]], *arguments[3:])

    def assert_canaries(self):
        """Nothing around a tensor was written, in front, behind or between its tokens."""

        for name, (buffer, tensor) in self.guarded.items():
            untouched = torch.ones(buffer.shape, dtype=torch.bool, device=buffer.device)
            untouched.as_strided(
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
            ).fill_(False)

            assert (buffer[untouched] == CANARY).all(), name


def make_pack(
    *,
    batch=1,
    tokens=33,
    prefix=5,
    heads=8,
    kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    device="cpu",
    sources="kv",
    padding=0,
    seed=0,
):
    """Random arguments; each tensor of heads is cut out of a buffer of canaries.

    :param sources: Which of `k_src` and `v_src` are given, as a string of their letters.
    :param padding: Elements between the tokens.
    """

    generator = torch.Generator(device).manual_seed(seed)
    guarded = {}

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device)

    def make_heads(name, num_rows, num_heads):
        shape = (batch, num_rows, num_heads, head_dim)
        row_stride = num_heads * head_dim + padding
        strides = (num_rows * row_stride, row_stride, head_dim, 1)
        size = batch * num_rows * row_stride + 2 * GUARD
        buffer = torch.full((size,), CANARY, dtype=dtype, device=device)
        tensor = buffer.as_strided(shape, strides, GUARD)
        tensor.copy_(randn(*shape))
        guarded[name] = (buffer, tensor)

        return tensor

    packed = prefix + tokens

    return PackInputs(
        q=make_heads("q", tokens, heads),
        k_out=make_heads("k_out", packed, kv_heads),
        v_out=make_heads("v_out", packed, kv_heads),
        q_weight=randn(head_dim).to(dtype),
        k_weight=randn(head_dim).to(dtype),
        rope=make_rope(tokens, head_dim, device, generator),
        k_prefix=make_heads("k_prefix", prefix, kv_heads),
        v_prefix=make_heads("v_prefix", prefix, kv_heads),
        k_src=make_heads("k_src", tokens, kv_heads) if "k" in sources else None,
        v_src=make_heads("v_src", tokens, kv_heads) if "v" in sources else None,
        guarded=guarded,
    )


def make_rope(tokens, head_dim, device="cpu", generator=None):
    """A table of rotations, as a slice that starts inside a longer one."""

    angles = torch.rand((tokens + 3, head_dim // 2), generator=generator, device=device)

    return torch.polar(torch.ones_like(angles), 6.28 * angles)[3:]

"""Run `qk_norm_rope` and `qk_norm_rope_pack_` once each in every mode and compare.

    python scripts/run_rope_pack_smoke.py --device auto|cuda|cpu [--cases NAME...]

On a GPU the cases have production shapes, and in the dtypes and widths for which equality
is promised every bit must be that of PyTorch's eager chain on that GPU. On a CPU the same
kernels run in Triton's interpreter on small shapes, within one rounding at each of the
three points where the chain rounds. The exit status is 1 if a case fails.
"""

import dataclasses
import sys
import traceback

import torch
from command_line import make_smoke_parser, parse
from environment import describe_environment, print_environment

# Units in the last place: one at each of the three roundings to the dtype. Float32 sums
# and roots differ by a few.
MAX_ERROR = {"float16": 3.0, "bfloat16": 3.0, "float32": 8.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    batch: int = 1
    tokens: int = 4096
    prefix: int = 27
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    dtype: str = "bfloat16"
    mode: str = "in_place"
    layout: str = "dense"


CASES = (
    Case(name="in_place"),
    Case(name="copy_k_and_v", mode="copy_k_and_v"),
    Case(name="copy_k", mode="copy_k"),
    Case(name="copy_v", mode="copy_v"),
    Case(name="single_tensor", mode="single_tensor"),
    Case(name="packed_views", layout="packed"),
    Case(name="prefix_kept", layout="prefix_kept", prefix=4123),
    Case(name="padded_tokens", batch=2, tokens=17, prefix=5, heads=4, kv_heads=4,
         mode="copy_k_and_v", layout="padded"),
    Case(name="no_prefix", prefix=0, tokens=4608, heads=24, kv_heads=24),
    Case(name="only_prefix", tokens=0),
    Case(name="one_token", tokens=1, prefix=128, heads=32, kv_heads=4),
    Case(name="one_row", tokens=1, prefix=1, heads=1, kv_heads=1, mode="copy_k_and_v"),
    Case(name="six_heads", batch=2, tokens=17, prefix=5, heads=6, kv_heads=6,
         mode="copy_k_and_v"),
    Case(name="thirty_heads", heads=30, kv_heads=30, prefix=32),
    Case(name="grouped_queries", tokens=8192, prefix=0, heads=64, kv_heads=8),
    Case(name="float16", dtype="float16", mode="copy_k_and_v"),
    Case(name="float32", dtype="float32", tokens=1024),
    Case(name="width_64", heads=24, kv_heads=24, head_dim=64),
    Case(name="width_96", heads=16, kv_heads=16, head_dim=96),
    Case(name="width_256", heads=16, kv_heads=16, head_dim=256),
)  # fmt: skip

# The interpreter runs about a thousand programs a second.
SMALL = {"tokens": 3, "prefix": 2, "heads": 6}


def main(arguments):
    parser = make_smoke_parser(__doc__)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these cases")
    options = parse(parser, arguments)
    device = options.device
    known = [case.name for case in CASES]

    if unknown := set(options.cases or ()) - set(known):
        parser.error(
            f"--cases: {', '.join(sorted(unknown))} not among {', '.join(known)}"
        )

    print_environment(describe_environment())
    num_failed = 0

    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue

        case = case if device == "cuda" else _shrink(case)

        try:
            verdict, is_right = _run(case, device)
        except Exception:
            traceback.print_exc()
            verdict, is_right = "raised", False

        num_failed += not is_right
        print(
            f"{'ok' if is_right else 'FAILED':6} {case.name:16} {_describe(case):58}"
            f" {verdict}",
            flush=True,
        )

    print(f"{num_failed} failed" if num_failed else "all ok")

    return 1 if num_failed else 0


def _shrink(case):
    small = {name: min(getattr(case, name), size) for name, size in SMALL.items()}
    kv_heads = max(small["heads"] * case.kv_heads // case.heads, 1)

    return dataclasses.replace(case, **small, kv_heads=kv_heads)


def _describe(case):
    return (
        f"{case.dtype} [{case.batch}, {case.tokens}, {case.heads}, {case.head_dim}]"
        f" kv {case.kv_heads} prefix {case.prefix} {case.layout}"
    )


def _run(case, device):
    """Run one case; what to print of it, and whether it is right."""

    from ntops_ext import reference
    from ntops_ext.torch import eager_rounding, qk_norm_rope, qk_norm_rope_pack_

    dtype = getattr(torch, case.dtype)
    inputs = make_inputs(case, device)
    expected = [tensor.clone() for tensor in inputs.written]

    if case.mode == "single_tensor":
        weights = (inputs.q_weight, inputs.rope)
        expected = [reference.qk_norm_rope(inputs.q, *weights)]
        actual = [qk_norm_rope(inputs.q, *weights)]
    else:
        reference.qk_norm_rope_pack_(*expected, *inputs.read)
        actual = qk_norm_rope_pack_(*inputs.written, *inputs.read)

    is_equal = all(
        torch.equal(_bits(one), _bits(other))
        for one, other in zip(expected, actual, strict=True)
    )

    if is_equal:
        return "bit-equal", True

    error = max(
        reference.rotation_error(one, other)
        for one, other in zip(actual, expected, strict=True)
    )
    most = MAX_ERROR[case.dtype]
    verdict = f"largest error {error:.2f} of {most:g} units in the last place"
    is_right = error <= most

    if device == "cuda":
        rounding = eager_rounding(dtype, case.head_dim, device)
        verdict += f"; {rounding.reason or 'bit-equality was promised'}"
        is_right = is_right and not rounding.is_reproduced

    return verdict, is_right


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    q: torch.Tensor
    q_weight: torch.Tensor
    rope: torch.Tensor
    written: tuple
    read: tuple


def make_inputs(case, device):
    """The arguments of a case; no two cases share memory."""

    generator = torch.Generator(device).manual_seed(len(case.name))
    dtype = getattr(torch, case.dtype)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def heads(num_rows, num_heads):
        width = num_heads * case.head_dim
        # 5 elements more a token: a stride that no access width divides.
        padding = 5 if case.layout == "padded" else 0
        rows = randn(case.batch, num_rows, width + padding)

        return rows[..., :width].unflatten(-1, (num_heads, case.head_dim))

    packed_rows = case.prefix + case.tokens

    if case.layout == "packed":
        buffer = randn(case.batch, packed_rows, 3, case.heads, case.head_dim)
        q, k_out, v_out = buffer[:, case.prefix :, 0], buffer[:, :, 1], buffer[:, :, 2]
    else:
        q = heads(case.tokens, case.heads)
        k_out, v_out = (heads(packed_rows, case.kv_heads) for _ in range(2))

    if case.layout == "prefix_kept":
        prefixes = (k_out[:, : case.prefix], v_out[:, : case.prefix])
    else:
        prefixes = [heads(case.prefix, case.kv_heads) for _ in range(2)]

    copied = {"copy_k": "k", "copy_v": "v", "copy_k_and_v": "kv"}.get(case.mode, "")
    sources = [
        heads(case.tokens, case.kv_heads) if name in copied else None for name in "kv"
    ]
    angles = torch.rand(
        (case.tokens + 3, case.head_dim // 2), generator=generator, device=device
    )
    rope = torch.polar(torch.ones_like(angles), 6.28 * angles)[3:]
    q_weight, k_weight = randn(case.head_dim), randn(case.head_dim)

    return Inputs(
        q=q,
        q_weight=q_weight,
        rope=rope,
        written=(q, k_out, v_out),
        read=(q_weight, k_weight, rope, *prefixes, *sources),
    )


def _bits(tensor):
    return tensor.contiguous().view(
        torch.int32 if tensor.element_size() == 4 else torch.int16
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

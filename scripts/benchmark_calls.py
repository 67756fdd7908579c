"""Host time of a call of each operator, beside `torch.add(x, y, out=z)` in the same run.

    python scripts/benchmark_calls.py [--device cuda|cpu] [--quick] [--output FILE.jsonl]

Wall clock a call over hundreds of calls without synchronising; the median of rounds, in which all calls take turns. The
tensors are small: what is timed is the way from the call to the launch. On a CPU the launch does nothing, and
`torch.add` computes.
"""

import itertools
import sys

import launch_cases
import results
import timing
import torch
from command_line import make_parser, parse_host_options
from environment import describe_environment, print_environment

import ntops_ext
from ntops_ext.torch import _launch, _qk_norm_rope, _qk_norm_rope_pack

# Against torch.add, at most.
BARS = {"gated_rms_norm, allocating": 2.0, "qk_norm_rope_pack_, in place": 2.25}


def make_calls(device):
    """Functions of no arguments, by what they call."""

    def randn(*shape):
        return torch.randn(shape, device=device).to(torch.bfloat16)

    x, gate = randn(8, 4096), randn(8, 4096)
    weight, out = randn(4096), randn(8, 4096)
    projection = randn(8, 10304)
    slices = projection[:, :4096], projection[:, 4096:8192]
    norm = ntops_ext.torch.gated_rms_norm

    tokens, prefix, heads, head_dim = 16, 3, 4, 128
    q, k, v = (randn(1, tokens, heads, head_dim) for _ in range(3))
    k_out, v_out = (randn(1, prefix + tokens, heads, head_dim) for _ in range(2))
    k_prefix, v_prefix = (randn(1, prefix, heads, head_dim) for _ in range(2))
    head_weight = randn(head_dim)
    angles = torch.rand(tokens, head_dim // 2, device=device)
    rope = torch.polar(torch.ones_like(angles), angles)
    pack = ntops_ext.torch.qk_norm_rope_pack_
    behind_q = head_weight, head_weight, rope, k_prefix, v_prefix
    packed = (q, k_out, v_out, *behind_q)
    # More than are remembered.
    outs, queries = (itertools.cycle(windows(tensor, 20000)) for tensor in (out, q))

    return {
        "torch.add(x, y, out=z)": lambda: torch.add(x, gate, out=out),
        "torch.empty_like(x)": lambda: torch.empty_like(x),
        "gated_rms_norm, allocating": lambda: norm(x, weight, gate),
        "gated_rms_norm, out": lambda: norm(x, weight, gate, out=out),
        "gated_rms_norm, out, new addresses": lambda: norm(
            x, weight, gate, out=next(outs)
        ),
        "gated_rms_norm, slices, groups": lambda: norm(
            slices[0], weight, slices[1], group_size=512, norm_before_gate=False
        ),
        "qk_norm_rope, allocating": lambda: ntops_ext.torch.qk_norm_rope(
            q, head_weight, rope
        ),
        "qk_norm_rope_pack_, in place": lambda: pack(*packed),
        "qk_norm_rope_pack_, in place, new addresses": lambda: pack(
            next(queries), k_out, v_out, *behind_q
        ),
        "qk_norm_rope_pack_, copying": lambda: pack(*packed, k, v),
    }


def windows(tensor, count):
    """So many tensors like `tensor` at different addresses, in one buffer."""

    buffer = tensor.new_zeros(tensor.numel() + 16 * count)

    return [
        buffer.as_strided(tensor.shape, tensor.stride(), 16 * position)
        for position in range(count)
    ]


def main(arguments):
    options = parse_host_options(make_parser(__doc__), arguments)

    with launch_cases.launching(options.device), torch.no_grad():
        if options.device == "cpu":
            # Launches are recorded there, and have to be made for that.
            for module in (_launch, _qk_norm_rope, _qk_norm_rope_pack):
                module.runs_kernel = lambda tensor: True

        times = timing.host_times(
            make_calls(options.device), rounds=options.rounds, calls=options.calls
        )

    floor = times["torch.add(x, y, out=z)"]["median"]
    records = [
        {
            "benchmark": "calls",
            "device": options.device,
            "case": name,
            **time,
            "ratio": time["median"] / floor,
            "of": "torch.add",
            "bar": BARS.get(name),
        }
        for name, time in times.items()
    ]
    environment = describe_environment()
    results.write(options.output, records, environment)
    print_environment(environment)
    launch_cases.print_table(records, options.device)

    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

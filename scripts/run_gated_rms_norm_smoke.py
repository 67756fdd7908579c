"""Run gated RMSNorm on the shapes of real models and compare it with its definition.

On a GPU the NineToothed kernel runs there; without one the same kernel runs under
Triton's interpreter, on fewer rows.

    python scripts/run_gated_rms_norm_smoke.py [--device auto|cuda|cpu] [--cases NAME...]

The error is in units of what one rounding to the output's dtype, and the arithmetic in
float32, may make of the exact result: 1.00 is the limit. The exit status is 1 if a case
fails.
"""

import sys

import torch
from command_line import make_smoke_parser, parse, progress
from environment import describe_environment, print_environment
from gated_rms_norm_cases import CASES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# The interpreter takes some 20 ms for each block of a row.
TOKENS = {"cuda": (1, 33, 4096), "cpu": (2,)}


def main(arguments):
    parser = make_smoke_parser(__doc__)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these cases")
    options = parse(parser, arguments)
    device = options.device
    names = [case.name for case in CASES]
    unknown = sorted(set(options.cases or ()) - set(names))

    if unknown:
        parser.error(f"--cases: {', '.join(unknown)} not among {', '.join(names)}")

    print_environment(describe_environment())
    runs = [
        (case, num_tokens, dtype)
        for case in CASES
        if options.cases is None or case.name in options.cases
        for num_tokens in TOKENS[device]
        for dtype in (DTYPES if device == "cuda" else _one_dtype(case))
    ]

    num_failures = sum(
        not run(*arguments, device) for arguments in progress(runs, "case")
    )
    print(f"{len(runs) - num_failures} passed, {num_failures} failed")

    return int(num_failures > 0)


def run(case, num_tokens, dtype_name, device):
    """Run one case, print its line, and say whether it is right."""

    import ntops_ext
    from ntops_ext import reference

    dtype = DTYPES[dtype_name]
    tensors, keywords = case.make_arguments(num_tokens, device=device, dtype=dtype)
    output = ntops_ext.torch.gated_rms_norm(*tensors, **keywords)
    exact = reference.gated_rms_norm(
        *tensors,
        **keywords,
        arithmetic_dtype=torch.float64,
        output_dtype=torch.float64,
    )
    tolerance = reference.gated_rms_norm_tolerance(*tensors, **keywords)

    if device == "cpu" and dtype == torch.bfloat16:
        # Triton's interpreter does not round to bfloat16, it truncates: twice the error.
        tolerance = 2 * tolerance

    error = ((output.double() - exact).abs() / tolerance).max().item()
    is_right = output.dtype == dtype and error <= 1
    where = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
    print(
        f"{case.name:28} {dtype_name} {str(tuple(output.shape)):18} {case.layout:24}"
        f" {case.mode:44} NineToothed on {where}  error {error:.2f} of 1"
        f"  {'ok' if is_right else 'FAILED'}",
        flush=True,
    )

    return is_right


def _one_dtype(case):
    # Under the interpreter, each dtype in turn: a case takes seconds there.
    names = list(DTYPES)

    return (names[len(case.name) % len(names)],)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The first call in a fresh process, with cold and with warm caches on disk, and what a new number of rows costs.

    python scripts/measure_first_call.py [--device cuda|cpu] [--quick] [--output FILE.jsonl]

For each operator a process of its own is started twice with one home: the first finds no file of NineToothed's or
Triton's, the second those of the first. Reported are seconds of imports and of CUDA's start; of the first call and, within
it, of making the NineToothed handles and of Triton's compiling (which in the second process reads its cache); microseconds
of the second call; and for each later number of rows, the seconds of its first call and how many kernels were compiled
and tuned for it. Triton distinguishes whether a size is divisible by 16: a number of rows of a kind that was met before
must compile nothing, and the exit status is 1 if one does.

On a CPU kernels run in Triton's interpreter, which compiles nothing.
"""

import json
import sys
import tempfile
import time

OPERATORS = ("gated_rms_norm", "qk_norm_rope_pack_")

# Multiples of 16, then others; the first of each kind may compile.
ROWS = {
    "cuda": ((4096, 4112, 8192, 16384), (4097, 5001, 9999)),
    "cpu": ((16, 32), (17, 19)),
}

COLUMNS = {"cuda": 4096, "cpu": 16}


def main(arguments):
    if arguments[:1] == ["--process"]:
        print(json.dumps(measure(*arguments[1:])))

        return 0

    import results
    from command_line import make_parser, parse
    from environment import describe_environment, print_environment
    from fresh_process import run

    parser = make_parser(__doc__)
    options = parse(parser, arguments)
    operators = OPERATORS[:1] if options.quick else OPERATORS
    environment = describe_environment()
    print_environment(environment)

    def measure_all():
        for operator in operators:
            with tempfile.TemporaryDirectory() as home:
                for caches in ("cold", "warm"):
                    yield {
                        "benchmark": "first_call",
                        "device": options.device,
                        "operator": operator,
                        "caches": caches,
                        **run(__file__, ["--process", operator, options.device], home),
                    }

    records = results.write(options.output, measure_all(), environment)
    print_table(records)

    return int(any(is_recompiled(record) for record in records))


def is_recompiled(record):
    """Whether a number of rows of a kind that was met before compiled or tuned something."""

    return record["tuned"] > 0 or any(
        row["compiled"] for row in record["rows"] if not row["is_first_of_its_kind"]
    )


def print_table(records):
    columns = ("import_torch", "start_device", "import_ntops_ext", "first_call")
    columns += ("making", "compiling")
    print(f"{'seconds':28}" + "".join(f"{name:>18}" for name in columns))

    for record in records:
        name = f"{record['operator']}, {record['caches']}"
        print(
            f"{name:28}"
            + "".join(f"{record[f'{column}_s']:18.3f}" for column in columns)
        )

    for record in records:
        print(
            f"{record['operator']}, {record['caches']} caches: second call"
            f" {record['second_call_us']:.1f} us; then, by rows: seconds, compiled"
        )

        for row in record["rows"]:
            allowed = " (first of its kind)" if row["is_first_of_its_kind"] else ""
            print(f"  {row['rows']:6}: {row['s']:.4f}, {row['compiled']}{allowed}")

        print(
            f"  tuned: {record['tuned']}{'  MISSED' if is_recompiled(record) else ''}"
        )


def measure(operator, device):
    """What happens in this process. Nothing may have been imported that is measured."""

    if device == "cpu":
        import os

        os.environ["TRITON_INTERPRET"] = "1"

    seconds = {}

    def timed(name, function):
        start = time.perf_counter()
        result = function()
        seconds[f"{name}_s"] = time.perf_counter() - start

        return result

    def import_torch():
        import torch

        return torch

    torch = timed("import_torch", import_torch)

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    def start_device():
        torch.ones(1, device=device)
        synchronize()

    timed("start_device", start_device)

    def import_ntops_ext():
        import ninetoothed  # noqa: F401

        import ntops_ext.kernels
        import ntops_ext.torch

        return ntops_ext.torch

    operators = timed("import_ntops_ext", import_ntops_ext)
    making, compiling, tuning = watch()
    make_call = {
        "gated_rms_norm": gated_rms_norm_call,
        "qk_norm_rope_pack_": pack_call,
    }[operator]

    def call_with(rows):
        call = make_call(operators, torch, rows, device)
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()

        return call, time.perf_counter() - start

    (first, *others), odd = ROWS[device]
    call, seconds["first_call_s"] = call_with(first)
    seconds["making_s"], seconds["compiling_s"] = sum(making), sum(compiling)
    num_compiled = len(compiling)
    start = time.perf_counter()
    call()
    synchronize()
    second_call = (time.perf_counter() - start) * 1e6
    rows = []

    for num_rows in (*others, *odd):
        before = len(compiling)
        _, row_seconds = call_with(num_rows)
        rows.append(
            {
                "rows": num_rows,
                "s": row_seconds,
                "compiled": len(compiling) - before,
                "is_first_of_its_kind": num_rows == odd[0],
            }
        )

    return {
        **seconds,
        "second_call_us": second_call,
        "compiled": num_compiled,
        "tuned": len(tuning),
        "first_rows": first,
        "rows": rows,
    }


def watch():
    """Lists that grow by the seconds of each making, compiling and tuning of a kernel."""

    import ninetoothed
    import triton.compiler
    from triton.runtime.autotuner import Autotuner

    def timed(owner, name):
        function, durations = getattr(owner, name), []

        def timed_function(*args, **kwargs):
            start = time.perf_counter()

            try:
                return function(*args, **kwargs)
            finally:
                durations.append(time.perf_counter() - start)

        setattr(owner, name, timed_function)

        return durations

    # Triton takes `compile` from this module when it launches a kernel for the first time.
    return (
        timed(ninetoothed, "make"),
        timed(triton.compiler, "compile"),
        timed(Autotuner, "_bench"),
    )


def gated_rms_norm_call(operators, torch, rows, device):
    num_columns = COLUMNS[device]
    x, gate = torch.randn(2, rows, num_columns, device=device).to(torch.bfloat16)
    weight = torch.ones(num_columns, device=device, dtype=torch.bfloat16)

    return lambda: operators.gated_rms_norm(x, weight, gate)


def pack_call(operators, torch, rows, device):
    heads, prefix, head_dim = (32, 27, 128) if device == "cuda" else (1, 1, 16)

    def randn(*shape):
        return torch.randn(*shape, head_dim, device=device).to(torch.bfloat16)

    q, k_out, v_out, k_prefix, v_prefix = (
        randn(1, tokens, heads)
        for tokens in (rows, prefix + rows, prefix + rows, prefix, prefix)
    )
    weight = randn()
    angles = torch.rand(rows, head_dim // 2, device=device)
    rope = torch.polar(torch.ones_like(angles), angles)

    return lambda: operators.qk_norm_rope_pack_(
        q, k_out, v_out, weight, weight, rope, k_prefix, v_prefix
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""NVIDIA's compute-sanitizer over a small call of every kind: accesses out of bounds, races in shared memory.

    python scripts/run_sanitizer.py [--sanitizer PATH] [--tools TOOL...] [--device cuda|cpu]

A first process makes the calls alone, which compiles the kernels. A second writes out of bounds on purpose, which memcheck
must report. Then the calls are made under each tool, with an allocation for each tensor and room between them. The exit
status is 0 if every tool came to its end and reported nothing. `compute-sanitizer` is part of the CUDA toolkit, and of the
package nvidia-cuda-sanitizer-api. With `--device cpu` the calls are made but not launched, and nothing checks them.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

# What a tool prints last: the first number must be 0.
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b.*")

ENVIRONMENT = {
    # PyTorch would cut tensors out of larger allocations, and an access past the end of one would meet another.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TRITON_INTERPRET": "0",
}

OPTIONS = (
    # PyTorch and Triton ask the driver things that it may refuse: that is no access of a kernel.
    "--report-api-errors=no",
    "--target-processes=application-only",
    # The other kernels are checked all the same.
    "--destroy-on-device-error=kernel",
)

SECONDS_PER_PROCESS = 400


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sanitizer", metavar="PATH", help="of compute-sanitizer")
    parser.add_argument(
        "--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"]
    )
    parser.add_argument(
        "--process", choices=("calls", "overrun"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)

    if options.process == "overrun":
        overrun()

        return 0

    if options.process or options.device == "cpu":
        print(json.dumps(make_calls(options.device)))

        return 0

    sanitizer = options.sanitizer or find_sanitizer()

    if sanitizer is None or shutil.which(sanitizer) is None:
        parser.error(
            f"--sanitizer: found no program {sanitizer or 'compute-sanitizer'}; it is part"
            f" of the CUDA toolkit. Put it on the PATH, or name it"
        )

    made = json.loads(run([], "calls").splitlines()[-1])
    kernels = made["kernels"]
    print(f"{made['calls']} calls of {len(kernels)} kernels: {', '.join(kernels)}")
    is_clean = True

    if "memcheck" in options.tools:
        is_clean &= finds_an_overrun(sanitizer)

    for tool in options.tools:
        is_clean &= is_clean_under(sanitizer, tool, made)

    return int(not is_clean)


def find_sanitizer():
    """Where `compute-sanitizer` is, if it is in one of the usual places."""

    folders = [
        *os.environ.get("PATH", "").split(os.pathsep),
        *(
            os.path.join(os.environ[name], "bin")
            for name in ("CUDA_HOME", "CUDA_PATH")
            if name in os.environ
        ),
        "/usr/local/cuda/bin",
    ]

    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def run(prefix, process):
    """What this script prints as another process, behind `prefix`."""

    command = [*prefix, sys.executable, __file__, "--process", process]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }

    try:
        finished = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_PER_PROCESS,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")

        return f"{printed}\nstopped after {SECONDS_PER_PROCESS} seconds"

    if finished.returncode and not prefix:
        raise SystemExit(f"the calls failed by themselves:\n{finished.stdout}")

    return finished.stdout


def finds_an_overrun(sanitizer):
    """Whether memcheck reports an access that is out of bounds."""

    output = run([sanitizer, "--tool=memcheck", *OPTIONS], "overrun")
    summary = SUMMARY.search(output)
    is_found = summary is not None and int(summary[1]) > 0
    print(
        f"memcheck: a write out of bounds was {'' if is_found else 'NOT '}reported",
        flush=True,
    )

    if not is_found:
        print(output)

    return is_found


def is_clean_under(sanitizer, tool, made):
    """Whether all calls were made under a tool, and it reported nothing. Prints what it said."""

    command = [sanitizer, f"--tool={tool}", *OPTIONS]
    command += [f"--kernel-name=kernel_substring={name}" for name in made["kernels"]]

    if tool == "memcheck":
        # Room behind each allocation, so that what is past its end belongs to nobody.
        command.append("--padding=512")

    start = time.perf_counter()
    output = run(command, "calls")
    seconds = time.perf_counter() - start
    summary = SUMMARY.search(output)
    has_ended = json.dumps(made) in output.splitlines()
    is_clean = has_ended and summary is not None and int(summary[1]) == 0

    if not is_clean:
        print(output)

    print(f"{tool}: {summary[0] if summary else 'no summary'}; {seconds:.0f} s")

    if not has_ended:
        print(f"{tool}: the calls did not come to their end")

    sys.stdout.flush()

    return is_clean


def overrun():
    """Write behind the end of a tensor."""

    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def write_behind(pointer, size: tl.constexpr):
        tl.store(pointer + size + tl.arange(0, size), 1.0)

    write_behind[(1,)](torch.empty(128, device="cuda"), 128)
    torch.cuda.synchronize()


def make_calls(device):
    """Make every call, and say how many there were and of which kernels."""

    sys.path.insert(0, str(ROOT / "tests"))

    import torch

    kernels = set()
    count = 0

    if device == "cpu":
        launch_nothing()

    with noting(kernels):
        for calls, is_recording in (
            (norm_calls(device), False),
            (norm_gradients(device), True),
            (rope_calls(device), False),
            (rope_gradients(device), True),
            (pack_calls(device), False),
            (handle_calls(device, kernels), False),
        ):
            with torch.set_grad_enabled(is_recording):
                for call in calls:
                    # The whole way, from a plan, and prepared.
                    for _ in range(3):
                        call()

                    count += 1

    if device == "cuda":
        torch.cuda.synchronize()

    return {"calls": count, "kernels": sorted(kernels)}


def launch_nothing():
    """Let operators do everything on CPU tensors but the launch."""

    from ntops_ext.torch import (
        _launch,
        _qk_norm_rope,
        _qk_norm_rope_backward,
        _qk_norm_rope_pack,
    )

    for module in (_launch, _qk_norm_rope, _qk_norm_rope_backward, _qk_norm_rope_pack):
        module.launch = lambda handle, device, *args: None
        module.runs_kernel = lambda tensor: True


@contextlib.contextmanager
def noting(kernels):
    """Note the name of each kernel that is made for an operator."""

    from ntops_ext import _handles

    make = _handles._make

    def make_and_note(*options):
        handle = make(*options)
        kernels.add(handle._kernel.__name__)

        return handle

    _handles._make = make_and_note

    try:
        yield
    finally:
        _handles._make = make


def norm_calls(device):
    import torch
    from gated_rms_norm_calls import LAYOUTS, lay_out, make_call

    some, more = modes(device)

    for mode in (*some, *more):
        yield make_call(7, 128, dtype=torch.bfloat16, mode=mode, device=device).run
        yield make_call(7, 128, mode=mode, bias=True, device=device).run
        yield make_call(5, 192, mode=mode, group_size=64, device=device).run

    for mode in some:
        yield make_call(2, 3, 96, dtype=torch.float16, mode=mode, device=device).run
        yield make_call(7, 128, mode=mode, weight=False, device=device).run
        # Groups in pieces: held, and read twice.
        yield make_call(3, 1280, mode=mode, device=device).run
        yield make_call(2, 20000, mode=mode, device=device).run

    # As many rows as take a kernel that reads weight and bias after the sum.
    yield make_call(1030, 1100, dtype=torch.bfloat16, device=device).run

    for layout in LAYOUTS:
        call = make_call(5, 40, dtype=torch.bfloat16, device=device)
        tensors = {
            name: lay_out(call.tensors[name], layout)[0] for name in ("input", "gate")
        }
        out = lay_out(call.tensors["input"], layout)[0]
        call = call.with_tensors(**tensors)

        yield call.run
        yield functools.partial(call.run, out=out)
        yield functools.partial(call.run, out=tensors["input"])


def norm_gradients(device):
    import torch
    from gated_rms_norm_calls import make_call

    some, more = modes(device)
    calls = [
        make_call(7, 128, mode=mode, bias=True, device=device)
        for mode in (*some, *more)
    ]
    calls += [
        make_call(*shape, mode=mode, device=device, **options)
        for mode in some
        for shape, options in (
            ((5, 40), {"weight": False, "dtype": torch.bfloat16}),
            ((5, 192), {"group_size": 64}),
            ((2, 3, 96), {"dtype": torch.float16}),
            ((3, 1536), {}),
            ((2, 20000), {}),
        )
    ]

    for call in calls:
        tensors = [tensor.requires_grad_() for tensor in call.tensors.values()]

        yield functools.partial(gradients, call.run, tensors)


def modes(device):
    """Two modes that take every kind of call, and those that take some."""

    from gated_rms_norm_calls import MODES

    some = ["norm_first-silu", "gate_first-sigmoid"]

    return some, [mode for mode in MODES if mode not in some]


def gradients(function, tensors):
    import torch

    output = function()
    torch.autograd.grad(output, tensors, torch.ones_like(output))


def kinds_of_heads(device):
    """Widths and dtypes. How PyTorch rounds is not asked for: that takes large kernels of its own."""

    import torch

    from ntops_ext.torch import _eager, _qk_norm_rope

    kinds = [(head_dim, torch.bfloat16) for head_dim in (6, 64, 96, 128, 256)]
    kinds.append((128, torch.float32))

    for head_dim, dtype in kinds if device == "cuda" else ():
        key = torch.device("cuda", torch.cuda.current_device()), dtype, head_dim
        _qk_norm_rope.eager_roundings._found.setdefault(
            key, _eager.default_rounding(head_dim, "not asked for")
        )

    return kinds


def make_heads(device, head_dim, dtype):
    import torch
    from rope_inputs import make_rope

    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(2, 17, 3, head_dim, generator=generator, device=device)
    weight = torch.ones(head_dim, device=device, dtype=dtype)

    return input.to(dtype), weight, make_rope(17, head_dim, device, generator)


def rope_calls(device):
    import torch

    from ntops_ext.torch import qk_norm_rope

    for head_dim, dtype in kinds_of_heads(device):
        arguments = make_heads(device, head_dim, dtype)

        yield functools.partial(qk_norm_rope, *arguments)
        yield functools.partial(
            qk_norm_rope, *arguments, out=torch.empty_like(arguments[0])
        )


def rope_gradients(device):
    from ntops_ext.torch import qk_norm_rope

    for head_dim, dtype in kinds_of_heads(device):
        input, weight, rope = make_heads(device, head_dim, dtype)
        tensors = [input.requires_grad_(), weight.requires_grad_()]
        call = functools.partial(qk_norm_rope, *tensors, rope)

        yield functools.partial(gradients, call, tensors)

    # Each alone has a kernel of its own.
    for tensors_of_call in ((input, weight.detach()), (input.detach(), weight)):
        call = functools.partial(qk_norm_rope, *tensors_of_call, rope)
        tensors = [tensor for tensor in tensors_of_call if tensor.requires_grad]

        yield functools.partial(gradients, call, tensors)


def pack_calls(device):
    from rope_inputs import make_pack

    from ntops_ext.torch import qk_norm_rope_pack_

    def make(head_dim, dtype, heads=3, **options):
        return make_pack(
            batch=2,
            tokens=9,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            **{"kv_heads": 3, **options},
        )

    *others, kind = kinds_of_heads(device)

    for head_dim, dtype in others:
        yield functools.partial(qk_norm_rope_pack_, *make(head_dim, dtype).arguments())

    for options in (
        # In place, and copying the one, the other, or both.
        *({"sources": sources} for sources in ("", "k", "v", "kv")),
        {"prefix": 0},
        {"padding": 16},
        {"heads": 6, "kv_heads": 2},
    ):
        inputs = make(*kind, **options)

        yield functools.partial(qk_norm_rope_pack_, *inputs.arguments())

    # The prefixes are the buffers' own rows.
    inputs.k_prefix, inputs.v_prefix = inputs.k_out[:, :5], inputs.v_out[:, :5]

    yield functools.partial(qk_norm_rope_pack_, *inputs.arguments())


def handle_calls(device, kernels):
    import launch_cases

    import ninetoothed_patches
    from ninetoothed_patches import host_driver

    with host_driver.stand_in():
        five, eleven = (
            ninetoothed_patches.planned(make())
            for make in (launch_cases.five, launch_cases.eleven)
        )

    kernels.update(handle._kernel.__name__ for handle in (five, eleven))

    if device == "cpu":
        return

    for rows in (1, 16, 33):
        yield functools.partial(five, *launch_cases.arguments_of_five(device, rows))

    yield functools.partial(eleven, *launch_cases.arguments_of_eleven(device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

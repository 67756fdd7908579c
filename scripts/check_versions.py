"""Run the tests with every version of Python, PyTorch and Triton that is said to be supported.

An environment of its own is made for each row of `ENVIRONMENTS`, or for those that are named, and
kept for the next time. Nothing here needs a GPU.

    python scripts/check_versions.py [NAME...] [--output FILE.jsonl] [--jobs N] [-- PYTEST_ARGUMENT...]

NAME is such as `3.11-2.13.0-3.6.0`: Python, PyTorch, Triton; any part of a name stands for all
that have it. Each Python has to be on the path, as `python3.10` say. A Python and PyTorch that
are those of the environment that this runs in are taken from it. `--output` keeps the records of
what was not run. `--without-cuda` is for builds of PyTorch for NVIDIA's GPUs where there is no
GPU: their CUDA libraries, gigabytes, are replaced by `stand_in_cuda.py`'s.

An environment is tested by the tests of `TESTS`: those of launch plans, and some of each kernel
and of each use of PyTorch. `--full` runs all tests of these kinds.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import xml.etree.ElementTree

import stand_in_cuda
import torch
import update_readme_results

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What is installed.

    :param pins: Requirements beside those of pyproject.toml, installed without what they need.
    :param kinds: Of `TESTS`.
    """

    python: str
    torch: str
    triton: str
    pins: tuple[str, ...] = ()
    kinds: tuple[str, ...] = (
        "launch plans",
        "PyTorch",
        "compiled offline",
        "interpreted",
    )

    @property
    def name(self):
        return f"{self.python}-{self.torch}-{self.triton}"


# The interpreter up to Triton 3.6 takes one-element arrays for numbers, as NumPy did before 2.4.
_OLDER_NUMPY = ("numpy<2.4",)

ENVIRONMENTS = (
    # The oldest of everything, with the Triton that this PyTorch asks for.
    Environment(python="3.10", torch="2.7.1", triton="3.3.1", pins=("numpy==1.26.4",)),
    # Nothing is compiled offline with it.
    Environment(
        python="3.11",
        torch="2.13.0",
        triton="3.2.0",
        pins=_OLDER_NUMPY,
        kinds=("launch plans", "interpreted"),
    ),
    # What PyTorch does with the operators is the same with all of these.
    *(
        Environment(
            python="3.11",
            torch="2.13.0",
            triton=version,
            pins=pins,
            kinds=("launch plans", "compiled offline", "interpreted"),
        )
        for version, pins in (
            ("3.3.1", _OLDER_NUMPY),
            ("3.4.0", _OLDER_NUMPY),
            ("3.5.1", _OLDER_NUMPY),
            ("3.6.0", _OLDER_NUMPY),
            ("3.7.1", ()),
            ("3.8.0", ()),
        )
    ),
    Environment(python="3.11", torch="2.13.0", triton="3.9.0"),
    Environment(python="3.11", torch="2.14.1", triton="3.8.0"),
    Environment(python="3.12", torch="2.12.1", triton="3.9.0"),
    # The newest of everything, which belong together as well.
    Environment(python="3.13", torch="2.15.0", triton="3.9.0"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Tests of one kind.

    :param some: The tests that stand for all of them.
    :param all: The files of all of them.
    """

    some: tuple[str, ...]
    all: tuple[str, ...]
    interpret: bool = False


def _files(*names):
    return tuple(f"tests/{name}.py" for name in names)


def _tests(file, *names):
    return tuple(f"tests/{file}.py::{name}" for name in names)


_PLANS = _files(
    "test_call_key",
    "test_dependent_launch",
    "test_launch_differential",
    "test_launch_fuzz",
    "test_plan_cache",
    "test_triton_abi",
    "test_triton_runtime_auto_tuning",
)

TESTS = {
    "launch plans": Kind(
        some=_PLANS,
        all=_PLANS
        + _files(
            "test_launch_hazards",
            "test_materializer",
            "test_prepared_calls",
            "test_repeater",
            "test_source_files",
        ),
    ),
    "PyTorch": Kind(
        some=(
            *_tests(
                "test_compiled",
                "test_a_call_is_one_operator_in_the_graph",
                "test_a_compiled_call_has_the_bits_of_an_eager_one",
                "test_a_model_is_traced_once_for_all_numbers_of_rows",
                "test_an_exported_module_has_the_operator",
                "test_custom_operators_keep_pytorchs_rules",
                "test_gradients_of_rope_are_those_of_an_eager_call",
                "test_inductor",
            ),
            *_files("test_eager_rounding", "test_nn", "test_registry"),
        ),
        all=_files("test_compiled", "test_eager_rounding", "test_nn", "test_registry"),
    ),
    "compiled offline": Kind(
        some=(
            *_tests(
                "test_gated_rms_norm_offline",
                "test_a_row_of_one_warp_needs_no_barrier",
                "test_accesses_of_a_column_slice_are_wide",
                "test_accesses_of_a_row_that_programs_share",
                "test_it_compiles_for_an_amd_gpu",
            ),
            *_tests(
                "test_gated_rms_norm_backward_offline",
                "test_every_launch_compiles[1280-True-dtype0]",
                "test_every_launch_compiles[20000-False-dtype1]",
                "test_gradients_of_a_sigmoid_compile[dtype0]",
                "test_gradients_without_parameters_compile",
                "test_some_gradients_compile",
            ),
            *_tests(
                "test_qk_norm_rope_offline",
                "test_compiles_for_gfx942",
                "test_dense_heads_are_moved_by_16_bytes[sm_100-kv-3]",
                "test_dense_heads_are_moved_by_16_bytes[sm_90--2]",
                "test_nothing_leaves_the_warp",
                "test_single_tensor_is_moved_by_16_bytes",
            ),
            *_tests(
                "test_qk_norm_rope_backward_offline",
                "test_compiles_for_gfx942",
                "test_dense_heads_are_moved_by_16_bytes[32-(True, True)]",
                "test_nothing_leaves_the_warp",
                "test_partial_sums_are_read_by_32_bytes_a_row",
            ),
        ),
        all=_files(
            "test_gated_rms_norm_offline",
            "test_gated_rms_norm_backward_offline",
            "test_qk_norm_rope_offline",
            "test_qk_norm_rope_backward_offline",
        ),
    ),
    "interpreted": Kind(
        some=(
            *_tests(
                "interpreted/test_gated_rms_norm",
                "test_a_row_that_programs_share",
                "test_activations",
                "test_column_slices_of_real_models",
                "test_each_tensor_may_have_its_own_layout",
                "test_no_further_off_than_one_rounding_of_float32",
            ),
            *_tests(
                "interpreted/test_gated_rms_norm_backward",
                "test_gradients_are_right_in_16_bits",
                "test_only_what_is_needed_is_computed",
            ),
            *_tests(
                "interpreted/test_qk_norm_rope_pack",
                "test_bfloat16_is_within_its_roundings",
                "test_every_bit_is_that_of_the_written_out_steps",
                "test_launch_choices_change_no_bit",
                "test_packed_views_and_kept_prefixes",
            ),
            *_tests(
                "interpreted/test_qk_norm_rope_backward",
                "test_autograd_gives_them",
                "test_each_alone_has_the_bits_of_both",
            ),
            *_tests(
                "interpreted/test_compiled",
                "test_a_given_result_of_rope_is_written",
            ),
            *_files("interpreted/test_launch_bypass"),
        ),
        all=_files(
            "interpreted/test_compiled",
            "interpreted/test_gated_rms_norm",
            "interpreted/test_gated_rms_norm_backward",
            "interpreted/test_launch_bypass",
            "interpreted/test_qk_norm_rope_backward",
            "interpreted/test_qk_norm_rope_pack",
        ),
        interpret=True,
    ),
}


def make_environment(environment, folder, wheels, without_cuda):
    """The Python of an environment; made if it is not there."""

    place = folder / environment.name
    python = place / "bin" / "python"
    marker = place / "ready"

    if marker.exists():
        return python

    shared_python, shared = _share(environment, folder, wheels, without_cuda)
    shutil.rmtree(place, ignore_errors=True)
    _run(shared_python, "-m", "venv", "--without-pip", place)
    own = _packages(python)
    # Before 3.5 Triton needs `pkg_resources`-era setuptools at run time, which a new environment lacks.
    packages = ["setuptools<80", *environment.pins]

    if not list(shared.glob(f"triton-{environment.triton}.dist-info")):
        packages.append(f"triton=={environment.triton}")

    _run(
        *(shared_python, "-m", "pip", "install", "--quiet", "--no-deps"),
        *(*_links(wheels), "--target", own, *packages),
    )
    # Behind the environment's own packages, so that its Triton is found first.
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    marker.touch()

    return python


_sharing = threading.Lock()


def _share(environment, folder, wheels, without_cuda):
    """The Python, and the packages, of all environments of one Python and PyTorch."""

    here = (platform.python_version().rpartition(".")[0], torch.__version__)

    if here == (environment.python, environment.torch) or (
        here == (environment.python, f"{environment.torch}+cpu")
    ):
        return pathlib.Path(sys.executable), pathlib.Path(sysconfig.get_path("purelib"))

    place = folder / f"{environment.python}-{environment.torch}"
    python = place / "bin" / "python"

    with _sharing:
        if (place / "ready").exists():
            return python, _packages(python)

        base = shutil.which(f"python{environment.python}")

        if base is None:
            sys.exit(f"python{environment.python} is not on the path")

        _run(base, "-m", "venv", "--clear", place)
        install = (python, "-m", "pip", "install", "--quiet", *_links(wheels))
        release = f"torch=={environment.torch}"

        if without_cuda:
            _run(*install, "--no-deps", release, "--editable", ROOT)
            _run(*install, *_requirements(python))
            stand_in_cuda.make_stand_ins(_packages(python))
        else:
            _run(*install, release, "--editable", f"{ROOT}[testing]")

        (place / "ready").touch()

    return python, _packages(python)


_PRINT_REQUIREMENTS = """
import importlib.metadata
for name in ("torch", "ntops-ext"):
    print(*importlib.metadata.requires(name), sep="\\n")
"""


def _requirements(python):
    """What PyTorch and this package need, but for CUDA's libraries, PyTorch itself and Triton."""

    printed = _output(python, "-c", _PRINT_REQUIREMENTS)
    left_out = re.compile(r"(torch|triton|cuda-|nvidia-)")

    return [
        requirement.partition(";")[0].strip()
        for requirement in printed.splitlines()
        if not left_out.match(requirement)
        and ("extra ==" not in requirement or re.search(r"[\"']testing", requirement))
    ]


def _links(wheels):
    return ("--find-links", wheels) if wheels else ()


def _packages(python):
    return pathlib.Path(
        _output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    )


def _run(*command):
    subprocess.run(command, check=True)


def _output(*command, **options):
    return subprocess.run(
        command, check=True, capture_output=True, text=True, **options
    ).stdout.strip()


_PRINT_ENVIRONMENT = """
import importlib.metadata, json, os, sys
sys.path.append("scripts")
import environment
import triton
found = environment.describe_environment()
found |= {"triton": triton.__version__, "numpy": importlib.metadata.version("numpy")}
print(json.dumps(found))
"""


def check(environment, python, folder, is_full, arguments):
    """The record of an environment: what it is, and how its tests ended."""

    variables = {
        **os.environ,
        "HOME": str(folder / f"home-{environment.name}"),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Otherwise Inductor starts a process for each core, for two small kernels.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / f"cache-{environment.name}"),
        "TRITON_INTERPRET": "0",
    }
    pathlib.Path(variables["HOME"]).mkdir(exist_ok=True)
    found = json.loads(
        _output(python, "-c", _PRINT_ENVIRONMENT, env=variables, cwd=ROOT)
    )
    is_meant = (
        found["python"].startswith(f"{environment.python}.")
        and found["torch"].partition("+")[0] == environment.torch
        and found["triton"] == environment.triton
    )

    if not is_meant:
        sys.exit(f"the environment {environment.name} has {found}")

    outcomes = {}

    # Triton decides when it is imported whether it interprets kernels.
    for interpret in (False, True):
        kinds = {
            name: tests.all if is_full else tests.some
            for name, tests in TESTS.items()
            if tests.interpret == interpret and name in environment.kinds
        }
        variables["TRITON_INTERPRET"] = str(int(interpret))
        outcomes |= run_tests(python, kinds, arguments, variables) if kinds else {}

    return {
        "benchmark": "versions",
        "case": environment.name,
        "is_full": is_full,
        "outcomes": {name: outcomes[name] for name in TESTS if name in outcomes},
        "environment": found,
    }


def run_tests(python, kinds, arguments, variables):
    """By kind, the numbers of tests by outcome, and the names of those that failed."""

    tests = [test for names in kinds.values() for test in names]

    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        finished = subprocess.run(
            [
                *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("-m", "not gpu and not slow", f"--junitxml={report}"),
                *(*tests, *arguments),
            ],
            capture_output=True,
            text=True,
            env=variables,
            cwd=ROOT,
        )

        if finished.returncode:
            print(finished.stdout[-20_000:], finished.stderr[-5_000:], flush=True)

        cases = (
            list(xml.etree.ElementTree.parse(report).iter("testcase"))
            if report.exists()
            else []
        )

    outcomes = {
        name: _count(cases, {test.partition(".py")[0] for test in tests})
        for name, tests in kinds.items()
    }

    # A test that could not be found or imported is no case of its file.
    if finished.returncode and not any(one["failed"] for one in outcomes.values()):
        for outcome in outcomes.values():
            outcome["failures"].append(f"pytest ended with {finished.returncode}")
            outcome["failed"] += 1

    return outcomes


def _count(cases, modules):
    """What became of the tests of these modules, `tests/...` without `.py`."""

    modules = {module.replace("/", ".") for module in modules}
    cases = [case for case in cases if case.get("classname") in modules]
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failures) - len(skipped)
    ran = {case.get("classname") for case in cases if case not in skipped}

    # What is in such a file was not tried, however many tests of others passed.
    failures += [
        f"{module}: every test was skipped"
        for module in sorted({case.get("classname") for case in skipped} - ran)
    ]

    return {
        "passed": passed,
        "failed": len(failures),
        "skipped": len(skipped),
        "failures": failures,
    }


def write(records, output):
    """Put records into a file, in the order of `ENVIRONMENTS`, in the places of earlier ones."""

    if output.exists():
        earlier = [json.loads(line) for line in output.read_text().splitlines()]
        records = {record["case"]: record for record in earlier} | records

    order = [environment.name for environment in ENVIRONMENTS]
    lines = [json.dumps(records[name]) for name in order if name in records]
    output.write_text("".join(f"{line}\n" for line in lines))


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--jobs", type=int, default=1, help="environments at a time")
    parser.add_argument("--full", action="store_true", help="all tests of each kind")
    parser.add_argument("--without-cuda", action="store_true")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=ROOT / "build" / "versions",
        help="where the environments are made and kept",
    )
    parser.add_argument(
        "--wheels",
        type=pathlib.Path,
        help="a folder with wheels; what is not there is downloaded",
    )
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at])
    pytest_arguments = arguments[at + 1 :]
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [
        environment
        for environment in ENVIRONMENTS
        if not options.names or any(name in environment.name for name in options.names)
    ]

    if not chosen:
        parser.error(f"no environment has {' or '.join(options.names)} in its name")

    records = {}

    def run(environment):
        python = make_environment(
            environment, folder, options.wheels, options.without_cuda
        )
        is_full = options.full
        record = check(environment, python, folder, is_full, pytest_arguments)
        records[environment.name] = record
        print(*update_readme_results.versions_table([record]), sep="\n", flush=True)

        if options.output:
            with _writing:
                write({environment.name: record}, options.output)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for finished in [pool.submit(run, environment) for environment in chosen]:
            finished.result()

    in_order = [records[environment.name] for environment in chosen]
    print(*update_readme_results.versions_table(in_order), sep="\n")

    return int(any(update_readme_results.has_failed(record) for record in in_order))


_writing = threading.Lock()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

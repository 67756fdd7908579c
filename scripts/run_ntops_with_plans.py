"""ntops with launch plans for all its kernels: its own tests, and the host time of ten of its operators. Needs a GPU.

    python scripts/run_ntops_with_plans.py times NTOPS_FOLDER [--output FILE.jsonl]
    python scripts/run_ntops_with_plans.py tests NTOPS_FOLDER [--files FILE...] [--parts N [--only PART...]] [--jobs N]
        [--gpus N] [--timeout SECONDS] [-- PYTEST_ARGUMENT...]

NTOPS_FOLDER is a checkout of ntops; it need not be installed. `tests` runs each file of its suite twice, unpatched and
patched, and compares the outcome of each test. `--parts` deals the tests of a file out to so many processes: a few
files tune for many minutes.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

from command_line import require_gpu

ROOT = pathlib.Path(__file__).resolve().parent.parent

PROGRAM = """\
import sys
import pytest
import ninetoothed_patches

way, part, parts, *arguments = sys.argv[1:]


class OnePart:
    def pytest_collection_modifyitems(self, config, items):
        items[:] = items[int(part) :: int(parts)]


if way == "patched":
    assert ninetoothed_patches.apply()

status = pytest.main(arguments, plugins=[OnePart()])
info = ninetoothed_patches.cache_info()
print(f"hits {info.hits}, misses {info.misses}, bypasses {info.bypasses}, handles {len(info.handles)}")
sys.exit(status)
"""


def run_tests(folder, options):
    """Run the suite both ways, part by part; the number of parts of which some test has another outcome."""

    files = [folder / "tests" / name for name in options.files or ()]
    files = files or sorted((folder / "tests").glob("test_*.py"))
    numbers = options.only or range(1, options.parts + 1)
    parts = [(file, number - 1) for file in files for number in numbers]

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        comparisons = [
            pool.submit(compare_part, folder, *part, number, options)
            for number, part in enumerate(parts)
        ]
        num_tests = num_differing = num_unfinished = 0

        for comparison in concurrent.futures.as_completed(comparisons):
            line, tests, differing = comparison.result()
            print(line, flush=True)
            num_tests += tests
            num_differing += differing
            num_unfinished += tests == 0

    print(
        f"{len(files)} files in {len(parts)} parts, {num_tests} tests, {num_differing} with another outcome,"
        f" {num_unfinished} parts without a test that ran to its end"
    )

    return num_differing + num_unfinished


def compare_part(folder, file, part, number, options):
    """A line about one part of a file, the number of its tests, and how many of them have another outcome when patched."""

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "src"), *sys.path[1:]]),
        "CUDA_VISIBLE_DEVICES": str(number % options.gpus),
    }
    outcomes, last_lines = {}, {}

    # NineToothed's and Triton's files of their own: processes that share them wait for one another, or read half a file.
    # The second way finds its kernels compiled.
    with tempfile.TemporaryDirectory() as home:
        environment |= {"HOME": home, "TRITON_CACHE_DIR": f"{home}/triton"}

        for way in ("unpatched", "patched"):
            report = pathlib.Path(home, f"{way}.xml")
            command = [
                sys.executable,
                "-c",
                PROGRAM,
                way,
                str(part),
                str(options.parts),
            ]
            command += [str(file), "-q", "--tb=line", "-p", "no:cacheprovider"]
            command += [f"--junitxml={report}"]
            outcomes[way] = {}

            try:
                finished = subprocess.run(
                    [*command, *options.pytest],
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=options.timeout,
                )
            except subprocess.TimeoutExpired:
                last_lines[way] = "not finished in time"

                continue

            last_lines[way] = finished.stdout.strip().splitlines()[-1]

            if report.exists():
                outcomes[way] = outcomes_of(report)

    name = file.stem

    if options.parts > 1:
        name += f", part {part + 1} of {options.parts}"

    if not outcomes["unpatched"] or not outcomes["patched"]:
        return f"{name}: {last_lines}", 0, 0

    differing = {
        test: [outcomes[way].get(test) for way in outcomes]
        for test in outcomes["unpatched"].keys() | outcomes["patched"].keys()
        if outcomes["unpatched"].get(test) != outcomes["patched"].get(test)
    }
    kinds = collections.Counter(outcomes["patched"].values())
    line = f"{name}: {dict(kinds)}, {len(differing)} with another outcome; {last_lines['patched']}"

    if differing:
        line += f" {differing}"

    return line, len(outcomes["unpatched"]), len(differing)


def outcomes_of(report):
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (
                child.tag
                for child in case
                if child.tag in ("failure", "error", "skipped")
            ),
            "passed",
        )
        for case in xml.etree.ElementTree.parse(report).iter("testcase")
    }


def operators(torch, ntops):
    x, y = (torch.randn(32, 128, device="cuda") for _ in range(2))
    weight = torch.randn(128, device="cuda")

    return {
        "add": lambda: ntops.torch.add(x, y),
        "mul": lambda: ntops.torch.mul(x, y),
        "relu": lambda: ntops.torch.relu(x),
        "silu": lambda: ntops.torch.silu(x),
        "gelu": lambda: ntops.torch.gelu(x),
        "sigmoid": lambda: ntops.torch.sigmoid(x),
        "exp": lambda: ntops.torch.exp(x),
        "cos": lambda: ntops.torch.cos(x),
        "softmax": lambda: ntops.torch.softmax(x, -1),
        "rms_norm": lambda: ntops.torch.rms_norm(x, (128,), weight, 1e-5),
    }


def measure(folder, output):
    """Host time of a call, unpatched and patched."""

    sys.path[:0] = [str(ROOT), str(folder / "src")]

    import ntops
    import results
    import torch
    from environment import describe_environment, print_environment
    from timing import host_times

    import ninetoothed_patches

    # Fewer candidates: what is tuned does not matter to the host.
    ntops.torch.utils.set_default_max_num_configs(2)
    x, y, z = (torch.randn(32, 128, device="cuda") for _ in range(3))
    floor = {"torch.add(x, y, out=z)": lambda: torch.add(x, y, out=z)}
    times = {}

    for way in ("unpatched", "patched"):
        if way == "patched":
            assert ninetoothed_patches.apply()

        ntops.torch.utils._cached_make.cache_clear()
        times[way] = host_times(floor | operators(torch, ntops), rounds=15, calls=200)

    info = ninetoothed_patches.cache_info()
    environment = describe_environment()
    records = [
        {
            "operator": name,
            "unpatched": times["unpatched"][name]["median"],
            "patched": times["patched"][name]["median"],
        }
        for name in times["unpatched"]
    ]
    results.write(output, records, environment)
    print_environment(environment)
    print(f"hits {info.hits}, misses {info.misses}, bypasses {info.bypasses}")
    print(f"{'operator':24} {'unpatched':>10} {'patched':>10}   us, output allocated")

    for record in records:
        print(
            f"{record['operator']:24} {record['unpatched']:10.2f} {record['patched']:10.2f}"
        )

    return 0


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["times", "tests"])
    parser.add_argument("folder", type=pathlib.Path, help="a checkout of ntops")
    parser.add_argument("--output", type=pathlib.Path, help="a file for JSON lines")
    parser.add_argument("--files", nargs="+", help="of NTOPS_FOLDER/tests; all of them")
    parser.add_argument("--parts", type=int, default=1, help="processes a file")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="PART", help="these parts, from 1"
    )
    parser.add_argument("--jobs", type=int, default=4, help="processes at once")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs that files take turns on"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds a process")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()

    if not set(options.only or ()) <= set(range(1, options.parts + 1)):
        parser.error(f"--only: {options.only}, of {options.parts} parts, from 1")

    if not (folder / "src" / "ntops").is_dir():
        parser.error(f"folder: {folder} is no checkout of ntops, it has no src/ntops")

    require_gpu(parser, options.what)

    if options.what == "tests":
        return int(run_tests(folder, options) > 0)

    return measure(folder, options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

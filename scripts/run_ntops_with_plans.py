"""ntops with launch plans for all its kernels: its own tests, and the host time of ten of its operators. Needs a GPU.

    python scripts/run_ntops_with_plans.py times NTOPS_FOLDER [--output FILE.jsonl]
    python scripts/run_ntops_with_plans.py tests NTOPS_FOLDER [-- PYTEST_ARGUMENT...]

NTOPS_FOLDER is a checkout of ntops; it need not be installed. `tests` runs its suite twice at once, unpatched and patched, and
compares the outcome of each test.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent

PATCHED = """\
import sys
import pytest
import ninetoothed_patches

assert ninetoothed_patches.apply()
status = pytest.main(sys.argv[1:])
info = ninetoothed_patches.cache_info()
print(f"hits {info.hits}, misses {info.misses}, bypasses {info.bypasses}, handles {len(info.handles)}")
sys.exit(status)
"""

UNPATCHED = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def run_tests(folder, arguments):
    """Run the suite both ways; the number of tests whose outcome differs."""

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "src"), *sys.path[1:]]),
    }

    with tempfile.TemporaryDirectory() as reports:
        runs = {}

        for name, program in (("unpatched", UNPATCHED), ("patched", PATCHED)):
            report = pathlib.Path(reports) / f"{name}.xml"
            command = [sys.executable, "-c", program, "tests", "-q", "--tb=line"]
            command += ["-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
            runs[name] = (
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                ),
                report,
            )

        outcomes = {}

        for name, (process, report) in runs.items():
            output, _ = process.communicate()
            print(f"== {name}", *output.strip().splitlines()[-4:], sep="\n")
            outcomes[name] = outcomes_of(report)

    differing = [
        test
        for test in outcomes["unpatched"].keys() | outcomes["patched"].keys()
        if outcomes["unpatched"].get(test) != outcomes["patched"].get(test)
    ]

    for test in sorted(differing):
        print(
            test, outcomes["unpatched"].get(test), "->", outcomes["patched"].get(test)
        )

    print(f"{len(outcomes['unpatched'])} tests, {len(differing)} with another outcome")

    return len(differing)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["times", "tests"])
    parser.add_argument("folder", type=pathlib.Path, help="a checkout of ntops")
    parser.add_argument("--output", type=pathlib.Path, help="a file for JSON lines")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    folder = options.folder.resolve()

    if options.what == "tests":
        return int(run_tests(folder, options.pytest) > 0)

    return measure(folder, options.output)


if __name__ == "__main__":
    sys.exit(main())

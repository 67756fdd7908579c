"""Break the product in one place after the other, and see whether the tests notice.

Each mutation of `mutations.py` is made in a copy of the tree in a temporary folder, where the
tests run that should notice it, without a GPU, up to the first failure. The tests that noticed
run again in the end, without any mutation: one that fails then as well has noticed nothing. The
exit status is 0 if every mutation was noticed.

    python scripts/check_mutations.py [NAME...] [--whole-suite] [--output FILE.jsonl]
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import results
from environment import describe_environment, print_environment
from mutations import MUTATIONS

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What is no part of the tree: histories, environments, caches.
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
)

_TESTS_PASSED, _TESTS_FAILED, _COLLECTION_FAILED = 0, 1, 2

_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.M)


def main(arguments):
    options = _parse(arguments)
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    chosen = [by_name[name] for name in options.names or by_name]
    environment = describe_environment()
    print_environment(environment)
    print("| mutation | noticed by | seconds |\n| --- | --- | --- |", flush=True)
    records = []

    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_NOT_COPIED)

        with contextlib.closing(_Tests(tree, pathlib.Path(folder))) as tests:
            for mutation in chosen:
                records.append(_check(mutation, tree, tests, options.whole_suite))
                # At once: the whole run may take hours, and what was seen stays.
                results.write(options.output, records, environment)
                print(_row(records[-1]), flush=True)

            broken = _failures_without_mutation(tests, records)

    survivors = [record["mutation"] for record in records if not record["noticed_by"]]
    print(f"\n{len(records) - len(survivors)} of {len(records)} noticed.")

    if survivors:
        print(f"Survived: {', '.join(survivors)}.")

    if broken:
        print(f"Fail without any mutation, too: {', '.join(broken)}.")

    return 1 if survivors or broken else 0


def _parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of mutations; all by default"
    )
    parser.add_argument(
        "--whole-suite",
        action="store_true",
        help="run all tests where those that should notice a mutation do not",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="FILE.jsonl", help="for the records"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {mutation.name for mutation in MUTATIONS}

    if unknown:
        parser.error(f"NAME: no mutation is called {', '.join(sorted(unknown))}")

    return options


def _check(mutation, tree, tests, whole_suite):
    """Run the tests that should notice a mutation of `tree`, and say which of them does."""

    start = time.perf_counter()
    ran = [*mutation.tests]

    with _mutated(tree / mutation.file, mutation):
        noticed_by = tests.first_failure(ran)

        if noticed_by is None and whole_suite:
            ran = ["tests", "tests/interpreted"]
            noticed_by = tests.first_failure(ran)

    return {
        "check": "mutations",
        "mutation": mutation.name,
        "file": mutation.file,
        "promise": mutation.promise,
        "tests": ran,
        "noticed_by": noticed_by,
        "seconds": round(time.perf_counter() - start, 1),
    }


@contextlib.contextmanager
def _mutated(path, mutation):
    source = path.read_text(encoding="utf-8")
    count = source.count(mutation.old)

    if count != 1:
        raise ValueError(
            f"`old` of the mutation {mutation.name} must occur in {mutation.file} exactly"
            f" once, but occurs {count} times."
        )

    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")

    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


class _Tests:
    """Runs tests of a tree, interpreted or not, each time in a process of its own."""

    def __init__(self, tree, folder):
        self._tree = tree
        self._folder = folder
        self._servers = {}

    def first_failure(self, tests):
        """The first of these tests that fails, or None."""

        for test in tests:
            failures = self.failures([test], "-x")

            if failures:
                return failures[0]

        return None

    def failures(self, tests, *options):
        """Which of these tests fail, all of which are interpreted or none."""

        output = self._folder / "output.txt"
        request = {
            "folder": str(self._tree),
            "arguments": [
                *("-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"),
                # It would notice every mutation, as one that was made already.
                "--ignore=tests/test_mutations.py",
                *options,
                *tests,
            ],
            "environment": {
                "PYTHONPATH": str(self._tree),
                # A line of the summary is a whole name.
                "COLUMNS": "1000",
            },
            "output": str(output),
        }
        server = self._server(tests[0].startswith("tests/interpreted"))
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        printed = output.read_text(encoding="utf-8", errors="replace")

        if status == _TESTS_PASSED:
            return []

        if status < 0:
            return [f"{tests[0]} (ended by signal {-status})"]

        found = _FAILURE.findall(printed)

        if status not in (_TESTS_FAILED, _COLLECTION_FAILED) or not found:
            raise RuntimeError(
                f"pytest must run to its end, but it ended with {status}:\n{printed}"
            )

        return found

    def _server(self, is_interpreted):
        # Triton decides when it is imported whether it interprets kernels.
        if is_interpreted not in self._servers:
            self._servers[is_interpreted] = subprocess.Popen(
                [sys.executable, ROOT / "scripts" / "forked_tests.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "HOME": str(self._folder),
                    # A file that is changed twice within a second would be taken for
                    # its bytecode.
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "TRITON_INTERPRET": "1" if is_interpreted else "0",
                },
            )

        return self._servers[is_interpreted]

    def close(self):
        for server in self._servers.values():
            server.stdin.close()
            server.stdout.close()
            server.wait()


def _failures_without_mutation(tests, records):
    """Which of the tests that noticed fail on the tree as it is."""

    noticing = sorted(
        {
            record["noticed_by"]
            for record in records
            if record["noticed_by"] and not record["noticed_by"].endswith(")")
        }
    )
    groups = [
        [test for test in noticing if test.startswith("tests/interpreted") == choice]
        for choice in (False, True)
    ]

    return [failure for group in groups if group for failure in tests.failures(group)]


def _row(record):
    noticed_by = record["noticed_by"]
    noticed_by = f"`{noticed_by}`" if noticed_by else "**survived**"

    return f"| {record['mutation']} | {noticed_by} | {record['seconds']:.0f} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

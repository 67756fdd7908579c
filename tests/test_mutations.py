"""The list of mistakes of scripts/mutations.py: each can still be made in the product as it is."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts"))

from mutations import MUTATIONS  # noqa: E402


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_made(mutation):
    """Its place is there, exactly once; what it makes of it is Python; its tests are there."""

    source = (ROOT / mutation.file).read_text(encoding="utf-8")

    assert source.count(mutation.old) == 1

    mutated = source.replace(mutation.old, mutation.new)

    assert mutated != source

    compile(mutated, mutation.file, "exec")

    assert mutation.tests

    for test in mutation.tests:
        path, _, name = test.partition("::")

        assert (ROOT / path).is_file()
        assert not name or _has_test(ROOT / path, name)


def _has_test(path, name):
    """Whether a module has a test, or imports all tests of one that does."""

    source = path.read_text(encoding="utf-8")

    return f"def {name}(" in source or any(
        f"from {behaviour.stem} import *" in source
        and f"def {name}(" in behaviour.read_text(encoding="utf-8")
        for behaviour in (ROOT / "tests").glob("*_behaviour.py")
    )


def test_mutations_are_told_apart():
    """There are enough of them, by names that are theirs alone, and no two are the same."""

    assert len(MUTATIONS) >= 40
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({(one.file, one.old, one.new) for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.slow
def test_the_check_tells_what_noticed(tmp_path):
    """One mutation from end to end: made in a copy, noticed there, and not in the copy as it was."""

    output = tmp_path / "records.jsonl"
    finished = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "check_mutations.py"),
            *("pieces-by-the-number-of-groups", "--output", output),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 of 1 noticed." in finished.stdout

    (record,) = map(json.loads, output.read_text().splitlines())

    assert record["noticed_by"].startswith("tests/test_configs.py::test_")
    assert "commit" in record["environment"]

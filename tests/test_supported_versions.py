"""What is said to be supported is what `scripts/check_versions.py` was run with."""

import pathlib
import re
import sys

import pytest
from packaging import specifiers

ROOT = pathlib.Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts"))

import check_versions  # noqa: E402
import results  # noqa: E402
import update_readme_results  # noqa: E402

from ninetoothed_patches import triton_abi  # noqa: E402

PROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def records():
    """Those that the README quotes."""

    folder = re.search(r"results: supported-versions (\S+)", README)[1]

    return results.read(update_readme_results.FOLDERS / folder / "versions.jsonl")


def required(package):
    """The range of a package, or of Python, in pyproject.toml."""

    line = 'requires-python = "' if package == "python" else f'    "{package}'
    (found,) = re.findall(rf'^{line}([<>=][^"]*)",?$', PROJECT, re.M)

    return found


def tried(records, package):
    return update_readme_results.tried(records, package)


def test_every_record_is_of_an_environment_and_has_no_failure(records):
    """Nothing is said to work that did not, or that the command does not make."""

    environments = {one.name: one for one in check_versions.ENVIRONMENTS}

    for record in records:
        kinds = environments[record["case"]].kinds

        assert record["outcomes"].keys() <= {*kinds}, record["case"]
        assert not update_readme_results.has_failed(record), record["case"]


@pytest.mark.parametrize("package", ["torch", "triton", "numpy"])
def test_the_range_of_a_package_is_what_was_tried(records, package):
    """In pyproject.toml, from the oldest to the last patch of the newest."""

    assert required(package) == update_readme_results.supported(tried(records, package))


def test_the_range_and_the_classifiers_of_python_are_what_was_tried(records):
    """Each minor version of it."""

    versions = tried(records, "python")

    assert required("python") == update_readme_results.supported(versions)
    assert versions == [
        (3, int(minor)) for minor in re.findall(r"Python :: 3\.(\d+)\"", PROJECT)
    ]


@pytest.mark.parametrize("package", ["python", "triton"])
def test_launch_plans_were_tried_with_every_minor_version_between(records, package):
    """What is launched differs from one to the next."""

    versions = update_readme_results.tried(records, package, {"launch plans"})
    (major, oldest), (_, newest) = versions[0][:2], versions[-1][:2]

    assert {version[:2] for version in versions} == {
        (major, minor) for minor in range(oldest, newest + 1)
    }


def test_launch_plans_are_applied_to_each_triton_that_was_tried(records):
    """`apply` accepts these and no other."""

    versions = update_readme_results.tried(records, "triton", {"launch plans"})

    assert versions[0][:2] == triton_abi.OLDEST
    assert versions[-1][:2] == triton_abi.NEWEST


@pytest.mark.parametrize("package", ["python", "torch", "triton"])
def test_a_machine_with_a_gpu_that_gave_results_may_keep_what_it_has(package):
    """Installing this package there replaces neither its PyTorch nor its Triton."""

    environments = update_readme_results.environments_with_a_gpu(
        update_readme_results.FOLDERS
    )
    supported = specifiers.SpecifierSet(required(package))

    assert environments

    for environment in environments:
        assert environment[package] in supported


def test_the_readme_says_what_was_tried(records):
    """Outside its table, too."""

    text = " ".join(README.split())

    for package, sentence in (
        ("python", "Python {} on Linux"),
        ("torch", "Any PyTorch from {} will do"),
    ):
        words = update_readme_results.in_words(tried(records, package))

        assert sentence.format(words) in text


def test_a_version_with_a_failure_is_not_supported():
    """Nor is one in which tests of a kind were left out."""

    def record(torch, python="3.11.7", **failed):
        return {
            "environment": {"torch": torch, "python": python, "triton": "3.9.0"},
            "outcomes": {
                kind: {"passed": 5, "failed": number, "skipped": 0}
                for kind, number in failed.items()
            },
        }

    records = [
        record("2.7.1+cpu", plans=0, PyTorch=0),
        record("2.8.0", plans=0, PyTorch=1),
        record("2.10.2", plans=0, PyTorch=0),
        record("2.12.0", "3.12.1", plans=0),
    ]

    assert tried(records, "torch") == [(2, 7, 1), (2, 10, 2)]
    assert update_readme_results.supported(tried(records, "torch")) == ">=2.7.1,<2.11"
    assert update_readme_results.tried(records, "torch", {"plans"}) == [
        (2, 7, 1),
        (2, 10, 2),
        (2, 12, 0),
    ]
    assert update_readme_results.supported(tried(records, "python")) == ">=3.11,<3.12"

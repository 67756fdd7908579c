"""How versions of Python, PyTorch and Triton are tried, without making environments."""

import ctypes
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts"))

import check_versions  # noqa: E402
import stand_in_cuda  # noqa: E402
import update_readme_results  # noqa: E402


def test_what_stands_for_all_tests_exists():
    """A test that is renamed is renamed there."""

    behaviours = "".join(path.read_text() for path in ROOT.glob("tests/*_behaviour.py"))

    for kind in check_versions.TESTS.values():
        for test in (*kind.some, *kind.all):
            file, _, name = test.partition("[")[0].partition("::")
            text = (ROOT / file).read_text()

            assert not name or f"def {name}(" in text + behaviours, test


def test_records_take_the_places_of_earlier_ones(tmp_path):
    """A run of one environment leaves the others', in the order of the command."""

    first, second, *_ = [one.name for one in check_versions.ENVIRONMENTS]
    output = tmp_path / "versions.jsonl"

    for name, value in ((second, 1), (first, 2), (second, 3)):
        check_versions.write({name: {"case": name, "value": value}}, output)

    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"case": first, "value": 2},
        {"case": second, "value": 3},
    ]


def outcomes_of(folder, text, monkeypatch, file="tests/test_it.py"):
    """How `check_versions` reads a run of a test file of this text, and of one that passes."""

    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(text)
    (folder / "tests" / "test_other.py").write_text("def test_other():\n    pass\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    slow\n")
    monkeypatch.setattr(check_versions, "ROOT", folder)

    return check_versions.run_tests(
        sys.executable,
        {"kind": (file,), "other": ("tests/test_other.py",)},
        [],
        None,
    )


def test_outcomes_are_counted_by_kind(tmp_path, monkeypatch):
    """Passed, failed, skipped, and errors of fixtures; what needs a GPU is left out."""

    outcomes = outcomes_of(
        tmp_path,
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_passes(number): pass\n"
        "def test_fails(): assert False\n"
        "def test_errs(missing): pass\n"
        "@pytest.mark.skip(reason='of this')\n"
        "def test_skipped(): pass\n"
        "@pytest.mark.gpu\n"
        "def test_on_a_gpu(): assert False\n",
        monkeypatch,
    )

    assert outcomes == {
        "kind": {
            "passed": 3,
            "failed": 2,
            "skipped": 1,
            "failures": ["tests.test_it::test_fails", "tests.test_it::test_errs"],
        },
        "other": {"passed": 1, "failed": 0, "skipped": 0, "failures": []},
    }


@pytest.mark.parametrize(
    "text, file",
    [
        ("import absent\n", "tests/test_it.py"),
        ("def test_it(): pass\n", "tests/test_it.py::test_absent"),
        ("import os\nos._exit(3)\n", "tests/test_it.py"),
    ],
    ids=["not_imported", "not_found", "ended"],
)
def test_tests_that_did_not_run_are_a_failure(text, file, tmp_path, monkeypatch):
    """No report is no success."""

    outcomes = outcomes_of(tmp_path, text, monkeypatch, file)

    assert update_readme_results.has_failed({"outcomes": outcomes})
    assert any(outcome["failures"] for outcome in outcomes.values())


def test_a_file_of_which_all_tests_are_skipped_is_a_failure(tmp_path, monkeypatch):
    """The kernel of that file was not compiled, whatever others were."""

    outcomes = outcomes_of(
        tmp_path,
        "import pytest\n"
        "@pytest.mark.skip(reason='of this')\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_skipped(number): pass\n",
        monkeypatch,
    )

    assert outcomes["kind"]["skipped"] == 3
    assert outcomes["kind"]["failures"] == ["tests.test_it: every test was skipped"]
    assert not outcomes["other"]["failures"]


def test_a_failure_is_seen_in_the_table():
    """Next to what passed and what was skipped."""

    record = {
        "environment": dict.fromkeys(
            ("python", "torch", "triton", "numpy", "commit"), "1.0"
        ),
        "outcomes": {
            "some kind": {"passed": 5, "failed": 2, "skipped": 3, "failures": ["a"]}
        },
        "is_full": True,
    }
    *_, row = update_readme_results.versions_table([record])

    assert "| 5, 2 failed (3 skipped) | all | 1.0 |" in row
    assert update_readme_results.has_failed(record)


@pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("readelf") is None,
    reason="needs a C compiler and readelf",
)
def test_libraries_that_stand_in_for_cuda(tmp_path):
    """A library of PyTorch that needs CUDA's can be loaded, and is told that there is no device."""

    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    cuda = tmp_path / "libcudart.so.12"
    (tmp_path / "versions").write_text(
        "libcudart.so.12 { global: cudaGetIt; cudaGetErrorString; };\n"
    )
    (tmp_path / "cuda.c").write_text(
        "int cudaGetIt(void) { return 0; }\nint nvrtcGetIt(void) { return 0; }\n"
        'const char *cudaGetErrorString(int status) { return "fine"; }\n'
    )
    (tmp_path / "torch.c").write_text(
        "int cudaGetIt(void), nvrtcGetIt(void);\n"
        "const char *cudaGetErrorString(int status);\n"
        "const char *explain(void) { return cudaGetErrorString(1); }\n"
        "int first(void) { return cudaGetIt(); }\n"
        "int second(void) { return nvrtcGetIt(); }\n"
    )
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{cuda.name}", "-o", cuda]
    script = f"-Wl,--version-script={tmp_path / 'versions'}"
    library = folder / "libtorch_cuda.so"
    subprocess.run([*command, tmp_path / "cuda.c", script], check=True)
    subprocess.run(
        [
            *("cc", "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-o", library),
            *(tmp_path / "torch.c", cuda),
        ],
        check=True,
    )
    cuda.unlink()

    with pytest.raises(OSError, match=cuda.name):
        ctypes.CDLL(str(library))

    assert stand_in_cuda.make_stand_ins(tmp_path) == [cuda.name]

    loaded = ctypes.CDLL(str(library))

    assert loaded.first() == loaded.second() == stand_in_cuda.NO_DEVICE

    loaded.explain.restype = ctypes.c_char_p

    assert loaded.explain() == b"no device"
    assert stand_in_cuda.make_stand_ins(tmp_path) == []

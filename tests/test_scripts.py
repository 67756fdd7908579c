"""The scripts: each runs to its end without a GPU, and the documents say what the results say.

Those that run kernels in Triton's interpreter are in interpreted/test_scripts.py.
"""

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
RESULTS = sorted((ROOT / "docs" / "results").glob("*/*.jsonl"))

sys.path.insert(0, str(SCRIPTS))

import results  # noqa: E402
import update_readme_results  # noqa: E402


def run(script, *arguments):
    """What a script prints, in a process of its own. It must succeed."""

    finished = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
        timeout=300,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    # What a library says of objects that outlive the interpreter.
    assert "leaked" not in finished.stderr, finished.stderr

    return finished.stdout


# The script, and whether it says that its times are not a device's in these words.
BENCHMARKS = {
    "benchmark_calls.py": "not those of a device",
    "benchmark_launch.py": "not those of a device",
    "measure_first_call.py": "tuned: 0",
    "profile_launch.py": "not those of a device",
    "reproduce_submission.py": "mean nothing",
    "soak.py": "not those of a device",
}


@pytest.mark.parametrize("script", BENCHMARKS)
def test_a_benchmark_on_a_cpu(script, tmp_path):
    """It ends, says what its times are worth, and writes its environment into each record."""

    output = tmp_path / "records.jsonl"
    printed = run(script, "--device", "cpu", "--quick", "--output", output)

    assert BENCHMARKS[script] in printed

    records = [json.loads(line) for line in output.read_text().splitlines()]

    assert records

    for record in records:
        assert record["benchmark"]
        assert record["device"] == "cpu"
        assert {"commit", "date", "torch", "gpu"} <= record["environment"].keys()


@pytest.mark.parametrize(
    "script",
    sorted(
        path.name for path in SCRIPTS.glob("*.py") if "\ndef main(" in path.read_text()
    ),
)
def test_every_script_is_run_here_or_named(script):
    """A new script is tested, or stands here with the reason."""

    untested = {
        "check_mutations.py": "has a test in test_mutations.py",
        "check_versions.py": "makes environments, and has tests of its parts",
        "forked_tests.py": "is run by check_mutations.py",
        "plot_results.py": "has a test of its own",
        "run_ntops_with_plans.py": "needs a GPU and a checkout of ntops",
        "run_sanitizer.py": "has a test of its own",
        "run_tests.py": "runs this, and has a test of how it ends",
        "stand_in_cuda.py": "has a test of its own",
        "update_readme_results.py": "has a test of its own",
    }

    interpreted = (ROOT / "tests" / "interpreted" / "test_scripts.py").read_text()
    is_tested = script in BENCHMARKS or f'"{script.removesuffix(".py")}"' in interpreted

    assert is_tested != (script in untested)


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ((0, 0), 0),
        ((5, 0), 0),
        ((0, 5), 0),
        ((5, 5), 5),
        ((1, 0), 1),
        ((5, 1), 1),
        ((0, -11), -11),
        ((-9, 5), -9),
    ],
    ids=str,
)
def test_the_suite_fails_if_one_of_its_runs_does(statuses, expected, monkeypatch):
    """Also where a signal ended it, whose status is negative; a run without tests is no failure."""

    run_tests = importlib.import_module("run_tests")
    ended = iter(statuses)
    monkeypatch.setattr(
        run_tests.subprocess,
        "run",
        lambda *_, **__: subprocess.CompletedProcess((), next(ended)),
    )
    assert run_tests.main([]) == expected


@pytest.mark.parametrize("what", ["times", "tests"])
def test_ntops_is_run_on_a_gpu(what, tmp_path, monkeypatch, capsys):
    """Without ntops, or without a GPU, the script ends with a message."""

    main = importlib.import_module("run_ntops_with_plans").main
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    for message in (f"{tmp_path} is no checkout", f"{what}: PyTorch finds no CUDA"):
        with pytest.raises(SystemExit) as exit_status:
            main([what, str(tmp_path)])

        assert exit_status.value.code == 2
        assert message in capsys.readouterr().err

        (tmp_path / "src" / "ntops").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("part", ["0", "4"])
def test_parts_of_ntops_tests_that_there_are_not_are_refused(part, tmp_path, capsys):
    """Before anything runs."""

    main = importlib.import_module("run_ntops_with_plans").main

    with pytest.raises(SystemExit):
        main(["tests", str(tmp_path), "--parts", "3", "--only", "1", part])

    assert f"--only: [1, {part}], of 3 parts" in capsys.readouterr().err


@pytest.mark.slow
def test_the_sanitizer_is_shown_every_kernel():
    """Calls of each kernel in ntops_ext/kernels, and of handles with plans."""

    made = json.loads(run("run_sanitizer.py", "--device", "cpu").splitlines()[-1])
    applications = re.compile(
        r"^def (\w+_application|qk_norm_rope_pack_(?:in_place|from_\w+)"
        r"|qk_norm_rope_backward_of_\w+)\(",
        re.MULTILINE,
    )
    names = {
        name
        for path in (ROOT / "ntops_ext" / "kernels").glob("*.py")
        for name in applications.findall(path.read_text())
    }

    assert len(names) > 10
    assert names <= set(made["kernels"])
    assert "launch_case_five_tensors" in made["kernels"]


FAKE_SANITIZER = """\
#!/bin/sh
for argument in "$@"; do last=$argument; done
if [ "$last" = overrun ]; then echo "========= ERROR SUMMARY: {found} errors"; exit; fi
echo '{made}'
echo "========= {summary}"
"""


@pytest.mark.parametrize(
    ("found", "made", "summary", "status"),
    [
        (4, '{"calls": 1, "kernels": ["k"]}', "ERROR SUMMARY: 0 errors", 0),
        (4, '{"calls": 1, "kernels": ["k"]}', "ERROR SUMMARY: 3 errors", 1),
        # The calls did not come to their end, or the tool did not.
        (4, "", "ERROR SUMMARY: 0 errors", 1),
        (4, '{"calls": 1, "kernels": ["k"]}', "", 1),
        # The tool finds nothing at all.
        (0, '{"calls": 1, "kernels": ["k"]}', "ERROR SUMMARY: 0 errors", 1),
        (
            4,
            '{"calls": 1, "kernels": ["k"]}',
            "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)",
            1,
        ),
        (
            4,
            '{"calls": 1, "kernels": ["k"]}',
            "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            0,
        ),
    ],
)
def test_the_sanitizer_s_verdict(
    found, made, summary, status, tmp_path, monkeypatch, capsys
):
    """The exit status is 0 only if all was run, and nothing but the overrun on purpose was reported."""

    run_sanitizer = importlib.import_module("run_sanitizer")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_SANITIZER.format(found=found, made=made, summary=summary))
    tool.chmod(0o755)
    as_written = run_sanitizer.run

    def run_without_gpu(prefix, process):
        if prefix:
            return as_written(prefix, process)

        return '{"calls": 1, "kernels": ["k"]}\n'

    monkeypatch.setattr(run_sanitizer, "run", run_without_gpu)

    assert run_sanitizer.main(["--sanitizer", str(tool)]) == status
    assert "memcheck" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_results_can_be_read(path):
    """Each record is of the present form, whenever it was written."""

    records = results.read(path)

    assert records

    for record in records:
        assert "sweep" in record or "commit" in record["environment"]

        if record.get("benchmark") in ("gated_rms_norm", "rope_pack"):
            assert record["times"]["ntops_ext"]["cold_us"] > 0
            assert results.label(record)


def test_a_run_that_is_stopped_leaves_its_records(tmp_path):
    """Each record is written when it is made, not when all are."""

    path = tmp_path / "new folder" / "records.jsonl"

    def measured():
        for number in range(3):
            if number == 2:
                raise KeyboardInterrupt

            yield {"benchmark": "numbers", "number": number}

    with pytest.raises(KeyboardInterrupt):
        results.write(path, measured(), {"commit": "some"})

    assert results.read(path) == [
        {"benchmark": "numbers", "number": number, "environment": {"commit": "some"}}
        for number in range(2)
    ]


def test_documents_agree_with_the_results():
    """Every table of results is what the files in docs/results give now."""

    printed = run("update_readme_results.py", "--check")

    assert printed == ""


def test_a_number_that_is_not_in_the_results_is_found():
    """The check would see a table that somebody has edited, or results that were replaced."""

    text = (ROOT / "README.md").read_text()
    head, _, tail = text.partition("<!-- results: summary ")
    edited = head + "<!-- results: summary " + tail.replace(" 1.", " 3.", 1)

    assert edited != text
    assert update_readme_results.update(edited) == text


def test_plots(tmp_path):
    """Each kind of record becomes a picture."""

    pytest.importorskip("matplotlib", reason="plots need the extra `benchmark`")
    newest = [
        max(ROOT.glob(f"docs/results/*/{name}.jsonl"))
        for name in ("gated_rms_norm", "gated_rms_norm_backward", "rope_pack")
    ]
    profile = tmp_path / "profile.jsonl"
    parts = [
        ("floor", "", "torch.add(x, y, out=z)", None),
        ("case", "unpatched", "a whole call", None),
        (
            "case",
            "unpatched",
            "handle and launch function: sizes, strides",
            "a whole call",
        ),
        ("case", "planned", "a whole call", None),
        ("case", "planned", "launcher, with its arguments", "a whole call"),
    ]
    profile.write_text(
        "".join(
            json.dumps(
                {
                    "benchmark": "profile_launch",
                    "case": case,
                    "way": way,
                    "part": part,
                    "within": within,
                    "median": 2.0,
                    "environment": {"gpu": "some GPU", "date": "some day"},
                }
            )
            + "\n"
            for case, way, part, within in parts
        )
    )
    soak = tmp_path / "soak.jsonl"
    names = ("torch.add", "handle", "auto-tuned handle", "gated_rms_norm")
    names += ("gated_rms_norm, out", "qk_norm_rope", "qk_norm_rope_pack_")
    soak.write_text(
        "".join(
            json.dumps(
                {
                    "benchmark": "soak",
                    "device": "cuda",
                    "calls": calls,
                    "times": {f"{name} within": 2.0 for name in names},
                    "host_mib": 100.0,
                    "device_mib": 10.0,
                    "environment": {"gpu": "some GPU", "date": "some day"},
                }
            )
            + "\n"
            for calls in (10, 20)
        )
    )
    run(
        "plot_results.py",
        *newest,
        profile,
        soak,
        "--output",
        tmp_path,
    )

    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "gated_rms_norm-bandwidth.png",
        "gated_rms_norm-ratio.png",
        "gated_rms_norm_backward-ratio.png",
        "launch-stages.png",
        "rope_pack-ladder.png",
        "soak.png",
    ]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs NVIDIA's compiler")
def test_the_cuda_scheme_is_compiled_as_described(tmp_path):
    """16 bytes an access of a head, exchanges within half a warp, nothing spilled, no barrier."""

    source = SCRIPTS / "cuda_scheme.cu"
    ptx = tmp_path / "scheme.ptx"

    for arguments in (["-ptx", "-o", ptx], ["-cubin", "-Xptxas=-v", "-o", "/dev/null"]):
        compiled = subprocess.run(
            ["nvcc", "-arch=sm_90", source, *arguments],
            capture_output=True,
            text=True,
            check=True,
        )

    text = ptx.read_text()

    assert text.count("ld.global") == text.count("ld.global.v4")
    assert text.count("st.global") == text.count("st.global.v4") == 5
    assert text.count("shfl.sync.bfly") == 16
    assert "bar.sync" not in text and ".local" not in text
    assert "0 bytes spill stores, 0 bytes spill loads" in compiled.stderr

"""The scripts that run kernels in Triton's interpreter where there is no GPU: each, on its tiny cases."""

import importlib
import json
import pathlib
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


def run(script, capsys, monkeypatch, *arguments):
    """What a script prints. It must succeed."""

    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    main = importlib.import_module(script).main

    assert not main(["--device", "cpu", *map(str, arguments)])

    return capsys.readouterr().out


@pytest.mark.parametrize(
    "script",
    [
        "benchmark_gated_rms_norm",
        "benchmark_gated_rms_norm_backward",
        "benchmark_qk_norm_rope_backward",
        "benchmark_rope_pack",
        "sweep_gated_rms_norm",
        "sweep_gated_rms_norm_backward",
    ],
)
def test_a_benchmark(script, tmp_path, capsys, monkeypatch):
    """It ends, says what its times are worth, and writes its environment into each record."""

    output = tmp_path / "records.jsonl"
    printed = run(script, capsys, monkeypatch, "--quick", "--output", output)

    assert "mean nothing" in printed

    records = [json.loads(line) for line in output.read_text().splitlines()]

    assert records

    for record in records:
        assert record["benchmark"]
        assert record["device"] == "cpu"
        assert {"commit", "date", "torch", "gpu"} <= record["environment"].keys()


def refused(script, capsys, monkeypatch, *arguments):
    """What a script prints that takes no such arguments."""

    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    main = importlib.import_module(script).main

    with pytest.raises(SystemExit) as exit_status:
        main(["--device", "cpu", *arguments])

    assert exit_status.value.code == 2

    return capsys.readouterr().err


@pytest.mark.parametrize(
    "script, case, left_out",
    [
        ("benchmark_gated_rms_norm", "tiny-slices-2", "dense-128-128-32"),
        ("benchmark_gated_rms_norm_backward", "96-48-3", "8192-1024-4096"),
        ("benchmark_rope_pack", "single_tensor", "in_place"),
        ("benchmark_qk_norm_rope_backward", "tiny", "32_heads"),
    ],
)
def test_a_case_that_is_not_in_the_selection(
    script, case, left_out, capsys, monkeypatch
):
    """It is named, with the cases that there are on the device and with `--quick`."""

    arguments = ["--quick", "--cases", case, left_out]
    message = refused(script, capsys, monkeypatch, *arguments)

    assert f"--cases: no case is named {left_out}; with --device cpu --quick" in message
    assert case in message.partition("there are")[2]


def test_a_group_size_that_is_not_swept(capsys, monkeypatch):
    """It is named, with those that are."""

    arguments = ["--group-sizes", "16", "4000"]
    message = refused("sweep_gated_rms_norm", capsys, monkeypatch, *arguments)

    assert "--group-sizes: 4000 not among 16" in message


@pytest.mark.parametrize(
    "script, case, verdict",
    [
        ("run_gated_rms_norm_smoke", "bias-gate-first", "1 passed, 0 failed"),
        ("run_rope_pack_smoke", "one_row", "all ok"),
    ],
)
def test_a_smoke_script(script, case, verdict, capsys, monkeypatch):
    """One case of each."""

    assert verdict in run(script, capsys, monkeypatch, "--cases", case)


def test_a_peer_that_cannot_is_named(tmp_path, capsys, monkeypatch):
    """The others are timed all the same, and the record has the reason."""

    output = tmp_path / "records.jsonl"
    arguments = ["--quick", "--cases", "single_tensor", "--output", output]
    printed = run("benchmark_rope_pack", capsys, monkeypatch, *arguments)
    (record,) = [json.loads(line) for line in output.read_text().splitlines()]

    assert record["missing"]["CUDA scheme"] == "not available: needs a GPU"
    assert record["times"].keys() == {"copy", "ntops_ext", "eager"}
    assert "CUDA scheme is not timed: not available: needs a GPU" in printed

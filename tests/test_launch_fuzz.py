"""Random calls, and all that may happen between them: a planned call hands the driver what its unpatched twin does.

`tests/launch_fuzz.py` has what happens and what is compared. The long run takes its size from the environment:

    LAUNCH_FUZZ_CALLS=100000 LAUNCH_FUZZ_SEED=0 LAUNCH_FUZZ_OUTPUT=FILE.jsonl python -m pytest -m slow tests/test_launch_fuzz.py

It says what it did, session by session, in the file, if one is named. A failure shows the fewest steps that it could be
cut down to, for `launch_fuzz_corpus.json`, whose lists of steps are done again by each run of the tests.
"""

import json
import os
import pathlib
import sys
import time

import launch_fuzz
import pytest
import torch
from launch_fuzz import Difference, Steps, dumps, fails, quick_compiler, session, shrink

from ninetoothed_patches import call_functions, call_key, plan_cache, triton_abi
from ntops_ext.torch import _prepared

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))

from environment import describe_environment  # noqa: E402

CORPUS = json.loads(
    pathlib.Path(__file__).with_name("launch_fuzz_corpus.json").read_text()
)

# Calls of one session: another driver, and handles that are made anew.
CALLS_OF_A_SESSION = 10_000

# So many sessions have the same layouts, and need no more kernels than one.
SESSIONS_OF_LAYOUTS = 5


@pytest.fixture(scope="module", autouse=True)
def compiler():
    with quick_compiler():
        yield


def run(steps, **options):
    """Do all steps. A difference is shown with the fewest that show it.

    :return: What was done, as numbers by name.
    """

    done = []

    try:
        with session(**options) as opened:
            for step in steps:
                done.append(step)
                opened.do(step)
    except Difference as difference:
        fewest = shrink(done, lambda fewer: fails(fewer, **options) is not None)
        pytest.fail(f"{difference}\nafter, under {options},\n{dumps(fewest)}")

    return opened


def test_random_calls_launch_what_their_twins_launch():
    """Some of the kernels, plain and tuned, an operator, and whatever may happen between the calls."""

    steps = Steps(
        0,
        kernels=["spare", "scale_t"],
        operators=["gated_rms_norm"],
        variety=1,
        layouts=5,
        share_of_gradients=0,
    )
    done = run(steps.take(500))

    # It would say nothing about a fast way that nobody took.
    assert done.counts["hits"] > 100
    assert done.counts["misses"] > 20
    assert done.counts["launches"] > 300


@pytest.mark.slow
def test_very_many_random_calls():
    """All kernels, all operators, and those of ntops where it is installed, in sessions under different drivers."""

    num_calls = int(os.environ.get("LAUNCH_FUZZ_CALLS", "100000"))
    seed = int(os.environ.get("LAUNCH_FUZZ_SEED", "0"))
    output = os.environ.get("LAUNCH_FUZZ_OUTPUT")

    for number, start in enumerate(range(0, num_calls, CALLS_OF_A_SESSION)):
        options = {
            "plain_launcher": number % 2 == 1,
            "target": "sm_80" if number % 4 == 2 else "sm_90",
        }
        steps = Steps(
            f"{seed} {number}",
            kernels=list(launch_fuzz.KERNELS),
            operators=list(launch_fuzz.OPERATORS),
            ntops=list(launch_fuzz.NTOPS) if launch_fuzz.has_ntops() else [],
            variety=2,
            layouts=seed + number // SESSIONS_OF_LAYOUTS,
        )
        began = time.monotonic()
        done = run(steps.take(min(CALLS_OF_A_SESSION, num_calls - start)), **options)
        record = {
            "benchmark": "launch-fuzz",
            "seed": seed,
            "session": number,
            **options,
            "ntops": launch_fuzz.has_ntops(),
            "seconds": round(time.monotonic() - began),
            "counts": dict(sorted(done.counts.items())),
            "bypasses": dict(sorted(done.reasons.items())),
            "differences": 0,
            "environment": describe_environment(),
        }

        if output is not None:
            with open(output, "a") as file:
                file.write(json.dumps(record) + "\n")

        assert done.counts["hits"] > 0.2 * done.counts["call"]


@pytest.mark.skipif(not launch_fuzz.has_ntops(), reason="needs ntops")
def test_calls_of_ntops_launch_what_their_twins_launch():
    """Two packages, one with plans: what one launches the other does."""

    steps = Steps(1, kernels=[], ntops=["add", "softmax", "dropout"], variety=3)
    done = run(steps.take(60))
    assert done.counts["launches"] > 40


@pytest.mark.parametrize("entry", CORPUS, ids=[entry["what"] for entry in CORPUS])
def test_what_once_differed_does_not(entry):
    with session(**entry.get("options", {})) as opened:
        opened.run(entry["steps"])


# A comparison that cannot fail says nothing: faults, and calls that show them.


def row(offset=0, rows=5):
    return ["tensor", "bf16", [rows, 128], [128, 1], offset, "plain"]


def scale(scalar="0.5", offset=0):
    arguments = [row(offset), ["scalar", scalar], row()]

    return ["call", "scale", 0, "positional", "grad", arguments]


def norm(**options):
    arguments = {"input": row()} | {
        name: ["scalar", value] for name, value in options.items()
    }

    return ["operator", "gated_rms_norm", "no_grad", arguments, False]


def test_a_key_without_alignment_is_noticed(monkeypatch):
    monkeypatch.setattr(call_key, "ALIGNMENT", 1)
    assert fails([scale(), scale(), scale(offset=1)])


def test_a_key_that_takes_zeros_for_one_is_noticed(monkeypatch):
    monkeypatch.setattr(call_functions, "bits", lambda value: value)
    assert fails([scale("0.0"), scale("0.0"), scale("-0.0")])


def test_a_hook_that_is_passed_over_is_noticed(monkeypatch):
    expressions = triton_abi.expressions()
    monkeypatch.setattr(
        triton_abi,
        "expressions",
        lambda: type(expressions)(**{**vars(expressions), "watchers": "False"}),
    )
    assert fails([scale(), scale(), ["hook", "enter"], scale()])


def test_a_prepared_call_that_compares_no_options_is_noticed(monkeypatch):
    monkeypatch.setattr(_prepared, "scalar_fits", lambda given, seen: "True")
    assert fails([norm(), norm(), norm(), norm(eps="1.0")])


def test_a_call_that_is_not_counted_is_noticed(monkeypatch):
    monkeypatch.setattr(plan_cache.PlanCache, "_count_bypass", lambda self, why: None)
    assert fails([["hook", "enter"], scale()])


def test_a_failure_is_cut_down_to_what_shows_it():
    steps = [[name] for name in "abcdefghij"]
    fewest = shrink(steps, lambda fewer: ["c"] in fewer and ["h"] in fewer)
    assert fewest == [["c"], ["h"]]


def test_what_does_not_fail_is_not_said_to():
    """The calls that show the faults above, without the faults."""

    calls = [scale(), scale(offset=1), scale("0.0"), scale("-0.0")]
    norms = [norm(), norm(), norm(), norm(eps="1.0")]
    assert not fails([*calls, *calls, ["hook", "exit"], *calls, *norms])


def test_steps_depend_on_the_seed_alone():
    def draw(seed):
        return list(Steps(seed, kernels=["scale", "spare"], variety=4).take(50))

    assert draw(1) == draw(1) != draw(2)
    assert json.loads(dumps(draw(1))) == draw(1)


def test_autograd_is_left_as_it_was():
    with session() as opened:
        opened.do(["default_device", "meta"])
        opened.do(["hook", "enter"])

    assert torch.empty(0).device.type == "cpu"
    assert torch.is_grad_enabled()

"""Write the tables of results in README.md and docs/ anew from docs/results/*/*.jsonl.

    python scripts/update_readme_results.py [--check]

A table stands between `<!-- results: TABLE FOLDER -->`, where FOLDER is one of docs/results and
TABLE a function of `TABLES` below, and `<!-- end of results -->`. To quote another run, write
another folder there. `--check` writes nothing, and the exit status is 1 if a file would change.
"""

import argparse
import pathlib
import re
import statistics
import sys

import results

ROOT = pathlib.Path(__file__).resolve().parent.parent

FOLDERS = ROOT / "docs" / "results"

_TABLE = re.compile(
    r"(<!-- results: (?P<table>[\w-]+) (?P<folder>[\w.-]+) -->\n).*?"
    r"(<!-- end of results -->)",
    re.DOTALL,
)

# Fewer are a decode step: a launch, not bandwidth.
PREFILL_BYTES = 4e6

OURS, FLOOR = "ntops_ext", "torch.add"

_PEERS = ("fla rms_norm_gated", "fla/mamba rmsnorm_fn", "torch.compile")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    stale = []

    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        updated = update(text)

        if updated == text:
            continue

        stale.append(path)

        if not options.check:
            path.write_text(updated, encoding="utf-8")

    for path in stale:
        verb = "does not say what the results say" if options.check else "updated"
        print(f"{path.relative_to(ROOT)}: {verb}")

    return int(options.check and bool(stale))


def update(text, folders=FOLDERS):
    """`text`, with every table in it made anew."""

    def replace(match):
        lines = TABLES[match["table"]](folders / match["folder"])

        return (
            f"{match[1]}\n" + "".join(f"{line}\n" for line in lines) + f"\n{match[4]}"
        )

    return _TABLE.sub(replace, text)


def _rows(titles, rows):
    """The lines of a table in Markdown."""

    separator = "| " + " | ".join("---" for _ in titles) + " |"

    return [
        "| " + " | ".join(titles) + " |",
        separator,
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _ratio(record, name, clock, of=FLOOR):
    times = record["times"]

    return times[name][f"{clock}_us"] / times[of][f"{clock}_us"]


def _range(ratios):
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def gated_rms_norm(folder):
    """Every case: device time beside the floor, and the peers'."""

    def cell(record, name, clock="cold"):
        return (
            f"{_ratio(record, name, clock):.2f}"
            if name in record["times"]
            else "not offered"
        )

    records = results.read(folder / "gated_rms_norm.jsonl")

    return _rows(
        ("case", "ours / `torch.add`", *_PEERS, "warm: ours / `torch.add`"),
        [
            (
                results.label(record),
                *(cell(record, name) for name in (OURS, *_PEERS)),
                cell(record, OURS, "warm"),
            )
            for record in records
        ],
    )


def gated_rms_norm_backward(folder):
    """Every case: the time of all gradients beside the bytes they must move, and the peers'."""

    def cell(record, name):
        return (
            f"{_ratio(record, name, 'cold', of='floor'):.2f}"
            if name in record["times"]
            else "not offered"
        )

    names = (OURS, *_PEERS)

    return _rows(
        ("case", *(f"{name} / floor" for name in ("ours", *_PEERS))),
        [
            (results.label(record), *(cell(record, name) for name in names))
            for record in results.read(folder / "gated_rms_norm_backward.jsonl")
        ],
    )


def gated_rms_norm_host(folder):
    """One sentence about the host time of a call."""

    records = results.read(folder / "gated_rms_norm.jsonl")
    ratios = [_ratio(record, OURS, "host") for record in records]

    return [
        "Host time of `gated_rms_norm` with `out` given, over all cases of"
        f" `gated_rms_norm.jsonl`: {min(ratios):.1f} to",
        f"{max(ratios):.1f} times `torch.add`.",
    ]


def rope_pack(folder):
    """Every case: device time beside a copy, and others beside ours."""

    records = results.read(folder / "rope_pack.jsonl")
    others = [
        name
        for name in ("CUDA scheme", "torch.compile", "eager")
        if any(name in record["times"] for record in records)
    ]

    return _rows(
        ("case", "ours / copy of the bytes", *(f"{name} / ours" for name in others))
        + ("bits",),
        [
            (
                results.label(record),
                f"{_ratio(record, OURS, 'cold', 'copy'):.2f}",
                *(
                    f"{_ratio(record, name, 'cold', OURS):.1f}"
                    if name in record["times"]
                    else "not timed"
                    for name in others
                ),
                "equal" if record["is_equal"] else "differ",
            )
            for record in records
            if record["choice"] == "own"
        ],
    )


def launch(folder):
    """Every call of NineToothed's handles, beside `torch.add`."""

    records = _launches(folder)
    floor = records["torch.add(x, y, out=z)"]["median"]

    return _rows(
        ("call", "host time / `torch.add(x, y, out=z)`"),
        [
            (name, f"{record['median'] / floor:.2f}")
            for name, record in records.items()
            if not name.startswith("torch.add")
        ],
    ) + _cost_of_a_plan(records)


def _launches(folder):
    records = results.read(folder / "launch.jsonl")

    return {record["case"]: record for record in records}


_NEW, _MADE = "layouts in a row, new", "layouts in a row, plan made"


def _cost_of_a_plan(records):
    """A sentence about the call that a plan is made from, if it was timed."""

    for layouts, made in (("new layout", "miss"), ("layouts in a row", "plan made")):
        if f"5 tensors, {layouts}, {made}" in records:
            times = (
                records[f"5 tensors, {layouts}, {way}"]["median"]
                for way in (made, "unpatched")
            )
            ratio = next(times) / next(times)

            return [
                "",
                f"The call that a plan is made from costs {ratio:.2f} times an unpatched one.",
            ]

    return []


def launch_plans(folder):
    """The same, unpatched and planned side by side."""

    records = _launches(folder)
    floor = records["torch.add(x, y, out=z)"]["median"]

    def cell(name):
        record = records.get(name)

        return "" if record is None else f"{record['median'] / floor:.2f}"

    rows = [
        (
            "5 tensors, 23 kernel arguments",
            "5 tensors, unpatched",
            "5 tensors, planned",
        ),
        (
            "the same, auto-tuned",
            "5 tensors, auto-tuned, unpatched",
            "5 tensors, auto-tuned, planned",
        ),
        (
            "the same, 6 layouts in one order",
            None,
            "5 tensors, 6 layouts in one order",
        ),
        (
            "the same, 16 layouts in no order, mostly found by their keys",
            None,
            "5 tensors, 16 layouts in no order",
        ),
        # Of earlier runs, and of later ones.
        (
            "the same, 6 layouts in turn, found by their keys",
            None,
            "5 tensors, 6 layouts in turn",
        ),
        (
            "the same, a plan made",
            "5 tensors, new layout, unpatched",
            "5 tensors, new layout, miss",
        ),
        (
            "the same, layouts that never come back",
            f"5 tensors, {_NEW.replace('new', 'unpatched')}",
            f"5 tensors, {_NEW}",
        ),
        (
            "the same, a plan made",
            f"5 tensors, {_NEW.replace('new', 'unpatched')}",
            f"5 tensors, {_MADE}",
        ),
        (
            "11 tensors, 58 kernel arguments",
            "11 tensors, unpatched",
            "11 tensors, planned",
        ),
    ]

    return _rows(
        ("call", "unpatched", "planned"),
        [
            (title, cell(unpatched), cell(planned))
            for title, unpatched, planned in rows
            if planned in records
        ],
    ) + _cost_of_a_plan(records)


def ntops_host_time(folder):
    """ntops' operators, unpatched and patched, beside `torch.add`."""

    floor, *records = results.read(folder / "ntops-host-time.jsonl")

    return _rows(
        ("ntops operator", "unpatched / `torch.add`", "with plans / `torch.add`"),
        [
            (
                record["operator"],
                *(
                    f"{record[way] / floor[way]:.2f}"
                    for way in ("unpatched", "patched")
                ),
            )
            for record in records
        ],
    )


def summary(folder):
    """What the README quotes: ratios, each over the cases of its kind."""

    records = results.read(folder / "gated_rms_norm.jsonl")
    many = [record for record in records if record["bytes"] >= PREFILL_BYTES]
    few = [record for record in records if record["bytes"] < PREFILL_BYTES]
    dense = [record for record in many if record["layout"] == "dense"]
    strided = [record for record in many if record["layout"] != "dense"]
    add = "`torch.add` of as many bytes"
    rows = [
        (
            "gated RMSNorm, dense, 4 MB and more",
            f"ours / {add}",
            dense,
            OURS,
            FLOOR,
            "cold",
        ),
        (
            "gated RMSNorm, slices of a projection, 4 MB and more",
            f"ours / {add}, dense",
            strided,
            OURS,
            FLOOR,
            "cold",
        ),
        (
            "gated RMSNorm, less than 4 MB, as in decoding, L2 warm",
            "ours / `torch.add`",
            few,
            OURS,
            FLOOR,
            "warm",
        ),
        *(
            (
                "gated RMSNorm, all cases that it offers",
                f"{name} / ours",
                [record for record in records if name in record["times"]],
                name,
                OURS,
                "cold",
            )
            for name in _PEERS
        ),
    ]
    path = folder / "gated_rms_norm_backward.jsonl"
    gradients = results.read(path) if path.exists() else []
    rows.append(
        (
            "gradients of gated RMSNorm",
            "ours / copy of the bytes",
            gradients,
            OURS,
            "floor",
            "cold",
        )
    )
    rows += [
        (
            "gradients of gated RMSNorm",
            f"{name} / ours",
            [record for record in gradients if name in record["times"]],
            name,
            OURS,
            "cold",
        )
        for name in _PEERS
    ]
    packs = [
        record
        for record in results.read(folder / "rope_pack.jsonl")
        if record["choice"] == "own" and "eager" in record["times"]
    ]
    rows += [
        (
            "Q/K norm, rotation and pack, production shape",
            title,
            [record for record in packs if name in record["times"]],
            name,
            of,
            "cold",
        )
        for title, name, of in (
            ("ours / copy of the bytes", OURS, "copy"),
            ("CUDA scheme / ours", "CUDA scheme", OURS),
            ("torch.compile / ours", "torch.compile", OURS),
            ("PyTorch's eager chain / ours", "eager", OURS),
        )
    ]
    lines = [
        (what, beside, str(len(cases)), _range([_ratio(it, *of) for it in cases]))
        for what, beside, cases, *of in (
            (what, beside, cases, name, clock, floor)
            for what, beside, cases, name, floor, clock in rows
        )
        if cases
    ]
    launches = _launches(folder)
    floor = launches["torch.add(x, y, out=z)"]["median"]

    for name in ("5 tensors", "5 tensors, auto-tuned", "11 tensors"):
        unpatched, planned = (
            launches[f"{name}, {way}"]["median"] / floor
            for way in ("unpatched", "planned")
        )
        lines.append(
            (
                f"host time of a NineToothed call, {name}",
                "with a plan / `torch.add(x, y, out=z)`",
                "1",
                f"{planned:.2f} (without: {unpatched:.2f})",
            )
        )

    environment = records[0]["environment"]

    return [
        f"{environment['gpu']}, {environment['date']}, bfloat16, PyTorch"
        f" {environment['torch']}, Triton {environment['triton']}; L2 cache cleared unless",
        "said otherwise. Medians over the cases, with the least and the greatest.",
        "",
        *_rows(("what", "ratio", "cases", "median"), lines),
    ]


def versions(folder):
    """Every environment that `check_versions.py` made, and how the tests ended in it."""

    return versions_table(results.read(folder / "versions.jsonl"))


def versions_table(records):
    kinds = {kind: None for record in records for kind in record["outcomes"]}

    return _rows(
        ("Python", "PyTorch", "Triton", "NumPy", *kinds, "tests", "commit"),
        [
            (
                *(record["environment"][name] for name in _VERSIONED),
                *(_outcome(record["outcomes"].get(kind)) for kind in kinds),
                "all" if record["is_full"] else "some",
                record["environment"]["commit"],
            )
            for record in records
        ],
    )


_VERSIONED = ("python", "torch", "triton", "numpy")


def _outcome(outcome):
    """How many passed, and how many did not."""

    if outcome is None:
        return "not run"

    failed = f", {outcome['failed']} failed" if outcome["failed"] else ""
    skipped = f" ({outcome['skipped']} skipped)" if outcome["skipped"] else ""

    return f"{outcome['passed']}{failed}{skipped}"


def has_failed(record):
    """Whether a test failed in an environment of `check_versions.py`, or none of a kind ran."""

    return any(
        outcome["failed"] or not outcome["passed"]
        for outcome in record["outcomes"].values()
    )


# What is the same with every version of a package need not be tried with each.
_SAME = {"triton": {"PyTorch"}}


def tried(records, package, kinds=None):
    """The versions of a package with which tests of all kinds, or of some, ran and passed.

    :return: Tuples of numbers, the oldest first.
    """

    everything = {kind for record in records for kind in record["outcomes"]}
    needed = kinds or everything - _SAME.get(package, set())
    versions = {
        record["environment"][package].partition("+")[0]
        for record in records
        if needed <= record["outcomes"].keys() and not has_failed(record)
    }

    numbers = [[int(part) for part in version.split(".")] for version in versions]

    # Patches of Python change no behaviour that matters here.
    return sorted({tuple(one[:2] if package == "python" else one) for one in numbers})


def supported(versions):
    """The range that pyproject.toml gives a package: to the last patch of the newest that was tried.

    :param versions: As `tried` returns them.
    """

    (*newest, last), oldest = versions[-1][:2], versions[0]

    return f">={_dotted(oldest)},<{_dotted([*newest, last + 1])}"


def in_words(versions):
    """The same range."""

    newest = _dotted(versions[-1][:2])

    return newest if len(versions) == 1 else f"{_dotted(versions[0])} to {newest}"


def _dotted(version):
    return ".".join(map(str, version))


def environments_with_a_gpu(folders):
    """Those of all records of these folders that were made on a GPU."""

    return [
        record["environment"]
        for path in sorted(folders.glob("*/*.jsonl"))
        for record in results.read(path)
        if record.get("environment", {}).get("gpu", "none") != "none"
    ]


def supported_versions(folder):
    """Of each package, the versions that `check_versions.py` tried, and those on GPUs."""

    records = results.read(folder / "versions.jsonl")
    on_gpus = environments_with_a_gpu(folder.parent)
    gpus = " and ".join(sorted({environment["gpu"] for environment in on_gpus}))
    plans = {"launch plans"}

    def row(package, title):
        versions = tried(records, package)
        words = in_words(versions)

        if tried(records, package, plans)[0] < versions[0]:
            words += f"; launch plans {in_words(tried(records, package, plans))}"

        names = {
            environment[package].partition("+")[0]
            for environment in on_gpus
            if package in environment
        }

        return (
            title,
            words,
            ", ".join(map(_dotted, tried(records, package, plans))),
            ", ".join(sorted(names)) or "not recorded",
        )

    return _rows(
        ("package", "supported", "tried without a GPU", f"on {gpus}"),
        [row(package, title) for package, title in _PACKAGES.items()],
    )


_PACKAGES = {
    "python": "Python",
    "ninetoothed": "NineToothed",
    "torch": "PyTorch",
    "triton": "Triton",
    "numpy": "NumPy",
}


TABLES = {
    "gated_rms_norm": gated_rms_norm,
    "gated_rms_norm-backward": gated_rms_norm_backward,
    "gated_rms_norm-host": gated_rms_norm_host,
    "launch": launch,
    "launch_plans": launch_plans,
    "ntops-host-time": ntops_host_time,
    "rope_pack": rope_pack,
    "summary": summary,
    "supported-versions": supported_versions,
    "versions": versions,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Plots of what the benchmarks wrote.

    python scripts/plot_results.py FILE.jsonl... --output DIRECTORY

Whatever the files hold is drawn: of benchmark_gated_rms_norm.py the ratio to `torch.add` by
case, and TB/s by rows for shapes with several numbers of rows; of
benchmark_gated_rms_norm_backward.py the ratio to the floor by case; of profile_launch.py the
host time of a call by its parts; of benchmark_rope_pack.py the pack beside others and a copy;
of soak.py memory and host time over the calls.
"""

import argparse
import collections
import math
import pathlib
import sys

import matplotlib
import results

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#9A9A9A"

# Colour and marker, for those who see no colour at all.
STYLES = {
    "ntops_ext": (BLUE, "o"),
    "fla rms_norm_gated": (ORANGE, "s"),
    "fla/mamba rmsnorm_fn": (GREEN, "^"),
    "mamba rmsnorm_fn": (VERMILION, "v"),
    "torch.compile": (PURPLE, "D"),
    "torch.add": (BLACK, "x"),
}

# From the slowest to the floor.
LADDER = {
    "eager": GREY,
    "torch.compile": PURPLE,
    "CUDA scheme": ORANGE,
    "ntops_ext": BLUE,
    "copy": BLACK,
}

# What the parts of a call that profile_launch.py names are drawn as.
STAGES = {
    "sizes and strides read": (SKY, ("handle and launch function: sizes, strides",)),
    "Triton's auto-tuner": (YELLOW, ("Triton's Autotuner, with all below",)),
    "Triton's JIT and launcher": (
        ORANGE,
        ("Triton's JITFunction, with its launcher",),
    ),
    "grid": (PURPLE, ("grid",)),
    "plan compared": (
        GREEN,
        (
            "addresses",
            "tensor guard",
            "Triton's state",
            "hooks",
            "device",
            "stream",
        ),
    ),
    "launcher": (BLUE, ("launcher, with its arguments",)),
    "rest": (GREY, ("rest: frames, comparing, counting",)),
}


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--output", required=True, type=pathlib.Path)
    options = parser.parse_args(arguments)
    by_benchmark = collections.defaultdict(list)

    for file in options.files:
        for record in results.read(file):
            by_benchmark[record.get("benchmark")].append(record)

    options.output.mkdir(parents=True, exist_ok=True)
    plots = {
        "gated_rms_norm-ratio": ("gated_rms_norm", plot_ratios),
        "gated_rms_norm-bandwidth": ("gated_rms_norm", plot_bandwidth),
        "gated_rms_norm_backward-ratio": (
            "gated_rms_norm_backward",
            plot_ratios_of_gradients,
        ),
        "launch-stages": ("profile_launch", plot_stages),
        "rope_pack-ladder": ("rope_pack", plot_ladder),
        "soak": ("soak", plot_soak),
    }
    drawn = 0

    for name, (benchmark, plot) in plots.items():
        figure = plot(by_benchmark[benchmark]) if by_benchmark[benchmark] else None

        if figure is None:
            print(f"{name}: nothing to draw in these files")

            continue

        path = options.output / f"{name}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        drawn += 1
        print(path)

    return int(drawn == 0)


def where(records):
    """On what the records were measured, for a title."""

    environment = records[0]["environment"]

    if records[0].get("device") == "cpu" or environment["gpu"] == "none":
        return "on a CPU: these times mean nothing"

    return f"{environment['gpu']}, {environment['date']}"


def _grid_behind(axes, axis):
    axes.grid(axis=axis, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)

    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_ratios(records):
    return _plot_ratios(
        records,
        floor="torch.add",
        of_what="torch.add of as many bytes",
        title="Gated RMSNorm beside the floor",
    )


def plot_ratios_of_gradients(records):
    return _plot_ratios(
        records,
        floor="floor",
        of_what="an element-wise kernel that moves as many bytes",
        title="Gradients of gated RMSNorm beside the floor",
    )


def _plot_ratios(records, *, floor, of_what, title):
    """One row a case, sorted by our ratio; a mark for everybody."""

    def ratio(record, name):
        return record["times"][name]["cold_us"] / record["times"][floor]["cold_us"]

    records = sorted(records, key=lambda record: -ratio(record, "ntops_ext"))
    height = 1.8 + 0.3 * len(records)
    figure, axes = plt.subplots(figsize=(10, height), layout="constrained")

    for name, (color, marker) in STYLES.items():
        points = [
            (ratio(record, name), row)
            for row, record in enumerate(records)
            if name in record["times"] and name != floor
        ]

        if points:
            axes.scatter(
                *zip(*points, strict=True),
                s=46 if name == "ntops_ext" else 34,
                color=color,
                marker=marker,
                label=name,
                zorder=3 if name == "ntops_ext" else 2,
            )

    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_yticks(range(len(records)), map(results.label, records), fontsize=9)
    axes.set_ylim(-0.7, len(records) - 0.3)
    axes.set_xscale("log")
    largest = axes.get_xlim()[1]
    # So many as have room for their labels.
    ticks = (
        (1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 10)
        if largest < 12
        else (1, 1.5, 2, 3, 5, 10, 20, 50)
    )
    ticks = [tick for tick in ticks if tick <= 1.1 * largest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"device time / {of_what}, L2 cleared (log scale)")
    axes.set_title(f"{title}\n{where(records)}", fontsize=11)
    _grid_behind(axes, "both")
    # Beside the axes: within them it would hide marks.
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)

    return figure


def plot_bandwidth(records):
    """A panel for each shape of rows that was measured with several numbers of rows."""

    shapes = collections.defaultdict(dict)

    for record in records:
        columns = record["shape"][-1]
        rows = math.prod(record["shape"][:-1])
        key = (columns, record["group_size"], record["mode"], record["layout"])
        shapes[key][rows] = record

    shapes = {key: by_rows for key, by_rows in shapes.items() if len(by_rows) > 1}

    if not shapes:
        return None

    across = min(3, len(shapes))
    down = math.ceil(len(shapes) / across)
    figure, panels = plt.subplots(
        down,
        across,
        figsize=(4 * across + 0.5, 2.9 * down + 1.1),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )

    for axes in panels.flat[len(shapes) :]:
        axes.remove()

    panels = panels.flat[: len(shapes)]

    for axes, (key, by_rows) in zip(panels, sorted(shapes.items()), strict=True):
        columns, group_size, mode, layout = key
        groups = "" if group_size == columns else f" in groups of {group_size}"
        order = mode.split(",")[0] + ("" if layout == "dense" else f", {layout}")
        axes.set_title(f"{columns} columns{groups}, {order}", fontsize=9)

        for name, (color, marker) in reversed(STYLES.items()):
            points = [
                (rows, record["bytes"] / record["times"][name]["cold_us"] / 1e6)
                for rows, record in sorted(by_rows.items())
                if name in record["times"]
            ]

            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=color,
                    marker=marker,
                    markersize=5,
                    linewidth=1.2,
                    linestyle=":" if name == "torch.add" else "-",
                    label=name,
                )

        axes.set_xscale("log", base=2)
        rows = sorted(by_rows)
        axes.set_xticks(rows, [f"{count:,}" for count in rows], fontsize=8)
        axes.minorticks_off()
        axes.margins(x=0.1)
        axes.set_xlabel("rows (log scale)", fontsize=9)
        _grid_behind(axes, "y")

    # Shared by all panels.
    panels[0].set_ylim(0, 1.08 * max(axes.dataLim.ymax for axes in panels))
    figure.supylabel("TB/s of the bytes that must move, L2 cleared", fontsize=10)
    figure.suptitle(f"Gated RMSNorm: bandwidth by rows\n{where(records)}", fontsize=11)
    handles = {}

    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))

    figure.legend(
        [handles[name] for name in STYLES if name in handles],
        [name for name in STYLES if name in handles],
        loc="outside lower center",
        ncols=len(handles),
        fontsize=9,
        frameon=False,
    )

    return figure


def plot_stages(records):
    """One bar a case and way, of the parts that a call is made of."""

    bars = collections.defaultdict(dict)

    for record in records:
        if record["way"] in ("unpatched", "planned"):
            bars[record["case"], record["way"]][record["part"]] = record

    (floor,) = (record["median"] for record in records if record["case"] == "floor")
    figure, axes = plt.subplots(
        figsize=(10, 2.4 + 0.42 * len(bars)), layout="constrained"
    )
    labels = []

    for row, ((case, way), parts) in enumerate(reversed(bars.items())):
        labels.append(f"{case}, {way}")
        left = 0.0

        for _, (color, names) in STAGES.items():
            width = sum(_own_time(parts, name) for name in names)
            axes.barh(row, width, left=left, color=color, edgecolor="white")
            left += width

        whole = parts["a whole call"]["median"]
        axes.annotate(
            f"{whole:.1f} us",
            (max(left, whole), row),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )

    axes.axvline(floor, color=BLACK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlabel("host time of a call, us (number: the whole call, timed by itself)")
    axes.set_title(
        f"Where a call's host time goes; dotted: torch.add(x, y, out=z)\n{where(records)}",
        fontsize=11,
    )
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    _grid_behind(axes, "x")
    figure.legend(
        handles=[
            plt.Rectangle((0, 0), 1, 1, color=color) for color, _ in STAGES.values()
        ],
        labels=list(STAGES),
        loc="outside lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
    )

    return figure


def _own_time(parts, name):
    """The time of a part without the parts within it; what came out negative is nothing."""

    if name not in parts:
        return 0.0

    inner = sum(part["median"] for part in parts.values() if part["within"] == name)

    return max(parts[name]["median"] - inner, 0.0)


def plot_ladder(records):
    """The pack's modes: everybody's time, from eager to the copy."""

    records = [
        record
        for record in records
        if record["choice"] == "own" and "eager" in record["times"]
    ]

    if not records:
        return None

    clocks = {"cold_us": "L2 cleared", "warm_us": "20 launches back to back, L2 warm"}
    figure, panels = plt.subplots(
        len(clocks),
        len(records),
        figsize=(3.7 * len(records) + 1, 5.6),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )

    for row, (clock, title) in enumerate(clocks.items()):
        for axes, record in zip(panels[row], records, strict=True):
            times = record["times"]
            # From the top downwards.
            names = [name for name in LADDER if clock in times.get(name, ())][::-1]
            axes.barh(
                range(len(names)),
                [times[name][clock] for name in names],
                color=[LADDER[name] for name in names],
            )

            for position, name in enumerate(names):
                axes.annotate(
                    f"{times[name][clock]:.1f}",
                    (times[name][clock], position),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )

            axes.set_yticks(range(len(names)), names, fontsize=9)
            axes.set_xscale("log")
            axes.margins(x=0.25)
            axes.set_title(f"{results.label(record)}\n{title}", fontsize=9)
            _grid_behind(axes, "x")

    # Shared by all panels.
    low, high = panels[0][0].get_xlim()
    panels[0][0].set_xlim(min(low, 10), high)
    panels[0][0].xaxis.set_major_formatter("{x:g}")
    figure.supxlabel("device time, us (log scale)", fontsize=10)
    shape = "[{batch}, {tokens}, {heads}, {head_dim}], prefix {prefix}"
    figure.suptitle(
        f"Q/K norm, rotation and pack, {shape.format(**records[0])}\n{where(records)}",
        fontsize=11,
    )

    return figure


def plot_soak(records):
    """Memory, and the host time of each kind of call, over the calls so far."""

    figure, (memory, time) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, layout="constrained"
    )
    calls = [record["calls"] for record in records]
    memories = {
        "host_mib": ("process, resident", BLACK),
        "allocated_mib": ("PyTorch, allocated", BLUE),
        "reserved_mib": ("PyTorch, reserved", ORANGE),
        "device_mib": ("device, in use", GREEN),
    }

    for name, (label, color) in memories.items():
        if name in records[0]:
            values = [record[name] for record in records]
            memory.plot(calls, values, color=color, label=label)

    floors = [record["times"]["torch.add within"] for record in records]
    kinds = [kind for kind in records[0]["times"] if kind.endswith(" within")]
    colors = (BLACK, GREY, SKY, PURPLE, BLUE, GREEN, ORANGE)

    for kind, color in zip(kinds, colors, strict=True):
        name = kind.removesuffix(" within")

        for suffix, style in (("within", "-"), ("beyond", ":")):
            if name == "torch.add":
                continue

            ratios = [
                record["times"].get(f"{name} {suffix}", math.nan) / floor
                for record, floor in zip(records, floors, strict=True)
            ]
            label = name if suffix == "within" else None
            time.plot(calls, ratios, color=color, linestyle=style, label=label)

    memory.set_ylim(bottom=0)
    memory.set_ylabel("MiB")
    time.set_yscale("log")
    time.set_ylabel("host time / torch.add (log scale)")
    time.set_xlabel("calls (solid: of few shapes; dotted: of more than are remembered)")
    time.xaxis.set_major_formatter("{x:,.0f}")

    for axes in (memory, time):
        _grid_behind(axes, "y")
        axes.legend(
            loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9, frameon=False
        )

    figure.suptitle(f"Calls of changing shapes\n{where(records)}", fontsize=11)

    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A chart of each benchmark's lines."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Mapping[str, Any]

COLOURS = (
    *("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3"),
    *("#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd"),
)


def need_matplotlib() -> None:
    """Raise ValueError if it is missing: better before a measurement than after."""
    if find_spec("matplotlib") is None:
        raise ValueError("charts need matplotlib: install jaxinfer[train], or leave them out")


def draw(lines: Sequence[Line], path: Path) -> None:
    """Write the chart of one benchmark's lines as a picture.

    Raises ValueError if matplotlib is missing, or the lines are not all of one benchmark.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    kinds = {line["bench"] for line in lines}
    if len(kinds) != 1:
        raise ValueError(f"a chart is of one benchmark, not of {sorted(kinds) or 'nothing'}")
    figure = Figure(figsize=(7, 4), layout="constrained")
    CHARTS[kinds.pop()](figure, lines)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    figure.supxlabel(_about(lines), fontsize=7, color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _about(lines: Sequence[Line]) -> str:
    """Model, weights and device: what every figure must say."""
    keys = ("model", "weights", "device", "date")
    values = [dict.fromkeys(str(line[key]) for line in lines if line.get(key)) for key in keys]
    return "; ".join(", ".join(value) for value in values if value)


def _bars(axes: "Axes", names: Sequence[str], values: Sequence[float], label: str) -> None:
    bars = axes.barh(range(len(values)), values, color=COLOURS[0])
    axes.bar_label(bars, [f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in values], padding=3)
    axes.set_yticks(range(len(values)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set(xlabel=label, xmargin=0.15)


def _steps(figure: "Figure", lines: Sequence[Line], names: Sequence[str]) -> None:
    """Milliseconds a step, and the part of each that the bytes alone would take."""
    axes = figure.subplots()
    _bars(axes, names, [line["step_milliseconds"] or 0.0 for line in lines], "milliseconds a step")
    bounds = [line["roofline_milliseconds"] for line in lines]
    if all(bounds):
        axes.barh(range(len(bounds)), bounds, color=COLOURS[1], label="its bytes at 4.8 TB/s")
        axes.legend(frameon=False)


def _decode(figure: "Figure", lines: Sequence[Line]) -> None:
    names = [f"{line['streams']} at {line['context'][0]:,}" for line in lines]
    _steps(figure, lines, names)
    figure.axes[0].set_ylabel("streams at context")


def _verify(figure: "Figure", lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    alone = [line for line in lines if line["drafter"] is None]
    for number, drafter in enumerate(dict.fromkeys(x["drafter"] for x in lines if x["drafter"])):
        mine = [*alone, *(line for line in lines if line["drafter"] == drafter)]
        rows = [line["rows"] for line in mine]
        ratios = [line["step_ratio"] for line in mine]
        axes.plot(rows, ratios, "o-", color=COLOURS[number], label=f"time, drafts by {drafter}")
    widths = {line["rows"]: line["bytes_ratio"] for line in lines}
    axes.plot(list(widths), list(widths.values()), "o:", color="0.5", label="bytes")
    axes.set(xlabel="rows verified in a step", ylabel="against one row", ylim=(0, None))
    axes.set_xticks(sorted(widths))
    axes.legend(frameon=False)


def _prefill(figure: "Figure", lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    sizes = [line["prompt"] for line in lines]
    times = [line["first_token_milliseconds"] for line in lines]
    axes.plot(sizes, times, "o-", color=COLOURS[0])
    for size, took in zip(sizes, times, strict=True):
        axes.annotate(f"{took:,.3g}", (size, took), (0, 6), textcoords="offset points")
    axes.set(xscale="log", xlabel="tokens of the prompt", ylim=(0, 1.15 * max(times)))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylabel("milliseconds to the first token")
    axes.grid(axis="y", color="0.9")


def _load(figure: "Figure", lines: Sequence[Line]) -> None:
    names = [f"{x['streams']} users" if not x["rate"] else f"{x['rate']:g} a second" for x in lines]
    left, right = figure.subplots(1, 2)
    _bars(left, names, [x["output_tokens_per_second"] for x in lines], "output tokens a second")
    for number, p in enumerate(("p50", "p99")):
        places = [index + 0.35 * (number - 0.5) for index in range(len(lines))]
        times = [line["first_token_milliseconds"][p] for line in lines]
        right.barh(places, times, 0.33, color=COLOURS[number], label=p)
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set_xlabel("milliseconds to the first token")
    right.legend(frameon=False)


def _stacked(figure: "Figure", names: Sequence[str], parts: Sequence[Line], label: str) -> None:
    axes = figure.subplots()
    lefts = [0.0] * len(parts)
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    for number, kind in enumerate(sorted(kinds, key=lambda kind: kind == "gaps")):
        widths = [part.get(kind, 0.0) for part in parts]
        colour = COLOURS[number % len(COLOURS)] if kind != "gaps" else "0.85"
        axes.barh(names, widths, left=lefts, color=colour, label=kind)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(label)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)


def _startup(figure: "Figure", lines: Sequence[Line]) -> None:
    names = [f"{line['compile_cache']} cache" for line in lines]
    stages = [{k: v for k, v in line["stages"].items() if k != "(again)"} for line in lines]
    _stacked(figure, names, stages, "seconds to the first token")


def _kernels(figure: "Figure", lines: Sequence[Line]) -> None:
    names = [
        f"prompt of {line['prompt']:,}"
        if "prompt" in line
        else f"{line['streams']} at {line['context']:,}"
        + f", {line['rows']} rows" * (line["rows"] > 1)
        for line in lines
    ]
    parts = [{**x["families_microseconds"], "gaps": x["gaps_microseconds"]} for x in lines]
    # Shares, since a prompt takes a hundred times as long as a step.
    sums = [sum(part.values()) for part in parts]
    names = [f"{name}: {total / 1e3:.3g} ms" for name, total in zip(names, sums, strict=True)]
    shares = [
        {kind: 100 * time / total for kind, time in part.items()}
        for part, total in zip(parts, sums, strict=True)
    ]
    _stacked(figure, names, shares, "percent of a decode step, or of a prompt, gaps included")


def _ablation(figure: "Figure", lines: Sequence[Line]) -> None:
    told = [line for line in lines if line.get("step_milliseconds")]
    points = dict.fromkeys((line["streams"], line["context"][0]) for line in told)
    names = [
        f"{line['variant']}"
        + (f" ({line['streams']} at {line['context'][0]:,})" * (len(points) > 1))
        for line in told
    ]
    _steps(figure, told, names)


def _segment(figure: "Figure", lines: Sequence[Line]) -> None:
    told = [line for line in lines if "failure" not in line]
    names = [f"{x['size']}, batch {x['batch']}" + ", FP8" * x["fp8"] for x in told]
    _bars(figure.subplots(), names, [x["images_per_second"] for x in told], "pictures a second")


def _segment_kernels(figure: "Figure", lines: Sequence[Line]) -> None:
    told = [line for line in lines if "failure" not in line]
    names = [f"batch {x['batch']}" + ", FP8" * x["fp8"] for x in told]
    parts = [{**x["families_microseconds"], "gaps": x["gaps_microseconds"]} for x in told]
    _stacked(figure, names, parts, "microseconds a batch")


CHARTS: Mapping[str, Callable[["Figure", Sequence[Line]], None]] = {
    "decode": _decode,
    "verify": _verify,
    "prefill": _prefill,
    "load": _load,
    "startup": _startup,
    "kernels": _kernels,
    "ablation": _ablation,
    "segment": _segment,
    "segment-kernels": _segment_kernels,
}
"""What draws each benchmark."""

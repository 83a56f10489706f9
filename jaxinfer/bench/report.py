"""A page of tables and charts from the lines that benchmarks wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.charts import CHARTS, draw

Line = Mapping[str, Any]
Columns = Sequence[tuple[str, str]]

_ROOF: Columns = (
    ("bytes a step", "bytes_a_step"),
    ("of 4.8 TB/s", "share_of_datasheet"),
    ("of a copy's 4.3 TB/s", "share_of_copy"),
)
_PEER: Columns = (("peer", "peer.about.engine"), ("ours / peer's", "ratio_to_peer"))

_SEGMENT: Columns = (("FP8", "fp8"), ("batch", "batch"))
_SEGMENT_PEER: Columns = (*_PEER, ("peer's variant", "peer.variant"), ("failure", "failure"))

TABLES: Mapping[str, tuple[str, Columns]] = {
    "decode": (
        "Decoding",
        (
            ("streams", "streams"),
            ("context, from and to", "context"),
            ("steps a call", "steps_per_call"),
            ("ms a step", "step_milliseconds"),
            ("tokens/s", "tokens_per_second"),
            *_ROOF,
            *_PEER,
        ),
    ),
    "verify": (
        "Verifying drafts",
        (
            ("streams", "streams"),
            ("rows", "rows"),
            ("drafts by", "drafter"),
            ("ms a step", "step_milliseconds"),
            ("time / one row's", "step_ratio"),
            ("bytes / one row's", "bytes_ratio"),
            ("tokens/s, simulated acceptance 0.5", "simulated.0.5"),
            ("0.7", "simulated.0.7"),
            ("0.9", "simulated.0.9"),
        ),
    ),
    "prefill": (
        "First token",
        (
            ("tokens of the prompt", "prompt"),
            ("ms to the first token", "first_token_milliseconds"),
            ("prompt tokens/s", "prompt_tokens_per_second"),
            ("bound, ms", "roofline_milliseconds"),
            ("share of it", "share_of_roofline"),
            *_PEER,
        ),
    ),
    "load": (
        "Under load",
        (
            ("loop", "loop"),
            ("streams", "streams"),
            ("requests/s", "rate"),
            ("prompt", "prompt"),
            ("answer", "output"),
            ("output tokens/s", "output_tokens_per_second"),
            ("first token, ms, p50", "first_token_milliseconds.p50"),
            ("p99", "first_token_milliseconds.p99"),
            ("between tokens, ms, p50", "between_tokens_milliseconds.p50"),
            ("p99", "between_tokens_milliseconds.p99"),
            *_PEER,
        ),
    ),
    "startup": (
        "Starting",
        (
            ("compilation cache", "compile_cache"),
            ("bytes of files", "file_bytes"),
            ("s to the first token", "seconds"),
            ("importing", "stages.imports"),
            ("device", "stages.device"),
            ("loading", "stages.load"),
            ("engine", "stages.engine"),
            ("first token", "stages.first token"),
        ),
    ),
    "kernels": (
        "A decode step, or a prompt, by kernel",
        (
            ("streams", "streams"),
            ("context", "context"),
            ("rows", "rows"),
            ("tokens of a prompt", "prompt"),
            ("calls", "prefill_calls"),
            ("kernels", "kernels_a_step"),
            ("us busy", "busy_microseconds"),
            ("us of gaps", "gaps_microseconds"),
            *_ROOF,
            ("share of the bound", "share_of_roofline"),
        ),
    ),
    "one-answer": (
        "The same answer in any company",
        (
            ("streams", "streams"),
            ("drafts beside each token", "drafts"),
            ("answers compared with those given alone", "answers"),
            ("tokens of each", "tokens"),
            ("same tokens", "same_tokens"),
            ("same bits", "same_bits"),
        ),
    ),
    "segment": (
        "Segmenting, from JPEG files to run lengths",
        (
            *_SEGMENT,
            ("size", "size"),
            ("pictures/s", "images_per_second"),
            ("ms a picture", "milliseconds_a_picture"),
            ("of the arithmetic's ceiling", "share_of_ceiling"),
            ("objects a picture", "objects_a_picture"),
            ("runs a mask", "runs_a_mask"),
            *_SEGMENT_PEER,
        ),
    ),
    "segment-device": (
        "Segmenting, the device's part",
        (
            *_SEGMENT,
            ("pictures/s", "images_per_second"),
            ("ms a batch", "milliseconds"),
            ("embedding", "embed_milliseconds"),
            ("detecting", "detect_milliseconds"),
            ("TFLOP/s", "teraflops_a_second"),
            ("of the arithmetic's ceiling", "share_of_ceiling"),
            *_SEGMENT_PEER,
        ),
    ),
    "segment-latency": (
        "Segmenting, one prompt at a time",
        (
            ("FP8", "fp8"),
            ("what", "what"),
            ("size", "size"),
            ("ms, p50", "milliseconds.p50"),
            ("p90", "milliseconds.p90"),
            ("detecting on the device", "detect_milliseconds"),
            ("the rest", "rest_milliseconds"),
            ("failure", "failure"),
        ),
    ),
    "segment-memory": (
        "Segmenting, device memory",
        (
            *_SEGMENT,
            ("bytes of parameters", "parameter_bytes"),
            ("bytes at most", "peak_bytes"),
            ("failure", "failure"),
        ),
    ),
    "segment-kernels": (
        "Segmenting by kernel",
        (
            *_SEGMENT,
            ("kernels", "kernels_a_step"),
            ("us busy", "busy_microseconds"),
            ("us of gaps", "gaps_microseconds"),
            ("failure", "failure"),
        ),
    ),
    "segment-peer": (
        "Segmenting in other engines, the model alone",
        (
            ("engine", "about.engine"),
            ("variant", "variant"),
            ("weights", "about.weights"),
            ("batch", "batch"),
            ("pictures/s", "images_per_second"),
            ("ms a batch", "milliseconds"),
            ("failure", "failure"),
        ),
    ),
    "ablation": (
        "What each choice is worth",
        (
            ("variant", "variant"),
            ("streams", "streams"),
            ("context, from and to", "context"),
            ("ms a step", "step_milliseconds"),
            ("tokens/s", "tokens_per_second"),
            ("of 4.8 TB/s", "share_of_datasheet"),
            ("failure", "failure"),
        ),
    ),
}
"""Heading and columns of each benchmark's table: what a column is called, and where its value is.

A column that no line has a value for is left out.
"""

PARTS: Mapping[str, tuple[str, str, Columns]] = {
    "verify": (
        "accepted",
        "These steps, with the tokens a step that a small trained checkpoint had with such drafts: "
        "put together, not measured together.",
        (
            ("rows", "rows"),
            ("drafts by", "drafter"),
            ("text", "text"),
            ("sampling", "sampling"),
            ("tokens a step", "tokens_per_step"),
            ("tokens/s", "tokens_per_second"),
        ),
    ),
    "kernels": (
        "families_microseconds",
        "By family, in microseconds a step or a prompt:",
        (
            ("streams", "streams"),
            ("context", "context"),
            ("rows", "rows"),
            ("tokens of a prompt", "prompt"),
            ("family", "name"),
            ("us", "value"),
        ),
    ),
    "segment-kernels": (
        "families_microseconds",
        "By family, in microseconds a batch:",
        (*_SEGMENT, ("family", "name"), ("us", "value")),
    ),
}
"""A second table where a line has a list or a mapping of its own: which, what is said, columns."""


def read(files: Sequence[Path]) -> list[Line]:
    """Lines of benchmarks. Raises ValueError naming the place of one that is none."""
    lines = []
    for file in files:
        for number, text in enumerate(file.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                known = line["bench"] in TABLES
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number} is not a line of a benchmark") from error
            if not known:
                raise ValueError(f"{file}:{number}: no benchmark is called {line['bench']!r}")
            lines.append(line)
    return lines


def write(lines: Sequence[Line], directory: Path, charts: bool) -> Path:
    """Write `README.md` and a chart for each benchmark into a directory; returns the page."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = ["# Benchmarks\n"]
    for bench in TABLES:
        mine = [line for line in lines if line["bench"] == bench]
        if not mine:
            continue
        parts.append(section(bench, mine))
        if charts and bench in CHARTS:
            draw(mine, directory / f"{bench}.png")
            parts.append(f"![{TABLES[bench][0]}]({bench}.png)\n")
    page = directory / "README.md"
    page.write_text("\n".join(parts))
    return page


def section(bench: str, lines: Sequence[Line]) -> str:
    """Heading, where and of what the lines are, the commands, and the table."""
    heading, columns = TABLES[bench]
    return "\n".join(
        [
            f"## {heading}\n",
            *(f"{about}\n" for about in dict.fromkeys(map(_about, lines))),
            "```",
            *dict.fromkeys(line["command"] for line in lines if "command" in line),
            "```\n",
            table(columns, lines),
            *_parts(bench, lines),
        ]
    )


def _parts(bench: str, lines: Sequence[Line]) -> list[str]:
    if bench not in PARTS:
        return []
    key, sentence, columns = PARTS[bench]
    rows: list[Line] = []
    for line in lines:
        inner = line.get(key, ())  # none where it failed
        if isinstance(inner, Mapping):
            inner = [{"name": name, "value": value} for name, value in inner.items()]
        # What is inside hides what is outside.
        rows += [{**line, **one} for one in inner]
    return [f"{sentence}\n", table(columns, rows)] if rows else []


def table(columns: Columns, lines: Sequence[Line]) -> str:
    """A Markdown table."""
    used = [
        (name, path) for name, path in columns if any(_at(line, path) is not None for line in lines)
    ]
    rows = [[name for name, _ in used], ["---"] * len(used)]
    rows += [[_cell(_at(line, path)) for _, path in used] for line in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _about(line: Line) -> str:
    keys = ("model", "weights", "device", "jax", "revision", "date")
    return ", ".join(f"{key} {line[key]}" for key in keys if line.get(key))


def _at(line: Any, path: str) -> Any:
    """The value at a path; a name may have dots of its own."""
    if not isinstance(line, Mapping) or path in line:
        return line.get(path) if isinstance(line, Mapping) else None
    head, _, rest = path.partition(".")
    return _at(line.get(head), rest) if rest else None


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int():
            return f"{value:,}"
        case [*parts]:
            return " to ".join(map(_cell, parts))
    return str(value).splitlines()[-1].replace("|", "/")

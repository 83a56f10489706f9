import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench import charts
from jaxinfer.bench.charts import draw
from jaxinfer.bench.report import TABLES, read, section, write

COMMON = {"model": "toy", "weights": "random", "device": "cpu", "command": "jaxinfer bench"}
STEP = {"streams": 1, "step_milliseconds": 2.0, "roofline_milliseconds": 0.5, "rows": 1}

PICTURES = {"fp8": True, "batch": 8}

LINES: dict[str, dict[str, Any]] = {
    "decode": {**STEP, "context": [128, 192], "tokens_per_second": 12345.678},
    "verify": {
        **STEP,
        "drafter": "ngram",
        "step_ratio": 1.2,
        "bytes_ratio": 1.1,
        "simulated": {"0.5": 10.0, "0.7": 20.0, "0.9": 30.0},
        "accepted": [{"text": "code", "sampling": "greedy", "tokens_per_second": 7.0}],
    },
    "prefill": {"prompt": 128, "first_token_milliseconds": 5.0},
    "load": {
        "streams": 32,
        "rate": None,
        "output_tokens_per_second": 99.0,
        "first_token_milliseconds": {"p50": 1.0, "p99": 2.0},
        "between_tokens_milliseconds": {"p50": 3.0, "p99": 4.0},
    },
    "startup": {"compile_cache": "warm", "seconds": 9.0, "stages": {"first token": 1.5}},
    "kernels": {
        **STEP,
        "context": 128,
        "families_microseconds": {"delta": 5.0},
        "gaps_microseconds": 1.0,
    },
    "ablation": {**STEP, "context": [128, 192], "variant": "plain XLA"},
    "one-answer": {
        "streams": 8,
        "drafts": 0,
        "answers": 4,
        "same_tokens": True,
        "same_bits": False,
    },
    "segment": {**PICTURES, "size": "1920x1080", "images_per_second": 120.0},
    "segment-device": {**PICTURES, "milliseconds": 7.0},
    "segment-latency": {"fp8": True, "what": "a new JPEG file", "milliseconds": {"p50": 1.0}},
    "segment-memory": {**PICTURES, "peak_bytes": 6_000_000_000},
    "segment-kernels": {
        **PICTURES,
        "families_microseconds": {"attention": 5.0},
        "gaps_microseconds": 1.0,
    },
    "segment-peer": {"about": {"engine": "transformers"}, "batch": 8, "milliseconds": 9.0},
}


def line(bench: str) -> dict[str, Any]:
    return {"bench": bench, **LINES[bench], **COMMON}


def test_every_benchmark_has_a_table_and_a_chart_where_one_says_more() -> None:
    assert set(LINES) == set(TABLES)
    tables = {f"segment-{part}" for part in ("device", "latency", "memory", "peer")}
    assert set(TABLES) - set(charts.CHARTS) == {"one-answer"} | tables


def test_what_is_so_or_not_is_said_in_words() -> None:
    page = section("one-answer", [line("one-answer")])
    assert page.splitlines()[-1].endswith("| yes | no |")


def test_a_table_has_the_values_and_leaves_empty_columns_out() -> None:
    page = section("decode", [line("decode")])
    assert "| streams | context, from and to | ms a step | tokens/s |" in page
    assert "| 1 | 128 to 192 | 2 | 12,346 |" in page
    assert "model toy, weights random, device cpu" in page


def test_acceptance_and_families_have_tables_of_their_own() -> None:
    assert "| 1 | ngram | code | greedy | 7 |" in section("verify", [line("verify")])
    assert "| 1 | 128 | 1 | delta | 5 |" in section("kernels", [line("kernels")])
    prompt = {"prompt": 64, "families_microseconds": {"delta": 5.0}, "share_of_roofline": 0.25}
    page = section("kernels", [{"bench": "kernels", **prompt, **COMMON}])
    assert "| 64 | 0.25 |" in page
    assert "| 64 | delta | 5 |" in page


def test_a_page_has_a_section_for_each_benchmark_that_was_run(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line(bench)) + "\n" for bench in ("startup", "load")))
    page = write(read([file]), tmp_path / "page", charts=False).read_text()
    assert "## Under load" in page
    assert "## Starting" in page
    assert "## Decoding" not in page


@pytest.mark.parametrize("text", ["nonsense", "[1]", '{"what": "load"}', '{"bench": "sleep"}'])
def test_what_is_no_line_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line("load")) + "\n" + text + "\n")
    with pytest.raises(ValueError, match=r"lines\.jsonl:2"):
        read([file])


@pytest.mark.parametrize("bench", sorted(charts.CHARTS))
def test_charts_are_drawn(tmp_path: Path, bench: str) -> None:
    pytest.importorskip("matplotlib")
    draw([line(bench)], tmp_path / "new" / "chart.png")
    assert (tmp_path / "new" / "chart.png").stat().st_size > 1000


def test_without_matplotlib_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install jaxinfer\[train\]"):
        draw([line("decode")], tmp_path / "chart.png")


def test_a_chart_is_of_one_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="one benchmark"):
        draw([line("decode"), line("load")], tmp_path / "chart.png")

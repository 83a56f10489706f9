"""What tuning taught, as an entry of `docs/knowledge`."""

import datetime
import math
from pathlib import Path

import jax

from jaxinfer.contracts import bench
from jaxinfer.contracts.contract import least_bytes
from jaxinfer.contracts.tune import Outcome

_ENTRY = """\
# Block sizes of {name} on {device}

**Symptom.** The rule of thumb, a launch and the bytes or operations at the device's best, predicts
other times than `{name}` takes at its default block sizes (microseconds):

{table}

**Cause.** {lessons}

**Check.** `jaxinfer tune {name}`: {tried} settings agreed with the reference and were
measured{left_out}.

**Fix.** {fixes}, in `jaxinfer/contracts/tuned.json`.

**Evidence.** The table above ({device}, jax {version}, {date}): each figure is the median of five
runs of one program that calls the operation again and again, on data that no cache holds.
"""


def entry(outcomes: list[Outcome], device: str, limits: bench.Limits) -> tuple[str, str]:
    """The entry on one operation, and its lesson in a line."""
    failed = {label: why for outcome in outcomes for label, why in outcome.failed.items()}
    examples = "; ".join(f"`{label}`: {why}" for label, why in list(failed.items())[:2])
    fixes = [f"`{outcome.winner.label}`{_at(outcome)}" for outcome in outcomes]
    name = outcomes[0].contract.name
    text = _ENTRY.format(
        name=name,
        device=device,
        table="\n".join(_table(outcomes, limits)),
        lessons=" ".join(line for outcome in outcomes for line in sentences(outcome)),
        tried=sum(len(outcome.trials) for outcome in outcomes),
        left_out=f"; {len(failed)} did not fit or did not agree ({examples})" if failed else "",
        fixes="; ".join(fixes),
        version=jax.__version__,
        date=datetime.date.today().isoformat(),
    )
    return text, f"{name} on {device}: {'; '.join(fixes)}"


def sentences(outcome: Outcome) -> list[str]:
    """What the measurements of a group say."""
    winner, default = outcome.winner, outcome.trials[0]
    at = _at(outcome)
    if winner is default:
        said = [f"The default is the fastest{at}."]
    else:
        gain = default.cost / winner.cost
        said = [f"`{winner.label}` is {gain:.2f} times as fast as `{default.label}`{at}."]
    for knob in winner.knobs:
        best: dict[object, float] = {}
        for trial in outcome.trials:
            if trial.candidate == winner.candidate:
                value = trial.knobs[knob]
                best[value] = min(best.get(value, math.inf), trial.cost)
        worst = max(best, key=lambda value: best[value])
        ratio = best[worst] / winner.cost
        if ratio > 1.05:
            said.append(f"With `{knob}` {worst} it takes {ratio:.2f} times as long.")
        elif len(best) > 1:
            said.append(f"`{knob}` hardly matters.")
    for other in sorted({trial.candidate for trial in outcome.trials} - {winner.candidate}):
        cost = min(trial.cost for trial in outcome.trials if trial.candidate == other)
        said.append(f"`{other}` takes {cost / winner.cost:.2f} times as long at its best.")
    return said


def _at(outcome: Outcome) -> str:
    return f" at {outcome.place}" if outcome.place else ""


def _table(outcomes: list[Outcome], limits: bench.Limits) -> list[str]:
    rows = [
        "| for | MB at least | predicted | default | winner | share of the limit |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        for name, sizes in outcome.shapes.items():
            megabytes = least_bytes(outcome.contract, sizes) / 1e6
            default, taken = outcome.trials[0].seconds[name], outcome.winner.seconds[name]
            share = bench.least_seconds(outcome.contract, sizes, limits) / taken
            times = (1e6 * t for t in (outcome.predicted[name], default, taken))
            figures = " | ".join(f"{t:.2f}" for t in times)
            rows.append(f"| {name}{_at(outcome)} | {megabytes:.3g} | {figures} | {share:.0%} |")
    return rows


def add(directory: Path, name: str, text: str, lesson: str) -> None:
    """Write an entry, in the place of an older one of its name, and list it with its lesson."""
    (directory / f"{name}.md").write_text(text)
    listing = directory / "README.md"
    start = f"| [{name}]({name}.md) |"
    lines = listing.read_text().splitlines() if listing.exists() else []
    kept = [line for line in lines if not line.startswith(start)]
    listing.write_text("\n".join([*kept, f"{start} {lesson} |"]) + "\n")

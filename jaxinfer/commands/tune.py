"""`jaxinfer tune`."""

from pathlib import Path

import jax

from jaxinfer.commands.terminal import out
from jaxinfer.contracts import lessons, table
from jaxinfer.contracts.bench import limits
from jaxinfer.contracts.registry import find
from jaxinfer.contracts.tune import tune


def run(names: tuple[str, ...], tuned: Path | None, knowledge: Path) -> None:
    """Tune on the device at hand; every finished operation is written down at once."""
    contracts, bounds, tuned = find(names), limits(), tuned or table.PATH
    if not knowledge.is_dir():
        raise ValueError(f"there is no directory {knowledge}; say with --knowledge where to write")
    device = jax.devices()[0].device_kind
    for contract in contracts:
        outcomes = list(tune(contract, bounds, lambda line: out.print(line, markup=False)))
        known = table.read(tuned)
        for outcome in outcomes:
            known = table.with_winner(known, device, contract.name, outcome.place, outcome.entry)
        table.write(known, tuned)
        text, lesson = lessons.entry(outcomes, device, bounds)
        name = f"block sizes of {contract.name} on {device}".lower()
        name = name.replace(" ", "-").replace("_", "-")
        lessons.add(knowledge, name, text, lesson)
        out.print(lesson, style="green", markup=False)

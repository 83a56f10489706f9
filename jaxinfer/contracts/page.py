"""A page of documentation from the contracts: `python -m jaxinfer.contracts.page`."""

from pathlib import Path
from typing import Any

import jax

from jaxinfer.contracts.bench import LIMITS, least_seconds
from jaxinfer.contracts.contract import Contract, Spec, least_bytes
from jaxinfer.contracts.registry import CONTRACTS

PATH = Path(__file__).parents[2] / "docs" / "contracts.md"
DEVICE = "NVIDIA H200"

_INTRODUCTION = """\
# Contracts

What each operation promises. This page is made from `jaxinfer/contracts/kernels` by
`python -m jaxinfer.contracts.page`; `jaxinfer verify` holds the operations to it, and
`jaxinfer tune` chooses their block sizes.

Results may be off by the tolerance, relative to their own magnitude and to the root mean square of
their array; integers are equal. What is said not to matter changes no bit. All arrays lie in
device memory unless said otherwise. The limit is what an {device} could do at best:
{bandwidth:.2g} bytes and {rate:.2g} bfloat16 operations a second, both measured.
"""

_HOW = {
    "rows": "neither the place nor the number of entries along `{}`",
    "prefix": "what stands behind an entry along `{}`",
    "labels": "by which numbers entries along `{}` go",
}


def pages(contracts: dict[str, Contract] = CONTRACTS) -> str:
    """The whole page, in Markdown."""
    limits = LIMITS[DEVICE]
    head = _INTRODUCTION.format(device=DEVICE, bandwidth=limits.bandwidth, rate=limits.rate)
    return "\n".join([head, *(page(contract) for contract in contracts.values())])


def page(contract: Contract) -> str:
    """The section on one operation."""
    lines = [f"## {contract.name}", "", contract.doc, ""]
    lines += ["| | name | shape | type | |", "|---|---|---|---|---|"]
    for kind, trees in (("takes", contract.arguments), ("gives", contract.results)):
        for name, tree in trees.items():
            for path, spec in _leaves(name, tree):
                lines.append(f"| {kind} | `{path}` | {_array(spec)} | {_notes(contract, name)}|")
    lines += ["", *_promises(contract), "", *_sizes(contract), ""]
    return "\n".join(lines)


def _leaves(name: str, tree: Any) -> list[tuple[str, Spec]]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(name + jax.tree_util.keystr(path), spec) for path, spec in found]


def _array(spec: Spec) -> str:
    shape = f"`[{', '.join(spec.axes)}]`" if spec.axes else "scalar"
    return f"{shape} | {spec.dtype}{', on the host' if spec.memory == 'host' else ''}"


def _notes(contract: Contract, name: str) -> str:
    if name in contract.overwrites:
        return f"overwritten by `{contract.overwrites[name]}` "
    for argument, result in contract.overwrites.items():
        if result == name:
            return f"in the place of `{argument}` "
    return ""


def _promises(contract: Contract) -> list[str]:
    lines = [f"- Tolerance {contract.tolerance:g}."]
    if contract.stack:
        lines.append(f"- Works on one layer of the stacks along `{contract.stack}`, uncopied.")
    kept = [_HOW[how].format(symbol) for symbol, how in contract.invariant.items()]
    if kept:
        lines.append(f"- Does not matter: {'; '.join(kept)}.")
    for name, candidate in contract.candidates.items():
        knobs = ", ".join(f"`{knob}`" for knob in candidate.knobs)
        lines.append(f"- Candidate `{name}`{f', tuned by {knobs}' if knobs else ''}.")
    return lines


def _sizes(contract: Contract) -> list[str]:
    lines = ["| for | sizes | MB | GFLOP | limit in us |", "|---|---|---|---|---|"]
    for name, sizes in contract.shapes.items():
        given = " ".join(f"{symbol}={value}" for symbol, value in sizes.items())
        moved = least_bytes(contract, sizes) / 1e6
        least = 1e6 * least_seconds(contract, sizes, LIMITS[DEVICE])
        done = contract.operations(sizes) / 1e9
        lines.append(f"| {name} | {given} | {moved:.3g} | {done:.3g} | {least:.3g} |")
    return lines


if __name__ == "__main__":
    PATH.write_text(pages())

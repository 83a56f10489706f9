"""Draw the losses of a training run.

python -m checkpoints.tiny_sam_training.curve OUT/curve.jsonl curve.png
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

LABELS = {
    "score": "score, summed over queries",
    "semantic": "all that is wanted, cross entropy",
    "mask": "masks, cross entropy",
    "presence": "presence",
    "giou": "boxes, 1 - GIoU",
    "dice": "masks, 1 - Dice",
    "l1": "boxes, L1",
    "cells": "names of cells",
    "words": "names in prompts",
}
"""Parts of the loss, largest first."""

SMOOTHED = 8
"""Lines of which a mean is drawn."""


def draw(lines: Path, picture: Path) -> None:
    """Draw the parts of the loss over the steps of `curve.jsonl`, on a logarithmic scale."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    steps = np.array([row["step"] for row in rows])
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, label in LABELS.items():
        # Runs of before have fewer.
        if name not in rows[0]:
            continue
        losses = np.array([row[name] for row in rows])
        means = [losses[max(0, i + 1 - SMOOTHED) : i + 1].mean() for i in range(len(losses))]
        axes.plot(steps, means, label=label, lw=1.2)
    axes.set(yscale="log", xlabel="step", ylabel="loss, mean of some steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path)
    parser.add_argument("picture", type=Path)
    a = parser.parse_args()
    draw(a.lines, a.picture)


if __name__ == "__main__":
    main()

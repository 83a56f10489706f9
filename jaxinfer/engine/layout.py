"""What the scheduler planned, as the arrays that a call takes."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from jaxinfer.engine.options import Options
from jaxinfer.engine.pool import SCRATCH
from jaxinfer.engine.sequence import Piece
from jaxinfer.engine.sequence import Sequence as Scheduled
from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.state import Pieces, Rows


def lay_out_pieces(
    pieces: Sequence[Piece], options: Options, size: int | None = None
) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """A prefill call's pieces, tokens `[P, 64]` and what follows each `[P]`; see `prefill_step`.

    All are NumPy arrays, filled up to a number of pieces for which there is a call, or to `size`.
    """
    size, scratch = size or options.pieces_size(len(pieces)), options.slots
    tokens, following = np.zeros((size, CHUNK), np.int32), np.zeros(size, np.int32)
    slot, source, snapshot = (np.full(size, scratch, np.int32) for _ in range(3))
    start, valid = np.zeros(size, np.int32), np.zeros(size, np.int32)
    table, fresh = np.zeros((size, options.width), np.int32), np.zeros(size, bool)
    begin = 0
    for sequence, given in groupby(pieces, attrgetter("sequence")):
        consecutive = list(given)
        rows = slice(begin, begin + len(consecutive))
        assert sequence.slot is not None
        first, end = consecutive[0].start, consecutive[-1].start + consecutive[-1].valid
        # At once: a long prompt waits for this before it begins.
        tokens[rows].reshape(-1)[: end - first] = sequence.prompt[first:end]
        table[rows, : len(sequence.pages)] = sequence.pages
        slot[rows] = source[rows] = sequence.slot
        for row, piece in enumerate(consecutive, begin):
            following[row] = -1 if piece.last else sequence.prompt[piece.start + piece.valid]
            start[row], valid[row] = piece.start, piece.valid
            fresh[row] = piece.page != SCRATCH
            if piece.source is not None:
                source[row] = piece.source
            if piece.snapshot is not None:
                snapshot[row] = piece.snapshot
        begin = rows.stop
    fields: dict[str, Any] = {
        "table": table,
        "slot": slot,
        "start": start,
        "valid": valid,
        "source": source,
        "snapshot": snapshot,
        "fresh": fresh,
    }
    return Pieces(**fields), tokens, following


def lay_out_rows(sequences: Sequence[Scheduled], options: Options, size: int | None = None) -> Rows:
    """A decode call's rows, as NumPy arrays, filled up as above."""
    size = size or options.batch_size(len(sequences))
    slot = np.full(size, options.slots, np.int32)
    table = np.zeros((size, options.width), np.int32)
    for row, sequence in enumerate(sequences):
        assert sequence.slot is not None
        slot[row] = sequence.slot
        table[row, : len(sequence.pages)] = sequence.pages
    fields: dict[str, Any] = {"table": table, "slot": slot}
    return Rows(**fields)

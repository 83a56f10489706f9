"""Sizes and budgets of an engine."""

from dataclasses import dataclass

from jaxinfer.qwen.config import CHUNK


@dataclass(frozen=True)
class Options:
    """What an engine holds and how it goes about its work; static.

    Attributes:
        slots: requests that run together.
        context: tokens that prompt and answer may have together.
        pages: pages of 64 tokens.
        snapshots: entries for snapshots of Gated DeltaNet's memory.
        lengths: numbers of drafts from which a call's is chosen, ascending; (0,) for none.
        verify_lengths: the same where a grammar forces tokens; the last is the longest possible.
        batches: numbers of rows for which calls are compiled, ascending; the last is `slots`.
        steps: decode steps a call.
        prefill_budget: tokens of prompts that a call may prefill while others decode: it bounds how
            long they wait.
        prefill_tokens: the same while nobody waits.
        kv_dtype: how keys and values are stored; None for the model's own type.
        prefix_cache: whether prompts share what their beginnings have in common.
        cache_bytes: the most bytes that the prefix cache keeps of what nobody uses; None for all
            that is free.
        snapshot_interval: tokens between snapshots in a long prompt.
        page_bytes: size of a page.
        snapshot_bytes: size of a snapshot.
        turn: the token with which a message begins, or None.
    """

    slots: int
    context: int
    pages: int
    snapshots: int
    lengths: tuple[int, ...]
    verify_lengths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int
    prefill_budget: int
    prefill_tokens: int
    kv_dtype: str | None
    prefix_cache: bool
    cache_bytes: int | None
    snapshot_interval: int
    page_bytes: int
    snapshot_bytes: int
    turn: int | None

    @property
    def width(self) -> int:
        """The most pages of a request."""
        return -(-self.context // CHUNK)

    def batch_size(self, count: int) -> int:
        """Rows of the smallest compiled decode call for so many."""
        return next(size for size in self.batches if size >= count)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Numbers of pieces for which prefill calls are compiled."""
        most = self.prefill_tokens // CHUNK
        sizes = [1]
        while sizes[-1] < most:
            sizes.append(min(2 * sizes[-1], most))
        return tuple(sizes)

    def pieces_size(self, count: int) -> int:
        """Pieces of the smallest compiled prefill call for so many."""
        return next(size for size in self.piece_sizes if size >= count)

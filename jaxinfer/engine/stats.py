"""What an engine has done so far, in numbers."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Counted by the engine as it goes.

    Attributes:
        submitted: requests taken in.
        finished: those that ended by themselves.
        cancelled: those that were cancelled.
        prefilled_tokens: tokens of prompts that were computed; those that the prefix cache had are
            not among them, those computed again after a preemption are.
        generated_tokens: tokens of answers.
        drafted: tokens that speculation proposed and the model verified.
        accepted: those of them that held.
        prefill_calls: compiled prefill calls.
        decode_calls: compiled decode calls.
        decode_steps: steps in those calls.
        sequence_steps: sequences that took part in a step, over all steps.
        late_calls: decode calls that were dispatched when the one before had already ended, so
            that the device had to wait for the host.
    """

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    decode_steps: int = 0
    sequence_steps: int = 0
    late_calls: int = 0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        counters: since the engine was made.
        running: requests that have a slot.
        waiting: requests that have none yet, preempted ones included.
        slots: how many requests can run at once.
        pages: pages of 64 tokens in the pool.
        free_pages: those that hold nothing.
        cached_pages: those that the prefix cache holds, used or not.
        snapshots: entries for snapshots of Gated DeltaNet's memory.
        held_snapshots: those in use.
        preemptions: requests that lost their slot for a while.
        prompt_tokens: tokens of the prompts that were admitted.
        cached_tokens: those of them that the prefix cache had.
        evicted_pages: pages that the prefix cache gave up.
    """

    counters: Counters
    running: int
    waiting: int
    slots: int
    pages: int
    free_pages: int
    cached_pages: int
    snapshots: int
    held_snapshots: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    evicted_pages: int

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that held; 0 when none were drafted."""
        return self.counters.accepted / self.counters.drafted if self.counters.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains in a decode step, on average; 0 before the first."""
        steps = self.counters.sequence_steps
        return (steps + self.counters.accepted) / steps if steps else 0.0

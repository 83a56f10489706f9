"""The kinds of tools that the dialogues offer; their names differ from one draw to the next."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from checkpoints.tiny_qwen_training import actions, lookups
from checkpoints.tiny_qwen_training.tool_types import Offer

KINDS: tuple[Callable[[Random], Offer], ...] = (
    lookups.weather, lookups.stock, lookups.books, lookups.contacts, lookups.sums,
    lookups.convert, lookups.local_time, lookups.distance, lookups.lookup,
    actions.timer, actions.reminder, actions.order, actions.message, actions.light,
    actions.heating, actions.shopping_list, actions.event,
)  # fmt: skip


def offers(rng: Random, count: int) -> list[Offer]:
    """That many tools, each of another kind."""
    return [kind(rng) for kind in rng.sample(KINDS, count)]

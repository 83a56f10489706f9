"""Structured answers taken apart: what was thought first, and the rest to the letter."""

from jaxinfer.engine.llm import THOUGHT
from jaxinfer.qwen.messages import Delta, MessageParser, TextDelta


class VerbatimParser:
    """Splits the thoughts from an answer that must stay as it is, as its text arrives.

    `MessageParser` would trim such an answer, and take `</think>` out of its strings.

    Args:
        thinking: whether the prompt ends within the reasoning.
    """

    def __init__(self, *, thinking: bool) -> None:
        self._thoughts = MessageParser(thinking=True, calls=False) if thinking else None
        self._tail = ""

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of text adds."""
        if self._thoughts is None:
            return [TextDelta("content", text)] if text else []
        seen = self._tail + text
        at = seen.find(THOUGHT)
        if at < 0:
            self._tail = seen[-len(THOUGHT) + 1 :]
            return self._thoughts.feed(text)
        end = at + len(THOUGHT) - len(self._tail)
        thoughts = self._thoughts.feed(text[:end])
        self._thoughts = None
        return thoughts + self.feed(text[end:])

    def finish(self) -> list[Delta]:
        """What is left when no more text comes."""
        return [] if self._thoughts is None else self._thoughts.finish()

"""Requests in the middle of an answer, brought to the device's sampler."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import SamplingParams
from jaxinfer.engine.sampling import Sampled, Sampler, count, init_sampler, sample, set_slots
from jaxinfer.engine.sampling_settings import LENGTH, settings

VOCABULARY = 40
ROOM = 8
"""Tokens that a prompt, and an answer before its drafts, have room for here."""
TOP = 5

NEUTRAL = SamplingParams()

draw = jax.jit(sample, static_argnames=("top", "tile"))


@dataclass(frozen=True)
class Case:
    """A request in the middle of its answer, and the drafts that are verified next."""

    params: SamplingParams = NEUTRAL
    prompt: tuple[int, ...] = (1,)
    answer: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.answer, *self.drafts]

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens `[1, T]`, tails `[1, T, LENGTH - 1]` and indices `[1, T]` of `sample`."""
        size, end = LENGTH - 1, len(self.known) - len(self.drafts)
        padded = [-1] * size + self.known
        index = np.arange(end, len(self.known) + 1)
        tail = [padded[i : i + size] for i in index]
        return np.array([self.known[end - 1 :]]), np.array([tail]), index[None]


def pad(tokens: tuple[int, ...], room: int = ROOM) -> np.ndarray:
    return np.array([*tokens, *[0] * (room - len(tokens))], np.int32)


@partial(jax.jit, static_argnums=0)
def begin(shape, slot, own, bias, prompt, prompt_tokens, answer, number) -> Sampler:
    own, prompt = jax.tree.map(lambda value: value[None], (own, prompt))
    sampler = set_slots(init_sampler(*shape), slot[None], own, bias, prompt, prompt_tokens[None])
    return count(sampler, slot[None], answer[None], number[None])


def sampler_of(case: Case, vocabulary: int = VOCABULARY, slots: int = 1, slot: int = 0) -> Sampler:
    """A sampler in which one slot has come as far as the case."""
    own, bias = settings(
        case.params,
        seed=case.seed,
        prompt_tokens=len(case.prompt),
        stops=case.stops,
        bad=case.bad,
        vocabulary=vocabulary,
    )
    bias = np.zeros(vocabulary, np.float32) if bias is None else bias
    prompt, answer = pad(case.prompt), pad(case.answer)
    lengths = jnp.int32(len(case.prompt)), jnp.int32(len(case.answer))
    shape = slots, vocabulary
    return begin(shape, jnp.int32(slot), own, bias, prompt, lengths[0], answer, lengths[1])


def run(case: Case, scores: np.ndarray, masks: np.ndarray | None = None, tile: int = 8) -> Sampled:
    """Sample the rows `[T, V]` of one case; the result has a leading axis of one.

    Without masks everything is allowed, by a mask, since each form is compiled.
    """
    sampler = sampler_of(case, scores.shape[-1])
    words = pack(np.ones(scores.shape, bool) if masks is None else masks)[None]
    return draw(scores[None], sampler, jnp.zeros(1, int), *case.rows(), words, top=TOP, tile=tile)


def pack(allowed: np.ndarray) -> np.ndarray:
    """Booleans `[..., V]` as words `[..., ceil(V / 32)]`, the bits behind the last one set."""
    missing = -allowed.shape[-1] % 32
    whole = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, missing)], constant_values=True)
    return np.packbits(whole, axis=-1, bitorder="little").view("<u4")

"""How many tokens to draft, from what drafts have been worth and what they have cost."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import mul


class DraftLength:
    """Chooses the number of drafts with the most expected tokens per second.

    A step of `L` drafts yields the drafts that hold and one token more. With `p[k]` the chance that
    draft `k` is there and holds, given that the one before it did, that is

        1 + p[1] + p[1] p[2] + ... + p[1] ... p[L]

    tokens. The chances are exponential averages, and so is the cost of a step of each length: a
    geometric one, in which a hiccup of a hundred steps does not count a hundredfold. What the
    length in use tells nothing about is slowly forgotten: the chances of places behind it drift to
    the prior, and costs of other lengths to what is assumed of them (a draft adds a tenth to a
    step). So longer drafts are tried again now and then, and nothing is ruled out for good by a
    stretch of bad luck or one slow step.

    Args:
        lengths: numbers of drafts to choose from, ascending; 0 is none.
        prior: chance that a draft holds before anything is known.
        weight: of an observation in an average; about `1 / weight` of them are remembered.
        forget: how far what is not tried drifts at each observation; well below `weight`, which is
            what a trial in vain corrects.

    Raises ValueError if there is no length, if they do not ascend from 0 or more, or if another
    argument is not from 0 to 1.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        prior: float = 0.7,
        weight: float = 0.02,
        forget: float = 0.0003,
    ) -> None:
        self._lengths = tuple(lengths)
        if not lengths or lengths[0] < 0 or self._lengths != tuple(sorted(set(lengths))):
            raise ValueError(f"lengths must ascend from 0 or more, not {self._lengths}")
        for name, value in (("prior", prior), ("weight", weight), ("forget", forget)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {value}")
        self._prior, self._weight, self._forget = prior, weight, forget
        self._chances = [prior] * self._lengths[-1]
        self._units: dict[int, float] = {}

    def observe(self, accepted: int, offered: int, length: int) -> None:
        """Learn from one step of one request.

        Args:
            accepted: how many drafts held.
            offered: how many there were; a place left empty counts as a draft that did not hold.
            length: how many there was place for; need not be one to choose from.

        Raises ValueError unless `0 <= accepted <= offered <= length`.
        """
        if not 0 <= accepted <= offered <= length:
            raise ValueError(
                f"accepted={accepted}, offered={offered} and length={length} must ascend from 0"
            )
        for place in range(min(accepted + 1, length, len(self._chances))):
            self._chances[place] += self._weight * ((place < accepted) - self._chances[place])
        for place in range(length, len(self._chances)):
            self._chances[place] += self._forget * (self._prior - self._chances[place])

    def measured(self, length: int, seconds: float) -> None:
        """Learn what a step with so many drafts costs. A step that was compiled tells nothing.

        Args:
            length: its number of drafts; need not be one to choose from.
            seconds: how long it took; any unit will do if it is always the same.

        Raises ValueError if the time is not above 0 and finite, or the length is below 0.
        """
        if length < 0:
            raise ValueError(f"length must be at least 0, not {length}")
        if not 0 < seconds < inf:
            raise ValueError(f"seconds must be above 0 and finite, not {seconds}")
        unit = seconds / _assumed(length)
        self._units.setdefault(length, unit)
        for known, before in self._units.items():
            weight = self._weight if known == length else self._forget
            self._units[known] = before * (unit / before) ** weight

    def best(self) -> int:
        """The length to use next; of equals the shortest."""
        tokens = tuple(accumulate(accumulate(self._chances, mul), initial=1.0))
        return max(self._lengths, key=lambda length: tokens[length] / self._cost(length))

    def _cost(self, length: int) -> float:
        """Time of a step, as measured or else in proportion to the nearest length that was."""
        nearest = min(self._units, key=lambda known: abs(known - length), default=None)
        return _assumed(length) * (1.0 if nearest is None else self._units[nearest])


def _assumed(length: int) -> float:
    """Cost of a step with so many drafts, relative to one without, before it is measured."""
    return 1 + 0.1 * length

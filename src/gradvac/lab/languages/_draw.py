"""Deterministic drawing: the same key gives the same draws on every machine and Python version.

Only `random.Random.random` is used, because it is the one method whose sequence the standard
library promises to keep for a string seed; `choice`, `sample` and `shuffle` may change.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Draw:
    """A stream of random decisions, fixed by its key.

    Args:
        *key: Names and numbers that say what is drawn, such as `(seed, "roots", "sarvan")`.
            Streams with different keys are independent.
    """

    def __init__(self, *key: str | int) -> None:
        self._next = random.Random("/".join(str(part) for part in key)).random

    def below(self, limit: int) -> int:
        """Draw an integer from 0 to `limit - 1`."""
        return int(self._next() * limit)

    def chance(self, probability: float) -> bool:
        """Draw True with the given probability."""
        return self._next() < probability

    def one(self, items: Sequence[Item]) -> Item:
        """Draw one item, all equally likely."""
        return items[int(self._next() * len(items))]


class Weighted(Generic[Item]):
    """Items to draw from with integer weights.

    Weights are integers so that the running totals are exact everywhere.
    """

    def __init__(self, items: Sequence[Item], weights: Sequence[int]) -> None:
        self.items = tuple(items)
        self.totals: list[int] = []
        total = 0
        for weight in weights:
            total += weight
            self.totals.append(total)

    def draw(self, draw: Draw) -> Item:
        """Draw one item with probability proportional to its weight."""
        return self.items[bisect_right(self.totals, draw.below(self.totals[-1]))]


def rank_weight(rank: int) -> int:
    """Weigh an item by its rank, as words are in text: the first is common, the last is rare."""
    return 6000 // (rank + 6)


def by_rank(items: Sequence[Item]) -> Weighted[Item]:
    """Weigh items by their rank."""
    return Weighted(items, [rank_weight(rank) for rank in range(len(items))])

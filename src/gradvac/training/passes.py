"""Endless passes over each task's data, in a new random order on every pass."""

# T tasks

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Passes:
    """Hands out the rows of every task, each once per pass, in a random order.

    The order of a pass is a function of the seed, the task and the number of the pass, so where
    this stands is one number per task.

    Args:
        sizes: Rows of every task, `[T]`.
        seed: Of the orders.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int) -> None:
        self._sizes, self._seed = list(sizes), seed
        self._drawn = [0] * len(self._sizes)
        self._orders: dict[tuple[int, int], npt.NDArray[np.uint32]] = {}

    def take(self, task: int, num: int) -> Numbers:
        """The next rows of a task."""
        size, first = self._sizes[task], self._drawn[task]
        self._drawn[task] += num
        pieces = []
        while num:
            turn, start = divmod(first, size)
            if (task, turn) not in self._orders:
                self._orders = {key: o for key, o in self._orders.items() if key[0] != task}
                generator = np.random.default_rng([self._seed, task, turn])
                self._orders[task, turn] = generator.permutation(np.arange(size, dtype=np.uint32))
            piece = self._orders[task, turn][start : start + num]
            pieces.append(piece.astype(np.int64))
            first, num = first + len(piece), num - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Rows of every task handed out so far."""
        return {"drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._drawn = list(state["drawn"])

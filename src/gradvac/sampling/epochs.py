"""Endless epochs over each task's data, in a new random order in every epoch."""

# T tasks

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_LARGE = 1 << 20  # rows from which an order is not stored
_ROUNDS = 6
_BLOCK = 1 << 16  # neighbouring rows that are visited in the same part of an epoch
_BLOCKS_AT_ONCE = 16


class Epochs:
    """Hands out the rows of every task, each once per epoch, in a random order.

    The order of an epoch is a function of the seed, the task and the number of the epoch, so the
    position is one number per task. The order of a large task is computed on the fly and never
    stored; it takes a million rows at a time, from sixteen places, so that an epoch over many files
    starts at once and opens only a few of them.

    Args:
        sizes: Rows of every task, `[T]`.
        seed: Seed of the orders.
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
            epoch, start = divmod(first, size)
            end = min(start + num, size)
            if size > _LARGE:
                piece = permute_by_blocks(
                    np.arange(start, end), size, seed=(self._seed, task, epoch)
                )
            else:
                piece = self._order(task, epoch)[start:end].astype(np.int64)
            pieces.append(piece)
            first, num = first + len(piece), num - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _order(self, task: int, epoch: int) -> npt.NDArray[np.uint32]:
        if (task, epoch) not in self._orders:
            self._orders = {key: o for key, o in self._orders.items() if key[0] != task}
            generator = np.random.default_rng([self._seed, task, epoch])
            every = np.arange(self._sizes[task], dtype=np.uint32)
            self._orders[task, epoch] = generator.permutation(every)
        return self._orders[task, epoch]

    def state_dict(self) -> dict[str, Any]:
        """Rows of every task handed out so far."""
        return {"drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._drawn = list(state["drawn"])


def permute_by_blocks(positions: Numbers, size: int, *, seed: Sequence[int]) -> Numbers:
    """Entries of a random order of 0 ... size - 1 that moves slowly through the numbers.

    Blocks of neighbouring rows come in random order; those of sixteen blocks are mixed.

    Args:
        positions: Positions in the order, ascending, each below `size`.
        size: Length of the order.
        seed: Another seed, another order.
    """
    num_blocks = -(-size // _BLOCK)
    blocks = permute(np.arange(num_blocks), num_blocks, seed=seed)
    sizes = np.where(blocks == num_blocks - 1, size - (num_blocks - 1) * _BLOCK, _BLOCK)
    parts = np.arange(0, num_blocks, _BLOCKS_AT_ONCE)
    starts = np.concatenate([[0], np.cumsum(np.add.reduceat(sizes, parts))])
    part_of = np.searchsorted(starts, positions, side="right") - 1
    numbers = np.empty(len(positions), dtype=np.int64)
    for part in np.unique(part_of).tolist():
        block_slice = slice(part * _BLOCKS_AT_ONCE, (part + 1) * _BLOCKS_AT_ONCE)
        is_here, ends = part_of == part, np.concatenate([[0], np.cumsum(sizes[block_slice])])
        inside = permute(positions[is_here] - starts[part], int(ends[-1]), seed=(*seed, part))
        block = np.searchsorted(ends, inside, side="right") - 1
        numbers[is_here] = blocks[block_slice][block] * _BLOCK + inside - ends[block]
    return numbers


def permute(positions: Numbers, size: int, *, seed: Sequence[int]) -> Numbers:
    """Entries of a random order of 0 ... size - 1, without computing the others.

    A Feistel network is a permutation of all numbers of an even number of bits; a number that lands
    outside goes through it again until it lands inside, so that it permutes 0 ... size - 1 too.

    Args:
        positions: Positions in the order, each below `size`.
        size: Length of the order.
        seed: Another seed, another order.
    """
    half = -(-max(2, int(size - 1).bit_length()) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = np.random.default_rng(list(seed)).integers(0, 1 << 63, _ROUNDS, dtype=np.uint64)
    numbers = positions.astype(np.uint64)
    outside = np.ones(len(numbers), dtype=bool)
    while outside.any():
        left, right = numbers[outside] >> shift, numbers[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        numbers[outside] = (left << shift) | right
        outside = numbers >= size
    return numbers.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64, which wraps around as it needs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

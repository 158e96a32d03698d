"""Batches of one size, cut so that all of them are full.

Sentences come sorted by length within each task. Batches are cut one after the other, each taking
the same share of every task, as many sentences as fit. The last one would have what is left over:
so sizes are first made smaller, for as long as there are no more batches than with the whole size.
"""

# N sentences of all tasks, T tasks

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradvac.lab.recipes.nmt.batch import Frame

Numbers = npt.NDArray[np.int64]
Limits = npt.NDArray[np.float64]

_TOKEN_UNIT = 64  # what matrix products like
_SPARE = 1.01  # the ratio of the sides differs from batch to batch
_ROWS = 3.0  # times as many as a batch of mean sentences has; a batch of shorter ones is not full
_DRAWN = 0.985  # of what the batches of a chunk hold: tokens vary, and one more would be empty
_TRIES = 12


def make_frame(tokens: int, means: npt.NDArray[np.float64], longest: int) -> Frame:
    """The size of all batches: the longer side has `tokens`, the other what goes with them.

    Args:
        tokens: Of the longer side.
        means: Mean lengths of the sides, `[2]`.
        longest: Tokens of the longest sentence there can be.
    """
    room = longest + -(-tokens // longest)  # one sentence fits, and the rows that do not count
    sides = [
        max(room, min(tokens, _TOKEN_UNIT * math.ceil(_SPARE * share * tokens / _TOKEN_UNIT)))
        for share in means / np.max(means)
    ]
    rows = math.ceil(_ROWS * tokens / np.max(means)) + -(-tokens // longest)
    return Frame(sides[0], sides[1], rows, longest)


def rows_to_draw(frame: Frame, means: npt.NDArray[np.float64], num_batches: int) -> int:
    """How many sentence pairs nearly fill some batches."""
    fullest = np.max(means / [frame.source, frame.target])
    return max(1, round(_DRAWN * num_batches / float(fullest)))


def cut_full(frame: Frame, lengths: Sequence[Numbers]) -> list[list[slice]]:
    """Cut sorted sentences into full batches.

    Args:
        frame: The size of a batch.
        lengths: Tokens of both sides of every task's sentences, `[2, n]` each.

    Returns:
        For every batch, which sentences it has of every task.
    """
    # A sentence lies where its middle is, as a share of its task.
    costs = [sides.sum(0) for sides in lengths]
    places = [(np.cumsum(cost) - cost / 2) / max(1, cost.sum()) for cost in costs]
    order = np.argsort(np.concatenate(places), kind="stable")
    sizes, limits = _sizes(frame, np.concatenate(lengths, axis=1)[:, order])
    owners = np.repeat(np.arange(len(lengths)), [len(cost) for cost in costs])[order]
    taken = np.zeros((len(order) + 1, len(lengths)), dtype=np.int64)
    taken[1:] = np.cumsum(owners[:, None] == np.arange(len(lengths)), axis=0)
    edges = taken[_even_ends(sizes, limits)]
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [[slice(*ends) for ends in zip(start, end, strict=True)] for start, end in pairs]


def _sizes(frame: Frame, lengths: Numbers) -> tuple[Limits, Limits]:
    """What sentences before each place add up to, `[3, N + 1]`, and what a batch may have, `[3]`.

    Each row that fills up a target needs a token of the source: that much of the source is not to
    be had, the less the more of the target is taken.
    """
    source, target = lengths
    held = source - target / frame.longest
    sizes = np.zeros((3, len(source) + 1))
    sizes[:, 1:] = np.cumsum([held, target, np.ones(len(source))], axis=1)
    limits = [frame.source - frame.target / frame.longest - 1, frame.target, frame.most_rows]
    return sizes, np.array(limits, dtype=np.float64)


def _even_ends(sizes: Limits, limits: Limits) -> list[int]:
    """Where batches end, 0 first, with tokens as even as keeps their number."""
    best = _ends(sizes, limits)
    low, high = 0.0, 1.0
    for _ in range(_TRIES):
        share = (low + high) / 2
        ends = _ends(sizes, limits * [share, share, 1.0])
        if len(ends) > len(best):
            low = share
        else:
            best, high = ends, share
    return best


def _ends(sizes: Limits, limits: Limits) -> list[int]:
    num = sizes.shape[1] - 1
    ends = [0]
    while ends[-1] < num:
        start = ends[-1]
        pairs = zip(sizes, sizes[:, start] + limits, strict=True)
        fits = min(int(np.searchsorted(size, most, side="right")) - 1 for size, most in pairs)
        ends.append(max(fits, start + 1))  # the frame holds the longest sentence alone
    return ends

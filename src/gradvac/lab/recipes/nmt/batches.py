"""Batches of sentence pairs: rows of many tasks, padded or packed, of any or of a static shape.

A static shape lets a training step be recorded as a CUDA graph. All batches of a run then have the
same tokens and rows, and what is left over is filled with rows that do not count. So that little is
left over, sentences, sorted by length within each task, are cut into batches one after the other,
each taking the same share of every task, as many sentences as fit. The last one would have what is
left over: so sizes are first made smaller, for as long as there are no more batches than with the
full size.
"""

# B sentences, S tokens of the longest, N tokens of all, D width, T tasks

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import gradvac
from gradvac.engine import RowTasks

Tokens = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.int64]
Limits = npt.NDArray[np.float64]
Change = Callable[[Tensor], Tensor]

_PADDING = 0


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sentences of any length, one after the other."""

    tokens: Tokens  # [N]
    lengths: Tokens  # [B]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[int] | Tokens]) -> Ragged:
        """Put sentences together."""
        arrays = [np.asarray(sentence, dtype=np.int64) for sentence in sentences]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Put the sentences of several together."""
        tokens = np.concatenate([part.tokens for part in parts])
        return cls(tokens, np.concatenate([part.lengths for part in parts]))

    def add_special_tokens(self, first: int | Tokens, last: int) -> Ragged:
        """Put a token before every sentence (one for all, or one each) and one after it."""
        lengths = self.lengths + 2
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), dtype=np.int64)
        inner = np.ones(len(tokens), dtype=bool)
        inner[ends - lengths] = inner[ends - 1] = False
        tokens[ends - lengths], tokens[ends - 1], tokens[inner] = first, last, self.tokens
        return Ragged(tokens, lengths)


class StaticShape(NamedTuple):
    """One shape for all batches of a run, filled up with rows that do not count."""

    source: int
    target: int
    rows: int  # sentence pairs, those that do not count included; the last ones may be empty
    longest: int  # tokens of the longest sentence there can be

    @property
    def max_rows(self) -> int:
        """The most that count: the others can hold whatever is left over."""
        return self.rows + max(self.source, self.target) // -self.longest

    def fits(self, source: int, target: int, rows: int) -> bool:
        """Whether so many tokens and rows fit, with a source token for each row of a target."""
        left = self.target - target
        fillers = -(-left // self.longest)
        return left >= 0 and source + fillers <= self.source and rows <= self.max_rows

    def fill(self, sources: Ragged, targets: Ragged) -> tuple[Ragged, Ragged]:
        """Add rows of padding, as few as hold it, and then empty ones."""
        assert self.fits(len(sources.tokens), len(targets.tokens), len(sources.lengths))
        sides = ((sources, self.source), (targets, self.target))
        left = [size - len(side.tokens) for side, size in sides]
        num = max(1, *(-(-tokens // self.longest) for tokens in left))
        filled = []
        for (side, _), tokens in zip(sides, left, strict=True):
            lengths = np.zeros(self.rows - len(side.lengths), dtype=side.lengths.dtype)
            lengths[:num] = tokens // num + (np.arange(num) < tokens % num)
            filled.append(Ragged.join([side, Ragged(np.full(tokens, _PADDING), lengths)]))
        return filled[0], filled[1]


@dataclass(frozen=True, eq=False)
class Side:
    """The source or the target sentences of a batch.

    Attributes:
        tokens: Padded `[B, S]` or packed `[N]`, int64.
        positions: Position of every token in its sentence: `[S]` or `[N]`.
        ends: Ends of the packed sentences, int32 `[B + 1]`, starting with 0.
        sentence_of_row: The sentence of every row: itself in padded form, of a token in packed.
        num_sentences: B.
        num_tokens: N.
        longest: S.
        equal: Whether all sentences are equally long, so that nothing is padding.
        packed: Whether dimension 0 counts tokens.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    sentence_of_row: Tensor
    num_sentences: int
    num_tokens: int
    longest: int
    equal: bool
    packed: bool

    @classmethod
    def make(cls, sentences: Ragged, *, packed: bool, longest: int | None = None) -> Side:
        """Lay out sentences.

        Args:
            sentences: What to lay out.
            packed: Keep them one after the other instead of padding with token 0.
            longest: S, if it shall be more than the longest sentence has.
        """
        tokens, lengths = sentences.tokens, sentences.lengths
        ends = np.concatenate([[0], np.cumsum(lengths)])
        longest = longest or int(lengths.max())
        if packed:
            flat = tokens.astype(np.int64)
            where = np.arange(len(tokens)) - np.repeat(ends[:-1], lengths)
            owners = np.repeat(np.arange(len(lengths)), lengths)
        else:
            flat = np.full((len(lengths), longest), _PADDING, dtype=np.int64)
            flat[np.arange(longest) < lengths[:, None]] = tokens
            where, owners = np.arange(longest), np.arange(len(lengths))
        return cls(
            torch.from_numpy(flat),
            torch.from_numpy(where),
            torch.from_numpy(ends.astype(np.int32)),
            torch.from_numpy(owners),
            len(lengths),
            len(tokens),
            longest,
            int(lengths.min()) == longest,
            packed,
        )

    @cached_property
    def slots(self) -> Tensor | None:
        """Where the real tokens lie in the flattened padded form, `[N]`; None if everywhere."""
        if self.equal:
            return None
        starts = self.ends[:-1].long()
        # From a token's place among all to its place in its sentence, and to that sentence's row.
        moves = torch.arange(self.num_sentences, device=starts.device) * self.longest - starts
        lengths = self.ends.diff().long()
        moves = moves.repeat_interleave(lengths, output_size=self.num_tokens)
        return moves + torch.arange(self.num_tokens, device=starts.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """Which tokens of the padded form are real, `[B, 1, 1, S]`; None if all are."""
        if self.equal:
            return None
        places = torch.arange(self.longest, device=self.ends.device)
        return (places < self.ends.diff()[:, None])[:, None, None]

    def rows(self) -> AbstractContextManager[None]:
        """Declare to an aligner whose rows the operations inside have.

        Padded, too: from the losses alone it cannot know what `pack` has chosen, and would have to
        measure it in every step.
        """
        return gradvac.rows(self._row_tasks)

    @cached_property
    def _row_tasks(self) -> RowTasks:
        """Made once, because all layers ask for the same."""
        return RowTasks(entries=self.sentence_of_row, ascending=True)

    def pad(self, values: Tensor) -> Tensor:
        """`[N, ...]` -> `[B, S, ...]`."""
        shape = (self.num_sentences, self.longest, *values.shape[1:])
        if self.slots is None:
            return values.view(shape)
        blank = values.new_zeros(self.num_sentences * self.longest, *values.shape[1:])
        return blank.index_copy(0, self.slots, values).view(shape)

    def pack(self, values: Tensor) -> Tensor:
        """`[B, S, ...]` -> `[N, ...]`, without the padding."""
        flat = values.flatten(0, 1)
        return flat if self.slots is None else flat.index_select(0, self.slots)

    def map(self, change: Change, *, sentences: bool) -> Side:
        """Change all tensors; the sentences of rows only if asked to."""
        owners = self.sentence_of_row
        return replace(
            self,
            tokens=change(self.tokens),
            positions=change(self.positions),
            ends=change(self.ends),
            sentence_of_row=change(owners) if sentences else owners,
        )

    def to(self, device: torch.device) -> Side:
        """Move to a device; the sentences of rows stay on the host."""
        return self.map(partial(_move, device=device), sentences=False)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs of several tasks, those of a task next to each other.

    What an aligner asks for (tasks, and the sentence of every row) stays on the host, where it can
    look without waiting, unless the batch has a static shape: then nothing that differs from batch
    to batch may stay there.
    """

    source: Side  # `<2xx> x_1 ... x_n </s>`
    target: Side  # what the decoder reads: `<s> y_1 ... y_m`
    labels: Tensor  # what it must predict, `y_1 ... y_m </s>`, always packed `[N]`
    sentence_of_label: Tensor  # the sentence of every label, `[N]`
    row_of_label: Tensor  # the same, `[N]`, for an aligner
    tasks: Tensor  # task position of every sentence, `[B]`, ascending
    num_tokens: int  # target tokens that count, `</s>` included: what losses are averaged over
    counts: Tensor | None = None  # which sentences count, `[B]`; None: all do
    static_shape: StaticShape | None = None  # that of all batches of the run; None: they differ

    def __len__(self) -> int:
        return len(self.tasks)

    def tokens_by_sentence(self) -> Tensor:
        """Labels of every sentence that counts, `[B]`."""
        every = self.labels.new_zeros(len(self))
        every = every.index_add(0, self.sentence_of_label, torch.ones_like(self.labels))
        return every if self.counts is None else every.where(self.counts, 0)

    def _map(self, change: Change) -> Batch:
        static = self.static_shape is not None
        return replace(
            self,
            source=self.source.map(change, sentences=static),
            target=self.target.map(change, sentences=static),
            labels=change(self.labels),
            sentence_of_label=change(self.sentence_of_label),
            row_of_label=change(self.row_of_label) if static else self.row_of_label,
            tasks=change(self.tasks) if static else self.tasks,
            counts=None if self.counts is None else change(self.counts),
        )

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        return self._map(partial(_move, device=device))

    def pin(self) -> Batch:
        """Move to memory from which a copy to a device does not make the host wait."""
        return self._map(Tensor.pin_memory)

    def copy(self) -> Batch:
        """Copy all tensors."""
        return self._map(Tensor.clone)

    def copy_(self, other: Batch) -> None:
        """Copy another batch of the same static shape into this one, asynchronously."""
        assert self.static_shape is not None
        assert self.static_shape == other.static_shape
        for ours, theirs in zip(self._tensors(), other._tensors(), strict=True):
            ours.copy_(theirs, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        tensors = [self.labels, self.sentence_of_label, self.row_of_label, self.tasks]
        for side in (self.source, self.target):
            tensors += [side.tokens, side.positions, side.ends, side.sentence_of_row]
        return tensors if self.counts is None else [*tensors, self.counts]


def make_batch(
    sources: Ragged,
    targets: Ragged,
    tasks: Sequence[int] | Tokens,
    *,
    packed: bool = False,
    static_shape: StaticShape | None = None,
) -> Batch:
    """Make a batch of pairs whose tasks ascend.

    Args:
        sources: `<2xx> x_1 ... x_n </s>`.
        targets: `<s> y_1 ... y_m </s>`.
        tasks: Task position of every pair.
        packed: One sentence after the other instead of padding.
        static_shape: Fill a packed batch up to it, with rows of the last task that do not count.
    """
    owners = torch.from_numpy(np.asarray(tasks, dtype=np.int64))
    assert bool((owners[1:] >= owners[:-1]).all()), "pairs of a task must lie together"
    lengths = targets.lengths - 1
    ends = np.cumsum(targets.lengths)
    is_read, is_label = (np.ones(len(targets.tokens), dtype=bool) for _ in range(2))
    is_read[ends - 1] = False  # the decoder does not read </s>
    is_label[ends - targets.lengths] = False  # and does not predict <s>
    labels = targets.tokens[is_label].astype(np.int64)
    read = Ragged(targets.tokens[is_read], lengths)
    num_tokens, counts, longest = len(labels), None, None
    if static_shape is not None:
        assert packed, "a static shape is for packed batches"
        counts = torch.arange(static_shape.rows) < len(owners)
        sources, read = static_shape.fill(sources, read)
        labels = np.concatenate([labels, np.full(static_shape.target - len(labels), _PADDING)])
        owners = torch.cat([owners, owners[-1:].expand(static_shape.rows - len(owners))])
        longest = static_shape.longest
    sentence = torch.arange(len(owners)).repeat_interleave(torch.from_numpy(read.lengths))
    return Batch(
        Side.make(sources, packed=packed, longest=longest),
        Side.make(read, packed=packed, longest=longest),
        torch.from_numpy(labels),
        sentence,
        sentence,
        owners,
        num_tokens,
        counts,
        static_shape,
    )


def _move(values: Tensor, device: torch.device) -> Tensor:
    if values.device == device or device.type == "cpu":
        return values
    pinned = values if values.is_cuda or values.is_pinned() else values.pin_memory()
    return pinned.to(device, non_blocking=True)


# --- batches of a static shape, all of them full --------------------------------------------------

_TOKEN_UNIT = 64  # what matrix products like
_SPARE = 1.01  # the ratio of the sides differs from batch to batch
_ROWS = 3.0  # times as many as a batch of mean sentences has; a batch of shorter ones is not full
_DRAWN = 0.985  # of what the batches of a chunk hold: tokens vary, and one more would be empty
_TRIES = 12


def make_static_shape(tokens: int, means: npt.NDArray[np.float64], longest: int) -> StaticShape:
    """The shape of all batches: the longer side has `tokens`, the other what goes with them.

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
    return StaticShape(sides[0], sides[1], rows, longest)


def rows_to_draw(shape: StaticShape, means: npt.NDArray[np.float64], num_batches: int) -> int:
    """How many sentence pairs nearly fill some batches."""
    fullest = np.max(means / [shape.source, shape.target])
    return max(1, round(_DRAWN * num_batches / float(fullest)))


def cut_full(shape: StaticShape, lengths: Sequence[Numbers]) -> list[list[slice]]:
    """Cut sorted sentences into full batches.

    Args:
        shape: Of a batch.
        lengths: Tokens of both sides of every task's sentences, `[2, n]` each.

    Returns:
        For every batch, which sentences it has of every task.
    """
    # A sentence lies where its middle is, as a share of its task.
    costs = [sides.sum(0) for sides in lengths]
    places = [(np.cumsum(cost) - cost / 2) / max(1, cost.sum()) for cost in costs]
    order = np.argsort(np.concatenate(places), kind="stable")
    sizes, limits = _sizes(shape, np.concatenate(lengths, axis=1)[:, order])
    owners = np.repeat(np.arange(len(lengths)), [len(cost) for cost in costs])[order]
    taken = np.zeros((len(order) + 1, len(lengths)), dtype=np.int64)
    taken[1:] = np.cumsum(owners[:, None] == np.arange(len(lengths)), axis=0)
    edges = taken[_even_ends(sizes, limits)]
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [[slice(*ends) for ends in zip(start, end, strict=True)] for start, end in pairs]


def _sizes(shape: StaticShape, lengths: Numbers) -> tuple[Limits, Limits]:
    """What sentences before each place add up to, `[3, B + 1]`, and what a batch may have, `[3]`.

    Each row that fills up a target needs a token of the source: that much of the source is not
    available, the less the more of the target is taken.
    """
    source, target = lengths
    held = source - target / shape.longest
    sizes = np.zeros((3, len(source) + 1))
    sizes[:, 1:] = np.cumsum([held, target, np.ones(len(source))], axis=1)
    limits = [shape.source - shape.target / shape.longest - 1, shape.target, shape.max_rows]
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
        ends.append(max(fits, start + 1))  # the shape holds the longest sentence alone
    return ends

"""A batch of sentence pairs: rows of many tasks, padded or packed."""

# B sentences, S tokens of the longest, N tokens of all, D width

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import gradvac
from gradvac.gradients import RowTasks

Tokens = npt.NDArray[np.integer]


class Ragged(NamedTuple):
    """Sentences of any length, one after the other."""

    tokens: Tokens  # [N]
    lengths: Tokens  # [B]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[int] | Tokens]) -> Ragged:
        """Put sentences together."""
        arrays = [np.asarray(sentence, dtype=np.int64) for sentence in sentences]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))

    def enclose(self, first: int | Tokens, last: int) -> Ragged:
        """Put a token before every sentence (one for all, or one each) and one after it."""
        lengths = self.lengths + 2
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), dtype=np.int64)
        inner = np.ones(len(tokens), dtype=bool)
        inner[ends - lengths] = inner[ends - 1] = False
        tokens[ends - lengths], tokens[ends - 1], tokens[inner] = first, last, self.tokens
        return Ragged(tokens, lengths)

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Put the sentences of several together."""
        tokens, lengths = zip(*parts, strict=True)
        return cls(np.concatenate(tokens), np.concatenate(lengths))


@dataclass(frozen=True)
class Side:
    """The source or the target sentences of a batch.

    Attributes:
        tokens: Padded `[B, S]` or packed `[N]`, int64.
        positions: Position of every token in its sentence: `[S]` or `[N]`.
        slots: Where the real tokens lie in the flattened padded form, `[N]`; None if the
            sentences are equally long, so that nothing is padding.
        mask: Which tokens of the padded form are real, `[B, 1, 1, S]`; None as above.
        ends: Ends of the packed sentences, int32 `[B + 1]`, starting with 0.
        task_of_token: Task position of every packed token, on the host; None in padded form,
            where rows are sentences.
        num_sentences: B.
        num_tokens: N.
        longest: S.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor | None
    mask: Tensor | None
    ends: Tensor
    task_of_token: Tensor | None
    num_sentences: int
    num_tokens: int
    longest: int

    @classmethod
    def make(cls, sentences: Ragged, *, tasks: Tensor, packed: bool) -> Side:
        """Lay out sentences.

        Args:
            sentences: What to lay out.
            tasks: Task position of every sentence, `[B]`.
            packed: Keep them one after the other instead of padding with token 0.
        """
        tokens, lengths = sentences
        ends = np.concatenate([[0], np.cumsum(lengths)])
        longest = int(lengths.max())
        positions = np.arange(len(tokens)) - np.repeat(ends[:-1], lengths)
        slots = mask = None
        if int(lengths.min()) < longest:
            slots = torch.from_numpy(np.repeat(np.arange(len(lengths)) * longest, lengths))
            slots = slots + torch.from_numpy(positions)
            mask = torch.from_numpy(np.arange(longest) < lengths[:, None])[:, None, None]
        flat = torch.from_numpy(tokens.astype(np.int64))
        if packed:
            where = torch.from_numpy(positions)
            owners: Tensor | None = tasks.repeat_interleave(torch.from_numpy(lengths))
        else:
            flat = _pad(flat, slots, len(lengths), longest)
            where, owners = torch.arange(longest), None
        return cls(
            flat,
            where,
            slots,
            mask,
            torch.from_numpy(ends.astype(np.int32)),
            owners,
            len(lengths),
            len(tokens),
            longest,
        )

    @property
    def packed(self) -> bool:
        """Whether dimension 0 counts tokens."""
        return self.task_of_token is not None

    def rows(self) -> AbstractContextManager[None]:
        """Tell an attached aligner whose rows the modules that run inside see."""
        return nullcontext() if self._row_tasks is None else gradvac.rows(self._row_tasks)

    @cached_property
    def _row_tasks(self) -> RowTasks | None:
        """Made once, because all layers ask for the same."""
        return None if self.task_of_token is None else RowTasks(self.task_of_token)

    def pad(self, values: Tensor) -> Tensor:
        """`[N, ...]` -> `[B, S, ...]`."""
        return _pad(values, self.slots, self.num_sentences, self.longest)

    def pack(self, values: Tensor) -> Tensor:
        """`[B, S, ...]` -> `[N, ...]`, without the padding."""
        flat = values.flatten(0, 1)
        return flat if self.slots is None else flat.index_select(0, self.slots)

    def to(self, device: torch.device) -> Side:
        """Move what the device needs; the tasks of tokens stay on the host."""
        return replace(
            self,
            tokens=_move(self.tokens, device),
            positions=_move(self.positions, device),
            slots=None if self.slots is None else _move(self.slots, device),
            mask=None if self.mask is None else _move(self.mask, device),
            ends=_move(self.ends, device),
        )


@dataclass(frozen=True)
class Batch:
    """Sentence pairs of several tasks, those of a task next to each other.

    Attributes:
        source: `<2xx> x_1 ... x_n </s>`.
        target: What the decoder reads: `<s> y_1 ... y_m`.
        labels: What it must say, `y_1 ... y_m </s>`, always packed `[N]`.
        sentence_of_label: The sentence of every label, `[N]`.
        task_of_label: Its task position, `[N]`, on the host.
        tasks: Task position of every sentence, `[B]`, on the host, ascending.
    """

    source: Side
    target: Side
    labels: Tensor
    sentence_of_label: Tensor
    task_of_label: Tensor
    tasks: Tensor

    @property
    def num_tokens(self) -> int:
        """Target tokens, `</s>` included: what losses are averaged over."""
        return len(self.labels)

    def __len__(self) -> int:
        return len(self.tasks)

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        return replace(
            self,
            source=self.source.to(device),
            target=self.target.to(device),
            labels=_move(self.labels, device),
            sentence_of_label=_move(self.sentence_of_label, device),
        )


def make_batch(
    sources: Ragged, targets: Ragged, tasks: Sequence[int] | Tokens, *, packed: bool = False
) -> Batch:
    """Make a batch of pairs whose tasks ascend.

    Args:
        sources: `<2xx> x_1 ... x_n </s>`.
        targets: `<s> y_1 ... y_m </s>`.
        tasks: Task position of every pair.
        packed: One sentence after the other instead of padding.
    """
    owners = torch.from_numpy(np.asarray(tasks, dtype=np.int64))
    assert bool((owners[1:] >= owners[:-1]).all()), "pairs of a task must lie together"
    lengths = targets.lengths - 1
    ends = np.cumsum(targets.lengths)
    read, said = (np.ones(len(targets.tokens), dtype=bool) for _ in range(2))
    read[ends - 1] = False  # the decoder does not read </s>
    said[ends - targets.lengths] = False  # and does not say <s>
    labels = torch.from_numpy(targets.tokens[said].astype(np.int64))
    sentence = torch.arange(len(owners)).repeat_interleave(torch.from_numpy(lengths))
    return Batch(
        Side.make(sources, tasks=owners, packed=packed),
        Side.make(Ragged(targets.tokens[read], lengths), tasks=owners, packed=packed),
        labels,
        sentence,
        owners[sentence],
        owners,
    )


def _pad(values: Tensor, slots: Tensor | None, num_sentences: int, longest: int) -> Tensor:
    shape = (num_sentences, longest, *values.shape[1:])
    if slots is None:
        return values.view(shape)
    blank = values.new_zeros(num_sentences * longest, *values.shape[1:])
    return blank.index_copy(0, slots, values).view(shape)


def _move(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)

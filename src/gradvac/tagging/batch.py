"""Batches of windows, padded; and an endless stream of them that mixes languages."""

# T tasks, B rows, S sub-words

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradvac.tagging.encoding import Numbers, Windows
from gradvac.training import WHOLE, Part, Passes, SamplingConfig

NO_LABEL = -100


@dataclass(frozen=True, eq=False)
class TagBatch:
    """Rows of several languages.

    Attributes:
        tokens: `[B, S]`, padded.
        mask: True where there is a sub-word, `[B, S]`.
        labels: The label of a word on its first sub-word, -100 elsewhere, `[B, S]`.
        tasks: The task of every row; rows of a task are together.
        num_tokens: Words with a label, of all parts of the batch.
    """

    tokens: Tensor
    mask: Tensor
    labels: Tensor
    tasks: list[int]
    num_tokens: int

    def pin(self) -> TagBatch:
        """The same in memory from which a GPU copies without a wait."""
        tokens, mask, labels = (one.pin_memory() for one in (self.tokens, self.mask, self.labels))
        return TagBatch(tokens, mask, labels, self.tasks, self.num_tokens)

    def to(self, device: torch.device) -> TagBatch:
        """The same on a device."""
        tokens, mask, labels = (
            one.to(device, non_blocking=True) for one in (self.tokens, self.mask, self.labels)
        )
        return TagBatch(tokens, mask, labels, self.tasks, self.num_tokens)

    def take(self, part: Part) -> TagBatch:
        """The part of one process; one without rows gets a row whose words have no label."""
        if part.of == 1:
            return self
        ours = part.cut(self.mask.sum(1).numpy())
        is_empty = ours.start == ours.stop
        rows = slice(0, 1) if is_empty else ours
        columns = slice(0, int(self.mask[rows].sum(1).max()))
        labels = self.labels[rows, columns]
        return TagBatch(
            self.tokens[rows, columns].contiguous(),
            self.mask[rows, columns].contiguous(),
            torch.full_like(labels, NO_LABEL) if is_empty else labels.contiguous(),
            self.tasks[rows],
            self.num_tokens,
        )


def make_batch(tasks: Sequence[Windows], chosen: Sequence[Numbers], *, pad: int) -> TagBatch:
    """Make a batch of the chosen windows of every task."""
    rows = [(task, int(n)) for task, numbers in enumerate(chosen) for n in numbers]
    width = max(int(tasks[task].lengths[n]) for task, n in rows)
    tokens = np.full((len(rows), width), pad, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    labels = np.full((len(rows), width), NO_LABEL, dtype=np.int64)
    for row, (task, n) in enumerate(rows):
        own = tasks[task]
        first, last = own.starts[n], own.starts[n + 1]
        tokens[row, : last - first] = own.tokens[first:last]
        mask[row, : last - first] = True
        words = slice(own.words[n], own.words[n + 1])
        labels[row, own.places[words]] = own.labels[words]
    return TagBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(mask),
        torch.from_numpy(labels),
        [task for task, _ in rows],
        int((labels != NO_LABEL).sum()),
    )


def by_length(windows: Windows, rows: int) -> Iterator[Numbers]:
    """All windows in batches of like length, the longest first."""
    order = np.argsort(-windows.lengths, kind="stable")
    for first in range(0, len(order), rows):
        yield order[first : first + rows]


class TagStream:
    """An endless stream of batches that can be stopped and continued exactly.

    Args:
        tasks: Task -> its windows.
        sampling: Temperature and its schedule.
        rows: Rows of a batch.
        pad: The padding token.
        accumulation: Batches of an optimizer step, by which the schedule counts.
        num_steps: Optimizer steps of the whole training, by which a cap on epochs counts.
        seed: Of everything drawn.
        part: Which part of every batch is handed out here.
    """

    def __init__(
        self,
        tasks: Mapping[str, Windows],
        sampling: SamplingConfig,
        *,
        rows: int,
        pad: int,
        accumulation: int = 1,
        num_steps: int | None = None,
        seed: int = 0,
        part: Part = WHOLE,
    ) -> None:
        self._windows, self._rows, self._pad = list(tasks.values()), rows, pad
        self._part = part
        sizes = {task: len(own) for task, own in tasks.items()}
        num_rows = None if num_steps is None else num_steps * accumulation * rows
        self._sampler = sampling.build(sizes, seed=seed, num_rows=num_rows)
        self._passes = Passes(list(sizes.values()), seed=seed)
        self._accumulation, self._num_batches = accumulation, 0

    def __iter__(self) -> TagStream:
        return self

    def __next__(self) -> TagBatch:
        """Draw the tasks of the rows, then each task's next windows."""
        step = self._num_batches // self._accumulation
        drawn = self._sampler.draw(self._rows, step=step)
        self._num_batches += 1
        counts = np.bincount(drawn, minlength=len(self._windows))
        chosen = [self._passes.take(task, int(count)) for task, count in enumerate(counts)]
        return make_batch(self._windows, chosen, pad=self._pad).take(self._part)

    def state_dict(self) -> dict[str, Any]:
        """Say where the stream stands."""
        return {
            "sampler": self._sampler.state_dict(),
            **self._passes.state_dict(),
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._sampler.load_state_dict(state["sampler"])
        self._passes.load_state_dict(state)
        self._num_batches = int(state["num_batches"])

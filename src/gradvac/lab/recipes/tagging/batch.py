"""Padded batches of windows that mix languages."""

# T tasks, B rows, S sub-words

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradvac.lab.recipes.tagging.encoding import NO_LABEL, Numbers, Windows
from gradvac.lab.training import Part, TensorBatch


@dataclass(frozen=True, eq=False)
class TagBatch(TensorBatch):
    """Rows of several languages.

    Attributes:
        tokens: `[B, S]`, padded.
        mask: True where there is a sub-word, `[B, S]`.
        labels: The label of a word on its first sub-word, `NO_LABEL` elsewhere, `[B, S]`.
        tasks: The task of every row; rows of a task are together. On the host, where an aligner
            can read them without waiting, unless the batch has a static shape.
        num_tokens: Words with a label, of all parts of the batch.
        static_shape: Rows and columns that all batches of the run have; None: these are its own.
    """

    tokens: Tensor
    mask: Tensor
    labels: Tensor
    tasks: list[int] | Tensor
    num_tokens: int
    static_shape: tuple[int, int] | None = None

    def take(self, part: Part, costs: Sequence[float] | None = None) -> TagBatch:
        """The part of one process; if it has no rows, one row whose words have no label."""
        if part.of == 1:
            return self
        ours = part.cut(self.mask.sum(1).numpy() if costs is None else costs)
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


def make_batch(
    tasks: Sequence[Windows], chosen: Sequence[Numbers], *, pad: int, width: int | None = None
) -> TagBatch:
    """Make a batch of the chosen windows of every task.

    Args:
        tasks: The windows of every task.
        chosen: Which windows of every task.
        pad: The padding token.
        width: Columns that all batches of the run have; None: as many as the longest row needs.
    """
    rows = [(task, int(n)) for task, numbers in enumerate(chosen) for n in numbers]
    is_static = width is not None
    width = width or max(int(tasks[task].lengths[n]) for task, n in rows)
    tokens = np.full((len(rows), width), pad, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    labels = np.full((len(rows), width), NO_LABEL, dtype=np.int64)
    for row, (task, n) in enumerate(rows):
        windows = tasks[task]
        first, last = windows.starts[n], windows.starts[n + 1]
        tokens[row, : last - first] = windows.tokens[first:last]
        mask[row, : last - first] = True
        words = slice(windows.words[n], windows.words[n + 1])
        labels[row, windows.places[words]] = windows.labels[words]
    owners = [task for task, _ in rows]
    return TagBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(mask),
        torch.from_numpy(labels),
        torch.tensor(owners) if is_static else owners,
        int((labels != NO_LABEL).sum()),
        (len(rows), width) if is_static else None,
    )


def by_length(windows: Windows, rows: int) -> Iterator[Numbers]:
    """All windows in batches of similar length, the longest first."""
    order = np.argsort(-windows.lengths, kind="stable")
    for first in range(0, len(order), rows):
        yield order[first : first + rows]

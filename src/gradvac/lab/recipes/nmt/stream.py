"""Batches without end: tasks drawn by temperature, sentences of like length together.

Sentences are drawn for a *chunk* of some batches. Within a task they are sorted by length and cut
into as many parts as there are batches, each of the same number of tokens; part j of every task
makes batch j. So a batch holds sentences of like length, and all tasks in the proportion in which
they were drawn. The batches of a chunk come in random order. Those of one size are cut by
`cut_full`, in the same proportion.

A task's sentences come in a new random order in every epoch, which is a function of the seed, the
task and the number of the epoch: where a stream stands is a handful of numbers.

Of several processes, each draws the same batches and reads its part of each. A batch is cut between
neighbours, and those of a task are neighbours, so that a process has few tasks.
"""

# T tasks

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradvac.lab.recipes.nmt.batches import (
    Batch,
    Ragged,
    StaticShape,
    cut_full,
    make_batch,
    make_static_shape,
    rows_to_draw,
)
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus
from gradvac.lab.recipes.nmt.settings import BatchConfig
from gradvac.lab.recipes.nmt.tokens import TokenFile, TokenShards
from gradvac.lab.recipes.nmt.vocabulary import BOS, EOS
from gradvac.lab.training import FULL_BATCH, BatchSlice, SamplingConfig, TaskStream
from gradvac.sampling import TaskSampler, task_probabilities
from gradvac.tasks import parse

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskData:
    """The sentence pairs of a task."""

    name: str
    sources: TokenFile | TokenShards
    targets: TokenFile | TokenShards
    tag: int  # the token `<2xx>` of the target language

    @classmethod
    def open(cls, prepared: PreparedCorpus, split: str, task: str) -> TaskData:
        """Map the sentence pairs of a task in a set."""
        sources, targets = prepared.task_tokens(split, task)
        return cls(task, sources, targets, prepared.vocabulary.tag(parse(task).target))

    def __len__(self) -> int:
        return len(self.sources)

    def mean_lengths(self) -> npt.NDArray[np.float64]:
        """The mean lengths of both sides, special tokens included, `[2]`."""
        return np.array([self.sources.mean_length + 2, self.targets.mean_length + 1])

    def lengths(self, numbers: Numbers) -> Numbers:
        """Tokens of both sides with their special ones, `[2, len(numbers)]`."""
        return np.stack([self.sources.lengths(numbers) + 2, self.targets.lengths(numbers) + 1])

    def gather(self, numbers: Numbers) -> tuple[Ragged, Ragged]:
        """Read pairs: `<2xx> x_1 ... x_n </s>` and `<s> y_1 ... y_m </s>`."""
        sources, targets = self.sources.gather(numbers), self.targets.gather(numbers)
        return sources.add_special_tokens(self.tag, EOS), targets.add_special_tokens(BOS, EOS)


def gather_batch(
    tasks: Sequence[TaskData],
    chosen: Sequence[Numbers],
    *,
    packed: bool = False,
    static_shape: StaticShape | None = None,
) -> Batch:
    """Make a batch of the chosen sentence pairs of every task."""
    present = [
        (t, task, numbers)
        for t, (task, numbers) in enumerate(zip(tasks, chosen, strict=True))
        if len(numbers)
    ]
    sources, targets = zip(*(task.gather(numbers) for _, task, numbers in present), strict=True)
    owners = np.repeat([t for t, _, _ in present], [len(numbers) for _, _, numbers in present])
    pairs = (Ragged.join(sources), Ragged.join(targets))
    return make_batch(*pairs, owners, packed=packed, static_shape=static_shape)


def _sampler(
    tasks: Sequence[TaskData],
    sampling: SamplingConfig,
    config: BatchConfig,
    num_batches: int | None,
    num_steps: int | None,
    seed: int,
) -> tuple[TaskSampler, npt.NDArray[np.float64]]:
    """The sampler, and the mean lengths of what it draws.

    A cap on epochs and an automatic temperature need the number of rows, which follows from the
    lengths of what is drawn, and so from them: a few rounds settle both.
    """
    sizes = {task.name: len(task) for task in tasks}
    lengths = {task.name: task.mean_lengths() for task in tasks}
    given = sampling.temperature
    shares = task_probabilities(sizes, 1.0 if given == "auto" else given)
    for _ in range(4):
        means = np.sum(
            [shares[name] * mean_lengths for name, mean_lengths in lengths.items()], axis=0
        )
        rows = None if num_batches is None else num_batches * config.tokens / float(np.max(means))
        sampler = sampling.build(sizes, seed=seed, num_rows=rows, num_steps=num_steps)
        shares = sampler.probabilities(sampler.high_first)
    return sampler, means


class Stream(TaskStream[Batch]):
    """Batches of sentence pairs, which can be stopped and continued exactly.

    Args:
        tasks: The data.
        sampling: Temperature and its schedule; a new temperature holds from the next chunk on.
        config: Tokens of a batch, batches of a chunk.
        packed: Whether batches are packed.
        longest: All packed batches get one static shape, for sentences up to so many tokens;
            None: each is as large as it comes.
        accumulation: Batches of an optimizer step, by which the schedule counts.
        num_steps: Optimizer steps of the whole training, by which a cap on epochs counts.
        seed: Of everything drawn.
        batch_slice: Which rows of every batch are read here.
    """

    def __init__(
        self,
        tasks: Sequence[TaskData],
        sampling: SamplingConfig,
        config: BatchConfig,
        *,
        packed: bool = False,
        longest: int | None = None,
        accumulation: int = 1,
        num_steps: int | None = None,
        seed: int = 0,
        batch_slice: BatchSlice = FULL_BATCH,
    ) -> None:
        self._tasks, self._config, self._packed = list(tasks), config, packed
        self._seed, self._slice = seed, batch_slice
        num_batches = None if num_steps is None else num_steps * accumulation
        sampler, means = _sampler(tasks, sampling, config, num_batches, num_steps, seed)
        self.static_shape: StaticShape | None = None
        if longest is None:
            rows = max(1, round(config.chunk * config.tokens / np.max(means)))
        else:
            self.static_shape = make_static_shape(config.tokens, means, longest)
            rows = rows_to_draw(self.static_shape, means, config.chunk)
        super().__init__(
            [len(task) for task in tasks],
            sampler,
            rows=rows,
            accumulation=accumulation,
            seed=seed,
            thin=sampling.thin,
        )

    def _make(self, chosen: list[Numbers]) -> Batch:
        if self._slice.of == 1:
            return gather_batch(
                self._tasks, chosen, packed=self._packed, static_shape=self.static_shape
            )
        lengths = [task.lengths(numbers) for task, numbers in zip(self._tasks, chosen, strict=True)]
        sizes = np.concatenate(lengths, axis=1)  # [2, B]
        costs = self._slot_costs(chosen)
        local = self._slice.cut(sizes.sum(0) if costs is None else costs)
        is_empty = local.start == local.stop
        first, last = (0, 1) if is_empty else (local.start, local.stop)
        starts = np.cumsum([0, *map(len, chosen)])
        chosen_here = [
            numbers[max(0, first - start) : max(0, last - start)]
            for numbers, start in zip(chosen, starts.tolist(), strict=False)
        ]
        batch = gather_batch(self._tasks, chosen_here, packed=self._packed)
        counts = torch.zeros(len(batch), dtype=torch.bool) if is_empty else None
        return replace(batch, num_tokens=int(sizes[1].sum()), counts=counts)

    @property
    def rows_per_batch(self) -> float:
        """The sentence pairs of a batch, on average over the present chunk."""
        return float(self._rows_per_chunk) / len(self._chunk)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return super().state_dict() | {"form": self._form()}

    def _form(self) -> list[Any]:
        """How batches are cut: with another form, the same number is another batch."""
        shape = self.static_shape
        return [self._packed, None if shape is None else [*shape, self._rows_per_chunk]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there.

        Raises:
            ValueError: Batches were cut otherwise, so that sentences would come twice or never.
        """
        packed, size = state["form"]
        if [packed, size] != self._form():
            raise ValueError(
                f"batch: this run's batches were packed = {packed} and of size {size}, but are now "
                f"{self._packed} and {self._form()[1]}; continue on the same kind of device, with "
                "batch.packed, batch.fixed and train.cuda_graph as they were "
                "(train.cuda_graph=false: of any size)."
            )
        super().load_state_dict(state)

    def _cut(self, chosen: list[Numbers]) -> list[list[Numbers]]:
        """Cut the drawn sentences into batches, as few as the token budget allows."""
        batches = self._by_length(chosen)
        order = np.random.default_rng([self._seed, self._num_before]).permutation(len(batches))
        return [batches[number] for number in order]

    def _by_length(self, chosen: list[Numbers]) -> list[list[Numbers]]:
        """The batches in order, the shortest sentences first."""
        lengths = [task.lengths(numbers) for task, numbers in zip(self._tasks, chosen, strict=True)]
        orders = [np.lexsort((sides[0], sides.sum(0))) for sides in lengths]
        chosen = [numbers[order] for numbers, order in zip(chosen, orders, strict=True)]
        lengths = [sides[:, order] for sides, order in zip(lengths, orders, strict=True)]
        if self.static_shape is not None:
            cuts = cut_full(self.static_shape, lengths)
            return [[own[cut] for own, cut in zip(chosen, batch, strict=True)] for batch in cuts]
        costs = [sides.sum(0) for sides in lengths]
        total = sum(sides.sum(1) for sides in lengths)
        fewest = math.ceil(int(np.max(total)) / self._config.tokens)
        for num_batches in range(fewest, 2 * fewest + 1):
            batches = _parts(chosen, costs, num_batches)
            if all(self._fits(batch) for batch in batches):
                return batches
        return [piece for batch in batches for piece in self._halve(batch)]

    def _fits(self, batch: list[Numbers]) -> bool:
        lengths = np.concatenate(
            [task.lengths(numbers) for task, numbers in zip(self._tasks, batch, strict=True)],
            axis=1,
        )
        size = lengths.sum(1) if self._packed else lengths.max(1) * lengths.shape[1]
        return int(size.max()) <= self._config.tokens

    def _halve(self, batch: list[Numbers]) -> list[list[Numbers]]:
        """Divide a batch that is too large, every task alike."""
        if self._fits(batch):
            return [batch]
        # Every second sentence of the batch: tasks with a single sentence must part too.
        before = np.cumsum([0, *(len(numbers) for numbers in batch[:-1])])
        starts = [int(number % 2) for number in before]
        halves = [[numbers[s::2] for s, numbers in zip(starts, batch, strict=True)]]
        halves.append([numbers[1 - s :: 2] for s, numbers in zip(starts, batch, strict=True)])
        return [piece for half in halves for piece in self._halve(half)]


def _parts(chosen: list[Numbers], costs: list[Numbers], num: int) -> list[list[Numbers]]:
    """Cut every task's sentences into parts of equal cost."""
    by_task = []
    for numbers, cost in zip(chosen, costs, strict=True):
        middles = np.cumsum(cost) - cost / 2  # a sentence belongs where its middle lies
        edges = np.linspace(0, cost.sum(), num + 1)[1:-1]
        by_task.append(np.split(numbers, np.searchsorted(middles, edges)))
    batches = [list(parts) for parts in zip(*by_task, strict=True)]
    return [batch for batch in batches if any(len(numbers) for numbers in batch)]

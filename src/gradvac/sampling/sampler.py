"""Which task comes next, drawn by data size and temperature.

A task with L_i sentences is drawn with P_i ~ (L_i / sum L)^(1 / temperature): 1 follows the data,
larger values favour low-resource tasks, infinity draws all equally. A cap on epochs keeps small
tasks from being seen too often; with an infinite temperature that is UniMax.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gradvac.sampling.shares import cap_epochs, repetition_temperature, task_probabilities

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskEpochs:
    """How often training will see a task's data: one row of `TaskSampler.effective_epochs`."""

    task: str
    size: int
    probability: float
    num_drawn: float
    epochs: float


class TaskSampler:
    """Draws tasks by temperature; its position is one number.

    Draw n is a pure function of (seed, n), so a resumed run draws what it would have drawn, even
    if tasks are renamed or a phase is added later.

    Args:
        sizes: Task -> number of sentences.
        temperature: 1 follows the data, larger is flatter, infinity is uniform; "auto": what the
            law of repetition asks for (`gradvac.sampling.shares`).
        schedule: Later phases: (first optimizer step, temperature), in order.
        most_epochs: No task is seen more often than this on average; the excess goes to the
            others. None: no cap.
        high_first: Until this optimizer step, only tasks with at least as many rows as the average
            one are drawn.
        slots: Draw this many tasks for a batch, and divide its rows among them; None: every row
            draws its task.
        seed: Seed of the draws.
        num_rows: Rows that training draws in all, which the cap and "auto" need.

    Examples:
        >>> sampler = TaskSampler({"en-fr": 20_000, "en-hi": 500}, temperature=5.0)
        >>> sampler.draw(8, step=0)  # positions in the order of `sizes`
        array([0, 0, 0, 0, 1, 1, 0, 1])
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        temperature: float | Literal["auto"] = 5.0,
        *,
        schedule: Sequence[tuple[int, float]] = (),
        most_epochs: float | None = None,
        high_first: int = 0,
        slots: int | None = None,
        seed: int = 0,
        num_rows: float | None = None,
    ) -> None:
        self.tasks, self._sizes, self._slots = tuple(sizes), dict(sizes), slots
        if temperature == "auto":
            if num_rows is None:
                raise ValueError(
                    'sampling.temperature = "auto": needs to know in advance how many rows are '
                    "drawn (num_rows); say it, or give a number."
                )
            temperature = repetition_temperature(sizes, num_rows)
        self._phases = [(0, temperature), *schedule]
        self._most_epochs, self._num_rows, self.high_first = most_epochs, num_rows, high_first
        self._seed, self._num_calls = seed, 0
        self._edges: dict[tuple[float, bool], npt.NDArray[np.float64]] = {}
        self.probabilities(0)

    def probabilities(self, step: int) -> dict[str, float]:
        """Task -> probability in an optimizer step, counted from 0."""
        shares = task_probabilities(self._sizes, self.temperature_at(step))
        if step < self.high_first:
            average = math.fsum(self._sizes.values()) / len(self._sizes)
            high = {task: p for task, p in shares.items() if self._sizes[task] >= average}
            total = math.fsum(high.values())
            return {task: high.get(task, 0.0) / total for task in shares}
        if self._most_epochs is None:
            return shares
        if self._num_rows is None:
            raise ValueError(
                "sampling.most_epochs: this kind of run does not know in advance how many rows it "
                "draws; leave it out."
            )
        return cap_epochs(
            shares, self._sizes, most_epochs=self._most_epochs, num_rows=self._num_rows
        )

    def temperature_at(self, step: int) -> float:
        """The temperature of an optimizer step, counted from 0."""
        return [temperature for start, temperature in self._phases if start <= step][-1]

    def draw(self, num: int, *, step: int) -> Counts:
        """Draw tasks for rows of a batch.

        Args:
            num: How many.
            step: The optimizer step they are for, which decides about the temperature.

        Returns:
            Positions in `tasks`, `[num]`.
        """
        phase = self.temperature_at(step), step < self.high_first
        if phase not in self._edges:
            shares = self.probabilities(step)
            self._edges[phase] = np.cumsum(list(shares.values()))
        chance = np.random.default_rng([self._seed, self._num_calls]).random(num)
        self._num_calls += 1
        edges = self._edges[phase]
        positions = np.searchsorted(edges, chance, side="right")
        # The last edge may round to below 1; the last task may have no share.
        return np.minimum(positions, int(np.searchsorted(edges, edges[-1])))

    def draw_rows(self, num: int, *, step: int) -> tuple[Counts, Counts | None]:
        """Draw how many rows of a batch each task gets.

        Returns:
            Rows of every task, and the slots it drew (None: there are none), `[T]` each.
        """
        slots, num_tasks = self._slots, len(self.tasks)
        if slots is None:
            return np.bincount(self.draw(num, step=step), minlength=num_tasks), None
        drawn = np.sort(self.draw(slots, step=step))
        sizes = np.diff(np.arange(slots + 1) * num // slots)  # of the slots, in the tasks' order
        rows = np.zeros(num_tasks, dtype=np.int64)
        np.add.at(rows, drawn, sizes)
        return rows, np.bincount(drawn, minlength=num_tasks)

    def effective_epochs(self, *, num_steps: int, rows_per_step: float) -> list["TaskEpochs"]:
        """The expected number of epochs over each task's data, which temperature makes unequal.

        Args:
            num_steps: Optimizer steps.
            rows_per_step: Rows drawn per optimizer step, all micro-batches together.
        """
        starts = sorted({self.high_first, *(start for start, _ in self._phases)})
        ends = [*starts[1:], num_steps]
        drawn = dict.fromkeys(self.tasks, 0.0)
        for start, end in zip(starts, ends, strict=True):
            for task, share in self.probabilities(start).items():
                drawn[task] += share * rows_per_step * max(0, min(end, num_steps) - start)
        total = sum(drawn.values()) or 1.0
        return [
            TaskEpochs(task, size, drawn[task] / total, drawn[task], drawn[task] / size)
            for task, size in self._sizes.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """Seed and number of draws so far."""
        return {"seed": self._seed, "num_calls": self._num_calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._seed, self._num_calls = int(state["seed"]), int(state["num_calls"])


def costs_by_slot(rows: Sequence[int] | Counts, slots: Counts) -> list[float]:
    """The cost of every row when a batch is divided among processes: all slots cost the same.

    Args:
        rows: Number of rows of every task, which come in this order.
        slots: Number of slots of every task.
    """
    num_rows = np.asarray(rows)
    costs: list[float] = np.repeat(slots / np.maximum(num_rows, 1), num_rows).tolist()
    return costs

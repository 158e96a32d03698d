"""[sampling]: which task comes next, drawn by data size and temperature.

A task with L_i sentences is drawn with P_i ~ (L_i / sum L)^(1 / temperature): 1 follows the data,
larger values favour low-resource tasks, infinity draws all equally. A cap on epochs keeps small
tasks from being seen too often; with an infinite temperature that is UniMax.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from gradvac.lab.training.config import Section

Temperature = Annotated[float, Field(gt=0, allow_inf_nan=True)]
Counts = npt.NDArray[np.int64]


class TemperaturePhase(Section):
    """Another temperature, from some optimizer step on.

    Attributes:
        from_step: The first step of the phase, counted from 0.
        temperature: Its temperature.
    """

    from_step: NonNegativeInt
    temperature: Temperature


class SamplingConfig(Section):
    """How tasks are drawn.

    Attributes:
        temperature: 1 follows the data, larger is flatter, `inf` is uniform.
        schedule: Later phases ("cooldown"), in order.
        most_epochs: No task is seen more often than this on average; the excess goes to the
            others. With `temperature = inf` this is UniMax. Unset: no cap.
        slots: Draw this many tasks for a batch, and divide its rows among them; unset: every row
            draws its own task. With as many slots as processes (or twice as many), each process
            gets the rows of one task (or two), and sends less. In translation, a chunk of batches
            (`batch.chunk`) shares its slots.
        seed: Seed of the draws; unset: `train.seed`.
    """

    temperature: Temperature = 5.0
    schedule: list[TemperaturePhase] = Field(default_factory=list)
    most_epochs: PositiveFloat | None = None
    slots: PositiveInt | None = None
    seed: NonNegativeInt | None = None

    @field_validator("schedule")
    @classmethod
    def _in_order(cls, schedule: list[TemperaturePhase]) -> list[TemperaturePhase]:
        starts = [phase.from_step for phase in schedule]
        if starts != sorted(set(starts)):
            raise ValueError(f"from_step must increase from phase to phase, got {starts}")
        return schedule

    def temperature_at(self, step: int) -> float:
        """The temperature of an optimizer step (counted from 0)."""
        passed = [phase.temperature for phase in self.schedule if phase.from_step <= step]
        return passed[-1] if passed else self.temperature

    def shares(
        self, sizes: Mapping[str, int], step: int, *, num_rows: float | None = None
    ) -> dict[str, float]:
        """Task -> its share of the rows drawn in an optimizer step.

        Args:
            sizes: Task -> number of sentences.
            step: Counted from 0.
            num_rows: Rows that training draws in all, which `most_epochs` needs.
        """
        free = task_probabilities(sizes, self.temperature_at(step))
        if self.most_epochs is None:
            return free
        if num_rows is None:
            raise ValueError(
                "sampling.most_epochs: this kind of run does not know in advance how many rows it "
                "draws; leave it out."
            )
        return cap_epochs(free, sizes, most_epochs=self.most_epochs, num_rows=num_rows)

    def build(
        self, sizes: Mapping[str, int], *, seed: int = 0, num_rows: float | None = None
    ) -> "TaskSampler":
        """A sampler at its first draw; `seed` is used where the section has none."""
        own_seed = seed if self.seed is None else self.seed
        return TaskSampler(sizes, self, seed=own_seed, num_rows=num_rows)


def task_probabilities(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """P_i ~ (L_i / sum L)^(1 / temperature), normalised.

    Args:
        sizes: Task -> number of sentences.
        temperature: Positive; infinity gives equal shares.
    """
    empty = [task for task, size in sizes.items() if size <= 0]
    if empty or not sizes:
        what = f"task {empty[0]!r} has no data" if empty else "there is no task"
        raise ValueError(f"sizes: {what}; leave it out, or give it data.")
    if not temperature > 0:
        raise ValueError(f"temperature: must be positive, got {temperature}.")
    # Relative to the largest, so that neither extreme of the temperature leaves the number range.
    largest = max(sizes.values())
    powers = {task: (size / largest) ** (1.0 / temperature) for task, size in sizes.items()}
    total = math.fsum(powers.values())
    return {task: power / total for task, power in powers.items()}


def cap_epochs(
    shares: Mapping[str, float], sizes: Mapping[str, int], *, most_epochs: float, num_rows: float
) -> dict[str, float]:
    """Cut shares to what `most_epochs` allows; the rest grow in proportion, up to their own caps.

    Args:
        shares: Task -> share of the rows, adding up to 1.
        sizes: Task -> number of sentences.
        most_epochs: How often a task may be seen.
        num_rows: Rows that are drawn in all.

    Raises:
        ValueError: All tasks together have less data than that.
    """
    caps = {task: most_epochs * sizes[task] / num_rows for task in shares}
    if math.fsum(caps.values()) < 1.0:
        seen = num_rows / sum(sizes[task] for task in shares)
        raise ValueError(
            f"sampling.most_epochs = {most_epochs:g}: training draws {num_rows:,.0f} rows, which "
            f"is {seen:.3g} epochs of all data together; allow more, or train fewer steps."
        )
    cut: dict[str, float] = {}
    while True:
        free = {task: share for task, share in shares.items() if task not in cut}
        growth = (1.0 - math.fsum(cut.values())) / (math.fsum(free.values()) or 1.0)
        beyond = {task: caps[task] for task, share in free.items() if share * growth > caps[task]}
        if not beyond:
            return {task: cut.get(task, share * growth) for task, share in shares.items()}
        cut |= beyond


class TaskSampler:
    """Draws tasks by temperature; its position is one number.

    Draw n is a pure function of (seed, n), so a resumed run draws what it would have drawn, even
    if tasks are renamed or a phase is added later.

    Args:
        sizes: Task -> number of sentences.
        config: Temperature, its schedule, and the cap on epochs.
        seed: Seed of the draws.
        num_rows: Rows that training draws in all, for the cap.

    Example:
        >>> sampler = SamplingConfig(temperature=5.0).build({"en-fr": 20_000, "en-hi": 500})
        >>> sampler.draw(8, step=0)  # positions in the order of `sizes`
        array([0, 0, 0, 0, 1, 1, 0, 1])
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        config: SamplingConfig,
        *,
        seed: int = 0,
        num_rows: float | None = None,
    ) -> None:
        self.tasks, self._num_rows = tuple(sizes), num_rows
        self._sizes, self._config, self._seed = dict(sizes), config, seed
        self._num_calls = 0
        self._edges: dict[float, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self.probabilities(0)

    def probabilities(self, step: int) -> dict[str, float]:
        """Task -> probability in an optimizer step."""
        return self._config.shares(self._sizes, step, num_rows=self._num_rows)

    def draw(self, num: int, *, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Draw tasks for rows of a batch.

        Args:
            num: How many.
            step: The optimizer step they are for, which decides about the temperature.

        Returns:
            Positions in `tasks`, `[num]`.
        """
        temperature = self._config.temperature_at(step)
        if temperature not in self._edges:
            shares = self.probabilities(step)
            self._edges[temperature] = np.cumsum(list(shares.values()))
        chance = np.random.default_rng([self._seed, self._num_calls]).random(num)
        self._num_calls += 1
        positions = np.searchsorted(self._edges[temperature], chance, side="right")
        return np.minimum(positions, len(self.tasks) - 1)  # the last edge may round to below 1

    def draw_rows(self, num: int, *, step: int) -> tuple[Counts, Counts | None]:
        """Draw how many rows of a batch each task gets.

        Args:
            num: Rows of the batch.
            step: As in `draw`.

        Returns:
            Rows of every task, and the slots it drew (None: there are none), `[T]` each.
        """
        slots, num_tasks = self._config.slots, len(self.tasks)
        if slots is None:
            return np.bincount(self.draw(num, step=step), minlength=num_tasks), None
        drawn = np.sort(self.draw(slots, step=step))
        sizes = np.diff(np.arange(slots + 1) * num // slots)  # of the slots, in the tasks' order
        rows = np.zeros(num_tasks, dtype=np.int64)
        np.add.at(rows, drawn, sizes)
        return rows, np.bincount(drawn, minlength=num_tasks)

    def draw_slots(
        self, num: int, *, step: int, rank: int, size: int
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Draw the tasks of one process's batch; together they are the paper's minibatch of tasks.

        What a process sends to others grows with the number of its tasks, so that few slots per
        process and many rows per slot are cheap. All processes draw alike and take their own part.

        Args:
            num: Slots of a process; two of them may draw the same task.
            step: As in `draw`.
            rank: Rank of the process.
            size: Number of processes.

        Returns:
            Positions in `tasks`, `[num]`.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank: must be in 0..{size - 1} for size {size}, got {rank}.")
        return self.draw(num * size, step=step)[rank * num : (rank + 1) * num]

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


@dataclass(frozen=True)
class TaskEpochs:
    """How often training will see a task's data: one row of `effective_epochs`."""

    task: str
    size: int
    probability: float
    num_drawn: float
    epochs: float


def effective_epochs(
    sizes: Mapping[str, int],
    config: SamplingConfig,
    *,
    num_steps: int,
    rows_per_step: float,
) -> list[TaskEpochs]:
    """The expected number of passes over each task's data, which temperature makes unequal.

    Args:
        sizes: Task -> number of sentences.
        config: Temperature and its schedule.
        num_steps: Optimizer steps.
        rows_per_step: Rows drawn per optimizer step, all micro-batches together.
    """
    starts = [0, *(phase.from_step for phase in config.schedule)]
    ends = [*starts[1:], num_steps]
    drawn = dict.fromkeys(sizes, 0.0)
    for start, end in zip(starts, ends, strict=True):
        shares = config.shares(sizes, start, num_rows=num_steps * rows_per_step)
        for task, share in shares.items():
            drawn[task] += share * rows_per_step * max(0, min(end, num_steps) - start)
    total = sum(drawn.values()) or 1.0
    return [
        TaskEpochs(task, size, drawn[task] / total, drawn[task], drawn[task] / size)
        for task, size in sizes.items()
    ]

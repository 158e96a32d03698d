"""[sampling]: which task comes next, drawn by data size and temperature.

A task with L_i sentences is drawn with P_i ~ (L_i / sum L)^(1 / temperature): 1 follows the data,
larger values lift low-resource tasks, infinity draws all alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator

from gradvac.training.config import Section


class TemperaturePhase(Section):
    """From some optimizer step on, another temperature.

    Attributes:
        from_step: The first step of the phase, counted from 0.
        temperature: Its temperature.
    """

    from_step: NonNegativeInt
    temperature: PositiveFloat


class SamplingConfig(Section):
    """How tasks are drawn.

    Attributes:
        temperature: 1 follows the data, larger is flatter, `inf` is uniform.
        schedule: Later phases ("cooldown"), in order.
        seed: Of the draws; unset: `train.seed`.
    """

    temperature: PositiveFloat = 5.0
    schedule: list[TemperaturePhase] = Field(default_factory=list)
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

    def build(self, sizes: Mapping[str, int], *, seed: int = 0) -> "TaskSampler":
        """A sampler at its first draw; `seed` is used where the section has none."""
        return TaskSampler(sizes, self, seed=seed if self.seed is None else self.seed)


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


class TaskSampler:
    """Draws tasks by temperature; where it stands is one number.

    Draw n is a pure function of (seed, n), so a resumed run draws what it would have drawn, also
    with tasks renamed or a phase added later on.

    Args:
        sizes: Task -> number of sentences.
        config: Temperature and its schedule.
        seed: Of the draws.

    Example:
        >>> sampler = SamplingConfig(temperature=5.0).build({"en-fr": 20_000, "en-hi": 500})
        >>> sampler.draw(4, step=0)  # positions in the order of `sizes`
        array([0, 1, 1, 0])
    """

    def __init__(self, sizes: Mapping[str, int], config: SamplingConfig, *, seed: int = 0) -> None:
        self.tasks = tuple(sizes)
        self._sizes, self._config, self._seed = dict(sizes), config, seed
        self._num_calls = 0
        self._edges: dict[float, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self.probabilities(0)

    def probabilities(self, step: int) -> dict[str, float]:
        """Task -> probability in an optimizer step."""
        return task_probabilities(self._sizes, self._config.temperature_at(step))

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
            shares = task_probabilities(self._sizes, temperature)
            self._edges[temperature] = np.cumsum(list(shares.values()))
        chance = np.random.default_rng([self._seed, self._num_calls]).random(num)
        self._num_calls += 1
        found = np.searchsorted(self._edges[temperature], chance, side="right")
        return np.minimum(found, len(self.tasks) - 1)  # the last edge may round to below 1

    def state_dict(self) -> dict[str, Any]:
        """Seed and number of draws so far."""
        return {"seed": self._seed, "num_calls": self._num_calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._seed, self._num_calls = int(state["seed"]), int(state["num_calls"])


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
        shares = task_probabilities(sizes, config.temperature_at(start))
        for task, share in shares.items():
            drawn[task] += share * rows_per_step * max(0, min(end, num_steps) - start)
    total = sum(drawn.values()) or 1.0
    return [
        TaskEpochs(task, size, drawn[task] / total, drawn[task], drawn[task] / size)
        for task, size in sizes.items()
    ]


def format_epochs(rows: Sequence[TaskEpochs]) -> str:
    """The rows of `effective_epochs` as a table."""
    width = max(len("task"), *(len(row.task) for row in rows))
    lines = [f"{'task':{width}}  {'sentences':>12}  {'share':>7}  {'drawn':>12}  {'epochs':>8}"]
    lines += [
        f"{row.task:{width}}  {row.size:>12,}  {row.probability:>7.2%}  {row.num_drawn:>12,.0f}"
        f"  {row.epochs:>8.2f}"
        for row in rows
    ]
    return "\n".join(lines)

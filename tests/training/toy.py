"""A recipe of a few milliseconds a step: regression by an MLP with dropout, three tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import (
    FULL_BATCH,
    BatchSlice,
    RunConfig,
    Section,
    StepLosses,
    checkpoint,
    seed_everything,
)
from gradvac.sampling import TaskSampler

SIZES = {"north": 40, "south": 20, "west": 5}


class ModelConfig(Section):
    width: int = 8
    dropout: float = 0.1


class ToyConfig(RunConfig):
    model: ModelConfig = ModelConfig()


@dataclass(frozen=True)
class ToyBatch:
    inputs: Tensor
    goals: Tensor
    tasks: list[int]
    num_tokens: int
    weight: float = 1.0


class ToyStream:
    """Rows drawn by temperature, taken from every task's data in turn."""

    def __init__(
        self, recipe: ToyRecipe, sampler: TaskSampler, rows: int, part: BatchSlice
    ) -> None:
        self._recipe, self._sampler, self._rows, self._part = recipe, sampler, rows, part
        self._taken = [0] * len(sampler.tasks)
        self._handed_out = 0

    def __next__(self) -> ToyBatch:
        accumulation = self._recipe.settings.optimizer.accumulation
        drawn = self._sampler.draw(self._rows, step=self._handed_out // accumulation).tolist()
        self._handed_out += 1
        rows = []
        for task in drawn:
            inputs, goals = self._recipe.data[self._sampler.tasks[task]]
            row = self._taken[task] % len(inputs)
            self._taken[task] += 1
            rows.append((inputs[row], goals[row]))
        ours = self._part.cut([1.0] * len(rows))
        weight = float(ours.start < ours.stop)
        ours = ours if weight else slice(0, 1)
        inputs, goals = (torch.stack(column) for column in zip(*rows[ours], strict=True))
        return ToyBatch(inputs, goals, drawn[ours], num_tokens=len(drawn), weight=weight)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampler": self._sampler.state_dict(),
            "taken": self._taken,
            "handed_out": self._handed_out,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._taken = list(state["taken"])
        self._handed_out = state["handed_out"]


class ToyRecipe:
    """Conforms to `Workload`.

    Args:
        settings: The config.
        rows: Rows per micro-batch.
        spoil: Steps (counted by calls of `losses`, from 0) whose loss is NaN.
    """

    tasks = tuple(SIZES)
    resource_levels: Mapping[str, str] = {"north": "high", "south": "low", "west": "low"}

    def __init__(
        self, settings: ToyConfig, *, rows: int = 6, spoil: frozenset[int] = frozenset()
    ) -> None:
        self.settings, self._rows, self._spoil = settings, rows, spoil
        self._calls = 0
        generator = torch.Generator().manual_seed(1)
        self.data: dict[str, tuple[Tensor, Tensor]] = {}
        common = torch.randn(4, 2, generator=generator)
        for task, size in SIZES.items():
            inputs = torch.randn(size, 4, generator=generator)
            weights = common + 0.3 * torch.randn(4, 2, generator=generator)
            self.data[task] = inputs, inputs @ weights
        seed_everything(settings.train.seed)
        width = settings.model.width
        self.model = nn.Sequential(
            nn.Linear(4, width),
            nn.LayerNorm(width),
            nn.Tanh(),
            nn.Dropout(settings.model.dropout),
            nn.Linear(width, 2),
        )

    def batches(self, part: BatchSlice = FULL_BATCH) -> ToyStream:
        sampler = self.settings.sampling.build(SIZES, seed=self.settings.train.seed)
        return ToyStream(self, sampler, self._rows, part)

    def losses(self, batch: ToyBatch) -> StepLosses:
        device = next(self.model.parameters()).device
        inputs, goals = (x.to(device, non_blocking=True) for x in (batch.inputs, batch.goals))
        losses = (self.model(inputs) - goals).square().sum(1) * batch.weight
        noise = np.random.random() * 1e-3  # global random state is part of a run
        losses = losses * (1.0 + noise)
        if self._calls in self._spoil:
            losses = losses * torch.nan
        self._calls += 1
        tokens = torch.full_like(losses, batch.weight)
        return StepLosses(losses, batch.tasks, {"error": losses.detach().sqrt().sum()}, tokens)

    def validate(self) -> dict[str, float]:
        torch.rand(3)  # must not matter
        device = next(self.model.parameters()).device
        scores = {
            f"dev/loss/{task}": float((self.model(inputs.to(device)).cpu() - goals).square().mean())
            for task, (inputs, goals) in self.data.items()
        }
        return scores | {"dev/loss": sum(scores.values()) / len(scores)}

    def data_signature(self) -> str:
        return "toy data, seed 1"


def outcome(run: Path) -> dict[str, Any]:
    """Everything a run ends with, except for what clocks say: flat, in comparable values."""
    last = checkpoint.latest(run)
    assert last is not None
    records = [
        {key: value for key, value in record.items() if not re.search("second|memory", key)}
        for record in RunFolder(run).read_metrics()
    ]
    best = checkpoint.weights(run, "best")
    found = {"model": last.weights(), "best": best, "metrics": records, **last.state()}
    found["meters"] = {k: v for k, v in found["meters"].items() if "seconds" not in k}
    del found["metrics_bytes"]  # clocks are of various lengths when written out
    return _flat(found)


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {where: value.numpy().tobytes()}
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        return {where: value}
    return {k: v for key, inner in pairs for k, v in _flat(inner, f"{where}/{key}").items()}

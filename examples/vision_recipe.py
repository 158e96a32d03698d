"""A recipe of one's own: two vision tasks, trained, scored, swept, compared and measured.

Noisy digits: upright, or turned and in negative. docs/recipes.md explains parts and commands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvac.lab.recipes import Recipe, register_recipe
from gradvac.lab.recipes.common.scoring import Scorer, TaskResult, compare_labels, score_run
from gradvac.lab.recipes.common.similarity import MeasuredSet, measure_run
from gradvac.lab.training import RowBatch, RowStream, RunConfig, Section, StepLosses, train
from gradvac.lab.training.checkpoint import resolve_weights
from gradvac.lab.training.environment import seed_everything

TASKS, SPLITS = ["upright", "turned"], ["train", "dev", "test"]
NAME = f"{__file__}:VISION"  # what commands find this recipe by
# The digits 0 to 9 in 5 rows of 3 pixels, the bits of a number each.
FONT = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]
DIGITS = np.array([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in one] for one in FONT])


class DigitsConfig(Section):
    sizes: tuple[int, int] = (2000, 200)  # digits to train on, of the two tasks
    held_out: int = 200  # digits of other sets
    noise: float = 0.3
    rows: int = 32  # of a batch


class VisionConfig(RunConfig):
    recipe: str = NAME  # so that a run says what trained it
    data: DigitsConfig = DigitsConfig()


def draw_sets(data: DigitsConfig, split: str) -> list[tuple[Tensor, Tensor]]:
    """Images `[N, 1, 9, 9]` and labels `[N]` of every task, the same every time."""
    sets = []
    for task, size in enumerate(data.sizes):
        chance = np.random.default_rng([task, SPLITS.index(split)])
        labels = chance.integers(0, 10, size if split == "train" else data.held_out)
        images = np.pad(DIGITS[labels], ((0, 0), (2, 2), (3, 3)))
        if TASKS[task] == "turned":
            images = 1 - np.rot90(images, axes=(1, 2))
        images = images + data.noise * chance.standard_normal(images.shape)
        sets.append((torch.tensor(images[:, None], dtype=torch.float32), torch.tensor(labels)))
    return sets


@dataclass(frozen=True, eq=False)
class DigitBatch(RowBatch):
    images: Tensor
    labels: Tensor


def make_batch(sets: Sequence[tuple[Tensor, Tensor]], chosen: Sequence[Any]) -> DigitBatch:
    """The chosen rows of every task."""
    pairs = list(zip(sets, chosen, strict=True))
    images, labels = (torch.cat([one[k][rows] for one, rows in pairs]) for k in (0, 1))
    tasks = [task for task, rows in enumerate(chosen) for _ in rows]
    return DigitBatch(tasks, len(tasks), images, labels)


def build_model() -> nn.Module:
    features = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(16 * 5 * 5, 10))


def losses_of(model: nn.Module, batch: DigitBatch) -> tuple[Tensor, list[int]]:
    batch = batch.to(next(model.parameters()).device)
    losses = nn.functional.cross_entropy(model(batch.images), batch.labels, reduction="none")
    return losses, batch.tasks


class VisionWorkload:
    """What the training loop asks for: `gradvac.lab.training.workload` says more."""

    tasks, resource_levels = TASKS, {"upright": "high", "turned": "low"}

    def __init__(self, settings: VisionConfig) -> None:
        self.settings, self.model = settings, build_model()
        self.train, self.dev = (draw_sets(settings.data, split) for split in ("train", "dev"))

    def batches(self, batch_slice: Any) -> Any:
        data, make = self.settings.data, partial(make_batch, self.train)
        sizes = dict(zip(TASKS, data.sizes, strict=True))
        return RowStream(self.settings, sizes, make, rows=data.rows, batch_slice=batch_slice)

    def losses(self, batch: DigitBatch) -> StepLosses:
        losses, tasks = losses_of(self.model, batch)
        return StepLosses(losses, tasks, tokens=torch.ones_like(losses))

    def validate(self) -> dict[str, float]:
        rows = range(self.settings.data.held_out)
        losses, _ = losses_of(self.model, make_batch(self.dev, [rows, rows]))
        upright, turned = losses.reshape(2, -1).mean(1).tolist()
        by_task = {"dev/loss/upright": upright, "dev/loss/turned": turned}
        return {"dev/loss": (upright + turned) / 2, **by_task}

    def data_signature(self) -> str:
        return str(self.settings.data)


def train_vision(settings: VisionConfig, run: Path) -> Any:
    seed_everything(settings.train.seed)
    return train(VisionWorkload(settings), settings, run)


def open_scorer(
    settings: VisionConfig, run: Path, split: str, weights: str | int, device: torch.device
) -> Scorer[Any]:
    model, sets = build_model(), draw_sets(settings.data, split)
    resolve_weights(run, weights).load_into(model)

    def score(task: str) -> TaskResult:
        images, labels = sets[TASKS.index(task)]
        with torch.no_grad():
            found = model.to(device)(images.to(device)).argmax(1)
        return compare_labels(found.tolist(), labels.tolist())

    return Scorer(TASKS, score, {"accuracy": "percentage"})


def open_set(settings: VisionConfig, _: Path, split: str, most: int | None) -> MeasuredSet:
    sets = draw_sets(settings.data, split)
    rows = np.arange(min(len(labels) for _, labels in sets))[:most]
    return MeasuredSet(
        TASKS,
        build_model(),
        rows=[rows, rows],
        losses=lambda model, chosen: losses_of(model, make_batch(sets, chosen)),
        data=str(settings.data),
    )


VISION = Recipe(
    NAME,
    VisionConfig,
    prepare=lambda _: None,  # the digits are drawn when they are needed
    train=train_vision,
    score=partial(score_run, settings_class=VisionConfig, open_scorer=open_scorer),
    measure=partial(measure_run, settings_class=VisionConfig, open_set=open_set),
)
register_recipe(VISION)

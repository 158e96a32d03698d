"""Every task's best weights so far as its teacher, so that small tasks are not learned by heart.

A small task is at its best early and over-fits while the others still learn. From then on its
labels are mixed with what the weights of its best validation predict (language-specific
self-distillation, Huang et al., EMNLP 2022). A task whose last validation was its best has no
teacher. A step takes one more forward pass for every different teacher of its tasks.
"""

# N labels, V vocabulary

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac.lab.recipes.nmt.batches import Batch
from gradvac.lab.recipes.nmt.model import SoftLabels, Transformer
from gradvac.lab.training import BatchStream


class Teachers:
    """The teachers of a run.

    Args:
        model: The model before it is trained; a copy gives the predictions.
        tasks: Names of the tasks.
        weight: Share of a teacher's predictions in the labels.
    """

    def __init__(self, model: Transformer, tasks: Sequence[str], weight: float) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._tasks, self._weight = list(tasks), weight
        self._best: dict[str, float] = {}  # task -> its best loss
        self._number: dict[str, int] = {}  # task -> which weights were the best
        self._taught: list[str] = []  # tasks that were better before
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._loaded: int | None = None

    def see(self, losses: Mapping[str, float], model: Transformer) -> None:
        """Take note of a validation.

        Args:
            losses: Task -> its development loss.
            model: The model that was validated.
        """
        better = [task for task in losses if losses[task] < self._best.get(task, math.inf)]
        if better:
            number = max(self._weights, default=0) + 1
            self._weights[number] = {
                name: value.detach().clone() for name, value in model.state_dict().items()
            }
            self._number |= dict.fromkeys(better, number)
            self._best |= {task: losses[task] for task in better}
        self._taught = [task for task in self._number if task not in better]
        used = set(self._number.values())
        self._weights = {n: weights for n, weights in self._weights.items() if n in used}

    @torch.no_grad()
    def soft_labels(self, batch: Batch) -> SoftLabels | None:
        """What teachers predict of a batch; None if none of its tasks has one."""
        present = {self._tasks[task] for task in batch.tasks.unique().tolist()}
        teachers: dict[int, list[int]] = {}
        for task in self._taught:
            if task in present:
                teachers.setdefault(self._number[task], []).append(self._tasks.index(task))
        device, soft = batch.labels.device, None
        shares = torch.zeros(len(batch.labels), device=device)
        for number, tasks in sorted(teachers.items()):
            if self._loaded != number:
                self._model.to(device).load_state_dict(self._weights[number])
                self._loaded = number
            tasks_of_labels = batch.tasks.to(device)[batch.sentence_of_label]
            theirs = torch.isin(tasks_of_labels, torch.tensor(tasks, device=device))
            predicted = self._model.logits(batch).softmax(-1)
            soft = predicted if soft is None else torch.where(theirs[:, None], predicted, soft)
            shares[theirs] = self._weight
        return None if soft is None else SoftLabels(soft, shares)

    def state_dict(self) -> dict[str, Any]:
        """Teachers and their losses."""
        return {
            "best": dict(self._best),
            "number": dict(self._number),
            "taught": list(self._taught),
            "weights": dict(self._weights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with these."""
        self._best, self._number = dict(state["best"]), dict(state["number"])
        self._taught, self._weights = list(state["taught"]), dict(state["weights"])
        self._loaded = None


class TaughtStream:
    """A stream of batches whose state also holds the teachers: that of a recipe is kept there."""

    def __init__(self, stream: BatchStream[Batch], teachers: Teachers) -> None:
        self._stream, self._teachers = stream, teachers

    def __next__(self) -> Batch:
        """The next batch."""
        return next(self._stream)

    def state_dict(self) -> dict[str, Any]:
        """Where stream and teachers stand."""
        return {"stream": self._stream.state_dict(), "teachers": self._teachers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._stream.load_state_dict(state["stream"])
        self._teachers.load_state_dict(state["teachers"])

"""Gradient similarity of a run on a set, for any recipe.

All tasks contribute as many rows, and where the set is aligned, rows that say the same. Rows of
like length are dealt in turn to two halves, which show how reliable the cosines are;
`gradvac.analysis.measure` explains what is computed and how much memory it takes. Gradients are
those of the cross-entropy without dropout, in float32.
"""

# T tasks, N rows

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from torch import Tensor, nn

from gradvac.analysis import Similarities
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, choose_device, config
from gradvac.lab.training.measuring import measure_checkpoints
from gradvac.lab.training.settings import trained_settings, weights_hash

ENGINES = ("per_task", "one_backward")
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MeasuredSet:
    """What a recipe measures.

    Attributes:
        tasks: Task names, at least two.
        model: The run's model, with any weights.
        rows: Rows of every task, equally many, `[T][N]`.
        losses: Given the model and the chosen rows of every task, of which some have none: the
            summed loss of every row, and the task of every row.
        data: What identifies the data.
        lengths: Tokens of the longest of the n-th rows, by which rows are sorted, `[N]`; None: all
            are alike.
        rows_per_batch: How many rows a batch may have, given the tokens of the longest.
    """

    tasks: Sequence[str]
    model: nn.Module
    rows: Sequence[Numbers]
    losses: Callable[[nn.Module, Sequence[Numbers]], tuple[Tensor, Any]]
    data: str
    lengths: Numbers | None = None
    rows_per_batch: Callable[[int], int] = lambda _: 64


def measure_run(
    run: str | Path,
    settings_class: type[RunConfig],
    open_set: Callable[[Any, Path, str, int | None], MeasuredSet],
    *,
    split: str = "dev",
    num_lines: int | None = 1000,
    weights: Sequence[str | int] = (),
    granularities: Sequence[str] = ("all_layer", "whole_model"),
    engine: str = "per_task",
    offload: bool = False,
    device: str = "auto",
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> tuple[Similarities, ...]:
    """Measure the similarity of all tasks at every checkpoint that a run kept.

    Writes RUN/similarity.npz after every checkpoint. Called again, it measures only what is not
    there yet.

    Args:
        run: The run folder.
        settings_class: The class of its config.
        open_set: `open_set(settings, run, split, num_lines)` opens what is measured.
        split: Name of the set.
        num_lines: Only the first so many rows of a task; None: all.
        weights: Instead of all checkpoints: "best", "last", or steps.
        granularities: Which parameters share a component; all from the same gradients.
        engine: "per_task", or "one_backward": all tasks in one batch, fewer and larger steps.
        offload: Keep task gradients in host memory.
        device: "auto", "cpu", "cuda", ...
        overrides: Of the run's config, such as "data.prepared=..." or "batch.tokens=8192".
        console: Where progress is shown; None: nowhere.

    Raises:
        ValueError: There is no checkpoint, a single task, too few rows, or similarities that were
            measured otherwise.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: must be {' or '.join(ENGINES)}, got {engine!r}.")
    if num_lines is not None and num_lines < 2:
        raise ValueError(f"lines: two halves need at least 2 lines, got {num_lines}.")
    run = Path(run)
    settings = trained_settings(settings_class, run, overrides)
    measured = open_set(settings, run, split, num_lines)
    if len(measured.tasks) < 2:
        raise ValueError(
            f"{run}: has the single task {measured.tasks[0]}; similarity is between tasks."
        )
    return measure_checkpoints(
        run,
        measured.model.to(choose_device(device)).eval(),
        _Plan(measured, is_mixed=engine == "one_backward"),
        granularities,
        tasks=measured.tasks,
        weights=weights,
        about={
            "set": split,
            "lines": len(measured.rows[0]),
            "data": measured.data,
            "weights": weights_hash(config.load(settings_class, RunFolder(run).config)),
        },
        engine=engine,
        offload=offload,
        console=console or Console(quiet=True),
    )


class _Plan:
    """Batches of the same rows for all tasks, in turn for one half and the other."""

    def __init__(self, measured: MeasuredSet, *, is_mixed: bool) -> None:
        self._measured, self._is_mixed = measured, is_mixed
        lengths = measured.lengths
        if lengths is None:
            lengths = np.ones(len(measured.rows[0]), dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        order = order[: len(order) // 2 * 2]  # two halves of one size
        tasks_per_batch = len(measured.tasks) if is_mixed else 1
        self._chosen: list[list[Numbers]] = []  # batch -> task -> rows
        while len(order):
            most = measured.rows_per_batch(int(lengths[order[0]]))
            size = 2 * max(1, most // tasks_per_batch)
            for half in (0, 1):
                self._chosen.append([numbers[order[half:size:2]] for numbers in measured.rows])
            order = order[size:]

    @property
    def num_batches(self) -> int:
        """Batches of a whole measurement."""
        return len(self._chosen) * (1 if self._is_mixed else len(self._measured.tasks))

    def batches(
        self, model: nn.Module
    ) -> dict[str, list[Callable[[], Tensor]]] | list[Callable[[], tuple[Tensor, Any]]]:
        """What `measure` takes."""
        losses = self._measured.losses

        def one_task(task: int, chosen: list[Numbers]) -> Tensor:
            return losses(model, [r if t == task else r[:0] for t, r in enumerate(chosen)])[0].sum()

        if self._is_mixed:
            return [partial(losses, model, chosen) for chosen in self._chosen]
        return {
            name: [partial(one_task, task, chosen) for chosen in self._chosen]
            for task, name in enumerate(self._measured.tasks)
        }

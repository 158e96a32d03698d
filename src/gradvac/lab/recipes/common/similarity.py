"""Gradient similarity of a run on a set, for any recipe.

All tasks contribute as many rows, and where the set is aligned, rows that say the same. Rows of
like length are dealt in turn to two halves, which show how reliable the cosines are;
`gradvac.analysis.measure` explains what is computed and how much memory it takes. Gradients are
those of the cross-entropy without dropout, in float32.
"""

# T tasks, N rows

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from gradvac.analysis import (
    Measured,
    Similarities,
    concatenate,
    load_similarities,
    measure,
    save_similarities,
)
from gradvac.engine import split as split_model
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, choose_device, config
from gradvac.lab.training.checkpoint import RunWeights, list_checkpoints, resolve_weights
from gradvac.lab.training.settings import trained_settings, weights_hash
from gradvac.utils.files import remove_leftovers

logger = logging.getLogger(__name__)
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
    about = {
        "set": split,
        "lines": len(measured.rows[0]),
        "data": measured.data,
        "weights": weights_hash(config.load(settings_class, RunFolder(run).config)),
        "tasks": list(measured.tasks),
        "granularities": list(granularities),
    }
    model = measured.model.to(choose_device(device)).eval()
    for granularity in granularities:
        split_model(model, granularity)  # refuses a wrong one before any work is done
    measure_step = partial(
        measure,
        model,
        granularity=granularities,
        tasks=measured.tasks,
        engine=engine,
        offload=offload,
    )
    plan = _Plan(measured, is_mixed=engine == "one_backward")
    selected = _select_weights(run, weights)
    return _measure_checkpoints(
        RunFolder(run), model, plan, selected, measure_step, about, console or Console(quiet=True)
    )


def _measure_checkpoints(
    folder: RunFolder,
    model: nn.Module,
    plan: _Plan,
    selected: Mapping[int, RunWeights],
    measure_step: Callable[..., Measured],
    about: Mapping[str, object],
    console: Console,
) -> tuple[Similarities, ...]:
    """Measure what was not measured yet, and write it after every step."""
    with folder.lock_beside("similarity"):
        remove_leftovers(folder.path, of=folder.similarity)
        before = _read_before(folder.similarity, about)
        steps = set(before[0].steps.tolist()) if before else set()
        left = {step: one for step, one in selected.items() if step not in steps}
        with _progress(console, len(left) * plan.num_batches) as progress:
            bar = progress.add_task("", total=len(left) * plan.num_batches)
            for step, one in left.items():
                progress.update(bar, description=f"step {step}")
                one.load_into(model)
                batches = plan.batches(model)
                measured = measure_step(batches, step=step, tick=lambda: progress.advance(bar))
                together = zip(before, measured.parts, strict=True)
                before = tuple(map(concatenate, together)) if before else measured.parts
                save_similarities(folder.similarity, before, json.dumps(about))
    return before


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


def _select_weights(run: Path, names: Sequence[str | int]) -> dict[int, RunWeights]:
    """Step -> the weights to measure, by step; untrained ones (step 0) only if asked for."""
    if names:
        by_step = dict(_find_step(run, name) for name in names)
        return {step: by_step[step] for step in sorted(by_step)}
    selected = {}
    for one in list_checkpoints(run):
        damage = one.damage()
        if damage is not None:
            logger.warning(
                "The checkpoint of step %d is damaged (%s) and left out.", one.step, damage
            )
        elif one.step > 0:
            selected[one.step] = RunWeights(f"{run}, step {one.step}", one)
    if not selected:
        raise ValueError(
            f"{run}: has no checkpoint to measure; train first, or give --weights best."
        )
    return selected


def _find_step(run: Path, name: str | int) -> tuple[int, RunWeights]:
    weights = None if name == "averaged" else resolve_weights(run, name)
    step = None if weights is None else weights.step
    if weights is None or step is None:
        raise ValueError(
            f"weights: must be best, last or a step, got {name!r}; averaged weights belong to no "
            "single step."
        )
    return step, weights


def _read_before(path: Path, about: Mapping[str, object]) -> tuple[Similarities, ...]:
    if not path.is_file():
        return ()
    before, how = load_similarities(path)
    earlier = _parse_about(path, how)
    changed = [key for key in about if earlier.get(key) != about[key]]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{path}: was measured with {key} = {earlier.get(key)}, now it is {about[key]}; move "
            "it away to measure again, or use the same settings."
        )
    return before


def _parse_about(path: Path, how: str) -> dict[str, object]:
    try:
        earlier = json.loads(how or "{}")
    except (ValueError, RecursionError):
        earlier = None
    if not isinstance(earlier, dict):
        raise ValueError(f"{path}: does not say how it was measured; move it away.")
    return earlier


def _progress(console: Console, total: int) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet or not total,
    )


def summary(measured: Sequence[Similarities], step: int | None = None) -> Table:
    """Mean cosines of a step (None: the last), by granularity and component, as a table."""
    steps = measured[0].steps.tolist()
    place = steps.index(steps[-1] if step is None else step)
    shown = Table(title=f"step {steps[place]}, mean over pairs", title_justify="left")
    shown.add_column("granularity", no_wrap=True)
    shown.add_column("component", overflow="fold")
    for column in ("same", "different", "reliable"):
        shown.add_column(column, justify="right", no_wrap=True)
    for same, different in zip(measured[::2], measured[1::2], strict=True):
        for row, component in enumerate(same.components):
            shown.add_row(same.granularity, component, *_cells(same, different, place, row))
        shown.add_section()
    shown.caption = (
        "same, different: lines that tasks are compared on\nreliable: cosine of two halves of one "
        "task; what noise does to the others: gradvac report"
    )
    shown.caption_justify = "left"
    return shown


def _cells(same: Similarities, different: Similarities, place: int, row: int) -> Iterator[str]:
    apart = ~np.eye(len(same.tasks), dtype=bool)
    assert different.reliability is not None
    for values in (
        same.values[place, row][apart],
        different.values[place, row][apart],
        different.reliability[place, row],
    ):
        known = values[~np.isnan(values)]
        yield f"{known.mean():.3f}" if len(known) else "-"

"""Similarity over a run: its checkpoints, measured on batches that a recipe chooses.

`gradvac.analysis.measure` compares gradients of one model; here it is called for every checkpoint
of a run, with a progress bar, and RUN/similarity.npz grows by one step after each.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from gradvac.analysis import (
    Similarities,
    concatenate,
    load_similarities,
    measure,
    save_similarities,
)
from gradvac.analysis.measurement import Batches
from gradvac.engine import split
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.locks import remove_leftovers
from gradvac.lab.training.checkpoint import RunWeights, list_checkpoints, resolve_weights

logger = logging.getLogger(__name__)


class MeasurePlan(Protocol):
    """Which batches are measured."""

    @property
    def num_batches(self) -> int:
        """Batches of one measurement."""
        ...

    def batches(self, model: nn.Module) -> Batches:
        """What `measure` takes."""
        ...


def measure_checkpoints(
    run: Path,
    model: nn.Module,
    plan: MeasurePlan,
    granularities: Sequence[str],
    *,
    tasks: Sequence[str],
    weights: Sequence[str | int],
    about: Mapping[str, object],
    engine: str,
    offload: bool,
    console: Console,
) -> tuple[Similarities, ...]:
    """Measure the similarity of all tasks at checkpoints of a run that were not measured yet.

    Args:
        run: The run folder; gets `similarity.npz`.
        model: The run's model, on its device, in eval mode.
        plan: The batches.
        granularities: Which parameters share a component; all from the same gradients.
        tasks: Task names.
        weights: "best", "last", or steps; empty: all checkpoints except the untrained one.
        about: What the result depends on; stored with it, and compared with what is there.
        engine: See `measure`.
        offload: See `measure`.
        console: Where progress is shown.

    Raises:
        ValueError: There is no checkpoint, or there are similarities measured in another way.
    """
    folder = RunFolder(run)
    for granularity in granularities:
        split(model, granularity)  # refuses a wrong one before any work is done
    about = dict(about) | {"tasks": list(tasks), "granularities": list(granularities)}
    selected = _select_weights(run, weights)
    with folder.lock_beside("similarity"):
        remove_leftovers(run, of=folder.similarity)
        before = _read_before(folder.similarity, about)
        steps = set(before[0].steps.tolist()) if before else set()
        left = {step: one for step, one in selected.items() if step not in steps}
        with _progress(console, len(left) * plan.num_batches) as progress:
            bar = progress.add_task("", total=len(left) * plan.num_batches)
            for step, one in left.items():
                progress.update(bar, description=f"step {step}")
                one.load_into(model)
                measured = measure(
                    model,
                    plan.batches(model),
                    granularities,
                    tasks=tasks,
                    step=step,
                    engine=engine,
                    offload=offload,
                    tick=lambda: progress.advance(bar),
                )
                together = zip(before, measured.parts, strict=True)
                before = tuple(map(concatenate, together)) if before else measured.parts
                save_similarities(folder.similarity, before, json.dumps(about))
    return before


def _select_weights(run: Path, names: Sequence[str | int]) -> dict[int, RunWeights]:
    """Step -> the weights to measure, by step; untrained ones (step 0) only if asked for.

    Args:
        run: The run folder.
        names: "best", "last", or steps; empty: all checkpoints that are intact.
    """
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

"""Similarity over a run: its checkpoints, measured on batches that a recipe chooses.

`gradvac.analysis.measure` compares gradients of one model; here it is called for every checkpoint
of a run, with a progress bar, and RUN/similarity.npz grows by one step after each.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

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
from gradvac.lab.runs.files import remove_leftovers
from gradvac.lab.training import checkpoint
from gradvac.lab.training.weights import load_weights


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
    every = find_weights(run, weights, say=partial(console.print, markup=False))
    with folder.lock_beside("similarity"):
        remove_leftovers(run, of=folder.similarity)
        before = _read_before(folder.similarity, about)
        steps = set(before[0].steps.tolist()) if before else set()
        left = [one for one in every if one.step not in steps]
        with _progress(console, len(left) * plan.num_batches) as progress:
            bar = progress.add_task("", total=len(left) * plan.num_batches)
            for one in left:
                progress.update(bar, description=f"step {one.step}")
                load_weights(model, one.read(), origin=f"{run}, step {one.step}")
                measured = measure(
                    model,
                    plan.batches(model),
                    granularities,
                    tasks=tasks,
                    step=one.step,
                    engine=engine,
                    offload=offload,
                    tick=lambda: progress.advance(bar),
                )
                together = zip(before, measured.parts, strict=True)
                before = tuple(map(concatenate, together)) if before else measured.parts
                save_similarities(folder.similarity, before, json.dumps(about))
    return before


@dataclass(frozen=True)
class Weights:
    """Weights of a run to measure, read when their turn comes."""

    step: int
    read: Callable[[], dict[str, Tensor]]


def find_weights(
    run: Path, names: Sequence[str | int], *, say: Callable[[str], None]
) -> list[Weights]:
    """The weights to look at, by step; untrained ones (step 0) only if asked for.

    Args:
        run: The run folder.
        names: "best", "last", or steps; empty: all checkpoints that are intact.
        say: Called with a message for each checkpoint that is left out.
    """
    if not names:
        there = [one for one in checkpoint.kept(run) if one.step > 0]
        damage = {one.step: one.damage() for one in there}
        for step, what in damage.items():
            if what is not None:
                say(f"The checkpoint of step {step} is damaged ({what}) and left out.")
        intact = [one for one in there if damage[one.step] is None]
        if not intact:
            raise ValueError(
                f"{run}: has no checkpoint to measure; train first, or give --weights best."
            )
        return [Weights(one.step, one.weights) for one in intact]
    by_step = {}
    for name in names:
        if name == "best":
            step = checkpoint.step_of(run, name)
        elif name == "last":
            newest = checkpoint.latest(run, say=say)
            if newest is None:
                raise ValueError(f"{run}: has no checkpoint to measure; train first.")
            step = newest.step
        elif isinstance(name, int):
            step = name
            steps = [one.step for one in checkpoint.kept(run)]
            if step not in steps:
                raise ValueError(f"{run}: has no checkpoint of step {step}; there are {steps}.")
        else:
            raise ValueError(
                f"weights: must be best, last or a step, got {name!r}; averaged weights belong to "
                "no single step."
            )
        by_step[step] = Weights(step, partial(checkpoint.weights, run, name))
    return [by_step[step] for step in sorted(by_step)]


def _read_before(path: Path, about: Mapping[str, object]) -> tuple[Similarities, ...]:
    if not path.is_file():
        return ()
    before, how = load_similarities(path)
    former = _parse_about(path, how)
    changed = [key for key in about if former.get(key) != about[key]]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{path}: was measured with {key} = {former.get(key)}, now it is {about[key]}; move "
            "it away to measure again, or use the same settings."
        )
    return before


def _parse_about(path: Path, how: str) -> dict[str, object]:
    try:
        former = json.loads(how or "{}")
    except (ValueError, RecursionError):
        former = None
    if not isinstance(former, dict):
        raise ValueError(f"{path}: does not say how it was measured; move it away.")
    return former


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

"""Successive halving: all points for a short while, the better half for twice as long, and so on.

Points are ranked by their loss on development data (`dev/loss`, the mean over tasks and seeds),
which has far more signal than a score of the same runs. A run that goes on continues where it was
paused, so that nothing is trained twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gradvac.lab.experiments.curves import LOSS
from gradvac.lab.experiments.launchers import Launcher
from gradvac.lab.experiments.plan import Trial
from gradvac.lab.experiments.worker import load_settings
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.files import write_json

if TYPE_CHECKING:
    from gradvac.lab.experiments.sweep import Sweep

FILE = "halving.json"
_MOST_RUNGS = 2  # earlier than at a quarter of the steps, losses did not tell who would win


def rungs(max_steps: int, validate_every: int, num_points: int) -> list[int]:
    """Steps at which the weaker half stops; all are validated, and the last is the end.

    Raises:
        ValueError: There are too few validations to choose by.
    """
    wanted = min(_MOST_RUNGS, math.ceil(math.log2(max(2, num_points))))
    steps = [max_steps / 2**number for number in range(wanted, 0, -1)]
    rounded = [validate_every * max(1, math.ceil(step / validate_every)) for step in steps]
    before_end = [step for step in dict.fromkeys(rounded) if step < max_steps]
    if not before_end:
        raise ValueError(
            f"--halving: with train.validate_every = {validate_every} there is no validation "
            f"before the end, step {max_steps}; set a smaller one."
        )
    return [*before_end, max_steps]


def halve(sweep: Sweep, launcher: Launcher) -> list[str]:
    """Run a sweep by halving; the names of the points that went to the end."""
    if any(trial.needs for trial in sweep.trials):
        raise ValueError("--halving: runs that start from others cannot be stopped early.")
    points: dict[str, list[Trial]] = {}
    for trial in sweep.trials:
        points.setdefault(trial.name, []).append(trial)
    steps = _steps(sweep, len(points))
    history: list[dict[str, Any]] = []
    left = list(points)
    for step in steps[:-1]:
        sweep.run_trials([t for name in left for t in points[name]], launcher, pause_at=step)
        losses = {name: _loss(points[name], step) for name in left}
        ranked = sorted(left, key=lambda name: (math.isnan(losses[name]), losses[name]))
        kept = ranked[: max(1, math.ceil(len(left) / 2))]
        losses_or_none = {name: None if math.isnan(x) else x for name, x in losses.items()}
        history.append({"step": step, "losses": losses_or_none, "kept": kept})
        write_json(sweep.out / FILE, {"rungs": history})
        sweep.say(
            f"step {step:,}: {len(kept)} of {len(left)} points go on; best {ranked[0]} "
            f"({LOSS} {losses[ranked[0]]:.4f})"
        )
        left = kept
    sweep.run_trials([t for name in left for t in points[name]], launcher)
    return left


def _steps(sweep: Sweep, num_points: int) -> list[int]:
    loaded = [
        load_settings(sweep.config.recipe, sweep.base, dict(trial.settings))
        for trial in sweep.trials
    ]
    lengths = {one.train.max_steps for one in loaded}
    every = {one.train.validate_every for one in loaded}
    if len(lengths) > 1 or len(every) > 1 or 0 in every:
        raise ValueError(
            "--halving: all runs must have one train.max_steps and one train.validate_every above "
            f"0; there are {sorted(lengths)} and {sorted(every)}."
        )
    epochs = {getattr(getattr(one, "batch", None), "epochs", 0) for one in loaded}
    if epochs != {0}:
        raise ValueError(
            "--halving: batch.epochs decides how long runs are; set it to 0, and train.max_steps."
        )
    return rungs(lengths.pop(), every.pop(), num_points)


def _loss(trials: list[Trial], step: int) -> float:
    """The mean loss of a point at a step; NaN if a run of it has none, as it failed."""
    losses = []
    for trial in trials:
        entries = RunFolder(trial.run).read_metrics()
        at = [e[LOSS] for e in entries if e["step"] == step and e.get(LOSS) is not None]
        losses.append(at[-1] if at else math.nan)
    return float(np.mean(losses))

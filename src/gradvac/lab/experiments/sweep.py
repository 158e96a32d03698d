"""A sweep: many runs, executed several at a time, resumable, with a table of what they cost.

OUT/sweep.json                      all runs of the sweep, and their settings
OUT/POINT/seed-N/                   a run folder
OUT/trials/POINT.seed-N.json        what its process was asked to do
OUT/trials/POINT.seed-N.result.json how it ended, and the hash of the settings it is about
OUT/trials/POINT.seed-N.log         what it printed
OUT/halving.json                    with halving: every round
OUT/budget.md                       runs, steps and seconds by method

Successive halving trains all points for a short while, the better half for twice as long, and so
on. Points are ranked by their loss on development data (`dev/loss`, the mean over tasks and seeds),
which has far more signal than a score of the same runs. A run that goes on continues where it was
paused, so that nothing is trained twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradvac.lab.experiments.methods import LOSS, PART, PLAN, PRIMARY
from gradvac.lab.experiments.trials import SweepConfig, Trial, plan_trials
from gradvac.lab.experiments.worker import (
    INTERRUPTED,
    Launcher,
    Processes,
    load_settings,
    signals_interrupt,
)
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import ConfigError, RunConfig
from gradvac.lab.training.settings import shortened
from gradvac.utils.files import folder_lock, hash_of, read_json, write_json
from gradvac.utils.hints import nearest

DONE, FAILED, PAUSED, WAITING = "done", "failed", "paused", "waiting"
HALVING = "halving.json"
_ENDS = ("finished", "early_stop")
_TAIL = 2000  # characters of a log that may hold the reason of a failure
_MOST_RUNGS = 2  # earlier than at a quarter of the steps, losses did not tell who would win

logger = logging.getLogger(__name__)


class InterruptedSweep(KeyboardInterrupt):
    """The user stopped the sweep; the same command continues."""


@dataclass(frozen=True)
class Ended:
    """How a run stands."""

    status: str  # "done", "failed", "paused" or "waiting" (not begun, or interrupted)
    step: int = 0
    seconds: float = 0.0
    error: str = ""


class Sweep:
    """The runs of a sweep in their folder.

    Args:
        config: The sweep.
        base: File of the config that is varied.
        out: The folder.
        extra: Settings from the command line, for all runs.
        proxy: Runs have this part of their steps and of every task's rows: short runs that repeat
            rows as often as the long ones they stand for.

    Raises:
        ValueError: A run cannot be configured, which is reported before any begins.
    """

    def __init__(
        self,
        config: SweepConfig,
        base: Path,
        out: Path,
        *,
        extra: Mapping[str, Any] | None = None,
        proxy: int = 1,
    ) -> None:
        self.config, self.base, self.out = config, base, out
        self.trials = plan_trials(config, out, extra)
        if proxy > 1:
            self.trials = [self._proxy(trial, proxy) for trial in self.trials]
        self.settings = {trial: self._load(trial) for trial in self.trials}
        self._hashes = {
            trial: hash_of(loaded.model_dump(mode="json"))
            for trial, loaded in self.settings.items()
        }

    def _proxy(self, trial: Trial, factor: int) -> Trial:
        loaded = self._load(trial)
        shorter = {**shortened(loaded, 1 / factor), "sampling.thin": factor * loaded.sampling.thin}
        return replace(trial, settings={**trial.settings, **shorter})

    def _load(self, trial: Trial) -> RunConfig:
        try:
            loaded = load_settings(self.config.recipe, self.base, trial.settings)
        except ConfigError as error:
            raise ValueError(f"{trial.name}: {error}") from None
        sources = getattr(getattr(loaded, "data", None), "sources", None)
        if sources is not None:
            sets = [name for name in sources() if name != "train"]
            for name in self.config.score:
                if name not in sets:
                    raise ValueError(f"score: there is no set {name!r}; {nearest(name, sets)}")
        return loaded

    def run(
        self, launcher: Launcher | None = None, *, retry: bool = False, halving: bool = False
    ) -> dict[Trial, Ended]:
        """Run what is not done; call it again to go on.

        Args:
            launcher: How runs are started; None: one after the other.
            retry: Also run what has failed before.
            halving: Stop the weaker half of the points early, by their loss on development data.

        Raises:
            InterruptedSweep: Ctrl-C, SIGTERM or SIGHUP stopped it; running runs were saved.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        busy = f"--out: another sweep is at work in {self.out}; wait for it to end."
        with folder_lock(self.out, busy=busy), signals_interrupt():
            self._folder.mkdir(exist_ok=True)
            write_json(self.out / PLAN, self._described())
            launcher = launcher or Processes(1, self.config.recipe)
            if retry:
                for trial in self.trials:
                    if self.ended(trial).status == FAILED:
                        self._result(trial).unlink()
            try:
                if halving:
                    self._halve(launcher)
                else:
                    self._run_trials(self.trials, launcher)
            except KeyboardInterrupt:
                logger.info("Stopping: runs save and leave; the same command continues.")
                raise InterruptedSweep from None
            finally:
                launcher.stop()
        return {trial: self.ended(trial) for trial in self.trials}

    def _described(self) -> dict[str, Any]:
        return {
            "recipe": self.config.recipe,
            "base": str(self.base),
            "primary": self._primary(),
            "runs": [
                {"method": t.method, "point": t.name, "seed": t.seed, "settings": dict(t.settings)}
                for t in self.trials
            ],
        }

    def _primary(self) -> list[dict[str, str]]:
        """The primary questions, with those of other sweeps that share the folder.

        Raises:
            ValueError: There are others than before, and a run that answers them has ended.
        """
        former = read_json(self.out / PLAN).get(PRIMARY, [])
        asked = [question.model_dump() for question in self.config.primary]
        own = {trial.name.partition(PART)[0] for trial in self.trials}
        ended = {t.name.partition(PART)[0] for t in self.trials if self.ended(t).status == DONE}
        kept = [question for question in former if question["method"] not in own]
        for question in former + asked:
            if (question in former) != (question in asked + kept) and question["method"] in ended:
                raise ValueError(
                    f"primary: {question['method']} against {question['baseline']} on "
                    f"{question['on']!r} was {'' if question in former else 'not '}asked before "
                    f"runs of {question['method']} ended; leave the questions in {self.out} as "
                    "they were, or start in another folder with --out."
                )
        return kept + asked

    @property
    def _folder(self) -> Path:
        return self.out / "trials"

    def _result(self, trial: Trial) -> Path:
        return self._folder / f"{trial.label}.result.json"

    def _log(self, trial: Trial) -> Path:
        return self._folder / f"{trial.label}.log"

    def ended(self, trial: Trial) -> Ended:
        """How a run stands, by what it left."""
        result = read_json(self._result(trial))
        if result.get("hash") != self._hashes[trial]:
            return Ended(WAITING)  # none, or of other settings, which the run folder may refuse
        reason, step = result.get("reason"), int(result.get("step", 0))
        seconds = float(result.get("seconds", 0.0))
        if reason == "failed":
            return Ended(FAILED, step, seconds, str(result.get("error", "")))
        if not RunFolder(trial.run).is_run():
            return Ended(WAITING)  # it was removed
        if reason in _ENDS:
            return Ended(DONE, step, seconds)
        return Ended(PAUSED if reason == "paused" else WAITING, step, seconds)

    def _run_trials(
        self, trials: Sequence[Trial], launcher: Launcher, *, pause_at: int = 0
    ) -> None:
        """Run some of the runs as far as step `pause_at` (0: to the end)."""
        waiting = [trial for trial in trials if not self._is_there(trial, pause_at)]
        running: dict[Path, Trial] = {}
        while True:
            while len(running) < launcher.jobs and (trial := self._next(waiting)):
                waiting.remove(trial)
                task = self._write_task(trial, pause_at)
                launcher.start(task, self._log(trial))
                running[task] = trial
            if not running:
                break
            for task, status in launcher.wait_for_one().items():
                self._note(running.pop(task), status)

    def _next(self, waiting: list[Trial]) -> Trial | None:
        """The first run whose needs are there; those whose needs have failed, fail."""
        by_folder = {trial.run: trial for trial in self.trials}
        for trial in list(waiting):
            needed = [by_folder[run] for run in trial.needs]
            states = [self.ended(other).status for other in needed]
            if FAILED in states:
                waiting.remove(trial)
                other = needed[states.index(FAILED)].label
                self._fail(trial, f"it needs {other}, which failed")
            elif all(state == DONE for state in states):
                return trial
        return None

    def _is_there(self, trial: Trial, pause_at: int) -> bool:
        ended = self.ended(trial)
        return ended.status in (DONE, FAILED) or (
            ended.status == PAUSED and 0 < pause_at <= ended.step
        )

    def _write_task(self, trial: Trial, pause_at: int) -> Path:
        """What the worker of a run is to do."""
        task = self._folder / f"{trial.label}.json"
        content = {
            "recipe": self.config.recipe,
            "base": str(self.base),
            "settings": dict(trial.settings) | {"train.pause_at": pause_at},
            "settings_hash": self._hashes[trial],
            "run": str(trial.run),
            "score": self.config.score if trial.scored else [],
            "measure": self.config.measure,
            "result": str(self._result(trial)),
        }
        write_json(task, content)
        return task

    def _note(self, trial: Trial, status: int) -> None:
        """Log how a process ended, and keep why it failed."""
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            self._fail(trial, reason_of_failure(self._log(trial), status))
            return
        ended = self.ended(trial)
        logger.info(
            "%s: %s, step %s, %s s",
            *(trial.label, ended.status, f"{ended.step:,}", f"{ended.seconds:,.1f}"),
        )

    def _fail(self, trial: Trial, why: str) -> None:
        failed = {"reason": "failed", "error": why, "hash": self._hashes[trial]}
        write_json(self._result(trial), failed)
        logger.info("%s: failed: %s (log: %s)", trial.label, why, self._log(trial))

    def _halve(self, launcher: Launcher) -> None:
        """Run the sweep by halving."""
        if any(trial.needs for trial in self.trials):
            raise ValueError("--halving: runs that start from others cannot be stopped early.")
        points: dict[str, list[Trial]] = {}
        for trial in self.trials:
            points.setdefault(trial.name, []).append(trial)
        history: list[dict[str, Any]] = []
        left = list(points)
        for step in self._rungs(len(points))[:-1]:
            self._run_trials([t for name in left for t in points[name]], launcher, pause_at=step)
            losses = {name: _loss(points[name], step) for name in left}
            ranked = sorted(left, key=lambda name: (math.isnan(losses[name]), losses[name]))
            kept = ranked[: max(1, math.ceil(len(left) / 2))]
            losses_or_none = {name: None if math.isnan(x) else x for name, x in losses.items()}
            history.append({"step": step, "losses": losses_or_none, "kept": kept})
            write_json(self.out / HALVING, {"rungs": history})
            logger.info(
                "step %s: %d of %d points go on; best %s (%s %.4f)",
                *(f"{step:,}", len(kept), len(left), ranked[0], LOSS, losses[ranked[0]]),
            )
            left = kept
        self._run_trials([t for name in left for t in points[name]], launcher)

    def _rungs(self, num_points: int) -> list[int]:
        loaded = list(self.settings.values())
        lengths = {one.train.max_steps for one in loaded}
        every = {one.train.validate_every for one in loaded}
        if len(lengths) > 1 or len(every) > 1 or 0 in every:
            raise ValueError(
                "--halving: all runs must have one train.max_steps and one train.validate_every "
                f"above 0; there are {sorted(lengths)} and {sorted(every)}."
            )
        if {getattr(getattr(one, "batch", None), "epochs", 0) for one in loaded} != {0}:
            raise ValueError(
                "--halving: batch.epochs decides how long runs are; set it to 0, and "
                "train.max_steps."
            )
        return rungs(lengths.pop(), every.pop(), num_points)


def reason_of_failure(log: Path, status: int) -> str:
    """How a process ended, and the last line that it printed."""
    text = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"exit status {status}: {lines[-1] if lines else 'it printed nothing'}"


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


def _loss(trials: list[Trial], step: int) -> float:
    """The mean loss of a point at a step; NaN if a run of it has none, as it failed."""
    losses = []
    for trial in trials:
        entries = RunFolder(trial.run).read_metrics()
        at = [e[LOSS] for e in entries if e["step"] == step and e.get(LOSS) is not None]
        losses.append(at[-1] if at else math.nan)
    return float(np.mean(losses))


def budget_table(ended: Mapping[Trial, Ended]) -> str:
    """What every method was given, in Markdown: settings tried, runs, steps, training time."""
    lines: list[Sequence[object]] = [
        ("method", "points", "runs", "done", "failed", "steps", "seconds"),
        ["---"] * 7,
    ]
    for method in dict.fromkeys(trial.method for trial in ended):
        states = [how.status for trial, how in ended.items() if trial.method == method]
        begun = [t for t in ended if t.method == method and RunFolder(t.run).is_run()]
        logs = [RunFolder(trial.run).read_metrics() for trial in begun]
        steps = sum(max((int(entry["step"]) for entry in log), default=0) for log in logs)
        seconds = sum(
            max((e.get("train/seconds") or 0.0 for e in log), default=0.0) for log in logs
        )
        points = len({trial.name for trial in begun})
        counts = (points, len(begun), states.count(DONE), states.count(FAILED))
        lines.append((method, *counts, f"{steps:,}", f"{seconds:,.0f}"))
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)

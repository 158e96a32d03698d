"""A sweep: many runs, executed several at a time, resumable, with a table of what they cost.

OUT/sweep.json                      all runs of the sweep, and their settings
OUT/POINT/seed-N/                   a run folder
OUT/trials/POINT.seed-N.json        what its process was asked to do
OUT/trials/POINT.seed-N.result.json how it ended
OUT/trials/POINT.seed-N.log         what it printed
OUT/budget.md                       runs, steps and seconds by method
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradvac.hints import nearest
from gradvac.lab.experiments.frozen import mean_weights
from gradvac.lab.experiments.launchers import Launcher, Processes
from gradvac.lab.experiments.pace import Pace, steps_taken
from gradvac.lab.experiments.plan import SweepConfig, Trial, expand, resolve
from gradvac.lab.experiments.worker import INTERRUPTED, load_settings
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.files import FolderLock, hash_of, read_json, write_json
from gradvac.lab.training import ConfigError

DONE, FAILED, PAUSED, WAITING = "done", "failed", "paused", "waiting"
_ENDS = ("finished", "early_stop")
_TAIL = 2000  # characters of a log that may hold the reason of a failure


class InterruptedSweep(KeyboardInterrupt):
    """The user stopped the sweep; the same command continues."""


class _TimeIsOverError(Exception):
    """A sweep has used the seconds it was given."""


@dataclass(frozen=True)
class Ended:
    """How a run stands.

    Attributes:
        status: "done", "failed", "paused" or "waiting" (not begun, or interrupted).
        step: Steps taken.
        seconds: Training time.
        error: Why it failed.
    """

    status: str
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
        say: Told what happens.

    Raises:
        ValueError: A run cannot be configured, which is told before any begins.
    """

    def __init__(
        self,
        config: SweepConfig,
        base: Path,
        out: Path,
        *,
        extra: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config, self.base, self.out, self.say = config, base, out, say
        self.trials = expand(config, out, extra)
        self._rules: dict[Trial, str] = {}
        self._hashes: dict[Trial, str] = {}  # of all settings, those of the base too
        self._steps: dict[Trial, int] = {}  # of runs whose length is known
        self._check()
        self._pace = Pace(self._rules)

    def _check(self) -> None:
        """Load the settings of all runs, as far as they are known."""
        for trial in self.trials:
            known_settings = {
                key: value
                for key, value in trial.settings.items()
                if not (isinstance(value, str) and value.startswith("{weights:"))
            }
            if len(known_settings) < len(trial.settings):
                known_settings.pop("align.rule", None)  # a rule that needs what is not there yet
            try:
                loaded = load_settings(self.config.recipe, self.base, known_settings)
            except ConfigError as error:
                raise ValueError(f"{trial.name}: {error}") from None
            self._hashes[trial] = hash_of([loaded.model_dump(mode="json"), dict(trial.settings)])
            self._check_sets(loaded)
            self._rules[trial] = str(trial.settings.get("align.rule", loaded.align.rule))
            if not getattr(getattr(loaded, "batch", None), "epochs", 0):
                self._steps[trial] = loaded.train.max_steps

    def _check_sets(self, loaded: Any) -> None:
        sets = [name for name in loaded.data.sources() if name != "train"]
        unknown = [name for name in self.config.score if name not in sets]
        if unknown:
            raise ValueError(f"score: there is no set {unknown[0]!r}; {nearest(unknown[0], sets)}")

    def run(
        self,
        launcher: Launcher | None = None,
        *,
        retry: bool = False,
        halving: bool = False,
        seconds: float | None = None,
    ) -> dict[Trial, Ended]:
        """Run what is not done; call it again to go on.

        Args:
            launcher: How runs are started; None: one after the other.
            retry: Also run what has failed before.
            halving: Stop the weaker half of the points early, by their loss on development data;
                see `halving.py`.
            seconds: After so many, runs save and leave; a run does not begin if those before
                were too slow for it to end in time. None: no limit.

        Raises:
            InterruptedSweep: The user stopped it.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        busy = f"--out: another sweep is at work in {self.out}; wait for it to end."
        with FolderLock(self.out, busy=busy):
            self._folder.mkdir(exist_ok=True)
            write_json(self.out / "sweep.json", self._described())
            launcher = launcher or Processes(1)
            if retry:
                for trial in self.trials:
                    if self.ended(trial).status == FAILED:
                        self._result(trial).unlink()
            self._pace = Pace(self._rules, seconds)
            try:
                self._run(launcher, halving=halving)
            except _TimeIsOverError as error:
                self.say(f"{error}; the same command continues.")
            except KeyboardInterrupt:
                self.say("Stopping: runs save and leave; the same command continues.")
                launcher.stop()
                raise InterruptedSweep from None
            finally:
                launcher.stop()
        return {trial: self.ended(trial) for trial in self.trials}

    def _run(self, launcher: Launcher, *, halving: bool) -> None:
        if halving:
            from gradvac.lab.experiments.halving import halve

            halve(self, launcher)
        else:
            self.run_trials(self.trials, launcher)

    def _described(self) -> dict[str, Any]:
        return {
            "recipe": self.config.recipe,
            "base": str(self.base),
            "runs": [
                {"method": t.method, "point": t.name, "seed": t.seed, "settings": dict(t.settings)}
                for t in self.trials
            ],
        }

    @property
    def _folder(self) -> Path:
        return self.out / "trials"

    def _result(self, trial: Trial) -> Path:
        return self._folder / f"{trial.label}.result.json"

    def ended(self, trial: Trial) -> Ended:
        """How a run stands, by what it left."""
        result = read_json(self._result(trial))
        if result.get("hash") not in (None, self._hashes[trial]):
            return Ended(WAITING)  # it was of other settings, which the run folder may refuse
        reason, step = result.get("reason"), int(result.get("step", 0))
        seconds = float(result.get("seconds", 0.0))
        if reason == "failed":
            return Ended(FAILED, step, seconds, str(result.get("error", "")))
        if not RunFolder(trial.run).is_run():
            return Ended(WAITING)  # it was removed
        if reason in _ENDS:
            return Ended(DONE, step, seconds)
        return Ended(PAUSED if reason == "paused" else WAITING, step, seconds)

    def run_trials(self, trials: Sequence[Trial], launcher: Launcher, *, pause_at: int = 0) -> None:
        """Run some of the runs as far as step `pause_at` (0: to the end)."""
        waiting = [trial for trial in trials if not self._is_there(trial, pause_at)]
        waiting.sort(key=lambda trial: not steps_taken(trial))  # what was begun comes first
        jobs: dict[Any, Trial] = {}
        while True:
            while len(jobs) < launcher.jobs and (trial := self._next(waiting, pause_at)):
                waiting.remove(trial)
                self._start(trial, launcher, jobs, pause_at)
            if not jobs:
                break
            left = self._pace.seconds_left
            for job, status in launcher.wait_for_one(None if left == math.inf else left).items():
                self._note(jobs.pop(job), status)
            if not self._pace.seconds_left and (jobs or waiting):
                raise _TimeIsOverError(f"{self._pace.seconds:,.0f} seconds are over")
        if late := [trial for trial in waiting if self._is_late(trial, pause_at)]:
            raise _TimeIsOverError(
                f"Left for later: {len(late)} of {len(trials)} runs, which at the pace of earlier "
                f"ones would not end within {self._pace.seconds:,.0f} seconds"
            )

    def _next(self, waiting: list[Trial], pause_at: int) -> Trial | None:
        """The first run that can end in time and whose needs are there.

        Those whose needs have failed, fail.
        """
        for trial in list(waiting):
            needed = [self._of(run) for run in trial.needs]
            states = [self.ended(other).status for other in needed]
            if FAILED in states:
                waiting.remove(trial)
                other = needed[states.index(FAILED)].label
                self._fail(trial, f"it needs {other}, which failed")
            elif all(state == DONE for state in states) and not self._is_late(trial, pause_at):
                return trial
        return None

    def _is_late(self, trial: Trial, pause_at: int) -> bool:
        """Whether a run that begins now will not end in time, as far as one can tell."""
        until = pause_at or self._steps.get(trial, 0)
        return self._pace.foreseen(trial, until) > self._pace.seconds_left

    def _of(self, run: Path) -> Trial:
        return next(trial for trial in self.trials if trial.run == run)

    def _is_there(self, trial: Trial, pause_at: int) -> bool:
        ended = self.ended(trial)
        return ended.status in (DONE, FAILED) or (
            ended.status == PAUSED and 0 < pause_at <= ended.step
        )

    def _start(
        self, trial: Trial, launcher: Launcher, jobs: dict[Any, Trial], pause_at: int
    ) -> None:
        try:
            settings = resolve(trial, self.out, mean_weights)
        except ValueError as error:
            self._fail(trial, str(error))
            return
        task = self._folder / f"{trial.label}.json"
        content = {
            "recipe": self.config.recipe,
            "base": str(self.base),
            "settings": settings | {"train.pause_at": pause_at},
            "run": str(trial.run),
            "score": self.config.score if trial.scored else [],
            "measure": self.config.measure,
            "result": str(self._result(trial)),
        }
        write_json(task, content)
        self._pace.begin(trial)
        jobs[launcher.start(task, self._log(trial))] = trial

    def _log(self, trial: Trial) -> Path:
        return self._folder / f"{trial.label}.log"

    def _note(self, trial: Trial, status: int) -> None:
        """Keep how a process ended, and say it."""
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            self._fail(trial, _reason(self._log(trial), status))
            return
        path = self._result(trial)
        write_json(path, read_json(path) | {"hash": self._hashes[trial]})
        ended = self.ended(trial)
        self._pace.end(trial, ended.step)
        self.say(f"{trial.label}: {ended.status}, step {ended.step:,}, {ended.seconds:,.1f} s")

    def _fail(self, trial: Trial, why: str) -> None:
        facts = {"reason": "failed", "error": why, "hash": self._hashes[trial]}
        write_json(self._result(trial), facts)
        self.say(f"{trial.label}: failed: {why} (log: {self._log(trial)})")


def _reason(log: Path, status: int) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[-1] if lines else "it printed nothing"
    return f"exit status {status}: {said}"

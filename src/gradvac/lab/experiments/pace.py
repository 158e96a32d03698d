"""How long runs of a sweep take: what begins when time is short should also end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from gradvac.lab.experiments.plan import Trial
from gradvac.lab.runs import RunFolder


class _Took(NamedTuple):
    """What a run took from its start to its score."""

    method: str
    rule: str
    seconds_per_step: float


class Pace:
    """Measures runs that end, and so foresees others.

    Args:
        rules: Run -> its rule.
        seconds: How long the sweep may take; None: as long as it needs.

    Attributes:
        seconds: The same, without None.
    """

    def __init__(self, rules: Mapping[Trial, str], seconds: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._rules, self._end = rules, time.monotonic() + self.seconds
        self._begun: dict[Trial, tuple[float, int]] = {}
        self._took: list[_Took] = []

    @property
    def seconds_left(self) -> float:
        """Until the sweep has to end."""
        return max(0.0, self._end - time.monotonic())

    def begin(self, trial: Trial) -> None:
        """A run begins, or goes on."""
        self._begun[trial] = time.monotonic(), steps_taken(trial)

    def end(self, trial: Trial, step: int) -> None:
        """A run has come to a step, and its process has ended."""
        start, before = self._begun.pop(trial)
        if step > before:
            seconds = (time.monotonic() - start) / (step - before)
            self._took.append(_Took(trial.method, self._rules[trial], seconds))

    def foreseen(self, trial: Trial, until: int) -> float:
        """The seconds from the start of a run until it has come to a step, and is scored.

        By runs of its method that have ended, or of its rule, or by all; 0 if there are none.
        """
        rule, left = self._rules[trial], max(0, until - steps_taken(trial))
        for alike in (
            [took for took in self._took if took.method == trial.method],
            [took for took in self._took if took.rule == rule],
            self._took,
        ):
            if alike:
                return left * median(took.seconds_per_step for took in alike)
        return 0.0


def steps_taken(trial: Trial) -> int:
    """The step from which a run goes on."""
    kept = RunFolder(trial.run).kept_checkpoints()
    return kept[-1][0] if kept else 0

"""How a training ends, well or badly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Reason = Literal["finished", "early_stop", "interrupted", "paused"]


class DivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite."""


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended.

    Attributes:
        run: The run folder.
        step: Optimizer steps taken, in all.
        reason: "finished" (all steps), "early_stop" (patience), "interrupted" (a signal) or
            "paused" (`train.pause_at`); after these two the same call continues.
        best_step: Step of `best.safetensors`; None before the first validation.
        best_score: Its `train.metric`.
        skipped_steps: Steps whose loss or gradient was not finite.
        seconds: Time spent training, without validation and saving.
    """

    run: Path
    step: int
    reason: Reason
    best_step: int | None
    best_score: float | None
    skipped_steps: int
    seconds: float

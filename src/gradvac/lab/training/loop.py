"""The loop: one for all recipes, read from top to bottom.

`train` prepares a run, or continues it; `_Loop.run` is the loop; the methods below it are its
lines.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal

import torch

from gradvac import Alignment
from gradvac.analysis import Recorder, heat_maps, step_values
from gradvac.engine import RankError
from gradvac.lab.training import checkpoint
from gradvac.lab.training.environment import StopSignals, around_forward, untouched_random_state
from gradvac.lab.training.job import Job, join
from gradvac.lab.training.log import Display, RunLog, after
from gradvac.lab.training.optimizer import set_lr
from gradvac.lab.training.parallel import unsharded
from gradvac.lab.training.settings import RunConfig, run_signature
from gradvac.lab.training.state import RunState
from gradvac.lab.training.step import EagerStep, GraphStep, StepResult
from gradvac.lab.training.workload import BatchT, Workload
from gradvac.utils.hints import nearest

logger = logging.getLogger(__name__)

Watch = Callable[[int, Alignment], None]
_DRAW_EVERY = 10  # log entries
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


def train(
    workload: Workload[BatchT],
    settings: RunConfig,
    run: str | Path,
    *,
    display: Display | None = None,
    watch: Watch | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Result:
    """Train a workload's model into a run folder, or continue the run that is there.

    Args:
        workload: Model, batches, losses, validation.
        settings: The recipe's config.
        run: The run folder. Killed at any moment and called again, training continues from the last
            intact checkpoint; on a CPU, weights equal those of an uninterrupted run bit for bit.
        display: Where progress and messages go; None: standard output.
        watch: Called after every step with its number and its `Alignment`.
        files: Name -> contents of files that the run needs wherever its folder is moved, such as a
            vocabulary. They are written once, and the run refuses to continue with others.

    Raises:
        ValueError: The folder is in use, or holds a run with other settings, data or files.
        DivergedError: `train.max_bad_steps` steps in a row were not finite, or the weights are not.
        CheckpointError: A checkpoint could not be written; those before are intact.
        RankError: Another process of the job has ended or failed; checkpoints are intact.
    """
    with (
        join(settings.train.device) as job,
        job.display(display) as display,
        job.together(lambda: RunLog(Path(run), settings, is_first=job.is_first)) as log,
        StopSignals() as signals,
    ):
        job.together(lambda: log.save_files(files or {}))
        with _Loop(workload, settings, log, display, signals, watch, job) as loop:
            return loop.run()


class _Loop(Generic[BatchT]):
    def __init__(
        self,
        workload: Workload[BatchT],
        settings: RunConfig,
        log: RunLog,
        display: Display,
        signals: StopSignals,
        watch: Watch | None,
        job: Job,
    ) -> None:
        self.workload, self.settings, self.log, self.job = workload, settings, log, job
        self.display, self.signals, self.watch = display, signals, watch
        self.state = RunState(workload, settings, job)
        self.recorder: Recorder | None = None
        self.take_step: Callable[[list[BatchT]], StepResult] | None = None
        self.norm = torch.tensor(math.nan)  # of the last step's gradient
        self.signed_engine: str | None = None

    def __enter__(self) -> "_Loop[BatchT]":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        checkpoints = checkpoint.list_checkpoints(self.log.run)
        if isinstance(error, RankError) and checkpoints:
            logger.info("The last checkpoint is that of step %d.", checkpoints[-1].step)
        if self.state.aligner is not None:
            self.state.aligner.detach()
        if self.recorder is not None:
            with after(error):
                self.recorder.close()

    def run(self) -> Result:
        """Continue where the run stands, until there is a reason to stop."""
        state, train = self.state, self.settings.train
        state.resume(self.log)
        self.open_record()
        self.introduce()
        state.meters.resume()
        while True:
            if self.is_due(train.validate_every) and state.at.validated < state.at.step:
                self.validate()
            reason = self.reason_to_stop()
            if reason:
                return self.finish(reason)
            if self.is_due(train.checkpoint_every):
                self.save_if_good()
            alignment = self.step()
            if self.recorder is not None and alignment is not None:
                self.recorder(state.at.step, alignment)
            if self.watch is not None and alignment is not None:
                self.watch(state.at.step, alignment)
            if self.is_due(train.log_every):
                self.write_log(alignment)
            self.signals.received = self.job.agree_on_stop(self.signals.received)
            if self.signals.received and state.at.step < train.max_steps:
                return self.finish("interrupted")

    def is_due(self, every: int) -> bool:
        """Whether something is due: every `every` steps and at the last one; 0: never."""
        step, last = self.state.at.step, self.settings.train.max_steps
        return every > 0 and step > 0 and (step % every == 0 or step == last)

    def reason_to_stop(self) -> Reason | None:
        at, train = self.state.at, self.settings.train
        if train.patience and at.stale >= train.patience:
            return "early_stop"
        if at.step >= train.max_steps:
            return "finished"
        return "paused" if 0 < train.pause_at <= at.step else None

    def open_record(self) -> None:
        """Continue the record at the current step, without what a killed process added."""
        aligner, is_wanted = self.state.aligner, self.settings.train.record_every
        if is_wanted and aligner is not None and self.job.is_first:
            chosen = getattr(aligner.rule, "vaccinated", None)  # None: all
            self.recorder = Recorder(
                self.log.folder.record,
                every=self.settings.train.record_every,
                tasks=self.workload.tasks,
                rule=self.settings.align.describe_rule(),
                vaccinated=self.workload.tasks if chosen is None else chosen,
                after=self.state.at.step,
            )

    def introduce(self) -> None:
        self.sign()
        aligner = self.state.aligner
        logger.info("Plain joint training (rule none)." if aligner is None else repr(aligner))
        self.display.open(self.state.at.step, self.settings.train.max_steps)

    def step(self) -> Alignment | None:
        """One optimizer step, which skips itself, on the device, if it is not finite."""
        state, settings = self.state, self.settings.optimizer
        set_lr(
            state.optimizer, settings.lr_at(state.at.step, max_steps=self.settings.train.max_steps)
        )
        batches = [next(state.batches) for _ in range(settings.accumulation)]
        if self.take_step is None:
            self.take_step = self.choose_step(batches[0])
        result = self.take_step(batches)
        self.norm = result.norm
        num_tokens = max(1, sum(batch.num_tokens for batch in batches))
        state.meters.add(result.sums, num_tokens, result.bad)
        state.at.step += 1
        self.display.advance(state.at.step)
        return result.alignment

    def choose_step(self, batch: BatchT) -> Callable[[list[BatchT]], StepResult]:
        """An eager step; or a recorded one, if all batches have the same size."""
        step, wanted = EagerStep(self.settings, self.state), self.settings.train.cuda_graph
        is_static = getattr(batch, "static_shape", None) is not None
        is_possible = self.state.device.type == "cuda" and is_static and self.job.size == 1
        if wanted is True and not is_possible:
            raise ValueError(
                "train.cuda_graph = true needs a GPU, one process and batches of one size "
                f"(batch.fixed = true); this run has device {self.state.device.type!r} and "
                f'{self.job.size} process(es). Use "auto".'
            )
        if wanted is not False and is_possible:
            return GraphStep(step, self.state.device)
        return step

    def write_log(self, alignment: Alignment | None) -> None:
        """Waits for the device, which no step does, and notices that steps were skipped."""
        state, train = self.state, self.settings.train
        bad_in_a_row = state.meters.bad_in_a_row
        means, seconds_per_step = state.meters.read(state.tasks)
        values = {} if alignment is None else step_values(alignment)
        values |= means  # also losses by task, as means since the last entry
        values |= {
            "lr": float(state.optimizer.param_groups[0]["lr"]),
            "gradient_norm": float(self.norm),
            "skipped_steps": state.meters.skipped,
        }
        values = {f"train/{name}": value for name, value in values.items()}
        self.log.write(state.at.step, values)
        if alignment is not None and self.is_due(_DRAW_EVERY * train.log_every):
            for name, pixels in heat_maps(alignment, self.workload.tasks).items():
                self.log.draw(state.at.step, name, pixels)
        left = (train.max_steps - state.at.step) * seconds_per_step
        self.display.show(state.at.step, values, seconds_left=left)
        if self.engine() != self.signed_engine:  # "auto" may change its mind
            self.sign()
        if bad_in_a_row >= train.max_bad_steps:
            raise DivergedError(
                f"train: the loss or its gradient was not finite in the last {bad_in_a_row} steps "
                f"up to step {state.at.step}, which were skipped. {self.way_out()}"
            )

    def way_out(self) -> str:
        """What to do about numbers that are not finite."""
        optimizer = self.settings.optimizer
        clip = f"here {optimizer.clip_norm:g}" if optimizer.clip_norm else "here 0, off"
        return (
            f"The last good checkpoint is that of step {self.state.saved}. A run keeps its "
            "settings: look at the data, or train into another folder with a lower optimizer.lr "
            f"(here {optimizer.lr:g}) or with a small optimizer.clip_norm ({clip})."
        )

    def validate(self) -> None:
        """Scores by task; the best weights so far are kept."""
        state, at, train = self.state, self.state.at, self.settings.train
        state.meters.pause()
        state.model.eval()
        with (
            untouched_random_state(),
            torch.no_grad(),
            around_forward(train.precision, state.device),
            unsharded(state.model),
        ):
            scores = self.job.on_first(lambda: dict(self.workload.validate()))
        state.model.train()
        if train.metric not in scores:
            hint = nearest(train.metric, scores)
            raise ValueError(f"train.metric: validation gives no {train.metric!r}; {hint}")
        score = float(scores[train.metric])
        sign = -1.0 if train.higher_is_better else 1.0
        if math.isfinite(score) and (at.best_score is None or sign * score < sign * at.best_score):
            self.check_finite()
            at.best_score, at.best_step, at.stale = score, at.step, 0
            state.save_best(self.log, {"step": at.step, train.metric: score})
        else:
            at.stale += 1
        at.validated = at.step
        self.log.write(at.step, scores)
        best = "" if at.best_score is None else f" (best {at.best_score:.4f}, step {at.best_step})"
        logger.info("step %d  %s %.4f%s", at.step, train.metric, score, best)
        state.meters.resume()

    def save_if_good(self) -> None:
        """Save a checkpoint, unless in a bad stretch: it would push good ones off the disk."""
        meters, step = self.state.meters, self.state.at.step
        if meters.bad_in_a_row:
            logger.warning("step %d  not saved: its loss or gradient was not finite.", step)
            return
        meters.pause()
        self.save()
        meters.resume()

    def save(self, *, is_stop: bool = False) -> None:
        """Save a checkpoint, after everything recorded so far."""
        self.check_finite()
        if self.recorder is not None:
            self.recorder.flush()
        self.state.save(self.log, is_stop=is_stop)

    def check_finite(self) -> None:
        """Never save weights that are not finite: nothing will repair them."""
        if not self.state.is_finite():
            raise DivergedError(
                f"train: the weights are not finite at step {self.state.at.step}. {self.way_out()}"
            )

    def stop(self) -> str:
        """Save so that the run can be continued, unless the weights are bad; a closing message."""
        state, at = self.state, self.state.at
        by = self.signals.received or "train.pause_at"
        stopped = f"Stopped by {by} after step {at.step}"
        num_bad, bad = state.meters.bad_in_a_row, ""
        if num_bad:
            bad = f"the loss or its gradient was not finite in the last {num_bad} steps"
        elif not state.is_finite():
            bad = "the weights are not finite"
        if bad:
            return (
                f"{stopped}. Nothing was saved here, as {bad}; the same command continues from "
                f"step {state.saved}."
            )
        self.save(is_stop=not self.is_due(self.settings.train.checkpoint_every))
        return f"{stopped}; the same command continues from there."

    def finish(self, reason: Reason) -> Result:
        """The last checkpoint, the averaged weights, and a closing message."""
        state, at, train = self.state, self.state.at, self.settings.train
        state.meters.pause()
        self.sign()  # with the engine that ran last
        if reason in ("interrupted", "paused"):
            message = self.stop()
        else:
            self.save()
            if train.average_last:
                self.job.on_first(lambda: checkpoint.average(self.log.run, train.average_last))
            message = f"Finished after {at.step} steps."
            if reason == "early_stop":
                message = (
                    f"Stopped at step {at.step}: {at.stale} validations in a row without a better "
                    f"{train.metric}."
                )
        self.display.close()
        logger.info(message)
        skipped, seconds = state.meters.skipped, state.meters.seconds
        return Result(self.log.run, at.step, reason, at.best_step, at.best_score, skipped, seconds)

    def sign(self) -> None:
        state = self.state
        self.signed_engine = self.engine()
        self.log.sign(
            run_signature(
                self.settings,
                state.aligner,
                tasks=self.workload.tasks,
                data=state.data,
                device=state.device,
                num_processes=self.job.size,
            )
        )

    def engine(self) -> str | None:
        return None if self.state.aligner is None else self.state.aligner.engine

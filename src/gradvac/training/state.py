"""What a run consists of between two steps, saved and restored as one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic

from gradvac.runs import RunFolder
from gradvac.training import checkpoint
from gradvac.training.meters import Meters
from gradvac.training.optimizer import settle
from gradvac.training.processes import (
    choose_device,
    random_state,
    restore_random_state,
    seed_everything,
    set_threads,
)
from gradvac.training.recipe import BatchT, Recipe
from gradvac.training.runlog import RunLog
from gradvac.training.settings import RunConfig
from gradvac.training.weights import CheckpointError, is_finite, load_weights


@dataclass
class Position:
    """Where a run stands."""

    step: int = 0  # optimizer steps taken
    validated: int = 0  # the step last validated
    stale: int = 0  # validations since the best one
    best_step: int | None = None
    best_score: float | None = None


class RunState(Generic[BatchT]):
    """Model, optimizer, aligner, batches, meters and position of a run at its first step.

    Args:
        recipe: The recipe; its model is moved to the device.
        settings: Its config.
    """

    def __init__(self, recipe: Recipe[BatchT], settings: RunConfig) -> None:
        set_threads(settings.train.threads)
        seed = settings.train.seed
        seed_everything(seed)
        self.device = choose_device(settings.train.device)
        self.model = recipe.model.to(self.device).train()
        self.aligner = settings.align.build(
            self.model, recipe.tasks, recipe.resource_levels, seed=seed
        )
        self.optimizer = settings.optimizer.build(self.model)
        self.batches = recipe.batches()
        self.data = recipe.data_signature()
        self.meters = Meters(self.device)
        self.at = Position()
        self.saved = -1  # step of the newest checkpoint
        self._keep = settings.train.keep

    def save(self, log: RunLog, *, is_stop: bool = False) -> None:
        """Write a checkpoint, unless this step has one.

        Args:
            log: The run folder.
            is_stop: Whether none is due, and somebody wants to stop here.

        Raises:
            CheckpointError: It cannot be written.
        """
        if self.saved == self.at.step:
            return
        log.require_place()
        state = {
            "optimizer": self.optimizer.state_dict(),
            "aligner": None if self.aligner is None else self.aligner.state_dict(),
            "batches": self.batches.state_dict(),
            "meters": self.meters.state_dict(),
            "position": asdict(self.at),
            "data": self.data,
            "metrics_bytes": log.position(),
            "random": random_state(),
        }
        checkpoint.save(
            log.run,
            self.at.step,
            self.model.state_dict(),
            state,
            keep=self._keep,
            is_stop=is_stop,
        )
        self.saved = self.at.step

    def resume(self, log: RunLog, *, say: Callable[[str], None]) -> None:
        """Continue from the last intact checkpoint; without one, begin, and save the beginning.

        So a run has a checkpoint from the start, and a disk without room is noticed then.

        Args:
            log: The run folder, owned by us.
            say: Told what happens.

        Raises:
            ValueError: The run has other settings or other data, or weights without a checkpoint.
        """
        checkpoint.clean(log.run)
        last = checkpoint.latest(log.run, say=say)
        if last is None:
            _refuse_weights(log.run)
            log.begin(step=0, metrics_bytes=0)
            self.save(log)
            return
        log.check_settings()
        state = last.state()
        if state["data"] != self.data:
            raise ValueError(f"run: {log.run} was trained on other data; choose another folder.")
        weights = last.weights()
        if not is_finite(weights):
            raise CheckpointError(
                f"{last.path}: its weights are not finite; remove this folder to continue from the "
                "checkpoint before."
            )
        load_weights(self.model, weights, origin=str(last.path))
        self.optimizer.load_state_dict(state["optimizer"])
        settle(self.optimizer)
        if self.aligner is not None:
            self.aligner.load_state_dict(state["aligner"])
        self.batches.load_state_dict(state["batches"])
        self.meters.load_state_dict(state["meters"])
        self.at = Position(**state["position"])
        self.saved = last.step
        checkpoint.prune(log.run, last.step, keep=self._keep)  # a killed process may not have
        log.begin(step=last.step, metrics_bytes=state["metrics_bytes"])
        restore_random_state(state["random"])
        say(f"Continuing from step {last.step}.")


def _refuse_weights(run: Path) -> None:
    """A run that begins would replace weights that are all that is left of another."""
    found = [path.name for path in RunFolder(run).kept_weights()]
    if found:
        raise ValueError(
            f"run: {run} holds {found[0]}, but no checkpoint to continue from; choose another "
            "folder, or move the file away."
        )

"""The state of a run between two steps, saved and restored as one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import checkpoint, config, shards
from gradvac.lab.training.log import Meters
from gradvac.lab.training.optimizer import settle
from gradvac.lab.training.parallel import losses_of
from gradvac.lab.training.environment import (
    random_state,
    restore_random_state,
    seed_everything,
    set_threads,
)
from gradvac.lab.training.distributed import Job, refuse_batch_norm
from gradvac.lab.training.recipe import BatchT, Recipe
from gradvac.lab.training.log import RunLog
from gradvac.lab.training.settings import RunConfig
from gradvac.lab.training.weights import CheckpointError, is_finite, load_weights


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
        job: The processes that train it.
    """

    def __init__(self, recipe: Recipe[BatchT], settings: RunConfig, job: Job) -> None:
        set_threads(settings.train.threads)
        self.job, self._seed = job, settings.train.seed
        seed_everything(job.seed(self._seed))
        self.device = job.device(settings.train.device)
        self.model = recipe.model.to(self.device).train()
        self.is_sharded = settings.train.parallel == "fsdp" and job.group is not None
        if job.group is not None:
            refuse_batch_norm(self.model)
            if self.is_sharded:
                shards.shard(self.model, job.group, self.device)
        self.optimizer = settings.optimizer.build(self.model)
        self.aligner = settings.align.build(
            self.model,
            recipe.tasks,
            recipe.resource_levels,
            seed=self._seed,
            process_group="auto" if self.is_sharded else job.group,
            optimizer=self.optimizer,
        )
        averaging = None if self.is_sharded or self.aligner is not None else job.group
        self.losses = losses_of(recipe, averaging)
        self.batches = recipe.batches(job.part)
        self.data = recipe.data_signature()
        job.require_same({"the config": config.dump(settings), "the data": self.data})
        self.meters = Meters(self.device)
        self.at = Position()
        self.saved = -1  # step of the newest checkpoint
        self._keep = settings.train.keep

    def save(self, log: RunLog, *, is_stop: bool = False) -> None:
        """Write a checkpoint, unless this step has one.

        Args:
            log: The run folder.
            is_stop: Whether the run is stopped here, although no checkpoint is due.

        Raises:
            CheckpointError: It cannot be written.
        """
        if self.saved == self.at.step:
            return
        randomness, *others = self.job.gather(random_state())
        state = {
            "optimizer": None if self.is_sharded else self.optimizer.state_dict(),
            "aligner": None if self.aligner is None else self.aligner.state_dict(),
            "batches": self.batches.state_dict(),
            "meters": self.meters.state_dict(),
            "position": asdict(self.at),
            "data": self.data,
            "metrics_bytes": log.position(),
            "random": randomness,
            "random_of_others": others,  # by rank, from 1
        }

        def write_shards() -> None:
            with checkpoint.writing(log.run, self.at.step) as folder:
                shards.write(folder / shards.SHARDS, self.model, self.optimizer)

        def write() -> None:
            log.require_place()
            weights = None if self.is_sharded else self.model.state_dict()
            checkpoint.save(log.run, self.at.step, weights, state, keep=self._keep, is_stop=is_stop)

        if self.is_sharded:
            self.job.on_first(log.require_place)
            self.job.together(write_shards)
        self.job.on_first(write)
        self.saved = self.at.step

    def is_finite(self) -> bool:
        """Whether all weights are, in all processes."""
        is_own_finite = is_finite(shards.own_values(self.model.state_dict()))
        return all(self.job.gather(is_own_finite))

    def save_best(self, log: RunLog, facts: Mapping[str, object]) -> None:
        """Write the current weights as the best."""
        weights = shards.whole_weights(self.model, is_wanted=self.job.is_first)

        def write() -> None:
            log.require_place()
            checkpoint.save_weights(log.run, "best", weights, facts)

        self.job.on_first(write)

    def resume(self, log: RunLog, *, say: Callable[[str], None]) -> None:
        """Continue from the last intact checkpoint; without one, begin, and save the beginning.

        So a run has a checkpoint from the start, and a full disk is noticed early.

        Args:
            log: The run folder, owned by us.
            say: Called with messages.

        Raises:
            ValueError: The run has other settings or other data, or weights without a checkpoint.
        """
        last = self.job.on_first(lambda: _find(log, say=say))
        if last is None:
            log.begin(step=0, metrics_bytes=0)
            self.save(log)
            return
        state = self.job.together(lambda: self._load(last))
        self.job.on_first(lambda: checkpoint.prune(log.run, last.step, keep=self._keep))
        log.begin(step=last.step, metrics_bytes=state["metrics_bytes"])
        everyone = [state["random"], *state.get("random_of_others", [])]
        if self.job.rank < len(everyone):
            restore_random_state(everyone[self.job.rank])
        else:  # there were fewer processes until now
            seed_everything(self.job.seed(self._seed, step=last.step))
        say(f"Continuing from step {last.step}.")

    def _load(self, last: checkpoint.Checkpoint) -> dict[str, Any]:
        """Load a checkpoint; returns the rest of it."""
        try:
            state = last.state()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{last.path}: rank {self.job.rank} does not see it; the run folder has to be on "
                "storage that all processes share."
            ) from error
        if state["data"] != self.data:
            raise ValueError(
                f"run: {last.path.parents[1]} was trained on other data; choose another folder."
            )
        self._load_weights(last, state)
        if not is_finite(shards.own_values(self.model.state_dict())):
            raise CheckpointError(
                f"{last.path}: its weights are not finite; remove this folder to continue from the "
                "checkpoint before."
            )
        settle(self.optimizer)
        if self.aligner is not None:
            self.aligner.load_state_dict(state["aligner"])
        self.batches.load_state_dict(state["batches"])
        self.meters.load_state_dict(state["meters"])
        self.at = Position(**state["position"])
        self.saved = last.step
        return state

    def _load_weights(self, last: checkpoint.Checkpoint, state: Mapping[str, Any]) -> None:
        """Load weights and moments, whether or not they were, or will be, divided."""
        if last.is_sharded:
            shards.read(last.path / shards.SHARDS, self.model, self.optimizer)
        elif self.is_sharded:
            shards.take_whole(self.model, self.optimizer, last.weights(), state["optimizer"])
        else:
            load_weights(self.model, last.weights(), origin=str(last.path))
            self.optimizer.load_state_dict(state["optimizer"])


def _find(log: RunLog, *, say: Callable[[str], None]) -> checkpoint.Checkpoint | None:
    """The checkpoint to continue from, if the run may be continued; None to begin."""
    checkpoint.clean(log.run)
    last = checkpoint.latest(log.run, say=say)
    if last is None:
        _refuse_weights(log.run)
    else:
        log.check_settings()
    return last


def _refuse_weights(run: Path) -> None:
    """A run that begins would replace weights that are all that is left of another."""
    names = [path.name for path in RunFolder(run).kept_weights()]
    if names:
        raise ValueError(
            f"run: {run} holds {names[0]}, but no checkpoint to continue from; choose another "
            "folder, or move the file away."
        )

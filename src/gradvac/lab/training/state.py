"""The state of a run between two steps, saved and restored as one."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import checkpoint, config, parallel
from gradvac.lab.training.environment import (
    random_state,
    restore_random_state,
    seed_everything,
    set_threads,
)
from gradvac.lab.training.job import Job, check_batch_norm
from gradvac.lab.training.log import Meters, RunLog
from gradvac.lab.training.optimizer import move_to_device
from gradvac.lab.training.settings import RunConfig
from gradvac.lab.training.weights import (
    SHARDS,
    CheckpointError,
    all_finite,
    load_unsharded,
    load_weights,
    read_shards,
    write_shards,
)
from gradvac.lab.training.workload import BatchT, Workload

logger = logging.getLogger(__name__)


@dataclass
class Position:
    """Where a run stands."""

    step: int = 0  # optimizer steps taken
    validated: int = 0  # the step last validated
    stale: int = 0  # validations since the best one
    best_step: int | None = None
    best_score: float | None = None


class RunState(Generic[BatchT]):
    """Model, optimizer, aligner, batches, meters and position of a run at its first step."""

    def __init__(self, workload: Workload[BatchT], settings: RunConfig, job: Job) -> None:
        set_threads(settings.train.threads)
        self.job, self.tasks, self._seed = job, tuple(workload.tasks), settings.train.seed
        seed_everything(job.seed(self._seed))
        self.device = job.device(settings.train.device)
        self.model = workload.model.to(self.device).train()
        self.is_sharded = settings.train.parallel == "fsdp" and job.group is not None
        if job.group is not None:
            check_batch_norm(self.model)
            if self.is_sharded:
                parallel.shard(self.model, job.group, self.device)
        self.optimizer = settings.optimizer.build(self.model)
        self.aligner = settings.align.build(
            self.model,
            workload.tasks,
            workload.resource_levels,
            seed=self._seed,
            process_group="auto" if self.is_sharded else job.group,
            optimizer=self.optimizer,
        )
        averaging = None if self.is_sharded or self.aligner is not None else job.group
        self.losses = parallel.loss_function(workload, averaging)
        self.batches = workload.batches(job.batch_slice)
        self.data = workload.data_signature()
        job.check_same({"the config": config.dump(settings), "the data": self.data})
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

        step, weights = self.at.step, None if self.is_sharded else self.model.state_dict()

        def write_local_shards() -> None:
            with checkpoint.writing(log.run, step) as folder:
                write_shards(folder / SHARDS, self.model, self.optimizer)

        def write() -> None:
            checkpoint.write_checkpoint(
                log.run, step, weights, state, keep=self._keep, is_stop=is_stop
            )

        if self.is_sharded:
            self.job.together(write_local_shards)
        self.job.on_first(write)
        self.saved = self.at.step

    def is_finite(self) -> bool:
        """Whether all weights are, in all processes."""
        return all(self.job.gather(self._are_local_values_finite()))

    def _are_local_values_finite(self) -> bool:
        return all_finite(parallel.local_values(self.model.state_dict()))

    def save_best(self, log: RunLog, metadata: Mapping[str, object]) -> None:
        """Write the current weights as the best."""
        weights = parallel.full_weights(self.model, is_wanted=self.job.is_first)
        self.job.on_first(lambda: checkpoint.save_weights(log.run, "best", weights, metadata))

    def resume(self, log: RunLog) -> None:
        """Continue from the last intact checkpoint; without one, begin, and save the beginning.

        So a run has a checkpoint from the start, and a full disk is noticed early.

        Args:
            log: The run folder, owned by this job.

        Raises:
            ValueError: The run has other settings or other data, or weights without a checkpoint.
        """
        last = self.job.on_first(lambda: _find_checkpoint(log))
        if last is None:
            log.start_writing(step=0, metrics_bytes=0)
            self.save(log)
            return
        state = self.job.together(lambda: self._load(last))
        self.job.on_first(lambda: checkpoint.prune(log.run, last.step, keep=self._keep))
        log.start_writing(step=last.step, metrics_bytes=state["metrics_bytes"])
        everyone = [state["random"], *state.get("random_of_others", [])]
        if self.job.rank < len(everyone):
            restore_random_state(everyone[self.job.rank])
        else:  # there were fewer processes until now
            seed_everything(self.job.seed(self._seed, step=last.step))
        logger.info("Continuing from step %d.", last.step)

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
        if not self._are_local_values_finite():
            raise CheckpointError(
                f"{last.path}: its weights are not finite; remove this folder to continue from the "
                "checkpoint before."
            )
        move_to_device(self.optimizer)
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
            read_shards(last.path / SHARDS, self.model, self.optimizer)
        elif self.is_sharded:
            load_unsharded(self.model, self.optimizer, last.weights(), state["optimizer"])
        else:
            load_weights(self.model, last.weights(), origin=str(last.path))
            self.optimizer.load_state_dict(state["optimizer"])


def _find_checkpoint(log: RunLog) -> checkpoint.Checkpoint | None:
    """The checkpoint to continue from, if the run may be continued; None to begin."""
    checkpoint.remove_incomplete(log.run)
    last = checkpoint.latest(log.run)
    if last is None:
        _check_no_weights(log.run)
    else:
        log.check_settings()
    return last


def _check_no_weights(run: Path) -> None:
    """A run that begins would replace weights that are all that is left of another."""
    names = [path.name for path in RunFolder(run).kept_weights()]
    if names:
        raise ValueError(
            f"run: {run} holds {names[0]}, but no checkpoint to continue from; choose another "
            "folder, or move the file away."
        )

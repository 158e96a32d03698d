"""Checkpoints, written completely or not at all, and the weights of a run by name.

    RUN/checkpoints/step-00001000/model.safetensors     weights
                                  state.pt              optimizer, aligner, batches, loop, random
                                  stopped               if the run was stopped here (empty)
                                  manifest.json         checksums of the others (`runs.manifest`)
                                  shards/               weights and optimizer of a model that is
                                                        divided among processes, instead of
                                                        model.safetensors
    RUN/best.safetensors, RUN/averaged.safetensors      weights to use

A checkpoint is written into a hidden folder, forced to disk, and renamed: a process that is killed
at any point leaves the previous one intact. `latest` verifies the checksums and falls back to the
checkpoint before if the last one is damaged.

A checkpoint written because the run was stopped serves only to continue it: it does not displace a
regular one, is not averaged, and is deleted with the next. So the result of a run does not depend
on how often it was interrupted.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.manifest import MANIFEST, find_damage, read_manifest, write_manifest
from gradvac.lab.training.weights import (
    SHARDS,
    CheckpointError,
    load_weights,
    read_metadata,
    read_sharded_weights,
    read_weights,
    write_weights,
)
from gradvac.utils.files import TEMPORARY, remove_leftovers, sync

logger = logging.getLogger(__name__)

MODEL, STATE, STOPPED = "model.safetensors", "state.pt", "stopped"
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def weights(self) -> dict[str, Tensor]:
        """The model's `state_dict`, on the CPU."""
        if self.is_sharded:
            return read_sharded_weights(self.path / SHARDS)
        return read_weights(self.path / MODEL)

    def state(self) -> dict[str, Any]:
        """What was given to `write_checkpoint`, on the CPU."""
        path = self.path / STATE
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise  # storage that this process does not see: not for removing
        except Exception as error:  # whatever somebody put there
            raise CheckpointError(
                f"{path}: holds no state of a training, though it is what the manifest lists; "
                f"remove {self.path}, so that training goes on from the checkpoint before it."
            ) from error
        return state

    @property
    def is_sharded(self) -> bool:
        """Whether every process wrote its part."""
        return (self.path / SHARDS).is_dir()

    @property
    def is_stop(self) -> bool:
        """Whether the run was stopped here, between two regular checkpoints."""
        return (self.path / STOPPED).exists()

    def damage(self) -> str | None:
        """What is wrong with the files; None if they are as they were written."""
        damage = find_damage(self.path)
        if damage is not None:
            return " ".join(damage)
        listed = read_manifest(self.path)
        are_weights_listed = MODEL in listed or any(
            name.startswith(f"{SHARDS}/") for name in listed
        )
        if STATE not in listed or not are_weights_listed:
            return f"{MANIFEST} does not list all files"
        return None


@contextmanager
def writing(run: Path, step: int) -> Iterator[Path]:
    """The hidden folder in which a checkpoint is written.

    Raises:
        CheckpointError: Something inside failed; the folder is gone again.
    """
    folder = RunFolder(run).checkpoints
    temporary = folder / f"{TEMPORARY}{step:08d}"
    try:
        folder.mkdir(exist_ok=True)
        temporary.mkdir(exist_ok=True)
        yield temporary
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_failure(run, f"the checkpoint of step {step}", error)) from error


def write_checkpoint(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor] | None,
    state: Mapping[str, Any],
    *,
    keep: int,
    is_stop: bool = False,
) -> Checkpoint:
    """Write a checkpoint, then delete all but the last `keep`, and those of earlier stops.

    Args:
        run: The run folder.
        step: Optimizer steps taken.
        weights: The model's `state_dict`; tied weights may share memory. None: its shards are
            already in the hidden folder (`writing`).
        state: Everything else: nested dicts and lists of plain values and tensors.
        keep: How many regular checkpoints stay.
        is_stop: Whether the run was stopped here, so that this checkpoint is not a regular one.

    Raises:
        CheckpointError: It could not be written, for example because the disk is full. Earlier
            checkpoints are untouched.
    """
    _check_plain(state, "state")
    target = RunFolder(run).checkpoint(step)
    with writing(run, step) as temporary:
        if weights is not None:
            write_weights(temporary / MODEL, weights, {"step": str(step)})
        with (temporary / STATE).open("wb") as file:  # a path would hide why writing fails
            torch.save(state, file)
        sync(temporary / STATE)
        if is_stop:
            (temporary / STOPPED).touch()
        write_manifest(temporary)
        if target.exists():  # damaged, or it would have been continued from
            shutil.rmtree(target)
        os.rename(temporary, target)
        sync(target.parent)
    prune(run, step, keep=keep)
    return Checkpoint(target, step)


def prune(run: Path, newest: int, *, keep: int) -> None:
    """Delete what need not be kept once the checkpoint of step `newest` is intact."""
    checkpoints = [one for one in list_checkpoints(run) if one.step <= newest]
    regular = [one for one in checkpoints if not one.is_stop]
    for old in checkpoints:
        if old.step < newest and (old.is_stop or old in regular[:-keep]):
            shutil.rmtree(old.path)


def latest(run: Path) -> Checkpoint | None:
    """The newest checkpoint that is intact; None if there is none at all.

    Raises:
        CheckpointError: There are checkpoints, but all are damaged.
    """
    checkpoints = list_checkpoints(run)
    for checkpoint in reversed(checkpoints):
        damage = checkpoint.damage()
        if damage is None:
            return checkpoint
        logger.warning("%s is damaged (%s); trying the one before.", checkpoint.path, damage)
    if checkpoints:
        raise CheckpointError(
            f"{RunFolder(run).checkpoints}: all {len(checkpoints)} checkpoints are damaged; "
            "restore one, or remove the folder to start again."
        )
    return None


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """All checkpoints by step, damaged ones too."""
    return [Checkpoint(path, step) for step, path in RunFolder(run).kept_checkpoints()]


def remove_incomplete(run: Path) -> None:
    """Remove what a killed process left half-written; only the process that owns the run may."""
    for path in RunFolder(run).checkpoints.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)
    remove_leftovers(run, but=RunFolder(run).similarity)  # which is measured under its own lock


# -- weights by name ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RunWeights:
    """Weights of a run, found but not read."""

    origin: str  # what they are, for messages
    place: Path | Checkpoint  # A weights file, or a checkpoint

    @property
    def step(self) -> int | None:
        """The step at which they were saved; None for averaged weights."""
        if isinstance(self.place, Checkpoint):
            return self.place.step
        step = read_metadata(self.place).get("step")
        return None if step is None else int(step)

    def read(self) -> dict[str, Tensor]:
        """The model's `state_dict`, on the CPU.

        Raises:
            CheckpointError: They are damaged.
        """
        if isinstance(self.place, Checkpoint):
            return self.place.weights()
        return read_weights(self.place)

    def load_into(self, model: nn.Module) -> None:
        """Give them to a model.

        Raises:
            CheckpointError: They are damaged, or of another model.
        """
        load_weights(model, self.read(), origin=self.origin)


def resolve_weights(run: Path, which: str | int = "best") -> RunWeights:
    """The weights of a run by name; a name gets its meaning here alone.

    Args:
        run: The run folder.
        which: "best" (as `loop.py` judged while training), "averaged", "last" (the newest intact
            checkpoint), or a step whose checkpoint is there.

    Raises:
        CheckpointError: There are none, or the checkpoint is damaged.
    """
    origin, by_name = f"{run}, {which} weights", RunFolder(run).weights_by_name()
    path = by_name.get(str(which))
    if path is None:
        there = ", ".join(by_name) or "none"
        raise CheckpointError(f"{run}: there are no weights {which!r}; there are: {there}.")
    if path.is_file():
        return RunWeights(origin, path)
    if which == "last":
        newest = latest(run)
        assert newest is not None, "there is a checkpoint, or an error was raised"
        return RunWeights(origin, newest)
    chosen = Checkpoint(path, int(which))
    if (damage := chosen.damage()) is not None:
        raise CheckpointError(f"{chosen.path}: is damaged ({damage}); use other weights.")
    return RunWeights(origin, chosen)


def weights(run: Path, which: str | int = "best") -> dict[str, Tensor]:
    """Read weights of a run, on the CPU: see `resolve_weights`."""
    return resolve_weights(run, which).read()


def save_weights(
    run: Path, name: str, weights: Mapping[str, Tensor], metadata: Mapping[str, object]
) -> Path:
    """Write `RUN/NAME.safetensors` ("best", "averaged"), replacing an older one when complete."""
    target = RunFolder(run).weights(name)
    try:
        write_weights(target, weights, {key: str(value) for key, value in metadata.items()})
    except Exception as error:
        raise CheckpointError(_failure(run, target.name, error)) from error
    return target


def average(run: Path, num: int) -> Path:
    """Write the mean of the last `num` intact checkpoints' weights to `averaged.safetensors`.

    The checkpoint of step 0 is an untrained model and does not count, nor does one where the run
    was stopped.
    """
    regular = [one for one in list_checkpoints(run) if one.step > 0 and not one.is_stop]
    chosen: list[Checkpoint] = []
    for checkpoint in reversed(regular):
        if len(chosen) == num:
            break
        if (damage := checkpoint.damage()) is None:
            chosen.append(checkpoint)
        else:
            logger.warning(
                "%s is damaged (%s) and does not enter the average.", checkpoint.path, damage
            )
    if not chosen:
        raise CheckpointError(f"{RunFolder(run).checkpoints}: no intact checkpoint to average.")
    if len(chosen) < num:
        logger.info("Averaging %d checkpoints instead of %d: there are no more.", len(chosen), num)
    last = chosen[0].weights()
    # Keyed by tensor, because tied weights share one.
    total = {id(w): w.double() for w in last.values() if w.is_floating_point()}
    names = {id(w): name for name, w in last.items()}
    for checkpoint in chosen[1:]:
        other = checkpoint.weights()
        for key, value in total.items():
            value += other[names[key]]
    means = {
        id(w): (total[id(w)] / len(chosen)).to(w.dtype) if id(w) in total else w
        for w in last.values()
    }
    steps = ",".join(str(checkpoint.step) for checkpoint in reversed(chosen))
    averaged = {name: means[id(w)] for name, w in last.items()}
    return save_weights(run, "averaged", averaged, {"steps": steps})


def _failure(run: Path, what: str, error: Exception) -> str:
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__context__
    reason = str(error) if origin is None or not origin.errno else os.strerror(origin.errno)
    free = shutil.disk_usage(run if run.exists() else run.parent).free / 2**20
    saved = list_checkpoints(run)
    intact = f"The checkpoint of step {saved[-1].step} is intact" if saved else "None was saved yet"
    return (
        f"{what} could not be written to {run} ({reason}; {free:,.0f} MiB free). "
        f"{intact}; make room and start the same command again."
    )


def _check_plain(value: object, where: str) -> None:
    """Whether `torch.load(weights_only=True)` will read it back."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_plain(inner, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            _check_plain(inner, f"{where}[{position}]")
    elif type(value) not in _PLAIN and not isinstance(value, Tensor):
        raise ValueError(
            f"{where}: a state_dict may hold numbers, strings, lists, dicts and tensors, but this "
            f"is a {type(value).__name__}."
        )

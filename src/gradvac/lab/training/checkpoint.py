"""Checkpoints, written completely or not at all.

    RUN/checkpoints/step-00001000/model.safetensors     weights
                                  state.pt              optimizer, aligner, batches, loop, random
                                  manifest.json         step, SHA-256 of the others
                                  shards/               weights and optimizer of a model that is
                                                        divided among processes, instead of
                                                        model.safetensors (`shards.py`)
    RUN/best.safetensors, RUN/averaged.safetensors      weights to use

A checkpoint is written into a hidden folder, forced to disk, and renamed: a process that is killed
at any point leaves the previous one intact. `latest` verifies the hashes and falls back to the
checkpoint before if the last one is damaged. Weights are verified whenever they are read.

A checkpoint written because the run was stopped serves only to continue it: it does not displace a
regular one, is not averaged, and is deleted with the next. So the result of a run does not depend
on how often it was interrupted.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.files import (
    TEMPORARY,
    hash_file,
    read_json,
    remove_leftovers,
    sync,
    write_json,
)
from gradvac.lab.training import shards
from gradvac.lab.training.weights import (
    CheckpointError,
    load_weights,
    read_facts,
    read_weights,
    write_weights,
)

MODEL, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def weights(self) -> dict[str, Tensor]:
        """The model's `state_dict`, on the CPU."""
        if self.is_sharded:
            return shards.read_weights(self.path / shards.SHARDS)
        return read_weights(self.path / MODEL)

    def state(self) -> dict[str, Any]:
        """What was given to `save`, on the CPU."""
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        return state

    @property
    def is_sharded(self) -> bool:
        """Whether every process wrote its part."""
        return (self.path / shards.SHARDS).is_dir()

    @property
    def is_stop(self) -> bool:
        """Whether the run was stopped here, between two regular checkpoints."""
        return bool(read_json(self.path / MANIFEST).get("stop", False))

    def damage(self) -> str | None:
        """What is wrong with the files; None if they are as they were written."""
        manifest = read_json(self.path / MANIFEST)
        hashes = manifest.get("files")
        if manifest.get("step") != self.step or not isinstance(hashes, dict):
            return f"{MANIFEST} is missing, or not what was written"
        parts = [name for name in hashes if name.startswith(f"{shards.SHARDS}/")]
        for name in (STATE, *(parts or [MODEL])):
            try:
                if hash_file(self.path / name, "sha256") != hashes.get(name):
                    return f"{name} is not what was written"
            except OSError as error:
                return f"{name}: {error.strerror}"
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


def save(
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
        written = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        names = {path: path.relative_to(temporary).as_posix() for path in written}
        hashes = {name: hash_file(path, "sha256") for path, name in names.items()}
        stop = {"stop": True} if is_stop else {}
        write_json(temporary / MANIFEST, {"step": step, "files": hashes, **stop})
        if target.exists():  # damaged, or it would have been continued from
            shutil.rmtree(target)
        os.rename(temporary, target)
        sync(target.parent)
    prune(run, step, keep=keep)
    return Checkpoint(target, step)


def prune(run: Path, newest: int, *, keep: int) -> None:
    """Delete what need not be kept once the checkpoint of step `newest` is intact."""
    checkpoints = [one for one in kept(run) if one.step <= newest]
    regular = [one for one in checkpoints if not one.is_stop]
    for old in checkpoints:
        if old.step < newest and (old.is_stop or old in regular[:-keep]):
            shutil.rmtree(old.path)


def latest(run: Path, *, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint that is intact; None if there is none at all.

    Args:
        run: The run folder.
        say: Called with a message for each damaged checkpoint that is skipped.

    Raises:
        CheckpointError: There are checkpoints, but all are damaged.
    """
    checkpoints = kept(run)
    for checkpoint in reversed(checkpoints):
        damage = checkpoint.damage()
        if damage is None:
            return checkpoint
        say(f"{checkpoint.path} is damaged ({damage}); trying the one before.")
    if checkpoints:
        raise CheckpointError(
            f"{RunFolder(run).checkpoints}: all {len(checkpoints)} checkpoints are damaged; "
            "restore one, or remove the folder to start again."
        )
    return None


def kept(run: Path) -> list[Checkpoint]:
    """All checkpoints by step, damaged ones too."""
    return [Checkpoint(path, step) for step, path in RunFolder(run).kept_checkpoints()]


def clean(run: Path) -> None:
    """Remove what a killed process left half-written; only the process that owns the run may."""
    for path in RunFolder(run).checkpoints.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)
    remove_leftovers(run, but=RunFolder(run).similarity)  # which is measured under its own lock


def save_weights(
    run: Path, name: str, weights: Mapping[str, Tensor], facts: Mapping[str, object]
) -> Path:
    """Write `RUN/NAME.safetensors`, replacing an older one only when complete.

    Args:
        run: The run folder.
        name: "best" or "averaged".
        weights: The model's `state_dict`.
        facts: Kept in the file's metadata, such as the step and the score.
    """
    target = RunFolder(run).weights(name)
    try:
        write_weights(target, weights, {key: str(value) for key, value in facts.items()})
    except Exception as error:
        raise CheckpointError(_failure(run, target.name, error)) from error
    return target


def step_of(run: Path, name: str) -> int:
    """The step at which the weights of that name were saved: "best".

    Raises:
        CheckpointError: There are none, or they are damaged.
    """
    path = RunFolder(run).weights(name)
    if not path.is_file():
        raise CheckpointError(f"{run}: has no {name} weights; it was never validated.")
    return int(read_facts(path)["step"])


def average(run: Path, num: int, *, say: Callable[[str], None] = print) -> Path:
    """Write the mean of the last `num` intact checkpoints' weights to `averaged.safetensors`.

    The checkpoint of step 0 is an untrained model and does not count, nor does one where the run
    was stopped.
    """
    chosen: list[Checkpoint] = []
    for checkpoint in reversed([one for one in kept(run) if one.step > 0 and not one.is_stop]):
        if len(chosen) == num:
            break
        if (damage := checkpoint.damage()) is None:
            chosen.append(checkpoint)
        else:
            say(f"{checkpoint.path} is damaged ({damage}) and does not enter the average.")
    if not chosen:
        raise CheckpointError(f"{RunFolder(run).checkpoints}: no intact checkpoint to average.")
    if len(chosen) < num:
        say(f"Averaging {len(chosen)} checkpoints instead of {num}: there are no more.")
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


def weights(
    run: Path, which: str | int = "best", *, say: Callable[[str], None] = print
) -> dict[str, Tensor]:
    """Weights of a run, on the CPU.

    Args:
        run: The run folder.
        which: "best", "averaged", "last", or a step whose checkpoint is kept.
        say: See `latest`.
    """
    folder = RunFolder(run)
    if which == "last":
        newest = latest(run, say=say)
        if newest is not None:
            return newest.weights()
    elif isinstance(which, int):
        if folder.checkpoint(which).is_dir():
            chosen = Checkpoint(folder.checkpoint(which), which)
            if (damage := chosen.damage()) is not None:
                raise CheckpointError(f"{chosen.path}: is damaged ({damage}); use other weights.")
            return chosen.weights()
    elif which in [path.stem for path in folder.kept_weights()]:
        return read_weights(folder.weights(which))
    raise _without(run, which)


def require_weights(run: Path, which: str | int) -> None:
    """Refuse weights that a run does not have, without reading any; see `weights`."""
    if str(which) not in _names(run):
        raise _without(run, which)


def _names(run: Path) -> list[str]:
    steps = [str(checkpoint.step) for checkpoint in kept(run)]
    return [*(p.stem for p in RunFolder(run).kept_weights()), *(["last"] if steps else []), *steps]


def _without(run: Path, which: str | int) -> CheckpointError:
    there = ", ".join(_names(run)) or "none"
    return CheckpointError(f"{run}: there are no weights {which!r}; there are: {there}.")


def load_into(model: nn.Module, run: Path, which: str | int) -> None:
    """Give a model the weights of a run; see `weights`.

    Raises:
        CheckpointError: There are none of that name, they are damaged, or of another model.
    """
    load_weights(model, weights(run, which), origin=f"{run}, {which} weights")


def _failure(run: Path, what: str, error: Exception) -> str:
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__context__
    reason = str(error) if origin is None or not origin.errno else os.strerror(origin.errno)
    free = shutil.disk_usage(run).free / 2**20
    saved = kept(run)
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

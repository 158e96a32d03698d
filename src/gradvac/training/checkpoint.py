"""Checkpoints that are there completely or not at all.

    RUN/checkpoints/step-00001000/model.safetensors     weights
                                  state.pt              optimiser, aligner, batches, loop, random
                                  manifest.json         step, SHA-256 of the two
    RUN/best.safetensors, RUN/averaged.safetensors      weights to use

A checkpoint is written into a hidden folder, forced to disk, and renamed: whoever is killed
anywhere in between leaves the previous one intact. `latest` verifies the hashes and falls back to
the checkpoint before if the last one is damaged.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gradvac.runs import RunFolder
from gradvac.runs.files import (
    TEMPORARY,
    hash_file,
    remove_leftovers,
    replacing_path,
    sync,
    write_json,
)

MODEL, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
_ALIAS = "same as "  # in safetensors metadata: tied weights are stored once
_PLAIN = (Tensor, bool, int, float, str, type(None))


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; says what is still there."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def weights(self) -> dict[str, Tensor]:
        """The model's `state_dict`, on the CPU."""
        return read_weights(self.path / MODEL)

    def state(self) -> dict[str, Any]:
        """What was given to `save`, on the CPU."""
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        return state

    def damage(self) -> str | None:
        """What is wrong with the files; None if they are as they were written."""
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            for name, expected in manifest["files"].items():
                if hash_file(self.path / name, "sha256") != expected:
                    return f"{name} is not what was written"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def save(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Checkpoint:
    """Write a checkpoint, then delete all but the last `keep`.

    Args:
        run: The run folder.
        step: Optimiser steps taken.
        weights: The model's `state_dict`; tied weights may share memory.
        state: Everything else: nested dicts and lists of plain values and tensors.
        keep: How many checkpoints stay.

    Raises:
        CheckpointError: It could not be written, for example because the disk is full. The
            checkpoints before are as they were.
    """
    _check_plain(state, "state")
    folder = RunFolder(run).checkpoints
    target, temporary = RunFolder(run).checkpoint(step), folder / f"{TEMPORARY}{step:08d}"
    try:
        temporary.mkdir(parents=True)
        _write_weights(temporary / MODEL, weights, {"step": str(step)})
        with (temporary / STATE).open("wb") as file:  # a path would hide why writing fails
            torch.save(state, file)
        sync(temporary / STATE)
        hashes = {name: hash_file(temporary / name, "sha256") for name in (MODEL, STATE)}
        write_json(temporary / MANIFEST, {"step": step, "files": hashes})
        if target.exists():  # damaged, or it would have been continued from
            shutil.rmtree(target)
        os.rename(temporary, target)
        sync(folder)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_failure(run, f"the checkpoint of step {step}", error)) from error
    for old in kept(run)[:-keep]:
        shutil.rmtree(old.path)
    return Checkpoint(target, step)


def latest(run: Path, *, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint that is intact; None if there is none at all.

    Args:
        run: The run folder.
        say: Told about each damaged checkpoint that is passed over.

    Raises:
        CheckpointError: There are checkpoints, but all are damaged.
    """
    found = kept(run)
    for checkpoint in reversed(found):
        damage = checkpoint.damage()
        if damage is None:
            return checkpoint
        say(f"{checkpoint.path} is damaged ({damage}); trying the one before.")
    if found:
        raise CheckpointError(
            f"{RunFolder(run).checkpoints}: all {len(found)} checkpoints are damaged; restore one, "
            "or remove the folder to start again."
        )
    return None


def kept(run: Path) -> list[Checkpoint]:
    """All checkpoints by step, damaged ones too."""
    return [Checkpoint(path, step) for step, path in RunFolder(run).kept_checkpoints()]


def clean(run: Path) -> None:
    """Remove what a killed process left half-written; only for the process that owns the run."""
    for path in RunFolder(run).checkpoints.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)
    remove_leftovers(run)


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
        _write_weights(target, weights, {key: str(value) for key, value in facts.items()})
    except Exception as error:
        raise CheckpointError(_failure(run, target.name, error)) from error
    return target


def average(run: Path, num: int, *, say: Callable[[str], None] = print) -> Path:
    """Write the mean of the last `num` intact checkpoints' weights to `averaged.safetensors`.

    The checkpoint of step 0 is no trained model and does not count.
    """
    chosen: list[Checkpoint] = []
    for checkpoint in reversed([one for one in kept(run) if one.step > 0]):
        if len(chosen) == num:
            break
        if (damage := checkpoint.damage()) is None:
            chosen.append(checkpoint)
        else:
            say(f"{checkpoint.path} is damaged ({damage}) and does not enter the average.")
    if not chosen:
        raise CheckpointError(f"{RunFolder(run).checkpoints}: no intact checkpoint to average.")
    last = chosen[0].weights()
    total = {n: w.double() for n, w in last.items() if w.is_floating_point()}
    for checkpoint in chosen[1:]:
        other = checkpoint.weights()
        for name, value in total.items():
            value += other[name]
    means = {name: (value / len(chosen)).to(last[name].dtype) for name, value in total.items()}
    steps = ",".join(str(checkpoint.step) for checkpoint in reversed(chosen))
    return save_weights(run, "averaged", last | means, {"steps": steps})


def weights(
    run: Path, which: str | int = "best", *, say: Callable[[str], None] = print
) -> dict[str, Tensor]:
    """Weights of a run, on the CPU.

    Args:
        run: The run folder.
        which: "best", "averaged", "last", or a step whose checkpoint is kept.
        say: See `latest`.
    """
    if which == "last":
        newest = latest(run, say=say)
        path = None if newest is None else newest.path / MODEL
    elif isinstance(which, int):
        path = RunFolder(run).checkpoint(which) / MODEL
    else:
        path = RunFolder(run).weights(which)
    if path is not None and path.is_file():
        return read_weights(path)
    names = [path.stem for path in RunFolder(run).kept_weights()]
    there = [*names, *(["last"] if kept(run) else []), *(str(c.step) for c in kept(run))]
    raise CheckpointError(
        f"{run}: there are no weights {which!r}; there are: {', '.join(there) or 'none'}."
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """All entries of a weights file; tied ones share memory again."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    aliases = {n: v.removeprefix(_ALIAS) for n, v in metadata.items() if v.startswith(_ALIAS)}
    return found | {name: found[first] for name, first in aliases.items()}


def read_facts(path: Path) -> dict[str, str]:
    """The facts given to `save_weights`."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    return {name: value for name, value in metadata.items() if not value.startswith(_ALIAS)}


def _write_weights(path: Path, weights: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    stored: dict[str, Tensor] = {}
    metadata = dict(facts)
    seen: dict[object, str] = {}
    for name, value in weights.items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and key in seen:
            metadata[name] = _ALIAS + seen[key]
            continue
        seen[key] = name
        value = value.detach().cpu().contiguous()
        whole = value.untyped_storage().nbytes() == value.nbytes
        stored[name] = value if whole else value.clone()  # a view of something larger
    with replacing_path(path) as temporary:
        safetensors.torch.save_file(stored, temporary, metadata=metadata)


def _failure(run: Path, what: str, error: Exception) -> str:
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__context__
    reason = str(error) if origin is None or not origin.errno else os.strerror(origin.errno)
    free = shutil.disk_usage(run).free / 2**20
    found = kept(run)
    intact = f"The checkpoint of step {found[-1].step} is intact" if found else "None was saved yet"
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

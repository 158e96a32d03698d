"""Weights files: safetensors in which tied entries are stored once, with facts and a hash.

The hash covers names, types, shapes, values and facts, and is part of the file's metadata: a file
is verified whenever it is read, wherever it has been moved.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gradvac.lab.runs.files import replacing_path

_ALIAS = "same as "  # in the metadata: tied weights are stored once
_HASH = "sha256"
_REMEDY = "Use other weights, or train again."


class CheckpointError(RuntimeError):
    """A checkpoint or weights could not be written or read; says what is still there."""


def write_weights(path: Path, weights: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Replace a weights file.

    Args:
        path: The file.
        weights: A `state_dict`; tied weights may share memory.
        facts: Kept with them, such as the step.
    """
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
    metadata[_HASH] = _hash(stored, metadata)
    with replacing_path(path) as temporary:
        safetensors.torch.save_file(stored, temporary, metadata=metadata)


def read_weights(path: Path) -> dict[str, Tensor]:
    """All entries of a weights file, on the CPU; tied ones share memory again.

    Raises:
        CheckpointError: The file is missing, damaged, or not written by us.
    """
    tensors, metadata = _read(path)
    aliases = {n: v.removeprefix(_ALIAS) for n, v in metadata.items() if v.startswith(_ALIAS)}
    return tensors | {name: tensors[first] for name, first in aliases.items()}


def read_facts(path: Path) -> dict[str, str]:
    """The facts given to `write_weights`; raises as `read_weights` does."""
    _, metadata = _read(path)
    return {name: value for name, value in metadata.items() if not value.startswith(_ALIAS)}


def is_finite(weights: Mapping[str, Tensor]) -> bool:
    """Whether all numbers are; waits for the device once."""
    checks = [w.isfinite().all() for w in weights.values() if w.is_floating_point()]
    return not checks or bool(torch.stack(checks).all())


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], *, origin: str) -> None:
    """Give a model its weights.

    Raises:
        CheckpointError: They are those of another model; says where they came from.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CheckpointError(f"{origin}: are the weights of another model ({reason})") from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes that only a damaged file claims
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        expected = metadata.pop(_HASH, None)
        intact = expected == _hash(tensors, metadata)
    except Exception as error:  # what a damaged header makes the library raise is not bounded
        raise CheckpointError(
            f"{path}: is not a weights file, or is damaged ({error}). {_REMEDY}"
        ) from error
    if not intact:
        what = "is damaged: it is not what was written" if expected else "has no hash to verify"
        raise CheckpointError(f"{path}: {what}. {_REMEDY}")
    return tensors, metadata


def _hash(stored: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    shapes = {name: [str(w.dtype), *w.shape] for name, w in stored.items()}
    digest = hashlib.sha256(json.dumps([shapes, metadata], sort_keys=True).encode())
    for name in sorted(stored):
        digest.update(stored[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Weights on disk: one safetensors file, or the shards that all processes wrote together.

A file stores tied entries once. It travels alone (a run's best weights are replaced while others
read them, and copied without their folder), so its checksum is part of its metadata and verified
whenever it is read. Shards are those of `torch.distributed.checkpoint`; any number of processes
can read them, even one without shards.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from gradvac.lab.training.parallel import is_shard, local_shard, shard_like
from gradvac.utils.files import replacing_path

SHARDS = "shards"  # folder in a checkpoint
_MODEL, _OPTIMIZER = "model.", "optimizer."
_ALIAS = "same as "  # in the metadata: tied weights are stored once
_CHECKSUM = "sha256"
_REMEDY = "Use other weights, or train again."


class CheckpointError(RuntimeError):
    """A checkpoint or weights could not be written or read; says what is still there."""


def write_weights(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace a weights file; tied weights may share memory."""
    stored: dict[str, Tensor] = {}
    metadata = dict(metadata)
    seen: dict[object, str] = {}
    for name, value in weights.items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and key in seen:
            metadata[name] = _ALIAS + seen[key]
            continue
        seen[key] = name
        value = value.detach().cpu().contiguous()
        is_view = value.untyped_storage().nbytes() != value.nbytes  # of something larger
        stored[name] = value.clone() if is_view else value
    metadata[_CHECKSUM] = _checksum(stored, metadata)
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


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata given to `write_weights`; raises as `read_weights` does."""
    _, metadata = _read(path)
    return {name: value for name, value in metadata.items() if not value.startswith(_ALIAS)}


def all_finite(weights: Mapping[str, Tensor]) -> bool:
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
        expected = metadata.pop(_CHECKSUM, None)
        intact = expected == _checksum(tensors, metadata)
    except Exception as error:  # what a damaged header makes the library raise is not bounded
        raise CheckpointError(
            f"{path}: is not a weights file, or is damaged ({error}). {_REMEDY}"
        ) from error
    if not intact:
        what = "is damaged: it is not what was written" if expected else "has no checksum to verify"
        raise CheckpointError(f"{path}: {what}. {_REMEDY}")
    return tensors, metadata


def _checksum(stored: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    shapes = {name: [str(w.dtype), *w.shape] for name, w in stored.items()}
    digest = hashlib.sha256(json.dumps([shapes, metadata], sort_keys=True).encode())
    for name in sorted(stored):
        digest.update(stored[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- shards ----------------------------------------------------------------------------------------


def write_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the local shards of weights and moments; all processes must call it together."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_flatten(model, optimizer), checkpoint_id=folder)


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and moments from a checkpoint of any number of processes; all together.

    Raises:
        CheckpointError: They are those of another model.
    """
    sizes = _sizes(folder)
    _allocate(optimizer, model, sizes)
    wanted = _flatten(model, optimizer)
    for name, value in wanted.items():
        if sizes.get(name) != (value.shape, value.dtype):
            raise CheckpointError(f"{folder}: are the weights of another model ({name}).")
    _load(folder, wanted, is_alone=not any(is_shard(value) for value in wanted.values()))


def read_sharded_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, on the CPU, in one process."""
    try:
        weights = {
            name: torch.empty(size, dtype=dtype)
            for name, (size, dtype) in _sizes(folder).items()
            if name.startswith(_MODEL)
        }
        _load(folder, weights, is_alone=True)
    except Exception as error:  # what damaged metadata make the library raise is not bounded
        raise CheckpointError(f"{folder}: is not a checkpoint, or is damaged ({error}).") from error
    return {name.removeprefix(_MODEL): value for name, value in weights.items()}


def load_unsharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Load the local shards of weights and moments that were saved without shards.

    Raises:
        CheckpointError: They are those of another model.
    """
    model_weights = model.state_dict()
    if {n: v.shape for n, v in model_weights.items()} != {n: v.shape for n, v in weights.items()}:
        raise CheckpointError("checkpoint: are the weights of another model.")
    for name, value in model_weights.items():
        given = weights[name]
        local_shard(value).copy_(
            local_shard(shard_like(given, value)) if is_shard(value) else given
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, moments in state["state"].items():
        parameter = parameters[number]
        optimizer.state[parameter] = {
            key: shard_like(value, parameter) if value.dim() else value.to(parameter.device)
            for key, value in moments.items()
        }


def _flatten(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that may be sharded, by name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"{_MODEL}{name}": value for name, value in model.state_dict().items()}
    for parameter, moments in optimizer.state.items():
        for key, value in moments.items():
            tensors[f"{_OPTIMIZER}{names[parameter]}.{key}"] = value
    return {name: value.detach() for name, value in tensors.items()}


def _allocate(optimizer: torch.optim.Optimizer, model: nn.Module, sizes: Mapping[str, Any]) -> None:
    """Allocate the moments of the parameters that have any."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = f"{_OPTIMIZER}{names[parameter]}."
            moments = {}
            for name in (name for name in sizes if name.startswith(prefix)):
                size, dtype = sizes[name]
                is_like_it = size == parameter.shape  # a count of steps is not
                moments[name.removeprefix(prefix)] = (
                    torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    if is_like_it
                    else torch.zeros(size, dtype=dtype, device=parameter.device)
                )
            if moments:
                optimizer.state[parameter] = moments


def _sizes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries: Any = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def _load(folder: Path, into: dict[str, Tensor], *, is_alone: bool) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # which is intended here
        load(into, checkpoint_id=folder, no_dist=is_alone)

"""PAR"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
import torch
from torch import Tensor, nn
from gradvac.lab.training.weights import CheckpointError
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic
from gradvac.lab.training.recipe import BatchT, Recipe, StepLosses
from gradvac.models import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SHARDS = "shards"  # folder in a checkpoint
_MODEL, _OPTIMIZER = "model.", "optimizer."


def shard(model: nn.Module, group: "ProcessGroup", device: torch.device) -> None:
    """Divide a model: every layer of its module lists is a unit, and the rest is one more."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    for stack in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in stack:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Gather all parameters in every process, for reading; a model without shards is unchanged.

    All processes must enter together; inside, each may do with the model what it likes.
    """
    units = _units(model)
    layers = units[1:]  # the model itself comes first
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
        for unit in units:
            unit.reshard()


def whole_weights(model: nn.Module, *, is_wanted: bool) -> dict[str, Tensor]:
    """The `state_dict` without shards, on the CPU where there are any; all processes together.

    Args:
        model: The model.
        is_wanted: Whether this process needs it; others help and get nothing.
    """
    weights: dict[str, Tensor] = {}
    by_id: dict[int, Tensor] = {}  # tied weights stay tied
    for name, value in model.state_dict().items():
        if id(value) not in by_id:
            by_id[id(value)] = _full(value) if is_wanted else _full(value).new_empty(0)
        weights[name] = by_id[id(value)]
    return weights if is_wanted else {}


def own_values(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this process has of every entry."""
    return {name: _local(value) for name, value in values.items()}


# -- checkpoints -------------------------------------------------------------------------------


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write our shards of weights and moments; all processes must call it together."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_flat(model, optimizer), checkpoint_id=folder)


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and moments from a checkpoint of any number of processes; all together.

    Raises:
        CheckpointError: They are those of another model.
    """
    sizes = _sizes(folder)
    _allocate(optimizer, model, sizes)
    wanted = _flat(model, optimizer)
    for name, value in wanted.items():
        if sizes.get(name) != (value.shape, value.dtype):
            raise CheckpointError(f"{folder}: are the weights of another model ({name}).")
    _load(folder, wanted, is_alone=not any(_is_sharded(value) for value in wanted.values()))


def read_weights(folder: Path) -> dict[str, Tensor]:
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


def take_whole(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Load our shards of weights and moments that were saved without shards.

    Raises:
        CheckpointError: They are those of another model.
    """
    model_weights = model.state_dict()
    if {n: v.shape for n, v in model_weights.items()} != {n: v.shape for n, v in weights.items()}:
        raise CheckpointError("checkpoint: are the weights of another model.")
    for name, value in model_weights.items():
        _local(value).copy_(_part(weights[name], value))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, moments in state["state"].items():
        parameter = parameters[number]
        optimizer.state[parameter] = {
            key: _like(value, parameter) if value.dim() else value.to(parameter.device)
            for key, value in moments.items()
        }


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
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


# -- shards ------------------------------------------------------------------------------------


def _units(model: nn.Module) -> "list[FSDPModule]":
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _is_sharded(value: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _local(value: Any) -> Tensor:
    local: Tensor = value.detach().to_local() if _is_sharded(value) else value.detach()
    return local


def _full(value: Any) -> Tensor:
    full: Tensor = value.detach().full_tensor().cpu() if _is_sharded(value) else value.detach()
    return full


def _like(value: Tensor, parameter: Any) -> Tensor:
    """A whole tensor, sharded as a parameter is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )


def _part(value: Tensor, parameter: Any) -> Tensor:
    return _local(_like(value, parameter)) if _is_sharded(parameter) else value


LossesOf = Callable[[BatchT, bool], StepLosses]


def losses_of(recipe: Recipe[BatchT], group: "ProcessGroup | None") -> LossesOf[BatchT]:
    """The losses of a batch, by (batch, whether it is the last of its step).

    Args:
        recipe: Computes them.
        group: Processes over which gradients are averaged when the last batch of a step is
            differentiated; None: they are not averaged, or an aligner does it.
    """
    if group is not None:
        return _Averaged(recipe, group)
    model: Any = recipe.model

    def losses(batch: BatchT, is_last: bool) -> StepLosses:
        if is_sharded(model):  # averages by itself, unless an aligner does
            model.set_requires_gradient_sync(is_last)
        return recipe.losses(batch)

    return losses


class _Averaged(Generic[BatchT]):
    def __init__(self, recipe: Recipe[BatchT], group: "ProcessGroup") -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._losses = _Losses(recipe)
        # Buffers are not statistics (`refuse_batch_norm`) but tables that may grow with the
        # data, differently in every process.
        buffers = [name for name, _ in self._losses.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._losses, buffers)
        self._replica = DistributedDataParallel(
            self._losses, process_group=group, find_unused_parameters=True
        )

    def __call__(self, batch: BatchT, is_last: bool) -> StepLosses:
        if is_last:
            losses = self._replica(batch)
        else:
            with self._replica.no_sync():
                losses = self._replica(batch)
        step_losses = self._losses.found
        return StepLosses(losses, step_losses.tasks, step_losses.shown)


class _Losses(nn.Module):
    """A recipe's losses as the forward pass of a module, which is what torch replicates."""

    found: StepLosses

    def __init__(self, recipe: Recipe[Any]) -> None:
        super().__init__()
        self.model = recipe.model
        self._of = recipe.losses
        # The rows of one process may leave out a parameter that others need. Torch allows that,
        # but warns if it never happens; with this parameter it always does.
        like = next(recipe.model.parameters())
        self.left_out = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def forward(self, batch: Any) -> Tensor:
        self.found = self._of(batch)
        return self.found.losses

"""A model in several processes: replicated (DDP), or divided among them (FSDP2).

With shards every layer is a unit of its own: it is gathered for its forward and backward pass, and
divided again.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, nn

from gradvac.engine.models import is_sharded
from gradvac.lab.training.workload import BatchT, StepLosses, Workload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

LossesOf = Callable[[BatchT, bool], StepLosses]


def loss_function(workload: Workload[BatchT], group: "ProcessGroup | None") -> LossesOf[BatchT]:
    """The losses of a batch, by (batch, whether it is the last of its step).

    Args:
        workload: Computes them.
        group: Processes over which gradients are averaged when the last batch of a step is
            differentiated; None: they are not averaged, or an aligner does it.
    """
    if group is not None:
        return _Replicated(workload, group)
    model: Any = workload.model

    def losses(batch: BatchT, is_last: bool) -> StepLosses:
        if is_sharded(model):  # averages by itself, unless an aligner does
            model.set_requires_gradient_sync(is_last)
        return workload.losses(batch)

    return losses


class _Replicated(Generic[BatchT]):
    def __init__(self, workload: Workload[BatchT], group: "ProcessGroup") -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._losses = _Losses(workload)
        # Buffers are not statistics (`check_batch_norm`) but tables that may grow with the
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
        return replace(step_losses, losses=losses)


class _Losses(nn.Module):
    """The losses of a workload as the forward pass of a module, which is what torch replicates."""

    found: StepLosses

    def __init__(self, workload: Workload[Any]) -> None:
        super().__init__()
        self.model = workload.model
        self._of = workload.losses
        # The rows of one process may leave out a parameter that others need. Torch allows that,
        # but warns if it never happens; with this parameter it always does.
        like = next(workload.model.parameters())
        self.left_out = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def forward(self, batch: Any) -> Tensor:
        self.found = self._of(batch)
        return self.found.losses


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
def unsharded(model: nn.Module) -> Iterator[None]:
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


def full_weights(model: nn.Module, *, is_wanted: bool) -> dict[str, Tensor]:
    """The `state_dict` without shards, on the CPU where there are any; all processes together.

    Args:
        model: The model.
        is_wanted: Whether this process needs it; others help and get nothing.
    """
    weights: dict[str, Tensor] = {}
    by_id: dict[int, Tensor] = {}  # tied weights stay tied
    for name, value in model.state_dict().items():
        if id(value) not in by_id:
            full = _full_tensor(value)
            by_id[id(value)] = full if is_wanted else full.new_empty(0)
        weights[name] = by_id[id(value)]
    return weights if is_wanted else {}


def local_values(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The local shard of every entry."""
    return {name: local_shard(value) for name, value in values.items()}


def _units(model: nn.Module) -> "list[FSDPModule]":
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_shard(value: Tensor) -> bool:
    """Whether other processes have the rest of it."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local_shard(value: Any) -> Tensor:
    """What this process has of a tensor."""
    local: Tensor = value.detach().to_local() if is_shard(value) else value.detach()
    return local


def _full_tensor(value: Any) -> Tensor:
    full: Tensor = value.detach().full_tensor().cpu() if is_shard(value) else value.detach()
    return full


def shard_like(value: Tensor, parameter: Any) -> Tensor:
    """A full tensor, sharded as a parameter is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )

"""How the parameters of a model lie over the processes: whole in each, or divided by FSDP2.

FSDP2 divides every parameter along its first dimension and shows the modules the whole of it only
while they run. For a backward of ours, `whole` shows all modules all of it: then the leaves of the
graph are the parameters, how many passes a process takes is its own affair, and nothing but the
exchange has to know of shards.
"""

# S shards, R processes with the same shard, W = R S processes

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.processes._distributed import Ranks


@contextmanager
def whole(modules: Sequence[Any], ranks: Ranks | None = None) -> Iterator[None]:
    """All parameters in this process, and no gradients exchanged by the model itself.

    All processes have to come here together.

    Args:
        modules: Those of `sharded_modules`.
        ranks: The processes, to name one that does not come.
    """
    groups = _groups(modules)
    kept = [(g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward) for g in groups]
    for module in modules:
        module.unshard() if ranks is None else ranks.run(module.unshard)
    try:
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False
        yield
    finally:
        for state in [module._get_fsdp_state() for module in modules]:
            if state._state_ctx.post_backward_final_callback_queued:  # a backward broke off
                state._root_post_backward_final_callback()
        for group, values in zip(groups, kept, strict=True):
            group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward = values
            if group.reshard_after_backward:
                group.reshard()


class Shards:
    """What every process has of a model that `ranks` train together.

    Attributes:
        every: Name -> parameter, or what this process keeps of it; frozen ones too.
        parameters: Those that are trained: what the optimizer of this process updates.
        leaves: Name -> the whole parameter, a leaf of graphs.
        modules: Those that FSDP2 divides.
        are_made: Whether there are any.
        num: Shards of a parameter, S; 1: every process keeps all of it.
        own: Ours.
        copies: Processes with the same shard, R.
        own_copy: Which of them we are.
        among: Their process group; None: all processes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.every: dict[str, Any] = dict(model.named_parameters())
        self.parameters = {n: p for n, p in self.every.items() if p.requires_grad}
        self.leaves: dict[str, nn.Parameter] = self.parameters
        self.num, self.own, self.copies, self.own_copy = 1, 0, ranks.size, ranks.rank
        self.among: Any = None
        self.modules = sharded_modules(model)
        self.are_made = bool(self.modules)
        self._sends: dict[int, torch.dtype] = {}
        if not self.are_made:
            return
        mesh = next(iter(self.parameters.values())).device_mesh
        self.num, self.own = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        self.copies, self.own_copy = ranks.size // self.num, ranks.rank // self.num
        self.among = mesh.get_group(0) if mesh.ndim == 2 else None
        with whole(self.modules):
            self.leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.refuse_changes()
        for group in _groups(self.modules):
            for fsdp_param in group.fsdp_params if group.mp_policy.reduce_dtype else ():
                self._sends[id(fsdp_param.sharded_param)] = group.mp_policy.reduce_dtype

    def refuse_changes(self) -> None:
        """Refuse settings that change what plain FSDP2 does with gradients."""
        for group in _groups(self.modules):
            changed = {
                "CPUOffloadPolicy": any(own.offload_to_cpu for own in group.fsdp_params),
                "set_gradient_divide_factor": group.gradient_divide_factor is not None,
                "set_all_reduce_hook": group._all_reduce_hook is not None,
            }
            for setting in [name for name, is_set in changed.items() if is_set]:
                raise ValueError(
                    f"model: {setting} changes what FSDP2 does with gradients, which the Aligner "
                    "does in its place: means over all processes of the mesh, on their devices. "
                    "Leave it out; scale the losses instead of gradients."
                )

    def __str__(self) -> str:
        """What there is to say beside the number of processes."""
        return f", {self.num} shards, whole during the backward" if self.are_made else ""

    def kept(self) -> dict[str, Tensor]:
        """What this process keeps of all parameters, trained or not, by what it is."""
        if not self.are_made:
            return self.every
        shards = {n: p for n, p in self.every.items() if hasattr(p, "to_local")}
        return {f"shard {self.own} of {name}": p.to_local() for name, p in shards.items()}

    def sent_dtype(self, name: str) -> torch.dtype:
        """The dtype in which gradients of a parameter are exchanged; its own, unless FSDP2 says."""
        return self._sends.get(id(self.parameters[name]), self.leaves[name].dtype.to_real())

    def width(self, parameter: Tensor) -> int:
        """Real numbers of a shard of a (whole) parameter, padded to that of the first process."""
        size = _num_reals(parameter)
        if self.num == 1 or not size:
            return size
        return -(-parameter.shape[0] // self.num) * (size // parameter.shape[0])

    def scatter(self, gradient: Tensor, shards: Tensor) -> None:
        """Write a gradient into `shards` `[S, width]`, and zeros after its end."""
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        flat = gradient.reshape(-1)
        if missing := shards.numel() - len(flat):
            flat = nn.functional.pad(flat, (0, missing))
        shards.copy_(flat.view_as(shards))

    def as_gradient(self, update: Tensor, parameter: Any) -> Tensor:
        """From real numbers `[width]` to what belongs into `.grad`."""
        local = parameter.to_local() if self.are_made else parameter
        own = update[: _num_reals(local)].clone()  # of a bucket, which is let go
        own = torch.view_as_complex(own.view(-1, 2)) if local.is_complex() else own
        own = own.view(local.shape).to(local.dtype)
        if not self.are_made:
            return own
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements
        whole_one = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(own, mesh, placements, run_check=False, **whole_one)


def _num_reals(values: Tensor) -> int:
    return values.numel() * (2 if values.is_complex() else 1)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 brings together one by one; none of a model without shards."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(modules: Sequence[Any]) -> list[Any]:
    """Groups of parameters that FSDP2 brings together at once; older versions know one a module."""
    groups: list[Any] = []
    for state in [module._get_fsdp_state() for module in modules]:
        several = hasattr(state, "_fsdp_param_groups")
        groups += state._fsdp_param_groups if several else [state._fsdp_param_group]
    return [group for group in groups if group is not None]

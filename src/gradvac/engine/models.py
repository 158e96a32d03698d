"""What the aligner requires of a model before it reads its graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TAG = "gradvac"


def unwrap(
    model: nn.Module, process_group: ProcessGroup | Literal["auto"] | None
) -> tuple[nn.Module, ProcessGroup | None]:
    """The model inside torch's wrappers, and the processes that train it together.

    Args:
        model: A model, compiled or not, in DistributedDataParallel, sharded by FSDP2, or neither.
        process_group: As given to the aligner.

    Raises:
        ValueError: It is not a model, or its gradients would be exchanged without the aligner, or
            not at all.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: must be a torch.nn.Module, got {type(model).__name__}.")
    model = _compiled(model)
    if not torch.distributed.is_available():
        return model, None
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        _check_ddp_options(model)
        if process_group not in ("auto", model.process_group):
            raise ValueError(
                "process_group: the model brings its own; leave it out, or give the plain module "
                "(model.module)."
            )
        process_group = model.process_group
        model = _compiled(model.module)
    elif is_sharded(model):
        if process_group != "auto":
            raise ValueError(
                "process_group: the mesh of fully_shard says which processes train the model; "
                "leave the argument out."
            )
        process_group = _group_of_mesh(model)
    _check_replicas(model)
    if not is_sharded(model):
        _check_divided(model)
    if process_group == "auto":
        _check_job()
        return model, None
    if process_group is not None:
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            raise ValueError(
                "process_group: must be a process group that this process is in, or None, got "
                f"{process_group!r}."
            )
        _check_sync_batch_norm(model)
    return model, process_group


def check_later_changes(model: nn.Module) -> None:
    """Raise for changes to how DistributedDataParallel exchanges gradients, made after wrapping."""
    if getattr(model, "_comm_hooks", None):
        raise ValueError(
            "model: DistributedDataParallel has a communication hook, which an aligned backward "
            "does not use; leave register_comm_hook out."
        )
    joining = getattr(model, "_join_config", None)
    if joining is not None and joining.enable:
        raise ValueError(
            "model: join() lets a process without rows leave, but all take part in an aligned "
            "backward; leave it out, and let such a process call backward({})."
        )


def _compiled(model: nn.Module) -> nn.Module:
    """torch.compile's wrapper renames parameters."""
    return getattr(model, "_orig_mod", model)


def _check_ddp_options(model: nn.parallel.DistributedDataParallel) -> None:
    trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
    refused = {
        "static_graph=True": model.static_graph,
        "mixed_precision=...": model.mixed_precision is not None,
        "delay_all_reduce_named_params=...": bool(model._delay_all_reduce_params),
        "trained parameters that it ignores": bool(trained & set(model.parameters_to_ignore)),
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"model: DistributedDataParallel with {option} does not exchange all gradients "
                "when and as the Aligner does, in the place of it; leave the option out "
                "(torch.autocast is the mixed precision that both understand)."
            )


def _check_replicas(model: nn.Module) -> None:
    """Raise for models whose gradients are exchanged in ways the aligner does not support."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    replicas = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)
    for name, module in model.named_modules():
        if isinstance(module, replicas) and not (is_sharded(model) and is_sharded(module)):
            which = type(module).__name__ if not name else f"{name} ({type(module).__name__})"
            raise ValueError(
                f"model: {which} exchanges gradients between processes in a way that the Aligner "
                "does not take part in; every process would train a model of its own. Wrap the "
                "whole model, and nothing else, in DistributedDataParallel; or call fully_shard on "
                "the model itself too; or give the plain module and "
                "process_group=torch.distributed.group.WORLD."
            )


def _check_divided(model: nn.Module) -> None:
    """Raise for parameters of which every process has a part, other than by FSDP2."""
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        # DistributedDataParallel takes them for plain ones, and remembers what they were.
        if isinstance(parameter, DTensor) or hasattr(parameter, "_st_info"):
            raise ValueError(
                f"model: {name} is divided by tensor or expert parallelism, where task gradients "
                "are not exchanged yet; use fully_shard or DistributedDataParallel alone."
            )


def is_sharded(model: object) -> bool:
    """Whether FSDP2 divides the model among processes."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _group_of_mesh(model: nn.Module) -> ProcessGroup:
    """The processes of an FSDP2 model, whose parameters must all be placed alike on one mesh."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate, Shard

    trained: dict[str, Any] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    plain = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if plain:
        raise ValueError(
            f"model: {', '.join(plain[:3])} is not sharded, so FSDP2 would not exchange its "
            "gradient; call fully_shard on the model itself, without ignored_params."
        )
    if not trained:
        raise ValueError("model: has no parameter with requires_grad=True; nothing to train.")
    mesh = next(iter(trained.values())).device_mesh
    understood = ((Shard(0),), (Replicate(), Shard(0)))
    for name, parameter in trained.items():
        if parameter.device_mesh != mesh or parameter.placements not in understood:
            raise ValueError(
                f"model: {name} is placed as {parameter.placements} on {parameter.device_mesh}; "
                "the Aligner understands fully_shard along dimension 0, over one mesh of "
                "processes, or of replicas and shards (HSDP)."
            )
    world: Any = distributed.group.WORLD
    if mesh.ndim == 2 and mesh.mesh.flatten().tolist() != list(range(distributed.get_world_size())):
        raise ValueError(
            f"model: its mesh of replicas and shards is {mesh}; the Aligner needs all processes of "
            "the job in it, in their order."
        )
    group: ProcessGroup = mesh.get_group() if mesh.ndim == 1 else world
    return group


def _check_sync_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"model: {name} (SyncBatchNorm) makes the rows of all processes depend on each "
                "other, so their tasks cannot be separated; use nn.BatchNorm or nn.LayerNorm."
            )


def _check_job() -> None:
    """Raise for a plain model in a job of several processes: unclear who trains it together."""
    from torch import distributed

    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            f"process_group: this job has {distributed.get_world_size()} processes, but the model "
            "is a plain module. Give process_group=torch.distributed.group.WORLD to train one "
            "model together (or wrap it in DistributedDataParallel), or process_group=None to "
            "train one model per process."
        )


def allow_second_passes() -> None:
    """Let compiled backwards be run more than once.

    By default a compiled backward overwrites what its forward saved, and separating tasks takes
    several runs of it. Graphs compiled from now on keep what was saved. Torch ignores this setting
    when it finds a compiled graph on disk, so ours get their own cache keys; and settings are per
    thread, so a backward is compiled together with its forward, not on the thread it runs on.
    """
    import torch._functorch.config as functorch
    import torch.compiler.config as compiler

    functorch.donated_buffer = False
    functorch.force_non_lazy_backward_lowering = True
    if _TAG not in compiler.cache_key_tag:
        compiler.cache_key_tag += _TAG

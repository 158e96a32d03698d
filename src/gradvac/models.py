"""What the aligner asks of a model before it reads its graphs."""

import torch
from torch import nn

_TAG = "gradvac"


def refuse_replicas(model: nn.Module) -> None:
    """Raise for models whose gradients are exchanged between processes."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    replicas = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)
    for name, module in model.named_modules():
        if isinstance(module, replicas):
            which = type(module).__name__ if not name else f"{name} ({type(module).__name__})"
            raise ValueError(
                f"model: {which} exchanges gradients between processes, which the Aligner does not "
                "take part in yet; every process would train a model of its own. Give it the plain "
                "module (model.module) in a single process."
            )


def allow_second_passes() -> None:
    """Let compiled backwards be run more than once.

    By default a compiled backward writes over what its forward saved, and separating tasks takes
    several runs of it. Graphs compiled from now on keep what was saved. Torch does not look at this
    setting when it finds a compiled graph on disk, so ours have names of their own; and it keeps
    settings by thread, so a backward is compiled with its forward, not on the thread it runs on.
    """
    import torch._functorch.config as functorch
    import torch.compiler.config as compiler

    functorch.donated_buffer = False
    functorch.force_non_lazy_backward_lowering = True
    if _TAG not in compiler.cache_key_tag:
        compiler.cache_key_tag += _TAG

"""One task per process: the same call in each, and gradients of all tasks meet exactly.

    torchrun --nproc-per-node 2 examples/several_processes.py

Started by itself, it starts two processes. `fully_shard` divides the model among them;
`DistributedDataParallel(model)` in its place keeps a replica in each.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradvac import Aligner, GradVac

CURVES = {"sine": torch.sin, "cosine": torch.cos, "line": lambda x: x / 3}


def train(rank: int, where: str | None) -> None:
    """One process."""
    own = {} if where is None else {"init_method": where, "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **own)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # Batch normalisation makes rows depend on each other: a process with one task may use it.
    hidden = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Tanh())
    model = nn.Sequential(hidden, nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    aligner = Aligner(model, tasks=list(CURVES), rule=GradVac(beta=1e-2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    points = torch.Generator().manual_seed(rank)
    for step in range(60):
        place = (step + rank) % len(CURVES)
        x = torch.rand(64, 1, generator=points) * 6 - 3
        which = torch.eye(3)[place].expand(64, 3)
        losses = (model(torch.cat([x, which], dim=1)) - list(CURVES.values())[place](x)).square()
        optimizer.zero_grad()
        alignment = aligner.backward(losses.mean(1) / 64, [place] * 64)
        optimizer.step()
    if rank == 0:
        print(aligner)
        print(
            f"last step: {', '.join(alignment.tasks)}; cosine {alignment.similarity[0, 0, 1]:+.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(0, None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, (f"file://{folder}/rendezvous",), 2)

"""A process that dies in the middle of training."""

import os
from pathlib import Path

from gradvac import Aligner, GradVac

from .problems import TASKS, Rows, made, rows
from .processes import World, join_world
from .sharded import sharded

DEAD = 1
KINDS = ("replicas", "shards")


def train_until_one_dies(rank: int, folder: Path, kind: str) -> None:
    """Three processes; one of them leaves without a word before its third backward."""
    import torch.distributed as dist

    join_world(rank, 3, folder)
    if kind == "shards":
        model = sharded(World(rank, 3, dist.group.WORLD), made(Rows))
        aligner = Aligner(model, TASKS, GradVac())
    else:
        model = made(Rows)
        aligner = Aligner(model, TASKS, GradVac(), process_group=dist.group.WORLD)
    for step in range(5):
        tokens, tasks = rows(step, rank)
        losses = model(tokens)
        if rank == DEAD and step == 2:
            os._exit(9)
        try:
            aligner.backward(losses, tasks)
        except RuntimeError as error:
            (folder / f"error{rank}").write_text(str(error))
            os._exit(1)

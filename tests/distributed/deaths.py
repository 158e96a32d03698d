"""A process that dies in the middle of training."""

import os

import torch.distributed as dist

from gradvac import Aligner, GradVac
from gradvac.engine import distributed

from .problems import (
    TASKS,
    Deep,
    Rows,
    made,
    rows,
    sharded,
)
from .processes import World

DEAD = 1
KINDS = ("replicas", "shards", "midway")


def train_until_one_dies(rank: int, kind: str) -> None:
    """Three processes; one of them leaves without a word before its third backward, or in it."""
    if kind == "midway":  # more buckets than are in flight: the others wait within their backward
        distributed.BUCKET_BYTES = 1
    if kind == "shards":
        model = sharded(World(rank, 3, dist.group.WORLD), made(Rows))
        aligner = Aligner(model, TASKS, GradVac())
    else:
        model = made(Deep if kind == "midway" else Rows)
        aligner = Aligner(model, TASKS, GradVac(), process_group=dist.group.WORLD)
    for step in range(5):
        tokens, tasks = rows(step, rank)
        losses = model(tokens)
        if rank == DEAD and step == 2:
            if kind == "midway":
                losses.register_hook(lambda _: os._exit(9))
            else:
                os._exit(9)
        aligner.backward(losses, tasks)

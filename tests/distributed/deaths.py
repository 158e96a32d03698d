"""A process that dies in the middle of training."""

import os
from pathlib import Path

from gradvac import Aligner, GradVac

from .problems import TASKS, Rows, made, rows
from .processes import join_world

DEAD = 1


def train_until_one_dies(rank: int, folder: Path) -> None:
    """Three processes; one of them leaves without a word before its third step."""
    import torch.distributed as dist

    join_world(rank, 3, folder)
    model = made(Rows)
    aligner = Aligner(model, TASKS, GradVac(), process_group=dist.group.WORLD)
    for step in range(5):
        if rank == DEAD and step == 2:
            os._exit(9)
        tokens, tasks = rows(step, rank)
        try:
            aligner.backward(model(tokens), tasks)
        except RuntimeError as error:
            (folder / f"error{rank}").write_text(str(error))
            os._exit(1)

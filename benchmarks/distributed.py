"""Step time and traffic of an aligned step in several processes, relative to plain DDP.

    OMP_NUM_THREADS=1 python benchmarks/distributed.py --processes 2 --tasks 1 2 4

On GPUs, under torchrun, with one process per GPU:

    torchrun --nproc-per-node 1 benchmarks/distributed.py --device cuda --width 1024 --rows 4096
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradvac import Aligner, GradVac


def timed(step: Callable[[], None], device: str, num: int) -> float:
    """Median seconds of a step, all processes waited for."""
    found = []
    for number in range(num + 3):
        dist.barrier()
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def work(rank: int, size: int, where: str | None, options: argparse.Namespace) -> None:
    """One process."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if where is None:
        dist.init_process_group()
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    torch.manual_seed(0)
    width, device = options.width, options.device
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(options.layers)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    torch.manual_seed(rank)
    rows = torch.randn(options.rows, width, device=device)
    names = [f"task{n}" for n in range(max(max(options.tasks), size))]

    def plain() -> None:
        model.zero_grad()
        model(rows).square().mean(1).sum().backward()

    seconds = {"plain": timed(plain, device, options.steps)}
    num_bytes = sum(p.nbytes for p in model.parameters()) * 2 * (size - 1) / size
    table = []
    for num_tasks in options.tasks:
        aligner = Aligner(model, names, GradVac())
        places = [rank + n * num_tasks // options.rows for n in range(options.rows)]
        own = [names[place % len(names)] for place in places]

        def aligned(aligner: Aligner = aligner, own: list[str] = own) -> None:
            model.zero_grad()
            aligner.backward(model(rows).square().mean(1), own)

        taken = timed(aligned, device, options.steps)
        ranks = aligner._exchange.ranks
        ranks.sent.clear()
        aligned()
        sent = sum(ranks.sent.values()) / num_bytes if num_bytes else 1.0
        table.append({"tasks": num_tasks, "time": taken / seconds["plain"], "sent": sent})
    if rank == 0:
        print(f"{size} processes, {width} wide, {options.layers} layers, {options.rows} rows each")
        print(f"plain DDP {seconds['plain'] * 1e3:.1f} ms; relative to it:")
        for row in table:
            ratios = f"time {row['time']:.2f}, sent {row['sent']:.3f}"
            print(f"  {row['tasks']:3} tasks per process: {ratios}")
        if options.json:
            with open(options.json, "w") as file:
                json.dump(table, file)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, unless torchrun did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(0, 0, None, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        args = (options.processes, f"file://{folder}/rendezvous", options)
        mp.spawn(work, args, options.processes)


if __name__ == "__main__":
    main()

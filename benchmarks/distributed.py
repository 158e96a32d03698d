"""Step time and traffic of an aligned step in several processes, relative to plain DDP or FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/distributed.py --processes 2 --tasks 1 2 4 --steps 15

On GPUs, under torchrun, with one process per GPU:

    torchrun --nproc-per-node 1 benchmarks/distributed.py --device cuda --width 1024 --rows 4096

All kinds of step take turns, and each is timed by its fastest: other work on the machine only adds.
Seconds of the processor that a process uses, on all its threads, are told too: on a busy machine
they say more than those of the clock.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradvac import Aligner, GradVac, Sum

Step = Callable[[], None]


def build(how: str, options: argparse.Namespace) -> nn.Module:
    """The same model in every process, whole or in shards."""
    torch.manual_seed(0)
    width, device = options.width, options.device
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(options.layers)]
    model = nn.Sequential(*layers).to(device)
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sent_plainly(how: str, model: nn.Module) -> float:
    """Bytes of gradients that a process sends in a plain step: all-reduce or reduce-scatter."""
    size = dist.get_world_size()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return (2 if how == "ddp" else 1) * gradients * (size - 1) / size


def steps_of(
    how: str, options: argparse.Namespace
) -> tuple[dict[str, Step], dict[str, Aligner], float]:
    """Kinds of step by name, the aligners of those that have one, and what plain ones send."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build(how, options)
    torch.manual_seed(rank)
    rows = torch.randn(options.rows, options.width, device=options.device)
    names = [f"task{n}" for n in range(max(max(options.tasks), size))]

    def plain() -> None:
        model.zero_grad()
        model(rows).square().mean(1).sum().backward()

    steps: dict[str, Step] = {"plain": plain}
    aligners: dict[str, Aligner] = {}
    for num_tasks in options.tasks:
        aligner = Aligner(model, names, GradVac())
        places = [rank + n * num_tasks // options.rows for n in range(options.rows)]
        own = [names[place % len(names)] for place in places]

        def aligned(aligner: Aligner = aligner, own: list[str] = own) -> None:
            model.zero_grad()
            aligner.backward(model(rows).square().mean(1), own)

        steps[str(num_tasks)] = aligned
        aligners[str(num_tasks)] = aligner
    return steps, aligners, sent_plainly(how, model)


def difference(how: str, options: argparse.Namespace) -> float:
    """How far gradients with Sum are from plain ones, which they should equal, relatively."""
    model = build(how, options)
    torch.manual_seed(1 + dist.get_rank())
    rows = torch.randn(options.rows, options.width, device=options.device)
    aligner = Aligner(model, ["even", "odd"], Sum())
    aligner.backward(model(rows).square().mean(1), [n % 2 for n in range(len(rows))])
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(rows).square().mean(1).sum().backward()
    pairs = zip(found, model.parameters(), strict=True)
    whole = [[getattr(g, "full_tensor", lambda g=g: g)() for g in (a, b.grad)] for a, b in pairs]
    return max(float((a - b).norm() / b.norm()) for a, b in whole)


def timed(steps: Mapping[str, Step], device: str, num: int) -> dict[str, tuple[float, float]]:
    """The least of several turns of every kind of step: seconds of the clock, of the processor."""
    fastest = dict.fromkeys(steps, (float("inf"), float("inf")))
    for turn in range(num + 3):
        for name, step in steps.items():
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:  # the first ones look at the graph
                taken = time.perf_counter() - begin, time.process_time() - used
                fastest[name] = min(fastest[name][0], taken[0]), min(fastest[name][1], taken[1])
    return fastest


def measure(how: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Time and traffic of aligned steps over plain ones."""
    steps, aligners, plain_bytes = steps_of(how, options)
    seconds = timed(steps, options.device, options.steps)
    table = []
    for name, aligner in aligners.items():
        assert aligner._exchange is not None
        sent = aligner._exchange.ranks.sent
        sent.clear()
        steps[name]()
        ratio = sum(sent.values()) / plain_bytes if plain_bytes else 1.0
        clock, used = (a / b for a, b in zip(seconds[name], seconds["plain"], strict=True))
        row: dict[str, float] = {
            "tasks": int(name),
            "time": clock,
            "processor": used,
            "sent": ratio,
        }
        table.append(row | {"plain_ms": 1e3 * seconds["plain"][0]})
    return table


def work(rank: int, size: int, where: str | None, options: argparse.Namespace) -> None:
    """One process."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if where is None:
        dist.init_process_group()
    else:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    differences = {how: difference(how, options) for how in options.kinds}
    tables = {how: measure(how, options) for how in options.kinds}
    if dist.get_rank() == 0:
        shape = f"{options.width} wide, {options.layers} layers, {options.rows} rows each"
        print(f"{dist.get_world_size()} processes on {options.device}, {shape}")
        for how, table in tables.items():
            print(f"{how}: gradients with Sum are plain ones to {differences[how]:.1e}, relatively")
            print(f"plain {how} {table[0]['plain_ms']:.1f} ms; relative to it:")
            for row in table:
                times = f"time {row['time']:.2f}, processor {row['processor']:.2f}"
                ratios = f"{times}, sent {row['sent']:.3f}"
                print(f"  {row['tasks']:3} tasks per process: {ratios}")
        if options.json:
            with open(options.json, "w") as file:
                json.dump(tables, file)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, unless torchrun did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", choices=("ddp", "fsdp2"), default=["ddp", "fsdp2"])
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

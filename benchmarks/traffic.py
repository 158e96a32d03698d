"""What processes send each other in a step: counted for a few, calculated and simulated for many.

    OMP_NUM_THREADS=1 python benchmarks/traffic.py

First, real processes (Gloo, on this machine) count the bytes that their collectives send, beside
the formula. Then a step of many processes is played through: gradients become ready bucket by
bucket, collectives wait for the link, and what is not done when the backward ends is waited for.
The machine it plays on is written in `Cluster`: change it to yours. Nothing of that was measured.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradvac import Aligner, GradVac

TASKS = [f"task{n}" for n in range(8)]
WIDTH, LAYERS, ROWS = 96, 4, 16


# -- counted -------------------------------------------------------------------------------------


def count(rank: int, size: int, where: str, out: str) -> None:
    """One of a few real processes: bytes sent in a step, over those of the plain gradients."""
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    torch.manual_seed(0)
    found = []
    for kind in ("ddp", "fsdp2"):
        own = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        num_bytes = sum(p.nbytes for p in own.parameters()) * (size - 1) / size
        if kind == "ddp":
            model: nn.Module = DistributedDataParallel(own)
        else:
            model = fully_shard(own, mesh=init_device_mesh("cpu", (size,)))
        values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
        for num_tasks in (1, 2, 4):
            aligner = Aligner(model, TASKS, GradVac())
            tasks = [(rank + n % num_tasks) % len(TASKS) for n in range(ROWS)]
            aligner.backward(model(values).square().sum(1), tasks)
            assert aligner._exchange is not None
            sent = sum(aligner._exchange.ranks.sent.values())
            found.append((kind, num_tasks, sent / num_bytes / (2 if kind == "ddp" else 1)))
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def print_counted(sizes: Sequence[int]) -> None:
    """A table of counted ratios beside the formula."""
    print(
        f"counted: {LAYERS} layers of {WIDTH} x {WIDTH} in float32, 8 tasks, small words included"
    )
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/found"
            mp.spawn(count, (size, f"file://{folder}/rendezvous", out), size)
            found = torch.load(out)
        for kind, num_tasks, ratio in found:
            formula = (num_tasks + 1) / 2 if kind == "ddp" else num_tasks
            print(f"  {kind:5} W={size} m={num_tasks}: {ratio:.3f}, by the formula {formula:.3f}")


# -- simulated -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """A machine to play on.

    Attributes:
        per_node: Processes of a node.
        inside: Bytes per second that a process sends within its node.
        between: Bytes per second that it sends to other nodes.
        start: Seconds before the first byte of a collective, for every hop of it.
        message: Seconds that one of many messages adds.
        flops: Of one process.
    """

    per_node: int = 8
    inside: float = 300e9
    between: float = 40e9
    start: float = 5e-6
    message: float = 1e-6
    flops: float = 400e12

    def nodes(self, size: int) -> int:
        """Nodes of so many processes."""
        return max(1, size // self.per_node)

    def reduced(self, num_bytes: float, size: int, rounds: int) -> "Sent":
        """A reduction or a gathering: within the nodes, and a share of it by each between them."""
        near, nodes = min(size, self.per_node), self.nodes(size)
        inside = rounds * num_bytes * (near - 1) / near
        between = rounds * num_bytes / near * (nodes - 1) / nodes
        hops = rounds * (near - 1 + nodes.bit_length() - 1)
        return Sent(inside / self.inside + between / self.between + hops * self.start, between)

    def all_to_all(self, num_bytes: float, size: int) -> "Sent":
        """Every process to every other, over both links at once; a message for each."""
        near = min(size, self.per_node)
        inside, between = num_bytes * (near - 1) / size, num_bytes * (size - near) / size
        links = max(inside / self.inside, between / self.between)
        return Sent(links + self.start + (size - 1) * self.message, between)

    def by_node(self, num_bytes: float, size: int, tasks_of_node: int) -> "Sent":
        """Sums by task within the nodes, then an all-to-all of those that have the same place."""
        near, nodes = min(size, self.per_node), self.nodes(size)
        between = num_bytes / near * tasks_of_node * (nodes - 1) / nodes
        links = num_bytes * (near - 1) / near / self.inside + between / self.between
        return Sent(links + 2 * self.start + (near + nodes) * self.message, between)


@dataclass(frozen=True)
class Sent:
    """Seconds that a collective takes, and bytes that a process sends to other nodes."""

    seconds: float
    between: float


@dataclass(frozen=True)
class Job:
    """What is trained: the paper's larger model, by default.

    Attributes:
        parameters: Their number, P.
        itemsize: Bytes of a gradient.
        tokens: Of a process, in one step.
        bucket: Bytes that are sent at once.
        tasks: T.
        components: K.
    """

    parameters: float = 343e6
    itemsize: int = 4
    tokens: int = 8192
    bucket: float = 2.0**25
    tasks: int = 25
    components: int = 14

    @property
    def num_bytes(self) -> float:
        """Of all gradients."""
        return self.parameters * self.itemsize

    @property
    def num_buckets(self) -> int:
        """Collectives that all gradients take."""
        return max(1, round(self.num_bytes / self.bucket))

    def backward(self, cluster: Cluster) -> float:
        """Seconds of a backward."""
        return 4 * self.parameters * self.tokens / cluster.flops


def played(job: Job, cluster: Cluster, of_bucket: Sent, after: Sent) -> tuple[float, float]:
    """Seconds that are waited for when the backward ends, and gigabytes sent to other nodes.

    Args:
        job: What is trained.
        cluster: Where.
        of_bucket: A bucket's collective.
        after: What follows the backward.
    """
    backward, num = job.backward(cluster), job.num_buckets
    link = 0.0
    for bucket in range(num):
        link = max(link, backward * (bucket + 1) / num) + of_bucket.seconds
    waited = link - backward + after.seconds
    return waited, (num * of_bucket.between + after.between) / 1e9


def print_played(sizes: Sequence[int], job: Job, cluster: Cluster) -> None:
    """What a step waits for, for several kinds of it."""
    bucket, every = job.num_bytes / job.num_buckets, job.num_bytes
    print(f"\nsimulated: {job}\non {cluster}")
    print(
        f"waited for after a backward of {1e3 * job.backward(cluster):.0f} ms; sent between nodes"
    )
    for size in sizes:
        numbers = 8 * job.components * job.tasks * (job.tasks + 1)  # Gram matrices and weights
        small = cluster.reduced(numbers, size, 3)
        gathered = cluster.reduced(every, size, 1)
        both = Sent(small.seconds + gathered.seconds, small.between + gathered.between)
        kinds = {
            "plain DDP": (cluster.reduced(bucket, size, 2), Sent(0.0, 0.0)),
            "DDP, m=1": (cluster.all_to_all(bucket, size), both),
            "DDP, m=4": (cluster.all_to_all(4 * bucket, size), both),
            "plain FSDP2": (cluster.reduced(bucket, size, 1), Sent(0.0, 0.0)),
            "FSDP2, m=1": (cluster.all_to_all(bucket, size), small),
            "FSDP2, m=4": (cluster.all_to_all(4 * bucket, size), small),
            "FSDP2, m=1, sums by node": (cluster.by_node(bucket, size, cluster.per_node), small),
            "FSDP2, one task per node, sums by node": (cluster.by_node(bucket, size, 1), small),
        }
        for name, collectives in kinds.items():
            waited, sent = played(job, cluster, *collectives)
            print(f"  W={size:4} {name}: {1e3 * waited:.1f} ms, {sent:.2f} GB")


def main() -> None:
    """Count, then play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--play", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--bucket", type=float, default=2.0**25)
    options = parser.parse_args()
    print_counted(options.count)
    print_played(options.play, Job(bucket=options.bucket), Cluster())


if __name__ == "__main__":
    main()

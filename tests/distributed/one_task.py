"""Checks of processes that have one task each: any model, compiled or not."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gradvac import Aligner, Alignment, GradVac

from .problems import (
    TASKS,
    Rows,
    alone,
    assert_same,
    full,
    made,
    replica,
    rows,
    trained,
)
from .processes import Check, World


class Coupled(nn.Module):
    """Every row depends on all others, and one branch is not always taken.

    Shifts that the mean takes away again would have gradients of rounding, which Adam would make
    steps of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh())
        self.branch, self.head = nn.Linear(7, 7, bias=False), nn.Linear(7, 2)

    def forward(self, tokens: Tensor, branch: bool = True) -> Tensor:
        deep = self.body(self.table(tokens))
        deep = self.branch(deep) if branch else deep
        return self.head(deep - deep.mean(0)).square().sum(1)


def task_of(step: int, rank: int) -> str:
    """Two processes may have the same, and some tasks nobody has."""
    return TASKS[(rank // 2 + step) % len(TASKS)]


def batch(step: int, rank: int) -> tuple[Tensor, bool]:
    """The tokens of a process, and which way they take."""
    return rows(step, rank)[0], bool((step + rank) % 2)


def wanted(world: World, single: nn.Module, step: int) -> dict[str, Tensor]:
    """The losses of all processes in one, by task; every batch by itself."""
    losses: dict[str, Tensor] = {}
    for rank in range(world.size):
        task, own = task_of(step, rank), single(*batch(step, rank)).sum() / world.size
        losses[task] = losses[task] + own if task in losses else own
    return losses


def rows_that_mix(world: World, shard: bool, compiled: bool) -> None:
    """Batch normalisation and differences to the mean, per process: each has its own task."""
    own, single = made(Coupled), made(Coupled)
    if compiled and shard:
        own.body.compile(backend="aot_eager")
    if shard:
        mesh = DeviceMesh.from_group(world.group, "cpu")
        fully_shard(own.body, mesh=mesh)
        model = fully_shard(own, mesh=mesh)
    else:
        model = replica(world, own, find_unused_parameters=True)
    aligner = Aligner(model, TASKS, GradVac(beta=0.1))
    called = torch.compile(model, backend="aot_eager") if compiled and not shard else model
    reference = alone(single, GradVac(beta=0.1), engine="per_task")

    def mine(step: int) -> Alignment:
        losses = called(*batch(step, world.rank))
        return aligner.backward(losses, [task_of(step, world.rank)] * len(losses))

    found = trained(model, mine)
    theirs = trained(single, lambda step: reference.backward(wanted(world, single, step)))
    assert_same(model, single)
    for here, there in zip(found, theirs, strict=True):
        assert here.tasks == there.tasks
        torch.testing.assert_close(here.weights, there.weights)
    assert "so a plain backward" in repr(aligner)


def more_tasks_than_processes(world: World, shard: bool) -> None:
    """Every process goes through several tasks, a micro-batch each."""
    own, single = made(Rows), made(Rows)
    if shard:
        model = fully_shard(own, mesh=DeviceMesh.from_group(world.group, "cpu"))
    else:
        model = replica(world, own)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    for step in range(3):
        is_last = step == 2
        if shard:
            model.set_requires_gradient_sync(is_last)
        with nullcontext() if shard or is_last else model.no_sync():
            losses = model(rows(step, world.rank)[0])
            task = TASKS[(step + 2 * world.rank) % 4]
            found = aligner.backward(losses, [task] * len(losses), accumulate=not is_last)
    every = [(step, rank) for step in range(3) for rank in range(world.size)]
    for step, rank in every:
        losses = single(rows(step, rank)[0]) / world.size
        last = (step, rank) == every[-1]
        task = TASKS[(step + 2 * rank) % 4]
        there = reference.backward(losses, [task] * len(losses), accumulate=not last)
    assert found.tasks == there.tasks
    assert len(found.tasks) > world.size
    torch.testing.assert_close(found.gram, there.gram)
    for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad, rtol=0, atol=1e-12)


def sends_while_the_backward_runs(world: World) -> None:
    """The exchange of the last layers has begun when the first ones are differentiated."""
    from gradvac.engine import distributed

    def sent_before_the_first_layer(num_tasks: int) -> int:
        model = made(Rows)
        aligner = Aligner(model, TASKS, GradVac(), process_group=world.group)
        sent: list[int] = []

        def seen(kept: Tensor) -> Tensor:
            sent.append(aligner._exchange.num_sent)
            return kept

        for step in range(3):  # the first two are verified, and send at their end
            tokens = rows(step, world.rank)[0]
            # Its tokens are read when the backward has come so far; hooks would be measured.
            with saved_tensors_hooks(lambda kept: kept, seen):
                deep = model.table(tokens)
            losses = model.head(model.body(deep)).square().sum(1)
            aligner.backward(losses, [n % num_tasks for n in range(len(tokens))])
        return sent[-1]

    kept, distributed.BUCKET_BYTES = distributed.BUCKET_BYTES, 1
    try:
        assert sent_before_the_first_layer(1) == 6
        assert sent_before_the_first_layer(2) == 6
    finally:
        distributed.BUCKET_BYTES = kept


def traffic(world: World) -> None:
    """Within 1 % of what DistributedDataParallel alone sends, besides K x T x T numbers."""
    torch.manual_seed(1)
    layers = [nn.Linear(40, 40, dtype=torch.float64) for _ in range(4)]
    counted, model = (replica(world, nn.Sequential(*copy.deepcopy(layers))) for _ in range(2))
    plain = 0

    def count(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal plain
        plain += 2 * (world.size - 1) * bucket.buffer().nbytes // world.size
        buffer = bucket.buffer().div_(world.size)
        work = dist.all_reduce(buffer, group=world.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    counted.register_comm_hook(None, count)
    values = torch.randn(5, 40, dtype=torch.float64) + world.rank
    counted(values).square().sum().backward()
    aligner = Aligner(model, TASKS, GradVac())
    aligner.backward(model(values).square().sum(1), [world.rank] * 5)
    sent = aligner._exchange.ranks.sent
    large = sent["all_to_all"] + sent["all_gather"]
    assert plain <= large < 1.01 * plain
    assert sum(sent.values()) - large <= 8 * 3 * len(aligner.components) * world.size**2


def in_autocast(world: World) -> None:
    """Half precision where autocast wants it: Sum is what DistributedDataParallel does."""
    model, plain = (replica(world, made(Rows, torch.float32)) for _ in range(2))
    aligner = Aligner(model, TASKS, "sum")
    for step in range(3):
        tokens, tasks = rows(step, world.rank)
        for own in (model, plain):
            own.zero_grad()
        with torch.autocast("cpu", torch.float16):
            here, there = model(tokens), plain(tokens)
        if step == 1:
            tasks = torch.zeros_like(tasks)
        aligner.backward(here, tasks)
        there.sum().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, other.grad, rtol=2e-2, atol=2e-2)


def checks() -> dict[str, tuple[Check, int]]:
    """By name: a check, and how many processes run it."""
    found: dict[str, tuple[Check, int]] = {}
    for shard in (False, True):
        where = "FSDP2" if shard else "DDP"
        mixing: Callable[..., None] = partial(rows_that_mix, shard=shard)
        found[f"{where}, rows that mix"] = (partial(mixing, compiled=False), 4)
        found[f"{where}, compiled"] = (partial(mixing, compiled=True), 2)
        found[f"{where}, more tasks than processes"] = (
            partial(more_tasks_than_processes, shard=shard),
            2,
        )
    for check in (sends_while_the_backward_runs, traffic, in_autocast):
        found[check.__name__.replace("_", " ")] = (check, 3)
    return {f"one task each: {name}": own for name, own in found.items()}

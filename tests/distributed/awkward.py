"""Checks of what is seldom met: odd parameters, and processes that change in the middle."""

import copy
import dataclasses
import math
import warnings
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gradvac import Aligner, GradVac, Sum, TorchJD, Weighing

from .problems import (
    TASKS,
    Deep,
    Rows,
    all_rows,
    alone,
    assert_equal_everywhere,
    assert_same,
    assert_trained_alike,
    full,
    made,
    placed,
    replica,
    rows,
    sharded,
)
from .processes import Check, World


def some_tasks(rank: int, num_rows: int, num_tasks: int) -> list[int]:
    """Tasks of the rows of a process, of which it has so many."""
    return [(row % num_tasks + rank) % len(TASKS) for row in range(num_rows)]


def frozen_after_the_forward(world: World, shard: bool) -> None:
    """In one process, or in all of them: what is frozen contributes nothing there."""
    model, single = placed(world, made(Rows), shard), made(Rows)
    own = model.module if isinstance(model, DistributedDataParallel) else model
    aligner, reference = Aligner(model, TASKS), alone(single, GradVac(), engine="per_task")
    for num_tasks, frozen in ((1, {1}), (2, {1}), (1, set(range(world.size)))):
        model.zero_grad()
        single.zero_grad()
        losses = model(rows(0, world.rank)[0])
        own.head.weight.requires_grad_(world.rank not in frozen)
        aligner.backward(losses, some_tasks(world.rank, len(losses), num_tasks))
        own.head.weight.requires_grad_(True)

        every, tasks = [], []
        for rank in range(world.size):
            tokens = rows(0, rank)[0]
            head = single.head.weight.detach() if rank in frozen else single.head.weight
            deep = single.body(single.table(tokens))
            every.append(nn.functional.linear(deep, head, single.head.bias).square().sum(1))
            tasks += some_tasks(rank, len(tokens), num_tasks)
        reference.backward(torch.cat(every) / world.size, tasks)
        for parameter, other in zip(own.parameters(), single.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if other.grad is not None:
                found = full(parameter.grad)
                torch.testing.assert_close(found, other.grad, rtol=0, atol=1e-12)


def changed_in_one(world: World, shard: bool) -> None:
    """A setting that one process changes later is an error in all; none waits for another."""
    model = placed(world, made(Rows), shard)
    aligner = Aligner(model, TASKS)
    if world.rank == 1 and shard:
        model.set_gradient_divide_factor(2.0)
    elif world.rank == 1:
        model.register_comm_hook(None, allreduce_hook)
    tokens, tasks = rows(0, world.rank)
    what = "set_gradient_divide_factor" if shard else "register_comm_hook"
    with pytest.raises(ValueError if world.rank == 1 else RuntimeError, match=what):
        aligner.backward(model(tokens), tasks)


def granularities(world: World, engine: str) -> None:
    """Components of all sizes: Gram matrices and targets are those of one process."""
    for granularity in ("whole_model", "all_matrix"):
        model, single = made(Rows), made(Rows)
        names = ["tr", "cs", "hi", "fr"]  # rules take them by name, however they are listed
        aligner, reference = (
            Aligner(own, names, GradVac(beta=0.5), granularity, engine, process_group=group)
            for own, group in ((model, world.group), (single, None))
        )
        for step in range(2):
            tokens, tasks = rows(step, world.rank)
            found = aligner.backward(model(tokens), tasks)
            tokens, tasks = all_rows(world, step)
            wanted = reference.backward(single(tokens) / world.size, tasks)
        for name in ("gram", "weights", "target"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
        for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-12)


class Odd(nn.Module):
    """Parameters that are complex, transposed, empty, scalar, sparse, or channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, sparse=True)
        self.turned = nn.Parameter(torch.randn(7, 7).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.turns = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.filters = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        deep = self.table(tokens).tanh() @ self.turned
        filtered = self.filters(deep.view(len(tokens), 1, 7, 1)).flatten(1)
        turned = (deep * self.turns.conj()).abs() * self.scalar + self.empty.sum()
        return turned.square().sum(1) + filtered.square().sum(1)


def odd_parameters(world: World) -> None:
    """Whatever a parameter is, and however it lies in memory."""
    torch.manual_seed(1)
    single = Odd()
    model = replica(world, Odd())
    model.module.load_state_dict(single.state_dict())
    aligner, reference = Aligner(model, TASKS), alone(single, GradVac(), engine="per_task")
    for num_tasks in (1, 2):
        model.zero_grad()
        single.zero_grad()
        tokens = [rows(0, rank)[0] for rank in range(world.size)]
        tasks = [some_tasks(rank, len(own), num_tasks) for rank, own in enumerate(tokens)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some have no fast path
            aligner.backward(model(tokens[world.rank]), tasks[world.rank])
            every = [task for own in tasks for task in own]
            reference.backward(single(torch.cat(tokens)) / world.size, every)
        for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
            assert parameter.grad.stride() == other.grad.stride()


def functions_of_ones_own(world: World) -> None:
    """A rule that holds a function is the same rule wherever the function lies in memory."""
    several = [lambda gram: gram.new_ones(len(gram)) for _ in range(world.size)]
    model = replica(world, made(Rows))
    tokens, tasks = rows(0, world.rank)
    Aligner(model, TASKS, TorchJD(several[world.rank])).backward(model(tokens), tasks)


def compiled_before_it_is_wrapped(world: World) -> None:
    """Names of components are the model's own, however it is wrapped."""
    model = replica(world, torch.compile(made(Rows), backend="eager"))
    assert set(Aligner(model, TASKS).components) == set(alone(made(Rows), GradVac()).components)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, values: Tensor) -> Tensor:
        return (values * self.scale).sum(1)


def half_precision(world: World) -> None:
    """What fits as a mean need not fit as a sum: that is taken in float32."""
    model = replica(world, made(Scale, torch.float16))
    aligner = Aligner(model, TASKS, Sum())
    aligner.backward(model(torch.full((1, 3), 4e4, dtype=torch.float16)), [0])
    assert model.module.scale.grad.tolist() == [4e4] * 3


class Empty(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.empty.sum()


def empty_shards(world: World) -> None:
    """A parameter without numbers has shards without numbers."""
    model, single = sharded(world, made(Empty)), made(Empty)
    aligner, reference = Aligner(model, TASKS), alone(single, GradVac())
    assert_trained_alike(world, (model, aligner), (single, reference))
    assert model.empty.grad.shape == (0, 3)


class Drawn(Sum):
    """Draws weights in every process for itself."""

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        found = super().weigh(components, gram)
        return dataclasses.replace(found, weights=found.weights * torch.rand(gram.shape[:2]))


def weights_that_are_drawn(world: World) -> None:
    """Replicas stay equal whatever a rule draws: all take the weights of the first process."""
    model = replica(world, made(Rows))
    torch.manual_seed(world.rank)
    tokens, tasks = rows(0, world.rank)
    found = Aligner(model, TASKS, Drawn()).backward(model(tokens), tasks)
    assert_equal_everywhere(world, [found.weights, *(p.grad for p in model.parameters())])


def accumulated_in_the_dtype_that_is_sent(world: World) -> None:
    """Micro-batches of half precision are added up as FSDP2 does, not in half precision."""
    policy = MixedPrecisionPolicy(torch.float32, torch.float64)
    model, plain = (sharded(world, made(Deep), mp_policy=policy) for _ in range(2))
    aligner = Aligner(model, TASKS, Sum())
    for step in range(3):
        tokens = rows(step, world.rank)[0]
        plain.set_requires_gradient_sync(step == 2)
        plain(tokens).sum().backward()
        aligner.backward(model(tokens), [0] * len(tokens), accumulate=step < 2)
    assert_same(model, plain, of_grad=True)


def scaled(world: World, shard: bool) -> None:
    """An overflow in one process: all scalers skip the step, and clipping is the same in all."""
    model = placed(world, made(Rows, torch.float32), shard)
    aligner = Aligner(model, TASKS, GradVac())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        tokens, tasks = rows(step, world.rank)
        before = [full(parameter).detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        losses = model(tokens)
        if step == 1 and world.rank == 1:
            losses = losses * torch.where(torch.arange(len(losses)) == 0, math.inf, 1.0)
        aligner.backward(scaler.scale(losses), tasks)
        scaler.unscale_(optimizer)
        norm = full(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
        after = [full(parameter) for parameter in model.parameters()]
        is_skipped = all(map(torch.equal, before, after))
        assert is_skipped == (step == 1)
        assert_equal_everywhere(world, [norm.nan_to_num(), *after])
    assert aligner.state_dict()["step"] == 2


def outside_the_group(world: World) -> None:
    """A process that is not in a group cannot train in it."""
    group = dist.new_group([0, 1])
    if world.rank > 1:
        with pytest.raises(ValueError, match="process_group: "):
            Aligner(made(Rows), TASKS, process_group=group)


def divided_otherwise(world: World) -> None:
    """Tensor parallelism is refused by name, alone and within FSDP2; so is a mesh out of order."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    model = parallelize_module(nn.Sequential(*layers), mesh["tensor"], plan)
    replicas = DistributedDataParallel(copy.deepcopy(model), device_mesh=mesh["data"])
    for own, group in ((model, world.group), (model, None), (replicas, "auto")):
        with pytest.raises(ValueError, match=r"0\.weight .*tensor or expert"):
            Aligner(own, TASKS, process_group=group)
    with pytest.raises(ValueError, match=r"0\.weight .*fully_shard"):
        Aligner(fully_shard(model, mesh=mesh["data"]), TASKS)
    turned = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="in their order"):
        Aligner(fully_shard(made(Deep), mesh=turned), TASKS)


def checks() -> dict[str, tuple[Check, int]]:
    """By name: a check, and how many processes run it."""
    found: dict[str, tuple[Check, int]] = {}
    for check in (frozen_after_the_forward, changed_in_one, scaled):
        for shard in (False, True):
            where = "FSDP2" if shard else "DDP"
            name = f"{where}, {check.__name__.replace('_', ' ')}"
            found[name] = (partial(check, shard=shard), 2)
    for engine in ("one_backward", "per_task"):
        found[f"granularities, {engine}"] = (partial(granularities, engine=engine), 3)
    others = (
        odd_parameters,
        half_precision,
        compiled_before_it_is_wrapped,
        functions_of_ones_own,
        empty_shards,
        weights_that_are_drawn,
        accumulated_in_the_dtype_that_is_sent,
    )
    for check in others:
        found[check.__name__.replace("_", " ")] = (check, 2)
    for check in (outside_the_group, divided_otherwise):
        found[check.__name__.replace("_", " ")] = (check, 4)
    return found

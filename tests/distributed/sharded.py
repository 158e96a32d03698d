"""Checks of models that FSDP2 divides among the processes."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from gradvac import Aligner, GradVac, Sum

from .problems import (
    TASKS,
    Deep,
    Rows,
    Tied,
    all_rows,
    alone,
    assert_equal_everywhere,
    assert_same,
    assert_trained_alike,
    made,
    rows,
    sharded,
    trained,
)
from .processes import Check, World


def mixed_rows(world: World, kind: type[nn.Module], engine: str, **options: object) -> None:
    """Rows of all tasks in one batch, in one backward where that was asked for."""
    model, single = sharded(world, made(kind), **options), made(kind)
    aligner = Aligner(model, TASKS, GradVac(beta=0.1), engine=engine)
    reference = alone(single, GradVac(beta=0.1))

    assert_trained_alike(world, (model, aligner), (single, reference))
    assert aligner.engine == engine
    assert "measured" not in repr(aligner)  # the hooks of FSDP2 leave rows where they are
    assert f"{world.size} shards, unsharded during the backward" in repr(aligner)
    assert all(p.to_local().numel() < p.numel() for p in model.parameters())


def sum_is_plain(world: World, kind: type[nn.Module], **options: object) -> None:
    """With Sum, gradients are those of FSDP2 alone; which works on afterwards."""
    model, plain = (sharded(world, made(kind), **options) for _ in range(2))
    aligner = Aligner(model, TASKS, Sum())
    for step in range(5):
        tokens, tasks = rows(step, world.rank)
        plain(tokens).sum().backward()
        if step < 3:
            aligner.backward(model(tokens), tasks)
        else:
            model(tokens).sum().backward()
        assert_same(model, plain, 1e-6 if "mp_policy" in options else 1e-12, of_grad=True)
        if step % 2:  # otherwise the next one is added
            model.zero_grad()
            plain.zero_grad()


def accumulated(world: World) -> None:
    """Micro-batches: ours, and those of torch around them."""
    model, single = sharded(world, made(Rows)), made(Rows)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    batches = [(step, rank) for step in range(3) for rank in range(world.size)]
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model.set_reshard_after_backward(step == 2)
        tokens, tasks = rows(step, world.rank)
        found = aligner.backward(model(tokens), tasks, accumulate=step < 2)
        assert all(p.grad is None for p in model.parameters()) == (step < 2)
    for step, rank in batches:
        tokens, tasks = rows(step, rank)
        is_last = (step, rank) == batches[-1]
        wanted = reference.backward(single(tokens) / world.size, tasks, accumulate=not is_last)
    torch.testing.assert_close(found.gram, wanted.gram)
    assert_same(model, single, of_grad=True)


def an_error_in_one(world: World) -> None:
    """An error in one process is an error in all, and the next step is as if it had not been."""
    model, single = sharded(world, made(Deep)), made(Deep)
    aligner = Aligner(model, TASKS, GradVac(), engine="one_backward")
    reference = alone(single, GradVac())
    tokens, tasks = rows(0, world.rank)

    def breaks(gradient: Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    def watch(_: nn.Module, __: object, deep: Tensor) -> None:
        if world.rank == 1 and is_late:  # in the middle of the backward
            deep.register_hook(breaks)

    handle = model.table.register_forward_hook(watch)
    for is_late in (False, True):
        own = tasks[:1] if world.rank == 1 and not is_late else tasks
        losses = model(tokens)
        with pytest.raises((ValueError, ZeroDivisionError, RuntimeError)) as caught:
            aligner.backward(losses, own)
        what = "on purpose" if is_late else "has 1 entries"
        assert what in str(caught.value)
        assert ("rank 1 could not" in str(caught.value)) == (world.rank != 1)
        assert all(p.grad is None for p in model.parameters())
    handle.remove()
    plain = sharded(world, made(Deep))
    for own in (model, plain):  # FSDP2 alone goes on too
        own(tokens).sum().backward()
    assert_same(model, plain, of_grad=True)
    model.zero_grad()
    aligner.backward(model(tokens), tasks)
    tokens, tasks = all_rows(world, 0)
    reference.backward(single(tokens) / world.size, tasks)
    assert_same(model, single, of_grad=True)


def without_rows(world: World) -> None:
    """A process without a batch runs its forward, as FSDP2 wants it, and gives no losses."""
    model, single = sharded(world, made(Rows)), made(Rows)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    tokens, tasks = rows(0, world.rank)
    losses = model(tokens)
    aligner.backward({} if world.rank == 1 else losses, None if world.rank == 1 else tasks)
    others = [rows(0, rank) for rank in range(world.size) if rank != 1]
    tokens, tasks = (torch.cat(parts) for parts in zip(*others, strict=True))
    reference.backward(single(tokens) / world.size, tasks)
    assert_same(model, single, of_grad=True)


def replicas_and_shards(world: World) -> None:
    """HSDP: shards within a node, replicas between nodes."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    model, single = sharded(world, made(Deep), mesh), made(Deep)
    plain = sharded(world, made(Deep), mesh)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    tokens, tasks = rows(0, world.rank)
    Aligner(plain, TASKS, Sum()).backward(plain(tokens), tasks)
    gradients = [p.grad.full_tensor() for p in plain.parameters()]
    plain.zero_grad()
    plain(tokens).sum().backward()
    for own, parameter in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad.full_tensor())

    assert_trained_alike(world, (model, aligner), (single, reference))
    assert_equal_everywhere(world, [p.full_tensor() for p in model.parameters()])
    if world.rank == 3:
        with torch.no_grad():
            plain.head.bias.to_local().add_(1e-9)
    with pytest.raises(ValueError, match=r"rank 3 and rank 1 .*shard 1 of head\.bias"):
        Aligner(plain, TASKS).backward(plain(tokens), tasks)


def alone_with_shards(world: World) -> None:
    """A job of one process: there is one shard of everything."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    mesh = DeviceMesh.from_group(groups[world.rank], "cpu")
    model, single = sharded(world, made(Deep), mesh), made(Deep)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    tokens, tasks = rows(0, world.rank)
    trained(model, lambda _: aligner.backward(model(tokens), tasks))
    trained(single, lambda _: reference.backward(single(tokens), tasks))
    assert all(type(p.grad) is type(p.data) for p in model.parameters())
    assert_same(model, single)


def traffic(world: World) -> None:
    """A process with m tasks sends m times what FSDP2's reduce-scatter sends."""
    model = sharded(world, made(Deep))
    padded = sum(-(-p.shape[0] // world.size) * p[0].numel() for p in model.parameters())
    plain = 8 * padded * (world.size - 1)
    for num_tasks in (1, 2, 4):
        aligner = Aligner(model, TASKS, GradVac())
        tokens = rows(0, world.rank)[0]
        tasks = [(n % num_tasks + world.rank) % len(TASKS) for n in range(len(tokens))]
        aligner.backward(model(tokens), tasks)
        sent = aligner._exchange.ranks.sent
        assert sent["all_to_all"] == num_tasks * plain
        assert sent["all_gather"] == 0
        assert sent["all_reduce"] + sent["broadcast"] <= 8 * 2 * len(aligner.components) * 4 * 6


def refusals(world: World) -> None:
    """What could not be exact is refused, with the fix."""
    mesh = DeviceMesh.from_group(world.group, "cpu")
    half = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2))
    ignoring = made(Rows)
    fully_shard(ignoring, mesh=mesh, ignored_params={ignoring.head.weight})
    offloading = fully_shard(made(Rows), mesh=mesh, offload_policy=CPUOffloadPolicy(False))
    halved = fully_shard(made(Deep), mesh=mesh)
    halved.set_gradient_divide_factor(2.0)
    hooked = fully_shard(made(Deep), mesh=mesh)
    hooked.set_all_reduce_hook(lambda _: None)
    cases: list[tuple[nn.Module, Mapping[str, object], str]] = [
        (half, {}, "0 .FSDPLinear.*fully_shard on the model itself"),
        (ignoring, {}, "head.weight .*not sharded"),
        (sharded(world, made(Rows)).requires_grad_(False), {}, "nothing to train"),
        (offloading, {}, "CPUOffloadPolicy"),
        (halved, {}, "set_gradient_divide_factor"),
        (hooked, {}, "set_all_reduce_hook"),
        (
            sharded(world, made(Rows)),
            {"process_group": world.group},
            "process_group: .*mesh of fully_shard",
        ),
        (sharded(world, made(Rows)), {"exact": False}, "exact: False"),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=message):
            Aligner(model, TASKS, **options)

    model = sharded(world, made(Rows))
    model.head.weight.requires_grad_(False)
    aligner = Aligner(model, TASKS)
    model.head.weight.requires_grad_(True)
    tokens, tasks = rows(0, world.rank)
    with pytest.raises(ValueError, match=r"head\.weight .*trainable"):
        aligner.backward(model(tokens), tasks)


def checks() -> dict[str, tuple[Check, int]]:
    """By name: a check, and how many processes run it."""
    found: dict[str, tuple[Check, int]] = {}
    for kind in (Rows, Tied, Deep):
        for stays in (True, False):
            how = "sharded again" if stays else "unsharded"
            found[f"{kind.__name__}, {how} after the forward"] = (
                partial(mixed_rows, kind=kind, engine="one_backward", reshard_after_forward=stays),
                3,
            )
    found["Deep, in pairs after the forward"] = (
        partial(mixed_rows, kind=Deep, engine="one_backward", reshard_after_forward=2),
        4,
    )
    found["per_task"] = (partial(mixed_rows, kind=Tied, engine="per_task"), 2)
    half = MixedPrecisionPolicy(torch.float32, torch.float64)
    found["Sum is plain"] = (partial(sum_is_plain, kind=Deep), 3)
    found["Sum is plain, tied"] = (partial(sum_is_plain, kind=Tied), 2)
    found["Sum is plain, mixed precision"] = (partial(sum_is_plain, kind=Deep, mp_policy=half), 3)
    for check in (accumulated, an_error_in_one, without_rows, traffic, refusals):
        found[check.__name__.replace("_", " ")] = (check, 3)
    found["replicas and shards"] = (replicas_and_shards, 4)
    found["alone with shards"] = (alone_with_shards, 4)
    return {f"FSDP2: {name}": own for name, own in found.items()}

"""What several processes have to show, each check a function that all of them run."""

import copy
import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from gradvac import MGDA, Aligner, GradNorm, GradVac, PCGrad, Rule, Sum, TorchJD, Weighing

from . import awkward, one_task, sharded
from .problems import (
    TASKS,
    Deep,
    Net,
    Rows,
    all_rows,
    alone,
    assert_equal_everywhere,
    assert_same,
    assert_trained_alike,
    divided,
    full,
    made,
    placed,
    replica,
    rows,
    together,
    tokens_by_task,
    trained,
)
from .processes import Check, World

RULES: dict[str, Callable[[], Rule]] = {
    "sum": Sum,
    "gradvac": lambda: GradVac(beta=0.1),
    "gradvac_some": lambda: GradVac(beta=0.1, vaccinated=["hi"], preserve_norm=True),
    "pcgrad": PCGrad,
    "mgda": lambda: MGDA("loss+"),
    "gradnorm": GradNorm,
    "torchjd": lambda: TorchJD("UPGrad"),
}


def equals_one_process(
    world: World,
    rule: Callable[[], Rule],
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    engine: str = "auto",
    shard: bool = False,
) -> None:
    """Four steps with Adam: W processes do what one does with all rows."""
    model, single = placed(world, made(Net, dtype), shard), made(Net, dtype)
    aligner = Aligner(model, TASKS, rule(), engine=engine)
    reference = alone(single, rule())

    found = trained(model, lambda step: aligner.backward(model(tokens_by_task(step, world.rank))))
    wanted = trained(
        single, lambda step: reference.backward(divided(single(together(world, step)), world.size))
    )

    assert_same(model, single, tolerance)
    for here, there in zip(found, wanted, strict=True):
        assert here.tasks == there.tasks
        torch.testing.assert_close(here.weights, there.weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(here.gram, there.gram, rtol=1e-4, atol=1e-5)
    assert_equal_everywhere(world, [full(parameter) for parameter in model.parameters()])
    assert_equal_everywhere(world, [here.weights for here in found])


def mixed_rows(world: World, engines: str) -> None:
    """Rows of all tasks in one batch; processes may end in different engines."""
    engine = engines if engines != "different" else ("one_backward", "per_task")[world.rank % 2]
    model, single = replica(world, made(Rows)), made(Rows)
    aligner = Aligner(model, TASKS, GradVac(beta=0.1), engine=engine)
    reference = alone(single, GradVac(beta=0.1))
    assert_trained_alike(world, (model, aligner), (single, reference))
    assert aligner.engine == ("one_backward" if engine == "auto" else engine)
    assert_equal_everywhere(world, list(model.parameters()))


class SeesParts(Sum):
    """Sums, and keeps the Gram matrices of the two halves of every task."""

    parts_per_task = 2

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        self.gram = gram
        return self.answer(gram)


def parts_of_tasks(world: World) -> None:
    """A row of each task in every process: they are in different parts, as in one process."""
    model, single = replica(world, made(Rows)), made(Rows)
    rule, reference = SeesParts(), SeesParts()
    tokens = torch.stack([rows(0, rank)[0][:2] for rank in range(world.size)])
    found = Aligner(model, TASKS, rule).backward(model(tokens[world.rank]), [0, 1])
    losses = divided({"all": single(tokens.flatten())}, world.size)["all"]
    wanted = alone(single, reference).backward(losses, [0, 1] * world.size)
    torch.testing.assert_close(rule.gram, reference.gram)
    assert bool((rule.gram.diagonal(dim1=1, dim2=2).amax(0) > 0).all())
    torch.testing.assert_close(found.gram, wanted.gram)
    assert_same(model, single, of_grad=True)


def one_falls_back(world: World) -> None:
    """Where rows of one process influence each other, that one goes on with per_task."""
    model, single = replica(world, made(Rows)), made(Rows)
    aligner, reference = (
        Aligner(model, TASKS, GradVac()),
        alone(single, GradVac(), engine="per_task"),
    )

    def coupled(losses: Tensor) -> Tensor:
        return losses * losses.mean()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tokens, tasks = rows(0, world.rank)
        losses = model(tokens)
        aligner.backward(coupled(losses) if world.rank == 1 else losses, tasks)
    assert any("continues with per_task" in str(one.message) for one in said) == (world.rank == 1)
    assert aligner.engine == ("per_task" if world.rank == 1 else "one_backward")

    everyone = [rows(0, rank) for rank in range(world.size)]
    losses = [single(tokens) for tokens, _ in everyone]
    losses[1] = coupled(losses[1])
    reference.backward(torch.cat(losses) / world.size, torch.cat([tasks for _, tasks in everyone]))
    for here, there in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=0, atol=1e-13)


def sum_is_plain(world: World, **options: bool) -> None:
    """With Sum, gradients are those of DistributedDataParallel alone; which works on afterwards."""
    model, plain = replica(world, made(Net), **options), replica(world, made(Net), **options)
    aligner = Aligner(model, TASKS, Sum())
    for step in range(3):
        tokens = tokens_by_task(step, world.rank)
        if not options.get("find_unused_parameters"):
            tokens = {task: tokens_by_task(step, world.rank).popitem()[1] for task in TASKS}
        for own in (model, plain):
            own.zero_grad()
        aligner.backward(model(tokens))
        sum(plain(tokens).values()).backward()
        for here, there in zip(model.parameters(), plain.parameters(), strict=True):
            assert (here.grad is None) == (there.grad is None)
            if here.grad is not None:
                torch.testing.assert_close(here.grad, there.grad, rtol=1e-12, atol=1e-14)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        sum(model(tokens).values()).backward()
        sum(plain(tokens).values()).backward()
        for here, there in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(here.grad, there.grad)


def without_rows(world: World) -> None:
    """A process without a batch takes part, with an empty mapping or an empty tensor."""
    model, single = made(Rows), made(Rows)
    aligner = Aligner(model, TASKS, GradVac(), process_group=world.group)
    reference = alone(single, GradVac())
    for nothing in ({}, torch.zeros(0)):
        for own in (model, single):
            own.zero_grad()
        if world.rank == 1:
            found = aligner.backward(nothing, [] if isinstance(nothing, Tensor) else None)
        else:
            tokens, tasks = rows(0, world.rank)
            found = aligner.backward(model(tokens), tasks)
        others = [rows(0, rank) for rank in range(world.size) if rank != 1]
        tokens, tasks = (torch.cat(parts) for parts in zip(*others, strict=True))
        wanted = reference.backward(single(tokens) / world.size, tasks)
        torch.testing.assert_close(found.gram, wanted.gram)
        for here, there in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(here.grad, there.grad)
    with pytest.raises(ValueError, match="no process"):
        aligner.backward({})


def accumulated(world: World) -> None:
    """Micro-batches, of which processes may have different numbers."""
    model, single = replica(world, made(Rows)), made(Rows)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    num_batches = [1 + rank for rank in range(world.size)]
    for step in range(num_batches[world.rank]):
        tokens, tasks = rows(step, world.rank)
        is_last = step == num_batches[world.rank] - 1
        found = aligner.backward(model(tokens), tasks, accumulate=not is_last)
        assert (found is None) != is_last
    for rank in range(world.size):
        for step in range(num_batches[rank]):
            tokens, tasks = rows(step, rank)
            is_last = rank == world.size - 1 and step == num_batches[rank] - 1
            wanted = reference.backward(single(tokens) / world.size, tasks, accumulate=not is_last)
    torch.testing.assert_close(found.gram, wanted.gram)
    for here, there in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad)


def not_finite(world: World) -> None:
    """An overflow in one process is seen by the scalers of all, and teaches no rule anything."""
    model = replica(world, made(Rows, torch.float32))
    aligner = Aligner(model, TASKS, GradVac(beta=0.5))
    tokens, tasks = rows(0, world.rank)
    aligner.backward(model(tokens), tasks)
    model.zero_grad()
    before = copy.deepcopy(aligner.state_dict())
    aligner.backward(model(tokens) * (math.inf if world.rank == 1 else 1.0), tasks)
    bad = [not bool(p.grad.isfinite().all()) for p in model.parameters()]
    assert any(bad)
    assert_equal_everywhere(world, [torch.tensor(bad)])
    after = aligner.state_dict()
    assert torch.equal(before["target"], after["target"])
    assert before["step"] == after["step"]
    model.zero_grad()
    aligner.backward(model(tokens), tasks)
    assert_equal_everywhere(world, [p.grad for p in model.parameters()])


def disagreements(world: World) -> None:
    """Processes that were set up differently: all of them say so, and name the one."""
    odd, tokens = world.rank == 1, rows(0, world.rank)

    def refused(what: str, model: nn.Module, *args: object, **options: object) -> None:
        aligner = Aligner(model, *args, process_group=world.group, **options)
        with pytest.raises(ValueError, match=rf"rank 1 and rank 0 differ in {what}"):
            aligner.backward(model(tokens[0]), tokens[1])

    refused("tasks", made(Rows), TASKS[::-1] if odd else TASKS)
    refused("rule", made(Rows), TASKS, GradVac(seed=int(odd)))
    refused("rule", made(Rows), TASKS, Sum() if odd else GradVac())
    refused("granularity", made(Rows), TASKS, Sum(), "all_matrix" if odd else "all_layer")
    refused("exact", made(Rows), TASKS, exact=not odd)
    changes = {
        "head.bias": lambda model: model.head.bias[0].add_(1e-9),
        "head.weight": lambda model: model.head.weight.neg_(),
        "body.0.weight": lambda model: model.body[0].weight.copy_(model.body[0].weight.flip(0)),
        "table.weight": lambda model: model.table.weight.mul_(2),
    }
    for name, change in changes.items():
        other = made(Rows)
        other.table.requires_grad_(False)
        if odd:
            with torch.no_grad():
                change(other)
        refused(f"the values of {re.escape(name)}", other, TASKS)
    other = made(Rows)
    if odd:
        other.more = nn.Linear(2, 2).requires_grad_(False)
    refused("parameters", other, TASKS)

    model = made(Rows)
    aligner = Aligner(model, TASKS, GradVac(), process_group=world.group)
    aligner.backward(model(tokens[0]), tokens[1])
    if odd:
        aligner.load_state_dict(aligner.state_dict() | {"step": 7})
    with pytest.raises(ValueError, match=r"rank 1 and rank 0 .*state of the rule"):
        aligner.backward(model(tokens[0]), tokens[1])


def an_error_in_one(world: World) -> None:
    """An error in one process is an error in all, and the next step is as if it had not been."""
    model = replica(world, made(Rows))
    aligner = Aligner(model, TASKS, GradVac())
    tokens, tasks = rows(0, world.rank)
    if world.rank == 1:
        with pytest.raises(ValueError, match=r"tasks_of_rows: .*1 entries"):
            aligner.backward(model(tokens), tasks[:1])
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 .*1 entries"):
            aligner.backward(model(tokens), tasks)
    assert all(p.grad is None for p in model.parameters())
    aligner.backward(model(tokens), tasks)
    assert_equal_everywhere(world, [p.grad for p in model.parameters()])


def approximate(world: World) -> None:
    """exact=False: products within processes only, and said so; Sum is exact all the same."""
    model, plain = replica(world, made(Rows)), replica(world, made(Rows))
    aligner = Aligner(model, TASKS, Sum(), exact=False)
    tokens, tasks = rows(0, world.rank)
    found = aligner.backward(model(tokens), tasks)
    plain(tokens).sum().backward()
    for here, there in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad)
    assert not found.exact
    assert "approximate" in repr(found)
    assert "approximate" in repr(aligner)

    wanted = torch.zeros_like(found.gram)
    for rank in range(world.size):
        own = made(Rows)
        tokens, tasks = rows(0, rank)
        local = alone(own, Sum()).backward(own(tokens) / world.size, tasks)
        where = torch.tensor([found.tasks.index(task) for task in local.tasks])
        wanted[:, where[:, None], where] += local.gram
    torch.testing.assert_close(found.gram, wanted)

    vaccinated = Aligner(model, TASKS, GradVac(target=0.5), exact=False)
    vaccinated.backward(model(tokens), tasks)
    assert_equal_everywhere(world, [p.grad for p in model.parameters()])


def hooks(world: World, shard: bool) -> None:
    """Hooks see the final gradient once: an optimizer in the backward."""
    model, single = placed(world, made(Deep), shard), made(Deep)
    aligner, reference = Aligner(model, TASKS, GradVac()), alone(single, GradVac())
    seen: list[Tensor] = []

    def descend(parameter: Tensor) -> None:
        seen.append(parameter)
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    for parameter in [*model.parameters(), *single.parameters()]:
        parameter.register_post_accumulate_grad_hook(descend)
    for each in (model, single):
        next(each.parameters()).register_hook(lambda gradient: 2 * gradient)
    for step in range(3):
        tokens, tasks = rows(step, world.rank)
        aligner.backward(model(tokens), tasks)
        tokens, tasks = all_rows(world, step)
        reference.backward(single(tokens) / world.size, tasks)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(seen) == 2 * 3 * len(list(model.parameters()))
    assert_same(model, single)


def traffic(world: World) -> None:
    """A process with m tasks sends (m + 1) / 2 of what an all-reduce of its gradients sends."""
    model = made(Rows)
    size = sum(p.nbytes for p in model.parameters())
    plain = 2 * size * (world.size - 1) / world.size
    tokens = rows(0, world.rank)[0]
    for num_tasks in (1, 2, 4):
        aligner = Aligner(model, TASKS, GradVac(), process_group=world.group)
        tasks = [(n % num_tasks + world.rank) % len(TASKS) for n in range(len(tokens))]
        aligner.backward(model(tokens), tasks)
        ranks = aligner._exchange.ranks
        first = ranks.sent["all_gather"]
        ranks.sent.clear()
        aligner.backward(model(tokens), tasks)
        assert ranks.sent["all_gather"] == first
        large = ranks.sent["all_to_all"] + first
        padding = (num_tasks + 1) * (world.size - 1) * 8
        assert abs(large - plain * (num_tasks + 1) / 2) <= padding
        small = sum(ranks.sent[kind] for kind in ("all_reduce", "broadcast", "words"))
        present = min(len(TASKS), world.size + num_tasks - 1)
        numbers = len(aligner.components) * present * (2 * present + 1)
        assert small <= 8 * (numbers + 2 * present + 4 * world.size)


def refusals(world: World) -> None:
    """What could not be exact is refused, with the fix."""
    half, delayed, ignoring = made(Rows), made(Rows), made(Rows)
    ignoring._ddp_params_and_buffers_to_ignore = ["head.bias"]
    some = list(delayed.named_parameters())[:1]
    delay = {"delay_all_reduce_named_params": some, "param_to_hook_all_reduce": delayed.head.bias}
    cases: list[tuple[nn.Module, dict[str, object], str]] = [
        (made(Rows), {}, "process_group=None"),
        (replica(world, made(Rows), static_graph=True), {}, "static_graph=True"),
        (replica(world, half, mixed_precision=_MixedPrecision()), {}, "mixed_precision="),
        (replica(world, delayed, **delay), {}, "delay_all_reduce_named_params="),
        (replica(world, ignoring), {}, "ignores"),
        (replica(world, made(Rows)), {"process_group": None}, "brings its own"),
        (nn.Sequential(replica(world, made(Rows))), {}, "0 .DistributedDataParallel"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            {"process_group": world.group},
            "1 .SyncBatchNorm",
        ),
        (replica(world, made(Rows)), {"recompute": True}, "single process"),
        (made(Rows), {"process_group": None, "exact": False}, "exact: False"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            {"process_group": world.group},
            r"2 devices .*cpu, meta",
        ),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=re.compile(message, re.IGNORECASE)):
            Aligner(model, TASKS, **options)

    model = replica(world, made(Rows))
    aligner = Aligner(model, TASKS, engine="per_task")
    tokens, tasks = rows(0, world.rank)
    start = torch.ones(len(tokens), 1, dtype=torch.float64, requires_grad=True)
    losses = checkpoint(lambda start: model(tokens) * start[:, 0], start, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        aligner.backward(losses, tasks)

    with model.join(), pytest.raises(ValueError, match=r"backward\(\{\}\)"):
        aligner.backward(model(tokens), tasks)
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="register_comm_hook"):
        aligner.backward(model(tokens), tasks)

    model, outside = replica(world, made(Rows)), nn.Linear(2, 1).double()
    aligner = Aligner(model, TASKS)
    tokens, tasks = rows(0, world.rank)
    scale = outside(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"2 .*outside the model"):
        aligner.backward(model(tokens) * scale, tasks)


def _checks() -> dict[str, tuple[Check, int]]:
    found: dict[str, tuple[Check, int]] = {}
    for shard in (False, True):
        where = "FSDP2: " if shard else ""
        for name, rule in RULES.items():
            check = partial(equals_one_process, rule=rule, shard=shard)
            for size in (2, 3 if shard else 4) if name == "gradvac" else (2,):
                found[f"{where}{name}, {size} processes, float64"] = (check, size)
        found[f"{where}hooks"] = (partial(hooks, shard=shard), 3 if shard else 2)
        single = partial(
            equals_one_process,
            rule=RULES["gradvac"],
            dtype=torch.float32,
            tolerance=1e-6,
            shard=shard,
        )
        found[f"{where}gradvac, float32, per_task"] = (
            partial(single, engine="per_task"),
            4 if shard else 2,
        )
        if not shard:
            found["gradvac, float32"] = (single, 4)
    for engines in ("auto", "per_task", "different"):
        found[f"mixed rows, engines: {engines}"] = (partial(mixed_rows, engines=engines), 3)
    found["parts of tasks"] = (parts_of_tasks, 2)
    found["one process falls back"] = (one_falls_back, 3)
    found["Sum is plain"] = (sum_is_plain, 2)
    for option in ("find_unused_parameters", "gradient_as_bucket_view"):
        found[f"Sum is plain, {option}"] = (partial(sum_is_plain, **{option: True}), 3)
    others = (
        *(without_rows, accumulated, not_finite, disagreements),
        *(an_error_in_one, approximate, traffic, refusals),
    )
    for check in others:
        found[check.__name__.replace("_", " ")] = (check, 3)
    return found | sharded.checks() | one_task.checks() | awkward.checks()


CHECKS = _checks()

"""A small model of several tasks, rows for every process, and the same in one process."""

# W processes, B rows

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, Alignment, Rule

from .processes import World

TASKS = ["cs", "fr", "hi", "tr"]


class Net(nn.Module):
    """A shared body, and a head per task: heads of absent tasks are not reached."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7))
        self.heads = nn.ModuleDict({task: nn.Linear(7, 2) for task in TASKS})

    def forward(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            task: self.heads[task](self.body(self.table(own))).square().sum()
            for task, own in tokens.items()
        }


class Rows(nn.Module):
    """Rows of all tasks in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7))
        self.head = nn.Linear(7, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens))).square().sum(1)


class Tied(Rows):
    """The table is the head too, and one part is behind a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        deep = checkpoint(self.body, self.table(tokens), use_reentrant=False)
        return self.head(deep).square().sum(1)


class Deep(nn.Module):
    """A stack of layers, every one of them a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        deep = self.table(tokens)
        for layer in self.layers:
            deep = layer(deep).tanh()
        return self.head(deep).square().sum(1)


def made(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same model everywhere."""
    torch.manual_seed(1)
    return kind().to(dtype)


def tokens_by_task(step: int, rank: int) -> dict[str, Tensor]:
    """Rows of one process: some tasks only, and at times all on few processes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    present = [task for n, task in enumerate(TASKS) if (n + step + rank) % 3]
    if step == 3:
        present = [TASKS[rank % 2]]
    return {task: torch.randint(11, (2 + rank,), generator=generator) for task in present}


def rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows of one process: tokens, and the task of every row."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num = 5 + rank
    return torch.randint(11, (num,), generator=generator), torch.randint(
        4, (num,), generator=generator
    )


def together(world: World, step: int) -> dict[str, Tensor]:
    """The rows of all processes."""
    all_rows = [tokens_by_task(step, rank) for rank in range(world.size)]
    present = [task for task in TASKS if any(task in own for own in all_rows)]
    return {task: torch.cat([own[task] for own in all_rows if task in own]) for task in present}


def all_rows(world: World, step: int) -> tuple[Tensor, Tensor]:
    """The rows of all processes."""
    tokens, tasks = zip(*(rows(step, rank) for rank in range(world.size)), strict=True)
    return torch.cat(tokens), torch.cat(tasks)


def divided(losses: Mapping[str, Tensor], by: int) -> dict[str, Tensor]:
    """Gradients of several processes are means: in one process, losses are divided."""
    return {task: loss / by for task, loss in losses.items()}


def replica(world: World, model: nn.Module, **options: object) -> DistributedDataParallel:
    """The model in this process."""
    return DistributedDataParallel(model, process_group=world.group, **options)


def sharded(world: World, model: nn.Module, mesh: DeviceMesh | None = None, **options: object):
    """The model in this process: a stack or body by itself, and the rest."""
    options["mesh"] = DeviceMesh.from_group(world.group, "cpu") if mesh is None else mesh
    if not isinstance(model, Net):  # how often it runs its body depends on the tasks
        for unit in model.layers if isinstance(model, Deep) else [model.body]:
            fully_shard(unit, **options)
    return fully_shard(model, **options)


def placed(world: World, model: nn.Module, shard: bool) -> nn.Module:
    """A replica of the model in this process, or a shard."""
    return sharded(world, model) if shard else replica(world, model, find_unused_parameters=True)


def alone(model: nn.Module, rule: Rule, **options: object) -> Aligner:
    """An aligner of the full batch, for this process to compare with."""
    return Aligner(model, TASKS, rule, process_group=None, **options)


def full(value: Tensor) -> Tensor:
    """The tensor of which this process may have a shard."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same(
    here: nn.Module, there: nn.Module, tolerance: float = 1e-12, *, of_grad: bool = False
) -> None:
    """Compare all parameters, or their gradients, with those of a model that is not wrapped."""
    if isinstance(here, DistributedDataParallel):
        here = here.module
    others = dict(there.named_parameters())
    for name, parameter in here.named_parameters():
        value, other = (p.grad if of_grad else p for p in (parameter, others[name]))
        assert (value is None) == (other is None), name
        if value is not None:
            value, other = full(value), full(other)
            assert value.dtype == other.dtype, name
            assert ((value - other).abs() < tolerance).all(), name


def assert_equal_everywhere(world: World, values: Sequence[Tensor]) -> None:
    """Bit for bit."""
    flat = torch.cat([value.detach().double().reshape(-1) for value in values])
    found = [torch.empty_like(flat) for _ in range(world.size)]
    dist.all_gather(found, flat, group=world.group)
    assert all(torch.equal(found[0], own) for own in found)


def trained(
    model: nn.Module, backward: Callable[[int], Alignment], num_steps: int = 4
) -> list[Alignment]:
    """Some steps with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for step in range(num_steps):
        optimizer.zero_grad()
        found.append(backward(step))
        optimizer.step()
    return found


def assert_trained_alike(
    world: World, ours: tuple[nn.Module, Aligner], theirs: tuple[nn.Module, Aligner]
) -> None:
    """Train on the own rows, and one process on all of them: the same parameters."""

    def mine(step: int) -> Alignment:
        tokens, tasks = rows(step, world.rank)
        return ours[1].backward(ours[0](tokens), tasks)

    def full_batch(step: int) -> Alignment:
        tokens, tasks = all_rows(world, step)
        return theirs[1].backward(theirs[0](tokens) / world.size, tasks)

    trained(ours[0], mine)
    trained(theirs[0], full_batch)
    assert_same(ours[0], theirs[0])

"""GradientsByTask: what the engines find, without a rule, and without a trace."""

# B rows, T tasks

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, GradientsByTask, Sum
from gradvac.utils.devices import index_on

TASKS = ["a", "b", "c"]
ROWS = [2, 0, 0, 2, 2, 0]  # nobody is of "b"
ENGINES = ["one_backward", "per_task", "auto"]


class Model(nn.Module):
    """A table, layers of two components, and a layer that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.square().mean((1, 2))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch() -> Tensor:
    return torch.randint(0, 40, (len(ROWS), 5))


def expected(model: nn.Module, losses: Tensor, tasks: list[int], num_tasks: int) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters() if "unused" not in name]
    parameters = [model.get_parameter(name) for name in names]
    by_task = []
    for task in range(num_tasks):
        start = torch.tensor([float(one == task) for one in tasks], dtype=losses.dtype)
        by_task.append(torch.autograd.grad(losses, parameters, start, retain_graph=True))
    stacks = map(torch.stack, zip(*by_task, strict=True))
    return dict(zip(names, stacks, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_tasks(model: Model, engine: str) -> None:
    by_task = GradientsByTask(model, TASKS, engine=engine)
    for _ in range(3):
        losses = model(batch())
        wanted = expected(model, losses, ROWS, len(TASKS))
        found = by_task(losses, ROWS)
        torch.testing.assert_close(found, wanted)
        assert list(found) == [n for n, _ in model.named_parameters() if "unused" not in n]
    assert all(p.grad is None for p in model.parameters())
    assert by_task.engine == ("per_task" if engine == "per_task" else "one_backward")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("granularity", ["all_layer", "whole_model"])
def test_gram_matrices(model: Model, engine: str, granularity: Any) -> None:
    by_task = GradientsByTask(model, TASKS, granularity, engine)
    for _ in range(3):
        losses = model(batch())
        wanted = expected(model, losses, ROWS, len(TASKS))
        gram = by_task.gram(losses, ROWS)
        for k, names in enumerate(by_task.components.values()):
            flat = [wanted[name].flatten(1) for name in names if name in wanted]
            one = sum((g @ g.T for g in flat), torch.zeros(3, 3, dtype=torch.float64))
            torch.testing.assert_close(gram[k], one)


def test_parameters_that_a_graph_hides_keep_their_gradients() -> None:
    hidden, first = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    whole = nn.ModuleList([first, hidden])
    by_task = GradientsByTask(whole, TASKS, engine="per_task")
    x = first(torch.randn(len(ROWS), 4, dtype=torch.float64))
    losses = checkpoint(hidden, x, use_reentrant=True).square().sum(1)
    assert by_task.gram(losses, ROWS).diagonal(dim1=1, dim2=2).any()
    assert all(p.grad is None for p in whole.parameters())


def test_narrow_indices_on_another_device() -> None:
    assert index_on(torch.arange(4, dtype=torch.int32), torch.device("meta")).shape == (4,)


def test_every_row_a_task(model: Model) -> None:
    names = [f"row {n}" for n in range(len(ROWS))]
    by_task = GradientsByTask(model, names, engine="one_backward")
    losses = model(batch())
    wanted = expected(model, losses, list(range(len(ROWS))), len(ROWS))
    torch.testing.assert_close(by_task(losses, range(len(ROWS))), wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_by_task(model: Model, engine: str) -> None:
    by_task = GradientsByTask(model, TASKS, engine=engine)
    parts = {"c": model(batch()).sum(), "a": model(batch()).sum()}
    parameters = [p for n, p in model.named_parameters() if "unused" not in n]
    wanted = torch.autograd.grad(parts["c"], parameters, retain_graph=True)
    found = by_task(parts)
    torch.testing.assert_close([g[2] for g in found.values()], list(wanted))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_behind(model: Model, engine: str) -> None:
    """Neither in `.grad`, nor with the hooks of leaves, whether of the model or not."""
    outside, seen = torch.ones(4, dtype=torch.float64, requires_grad=True), list[Any]()
    leaves = [*model.parameters(), outside]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
        leaf.register_hook(seen.append)
        leaf.register_post_accumulate_grad_hook(seen.append)
    by_task = GradientsByTask(model, TASKS, engine=engine)
    for look in (by_task, by_task.gram):
        for _ in range(3):
            hidden = model.layers[0](model.table(batch())) * outside
            look(hidden.square().mean((1, 2)), ROWS)
    assert all(leaf.grad is not None and (leaf.grad == 1).all() for leaf in leaves)
    assert seen == []
    assert all(len(leaf._backward_hooks or ()) == 1 for leaf in leaves)


def test_rows_that_influence_each_other() -> None:
    coupled = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def losses() -> Tensor:
        result: Tensor = coupled(torch.randn(len(ROWS), 4)).square()[:, 0]
        return result

    with pytest.raises(ValueError, match=r'influence each other.*engine="per_task"'):
        GradientsByTask(coupled, TASKS, engine="one_backward")(losses(), ROWS)
    by_task = GradientsByTask(coupled, TASKS)
    with pytest.warns(UserWarning, match="continues with per_task"):
        by_task(losses(), ROWS)
    assert by_task.engine == "per_task"


def test_the_gram_matrices_are_those_of_the_aligner(model: Model) -> None:
    twin, tokens = copy.deepcopy(model), batch()
    alignment = Aligner(twin, TASKS, Sum()).backward(twin(tokens), ROWS)
    by_task = GradientsByTask(model, TASKS)
    at = torch.tensor([TASKS.index(task) for task in alignment.tasks])
    gram = by_task.gram(model(tokens), ROWS)
    assert tuple(by_task.components) == alignment.components
    torch.testing.assert_close(gram[:, at[:, None], at], alignment.gram)


def test_wrong_arguments(model: Model) -> None:
    with pytest.raises(ValueError, match="engine: must be one of"):
        GradientsByTask(model, TASKS, engine="both")
    with pytest.raises(ValueError, match="unknown task 'd'"):
        GradientsByTask(model, TASKS)(model(batch()), ["d"] * len(ROWS))
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        GradientsByTask(lambda x: x, TASKS)  # type: ignore[arg-type]

"""Kinds of modules and tensors that are not in the zoo: exact, or refused with the fix."""

# B rows, S tokens, D width

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, GradVac

from ..drivers import run_driver
from .parity import SORTED, TASKS, UNSORTED, Twins, assert_same_gradients
from .zoo._case import B, Case, D, Model, S, V, distance, output, tokens_of


def rule() -> GradVac:
    return GradVac(beta=0.3)


class Adapter(nn.Module):
    """A low-rank change of a frozen layer, in the ways in which adapters compute it."""

    def __init__(self, base: nn.Linear, how: str) -> None:
        super().__init__()
        self.base, self.how = base, how
        base.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))
        self.size = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "beside":
            beside: Tensor = self.base(x) * self.size
            return beside + 2.0 * (x @ self.down.T @ self.up.T)
        weight = self.base.weight + 2.0 * self.up @ self.down
        if self.how == "normalised":
            weight = weight / weight.norm(dim=1, keepdim=True)
        return F.linear(x, self.size[:, None] * weight, self.base.bias)


@pytest.mark.parametrize("how", ["beside", "merged", "normalised"])
def test_low_rank_adapters(how: str) -> None:
    model = nn.Sequential(Adapter(nn.Linear(D, D), how), nn.Tanh(), Adapter(nn.Linear(D, 3), how))
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), rule)
    for tasks in (UNSORTED, SORTED):
        twins.step(tasks)


class GradvacProduct(torch.autograd.Function):
    """A model's own function, which happens to have the name of one of ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, torch.einsum("bsd,bse->de", x, gradient)


def test_a_function_with_the_name_of_one_of_ours() -> None:
    model = Model(
        lambda m, x: GradvacProduct.apply(x, m.weight), weight=nn.Parameter(torch.randn(D, 3))
    )
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), rule)
    twins.step(UNSORTED)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {"itself": lambda p: p, "scaled": lambda p: 1.5 * p}


@pytest.mark.parametrize("how", CALLS)
def test_functional_call(how: str) -> None:
    def losses(model: nn.Module, _: Tensor, x: Tensor) -> Tensor:
        given = {name: CALLS[how](p) for name, p in model.named_parameters()}
        return distance(torch.func.functional_call(model, given, (x,)))

    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, 3))
    twins = Twins(Case(model.double(), losses, (torch.randn(B, S, D).double(),)), rule)
    for tasks in (UNSORTED, SORTED):
        twins.step(tasks)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(torch.tanh(self.linear(x)))
        return result + x


def test_scripted_submodules() -> None:
    """The first calls profile, the later ones run what was optimised: both are exact."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script")
        scripted = [torch.jit.script(Part().double()) for _ in range(2)]
    scripted[1].load_state_dict(scripted[0].state_dict())
    last = nn.Linear(D, 3).double()
    models = [
        Model(lambda m, x: m.last(m.part(x)), part=part, last=copy.deepcopy(last))
        for part in scripted
    ]
    aligners = [
        Aligner(model, TASKS, rule(), engine=engine)
        for model, engine in zip(models, ("per_task", "one_backward"), strict=True)
    ]
    for _ in range(4):
        x = torch.randn(B, S, D, dtype=torch.float64)
        for model, aligner in zip(models, aligners, strict=True):
            model.zero_grad()
            aligner.backward(distance(model(x)), UNSORTED)
        assert_same_gradients(models[1], models[0], 1e-9)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors(layout: torch.layout) -> None:
    def losses(model: nn.Module) -> Tensor:
        parts = [torch.full((2 + row % 3, D), 0.1 * row) for row in range(B)]
        found: Any = model(torch.nested.nested_tensor(parts, layout=layout))
        return torch.stack([part.square().mean() for part in found.unbind()])

    model = nn.Linear(D, 3)
    strict = Aligner(model, TASKS, rule(), engine="one_backward")
    with pytest.raises(ValueError, match=r"nested tensors.*pad them.*per_task"):
        strict.backward(losses(model), UNSORTED)
    assert model.weight.grad is None
    twin = copy.deepcopy(model)
    Aligner(twin, TASKS, rule(), engine="per_task").backward(losses(twin), UNSORTED)
    auto = Aligner(model, TASKS, rule(), engine="auto")
    with pytest.warns(UserWarning, match="nested tensors"):
        auto.backward(losses(model), UNSORTED)
    assert auto.engine == "per_task"
    assert_same_gradients(model, twin, 1e-6)


AUTOCAST = """
import copy, torch
from torch import nn
from gradvac import Aligner, GradVac
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Linear(8, 16), layer, nn.LayerNorm(16), nn.Linear(16, 3))
twin, x, rows = copy.deepcopy(model), torch.randn(6, 5, 8), [2, 0, 1, 0, 2, 2]
aligners = [Aligner(m, ["a", "b", "c"], GradVac(), engine=e)
            for m, e in ((model, "one_backward"), (twin, "per_task"))]
for _ in range(3):
    for m, aligner in zip((model, twin), aligners):
        m.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = m(x).float().square().mean((1, 2))
        aligner.backward(losses, rows)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert p.grad.dtype == p.dtype
        scale = 0.05 * max(float(w.grad.norm()) for w in twin.parameters())
        error = float((p.grad - q.grad).norm() / (q.grad.norm() + scale))
        assert error < 0.02, (name, error)
print("exact to rounding:", aligners[0].engine)
"""


def test_autocast(tmp_path: Path) -> None:
    """In a process of its own, which may use no instructions that some machines only claim."""
    (tmp_path / "autocast.py").write_text(AUTOCAST)
    done = run_driver(tmp_path / "autocast.py", environment={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert done.stdout == "exact to rounding: one_backward\n", done.stderr


def experts(*, transposed: bool) -> Model:
    """A router, and experts whose rows come one after the other, as grouped products want them."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x).flatten(0, 1)
        shares, chosen = m.router(hidden).softmax(-1).max(-1)
        chosen, order = (chosen % 3 + (chosen > 0)).sort()  # nobody comes to the second expert
        ends = torch.bincount(chosen, minlength=4).cumsum(0).int()
        ends[-1] -= num_without
        weight = m.weight.mT if transposed else m.weight
        nobodys = (torch.arange(len(hidden)) >= ends[-1])[:, None]
        out = F.grouped_mm(hidden[order].masked_fill(nobodys, 0.0), weight, offs=ends)
        out = out.masked_fill(nobodys, 0.0)
        return m.last((out.tanh() * shares[order, None])[order.argsort()]).view(*x.shape[:2], -1)

    num_without = 2  # rows that no expert has
    parts = {"first": nn.Linear(D, D), "router": nn.Linear(D, 4), "last": nn.Linear(D, 3)}
    return Model(run, **parts, weight=nn.Parameter(0.5 * torch.randn(4, D, D)))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("tasks", [UNSORTED, [1] * B], ids=["mixed", "one task"])
def test_grouped_products_of_experts(transposed: bool, tasks: list[int]) -> None:
    """Against a call of the node for every task, and without one."""
    case = Case(experts(transposed=transposed), output, (torch.randn(B, S, D),))
    twins = Twins(case, rule, tolerance=1e-5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no fast path")
        for _ in range(3):
            twins.step(tasks)


def test_experts_and_a_table_in_checkpoints() -> None:
    """What is read of a node there can be read once, and the node needs it too."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        words = checkpoint(lambda t: m.words[t].tanh(), tokens, use_reentrant=False)
        result: Tensor = checkpoint(m.experts, words, use_reentrant=False)
        return result

    parts = {"words": nn.Parameter(torch.randn(V, D)), "experts": experts(transposed=True)}
    twins = Twins(Case(Model(run, **parts), output, (tokens_of(B, S),)), rule, tolerance=1e-5)
    for tasks in (UNSORTED, SORTED):
        twins.step(tasks)


def test_batch_norm_by_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 1))
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2.0)
    twins = Twins(Case(model.eval().double(), output, (torch.randn(B, 3, 5, 5).double(),)), rule)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no fast path")
        for tasks in (UNSORTED, SORTED, [2] * B):
            twins.step(tasks)


def test_pooling_where_channels_come_last() -> None:
    """The strides of a picture are given to the means; rows stay where they are."""

    def run(m: Any, x: Tensor) -> Tensor:
        picture = m.first(x).to(memory_format=torch.channels_last)
        result: Tensor = m.last(F.adaptive_avg_pool2d(picture, 1)).flatten(1)
        return result

    model = Model(run, first=nn.Conv2d(3, 4, 3), last=nn.Conv2d(4, 2, 1))
    twins = Twins(Case(model.double(), output, (torch.randn(B, 3, 5, 5).double(),)), rule)
    for tasks in (UNSORTED, SORTED):
        twins.step(tasks)
    assert "measured" not in repr(twins.aligner)


def test_strides_that_move_rows_are_measured() -> None:
    """The same operations, but for means whose rows come last in memory."""

    def run(m: Any, x: Tensor) -> Tensor:
        picture = m.first(x)
        pooled = picture.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
        pooled = pooled.mean((-1, -2), keepdim=True)
        turned = pooled.as_strided(pooled.shape, (4, 1, 4, 4))
        result: Tensor = m.last(turned).flatten(1)
        return result

    model = Model(run, first=nn.Conv2d(3, 4, 3), last=nn.Conv2d(4, 2, 1)).double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, GradVac(target=0.5), engine="auto")
    reference = Aligner(twin, TASKS, GradVac(target=0.5), engine="per_task")
    x = torch.randn(B, 3, 5, 5).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*continues with per_task")
        for _ in range(3):
            aligner.backward(distance(model(x)), UNSORTED)
            reference.backward(distance(twin(x)), UNSORTED)
            assert_same_gradients(model, twin, 1e-9)


@pytest.mark.parametrize("times", [B, 2 * B])
@pytest.mark.parametrize("width", [1, 3])
def test_repeated_for_every_row(times: int, width: int) -> None:
    """As relative positions are for every row and head."""

    def run(m: Any, x: Tensor) -> Tensor:
        every = (2.0 * m.positions).repeat(times, 1, 1)  # [times * width, S, D]
        by_row = every.view(B, -1, S, D)
        result: Tensor = m.last((m.first(x)[:, None] * by_row).tanh().sum(1))
        return result

    parts = {"first": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    model = Model(run, **parts, positions=nn.Parameter(torch.randn(width, S, D)))
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), rule)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no fast path")
        for tasks in (UNSORTED, SORTED):
            twins.step(tasks)

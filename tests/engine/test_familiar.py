"""Layers that are skipped at random: graphs of new structures made of familiar operations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import gradvac
from gradvac import Aligner
from gradvac.engine import planner
from gradvac.rules import MGDA

TASKS = ["a", "b", "c"]
ROWS = [row % 3 for row in range(12)]


class Skipping(nn.Module):
    """Blocks over `[B, S, D]`, of which some are skipped; positions are one table for all rows."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.positions = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(num_blocks)
        )

    def forward(self, x: Tensor, skipped: set[int]) -> Tensor:
        x = x + self.positions(torch.arange(5))
        for number, block in enumerate(self.blocks):
            if number not in skipped:
                x = x + block(x)
        return x.square().mean((1, 2))


class Turning(nn.Module):
    """The same operations either along positions or along rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, over_rows: bool) -> Tensor:
        dim = 0 if over_rows else 1
        x = self.first(x).transpose(dim, 2).softmax(2).transpose(dim, 2)
        if over_rows:  # another structure, of the same operations
            x = self.second(x).transpose(1, 2).softmax(2).transpose(1, 2)
        return self.second(x).square().mean((1, 2))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every probe that is taken."""
    taken: list[int] = []
    original = planner.probe

    def counted(*args: object) -> object:
        taken.append(len(taken))
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "probe", counted)
    return taken


def compare(model: nn.Module, engine: str, settings: list[object]) -> Iterator[float]:
    """The relative error of every step against per_task's."""
    aligner, reference = (Aligner(model, TASKS, MGDA(), engine=e) for e in (engine, "per_task"))
    x = torch.randn(12, 5, 8, dtype=torch.float64)
    for given in settings:
        found = []
        for one in (aligner, reference):
            model.zero_grad()
            one.backward(model(x, given), ROWS)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append(nn.utils.parameters_to_vector(gradients))
        yield float((found[0] - found[1]).norm() / found[1].norm())


def test_skipped_layers_need_no_probe_each(probes: list[int]) -> None:
    torch.manual_seed(0)
    model = Skipping().double()
    settings: list[object] = [{n % 6, (n * n) % 6, (2 * n + 1) % 6} for n in range(9)]
    assert all(error < 1e-10 for error in compare(model, "one_backward", settings))
    assert len(probes) <= 3, "of the schedule: steps 1 and 2, and a table that is moved"


def test_rows_that_others_declared_are_no_reason_to_probe(probes: list[int]) -> None:
    """A forward that is never differentiated, such as that of an evaluation, leaves them."""
    model = Skipping().double()
    aligner = Aligner(model, TASKS, MGDA(), engine="one_backward")
    with gradvac.rows([0, 1, 2]):
        model(torch.randn(3, 5, 8, dtype=torch.float64), {1})
    test_skipped_layers_need_no_probe_each(probes)
    del aligner


def test_familiar_operations_along_other_dimensions_are_probed(probes: list[int]) -> None:
    torch.manual_seed(0)
    model = Turning().double()
    before = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings: list[object] = [False, False, False, True, True, False]
        for error in compare(model, "auto", settings):
            assert error < 1e-10
            before.append(len(probes))
    taken = [after - earlier for earlier, after in pairwise(before)]
    assert taken[2] >= 1, "where rows lie does not follow: the new structure is probed"


class Placed(nn.Module):
    """A table of positions that one size of batch shows to be shared, and another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 6), nn.Embedding(16, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.out(torch.tanh(hidden)).square().mean((1, 2))


def test_more_rows_than_positions_after_fewer() -> None:
    torch.manual_seed(0)
    model = Placed().double()
    one, reference = (Aligner(model, TASKS, MGDA(), engine=e) for e in ("one_backward", "per_task"))
    for num_rows in (6, 15, 6, 15):
        tokens, found = torch.randint(20, (num_rows, 8)), []
        for aligner in (one, reference):
            model.zero_grad()
            aligner.backward(model(tokens), [row % 3 for row in range(num_rows)])
            found.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))
        assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-10

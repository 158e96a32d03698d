"""Kernels in C++: the same numbers as torch operations, or None for what they do not know."""

# B rows, S tokens, D width, K components, T tasks

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

from gradvac import GradVac
from gradvac.engine.contributions import Lookup
from gradvac.engine.kernels import Segments
from gradvac.rules import pairwise
from gradvac.utils import native as file
from gradvac.utils.native import native

from .parity import ONE_ABSENT, SORTED, TASKS, UNSORTED, Twins, attach, gradients_of
from .zoo._case import B, Case, D, Model, S, output

UNEVEN = [0, 0, 0, 0, 0, 2]


@pytest.fixture
def used(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function gave a result."""
    found: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = function(*given)
            found[name] += result is not None
            return result

        return call

    for name in [name for name in vars(kernels) if not name.startswith("_")]:
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    return found


def make_case(dtype: torch.dtype) -> Case:
    """Of all that is known: some layers are alike, one is used twice, a table has few rows."""
    model = Model(
        lambda m, x, tokens: m.d(
            m.a(m.norm(m.b(m.a(x).tanh() + m.table(tokens)))) * m.scale + m.rms(m.c(x))
        ),
        a=nn.Linear(D, D),
        b=nn.Linear(D, D),
        c=nn.Linear(D, D, bias=False),
        d=nn.Linear(D, 3),
        norm=nn.LayerNorm(D),
        rms=nn.RMSNorm(D),
        scale=nn.Parameter(torch.randn(D)),
        table=nn.Embedding(1000, D),
    )
    inputs = (torch.randn(B, S, D, dtype=dtype), torch.randint(1000, (B, S)))
    return Case(model.to(dtype), output, inputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str
)
def test_equals_per_task(dtype: torch.dtype, tolerance: float, used: Counter[str]) -> None:
    twins = Twins(make_case(dtype), lambda: GradVac(beta=0.3), tolerance=tolerance)
    for tasks in (UNSORTED, SORTED, ONE_ABSENT, UNEVEN, UNSORTED):
        twins.step(tasks)
    functions = {"products", "scales", "lookup", "grams", "combine", "accumulate", "weigh"}
    assert {*functions, "random_order"} <= {name for name, times in used.items() if times}


def test_adds_to_what_is_there_and_leaves_hooks_to_torch(kernels: Any) -> None:
    del kernels
    case = make_case(torch.float64)
    aligner, seen = attach(case.model, GradVac()), []
    case.model.a.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    first: dict[str, Tensor] = {}
    for factor in (1.0, 2.0):
        losses = case.losses(case.model, torch.tensor(UNSORTED), *case.inputs)
        aligner.rule.load_state_dict(first_state(aligner))
        aligner.backward(losses, UNSORTED)
        gradients = gradients_of(case.model)
        first = first or gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, factor * first[name])
    assert len(seen) == 2
    assert not any(p.grad._is_view() for p in case.model.parameters() if p.grad is not None)


def first_state(aligner: Any) -> dict[str, Any]:
    """That of the first step, whatever was seen since."""
    state: dict[str, Any] = aligner.rule.state_dict()
    return state | {"step": 0, "target": torch.zeros_like(state["target"])}


@pytest.mark.parametrize(("num_components", "num_tasks"), [(1, 2), (5, 3), (7, 25)])
def test_rules_to_the_last_bit(kernels: Any, num_components: int, num_tasks: int) -> None:
    names = [pairwise.name_keys([f"{n}" for n in range(m)]) for m in (num_components, num_tasks)]
    vaccinated = torch.rand(num_tasks) < 0.8
    for trial in range(10):
        gradients = torch.randn(num_components, num_tasks, 30, dtype=torch.float64)
        if trial % 3 == 0:
            gradients[:, 0] = 0.0
        if trial % 4 == 0:
            gradients[:, -1] = -gradients[:, 0]
        step = torch.tensor(77 * trial)
        order = kernels.random_order(-5, step, *names)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairwise, "native", lambda: None)
            assert torch.equal(order, pairwise.random_order(-5, step, *names))
        gram, target = gradients @ gradients.mT, torch.rand(1, num_tasks, num_tasks) - 0.5
        given = (gram, target.double().expand_as(gram), order, vaccinated)
        found = kernels.sweep(*given, pairwise.CANCELLED, pairwise.TARGET_LIMIT)
        for mine, theirs in zip(found, pairwise.pairwise_sweep_reference(*given), strict=True):
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_large_blocks_are_divided_among_threads(kernels: Any) -> None:
    block, weights = torch.randn(1, 8, 100_003), torch.rand(1, 8)
    found, usual = [], torch.get_num_threads()
    for num_threads in (1, 2, 2, usual):
        torch.set_num_threads(num_threads)
        (gram,), (update,) = kernels.grams([block], [0], 1), kernels.combine([block], [0], weights)
        found.append((gram, update))
    alone, divided, again, _ = found
    torch.testing.assert_close(divided[0], block[0].double() @ block[0].double().T)
    assert not torch.equal(divided[0], alone[0])  # the sums are those of other columns
    assert torch.equal(divided[0], again[0])
    assert torch.equal(divided[1], alone[1])


def test_a_table_with_a_row_for_each_of_several_entries(kernels: Any) -> None:
    values, tokens = torch.randn(3 * B, D), torch.randint(50, (3 * B,))
    segments = Segments(torch.tensor(UNSORTED), len(TASKS), values.device)
    found, rows = kernels.lookup(values, tokens, segments.tasks, len(TASKS), 50)
    dense = torch.zeros(len(TASKS), 50, D).index_copy_(1, found, rows)
    torch.testing.assert_close(dense, Lookup(values, tokens, 50, segments).task_gradients())


def test_what_does_not_fit(kernels: Any) -> None:
    index, x, g = torch.tensor(UNSORTED), torch.randn(B, D), torch.randn(B, 2)
    ends = (True, False, False)
    assert kernels.products([x], [g], index, 3, *ends) is not None
    for wrong in (
        ([x.bfloat16()], [g.bfloat16()], index, 3),
        ([x.to("meta")], [g], index, 3),
        ([x], [g.double()], index, 3),
        ([x], [g[:3]], index, 3),
        ([torch._efficientzerotensor(x.shape)], [g], index, 3),  # has no memory
        ([x, x], [g], index, 3),
        ([x, x[:, :2]], [g, g], index, 3),
        ([x[:5]], [g[:5]], index, 3),
        ([], [], index, 3),
        ([x], [g], index, 2),  # a task outside
        ([x], [g], index - 1, 3),
        ([x], [g], index.int(), 3),
        ([x], [g], index[:0], 3),
    ):
        assert kernels.products(*wrong, *ends) is None
        assert kernels.scales(wrong[0], [], [], *wrong[1:], True, False) is None
    block, weights = torch.randn(2, 3, 4), torch.ones(2, 3)
    assert kernels.grams([block], [0, 1], 2) is not None
    for blocks, components in (
        ([block.mT], [0, 1]),
        ([block], [0, 2]),
        ([block], [0]),
        ([block, block[:, :2].contiguous()], [0, 1, 0, 1]),
        ([block.half()], [0, 1]),
        ([], []),
    ):
        assert kernels.grams(blocks, components, 2) is None
        assert kernels.combine(blocks, components, weights) is None
    tokens = torch.randint(9, (B,))
    assert kernels.lookup(x, tokens + 9, index, 3, 9) is None
    assert kernels.lookup(x, tokens - 9, index, 3, 9) is None
    assert kernels.lookup(x[:3], tokens, index, 3, 9) is None
    gram = torch.eye(3, dtype=torch.float64)[None]
    order = torch.tensor([[[1, 2], [0, 2], [0, 3]]])
    chosen = torch.ones(3, dtype=torch.bool)
    assert kernels.sweep(gram, gram, order, chosen, 1e-6, 1.0) is None
    assert kernels.sweep(gram.float(), gram, order - 1, chosen, 1e-6, 1.0) is None
    leaf = nn.Parameter(torch.zeros(2, 3))
    leaves = [leaf, nn.Parameter(leaf.detach().t()), nn.Parameter(leaf.double())]
    assert kernels.accumulate(leaves, [torch.ones(6)] * 3) == [1, 2]
    assert torch.equal(leaf.grad, torch.ones(2, 3))


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what it tries and what it lacks, once, and goes on."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("there is no compiler\nthis is an error: none\nat all")

    monkeypatch.setenv("GRADVAC_NATIVE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", fail)
    native.cache_clear()
    with caplog.at_level(logging.WARNING, file.__name__):
        twins = Twins(make_case(torch.float64), GradVac)
        twins.step(UNSORTED)
    native.cache_clear()
    begun, failed = caplog.messages
    assert "building" in begun
    assert str(tmp_path) in begun
    assert "g++" in failed
    assert "this is an error: none" in failed


def test_used_where_it_was_built_unless_it_is_not_wanted(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody who did not ask waits for a compiler."""
    for wish, is_used in ((None, True), ("0", False)):
        native.cache_clear()
        if wish is None:
            monkeypatch.delenv("GRADVAC_NATIVE")
        else:
            monkeypatch.setenv("GRADVAC_NATIVE", wish)
        assert (native() is not None) == is_used
    assert native() is not kernels
    monkeypatch.delenv("GRADVAC_NATIVE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.cache_clear()
    assert native() is None
    assert not any(tmp_path.iterdir())

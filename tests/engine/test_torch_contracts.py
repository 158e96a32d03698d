"""Torch's own contracts hold in both engines: hooks, layouts, leaves elsewhere, modes."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum

from .parity import ONE_ABSENT, TASKS, UNSORTED, assert_same_gradients, attach, gradients_of
from .zoo._case import B, Block, D, Model, S, V, distance, tokens_of

ROWS = torch.tensor(UNSORTED)
ENGINES = ["one_backward", "per_task", "auto"]


def rule() -> GradVac:
    return GradVac(beta=0.3)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, S, D, dtype=torch.float64)


# -- leaves that are not the model's -------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["rows", "mapping", "separate", "accumulated"])
def test_heads_prompts_and_criteria_outside_the_model(engine: str, form: str, x: Tensor) -> None:
    """They get the plain gradient; the model gets what the rule says."""
    model = Block().double()
    heads = nn.ModuleDict({task: nn.Linear(D, 2) for task in TASKS}).double()
    prompt = nn.Parameter(torch.randn(S, D).double())
    criterion = nn.Parameter(torch.zeros((), dtype=torch.float64))
    of_rows = [TASKS[t] for t in UNSORTED]

    def losses(chosen: list[int]) -> Tensor:
        hidden = model(x[chosen] + prompt)
        out = torch.stack([heads[of_rows[r]](h) for r, h in zip(chosen, hidden, strict=True)])
        return distance(out) * criterion.exp() + criterion

    def of_task(task: str, found: Tensor) -> Tensor:
        return found[[n for n, own in enumerate(of_rows) if own == task]].sum()

    own = [name for name, _ in model.named_parameters()]
    reference = copy.deepcopy(model)
    every = list(range(B))
    aligner = attach(model, rule(), engine=engine)
    if form == "rows":
        aligner.backward(losses(every), of_rows)
    elif form == "mapping":
        whole = losses(every)
        aligner.backward({task: of_task(task, whole) for task in TASKS})
    elif form == "separate":
        by_task = {t: [r for r, one in enumerate(of_rows) if one == t] for t in TASKS}
        aligner.backward({task: losses(rows).sum() for task, rows in by_task.items()})
    else:
        aligner.backward(losses(every[:2]), of_rows[:2], accumulate=True)
        assert prompt.grad is None
        aligner.backward(losses(every[2:]), of_rows[2:])
    found = gradients_of(model)
    outside = [prompt, criterion, *heads.parameters()]
    if form in ("rows", "mapping"):
        expected = torch.autograd.grad(losses(every).sum(), outside)
        torch.testing.assert_close([leaf.grad for leaf in outside], list(expected))
    assert all(leaf.grad is not None for leaf in outside)
    # The model's parameters do not depend on who else is a leaf.
    frozen = [leaf.requires_grad_(False) for leaf in outside]
    assert frozen
    model.zero_grad()
    again = Aligner(model, TASKS, rule(), engine="per_task")
    if form in ("rows", "mapping"):
        again.backward(losses(every), of_rows)
        torch.testing.assert_close(gradients_of(model), found)
    assert sorted(found) == sorted(own)
    assert reference is not model


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_that_require_grad(engine: str, probes: list[int]) -> None:
    """A new tensor every step is no new graph, and gets its gradient."""
    model = Block().double()
    aligner = attach(model, rule(), engine=engine, check=False)
    reference = copy.deepcopy(model)
    per_task = Aligner(reference, TASKS, rule(), engine="per_task")
    for tasks in (UNSORTED, ONE_ABSENT, UNSORTED):
        given = torch.randn(B, D, dtype=torch.float64)
        one, other = given.clone().requires_grad_(), given.clone().requires_grad_()
        aligner.backward(distance(model(one)), tasks)
        per_task.backward(distance(reference(other)), tasks)
        assert_same_gradients(model, reference, 1e-9)
        (expected,) = torch.autograd.grad(distance(reference(other)).sum(), other)
        torch.testing.assert_close(one.grad, expected)
    assert len(probes) == (engine != "per_task")


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"granularity": "whole_model"}])
def test_hooks_of_parameters_run_once_with_the_final_gradient(
    engine: str, options: dict[str, Any], x: Tensor
) -> None:
    model = nn.Sequential(Block(), nn.Linear(D, 2)).double()
    seen: dict[str, list[Tensor]] = {}
    after: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, n=name: seen.setdefault(n, []).append(g.clone()))
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: after.setdefault(n, []).append(p.grad.clone())
        )
    aligner = attach(model, rule(), engine=engine, **options)
    for step in (1, 2):
        model.zero_grad()
        aligner.backward(distance(model(x)), ROWS)
        found = gradients_of(model)
        assert {n: len(own) for n, own in seen.items()} == dict.fromkeys(found, step)
        torch.testing.assert_close({n: own[-1] for n, own in seen.items()}, found)
        torch.testing.assert_close({n: own[-1] for n, own in after.items()}, found)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_that_changes_the_gradient(engine: str, x: Tensor) -> None:
    model = Block().double()
    expected = copy.deepcopy(model)
    Aligner(expected, TASKS, rule(), engine="per_task").backward(distance(expected(x)), ROWS)
    model.up.weight.register_hook(lambda gradient: gradient * 3)
    attach(model, rule(), engine=engine).backward(distance(model(x)), ROWS)
    assert expected.up.weight.grad is not None
    expected.up.weight.grad *= 3
    assert_same_gradients(model, expected, 1e-9)


_APPLIED: list[dict[str, Any]] = [
    {},
    {"stream_bytes": 1},
    {"stream_bytes": 1, "granularity": "all_matrix"},
    {"recompute": True, "granularity": "whole_model"},
]


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (engine, options)
        for engine in ENGINES
        for options in _APPLIED
        if engine != "per_task" or "recompute" not in options  # it stores task gradients
    ],
    ids=str,
)
def test_optimizer_in_backward(
    engine: str, by_data: bool, options: dict[str, Any], x: Tensor
) -> None:
    """Nothing that runs later may see the new weights, whenever components are applied."""
    granularity = options.get("granularity", "all_layer")

    def run(in_backward: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(D, 2)).double()
        optimizers = {p: torch.optim.Adam([p], lr=0.05) for p in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            if by_data:  # which no counter of versions sees
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.05)
            else:
                optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if in_backward:
            aligner = attach(model, rule(), engine=engine, **options)
        else:
            aligner = attach(model, rule(), engine="per_task", granularity=granularity)
        if in_backward:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            aligner.backward(distance(model(x)), ROWS)
            if not in_backward:
                for parameter in model.parameters():
                    step(parameter)
        return model

    torch.testing.assert_close(run(True).state_dict(), run(False).state_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_kept_on_the_way(engine: str, x: Tensor) -> None:
    """`retain_grad` and hooks of activations see the plain gradient of all tasks, once."""
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)).double()
    aligner = attach(model, rule(), engine=engine)
    for _ in range(2):
        hidden = model[0](x)
        hidden.retain_grad()
        losses = distance(model[1](hidden.tanh()))
        (expected,) = torch.autograd.grad(losses.sum(), hidden, retain_graph=True)
        hidden.grad = None
        aligner.backward(losses, ROWS)
        torch.testing.assert_close(hidden.grad, expected)


# -- the layout of `.grad` -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_last_with_a_fused_optimizer(engine: str) -> None:
    def run(memory_format: torch.memory_format, fused: bool, own: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2)
        )
        model.to(memory_format=memory_format)
        images = torch.randn(B, 3, 6, 6).to(memory_format=memory_format)
        aligner = attach(model, rule(), engine=own)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            aligner.backward(distance(model(images)), ROWS)
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.stride() == parameter.stride()
            optimizer.step()
        return model

    found = run(torch.channels_last, True, engine)
    expected = run(torch.contiguous_format, False, "per_task")
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way(engine: str, set_to_none: bool, x: Tensor) -> None:
    model = Block().double()
    aligner = attach(model, rule(), engine=engine)
    expected = copy.deepcopy(model)
    per_task = Aligner(expected, TASKS, rule(), engine="per_task")
    for each, own in ((model, aligner), (expected, per_task)):
        own.backward(distance(each(x)), ROWS)
        kept = each.up.weight.grad
        each.zero_grad(set_to_none=set_to_none)
        own.backward(distance(each(x)), ROWS)
        if not set_to_none:
            assert each.up.weight.grad is kept  # in place, as torch does
    assert_same_gradients(model, expected, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_empty_and_odd_parameters(engine: str, x: Tensor) -> None:
    model = Model(
        lambda m, y: F.linear(y, torch.cat([m.weight, m.empty])) * m.scale,
        weight=nn.Parameter(torch.randn(3, D)),
        empty=nn.Parameter(torch.randn(0, D)),
        scale=nn.Parameter(torch.tensor(0.7)),
        never=nn.Parameter(torch.randn(2)),
    ).double()
    reference = copy.deepcopy(model)
    attach(model, rule(), engine=engine).backward(distance(model(x)), ROWS)
    Aligner(reference, TASKS, rule(), engine="per_task").backward(distance(reference(x)), ROWS)
    assert_same_gradients(model, reference, 1e-9)
    assert model.never.grad is None


# -- modes and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_anomaly_mode(engine: str, x: Tensor) -> None:
    model = Block().double()
    expected = copy.deepcopy(model)
    Aligner(expected, TASKS, rule(), engine="per_task").backward(distance(expected(x)), ROWS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        warnings.filterwarnings("ignore", message=".*continues with per_task.*RuntimeError")
        with torch.autograd.detect_anomaly():
            attach(model, rule(), engine=engine).backward(distance(model(x)), ROWS)
            with pytest.raises(RuntimeError, match="nan"):
                attach(model, rule(), engine=engine).backward(
                    distance(model(x) * 0).sqrt().log().sqrt(), ROWS
                )
    assert_same_gradients(model, expected, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_that_is_not_a_number(engine: str, x: Tensor) -> None:
    """It reaches `.grad`, so that a scaler skips the step; later steps do not know of it."""
    model = Block().double()
    reference = copy.deepcopy(model)
    aligner = attach(model, rule(), engine=engine)
    per_task = Aligner(reference, TASKS, rule(), engine="per_task")
    bad = x.clone()
    bad[2] = torch.nan
    for batch in (bad, x, bad, x):
        for each, own in ((model, aligner), (reference, per_task)):
            each.zero_grad()
            own.backward(distance(each(batch)), ROWS)
        if batch is bad:
            assert all(not p.grad.isfinite().all() for p in model.parameters())
        else:
            assert_same_gradients(model, reference, 1e-9)


@pytest.mark.parametrize("engine", ["one_backward", "auto"])
def test_weights_written_through_data_under_autocast(engine: str) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    aligner = attach(model, rule(), engine=engine)
    reference = copy.deepcopy(model)
    per_task = Aligner(reference, TASKS, rule(), engine="per_task")
    given = torch.randn(B, D)
    for _ in range(3):
        for each, own in ((model, aligner), (reference, per_task)):
            each.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                losses = distance(each(given).float())
            own.backward(losses, ROWS)
            for parameter in each.parameters():
                parameter.data = parameter.data - 0.1
        assert_same_gradients(model, reference, 2e-2)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    where = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_replica_is_the_model(engine: str) -> None:
    model, reference = Block(), Block()
    reference.load_state_dict(model.state_dict())
    replica = nn.parallel.DistributedDataParallel(model)
    aligners = (Aligner(replica, TASKS, engine=engine), Aligner(reference, TASKS, engine=engine))
    for _ in range(2):
        inputs = torch.randn(len(ROWS), 3, 8)
        for own, aligner in zip((replica, reference), aligners, strict=True):
            aligner.backward(own(inputs).flatten(1).square().sum(1), ROWS)
        assert_same_gradients(model, reference, 1e-5)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_are_refused(engine: str) -> None:
    replica = nn.parallel.DistributedDataParallel(Block())
    message = r"model: .*DistributedDataParallel.*every process would train.*the whole model"
    with pytest.raises(ValueError, match=message):
        Aligner(nn.Sequential(replica), TASKS, engine=engine)


def test_many_tasks_and_few_rows() -> None:
    tasks = [f"t{n}" for n in range(60)]
    for batch, of_rows in (
        (60, list(range(60))),
        (1, [7]),
        (7, [3] * 7),
        (90, [n % 50 for n in range(90)]),
    ):
        for layout in (False, True):
            model = nn.Sequential(nn.Linear(D, D), Block(), nn.Linear(D, 2)).double()
            reference = copy.deepcopy(model)
            given = torch.randn(batch, D).double()
            for each, engine in ((model, "one_backward"), (reference, "per_task")):
                hidden = each[0](given)
                if layout:
                    order = given[:, 0].argsort()
                    hidden = each[1](hidden[order])[order.argsort()]
                Aligner(each, tasks, Sum(), engine=engine).backward(
                    distance(each[2](hidden)), of_rows
                )
            assert_same_gradients(model, reference, 1e-9)


def test_sparse_gradients_of_a_table(x: Tensor) -> None:
    tokens = tokens_of(B, S)
    expected, found = (nn.Embedding(V, D, sparse=True).double() for _ in range(2))
    found.load_state_dict(expected.state_dict())
    for each, engine in ((expected, "per_task"), (found, "one_backward")):
        attach(each, rule(), engine=engine).backward(distance(each(tokens)), ROWS)
    assert_same_gradients(found, expected, 1e-9)


def test_real_parameters_of_complex_products(x: Tensor) -> None:
    model = Model(
        lambda m, y: (torch.complex(y, y) @ m.weight.to(torch.complex128)).imag * m.weight[0],
        weight=nn.Parameter(torch.randn(D, D)),
    ).double()
    expected = copy.deepcopy(model)
    for each, engine in ((model, "one_backward"), (expected, "per_task")):
        attach(each, rule(), engine=engine).backward(distance(each(x)), ROWS)
    assert_same_gradients(model, expected, 1e-9)


def test_complex_gradients_are_stored_as_they_are(x: Tensor) -> None:
    model = nn.Linear(D, D, dtype=torch.complex128)
    expected = copy.deepcopy(model)
    for each, dtype in ((model, torch.float32), (expected, None)):
        aligner = attach(each, Sum(), engine="per_task", storage_dtype=dtype)
        aligner.backward(distance(each(torch.complex(x, x)).abs()), ROWS)
    assert_same_gradients(model, expected, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_complex_beside_an_odd_number_of_reals(engine: str, x: Tensor) -> None:
    model = Model(
        lambda m, y: (y * m.scale * m.phase).abs() + m.shift,
        scale=nn.Parameter(torch.tensor(0.7)),
        phase=nn.Parameter(torch.randn(D, dtype=torch.complex64)),
        shift=nn.Parameter(torch.randn(D)),
    ).double()
    model.phase.data = model.phase.data.to(torch.complex128)
    losses = distance(model(x))
    expected = torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True)
    attach(model, Sum(), engine=engine, granularity="whole_model").backward(losses, ROWS)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)

"""Bad input gets an error that names the argument and the fix."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradvac import AdamMetric, Aligner, GradVac

from .problems import ENGINES, Translator, draw_batch

TASKS = ["fr", "hi"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": ["fr", "hi", "fr"]}, "tasks: 'fr' .*twice"),
        ({"tasks": []}, "tasks: .*list of names"),
        ({"tasks": "fr"}, "tasks: .*list of names"),
        ({"tasks": [0, 1]}, "tasks: .*list of names"),
        ({"tasks": {"fr", "hi"}}, "tasks: .*list of names"),  # in no order
        ({"tasks": 2}, "tasks: .*list of names"),
        ({"rule": GradVac}, r"rule: .*GradVac\(\)"),
        ({"rule": 1}, "rule: .*Rule"),
        ({"engine": "fast"}, "engine: .*'fast'"),
        ({"granularity": "layers"}, "granularity: .*'layers'"),
        (
            {"granularity": lambda name: len(name)},
            "granularity: .*callable .*str",
        ),
        ({"rule": GradVac(vaccinated=["de"])}, "vaccinated: .*'de'"),
        ({"offload": "no"}, "offload: .*'no'"),
        ({"stream_bytes": -1}, "stream_bytes: .*whole number .*-1"),
        ({"table_bytes": 4e9}, "table_bytes: .*whole number"),
        ({"storage_dtype": torch.int8}, "storage_dtype: .*floating-point .*int8"),
        ({"storage_dtype": "bf16"}, "storage_dtype: .*floating-point .*'bf16'"),
        ({"metric": AdamMetric}, r"metric: .*AdamMetric\(optimizer\)"),
    ],
)
def test_when_it_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Aligner(Translator(), **{"tasks": TASKS, "engine": "per_task"} | arguments)


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match=r"model: .*requires_grad"):
        Aligner(nn.Linear(2, 2).requires_grad_(False), TASKS)


def test_a_model_that_is_none() -> None:
    optimizer: Any = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"model: .*Module.*SGD"):
        Aligner(optimizer, TASKS)


def test_a_lazy_model() -> None:
    with pytest.raises(ValueError, match=r"model: weight .* run the model"):
        Aligner(nn.LazyLinear(2), TASKS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_of_another_model(engine: str, recompute: bool) -> None:
    """They would be trained by the plain sum, without a word."""
    if engine == "per_task" and recompute:
        return
    model = nn.Linear(2, 1)
    aligner = Aligner(model, TASKS, engine=engine, recompute=recompute)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"losses: .*no parameter"):
            aligner.backward(rows(2), [0, 1])
    frozen = model.requires_grad_(False)  # a head outside is trained alone: nothing to complain of
    head = nn.Linear(1, 1)
    aligner.backward(head(frozen(torch.randn(2, 2)))[:, 0], [0, 1])
    assert head.weight.grad is not None


def test_tasks_may_come_as_arrays_and_generators() -> None:
    model = nn.Linear(2, 1)
    aligner = Aligner(model, np.array(TASKS), engine="per_task")
    for tasks in (np.array(["fr", "hi", "fr"]), np.array([0, 1, 0]), (t % 2 for t in range(3))):
        alignment = aligner.backward(model(torch.randn(3, 2))[:, 0], tasks)
        assert alignment.tasks == ("fr", "hi")


def test_a_state_that_is_none_of_an_aligner() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"state: .* weight"):
        Aligner(model, TASKS).load_state_dict(model.state_dict())
    nothing: Any = None
    with pytest.raises(ValueError, match=r"state: .*state_dict.*None"):
        Aligner(model, TASKS).load_state_dict(nothing)
    state = Aligner(model, TASKS).state_dict()
    del state["step"]
    with pytest.raises(ValueError, match=r"state: .*'step'"):
        Aligner(model, TASKS).load_state_dict(state)


def rows(count: int) -> Tensor:
    model = nn.Linear(2, 1)
    return model(torch.randn(count, 2))[:, 0]


@pytest.mark.parametrize(
    ("losses", "tasks", "message"),
    [
        (rows(3), ["fr", "hi", "de"], "tasks_of_rows: .*'de'"),
        (rows(3), ["fr", "hi"], "tasks_of_rows: .*2 .*losses has 3"),
        (rows(1), ["fr", "hi"], "tasks_of_rows: .*2 .*losses has 1"),
        (rows(2), [0, 2], r"tasks_of_rows: .*index 2 .*0\.\.1"),
        (rows(2), [0, -1], r"tasks_of_rows: .*index -1 .*0\.\.1"),
        (rows(2), [0, 0.5], "tasks_of_rows: .*0.5"),
        (rows(2), [torch.tensor(0), torch.tensor(0.9)], r"tasks_of_rows: .*tensor\(0.9"),
        (rows(2), {"fr", "hi"}, "tasks_of_rows: .*list .*set"),
        (rows(2), {"fr": 0, "hi": 1}, "tasks_of_rows: .*list .*dict"),
        (rows(2), torch.zeros(2) + 0j, "tasks_of_rows: .*integer .*torch.complex"),
        (
            rows(2),
            torch.tensor([0.0, 1.0]),
            "tasks_of_rows: .*integer .*torch.float",
        ),
        (
            rows(2),
            torch.tensor([False, True]),
            r"tasks_of_rows: .*torch.bool .*mask.long\(\)",
        ),
        (rows(2), [False, True], "tasks_of_rows: .*False"),
        (rows(2), torch.tensor([[0], [1]]), r"tasks_of_rows: .* shape \(2, 1\)"),
        (rows(2), None, "tasks_of_rows: .*every row"),
        (rows(2).sum(), ["fr", "hi"], r"losses: .*one entry per row .*\(\)"),
        (rows(4).view(2, 2), ["fr", "hi"], r"losses: .*one entry per row .*\(2, 2\)"),
        (rows(2).mean().expand(2), ["fr", "hi"], "losses: .*same entry"),
        (rows(2).detach(), ["fr", "hi"], "losses: .*graph"),
        (rows(2) * 1j, ["fr", "hi"], "losses: is complex"),
        ({"fr": rows(1) + 0j}, None, r"losses\['fr'\]: is complex"),
        (rows(0), [], "losses: .*empty"),
        ([rows(1), rows(1)], None, "losses: .*mapping .*list"),
        ({}, None, "losses: .*mapping .*empty"),
        ({"de": rows(1)}, None, "losses: .*'de'"),
        (
            {"fr": rows(2)},
            None,
            r"losses: .*'fr' .*scalar .*\(2,\)",
        ),
        ({"fr": 0.5}, None, r"losses: .*'fr' .*scalar .*0.5"),
        ({"fr": rows(1).detach()}, None, r"losses\['fr'\]: .*graph"),
        ({"fr": rows(1)}, ["fr"], "tasks_of_rows: .*per row"),
    ],
)
def test_when_it_is_called(losses: Any, tasks: Any, message: str) -> None:
    aligner = Aligner(nn.Linear(2, 1), TASKS, engine="per_task")
    with pytest.raises(ValueError, match=message):
        aligner.backward(losses, tasks)


def test_the_same_loss_for_every_task() -> None:
    model = nn.Linear(2, 1)
    total = model(torch.randn(4, 2)).sum()
    aligner = Aligner(model, TASKS, engine="per_task")
    with pytest.raises(ValueError, match=r"losses: .*same tensor"):
        aligner.backward({"fr": total, "hi": total})
    assert model.weight.grad is None
    aligner.backward({"fr": total})  # alone it is fine


def test_identical_gradients_are_reported_once() -> None:
    model = nn.Linear(2, 1)
    aligner = Aligner(model, TASKS, engine="per_task")

    def losses() -> dict[str, Tensor]:
        total = model(torch.randn(4, 2)).square().sum()
        return {"fr": total * 1.0, "hi": total + 3.0}  # other tensors, the same gradient

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aligner.backward({"fr": losses()["fr"]})  # one task cannot tell
        aligner.backward({task: loss * torch.inf for task, loss in losses().items()})
    with pytest.warns(UserWarning, match=r"losses: .*same gradient"):
        aligner.backward(losses())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aligner.backward(losses())


@pytest.mark.parametrize("engine", ENGINES)
def test_different_gradients_are_not_reported(engine: str) -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, engine=engine)
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aligner.backward(model(batch.source, batch.words), batch.tasks)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failed_step_leaves_nothing_behind(engine: str) -> None:
    """After an error the next step is that of a fresh aligner."""
    model, fresh = Translator(), Translator()
    aligner = Aligner(model, TASKS, GradVac(beta=0.3), engine=engine)
    expected = Aligner(fresh, TASKS, GradVac(beta=0.3), engine=engine)
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    aligner.backward(model(batch.source, batch.words), batch.tasks, accumulate=True)
    losses = model(batch.source, batch.words)
    losses.sum().backward()  # frees the graph
    model.zero_grad()
    with pytest.raises(RuntimeError, match="second time"):
        aligner.backward(losses, batch.tasks)
    model.zero_grad()
    for one, own in ((aligner, model), (expected, fresh)):
        one.backward(own(batch.source, batch.words), batch.tasks)
    for left, right in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_rules_by_name() -> None:
    aligner = Aligner(torch.nn.Linear(2, 1), ["a", "b"], rule="pcgrad")
    assert "PCGrad" in repr(aligner)
    with pytest.raises(ValueError, match="gradvac"):
        Aligner(torch.nn.Linear(2, 1), ["a", "b"], rule="gradvacc")

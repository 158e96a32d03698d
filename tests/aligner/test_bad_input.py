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
        ({"tasks": ["fr", "hi", "fr"]}, "tasks: 'fr' occurs twice"),
        ({"tasks": []}, "tasks: must be a non-empty list of names"),
        ({"tasks": "fr"}, "tasks: must be a non-empty list of names, got 'fr'"),
        ({"tasks": [0, 1]}, "tasks: must be a non-empty list of names"),
        ({"tasks": {"fr", "hi"}}, "tasks: must be a non-empty list of names"),  # in no order
        ({"tasks": 2}, "tasks: must be a non-empty list of names, got 2"),
        ({"rule": GradVac}, r"rule: is a class; give an instance, GradVac\(\)"),
        ({"rule": 1}, "rule: must be a Rule or the name of one, got 1"),
        ({"engine": "fast"}, "engine: must be one of .* got 'fast'"),
        ({"granularity": "layers"}, "granularity: must be one of .* got 'layers'"),
        (
            {"granularity": lambda name: len(name)},
            r"granularity: the callable must return .*\(str\)",
        ),
        ({"rule": GradVac(vaccinated=["de"])}, "vaccinated: unknown task 'de'; the tasks are"),
        ({"offload": "no"}, "offload: must be True or False, got 'no'"),
        ({"stream_bytes": -1}, "stream_bytes: must be a whole number of bytes, 0 or more, got -1"),
        ({"table_bytes": 4e9}, "table_bytes: must be a whole number of bytes"),
        ({"storage_dtype": torch.int8}, "storage_dtype: must be a floating-point dtype .*int8"),
        ({"storage_dtype": "bf16"}, "storage_dtype: must be a floating-point dtype .* 'bf16'"),
        ({"metric": AdamMetric}, r"metric: must be a callable such as AdamMetric\(optimizer\)"),
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
        with pytest.raises(ValueError, match="losses: reach no parameter"):
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
    with pytest.raises(ValueError, match="state: lacks 'step'"):
        Aligner(model, TASKS).load_state_dict(state)


def rows(count: int) -> Tensor:
    model = nn.Linear(2, 1)
    return model(torch.randn(count, 2))[:, 0]


@pytest.mark.parametrize(
    ("losses", "tasks", "message"),
    [
        (rows(3), ["fr", "hi", "de"], "tasks_of_rows: unknown task 'de'; the tasks are"),
        (rows(3), ["fr", "hi"], "tasks_of_rows: has 2 entries, but losses has 3"),
        (rows(1), ["fr", "hi"], "tasks_of_rows: has 2 entries, but losses has 1"),
        (rows(2), [0, 2], r"tasks_of_rows: task index 2 is outside 0\.\.1"),
        (rows(2), [0, -1], r"tasks_of_rows: task index -1 is outside 0\.\.1"),
        (rows(2), [0, 0.5], "tasks_of_rows: unknown task 0.5; the tasks are"),
        (rows(2), [torch.tensor(0), torch.tensor(0.9)], r"unknown task tensor\(0.9000\)"),
        (rows(2), {"fr", "hi"}, "tasks_of_rows: must be a list .* in their order, got set"),
        (rows(2), {"fr": 0, "hi": 1}, "tasks_of_rows: must be a list .* got dict"),
        (rows(2), torch.zeros(2) + 0j, "tasks_of_rows: .* one integer per row, got torch.complex"),
        (
            rows(2),
            torch.tensor([0.0, 1.0]),
            "tasks_of_rows: .* one integer per row, got torch.float",
        ),
        (
            rows(2),
            torch.tensor([False, True]),
            r"tasks_of_rows: .* one integer per row, got torch.bool .* mask.long\(\)",
        ),
        (rows(2), [False, True], "tasks_of_rows: unknown task False; the tasks are"),
        (rows(2), torch.tensor([[0], [1]]), r"tasks_of_rows: .* shape \(2, 1\)"),
        (rows(2), None, "tasks_of_rows: losses per row need the task of every row"),
        (rows(2).sum(), ["fr", "hi"], r"losses: must have one entry per row .* got shape \(\)"),
        (rows(4).view(2, 2), ["fr", "hi"], r"losses: must have one entry per row .* \(2, 2\)"),
        (rows(2).mean().expand(2), ["fr", "hi"], "losses: every row has the same entry"),
        (rows(2).detach(), ["fr", "hi"], "losses: has no graph to differentiate"),
        (rows(2) * 1j, ["fr", "hi"], "losses: is complex"),
        ({"fr": rows(1) + 0j}, None, r"losses\['fr'\]: is complex"),
        (rows(0), [], "losses: is empty"),
        ([rows(1), rows(1)], None, "losses: must be a 1-D tensor .* or a mapping .* got list"),
        ({}, None, "losses: the mapping is empty"),
        ({"de": rows(1)}, None, "losses: unknown task 'de'; the tasks are"),
        (
            {"fr": rows(2)},
            None,
            r"losses: the loss of 'fr' must be a scalar tensor, got shape \(2,\)",
        ),
        ({"fr": 0.5}, None, r"losses: the loss of 'fr' must be a scalar tensor, got 0.5"),
        ({"fr": rows(1).detach()}, None, r"losses\['fr'\]: has no graph"),
        ({"fr": rows(1)}, ["fr"], "tasks_of_rows: goes with losses per row"),
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
    with pytest.warns(UserWarning, match="losses: .*same gradient"):
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
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
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

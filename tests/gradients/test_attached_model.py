"""An attached model is the model it was: in evaluation, for plain training, copied or pickled."""

import copy
import gc
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import GradVac, Sum
from gradvac.gradients import _fallback, _layers
from gradvac.gradients._graph import graph_nodes

from .parity import (
    UNSORTED,
    Twins,
    assert_same_gradients,
    attach,
    gradients_of,
    made,
    plain_backward,
)
from .zoo import ZOO, Case
from .zoo._case import B, Block, D, HandWrittenNorm, S, distance
from .zoo.huggingface import gpt2_model, t5_model

ROWS = torch.tensor(UNSORTED)
SEVERAL = ["nested", "fallback_shares_with_fast_path", "multihead_attention", "conv2d", "t5"]


def losses_of(case: Case, model: nn.Module) -> Tensor:
    return case.losses(model, ROWS, *case.inputs)


def function_names(root: Tensor) -> set[str]:
    return {node.name() for node in graph_nodes([root])}


def is_attached(root: Tensor) -> bool:
    return any("Tasks" in name for name in function_names(root))


@pytest.mark.parametrize("name", ZOO)
def test_plain_backward(name: str) -> None:
    case = made(name)
    plain, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    _aligner = attach(model)
    plain_backward(losses_of(case, plain))
    plain_backward(losses_of(case, model))
    assert_same_gradients(model, plain, 1e-9)


@pytest.mark.parametrize("name", ZOO)
def test_sum_is_plain_training(name: str) -> None:
    case = made(name)
    plain, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    aligner = attach(model, Sum(), check=False)
    plain_backward(losses_of(case, plain))
    aligner.backward(losses_of(case, model), ROWS)
    assert_same_gradients(model, plain, 1e-9)


@pytest.mark.parametrize("name", SEVERAL)
def test_evaluation_is_untouched(name: str) -> None:
    case = made(name)
    plain, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    aligner = attach(model)
    aligner.backward(losses_of(case, model), ROWS)
    with torch.no_grad():
        found, expected = losses_of(case, model), losses_of(case, plain)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    with torch.inference_mode():
        assert torch.equal(losses_of(case, model), expected)


def test_evaluation_adds_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Block(HandWrittenNorm()), nn.Linear(D, 2))
    _aligner = attach(model)
    x = torch.randn(B, S, D)
    assert {"LinearTasksBackward", "_FallbackTasksBackward"} <= function_names(model(x).sum())

    def refuse(*args: object) -> None:
        raise AssertionError("an autograd.Function ran")

    monkeypatch.setattr(_layers, "_apply", refuse)
    monkeypatch.setattr(_fallback._FallbackTasks, "apply", refuse)
    with torch.no_grad():
        model(x)
    with pytest.raises(AssertionError, match="Function ran"):
        model(x)


def test_evaluation_between_steps_changes_nothing() -> None:
    twins = Twins(made("transformer"), lambda: GradVac(beta=0.3))
    for _ in range(2):
        twins.step(UNSORTED)
        with torch.no_grad():
            losses_of(twins.case, twins.model)


@pytest.mark.parametrize("name", SEVERAL)
def test_names_and_classes_stay(name: str) -> None:
    model = copy.deepcopy(made(name).model)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    signature = inspect.signature(model.forward)
    _aligner = attach(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert inspect.signature(model.forward) == signature


def traces(model: nn.Module) -> list[object]:
    """Names of the attributes of every module, and how many hooks there are."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = [
        (sorted(m.__dict__), [len(getattr(m, hook)) for hook in hooks]) for m in model.modules()
    ]
    return [*of_modules, *(len(p._backward_hooks or ()) for p in model.parameters())]


@pytest.mark.parametrize("name", ZOO)
def test_detach_leaves_no_trace(name: str) -> None:
    model = copy.deepcopy(made(name).model)
    before = traces(model)
    aligner = attach(model)
    assert traces(model) != before
    aligner.detach()
    assert traces(model) == before
    aligner.detach()  # twice does no harm


def test_detach_gives_an_earlier_forward_back() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))
    original = model[0].forward
    calls = []

    def logged(x: Tensor) -> Any:
        calls.append(len(x))
        return original(x)

    model[0].forward = logged
    aligner = attach(model)
    aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    assert calls  # what another library put there is still called
    aligner.detach()
    assert model[0].forward is logged


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("name", SEVERAL)
def test_deep_copy(name: str, attached: bool) -> None:
    case = made(name)
    model = copy.deepcopy(case.model)
    aligner = attach(model)
    aligner.backward(losses_of(case, model), ROWS)
    if not attached:
        aligner.detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a copy that still ran the original's layers would see this
    twin.zero_grad()
    losses = losses_of(case, twin)
    assert not is_attached(losses)
    plain_backward(losses)
    plain = copy.deepcopy(case.model)
    plain_backward(losses_of(case, plain))
    assert_same_gradients(twin, plain, 1e-9)
    again = attach(twin, Sum())
    twin.zero_grad()
    again.backward(losses_of(case, twin), ROWS)
    assert_same_gradients(twin, plain, 1e-9)


@pytest.mark.parametrize("attached", [True, False])
def test_pickle(attached: bool, tmp_path: Path) -> None:
    model = t5_model()
    x = torch.randint(3, 17, (B, S))
    expected = model(input_ids=x, decoder_input_ids=x).logits
    aligner = attach(model)
    if not attached:
        aligner.detach()
    torch.save(model, tmp_path / "model.pt")
    for loaded in (
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        logits = loaded(input_ids=x, decoder_input_ids=x).logits
        torch.testing.assert_close(logits, expected)
        assert not is_attached(logits)


def test_generation() -> None:
    model = gpt2_model().train(mode=False)
    prompt = torch.randint(3, 17, (B, 3))
    kwargs: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
    expected = model.generate(prompt, **kwargs)
    _aligner = attach(model)
    assert torch.equal(model.generate(prompt, **kwargs), expected)


def test_generation_between_training_steps() -> None:
    model = t5_model()
    aligner = attach(model)
    source, target = torch.randint(3, 17, (B, S)), torch.randint(3, 17, (B, 4))
    for _ in range(2):
        aligner.backward(distance(model(input_ids=source, decoder_input_ids=target).logits), ROWS)
        tokens = model.generate(source[:2], max_new_tokens=3, do_sample=False)
        assert tokens.shape[0] == 2


def test_a_model_serves_one_aligner_at_a_time() -> None:
    model = Block()
    aligner = attach(model)
    with pytest.raises(ValueError, match=r"attached to another Aligner; call its detach\(\)"):
        attach(model)
    aligner.detach()
    another = attach(model)
    with pytest.raises(ValueError, match="this Aligner was detached"):
        aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    another.backward(distance(model(torch.randn(B, D))), ROWS)


def test_a_forgotten_aligner_leaves_the_model() -> None:
    model = Block()
    before = traces(model)
    aligner = attach(model)
    aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    del aligner
    gc.collect()
    assert traces(model) == before


def test_second_derivatives_are_refused() -> None:
    """A gradient penalty would silently miss a part."""
    model = Block()
    _aligner = attach(model)
    x = torch.randn(B, D, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        plain_backward(slope.square())


def test_leaves_outside_the_model_get_their_gradient_once() -> None:
    for options in ({}, {"granularity": "whole_model", "recompute": True}):
        model, criterion = Block(), nn.Linear(D, 1)
        aligner = attach(model, Sum(), **options)
        x = torch.randn(B, D, requires_grad=True)
        aligner.backward(criterion(model(x)).square().sum(1), ROWS)
        outside: list[Tensor] = [x, *criterion.parameters()]
        found = [leaf.grad for leaf in outside]
        expected = torch.autograd.grad(criterion(model(x)).square().sum(), outside)
        torch.testing.assert_close(found, list(expected))


def test_accumulates_into_grad() -> None:
    case = made("transformer_encoder")
    model = copy.deepcopy(case.model)
    aligner = attach(model, Sum())
    aligner.backward(losses_of(case, model), ROWS)
    once = gradients_of(model)
    aligner.backward(losses_of(case, model), ROWS)
    torch.testing.assert_close(gradients_of(model), {n: 2 * g for n, g in once.items()})


def test_optimiser_and_state_dict_round_trip() -> None:
    model = Block()
    aligner = attach(model)
    saved = copy.deepcopy(model.state_dict())
    aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.load_state_dict(saved)
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())

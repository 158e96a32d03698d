"""A model with an Aligner is the model it was: nothing is attached, and the forward runs once."""

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import GradVac, Sum

from .parity import (
    ONE_ABSENT,
    SORTED,
    UNSORTED,
    Twins,
    assert_same_gradients,
    attach,
    gradients_of,
    made,
    plain_backward,
)
from .zoo import ZOO, Case
from .zoo._case import B, Block, D, Model, S, distance
from .zoo.huggingface import gpt2_model, t5_model

ROWS = torch.tensor(UNSORTED)
SEVERAL = ["nested", "fallback_shares_with_fast_path", "multihead_attention", "conv2d", "t5"]


def losses_of(case: Case, model: nn.Module) -> Tensor:
    return case.losses(model, ROWS, *case.inputs)


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


def test_evaluation_between_steps_changes_nothing() -> None:
    twins = Twins(made("transformer"), lambda: GradVac(beta=0.3))
    for _ in range(2):
        twins.step(UNSORTED)
        with torch.no_grad():
            losses_of(twins.case, twins.model)


def traces(model: nn.Module) -> list[object]:
    """What a module and its parameters have: attributes, hooks, classes, forwards."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = [
        (type(m), m.forward, sorted(m.__dict__), [len(getattr(m, hook)) for hook in hooks])
        for m in model.modules()
    ]
    of_parameters = [
        (p._version, p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()
    ]
    return [*of_modules, *of_parameters, *model.state_dict()]


@pytest.mark.parametrize("name", ZOO)
def test_a_step_leaves_no_trace(name: str) -> None:
    case = made(name)
    model = copy.deepcopy(case.model)
    losses_of(case, model)  # some models write to their own buffers
    before = traces(model)
    aligner = attach(model)
    assert traces(model) == before
    aligner.backward(losses_of(case, model), ROWS)
    if name != "embedding_with_max_norm":  # its forward writes to its weight
        assert traces(model) == before


def nodes_of(root: Tensor) -> list[str]:
    found, todo = [], [root.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        assert node is not None
        found.append(node.name())
        more = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= more
        todo += sorted(more, key=id)
    return sorted(found)


@pytest.mark.parametrize("name", SEVERAL)
def test_the_graph_is_the_plain_one(name: str) -> None:
    case = made(name)
    plain, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    _aligner = attach(model)
    assert nodes_of(losses_of(case, model).sum()) == nodes_of(losses_of(case, plain).sum())


def test_modules_that_count_or_draw_run_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.PReLU(D), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            result: Tensor = self.inner(x) * random.random() * self.calls
            return result

    def run(engine: str) -> tuple[nn.Module, list[str]]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(D, D), Counting(), nn.Linear(D, 2)).double()
        heard: list[str] = []
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: heard.append("before"))
            module.register_forward_hook(lambda *_: heard.append("after"))
        aligner = attach(model, GradVac(beta=0.3), engine=engine)
        for tasks in (UNSORTED, SORTED, ONE_ABSENT):
            aligner.backward(distance(model(torch.randn(B, D).double())), tasks)
        assert model[1].calls == 3
        return model, heard

    expected, found = run("per_task"), run("one_backward")
    assert_same_gradients(found[0], expected[0], 1e-9)
    assert found[1] == expected[1]
    assert len(found[1]) == 2 * 3 * 5


def test_containers_are_the_callers() -> None:
    """Lists and dictionaries that modules fill: auxiliary losses, caches."""

    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor, aux: list[Tensor], cache: dict[str, Tensor]) -> Tensor:
            aux.append((x * self.scale).square().mean(1))
            cache["last"] = x.tanh() * self.scale
            return x + self.scale

    def run(engine: str) -> nn.Module:
        torch.manual_seed(0)
        model = Model(lambda _, x: x, first=nn.Linear(D, D), filling=Filling()).double()
        aligner = attach(model, GradVac(beta=0.3), engine=engine)
        for _ in range(2):
            aux: list[Tensor] = []
            cache: dict[str, Tensor] = {}
            y = model.filling(model.first(torch.randn(B, D).double()), aux, cache)
            assert len(aux) == 1
            aligner.backward(distance(y) + aux[0] + cache["last"].sum(1), ROWS)
        return model

    assert_same_gradients(run("one_backward"), run("per_task"), 1e-9)


@pytest.mark.parametrize("name", SEVERAL)
def test_deep_copy(name: str) -> None:
    case = made(name)
    model = copy.deepcopy(case.model)
    aligner = attach(model)
    aligner.backward(losses_of(case, model), ROWS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a copy that still ran the original's layers would see this
    twin.zero_grad()
    plain_backward(losses_of(case, twin))
    plain = copy.deepcopy(case.model)
    plain_backward(losses_of(case, plain))
    assert_same_gradients(twin, plain, 1e-9)
    again = attach(twin, Sum())
    twin.zero_grad()
    again.backward(losses_of(case, twin), ROWS)
    assert_same_gradients(twin, plain, 1e-9)


def test_pickle(tmp_path: Path) -> None:
    model = t5_model()
    x = torch.randint(3, 17, (B, S))
    expected = model(input_ids=x, decoder_input_ids=x).logits
    _aligner = attach(model)
    torch.save(model, tmp_path / "model.pt")
    for loaded in (
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        logits = loaded(input_ids=x, decoder_input_ids=x).logits
        torch.testing.assert_close(logits, expected)


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


def test_two_aligners_on_one_model() -> None:
    """Each knows its own graphs; neither disturbs the other."""
    torch.manual_seed(0)
    model = Block().double()
    x = torch.randn(2, B, D).double()
    first, second = attach(model, GradVac(beta=0.3)), attach(model, Sum())
    one, other = distance(model(x[0])), distance(model(x[1]))  # both graphs are alive
    second.backward(other, ROWS)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain_backward(distance(plain(x[1])))
    assert_same_gradients(model, plain, 1e-9)
    model.zero_grad()
    first.backward(one, ROWS)
    reference = copy.deepcopy(plain)
    reference.zero_grad()
    attach(reference, GradVac(beta=0.3), engine="per_task").backward(
        distance(reference(x[0])), ROWS
    )
    assert_same_gradients(model, reference, 1e-9)
    first.detach()
    first.detach()  # twice does no harm


def test_one_aligner_on_two_graphs_at_a_time() -> None:
    twins = Twins(made("nested"), lambda: GradVac(beta=0.3))
    for model, aligner in ((twins.reference, twins.per_task), (twins.model, twins.aligner)):
        early, late = losses_of(twins.case, model), losses_of(twins.case, model)
        aligner.backward(late * 2, ROWS)
        aligner.backward(early, ROWS)
    assert_same_gradients(twins.model, twins.reference, 1e-9)


def test_second_derivatives() -> None:
    """A gradient penalty: its graph is read like any other."""
    torch.manual_seed(0)
    model = Block().double()
    reference = copy.deepcopy(model)
    x = torch.randn(B, D).double()
    for each, engine in ((model, "one_backward"), (reference, "per_task")):
        own = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(own).tanh().sum(), own, create_graph=True)
        attach(each, GradVac(beta=0.3), engine=engine).backward(slope.square().sum(1), ROWS)
    assert_same_gradients(model, reference, 1e-9)


def test_parameters_that_are_swapped() -> None:
    """Torch never calls hooks of tensors that had some, or an empty dictionary, before that."""
    model = Block()
    model.down.weight.register_hook(lambda _: None).remove()
    aligner, seen = attach(model, Sum()), list[Tensor]()
    for step in range(1, 11):  # 1, 2 and 10 are verified
        if step == 4:
            for part in (model.up, model.down):
                torch.utils.swap_tensors(part.weight, nn.Parameter(torch.randn_like(part.weight)))
            model.up.weight.register_hook(seen.append)
        x = torch.randn(B, D)
        model.zero_grad()
        distance(model(x)).sum().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        aligner.backward(distance(model(x)), ROWS)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    assert len(seen) == 2 * 7  # of the plain backward, and of ours


def test_leaves_outside_the_model_get_their_gradient_once() -> None:
    for options in (
        {},
        {"granularity": "whole_model", "recompute": True},
        {"engine": "auto"},
        {"engine": "per_task"},
    ):
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

"""Similarities without the noise of the batch, from two halves of every task's rows."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Rule
from gradvac.rules import rule_class

from ..rules.steps import bound, gram_of, step

Halves = rule_class("studies/halves.py:Halves")
study = sys.modules[Halves.__module__]


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def bound_halves(rule: Rule, num_tasks: int) -> Rule:
    rule.bind(study.halves_of([chr(97 + i) for i in range(num_tasks)]), ["0"])
    return rule


def test_lengths_are_those_of_what_two_halves_share() -> None:
    """By hand: the rule of whole tasks, whose squared lengths are 4 <a, b>."""
    halves, vaccine = bound_halves(Halves(GradVac(target=0.9)), 3), bound(GradVac(target=0.9), 3)
    shared, noise = draw(0, 3, 6), 0.3 * draw(1, 3, 2, 6)
    gradients = shared[:, None] / 2 + noise  # [T, 2, P]
    gram = gram_of(gradients.sum(1))
    lengths = 4 * (gradients[:, 0] * gradients[:, 1]).sum(-1)
    by_hand = (
        gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2)) + torch.diag_embed(lengths)[None]
    )
    found = step(halves, gram_of(gradients.flatten(0, 1)))
    expected = step(vaccine, by_hand).weights.repeat_interleave(2, 1)
    torch.testing.assert_close(found.weights, expected)
    assert not torch.allclose(expected, step(vaccine, gram).weights.repeat_interleave(2, 1))


def test_similarity_does_not_depend_on_the_noise() -> None:
    """Targets learn the cosine of the signals, where plain ones learn a tenth of it."""
    halves, plain = bound_halves(Halves(GradVac(beta=0.02)), 2), bound(GradVac(beta=0.02), 2)
    signals = torch.stack([torch.eye(200)[0], 0.6 * torch.eye(200)[0] + 0.8 * torch.eye(200)[1]])
    for seed in range(400):
        gradients = signals[:, None] / 2 + 0.1 * draw(seed, 2, 2, 200)
        step(halves, gram_of(gradients.flatten(0, 1)))
        step(plain, gram_of(gradients.sum(1)))
    learned = halves.state_dict()["of_tasks"]["target"][0, 0, 1]
    assert learned == pytest.approx(0.6, abs=0.08)
    assert plain.state_dict()["target"][0, 0, 1] < 0.2


def test_a_task_with_one_half_keeps_its_length() -> None:
    halves, plain = bound_halves(Halves(GradVac(target=0.5)), 2), bound(GradVac(target=0.5), 2)
    gradients = draw(3, 2, 5)
    losses = torch.ones(2, dtype=torch.float64)
    found = step(halves, gram_of(gradients), present=[1, 2], losses=losses)
    assert torch.equal(found.weights, step(plain, gram_of(gradients)).weights)


def test_an_aligner_whose_caller_divides_the_rows() -> None:
    """Both halves of a task get its weight; rows are dealt to them in turn."""
    torch.manual_seed(0)
    tasks = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1])
    assert study.in_halves(tasks).tolist() == [0, 2, 1, 0, 3, 2, 1, 3]
    model = nn.Linear(4, 1).double()
    aligner = Aligner(model, study.halves_of(["fr", "hi"]), Halves(GradVac(target=0.9)))
    losses = (1.0 - 2.0 * tasks) * model(draw(0, 8, 4))[:, 0] ** 2  # opposed
    found = aligner.backward(losses, study.in_halves(tasks))
    assert found is not None
    assert found.tasks == ("fr#a", "fr#b", "hi#a", "hi#b")
    assert torch.equal(found.weights[:, ::2], found.weights[:, 1::2])
    assert found.active.any()


def test_tasks_that_are_no_halves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tasks: .*halves"):
        bound(Halves(GradVac()), 4)

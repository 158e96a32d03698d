"""Similarities without the noise of the batch, from two halves of every task's rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradvac
from gradvac import Aligner, GradVac, Only, Rule, Weighing
from gradvac.rules import rule_class

from ..rules.steps import bound, gram_of, step

Halves = rule_class("studies/halves.py:Halves")
TASKS = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 0])
FIRST = torch.tensor([0, 1, 3, 5, 8])  # rows that are dealt to the first half of their task


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_lengths_are_those_of_what_two_halves_share() -> None:
    """By hand: the rule of whole tasks, whose squared lengths are 4 <a, b>."""
    halves, vaccine = bound(Halves(GradVac(target=0.9)), 3), bound(GradVac(target=0.9), 3)
    shared, noise = draw(0, 3, 6), 0.3 * draw(1, 3, 2, 6)
    gradients = shared[:, None] / 2 + noise  # [T, 2, P]
    gram = gram_of(gradients.sum(1))
    lengths = 4 * (gradients[:, 0] * gradients[:, 1]).sum(-1)
    by_hand = (
        gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2)) + torch.diag_embed(lengths)[None]
    )
    found = step(halves, gram_of(gradients.flatten(0, 1)), present=range(3), losses=torch.ones(3))
    expected = step(vaccine, by_hand).weights
    torch.testing.assert_close(found.weights, expected)
    assert not torch.allclose(expected, step(vaccine, gram).weights)


def test_similarity_does_not_depend_on_the_noise() -> None:
    """Targets learn the cosine of the signals, where plain ones learn a tenth of it."""
    halves, plain = bound(Halves(GradVac(beta=0.02)), 2), bound(GradVac(beta=0.02), 2)
    signals = torch.stack([torch.eye(200)[0], 0.6 * torch.eye(200)[0] + 0.8 * torch.eye(200)[1]])
    for seed in range(400):
        gradients = signals[:, None] / 2 + 0.1 * draw(seed, 2, 2, 200)
        step(halves, gram_of(gradients.flatten(0, 1)), present=[0, 1], losses=torch.ones(2))
        step(plain, gram_of(gradients.sum(1)))
    learned = halves.state_dict()["of_tasks"]["target"][0, 0, 1]
    assert learned == pytest.approx(0.6, abs=0.08)
    assert plain.state_dict()["target"][0, 0, 1] < 0.2


def test_a_task_with_one_half_keeps_its_length() -> None:
    halves, plain = bound(Halves(GradVac(target=0.5)), 2), bound(GradVac(target=0.5), 2)
    gradients = draw(3, 2, 5)
    in_halves = torch.zeros(4, 5, dtype=torch.float64)
    in_halves[[1, 2]] = gradients
    found = step(halves, gram_of(in_halves), present=[0, 1], losses=torch.ones(2))
    assert torch.equal(found.weights, step(plain, gram_of(gradients)).weights)


class Seen(Rule):
    """Keeps the Gram matrices it is shown."""

    parts_per_task = 2

    def weigh_finite(self, components: range, gram: Tensor) -> Weighing:
        self.gram = gram.clone()
        return self.answer(gram, gram.new_tensor([[2.0, 3.0]]).expand(len(gram), 2))


def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 1, bias=False).double(), draw(0, len(TASKS), 4)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, 0] ** 2


def gradients_by_half(model: nn.Module, x: Tensor) -> Tensor:
    """`[4, P]`, row by row."""
    (rows,) = torch.autograd.functional.jacobian(
        lambda w: (x @ w.T)[:, 0] ** 2, (model.weight.detach(),)
    )
    half = torch.ones(len(TASKS), dtype=torch.int64)
    half[FIRST] = 0
    return rows.new_zeros(4, 4).index_add(0, 2 * TASKS + half, rows.flatten(1))


@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
def test_a_rule_sees_parts_of_tasks_and_weighs_tasks(engine: str) -> None:
    model, x = linear()
    rule = Seen()
    alignment = Aligner(model, ["fr", "hi"], rule, engine=engine).backward(
        losses_of(model, x), TASKS
    )
    parts = gradients_by_half(model, x)
    torch.testing.assert_close(rule.gram, gram_of(parts))
    by_task = parts.view(2, 2, 4).sum(1)
    assert alignment.tasks == ("fr", "hi")
    torch.testing.assert_close(alignment.gram, gram_of(by_task))
    torch.testing.assert_close(model.weight.grad, (2 * by_task[0] + 3 * by_task[1])[None])


def test_micro_batches_go_on_dealing() -> None:
    """One row of a task in each of two micro-batches: one in each half."""
    model, x = linear()
    rule = Seen()
    aligner = Aligner(model, ["fr", "hi"], rule)
    aligner.backward(losses_of(model, x[:2]), [0, 1], accumulate=True)
    aligner.backward(losses_of(model, x[2:4]), [0, 1])
    assert (rule.gram.diagonal(dim1=1, dim2=2) > 0).all()


def test_rows_of_packed_batches_are_declared_by_entry() -> None:
    model, x = linear()
    lengths = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1, 1])
    sentence = torch.arange(9).repeat_interleave(lengths)
    tokens = draw(5, len(sentence), 4)

    def run(rows: gradvac.RowTasks, engine: str) -> Tensor:
        rule = Seen()
        aligner = Aligner(model, ["fr", "hi"], rule, engine=engine)
        with gradvac.rows(rows):
            per_token = losses_of(model, tokens)
        aligner.backward(x.new_zeros(9).index_add(0, sentence, per_token), TASKS)
        return rule.gram

    declared = gradvac.RowTasks(entries=sentence)
    torch.testing.assert_close(run(declared, "one_backward"), run(declared, "per_task"))
    with pytest.raises(ValueError, match="entries"):
        run(gradvac.RowTasks(TASKS[sentence]), "one_backward")
    with pytest.raises(ValueError, match=r"entries must be 0\.\.8"):
        run(gradvac.RowTasks(entries=sentence + 1), "one_backward")
    with pytest.raises(ValueError, match="entries must be integers"):
        run(gradvac.RowTasks(entries=sentence > 4), "one_backward")


def test_only_limits_it_too() -> None:
    model, x = linear()
    aligner = Aligner(model, ["fr", "hi"], Only(Halves(GradVac(target=0.9)), until_step=1))
    opposed = 1.0 - 2.0 * TASKS
    assert aligner.backward(opposed * losses_of(model, x), TASKS).active.any()
    assert not aligner.backward(opposed * losses_of(model, x), TASKS).active.any()


def test_a_mapping_cannot_be_divided() -> None:
    model, x = linear()
    losses = losses_of(model, x)
    with pytest.raises(ValueError, match="losses per row"):
        Aligner(model, ["fr", "hi"], Halves()).backward({"fr": losses[0], "hi": losses[1]})

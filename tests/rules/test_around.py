"""Rules around other rules: only here and there, and without the noise of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradvac import MGDA, GradVac, Halves, Only, PCGrad, halves_of

from .steps import assert_same_state, bound, gram_of, step


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_only_some_components() -> None:
    vaccine, limited = (
        bound(GradVac(beta=0.5), 3, 4),
        bound(Only(GradVac(beta=0.5), ["1", "3"]), 3, 4),
    )
    for seed in range(4):
        gram = gram_of(draw(seed, 4, 3, 5))
        own, other = step(vaccine, gram), step(limited, gram)
        assert torch.equal(other.weights[[1, 3]], own.weights[[1, 3]])
        assert torch.equal(other.weights[[0, 2]], torch.ones(2, 3, dtype=torch.float64))
        assert torch.equal(other.target, own.target)  # it learns everywhere
        assert not other.active[[0, 2]].any()
    assert own.active.any()
    assert not torch.equal(own.weights, other.weights)


def test_only_some_steps_also_after_a_break() -> None:
    vaccine, limited = bound(GradVac(beta=0.5), 3), bound(Only(GradVac(beta=0.5), None, 2, 5), 3)
    acted = []
    for number in range(7):
        if number == 3:  # resumed
            state = limited.state_dict()
            limited = bound(Only(GradVac(beta=0.5), None, 2, 5), 3)
            limited.load_state_dict(state)
            assert_same_state(limited.state_dict(), state)
        gram = gram_of(draw(number, 3, 5) - 0.5)
        own, other = step(vaccine, gram).weights, step(limited, gram).weights
        expected = own if 2 <= number < 5 else torch.ones_like(own)
        assert torch.equal(other, expected)
        acted.append(not torch.equal(other, torch.ones_like(own)))
    assert any(acted)


def test_steps_that_are_not_finite_do_not_count() -> None:
    limited = bound(Only(PCGrad(), from_step=1), 2)
    opposed = gram_of(torch.tensor([[1.0, 0.0], [-0.5, 1.0]]))
    step(limited, opposed * torch.inf)
    assert torch.equal(step(limited, opposed).weights, torch.ones(1, 2, dtype=torch.float64))
    assert not torch.equal(step(limited, opposed).weights, torch.ones(1, 2, dtype=torch.float64))


def bound_halves(rule: Halves, num_tasks: int) -> Halves:
    rule.bind(halves_of([chr(97 + i) for i in range(num_tasks)]), ["0"])
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
    learned = halves.state_dict()["around"]["target"][0, 0, 1]
    assert learned == pytest.approx(0.6, abs=0.08)
    assert plain.state_dict()["target"][0, 0, 1] < 0.2


def test_a_task_with_one_half_keeps_its_length() -> None:
    halves, plain = bound_halves(Halves(GradVac(target=0.5)), 2), bound(GradVac(target=0.5), 2)
    gradients = draw(3, 2, 5)
    losses = torch.ones(2, dtype=torch.float64)
    found = step(halves, gram_of(gradients), present=[1, 2], losses=losses)
    assert torch.equal(found.weights, step(plain, gram_of(gradients)).weights)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="'head' is no component; they are 0"):
        bound(Only(GradVac(), ["head"]), 2)
    with pytest.raises(ValueError, match="components: must be a list"):
        Only(GradVac(), "encoder*")
    with pytest.raises(
        ValueError, match="until_step: the rule would never act from step 5 until 5"
    ):
        Only(GradVac(), None, 5, 5)
    with pytest.raises(ValueError, match="MGDA is not about similarities of pairs"):
        Halves(Only(MGDA()))
    with pytest.raises(ValueError, match="tasks: this rule takes the halves of tasks"):
        bound(Halves(GradVac()), 4)

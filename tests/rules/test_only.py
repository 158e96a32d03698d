"""A rule that acts only here and there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradvac import GradVac, Only, PCGrad

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


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'head' .*0"):
        bound(Only(GradVac(), ["head"]), 2)
    with pytest.raises(ValueError, match=r"components: .*list"):
        Only(GradVac(), "encoder*")
    with pytest.raises(ValueError, match=r"until_step: .*never"):
        Only(GradVac(), None, 5, 5)

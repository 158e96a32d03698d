"""Controls take away one thing, and leave the rest of GradVac as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from gradvac import GradVac, Rule
from gradvac.rules import rule_class

from ..rules.steps import bound, gram_of, step

Control = rule_class("studies/controls.py:Control")
Frozen = rule_class("studies/frozen.py:Frozen")


def draw(seed: int, num_tasks: int = 4, num_components: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_components, num_tasks, 6)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def length(gradients: Tensor, weights: Tensor) -> Tensor:
    return (weights[..., None] * gradients).sum(-2).norm(dim=-1)


def beside_gradvac(kind: Literal["norm", "direction"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Gradients, and the weights of GradVac and of a control that learns what GradVac learns."""
    vaccine, control = bound(GradVac(beta=0.3), 4, 3), bound(Control(kind, beta=0.3), 4, 3)
    differs = False
    for seed in range(6):
        gradients = draw(seed)
        own, other = (step(rule, gram_of(gradients)) for rule in (vaccine, control))
        torch.testing.assert_close(other.target, own.target)
        differs |= not torch.allclose(own.weights, other.weights)
        yield gradients, own.weights, other.weights
    assert differs


def test_norm_is_the_plain_sum_at_the_length_of_gradvac() -> None:
    for gradients, own, other in beside_gradvac("norm"):
        assert torch.equal(other, other[:, :1].expand_as(other))
        torch.testing.assert_close(length(gradients, other), length(gradients, own))


def test_direction_is_the_update_of_gradvac_at_the_length_of_the_plain_sum() -> None:
    for gradients, own, other in beside_gradvac("direction"):
        torch.testing.assert_close(
            length(gradients, other), length(gradients, torch.ones_like(own))
        )
        both = (weights / weights.sum(-1, keepdim=True) for weights in (own, other))
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("vaccinated", [None, ["b", "c"]])
def test_shuffled_targets_are_those_of_other_pairs(vaccinated: list[str] | None) -> None:
    control = bound(Control("shuffled", beta=0.5, seed=3, vaccinated=vaccinated), 4, 3)
    for seed in range(4):
        step(control, gram_of(draw(seed)))
    own = control.state_dict()["target"]
    held = step(control, gram_of(draw(9))).target
    rows = [0, 1, 2, 3] if vaccinated is None else [1, 2]
    apart = ~torch.eye(4, dtype=torch.bool)
    moved = 0
    for before, after in zip(own, held, strict=True):
        pairs = [(before[i][apart[i]], after[i][apart[i]]) for i in rows]
        first, second = (torch.cat(side).sort().values for side in zip(*pairs, strict=True))
        torch.testing.assert_close(first, second)  # the same numbers, elsewhere
        moved += int((before != after).sum())
    assert moved > 12
    others = [i for i in range(4) if i not in rows]
    assert torch.equal(held[:, others], own[:, others])


def test_random_targets_lie_between_the_lowest_and_the_highest() -> None:
    control = bound(Control("random", beta=0.5), 4, 3)
    for seed in range(4):
        step(control, gram_of(draw(seed)))
    own = control.state_dict()["target"]
    held = step(control, gram_of(draw(9))).target
    apart = ~torch.eye(4, dtype=torch.bool)
    for before, after in zip(own, held, strict=True):
        assert after[apart].min() >= before[apart].min()
        assert after[apart].max() <= before[apart].max()
        assert len(after[apart].unique()) == 12
    assert not torch.allclose(own, held)


@pytest.mark.parametrize("kind", ["shuffled", "random"])
def test_what_is_drawn_follows_from_seed_and_names_and_survives_a_checkpoint(kind: str) -> None:
    def trained(seed: int) -> Rule:
        rule = bound(Control(kind, beta=0.5, seed=seed), 4, 3)
        for number in range(4):
            step(rule, gram_of(draw(number)))
        return rule

    first, again, other = trained(1), trained(1), trained(2)
    held = step(first, gram_of(draw(9))).target
    assert torch.equal(held, step(again, gram_of(draw(9))).target)
    assert not torch.equal(held, step(other, gram_of(draw(9))).target)
    restored = bound(Control(kind, beta=0.5, seed=7), 4, 3)
    restored.load_state_dict(trained(1).state_dict())
    assert torch.equal(held, step(restored, gram_of(draw(9))).target)


def test_frozen_weights_are_constants_by_component() -> None:
    weights = {"0": {"a": 1.0, "b": 2.0}, "1": {"b": 0.5, "a": 3.0}}
    rule = bound(Frozen(weights), 2, 2)
    found = step(rule, gram_of(draw(0, 2, 2))).weights
    assert found.tolist() == [[1.0, 2.0], [3.0, 0.5]]
    alone = step(rule, gram_of(draw(0, 1, 2)), present=[1])
    assert alone.weights.tolist() == [[2.0], [0.5]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"0": {"a": 1.0, "b": 1.0}}, "'1'"),
        ({"0": {"a": 1.0}, "1": {"a": 1.0, "b": 1.0}}, "'b'"),
        (
            {"0": {"a": 1.0, "b": 1.0, "x": 2.0}, "1": {"a": 1.0, "b": 1.0}},
            "'x'",
        ),
        ({str(n): {"a": 1.0, "b": 1.0} for n in range(3)}, "more than components"),
    ],
)
def test_weights_of_another_model_are_refused(
    weights: dict[str, dict[str, float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bound(Frozen(weights), 2, 2)


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(ValueError, match=r"control: .*norm, direction"):
        Control("sign")

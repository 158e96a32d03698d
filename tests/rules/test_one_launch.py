"""Weighing in one launch, with a stand-in for the kernel, which needs a GPU (gpu_checks.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradvac import GradVac, PCGrad
from gradvac.rules import Weighing, pairwise
from gradvac.rules.pairwise import Pairwise

TASKS, COMPONENTS = list("abcdef"), list("xyz")
PRESENT, CHOSEN = [4, 0, 2, 5], [[2], [0, 1]]  # components come in parts


class StandIn:
    """What `sweep_kernel.py` does, in torch operations."""

    def random_order_triton(self, *_: Any) -> None:
        """The order is drawn without it."""

    def pairwise_sweep_triton(
        self,
        gram: Tensor,
        target: Tensor,
        order: Tensor,
        vaccinated: Tensor,
        chosen: Tensor,
        present: Tensor,
        finite: Tensor,
        following: Tensor,
        constants: Tensor,
    ) -> tuple[Tensor, ...]:
        beta, cancelled, largest = constants.tolist()
        assert (cancelled, largest) == (pairwise.CANCELLED, pairwise.TARGET_LIMIT)
        pairs = (chosen[:, None, None], present[:, None], present)
        is_good = gram.isfinite().all(-1).all(-1)
        finite &= is_good.all()
        clean, held = torch.where(is_good[:, None, None], gram, 0.0), target[pairs]
        given = (held.clamp_max(largest), order[chosen], vaccinated[present])
        coefficients, observed, active = pairwise.pairwise_sweep_reference(clean, *given)
        moved = (1.0 - beta) * held + beta * observed
        following[pairs] = torch.where(observed.isnan(), held, moved)
        return coefficients, observed, active, held


def steps(rule: Pairwise) -> list[Tensor]:
    """What three steps find, one of which has a Gram matrix that is not finite."""
    torch.manual_seed(0)
    rule.bind(TASKS, COMPONENTS)
    found: list[Tensor] = []
    for number in range(3):
        gradients = torch.randn(len(COMPONENTS), len(PRESENT), 9, dtype=torch.float64)
        gram = gradients @ gradients.mT
        if number == 1:
            gram[1, 2, 0] = torch.inf
        rule.start_step(PRESENT, torch.ones(len(PRESENT), dtype=torch.float64))
        for components in CHOSEN:
            weighing = rule.weigh(components, gram[components])
            found += [weighing.weights, weighing.target, weighing.active.double()]
        rule.commit()
        found += [rule.finite.double(), rule.state_dict()["target"]]
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: GradVac(0.3),
        lambda: GradVac(target=0.9, vaccinated=["a", "c", "d"], order="fixed"),
        PCGrad,
    ],
)
def test_weighs_as_without_it(
    make: Callable[[], Pairwise], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(make())
    monkeypatch.setattr(pairwise, "_kernel", lambda _: StandIn())
    for mine, theirs in zip(steps(make()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14, equal_nan=True)


class Doubled(GradVac):
    """Somebody's rule."""

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        weighing = super().weigh_finite(components, gram)
        return Weighing(2 * weighing.weights, weighing.target, weighing.active)


class Held(GradVac):
    """Another."""

    def held_targets(self, targets: Tensor) -> Tensor:
        return targets.clamp_min(0.5)


@pytest.mark.parametrize("make", [Doubled, Held, lambda: GradVac(preserve_norm=True)])
def test_a_rule_that_does_something_else_is_asked(
    make: Callable[[], Pairwise], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(make())
    monkeypatch.setattr(pairwise, "_kernel", lambda like: object() if like.dim() == 3 else None)
    reference = pairwise.pairwise_sweep_reference
    monkeypatch.setattr(pairwise, "pairwise_sweep", reference)
    for mine, theirs in zip(steps(make()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14, equal_nan=True)

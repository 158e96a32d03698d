"""Small helpers to run a rule without a model."""

# K components, T tasks, P parameters

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac.rules import Rule, Weighing


def gram_of(gradients: Tensor) -> Tensor:
    """Inner products of `[K, T, P]` (or `[T, P]`, one component), `[K, T, T]`."""
    gradients = gradients.double()
    gradients = gradients if gradients.dim() == 3 else gradients[None]
    return gradients @ gradients.mT


def bound(rule: Rule, num_tasks: int, num_components: int = 1) -> Rule:
    """The rule, with tasks a, b, c, ... and components 0, 1, 2, ..."""
    rule.bind([chr(97 + i) for i in range(num_tasks)], [str(k) for k in range(num_components)])
    return rule


def step(
    rule: Rule,
    gram: Tensor,
    *,
    present: Sequence[int] | None = None,
    losses: Tensor | None = None,
) -> Weighing:
    """One whole step of a bound rule on Gram matrices `[K, T, T]` of all its components."""
    num_components, num_tasks, _ = gram.shape
    present = range(num_tasks) if present is None else present
    losses = torch.ones(num_tasks, dtype=torch.float64) if losses is None else losses
    rule.start_step(present, losses)
    weighing = rule.weigh(range(num_components), gram)
    rule.commit()
    return weighing


def weights_of(rule: Rule, gradients: Tensor, *, losses: Tensor | None = None) -> Tensor:
    """Weights `[T]` an unbound rule gives to one component with these gradients `[T, P]`."""
    return step(bound(rule, len(gradients)), gram_of(gradients), losses=losses).weights[0]


def assert_same_state(found: Any, expected: Any, *, rtol: float = 0.0) -> None:
    """Nested dictionaries and lists are equal, bit for bit or up to rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same_state(found[key], expected[key], rtol=rtol)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_state(one, other, rtol=rtol)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True)
    else:
        assert found == expected

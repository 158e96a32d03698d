"""Similarity targets of task pairs: learned by a moving average, or fixed.

Both are one mechanism, `target <- (1 - beta) target + beta phi`; a fixed target has beta = 0.
"""

# K components, T tasks

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from gradvac.rules._rule import check_names


@dataclass(frozen=True)
class EmaTarget:
    """Eq. 4 of the paper: a moving average of the similarities seen, starting at 0.

    Args:
        beta: Weight of the *new* value, in [0, 1].
    """

    beta: float = 1e-2

    def __post_init__(self) -> None:
        if not (isinstance(self.beta, Real) and 0.0 <= self.beta <= 1.0):
            raise ValueError(f"beta: must be in [0, 1], got {self.beta!r}; the paper uses 1e-2.")

    def start(self, tasks: Sequence[str], num_components: int) -> Tensor:
        """Targets before the first step, `[K, T, T]`."""
        return torch.zeros(num_components, len(tasks), len(tasks), dtype=torch.float64)


@dataclass(frozen=True)
class FixedTarget:
    """A constant target: 0 gives PCGrad, 0.5 is the paper's fixed objective.

    Args:
        value: One target for all pairs, in [-1, 1]; or a mapping (task i, task j) -> target, where
            unnamed pairs have `default`. Pairs are directional: i is the task that is altered.
        default: Target of the pairs that a mapping does not name.
    """

    value: float | Mapping[tuple[str, str], float]
    default: float = 0.0
    beta: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        values = self.value.values() if isinstance(self.value, Mapping) else (self.value,)
        for value in (*values, self.default):
            if not (isinstance(value, Real) and abs(float(value)) <= 1.0):
                raise ValueError(f"target: a similarity must be in [-1, 1], got {value!r}.")
        if self.default and not isinstance(self.value, Mapping):
            raise ValueError(
                f"default: {self.default} would be ignored, because all pairs have the target "
                f"{self.value}; leave it out."
            )

    def start(self, tasks: Sequence[str], num_components: int) -> Tensor:
        """The targets, `[K, T, T]`."""
        shape = (num_components, len(tasks), len(tasks))
        if not isinstance(self.value, Mapping):
            return torch.full(shape, float(self.value), dtype=torch.float64)
        target = torch.full(shape, float(self.default), dtype=torch.float64)
        for (altered, other), value in self.value.items():
            check_names("target", (altered, other), tasks)
            target[:, tasks.index(altered), tasks.index(other)] = value
        return target


Target = EmaTarget | FixedTarget

"""Controls: what remains of GradVac's effect when one thing about it is taken away.

Used by the sweeps `controls`, `twin`, `one_gpu` and `one_gpu_many`, as in

    "align.rule" = "studies/controls.py:Control"
    "align.options" = { control = "norm", vaccinated = "low" }
"""

# K components, T tasks

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac import GradVac, Weighing

CONTROLS = ("norm", "direction", "shuffled", "random")


class Control(GradVac):
    """GradVac without what is claimed to make it work: a control to compare it with.

    Vaccination lengthens the update, and its targets belong to pairs of tasks. If a control is as
    good as GradVac, that is not why GradVac helps.

    - "norm": the plain sum, in every component as long as GradVac's update would be.
    - "direction": GradVac's update, in every component as long as the plain sum.
    - "shuffled": every pair is held to the moving average of another pair of the component, drawn
      once.
    - "random": every pair is held to a number between the lowest and the highest moving average of
      the component, drawn once.

    Args:
        control: "norm", "direction", "shuffled" or "random".
        beta: Weight of the new similarity in the moving average, in [0, 1].
        vaccinated: Names of the tasks whose gradients are altered; None: all.
        order: "random", or "fixed" to visit the other tasks in task order.
        seed: Seed of the random order, and of what is drawn once.
    """

    name = "control"
    does = "is GradVac with only its lengths or directions, or with other targets"

    def __init__(
        self,
        control: str = "norm",
        beta: float = 1e-2,
        vaccinated: Sequence[str] | None = None,
        order: str = "random",
        seed: int = 0,
    ) -> None:
        if control not in CONTROLS:
            raise ValueError(f"control: must be one of {', '.join(CONTROLS)}, got {control!r}.")
        self.control = control
        super().__init__(beta, vaccinated=vaccinated, order=order, seed=seed)

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        super().bind(tasks, components)
        self._draw()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._draw()  # the seed may be another one

    def _draw(self) -> None:
        """Draw once, by names: neither the order of tasks nor that of components matters."""
        num = len(self.tasks)
        chosen = self.tasks if self.vaccinated is None else self.vaccinated
        is_vaccinated = torch.tensor([task in chosen for task in self.tasks])
        altered = is_vaccinated[:, None] & ~torch.eye(num, dtype=torch.bool)
        pairs = altered.flatten().nonzero()[:, 0]
        names = [f"{first} {second}" for first in self.tasks for second in self.tasks]
        drawn = torch.stack(
            [
                _hashes([f"{self.seed} {component} {pair}" for pair in names])
                for component in self.components
            ]
        )  # [K, T * T]
        ordered = pairs[_hashes(names)[pairs].argsort()]
        self._source = torch.arange(num * num).repeat(len(self.components), 1)
        self._source[:, ordered] = pairs[drawn[:, pairs].argsort(-1)]
        share = (drawn % 2**31).double() / 2**31  # in [0, 1)
        self._altered, self._share = altered, share.view(len(self.components), num, num)

    def held_targets(self, targets: Tensor) -> Tensor:
        if self.control in ("norm", "direction"):
            return targets
        device = targets.device
        self._source, self._altered = self._source.to(device), self._altered.to(device)
        if self.control == "shuffled":
            return targets.flatten(1).gather(1, self._source).view_as(targets)
        self._share = self._share.to(targets)
        lowest = torch.where(self._altered, targets, torch.inf).amin((1, 2), keepdim=True)
        highest = torch.where(self._altered, targets, -torch.inf).amax((1, 2), keepdim=True)
        return torch.where(self._altered, lowest + self._share * (highest - lowest), targets)

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        weighing = super().weigh_finite(components, gram)
        if self.control not in ("norm", "direction"):
            return weighing
        weights = weighing.weights
        update = ((weights[:, None] @ gram)[:, 0] * weights).sum(-1).clamp_min(0)
        plain = gram.sum((-2, -1)).clamp_min(0)
        if self.control == "norm":
            other = _ratio(update, plain)[:, None].expand_as(weights)
        else:
            other = _ratio(plain, update)[:, None] * weights
        return Weighing(other, weighing.target, weighing.active)

    def __repr__(self) -> str:
        vaccinated = "all" if self.vaccinated is None else list(self.vaccinated)
        return f"Control({self.control!r}, {self.target_rule}, vaccinated={vaccinated})"


def _ratio(first: Tensor, second: Tensor) -> Tensor:
    """Of two lengths that are given squared, `[K]`; 1 where the second is 0."""
    alive = second > 0
    return torch.where(alive, (first / torch.where(alive, second, 1.0)).sqrt(), 1.0)


def _hashes(names: Sequence[str]) -> Tensor:
    """One fixed 64-bit number per name."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests])

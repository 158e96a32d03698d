"""Algorithm 1 of the paper, word for word on gradient vectors: the reference for ever.

Nothing here knows of Gram matrices or coefficients. It is slow, in float64 with NumPy, and written
from the appendix of the paper, with the points it leaves open settled as the documentation says.
Only the visiting order is borrowed, because a run and its reference must draw the same one.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gradvac.rules.pairwise import fixed_order, name_keys, random_order

Gradients = Mapping[str, Mapping[str, np.ndarray]]  # component -> task -> vector


class Algorithm1:
    """The GradVac update rule.

    Args:
        tasks: All tasks, in the order they are listed.
        components: The model components theta_k.
        beta: The paper's EMA decay; 0 keeps targets as they are.
        start: Value of every target before the first step.
        vaccinated: The paper's set G; None: all.
        order: "random" or "fixed".
        seed: Of the random order.
        preserve_norm: Rescale every altered gradient to its former length.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        components: Sequence[str],
        *,
        beta: float = 0.0,
        start: float = 0.0,
        vaccinated: Sequence[str] | None = None,
        order: str = "random",
        seed: int = 0,
        preserve_norm: bool = False,
    ) -> None:
        self.tasks, self.components, self.beta = list(tasks), list(components), beta
        self.vaccinated = list(tasks) if vaccinated is None else list(vaccinated)
        self.order, self.seed, self.preserve_norm = order, seed, preserve_norm
        self.target = {(k, i, j): start for k in components for i in tasks for j in tasks if i != j}
        self.active: set[tuple[str, str, str]] = set()
        self.t = 0

    def step(self, gradients: Gradients) -> dict[str, np.ndarray]:
        """One pass of the while loop: the update of every component."""
        present = [task for task in self.tasks if task in next(iter(gradients.values()))]
        visits = self._draw_orders(present)
        self.active = set()
        update = {}
        for k in self.components:
            g = {task: np.array(gradients[k][task], dtype=np.float64) for task in present}
            altered = {task: vector.copy() for task, vector in g.items()}
            for i in present:
                if i in self.vaccinated:
                    altered[i] = self._vaccinate(k, i, g, visits[k, i])
            update[k] = sum(altered.values())
        self.t += 1
        return update

    def _vaccinate(
        self, k: str, i: str, g: Mapping[str, np.ndarray], others: Sequence[str]
    ) -> np.ndarray:
        mine = g[i].copy()
        for j in others:
            if not np.any(g[j]) or np.linalg.norm(mine) <= 1e-6 * np.linalg.norm(g[i]):
                continue
            phi = (mine @ g[j]) / (np.linalg.norm(mine) * np.linalg.norm(g[j]))
            phi = min(max(phi, -1.0), 1.0)
            target = self.target[k, i, j]
            # A target of 1 is out of reach: what is within 1e-6 of it counts as having met it.
            if phi < min(target, 1 - 1e-6):
                goal = min(max(target, -(1 - 1e-6)), 1 - 1e-6)
                a = np.linalg.norm(mine) * (goal * np.sqrt(1 - phi**2) - phi * np.sqrt(1 - goal**2))
                a /= np.linalg.norm(g[j]) * np.sqrt(1 - goal**2)
                mine = mine + a * g[j]
                self.active.add((k, i, j))
            self.target[k, i, j] = (1 - self.beta) * target + self.beta * phi
        if self.preserve_norm and np.linalg.norm(mine) > 1e-6 * np.linalg.norm(g[i]):
            mine = mine * (np.linalg.norm(g[i]) / np.linalg.norm(mine))
        return mine

    def _draw_orders(self, present: Sequence[str]) -> dict[tuple[str, str], list[str]]:
        if self.order == "fixed":
            drawn = fixed_order(torch.arange(len(present)), len(self.components))
        else:
            drawn = random_order(
                self.seed, torch.tensor(self.t), name_keys(self.components), name_keys(present)
            )
        return {
            (k, i): [present[j] for j in row]
            for k, rows in zip(self.components, drawn.tolist(), strict=True)
            for i, row in zip(present, rows, strict=True)
        }


def relative_deviation(found: np.ndarray, expected: np.ndarray, *, scale: float) -> float:
    """||found - expected|| relative to ||expected||, or to `scale` if that is larger.

    An update can cancel to nothing; then the gradients it was made of are the measure.
    """
    size = max(float(np.linalg.norm(expected)), scale)
    return float(np.linalg.norm(found - expected)) / size if size else 0.0

"""GradNorm: loss weights learned so that tasks train at similar rates (Chen et al., 2018)."""

# K components, T tasks

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.rules.rule import Rule, Weighing, matching
from gradvac.utils.devices import index_on

_DECAY, _DECAY_SQUARE, _EPSILON = 0.9, 0.999, 1e-8  # Adam's usual constants


class GradNorm(Rule):
    """One learned weight per task, the same in all components.

    In one component, with G_i = w_i ‖g_i‖ and the relative loss
    r_i = (L_i / L_i(0)) / mean_j (L_j / L_j(0)), Adam descends
    Σ |G_i - mean(G) r_i^alpha| in w (the goal held constant); then the weights are kept
    above 0 and renormalised to sum to the number of tasks. A step uses the weights it starts with,
    and teaches about the tasks present in it.

    Losses count as they are given: a `GradScaler` that changes its scale before a task is first
    seen makes that task's rate another one. Give losses that are not scaled (bf16), or let all
    tasks begin in the first steps.

    Args:
        alpha: Strength of the pull towards equal training rates.
        lr: Adam's step size for the weights.
        component: Name of the component whose norms are used. None: the last one, in model order,
            that every present task reaches.

    Examples:
        >>> from gradvac import GradNorm
        >>> rule = GradNorm(alpha=1.5)
    """

    name = "gradnorm"
    does = "learns one weight per task, so that tasks train at similar rates"

    def __init__(self, alpha: float = 1.5, lr: float = 0.025, component: str | None = None) -> None:
        self.alpha, self.lr, self.component = alpha, lr, component
        if not (isinstance(lr, Real) and 0 < lr < math.inf):
            raise ValueError(f"lr: must be positive, got {lr!r}.")
        if not (isinstance(alpha, Real) and 0 <= alpha < math.inf):
            raise ValueError(
                f"alpha: must be 0 or more, got {alpha!r}; the authors use 0.12 to 1.5."
            )

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        if self.component is not None and self.component not in components:
            raise ValueError(
                f"component: {self.component!r} is not one of the components {list(components)}."
            )
        super().bind(tasks, components)
        self._by_name = sorted(range(len(tasks)), key=self.tasks.__getitem__)
        self._state = {
            "weights": torch.ones(len(tasks), dtype=torch.float64),
            "first_losses": torch.full((len(tasks),), torch.nan, dtype=torch.float64),
            "mean": torch.zeros(len(tasks), dtype=torch.float64),
            "square": torch.zeros(len(tasks), dtype=torch.float64),
            "steps": torch.zeros(len(tasks), dtype=torch.float64),
        }

    def start_step(self, present: Sequence[int], losses: Tensor) -> None:
        super().start_step(present, losses)
        dtype = geometry.working_dtype(losses.device)
        self._state = {name: value.to(losses.device, dtype) for name, value in self._state.items()}
        self._norms = losses.new_zeros(len(self.components), len(present), dtype=dtype)

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        self._norms[index_on(components, gram.device)] = geometry.norms(gram)
        weights = self._state["weights"][self.index].to(gram.dtype)
        return self.answer(gram, weights.expand(gram.shape[:-1]))

    def commit(self) -> None:
        norms, usable = self._measured()
        share = usable / usable.sum().clamp_min(1)  # means are over the tasks that are here
        state = {name: value[self.index] for name, value in self._state.items()}
        losses = self.losses.to(norms.dtype)
        first = torch.where(state["first_losses"].isnan(), losses, state["first_losses"])
        rate = (losses / first).clamp_min(0)
        rate = torch.where(usable, rate, 0.0)
        relative = rate / (share * rate).sum().clamp_min(torch.finfo(rate.dtype).tiny)
        weighted = state["weights"] * norms
        goal = (share * weighted).sum() * relative**self.alpha
        gradient = norms * (weighted - goal).sign()

        steps = state["steps"] + 1
        mean = _DECAY * state["mean"] + (1 - _DECAY) * gradient
        square = _DECAY_SQUARE * state["square"] + (1 - _DECAY_SQUARE) * gradient**2
        unbiased = (square / (1 - _DECAY_SQUARE**steps)).sqrt()
        move = self.lr * mean / (1 - _DECAY**steps) / (unbiased + _EPSILON * (share * norms).sum())
        weights = (state["weights"] - move).clamp_min(1e-3)

        new = {"mean": mean, "square": square, "steps": steps, "weights": weights}
        for name, value in (new | {"first_losses": first}).items():
            kept = torch.where(usable & value.isfinite(), value, state[name])
            self._state[name].index_copy_(0, self.index, kept)
        total = self._state["weights"]
        in_name_order = total[index_on(self._by_name, total.device)]  # rounding: whatever the list
        scale = len(self.tasks) / in_name_order.sum()
        total.mul_(torch.where(usable.any(), scale, 1.0))  # a step that teaches nothing: untouched

    def _measured(self) -> tuple[Tensor, Tensor]:
        """Norms `[T]` in the chosen component, and of which tasks this step teaches, `[T]`.

        A task without any gradient is not here; the host may not know (tasks on the device).
        """
        alive = (self._norms > 0).any(0)  # [T]
        shared = ((self._norms > 0) | ~alive).all(-1) & (alive.sum() > 1)  # [K]
        if self.component is not None:
            only = self.components.index(self.component)
            return self._norms[only], alive & shared[only] & self.finite
        position = torch.arange(1, len(shared) + 1, device=shared.device)
        last = (shared * position).argmax()
        usable = alive & shared.any() & self.finite
        return self._norms.index_select(0, last[None])[0], usable

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {name: v.cpu().clone() for name, v in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        here, there = matching(self.tasks, state["tasks"])
        for name, value in self._state.items():
            value[here] = state[name][there].to(value)

    def __repr__(self) -> str:
        where = self.component or "last shared"
        return f"GradNorm(alpha={self.alpha}, lr={self.lr}, component={where!r})"

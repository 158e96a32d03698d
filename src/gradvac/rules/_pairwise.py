"""The pairwise sweep of Algorithm 1 in coefficient space, shared by GradVac and PCGrad.

An altered gradient is g'_i = sum_j c_ij g_j, so the whole algorithm runs on the coefficients c and
the Gram matrix. The rows i are independent of each other, since a gradient is altered against the
*original* g_j: only the T - 1 visits of a row are sequential, and all rows of all components take
them together.
"""

# K components, T tasks

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.devices import index_on, triton_module
from gradvac.rules._order import fixed_order, name_keys, random_order
from gradvac.rules._rule import Rule, Weighing, check_names, matching
from gradvac.rules._targets import Target

CANCELLED = 1e-6  # ||g'|| at or below this share of ||g|| is rounding noise, and counts as zero
TARGET_LIMIT = 1.0 - 1e-6  # |target| inside Eq. 3: at 1 it would divide by zero

Swept = tuple[Tensor, Tensor, Tensor]  # coefficients, observed similarity (NaN: none), active


def sweep(gram: Tensor, target: Tensor, order: Tensor, vaccinated: Tensor) -> Swept:
    """Lines 7 to 17 of Algorithm 1 for all components and tasks at once.

    Args:
        gram: `[K, T, T]`, finite.
        target: `[K, T, T]`.
        order: `[K, T, T - 1]`, the tasks that row i visits.
        vaccinated: bool `[T]`, the rows that are altered.

    Returns:
        Coefficients `[K, T, T]` with g'_i = sum_j c_ij g_j, the similarities phi that were seen
        (NaN where a pair was inert), and which pairs were active.
    """
    # Above the limit Eq. 3 would turn similar gradients *away* from each other.
    target = target.clamp_max(TARGET_LIMIT)
    kernel = triton_module("gradvac.rules._sweep_kernel") if gram.is_cuda else None
    if kernel is None:
        return sweep_reference(gram, target, order, vaccinated)
    goal = target.clamp(-TARGET_LIMIT, TARGET_LIMIT)
    swept: Swept = kernel.sweep_triton(gram, target, goal, order, vaccinated, CANCELLED)
    return swept


def sweep_reference(gram: Tensor, target: Tensor, order: Tensor, vaccinated: Tensor) -> Swept:
    """`sweep` in torch operations; the reference of the Triton kernel."""
    num_tasks = gram.shape[-1]
    coefficients = torch.eye(num_tasks, dtype=gram.dtype, device=gram.device).expand_as(gram)
    coefficients = coefficients.clone()
    products = gram.clone()  # products[k, i, j] = <g'_i, g_j>
    squares = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0)  # [K, T], ||g_j||^2
    lengths = squares.sqrt()
    altered = squares.clone()  # ||g'_i||^2
    smallest = squares * CANCELLED**2
    observed = torch.full_like(gram, torch.nan)
    active = torch.zeros_like(gram, dtype=torch.bool)
    goal = target.clamp(-TARGET_LIMIT, TARGET_LIMIT)
    opposite = (1.0 - goal * goal).sqrt()

    for visit in range(num_tasks - 1):
        other = order[:, :, visit, None]  # [K, T, 1]
        dot = products.gather(2, other)[..., 0]
        own, theirs = altered.clamp_min(0).sqrt(), lengths.gather(1, other[..., 0])
        alive = (altered > smallest) & (theirs > 0) & vaccinated
        phi = torch.where(alive, dot / torch.where(alive, own * theirs, 1.0), 0.0).clamp(-1.0, 1.0)
        wanted, sine = goal.gather(2, other)[..., 0], opposite.gather(2, other)[..., 0]
        below = alive & (phi < target.gather(2, other)[..., 0])
        step = own * (wanted * (1.0 - phi * phi).sqrt() - phi * sine)  # Eq. 3
        step = torch.where(below, step / torch.where(below, theirs * sine, 1.0), 0.0)

        coefficients.scatter_add_(2, other, step[..., None])
        altered = altered + step * (2.0 * dot + step * theirs * theirs)
        rows = other.expand(-1, -1, num_tasks)
        products = products + step[..., None] * gram.gather(1, rows)
        observed.scatter_(2, other, torch.where(alive, phi, torch.nan)[..., None])
        active.scatter_(2, other, below[..., None])
    return coefficients, observed, active


class Pairwise(Rule):
    """Base of GradVac and PCGrad: the sweep, its targets and its order."""

    def __init__(
        self,
        target: Target,
        *,
        vaccinated: Sequence[str] | None,
        order: str,
        seed: int,
        preserve_norm: bool = False,
    ) -> None:
        if order not in ("random", "fixed"):
            raise ValueError(f'order: must be "random" or "fixed", got {order!r}.')
        if isinstance(vaccinated, str):
            raise ValueError(f"vaccinated: must be a list of task names, got {vaccinated!r}.")
        if not hasattr(seed, "__index__") or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed: must be an integer of 64 bits, got {seed!r}.")
        if not isinstance(preserve_norm, bool):
            raise ValueError(f"preserve_norm: must be True or False, got {preserve_norm!r}.")
        self.target_rule = target
        self.vaccinated = None if vaccinated is None else tuple(vaccinated)
        self.order, self.seed, self.preserve_norm = order, seed, preserve_norm

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        check_names("vaccinated", self.vaccinated or (), tasks)
        super().bind(tasks, components)
        self._target = self.target_rule.start(self.tasks, len(components))  # [K, T, T]
        self._step = torch.zeros((), dtype=torch.int64)
        self._task_keys, self._component_keys = name_keys(self.tasks), name_keys(components)
        chosen = self.tasks if self.vaccinated is None else self.vaccinated
        self._vaccinated = torch.tensor([task in chosen for task in self.tasks])

    def begin(self, present: Sequence[int], losses: Tensor) -> None:
        super().begin(present, losses)
        device = losses.device
        self._target = self._target.to(device, geometry.working_dtype(device))
        self._step = self._step.to(device)
        self._task_keys = self._task_keys.to(device)
        self._component_keys = self._component_keys.to(device)
        self._vaccinated = self._vaccinated.to(device)
        if self.order == "random":
            keys = self._task_keys[self.index]
            self._order = random_order(self.seed, self._step, self._component_keys, keys)
        else:
            self._order = fixed_order(self.index, len(self.components))
        self._next = self._target.clone() if self.target_rule.beta else self._target

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        chosen, targets = index_on(components, gram.device), self.targets()
        pairs = (chosen[:, None, None], self.index[:, None], self.index)
        target = self._target[pairs].to(gram.dtype)
        held = target if targets is self._target else targets[pairs].to(gram.dtype)
        order, vaccinated = self._order[chosen], self._vaccinated[self.index]
        coefficients, observed, active = sweep(gram, held, order, vaccinated)
        if beta := self.target_rule.beta:
            seen = torch.where(observed.isnan(), target, (1.0 - beta) * target + beta * observed)
            self._next[pairs] = seen.to(self._next.dtype)
        if self.preserve_norm:
            coefficients = coefficients * _norm_correction(gram, coefficients)[..., None]
        return Weighing(coefficients.sum(-2), held, active)

    def targets(self) -> Tensor:
        """What pairs are held to, `[K, T, T]`: their own targets."""
        return self._target

    def _chosen(self) -> str:
        return "all" if self.vaccinated is None else str(list(self.vaccinated))

    def commit(self) -> None:
        if self.target_rule.beta:
            self._target.copy_(torch.where(self.finite, self._next, self._target))
        self._step.add_(self.finite)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state |= {"step": int(self._step), "seed": self.seed, "target": self._target.cpu().clone()}
        state["moving"] = bool(self.target_rule.beta)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tasks, saved_tasks = matching(self.tasks, state["tasks"])
        components, saved_components = matching(self.components, state["components"])
        saved = state["target"].to(self._target)
        if self.target_rule.beta and not state.get("moving", True):
            warnings.warn(
                "state: its targets were fixed; the moving averages start at 0.", stacklevel=3
            )
        elif self.target_rule.beta:
            block = saved[saved_components[:, None, None], saved_tasks[:, None], saved_tasks]
            self._target[components[:, None, None], tasks[:, None], tasks] = block
        self._step = torch.tensor(state["step"], device=self._step.device)
        self.seed = state["seed"]


def _norm_correction(gram: Tensor, coefficients: Tensor) -> Tensor:
    """Factor that gives every g'_i the length of g_i back, `[K, T]`; 1 where g'_i vanished."""
    before = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    after = ((coefficients @ gram) * coefficients).sum(-1)
    alive = after > before * CANCELLED**2
    return torch.where(alive, (before / torch.where(alive, after, 1.0)).sqrt(), 1.0)

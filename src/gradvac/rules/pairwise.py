"""The pairwise sweep of Algorithm 1 in coefficient space, shared by GradVac and PCGrad.

An altered gradient is g'_i = sum_j c_ij g_j, so the whole algorithm runs on the coefficients c and
the Gram matrix. The rows i are independent of each other, since a gradient is altered against the
*original* g_j: only the T - 1 visits of a row are sequential, and all rows of all components take
them together.

Targets are one mechanism, `target <- (1 - beta) target + beta phi`; a fixed target has beta = 0.

The random order in which a task visits the others is a pure function of names and step. A generator
would tie it to how tasks are listed and to which components were weighed first. Hashing (seed,
step, component, task, other task) does not: a run resumed with its tasks reordered, a component
weighed alone, and every rank of a distributed run see the same order. The hash runs on the device,
because the step counter lives there.
"""

# K components, T tasks

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.rules.rule import Rule, Weighing, check_names, matching
from gradvac.utils.devices import index_on, triton_module
from gradvac.utils.native import native

CANCELLED = 1e-6  # ||g'|| at or below this share of ||g|| is rounding noise, and counts as zero
TARGET_LIMIT = 1.0 - 1e-6  # |target| inside Eq. 3: at 1 it would divide by zero
_MIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's multipliers as signed integers
_GOLDEN = -7046029254386353131

Swept = tuple[Tensor, Tensor, Tensor]  # coefficients, observed similarity (NaN: none), active


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


def name_keys(names: Sequence[str]) -> Tensor:
    """One fixed 64-bit key per name."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests])


def _mix(x: Any) -> Any:
    """The finaliser of splitmix64; int64 arithmetic wraps around as it needs."""
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


def _shift(x: Any, bits: int) -> Any:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical, where >> on int64 is arithmetic


def random_order(seed: int, step: Tensor, components: Tensor, tasks: Tensor) -> Tensor:
    """Positions of the other tasks in visiting order, `[K, T, T - 1]`.

    Args:
        seed: Of the rule.
        step: Scalar counter on the device.
        components: Name keys `[K]`.
        tasks: Name keys `[T]` of the present tasks.
    """
    drawn: Tensor | None = None
    if (kernel := _kernel(step)) is not None:
        drawn = kernel.random_order_triton(seed, step, components, tasks, (_GOLDEN, *_MIX))
    elif (kernels := native()) is not None:
        drawn = kernels.random_order(seed, step, components, tasks)
    if drawn is not None:
        return drawn
    on_host = step.device.type == "cpu"  # where NumPy takes a quarter of the time of torch
    names: Any = [one.numpy() if on_host else one for one in (step[None], components, tasks)]
    start = _mix(names[1] + _mix(names[0] * _GOLDEN + seed))
    key = _mix(_mix(start[:, None] + names[2])[:, :, None] + names[2])  # [K, T, T]
    return _others(key)


def fixed_order(rank: Tensor, num_components: int) -> Tensor:
    """Every task visits the others by ascending rank, `[K, T, T - 1]`."""
    num_tasks = len(rank)
    return _others(rank.expand(num_components, num_tasks, num_tasks).clone())


def _others(key: Any) -> Tensor:
    """Sort by key, leaving the task itself out; writes over the keys."""
    num_tasks = key.shape[-1]
    key.reshape(-1, num_tasks**2)[:, :: num_tasks + 1] = torch.iinfo(torch.int64).max
    order = torch.as_tensor(key.argsort(-1))
    return order[..., : num_tasks - 1]


def pairwise_sweep(gram: Tensor, target: Tensor, order: Tensor, vaccinated: Tensor) -> Swept:
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
    kernel, swept = _kernel(gram), None
    if kernel is not None:
        every = (torch.arange(size, device=gram.device) for size in gram.shape[:2])
        finite, following = torch.ones_like(vaccinated[0]), torch.empty_like(target)
        given = (gram, target.contiguous(), order, vaccinated, *every, finite, following)
        constants = _constants(0.0, gram.dtype, gram.device)
        coefficients, observed, active, _ = kernel.pairwise_sweep_triton(*given, constants)
        return coefficients, observed, active
    if (kernels := native()) is not None:
        swept = kernels.sweep(gram, target, order, vaccinated, CANCELLED, TARGET_LIMIT)
    return pairwise_sweep_reference(gram, target, order, vaccinated) if swept is None else swept


def _kernel(like: Tensor) -> Any:
    return triton_module("gradvac.rules.sweep_kernel") if like.is_cuda else None


@cache
def _constants(beta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the kernel is told; moved once."""
    return torch.tensor([beta, CANCELLED, TARGET_LIMIT], dtype=dtype, device=device)


def pairwise_sweep_reference(
    gram: Tensor, target: Tensor, order: Tensor, vaccinated: Tensor
) -> Swept:
    """`pairwise_sweep` in array operations; the reference of the Triton kernel.

    NumPy's on a CPU: of arrays this small they take a quarter of the time of torch's.
    """
    num_components, num_tasks = gram.shape[:2]
    # Above the limit Eq. 3 would turn similar gradients *away* from each other.
    target = target.clamp_max(TARGET_LIMIT)
    every = torch.arange(num_components * num_tasks, device=gram.device).view(-1, num_tasks)
    by_visit = order.permute(2, 0, 1).contiguous()  # [T - 1, K, T]
    others, pairs = by_visit + every[:, :1], by_visit + every * num_tasks
    given = (gram.contiguous(), target.contiguous(), vaccinated, others, pairs)
    if gram.device.type != "cpu":
        return _sweep(torch, torch.clamp, *given)
    with np.errstate(all="ignore"):
        swept = _sweep(np, _clip, *(one.numpy() for one in given))
    coefficients, observed, active = map(torch.from_numpy, swept)
    return coefficients, observed, active


def _clip(values: Any, least: float, most: float) -> Any:
    """`np.clip`, which spends most of its time on its arguments."""
    return np.minimum(np.maximum(values, least), most)


def _sweep(
    xp: Any, clip: Any, gram: Any, target: Any, vaccinated: Any, others: Any, pairs: Any
) -> tuple[Any, Any, Any]:
    """The sweep in what NumPy and torch (`xp`) have in common; inert pairs may divide by zero.

    The task that a row visits, `[T - 1, K, T]`, is given as a row among all components' (`others`),
    and its entry in the visiting row likewise (`pairs`).
    """
    rows, most = gram.reshape(-1, gram.shape[-1]), float("inf")
    squares = clip(gram.diagonal(0, -2, -1), 0.0, most)  # [K, T], ||g_j||^2
    altered, smallest = squares, squares * CANCELLED**2  # ||g'_i||^2
    products = gram  # products[k, i, j] = <g'_i, g_j>
    goal = clip(target, -TARGET_LIMIT, TARGET_LIMIT)
    sines = xp.sqrt(1.0 - goal * goal)
    limit, wanted, sine = (x.reshape(-1)[pairs] for x in (target, goal, sines))
    theirs = xp.sqrt(squares).reshape(-1)[others]  # [T - 1, K, T], as the others
    usable, divisor = (theirs > 0) & vaccinated, theirs * sine
    steps, seen, is_below = xp.zeros_like(theirs), xp.zeros_like(theirs), usable & False

    for visit, their in enumerate(theirs):  # [K, T]
        dot, own = products.reshape(-1)[pairs[visit]], xp.sqrt(clip(altered, 0.0, most))
        alive = (altered > smallest) & usable[visit]
        phi = clip(xp.where(alive, dot / (own * their), 0.0), -1.0, 1.0)
        below = alive & (phi < limit[visit])
        step = own * (wanted[visit] * xp.sqrt(1.0 - phi * phi) - phi * sine[visit])  # Eq. 3
        step = xp.where(below, step / divisor[visit], 0.0)
        altered = altered + step * (2.0 * dot + step * their * their)
        products = products + step[..., None] * rows[others[visit]]
        steps[visit], is_below[visit] = step, below
        seen[visit] = xp.where(alive, phi, xp.nan)

    coefficients, observed = xp.zeros_like(gram), xp.full_like(gram, xp.nan)
    active, size = coefficients > 0, squares.shape[1]
    coefficients.reshape(-1, size * size)[:, :: size + 1] = 1.0
    for found, visited in ((coefficients, steps), (observed, seen), (active, is_below)):
        found.reshape(-1)[pairs] = visited
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

    def start_step(self, present: Sequence[int], losses: Tensor) -> None:
        super().start_step(present, losses)
        device = losses.device
        if self._target.device != device:
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

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        kernel, kind = _kernel(gram), type(self)
        ours = (Pairwise.weigh_finite, Pairwise.held_targets)
        is_usual = (kind.weigh_finite, kind.held_targets) == ours and not self.preserve_norm
        is_usual &= gram.shape[-1] == len(self.present) > 1 and gram.device == self._target.device
        kernels = native() if kernel is None else None
        if kernels is not None and is_usual:
            found = kernels.weigh(
                gram,
                self._target,
                self._order,
                self._vaccinated,
                index_on(components, gram.device),
                self.index,
                self._next,
                self.target_rule.beta,
                CANCELLED,
                TARGET_LIMIT,
            )
            if found is not None:  # else something is not finite, for instance
                return Weighing(*found)
        if kernel is None or not is_usual:
            return super().weigh(components, gram)
        gram, chosen = gram.to(self._target.dtype), index_on(components, gram.device)
        given = (gram, self._target, self._order, self._vaccinated, chosen, self.index)
        constants = _constants(self.target_rule.beta, gram.dtype, gram.device)
        coefficients, _, active, held = kernel.pairwise_sweep_triton(
            *given, self.finite, self._next, constants
        )
        return Weighing(coefficients.sum(-2), held, active)

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        chosen, targets = index_on(components, gram.device), self.held_targets(self._target)
        pairs = (chosen[:, None, None], self.index[:, None], self.index)
        target = self._target[pairs].to(gram.dtype)
        held = target if targets is self._target else targets[pairs].to(gram.dtype)
        order, vaccinated = self._order[chosen], self._vaccinated[self.index]
        coefficients, observed, active = pairwise_sweep(gram, held, order, vaccinated)
        if beta := self.target_rule.beta:
            seen = torch.where(observed.isnan(), target, (1.0 - beta) * target + beta * observed)
            self._next[pairs] = seen.to(self._next.dtype)
        if self.preserve_norm:
            coefficients = coefficients * _norm_correction(gram, coefficients)[..., None]
        return Weighing(coefficients.sum(-2), held, active)

    def held_targets(self, targets: Tensor) -> Tensor:
        """What pairs are held to, `[K, T, T]`: their own targets, unless a subclass says otherwise.

        Args:
            targets: The moving averages or fixed targets of all components and tasks, `[K, T, T]`.
        """
        return targets

    def _chosen(self) -> str:
        return "all" if self.vaccinated is None else str(list(self.vaccinated))

    def commit(self) -> None:
        if self._target.device.type == "cpu":  # elsewhere that would be waiting
            if self.finite:
                self._target, self._step = self._next, self._step + 1
            return
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
        shape = (len(state["components"]), len(state["tasks"]), len(state["tasks"]))
        if saved.shape != shape or not saved.isfinite().all():  # nothing is below NaN: never active
            raise ValueError(
                f"state: its targets must be finite, in a shape of {list(shape)}, but have "
                f"{list(saved.shape)}; load another one."
            )
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

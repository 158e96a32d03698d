"""MGDA: the shortest combination of the task gradients (Sener and Koltun, 2018)."""

# K components, T tasks

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.rules._rule import Rule, Weighing

NORMALISATIONS = ("none", "l2", "loss", "loss+")
_NEWTON_STEPS = 40  # the duality gap falls about tenfold a step; 1e-12 is reached well before


class MGDA(Rule):
    """Weights on the simplex that make ||sum_i w_i g_i|| smallest, in every component.

    Solved in coefficient space: exactly for two tasks, to a duality gap near rounding beyond, for
    all components at once and without waiting for the device. Tasks whose gradient is zero in a
    component get weight 0 there; otherwise a head of one task would stop the others.

    Args:
        normalize: What each gradient is divided by before the weights are sought, as in the
            original: "none", "l2" (its norm), "loss" (its loss), "loss+" (loss times norm). The
            weights then apply to the gradients as they are.

    Example:
        >>> from gradvac import MGDA
        >>> rule = MGDA(normalize="l2")
    """

    def __init__(self, normalize: str = "none") -> None:
        if normalize not in NORMALISATIONS:
            raise ValueError(f"normalize: must be one of {NORMALISATIONS}, got {normalize!r}.")
        self.normalize = normalize

    def _weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:  # noqa: ARG002
        divisor = torch.ones_like(gram[..., 0])
        if self.normalize in ("l2", "loss+"):
            divisor = divisor * geometry.norms(gram)
        if self.normalize in ("loss", "loss+"):
            divisor = divisor * self._losses.to(gram.dtype).abs()
        scale = geometry.reciprocal(divisor)
        return self._plain(gram, min_norm(gram * scale[..., :, None] * scale[..., None, :]))

    def __repr__(self) -> str:
        return f"MGDA(normalize={self.normalize!r})"


def min_norm(gram: Tensor) -> Tensor:
    """argmin over the simplex of w^T gram w, `[K, T]`."""
    alive = gram.diagonal(dim1=-2, dim2=-1) > 0  # [K, T]
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    gram = gram * geometry.reciprocal(largest)[:, None, None]
    if gram.shape[-1] == 2:
        weights = _min_norm_of_two(gram)
        weights = torch.where(alive.all(-1, keepdim=True), weights, alive.to(gram.dtype))
    else:
        weights = _interior_point(gram, 10.0 * (~alive).to(gram.dtype)) * alive
    uniform = torch.full_like(weights, 1.0 / gram.shape[-1])
    weights = torch.where(alive.any(-1, keepdim=True), weights, uniform)
    return weights / weights.sum(-1, keepdim=True)


def _min_norm_of_two(gram: Tensor) -> Tensor:
    """The closed form: the foot of the perpendicular, kept between the two gradients."""
    first, second, both = gram[:, 0, 0], gram[:, 1, 1], gram[:, 0, 1]
    spread = first + second - 2.0 * both
    share = torch.where(spread > 0, (second - both) / torch.where(spread > 0, spread, 1.0), 0.5)
    share = share.clamp(0.0, 1.0)
    return torch.stack([share, 1.0 - share], dim=-1)


def _interior_point(gram: Tensor, cost: Tensor) -> Tensor:
    """Primal-dual Newton steps (Mehrotra) on min 1/2 w^T G w + cost^T w over the simplex.

    A fixed number of steps, each one batched Cholesky solve: no host decision, any conditioning.
    `cost` above G's largest entry keeps a task out.
    """
    num_tasks = gram.shape[-1]
    w = torch.full_like(cost, 1.0 / num_tasks)
    z = torch.ones_like(cost)
    y = gram.new_zeros(gram.shape[0], 1)
    for _ in range(_NEWTON_STEPS):
        dual = (gram @ w[..., None])[..., 0] + cost - z - y
        primal = w.sum(-1, keepdim=True) - 1.0
        gap = (w * z).mean(-1, keepdim=True)
        newton = _Newton(gram, w, z, dual, primal)
        guess, _, guess_z = newton.direction(w * z)
        after = (w + _longest(w, guess) * guess) * (z + _longest(z, guess_z) * guess_z)
        towards = gap * (after.mean(-1, keepdim=True) / gap).clamp(0.0, 1.0) ** 3
        step, lift, step_z = newton.direction(w * z + guess * guess_z - towards)
        size, size_z = 0.995 * _longest(w, step), 0.995 * _longest(z, step_z)
        # Below rounding a factorisation may fail: such components stay where they are.
        sane = (step.isfinite() & step_z.isfinite()).all(-1, keepdim=True) & (gap > 1e-15)
        w = torch.where(sane, w + size * step, w)
        z = torch.where(sane, z + size_z * step_z, z)
        y = torch.where(sane, y + size_z * lift, y)
    return w


class _Newton:
    """One linearised system, factorised once and solved for several right-hand sides."""

    def __init__(self, gram: Tensor, w: Tensor, z: Tensor, dual: Tensor, primal: Tensor) -> None:
        self.w, self.z, self.dual, self.primal = w, z, dual, primal
        self.factor = torch.linalg.cholesky_ex(gram + torch.diag_embed(z / w))[0]
        self.reach = torch.cholesky_solve(torch.ones_like(w)[..., None], self.factor)[..., 0]

    def direction(self, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps of w, of the multiplier y and of z that remove the residuals and `centre`."""
        right = -self.dual - centre / self.w
        step = torch.cholesky_solve(right[..., None], self.factor)[..., 0]
        missing = -(self.primal + step.sum(-1, keepdim=True))
        lift = missing / self.reach.sum(-1, keepdim=True)
        step = step + lift * self.reach
        return step, lift, -(centre + self.z * step) / self.w


def _longest(value: Tensor, step: Tensor) -> Tensor:
    """The largest step length in (0, 1] that keeps `value` positive, `[K, 1]`."""
    room = torch.where(step < 0, -value / torch.where(step < 0, step, -1.0), 1.0)
    return room.amin(-1, keepdim=True).clamp(max=1.0)

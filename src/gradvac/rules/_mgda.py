"""MGDA: the shortest combination of the task gradients (Sener and Koltun, 2018)."""

# K components, T tasks

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.rules._rule import Rule, Weighing

NORMALISATIONS = ("none", "l2", "loss", "loss+")
_NEWTON_STEPS = 40  # the duality gap falls about tenfold a step
_SMALLEST_GAP = 1e-15  # of squared lengths, the shortest gradient being 1


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

    name = "mgda"
    does = "takes the shortest combination of the gradients"

    def __init__(self, normalize: str = "none") -> None:
        if normalize not in NORMALISATIONS:
            raise ValueError(f"normalize: must be one of {NORMALISATIONS}, got {normalize!r}.")
        self.normalize = normalize

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:  # noqa: ARG002
        divisor = torch.ones_like(gram[..., 0])
        if self.normalize in ("l2", "loss+"):
            divisor = divisor * geometry.norms(gram)
        if self.normalize in ("loss", "loss+"):
            divisor = divisor * self.losses.to(gram.dtype).abs()
        scale = geometry.reciprocal(divisor)
        return self.answer(gram, min_norm(gram * scale[..., :, None] * scale[..., None, :]))

    def __repr__(self) -> str:
        return f"MGDA(normalize={self.normalize!r})"


def min_norm(gram: Tensor) -> Tensor:
    """argmin over the simplex of w^T gram w, `[K, T]`.

    Lengths that differ by many orders of magnitude would drown the short gradients, which decide,
    in the rounding of the long ones. So the unknowns are the lengths v_i = w_i ||g_i|| that each
    task contributes: min v^T C v over v >= 0 with sum_i v_i / ||g_i|| = 1, C being the cosines.
    """
    inverse = geometry.reciprocal(geometry.norms(gram))  # 0: no gradient
    alive = inverse > 0  # [K, T]
    price = inverse * geometry.reciprocal(inverse.amax(-1, keepdim=True))  # 1 for the shortest
    weights = price * (_of_two if gram.shape[-1] == 2 else _interior_point)(_cosine(gram), price)
    uniform = torch.full_like(weights, 1.0 / gram.shape[-1])
    weights = torch.where(alive.any(-1, keepdim=True), weights, uniform)
    return weights / weights.sum(-1, keepdim=True)


def _cosine(gram: Tensor) -> Tensor:
    """Cosines with a diagonal of 1: a zero gradient then has nothing to offer, and gets 0."""
    cosine = geometry.cosine(gram)
    return cosine - torch.diag_embed(cosine.diagonal(dim1=-2, dim2=-1) - 1.0)


def _of_two(cosine: Tensor, price: Tensor) -> Tensor:
    """The closed form: the foot of the perpendicular, kept between the two gradients."""
    both, other = cosine[:, 0, 1, None], price.flip(-1)
    lengths = (price - both * other).clamp_min(0.0)
    spread = (price * lengths).sum(-1, keepdim=True)
    # Two equal gradients: any point between them is as good, so take the middle.
    return torch.where(spread > 0, lengths / torch.where(spread > 0, spread, 1.0), 0.5)


def _interior_point(gram: Tensor, price: Tensor) -> Tensor:
    """Primal-dual Newton steps (Mehrotra) on min 1/2 v^T G v over v >= 0 with price^T v = 1.

    A fixed number of steps, each one batched Cholesky solve: no host decision, any conditioning.
    """
    v = torch.ones_like(price) * geometry.reciprocal(price.sum(-1, keepdim=True))
    z = torch.ones_like(price)
    y = price.new_zeros(price.shape[0], 1)
    for _ in range(_NEWTON_STEPS):
        dual = (gram @ v[..., None])[..., 0] - z - y * price
        primal = (price * v).sum(-1, keepdim=True) - 1.0
        gap = (v * z).mean(-1, keepdim=True)
        newton = _Newton(gram, price, v, z, dual, primal)
        guess, _, guess_z = newton.direction(v * z)
        after = (v + _longest(v, guess) * guess) * (z + _longest(z, guess_z) * guess_z)
        towards = gap * (after.mean(-1, keepdim=True) / gap).clamp(0.0, 1.0) ** 3
        step, lift, step_z = newton.direction(v * z + guess * guess_z - towards)
        size, size_z = 0.995 * _longest(v, step), 0.995 * _longest(z, step_z)
        # Below rounding a factorisation may fail: such components stay where they are.
        sane = (step.isfinite() & step_z.isfinite()).all(-1, keepdim=True) & (gap > _SMALLEST_GAP)
        v = torch.where(sane, v + size * step, v)
        z = torch.where(sane, z + size_z * step_z, z)
        y = torch.where(sane, y + size_z * lift, y)
    return v


class _Newton:
    """One linearised system, factorised once and solved for several right-hand sides."""

    def __init__(
        self, gram: Tensor, price: Tensor, v: Tensor, z: Tensor, dual: Tensor, primal: Tensor
    ) -> None:
        self.price, self.v, self.z, self.dual, self.primal = price, v, z, dual, primal
        self.factor = torch.linalg.cholesky_ex(gram + torch.diag_embed(z / v))[0]
        self.reach = torch.cholesky_solve(price[..., None], self.factor)[..., 0]

    def direction(self, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps of v, of the multiplier y and of z that remove the residuals and `centre`."""
        right = -self.dual - centre / self.v
        step = torch.cholesky_solve(right[..., None], self.factor)[..., 0]
        missing = -(self.primal + (self.price * step).sum(-1, keepdim=True))
        lift = missing / (self.price * self.reach).sum(-1, keepdim=True)
        step = step + lift * self.reach
        return step, lift, -(centre + self.z * step) / self.v


def _longest(value: Tensor, step: Tensor) -> Tensor:
    """The largest step length in (0, 1] that keeps `value` positive, `[K, 1]`."""
    room = torch.where(step < 0, -value / torch.where(step < 0, step, -1.0), 1.0)
    return room.amin(-1, keepdim=True).clamp(max=1.0)

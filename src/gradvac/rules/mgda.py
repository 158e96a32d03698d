"""MGDA: the shortest combination of the task gradients (Sener and Koltun, 2018)."""

# K components, T tasks

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.rules.rule import Rule, Weighing

NORMALISATIONS = ("none", "l2", "loss", "loss+")
_MOST_FACES = 127  # of the simplex, tried all at once: up to seven tasks
_SMALLEST_PIVOT = 1e-13  # below, a gradient lies in the span of others, but for rounding
_NEWTON_STEPS = 20  # 14 were enough for 3,600 problems of 3 to 25 tasks
_STIFFNESS = 1e-13  # added to what is factorised, so that dependent gradients do not stop the steps
_SAME = 1e-12  # relative difference of squared lengths that are the same but for rounding
_SMALLEST_GAP = 1e-15  # of squared lengths, the shortest gradient being 1


class MGDA(Rule):
    """Weights on the simplex that make ||sum_i w_i g_i|| smallest, in every component.

    Solved in coefficient space: up to seven tasks by trying every subset, beyond that to a duality
    gap near rounding, for all components at once and without synchronisation. Tasks whose
    gradient is zero in a component get weight 0 there; otherwise a head of one task would stop the
    others.

    Args:
        normalize: What each gradient is divided by before the weights are sought, as in the
            original: "none", "l2" (its norm), "loss" (its loss), "loss+" (loss times norm). The
            weights then apply to the gradients as they are.

    Examples:
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
    solve = _best_face if 2 ** gram.shape[-1] - 1 <= _MOST_FACES else _interior_point
    weights = price * solve(_cosine(gram), price)
    uniform = torch.full_like(weights, 1.0 / gram.shape[-1])
    weights = torch.where(alive.any(-1, keepdim=True), weights, uniform)
    return weights / weights.sum(-1, keepdim=True)


def _cosine(gram: Tensor) -> Tensor:
    """Cosines with a diagonal of 1: a zero gradient then has nothing to offer, and gets 0."""
    cosine = geometry.cosine(gram)
    return cosine - torch.diag_embed(cosine.diagonal(dim1=-2, dim2=-1) - 1.0)


def _best_face(cosine: Tensor, price: Tensor) -> Tensor:
    """The minimum on every face of the simplex, and of these the least.

    A face is a set of tasks, and v ~ M^-1 price the minimum of its plane: M = C + price price^T has
    the same one as C, and is positive definite unless a gradient of the set is an affine
    combination of the others, in which case a smaller set does as well. A few dozen small
    operations in all, where Newton steps take thousands: what counts on a GPU.
    """
    num_tasks = price.shape[-1]
    numbers = torch.arange(1, 2**num_tasks, device=price.device)
    inside = (numbers[:, None] >> torch.arange(num_tasks, device=price.device)) % 2 == 1  # [F, T]
    face_price = price[:, None] * inside  # [K, F, T]
    face_price = face_price * geometry.reciprocal(face_price.amax(-1, keepdim=True))
    both = inside[:, :, None] & inside[:, None, :]
    identity = torch.eye(num_tasks, dtype=price.dtype, device=price.device)
    matrix = torch.where(
        both, cosine[:, None] + face_price[..., :, None] * face_price[..., None, :], identity
    )
    lengths, smallest_pivot = _eliminate(torch.cat([matrix, face_price[..., None]], -1))
    is_candidate = (smallest_pivot > _SMALLEST_PIVOT) & ((lengths > 0) == inside).all(-1)
    paid = (lengths * price[:, None]).sum(-1, keepdim=True)
    is_candidate &= paid[..., 0] > 0
    lengths = torch.where(is_candidate[..., None], lengths * geometry.reciprocal(paid), 0.0)
    square = ((lengths @ cosine) * lengths).sum(-1).clamp_min(0.0)  # [K, F]
    square = torch.where(is_candidate, square, torch.inf)
    least = square.amin(-1, keepdim=True)
    # Equal gradients make equal minima: their middle is one too, and favours none of the tasks.
    is_least = square <= least * (1.0 + _SAME) + _SMALLEST_GAP
    return (lengths * is_least[..., None]).sum(-2) / is_least.sum(-1, keepdim=True)


def _eliminate(system: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Jordan on `[..., T, T + 1]`: solutions, and the smallest pivots.

    Positive definite systems need no exchange of rows, so that all are solved in the same steps.
    """
    smallest = torch.full_like(system[..., 0, 0], torch.inf)
    for column in range(system.shape[-2]):
        pivot = system[..., column, column]
        smallest = torch.minimum(smallest, pivot)
        row = system[..., column, :] / torch.where(pivot > 0, pivot, 1.0)[..., None]
        factor = system[..., :, column].clone()
        factor[..., column] -= 1.0
        system = system - factor[..., :, None] * row[..., None, :]
    return system[..., -1], smallest


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
        self.factor = torch.linalg.cholesky_ex(gram + torch.diag_embed(z / v + _STIFFNESS))[0]
        self.reach = self._solve(price)

    def direction(self, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps of v, of the multiplier y and of z that remove the residuals and `centre`."""
        right = -self.dual - centre / self.v
        step = self._solve(right)
        missing = -(self.primal + (self.price * step).sum(-1, keepdim=True))
        lift = missing / (self.price * self.reach).sum(-1, keepdim=True)
        step = step + lift * self.reach
        return step, lift, -(centre + self.z * step) / self.v

    def _solve(self, right: Tensor) -> Tensor:
        # `cholesky_solve` of many systems cannot be recorded as part of a CUDA graph.
        half = torch.linalg.solve_triangular(self.factor, right[..., None], upper=False)
        whole: Tensor = torch.linalg.solve_triangular(self.factor.mT, half, upper=True)
        return whole[..., 0]


def _longest(value: Tensor, step: Tensor) -> Tensor:
    """The largest step length in (0, 1] that keeps `value` positive, `[K, 1]`."""
    room = torch.where(step < 0, -value / torch.where(step < 0, step, -1.0), 1.0)
    return room.amin(-1, keepdim=True).clamp(max=1.0)

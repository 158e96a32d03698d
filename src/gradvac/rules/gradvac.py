"""Gradient Vaccine (Algorithm 1 of the paper)."""

from collections.abc import Sequence

from gradvac.rules.pairwise import EmaTarget, FixedTarget, Pairwise, Target


class GradVac(Pairwise):
    """Alters each task gradient until its similarity to the others reaches their target.

    For every component, for i vaccinated and present, for the other present tasks j in random
    order, with φ = cos(g'_i, g_j):

    1. if φ < φ̂_ij, then g'_i ← g'_i + a g_j with Eq. 3 of the paper,
       a = ‖g'_i‖ (φ̂_ij √(1 - φ²) - φ √(1 - φ̂_ij²)) / (‖g_j‖ √(1 - φ̂_ij²));
    2. φ̂_ij ← (1 - β) φ̂_ij + β φ (Eq. 4), active or not.

    The update is Σ g'_i.

    Args:
        beta: Weight of the new similarity in the moving average, in [0, 1].
        target: None for the moving average; a number in [-1, 1] for a fixed target (the paper's
            fixed objective is 0.5); or an `EmaTarget` or `FixedTarget`.
        vaccinated: Names of the tasks whose gradients are altered (the paper's set G); None: all.
        order: "random", or "fixed" to visit the other tasks in task order.
        seed: Seed of the random order.
        preserve_norm: Rescale every altered gradient to its original length.

    Examples:
        >>> from gradvac import GradVac
        >>> rule = GradVac(beta=1e-2, vaccinated=["en-hi", "en-tr"])
    """

    name = "gradvac"
    does = "raises the similarity of two tasks, where it is below its target, to that target"
    task_options = ("vaccinated",)

    def __init__(
        self,
        beta: float = 1e-2,
        target: float | Target | None = None,
        vaccinated: Sequence[str] | None = None,
        order: str = "random",
        seed: int = 0,
        preserve_norm: bool = False,
    ) -> None:
        moving = EmaTarget(beta)
        if target is None:
            target = moving
        elif beta != EmaTarget().beta:
            raise ValueError(
                f"beta: {beta} would be ignored, because target={target!r} is no moving average of "
                "it; leave one of the two out, or give target=EmaTarget(beta)."
            )
        elif not isinstance(target, EmaTarget | FixedTarget):
            target = FixedTarget(target)
        super().__init__(
            target, vaccinated=vaccinated, order=order, seed=seed, preserve_norm=preserve_norm
        )

    def __repr__(self) -> str:
        return (
            f"GradVac({self.target_rule}, vaccinated={self._chosen()}, "
            f"order={self.order!r}, seed={self.seed}, preserve_norm={self.preserve_norm})"
        )

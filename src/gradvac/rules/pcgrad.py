"""PCGrad, gradient surgery (Eq. 2 of the paper): the same sweep as GradVac with target 0."""

from collections.abc import Sequence

from gradvac.rules.pairwise import FixedTarget, Pairwise


class PCGrad(Pairwise):
    """Projects each task gradient onto the normal plane of those it conflicts with.

    With target 0, Eq. 3 becomes a = -<g'_i, g_j> / ||g_j||^2, the projection of PCGrad. So this is
    `GradVac(target=0)` under the name people know.

    Args:
        vaccinated: Names of the tasks whose gradients are altered; None: all.
        order: "random", or "fixed" to visit the other tasks in task order.
        seed: Seed of the random order.

    Examples:
        >>> from gradvac import PCGrad
        >>> rule = PCGrad(seed=1)
    """

    name = "pcgrad"
    does = "removes from each gradient what points against another: GradVac with target 0"
    task_options = ("vaccinated",)

    def __init__(
        self, vaccinated: Sequence[str] | None = None, order: str = "random", seed: int = 0
    ) -> None:
        super().__init__(FixedTarget(0.0), vaccinated=vaccinated, order=order, seed=seed)

    def __repr__(self) -> str:
        return f"PCGrad(vaccinated={self._chosen()}, order={self.order!r}, seed={self.seed})"

"""What the passes of one look show, by place: (junction, output)."""

# B rows, T tasks

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradvac.engine.graph import Refused
from gradvac.engine.kernels import negligible, repeatable, tolerance
from gradvac.engine.ownership._codes import unexplained
from gradvac.engine.ownership._layouts import Layout

Key = tuple[int, int]
Marks = Mapping[Key, Tensor]

SAME = 0.6  # a code that all rows share shows what rounding alone does


def row_codes(num_rows: int) -> Tensor:
    """A code for every row, between 1/4 and 1: no overflow that the plain pass would not have."""
    generator = torch.Generator().manual_seed(num_rows)
    return 4.0 ** -torch.rand(num_rows, generator=generator, dtype=torch.float64)


class Evidence:
    """Marks of passes.

    Args:
        lowest: The narrowest dtype on the way.

    Attributes:
        plain: Marks of the plain pass.
        same: Of a pass with one code for all.
        coded: Of a pass with a code per row, or per loss of a mapping.
        tolerance: How much of a mark may stay unexplained.
    """

    def __init__(self, lowest: torch.dtype) -> None:
        self.plain: Marks = {}
        self.same: Marks = {}
        self.coded: Marks = {}
        self.lowest, self.tolerance = lowest, tolerance(lowest)

    def is_finite(self, keys: Sequence[Key]) -> bool:
        """Whether the gradients of all these places are."""
        return all(bool(self.plain[key].isfinite().all()) for key in keys if key in self.plain)

    def is_awake(self, key: Key) -> bool:
        """Whether a gradient other than zero came."""
        return key in self.coded and bool(self.coded[key].any())

    def rows_lie(self, layout: Layout, key: Key, num_rows: int) -> bool:
        """Whether rows are seen to lie along a dimension of the marks."""
        plain = self.plain[key]
        view = [1] * (plain.dim() - 1)
        view[layout.dim] = -1
        row = layout.rows(plain.shape[layout.dim], num_rows).to(plain.device)
        row = row.view(view).expand(plain.shape[:-1])
        codes = row_codes(num_rows)[None].to(plain)
        share, amount = map(float, unexplained(plain, [self.coded[key]], codes, row))
        allowed, noise = self.tolerance_at(key, row, num_rows)
        return share <= allowed or amount <= noise

    def tolerance_at(self, key: Key, owner: Tensor, num_owners: int) -> tuple[float, float]:
        """How much of the marks of one place may stay unexplained: a share of those of an owner.

        Where a gradient cancels out, rounding is all that is left of it, and is not smaller for a
        smaller code: any share, up to an amount. Elsewhere that is 0.

        Raises:
            Refused: What one code for all does is no rounding.
        """
        plain = self.plain[key]
        one_code = plain.new_full((1, num_owners), SAME)
        rounding, amount = map(float, unexplained(plain, [self.same[key]], one_code, owner))
        allowed = tolerance(self.lowest) + 4 * rounding
        if rounding <= repeatable(self.lowest):
            self.tolerance = max(self.tolerance, allowed)
            return allowed, 0.0
        noise = negligible(self.lowest) * self._largest()
        if rounding * float(plain.abs().max()) > noise and amount > noise / 4:
            raise Refused(
                "engine: the backward of this model is not linear in the losses, or not the same "
                "when it runs again (a hook that clips or normalises gradients, or draws random "
                'numbers), so that tasks cannot be told apart. Use engine="per_task".'
            )
        return allowed, noise / 4

    def _largest(self) -> float:
        return max(float(marks.abs().max()) for marks in self.plain.values())


class Owners:
    """Whose the entries of one place are: shown by passes of one task alone, one after the other.

    However small the gradient of a task is beside those of others, it shows where it is.

    Args:
        marks: Of the plain pass, `[..., R]`.
        named: The owners that the forward named, `[...]`.
    """

    def __init__(self, marks: Tensor, named: Tensor | None) -> None:
        self.named, self.measured = named, torch.zeros_like(marks[..., 0], dtype=torch.int64)
        self._most = torch.zeros_like(marks[..., 0])  # of one task, at every entry
        self._sums: list[Tensor] = []  # by task: over all entries, and over those named as its own

    def see(self, task: int, marks: Tensor) -> None:
        """Take note of the marks of a task alone."""
        size = marks.abs().sum(-1)
        self.measured = torch.where(size > self._most, task, self.measured)
        self._most = torch.maximum(size, self._most)
        own = size if self.named is None else torch.where(self.named == task, size, 0.0)
        self._sums.append(torch.stack([size.sum(), own.sum()]))

    def length(self, task: int) -> float:
        """The sum over all entries of a task's marks."""
        return float(self._sums[task][0])

    def elsewhere(self, owner: Tensor) -> float:
        """The largest share of a task's gradient that is not at its own entries."""
        total, own = torch.stack(self._sums, dim=1)
        if owner is self.measured:
            every = range(len(total))
            own = torch.stack([torch.where(owner == t, self._most, 0.0).sum() for t in every])
        return float(((total - own) / total.clamp_min(torch.finfo(total.dtype).tiny)).max())

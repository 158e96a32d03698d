"""What the passes of one look show, by place: (junction, output)."""

# B rows

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradvac.gradients.graph import Refused
from gradvac.gradients.kernels import negligible, repeatable, tolerance
from gradvac.gradients.ownership._codes import SAME, row_codes, unexplained
from gradvac.gradients.ownership._layouts import Layout

Key = tuple[int, int]


class Evidence:
    """Marks of passes with codes.

    Args:
        lowest: The narrowest dtype on the way.
        num_rows: B; None if losses are not those of rows.

    Attributes:
        plain: Marks of the plain pass.
        same: Of a pass with one code for all.
        by_row: Of a pass with a code per row.
        rounding: What rounding was seen to do.
    """

    def __init__(self, lowest: torch.dtype, num_rows: int | None) -> None:
        self.plain: Mapping[Key, Tensor] = {}
        self.same: Mapping[Key, Tensor] = {}
        self.by_row: Mapping[Key, Tensor] = {}
        self.codes = row_codes(num_rows or 1)
        self.lowest, self.rounding = lowest, 0.0

    @property
    def tolerance(self) -> float:
        """How much of a mark may stay unexplained."""
        return tolerance(self.lowest) + 4 * self.rounding

    def forget(self) -> None:
        """Let go of the marks, which take memory."""
        self.plain = self.same = self.by_row = {}

    def is_finite(self, keys: Sequence[Key]) -> bool:
        """Whether the gradients of all these places are."""
        return all(bool(self.plain[key].isfinite().all()) for key in keys if key in self.plain)

    def is_awake(self, key: Key) -> bool:
        """Whether a gradient other than zero came."""
        return key in self.plain and bool(self.plain[key].any())

    def rows_lie(self, layout: Layout, key: Key) -> bool:
        """Whether rows are seen to lie along a dimension of the marks."""
        plain, same, by_row = (marks[key] for marks in (self.plain, self.same, self.by_row))
        view = [1] * (plain.dim() - 1)
        view[layout.dim] = -1
        row = layout.rows(plain.shape[layout.dim], len(self.codes)).to(plain.device)
        row = row.view(view).expand(plain.shape[:-1])
        return self.is_explained(plain, same, [by_row], self.codes[None].to(plain), row)

    def is_explained(
        self, plain: Tensor, same: Tensor, coded: Sequence[Tensor], codes: Tensor, owner: Tensor
    ) -> bool:
        """Whether the codes of owners explain marks.

        Raises:
            Refused: What one code for all does is no rounding.
        """
        one_code = torch.full_like(codes[:1], SAME)
        rounding = float(unexplained(plain, [same], one_code, owner))
        if rounding <= repeatable(self.lowest):
            self.rounding = max(self.rounding, rounding)
        elif rounding * float(plain.abs().max()) > negligible(self.lowest) * self._largest():
            raise Refused(
                "engine: the backward of this model is not linear in the losses, or not the same "
                "when it runs again (a hook that clips or normalises gradients, or draws random "
                'numbers), so that tasks cannot be told apart. Use engine="per_task".'
            )
        rest = float(unexplained(plain, coded, codes, owner))
        return rest <= tolerance(self.lowest) + 4 * rounding

    def _largest(self) -> float:
        return max(float(marks.abs().max()) for marks in self.plain.values())

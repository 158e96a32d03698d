"""Whose the entries of an output gradient are: measured, not assumed.

Two backward passes over the same graph, one plain and one whose start gradients carry a code per
row (or task), differ at every entry by the code of the row it belongs to. A few numbers are kept
per entry, random projections of the last dimension (*marks*). An entry whose marks fit no code
belongs to several rows: they influence each other. A pass with one code for all shows what rounding
does.
"""

# B rows, T tasks, G shape of an output gradient

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradvac.gradients.kernels import Marks
from gradvac.gradients.ownership._layouts import Layout

SAME = 0.6  # a code that all rows share shows what rounding alone does


def row_codes(num_rows: int) -> Tensor:
    """A code for every row, between 1/4 and 1: no overflow that the plain pass would not have."""
    generator = torch.Generator().manual_seed(num_rows)
    return 4.0 ** -torch.rand(num_rows, generator=generator, dtype=torch.float64)


@lru_cache(maxsize=64)
def task_codes(num_tasks: int, is_coarse: bool) -> "TaskCodes":
    """The same object for every step."""
    return TaskCodes(num_tasks, is_coarse=is_coarse)


class TaskCodes:
    """Codes that tell tasks apart by one number per pass; several passes for many tasks.

    Args:
        num_tasks: T.
        is_coarse: Gradients have 16 bits, which tell fewer codes apart.
    """

    def __init__(self, num_tasks: int, *, is_coarse: bool) -> None:
        self.base = min(max(num_tasks, 2), 8 if is_coarse else 64)
        self._octaves = 5.0 / (self.base - 1)
        self.num_passes, rest = 1, num_tasks - 1
        while rest := rest // self.base:
            self.num_passes += 1
        self._num_tasks = num_tasks

    def of_tasks(self, number: int) -> Tensor:
        """The code of every task in one of the passes, `[T]`."""
        digits = torch.arange(self._num_tasks) // self.base**number % self.base
        return torch.exp2(-self._octaves * digits.double())

    @lru_cache(maxsize=16)  # noqa: B019 (they are as many as there are devices)
    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The codes of all passes `[passes, T]`, and where one ends and the next begins."""
        codes = torch.stack([self.of_tasks(number) for number in range(self.num_passes)])
        between = torch.arange(self.base - 1, dtype=torch.float64) + 0.5
        edges = -torch.exp2(-self._octaves * between)
        return codes.to(device, dtype), edges.to(device, dtype)

    def owners(self, plain: Tensor, coded: Sequence[Tensor]) -> Tensor:
        """The task of every entry whose marks fit a code; any task for the others."""
        _, edges = self._on(plain.device, plain.dtype)
        size, owner = plain.square().sum(-1), None
        for marks in reversed(coded):
            digit = torch.bucketize(-(marks * plain).sum(-1) / size, edges)
            owner = digit if owner is None else owner * self.base + digit
        assert owner is not None
        return owner.clamp(max=self._num_tasks - 1)

    def unexplained(
        self, plain: Tensor, coded: Sequence[Tensor], owner: Tensor, num_places: int = 1
    ) -> Tensor:
        """The largest share of a task's marks that its code does not explain, at every place."""
        codes, _ = self._on(plain.device, plain.dtype)
        shares = [
            share(plain, marks, pass_codes[owner], owner, self._num_tasks, num_places)
            for marks, pass_codes in zip(coded, codes, strict=True)
        ]
        return torch.stack(shares).amax(0)

    def rounding(self, plain: Tensor, same: Tensor, owner: Tensor) -> Tensor:
        """What `unexplained` would be from rounding alone."""
        codes = torch.full_like(owner, 1, dtype=plain.dtype) * SAME
        return share(plain, same, codes, owner, self._num_tasks)


def share(
    plain: Tensor, coded: Tensor, codes: Tensor, group: Tensor, size: int, num_places: int = 1
) -> Tensor:
    """The largest share of a group's marks that the codes do not explain, at every place.

    Args:
        plain: Marks of the plain pass, `[..., R]`.
        coded: Marks of the pass with codes, `[..., R]`.
        codes: What each entry's code should be, `[...]`.
        group: The group of every entry, `[...]`.
        size: Number of groups.
        num_places: Dimension 0 counts so many places, each with groups of its own.
    """
    expected = codes[..., None] * plain
    both = torch.stack([expected.abs().sum(-1), (coded - expected).abs().sum(-1)])
    if num_places > 1:
        first = size * torch.arange(num_places, device=group.device)
        group = group.reshape(num_places, -1) + first[:, None]
    sums = _sums(both.reshape(2, -1), group.reshape(-1), num_places * size)
    mass, rest = sums.view(2, num_places, size)
    least = torch.finfo(mass.dtype).tiny
    shares: Tensor = rest / (mass + 1e-3 * mass.mean(1, keepdim=True)).clamp_min(least)
    return shares.amax(1)


def _sums(values: Tensor, group: Tensor, size: int) -> Tensor:
    """Sums by group, `[2, N]` -> `[2, size]`."""
    if size > 128:
        return values.new_zeros(2, size).index_add_(1, group, values)
    members = group[:, None] == torch.arange(size, device=group.device)
    return values @ members.to(values.dtype)  # a few groups: additions would queue up


class Fit(NamedTuple):
    """How well rows along a dimension explain the marks."""

    unexplained: float
    rounding: float  # what would be unexplained from rounding alone
    num_rows_seen: int  # rows whose gradient is not zero


def fit(
    plain: Marks, same: Marks, coded: Marks, shape: Sequence[int], layout: Layout, codes: Tensor
) -> Fit:
    """Compare marks with the codes of rows along a dimension."""
    num_rows = len(codes)
    is_last = len(shape) > 1 and layout.dim == len(shape) - 1
    ours, equal, theirs = (
        marks.columns if is_last else marks.entries for marks in (plain, same, coded)
    )
    assert ours is not None
    assert equal is not None
    assert theirs is not None
    every = torch.arange(shape[layout.dim], device=ours.device)
    times = shape[layout.dim] // num_rows
    row = every % num_rows if layout.tiled else every // times
    view = [1] * (ours.dim() - 1)
    view[0 if is_last else layout.dim] = -1
    row = row.view(view).expand(ours.shape[:-1])
    unexplained = share(ours, theirs, codes.to(ours)[row], row, num_rows)
    rounding = share(ours, equal, torch.full_like(row, 1, dtype=ours.dtype) * SAME, row, num_rows)
    sizes = ours.abs().sum(-1).reshape(-1)
    seen = ours.new_zeros(num_rows).index_add_(0, row.reshape(-1), sizes) > 0
    return Fit(float(unexplained), float(rounding), int(seen.sum()))

"""Whose the entries of an output gradient are: measured, not assumed.

Two backward passes over the same graph, one plain and one whose start gradients carry a code per
row (or task), differ at every entry by the code of the row it belongs to. A few numbers are kept
per entry, random projections of the last dimension (*marks*). An entry whose marks fit no code
belongs to several rows: they influence each other. A pass with one code for all shows what rounding
does.
"""

# B rows, T tasks, G shape of an output gradient

import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradvac.gradients._kernels import wide


class Layout(NamedTuple):
    """Rows lie along `dim`: together, or coming round again (`tiled`)."""

    dim: int
    tiled: bool = False

    def stride(self, shape: Sequence[int], num_rows: int) -> int | None:
        """From one row to the next in the order of memory; None where rows cannot lie so.

        Entry e belongs to row (e // stride) % B, in both forms.
        """
        if self.dim >= len(shape) or not shape[self.dim] or shape[self.dim] % num_rows:
            return None
        inner = math.prod(shape[self.dim + 1 :])
        return inner if self.tiled else inner * (shape[self.dim] // num_rows)

    def __str__(self) -> str:
        which = ("first", "second", "third", "fourth")
        where = which[self.dim] if self.dim < len(which) else f"{self.dim + 1}th"
        return f"rows along the {where} dimension" + (", repeated" if self.tiled else "")


_AT_ONCE = 1 << 26


class Marks(NamedTuple):
    """A few numbers per vector of the last dimension, and per position in the last dimension."""

    # [*G[:-1], R], 1 where a dimension is not kept; [*G, R] if there is at most one dimension.
    entries: Tensor
    columns: Tensor | None  # [G[-1], R]


def mark(
    gradient: Tensor, *, columns_too: bool = True, kept: Collection[int] | None = None
) -> Marks:
    """Project an output gradient.

    Args:
        gradient: The output gradient.
        columns_too: Rows may lie along its last dimension.
        kept: Other dimensions along which they may; the rest is projected too. None: all.
    """
    is_vector, shape = gradient.dim() < 2, (gradient.numel(), 1 + gradient.is_complex())
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient).flatten(-2)
    dtype = wide(gradient.dtype)
    if is_vector:
        return Marks(gradient.reshape(shape).to(dtype), None)
    flat = gradient.reshape(-1, gradient.shape[-1])
    across = _projection(flat.shape[1], dtype, gradient.device)
    entries, columns, start = [], None, 0
    # The gradient of large logits is not copied whole.
    for part in flat.split(max(1, _AT_ONCE // flat.shape[1])):
        part = part.to(dtype)
        entries.append(part @ across)
        if columns_too:
            along = _projection(flat.shape[0], dtype, gradient.device)[start : start + len(part)]
            partial = part.t() @ along
            columns, start = partial if columns is None else columns + partial, start + len(part)
    if columns is not None:  # both parts of a complex number are its own
        columns = columns.reshape(flat.shape[1] // shape[1], -1)
    whole = entries[0] if len(entries) == 1 else torch.cat(entries)
    whole = whole.view(*gradient.shape[:-1], whole.shape[1])
    for dim, size in enumerate(gradient.shape[:-1]):
        if kept is not None and dim not in kept and size:
            view = (size, *(1 for _ in gradient.shape[dim + 1 : -1]), whole.shape[-1])
            weights = _projection(size, dtype, gradient.device).view(view) / math.sqrt(size)
            whole = (whole * weights).sum(dim, keepdim=True)
    return Marks(whole, columns)


@lru_cache(maxsize=64)
def _projection(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Several directions, so that hardly any vector is orthogonal to all of them."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator).to(device, dtype)


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


def layouts(shape: Sequence[int], num_rows: int) -> Iterator[Layout]:
    """The ways in which rows may lie in a tensor, the usual one first."""
    for dim, size in enumerate(shape):
        if size and size % num_rows == 0:
            yield Layout(dim)
            if size > num_rows:
                yield Layout(dim, tiled=True)


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


def tolerance(lowest: torch.dtype) -> float:
    """How much may stay unexplained beyond what rounding was seen to do."""
    return {torch.float64: 1e-10, torch.float32: 1e-4}.get(lowest, 2e-2)


def negligible(lowest: torch.dtype) -> float:
    """What rounding may leave of a gradient that cancels out, as a share of the largest one."""
    return {torch.float64: 1e-14, torch.float32: 4e-6}.get(lowest, 1e-2)


def repeatable(lowest: torch.dtype) -> float:
    """What rounding can do at most: a backward with larger differences is not the same again."""
    return {torch.float64: 1e-4, torch.float32: 5e-2}.get(lowest, 0.3)

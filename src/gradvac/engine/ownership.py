"""Codes: whose the entries of an output gradient are, measured by two passes.

Two backward passes over the same graph, one plain and one whose start gradients carry a code per
row (or task), differ at every entry by the code of the row it belongs to. A few numbers are kept
per entry, random projections of the last dimension (*marks*). An entry whose marks fit no code
belongs to several rows: they influence each other.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# B rows, T tasks, G shape of an output gradient


def row_codes(num_rows: int) -> Tensor:
    """A code for every row, between 1/4 and 1: no overflow that the joint pass would not have."""
    generator = torch.Generator().manual_seed(num_rows)
    return 4.0 ** -torch.rand(num_rows, generator=generator, dtype=torch.float64)


class TaskCodes:
    """Codes that tell tasks apart by one number per pass; several passes for many tasks.

    Gradients of 16 bits are coarse: they tell fewer codes apart.
    """

    def __init__(self, num_tasks: int, is_coarse: bool) -> None:
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
    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The codes of all passes `[passes, T]`, and where one ends and the next begins."""
        codes = torch.stack([self.of_tasks(number) for number in range(self.num_passes)])
        between = torch.arange(self.base - 1, dtype=torch.float64) + 0.5
        edges = -torch.exp2(-self._octaves * between)
        return codes.to(device, dtype), edges.to(device, dtype)

    def owners(self, joint: Tensor, coded: Sequence[Tensor]) -> Tensor:
        """The task of every entry whose marks fit a code; any task for the others."""
        _, edges = self.on(joint.device, joint.dtype)
        size, owner = joint.square().sum(-1), None
        for sketches in reversed(coded):
            digit = torch.bucketize(-(sketches * joint).sum(-1) / size, edges)
            owner = digit if owner is None else owner * self.base + digit
        assert owner is not None
        return owner.clamp(max=self._num_tasks - 1)


task_codes = lru_cache(maxsize=64)(TaskCodes)  # the same object for every step


def unexplained(
    joint: Tensor, coded: Sequence[Tensor], codes: Tensor, owner: Tensor, num_places: int = 1
) -> tuple[Tensor, Tensor]:
    """What codes do not explain, at every place.

    Args:
        plain: Marks of the plain pass, `[..., R]`.
        coded: Of each pass with codes, likewise.
        codes: Of each pass, by owner.
        owner: Of every entry, `[...]`.
        num_places: Dimension 0 counts so many places, each with owners of its own.

    Returns:
        The largest share of an owner's marks, and the largest amount at an entry.
    """
    pairs = zip(coded, codes, strict=True)
    found = [
        _share_and_most(joint, sketches, by_owner, owner, num_places)
        for sketches, by_owner in pairs
    ]
    shares, most = zip(*found, strict=True)
    return torch.stack(shares).amax(0), torch.stack(most).amax(0)


def _share_and_most(
    joint: Tensor, coded: Tensor, codes: Tensor, group: Tensor, num_places: int
) -> tuple[Tensor, Tensor]:
    expected, size = codes[group][..., None] * joint, len(codes)
    both = torch.stack([expected.abs().sum(-1), (coded - expected).abs().sum(-1)])
    most = both[1].reshape(num_places, -1).amax(1)
    if num_places > 1:
        first = size * torch.arange(num_places, device=group.device)
        group = group.reshape(num_places, -1) + first[:, None]
    sums = _sums(both.reshape(2, -1), group.reshape(-1), num_places * size)
    mass, rest = sums.view(2, num_places, size)
    least = torch.finfo(mass.dtype).tiny
    shares: Tensor = rest / (mass + 1e-3 * mass.mean(1, keepdim=True)).clamp_min(least)
    return shares.amax(1), most


def _sums(values: Tensor, group: Tensor, size: int) -> Tensor:
    """Sums by group, `[2, N]` -> `[2, size]`."""
    if size > 128:
        return values.new_zeros(2, size).index_add_(1, group, values)
    members = group[:, None] == torch.arange(size, device=group.device)
    return values @ members.to(values.dtype)  # a few groups: additions would queue up

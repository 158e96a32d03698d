"""Owners of the entries of an output gradient, measured by codes.

Two backward passes over the same graph, one of the joint losses and one whose start gradients carry
a code per row (or task), differ at every entry by the code of the row it belongs to. A few numbers
are kept per entry, random projections of the last dimension (*sketches*). An entry whose sketches
fit no code belongs to several rows: they influence each other.
"""

# B rows, T tasks, R numbers of a sketch per vector

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gradvac.engine.graph import NotSeparable
from gradvac.engine.junctions import Junction
from gradvac.engine.kernels import Owned, Segments, negligible, sketch

Key = tuple[int, int]
"""An output of a junction: (number of the junction, number of the output)."""


def row_codes(num_rows: int) -> Tensor:
    """A code for every row, between 1/4 and 1: no overflow that the joint pass would not have."""
    generator = torch.Generator().manual_seed(num_rows)
    return 4.0 ** -torch.rand(num_rows, generator=generator, dtype=torch.float64)


class TaskCodes:
    """Codes that distinguish tasks by one number per pass; several passes for many tasks.

    Gradients of 16 bits are coarse: they distinguish fewer codes.
    """

    def __init__(self, num_tasks: int, is_coarse: bool) -> None:
        self.base = min(max(num_tasks, 2), 8 if is_coarse else 64)
        self._octaves = 5.0 / (self.base - 1)
        self.num_passes, rest = 1, num_tasks - 1
        while rest := rest // self.base:
            self.num_passes += 1
        self.num_tasks = num_tasks

    def of_tasks(self, number: int) -> Tensor:
        """The code of every task in one of the passes, `[T]`."""
        digits = torch.arange(self.num_tasks) // self.base**number % self.base
        return torch.exp2(-self._octaves * digits.double())

    @lru_cache(maxsize=16)  # noqa: B019 (they are as many as there are devices)
    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The codes of all passes `[passes, T]`, and where one ends and the next begins."""
        codes = torch.stack([self.of_tasks(number) for number in range(self.num_passes)])
        between = torch.arange(self.base - 1, dtype=torch.float64) + 0.5
        edges = -torch.exp2(-self._octaves * between)
        return codes.to(device, dtype), edges.to(device, dtype)

    def owners(self, joint: Tensor, coded: Sequence[Tensor]) -> Tensor:
        """The task of every entry whose sketches fit a code; any task for the others."""
        _, edges = self.on(joint.device, joint.dtype)
        size, owner = joint.square().sum(-1), None
        for sketches in reversed(coded):
            digit = torch.bucketize(-(sketches * joint).sum(-1) / size, edges)
            owner = digit if owner is None else owner * self.base + digit
        assert owner is not None
        return owner.clamp(max=self.num_tasks - 1)


task_codes = lru_cache(maxsize=64)(TaskCodes)  # the same object for every step


def unexplained(
    joint: Tensor, coded: Sequence[Tensor], codes: Tensor, owner: Tensor, num_outputs: int = 1
) -> tuple[Tensor, Tensor]:
    """What codes do not explain, of one output or several of one shape.

    Args:
        joint: Sketches of the joint pass, `[..., R]`.
        coded: Of each pass with codes, likewise.
        codes: Of each pass, by owner.
        owner: Of every entry, `[...]`.
        num_outputs: Dimension 0 counts so many outputs, each with its own owners.

    Returns:
        The largest share of an owner's sketches, and the largest amount at an entry.
    """
    pairs = zip(coded, codes, strict=True)
    found = [
        _share_and_most(joint, sketches, by_owner, owner, num_outputs)
        for sketches, by_owner in pairs
    ]
    shares, most = zip(*found, strict=True)
    return torch.stack(shares).amax(0), torch.stack(most).amax(0)


def _share_and_most(
    joint: Tensor, coded: Tensor, codes: Tensor, group: Tensor, num_outputs: int
) -> tuple[Tensor, Tensor]:
    expected, size = codes[group][..., None] * joint, len(codes)
    both = torch.stack([expected.abs().sum(-1), (coded - expected).abs().sum(-1)])
    most = both[1].reshape(num_outputs, -1).amax(1)
    if num_outputs > 1:
        first = size * torch.arange(num_outputs, device=group.device)
        group = group.reshape(num_outputs, -1) + first[:, None]
    sums = _sums(both.reshape(2, -1), group.reshape(-1), num_outputs * size)
    mass, rest = sums.view(2, num_outputs, size)
    least = torch.finfo(mass.dtype).tiny
    shares: Tensor = rest / (mass + 1e-3 * mass.mean(1, keepdim=True)).clamp_min(least)
    return shares.amax(1), most


def _sums(values: Tensor, group: Tensor, size: int) -> Tensor:
    """Sums by group, `[2, N]` -> `[2, size]`."""
    if size > 128:
        return values.new_zeros(2, size).index_add_(1, group, values)
    members = group[:, None] == torch.arange(size, device=group.device)
    return values @ members.to(values.dtype)  # a few groups: additions would queue up


class MeasuredOwners:
    """The owners of entries in one step, where they depend on the data.

    Args:
        codes: Of the tasks.
        coded: Sketches of the passes with these codes, by output.
        smaller: Tasks that others may hide, bool `[T]`, and sketches of a pass of these alone.
        lowest: The narrowest dtype on the way.
        tolerance: How much of what is measured may stay unexplained.
    """

    def __init__(
        self,
        codes: TaskCodes,
        coded: Sequence[Mapping[Key, Tensor]],
        smaller: Sequence[tuple[Tensor, Mapping[Key, Tensor]]],
        lowest: torch.dtype,
        tolerance: float,
    ) -> None:
        self._codes, self._coded, self._smaller = codes, coded, smaller
        self._lowest, self._tolerance = lowest, tolerance
        self._seen: dict[tuple[int, ...], list[tuple[Tensor, ...]]] = {}  # by shape: sketches
        self._last: dict[int, Segments] = {}  # by length
        # By group of smaller tasks: what they have at entries of larger ones, and in all.
        self._elsewhere: dict[int, list[Tensor]] = defaultdict(list)

    def of(self, key: Key, junction: Junction, gradient: Tensor) -> Owned:
        """The owners of an output gradient's entries."""
        vectors = junction.vectors(gradient)
        joint = sketch(vectors)
        coded = [sketches[key] for sketches in self._coded]
        owner = self._codes.owners(joint, coded)
        self._seen.setdefault(tuple(joint.shape), []).append((owner, joint, *coded))
        for group, (tasks, sketches) in enumerate(self._smaller):
            size = sketches[key].abs().sum(-1)
            local = torch.where(tasks.to(owner.device)[owner], size, 0.0)
            self._elsewhere[group].append(torch.stack([size.sum() - local.sum(), size.sum()]))
        dim = None if vectors is gradient else gradient.dim() - 1
        return Owned(gradient.shape, self._segments_of(owner.reshape(-1)), dim)

    def _segments_of(self, owner: Tensor) -> Segments:
        """The same object for owners as they were last: on a GPU, comparing would mean waiting."""
        last = self._last.get(len(owner))
        if last is None or owner.is_cuda or not torch.equal(last.tasks, owner):
            last = Segments(owner, self._codes.num_tasks, owner.device)
            self._last[len(owner)] = last
        return last

    def check(self) -> None:
        """Raise if entries belong to several tasks."""
        shares, amounts, sizes = [], [], []
        for outputs in self._seen.values():  # all of one shape at once
            owner, joint, *coded = (torch.stack(tensors) for tensors in zip(*outputs, strict=True))
            codes, _ = self._codes.on(joint.device, joint.dtype)
            share, amount = unexplained(joint, coded, codes, owner, len(outputs))
            shares.append(share)
            amounts.append(amount)
            sizes.append(torch.stack([joint, *coded]).abs().flatten(2).amax((0, 2)))
        if not shares:
            return
        self._seen = {}
        share, amount, size = torch.cat(shares), torch.cat(amounts), torch.cat(sizes)
        most = negligible(self._lowest) * size.max()  # rounding may leave so much
        counts = (share * size > most) & (amount > most / 4)
        is_mixed = float(torch.where(counts, share, 0.0).max()) > self._tolerance
        if is_mixed or any(map(self._is_elsewhere, self._elsewhere.values())):
            raise NotSeparable(
                "engine: rows of the batch influence each other in this step, so that gradients "
                'cannot be separated by task in one backward. Use engine="per_task".'
            )

    def _is_elsewhere(self, by_output: list[Tensor]) -> bool:
        elsewhere, size = torch.stack(by_output, dim=1)
        most = negligible(self._lowest) * size.max()
        return bool(((elsewhere > self._tolerance * size) & (elsewhere > most)).any())

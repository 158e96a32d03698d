"""Layouts: along which dimension of a tensor the rows of the batch lie."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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

    def rows(self, size: int, num_rows: int) -> Tensor:
        """The row of every entry of the dimension."""
        every = torch.arange(size)
        return every % num_rows if self.tiled else every // (size // num_rows)

    def __str__(self) -> str:
        which = ("first", "second", "third", "fourth")
        where = which[self.dim] if self.dim < len(which) else f"{self.dim + 1}th"
        return f"rows along the {where} dimension" + (", repeated" if self.tiled else "")


def layouts(shape: Sequence[int], num_rows: int) -> Iterator[Layout]:
    """The ways in which rows may lie in a tensor, the usual one first."""
    for dim, size in enumerate(shape):
        if size and size % num_rows == 0:
            yield Layout(dim)
            if size > num_rows:
                yield Layout(dim, tiled=True)

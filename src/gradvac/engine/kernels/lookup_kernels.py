"""Lookups on CUDA: sums of values by token and task, added to tables and multiplied by each other.

The sums come in the order of their keys, `token * T + task`, one row each; keys of -1 stand for
nothing and come last. References: the torch branch of `Lookup.add_to`, and Gram matrices of its
built rows.
"""

# T tasks, N rows, D width, V rows of a table

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384  # a row is held in registers
_CHUNK = 1 << 17  # of products that are summed at once, in float64


@triton.jit(do_not_specialize=["START", "SIZE", "T"])
def _add_kernel(KEYS, ROWS, OUT, START, SIZE, APART, T, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(KEYS + row)
    token = key // T - START
    if (key >= 0) & (token >= 0) & (token < SIZE):
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        added = tl.load(ROWS + row * D + columns, mask=inside, other=0.0)
        place = OUT + key % T * APART + token * D + columns
        before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (before + added).to(OUT.dtype.element_ty), mask=inside)


def add_rows(gradients: Tensor, keys: Tensor, rows: Tensor, start: int) -> None:
    """Add rows `[N, D]`, in float32, to tables `[T, V, D]` that begin with token `start`."""
    num_tasks, size, width = gradients.shape
    _add_kernel[(len(rows),)](
        *(keys, rows, gradients, start, size, gradients.stride(0), num_tasks, width),
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
    )


@triton.jit(do_not_specialize=["N", "T"])
def _products_kernel(KEYS, ROWS, OUT, N, T, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(KEYS + row)
    if key >= 0:
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        own = tl.load(ROWS + row * D + columns, mask=inside, other=0.0)
        tl.store(OUT + row * T + key % T, 0.5 * tl.sum(own * own, 0))
        other = row + 1
        their_key = tl.load(KEYS + other, mask=other < N, other=-1)
        while (their_key >= 0) & (their_key // T == key // T):  # those of a token are neighbours
            theirs = tl.load(ROWS + other * D + columns, mask=inside, other=0.0)
            tl.store(OUT + row * T + their_key % T, tl.sum(own * theirs, 0))
            other += 1
            their_key = tl.load(KEYS + other, mask=other < N, other=-1)


def gram_of_rows(keys: Tensor, rows: Tensor, num_tasks: int) -> Tensor:
    """The Gram matrix of all tasks' tables that rows `[N, D]` make up, in float64, `[T, T]`."""
    length, width = rows.shape
    products = rows.new_zeros(length, num_tasks)  # with rows of the same token from each on
    _products_kernel[(length,)](
        *(keys, rows, products, length, num_tasks, width),
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
    )
    tasks = torch.arange(num_tasks, device=rows.device)[:, None]
    half = products.new_zeros(num_tasks, num_tasks, dtype=torch.float64)
    for these, of_rows in zip(keys.split(_CHUNK), products.split(_CHUNK), strict=True):
        half += (these % num_tasks == tasks).double() @ of_rows.double()
    return half + half.t()


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8

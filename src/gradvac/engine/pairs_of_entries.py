"""Gram matrices of large tables from pairs of entries, without any task gradient.

An entry contributes a b^T: the output gradient and the input of a head, or a unit vector and the
gradient of what was looked up. The inner product of two entries is <a, a'> <b, b'>, and that of two
tasks the sum over their pairs, which costs the same for any number of tasks.
"""

# N entries, T tasks, I columns

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac.engine.contributions import (
    Lookup,
    MatrixContribution,
    OuterProduct,
    are_pairs_cheaper,
)
from gradvac.engine.kernels import inner_products
from gradvac.gram import working_dtype

_AT_ONCE = 1 << 24  # pairs

Entries = OuterProduct | Lookup


def gram_of_entries(every: Sequence[MatrixContribution]) -> Tensor | None:
    """`[T, T]`, of contributions to one matrix, from pairs of their entries.

    None where building task gradients takes less, or where there are other contributions. What is
    lost is a share of all that single entries contribute, also where they cancel out: of float32
    and below, on a GPU, some 1e-6 of it.
    """
    parts = [one for one in every if isinstance(one, Entries) and not _right(one).is_complex()]
    if len(parts) < len(every) or not _are_few(parts):
        return None
    first, dtype = every[0].segments, working_dtype(_right(parts[0]).device)
    numbers = torch.arange(first.num_tasks, device=first.device)
    tasks = [one.segments.along(len(_right(one))) for one in parts]
    owners = [(index[:, None] == numbers).to(dtype) for index in tasks]
    half = torch.zeros(first.num_tasks, first.num_tasks, dtype=dtype, device=first.device)
    for number, one in enumerate(parts):
        for other in range(number, len(parts)):
            length, end = len(_right(parts[other])), len(_right(one))
            step = max(1, _AT_ONCE // max(1, length))
            for start in range(0, end, step):
                rows = slice(start, min(start + step, end))
                columns = slice(start if other == number else 0, length)
                pairs = _pairs(one, rows, parts[other], columns)
                if other == number:  # the square on the diagonal has every pair twice
                    pairs[:, : rows.stop - start] *= 0.5
                half += owners[number][rows].t() @ (pairs @ owners[other][columns])
    return half + half.t()


def _are_few(every: Sequence[Entries]) -> bool:
    products = [one for one in every if isinstance(one, OuterProduct)]
    right, num_tasks = _right(every[0]), every[0].segments.num_tasks
    in_products, in_all = (sum(len(_right(one)) for one in some) for some in (products, every))
    # Of a table that is only looked up, no more rows are built than there are entries.
    num_rows = products[0].left.shape[1] if products else in_all
    shape = (num_rows, right.shape[1])
    return are_pairs_cheaper(in_products, in_all, shape, num_tasks, is_cuda=right.is_cuda)


def _pairs(one: Entries, rows: slice, other: Entries, columns: slice) -> Tensor:
    """The inner products of what some entries contribute, `[rows, columns]`."""
    pairs = inner_products(_right(one)[rows], _right(other)[columns])
    if isinstance(one, Lookup):
        if isinstance(other, Lookup):
            return pairs.mul_(one.tokens[rows, None] == other.tokens[columns])
        return pairs.mul_(other.left[columns].index_select(1, one.tokens[rows]).t())
    if isinstance(other, Lookup):
        return pairs.mul_(one.left[rows].index_select(1, other.tokens[columns]))
    return pairs.mul_(inner_products(one.left[rows], other.left[columns]))


def _right(one: Entries) -> Tensor:
    """`[N, I]`."""
    return one.values if isinstance(one, Lookup) else one.right

"""Triton kernels: Gram matrices and updates of many parameters at once.

Bound by memory: each reads every gradient once. Their reference is the torch branch of `Stacked` in
`_kernels.py`.
"""

# K components, T tasks, P parameters

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvac.indices import index_on

MOST_TASKS = 128  # a tile holds all tasks; beyond this the torch form is used
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # float64 is for checking: torch's


# -- many parameters at once -----------------------------------------------------------------
# A chunk is a range of one parameter's columns; every program takes one chunk.


def _columns(sizes: Sequence[int], device: torch.device) -> int:
    """Columns of a chunk: so many that there are about eight programs per processor."""
    wanted = sum(sizes) // (8 * processors_of(device))
    return max(2048, triton.cdiv(wanted, 2048) * 2048)


class _Chunks:
    """Where the chunks of some parameters lie; the same every step, but for addresses."""

    def __init__(
        self,
        columns: int,
        sizes: Sequence[int],
        groups: Sequence[int],
        num_groups: int,
        device: torch.device,
    ) -> None:
        member: list[int] = []
        start: list[int] = []
        for number, size in enumerate(sizes):
            first = range(0, size, columns)
            member += [number] * len(first)
            start += first
        places, place = [], 0
        for size in sizes:
            places.append(place)
            place += (size + 63) // 64 * 64  # updates begin at multiples of 256 bytes
        self.columns, self.num, self.places, self.length = columns, len(member), places, place
        self.member = index_on(member, device)
        self.start = index_on(start, device)
        self.sizes = index_on(list(sizes), device)
        self.place = index_on(places, device)
        self.group = index_on([groups[m] for m in member], device)
        every = torch.arange(num_groups, device=device)[:, None]
        self.of_group = (self.group == every).double()  # [K, chunks]


@lru_cache(maxsize=64)
def _chunks(
    columns: int,
    sizes: tuple[int, ...],
    groups: tuple[int, ...],
    num_groups: int,
    device: torch.device,
) -> _Chunks:
    return _Chunks(columns, sizes, groups, num_groups, device)


def _chunks_of(parts: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> _Chunks:
    """The chunks of task gradients `[T, P]` of some parameters."""
    sizes, device = tuple(part.shape[1] for part in parts), parts[0].device
    return _chunks(_columns(sizes, device), sizes, tuple(groups), num_groups, device)


def _addresses(stacks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Where every parameter's gradients begin, and how far its tasks lie apart."""
    given = [[s.data_ptr() for s in stacks], [s.stride(0) for s in stacks]]
    table = torch.tensor(given, dtype=torch.int64, pin_memory=True)
    if torch.cuda.is_current_stream_capturing():
        _KEPT.append(table)  # a recorded graph copies from it again
    on_device = table.to(stacks[0].device, non_blocking=True)
    return on_device[0], on_device[1]


_KEPT: list[Tensor] = []


def _launches(stacks: Sequence[Tensor]) -> list[tuple[bool, list[int]]]:
    """What one launch can take together: equal dtypes, and whether 16 bytes can be read at once."""
    together: dict[tuple[torch.dtype, bool], list[int]] = {}
    for number, stack in enumerate(stacks):
        aligned = not (stack.data_ptr() % 16 or stack.stride(0) % 16 or stack.shape[1] % 16)
        together.setdefault((stack.dtype, aligned), []).append(number)
    return [(aligned, numbers) for (_, aligned), numbers in together.items()]


@triton.jit
def _place(LIKE, ADDRESS, STRIDE, SIZE, member, ALIGNED: tl.constexpr):
    """Where a parameter's gradients begin, how far tasks lie apart, and how many columns it has.

    The compiler cannot know that addresses read from memory are multiples of 16 bytes, and would
    read number by number.
    """
    base = tl.load(ADDRESS + member).to(LIKE.dtype)
    stride = tl.load(STRIDE + member)
    size = tl.load(SIZE + member)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        stride = tl.multiple_of(stride, 16)
        size = tl.multiple_of(size, 16)
    return base, stride, size


@triton.jit
def _grams_kernel(
    LIKE,
    ADDRESS,
    STRIDE,
    MEMBER,
    START,
    SIZE,
    OUT,
    ONE,  # 1.0, but unknown to the compiler, which would let the tensor cores add
    T: tl.constexpr,
    TASKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = tl.program_id(0)
    member = tl.load(MEMBER + chunk)
    first = tl.multiple_of(tl.load(START + chunk), 16)
    base, stride, size = _place(LIKE, ADDRESS, STRIDE, SIZE, member, ALIGNED)
    rows = tl.arange(0, TASKS)
    columns = tl.arange(0, BLOCK)
    lines = base + rows[:, None].to(tl.int64) * stride
    total = tl.zeros([TASKS, TASKS], tl.float32)
    end = tl.minimum(first + CHUNK, size)
    if ALIGNED:
        end = tl.multiple_of(end, 16)
    for start in range(first, end, BLOCK):
        inside = (rows < T)[:, None] & (start + columns < end)[None, :]
        tile = tl.load(lines + (start + columns)[None, :], mask=inside, other=0.0)
        # Tensor cores cut off what an addition loses: tiles are added up here, small parts first.
        if IS_WIDE:
            high = tile.to(tl.bfloat16)
            low = (tile - high.to(tl.float32)).to(tl.bfloat16)
            part = tl.dot(low, tl.trans(low))
            part = tl.dot(low, tl.trans(high), part)
            part = tl.dot(high, tl.trans(low), part)
            part = tl.dot(high, tl.trans(high), part)
        else:
            part = tl.dot(tile, tl.trans(tile))
        total += part * ONE
    place = chunk * TASKS * TASKS + rows[:, None] * TASKS + rows[None, :]
    tl.store(OUT + place, total)


def grams(stacks: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> Tensor:
    """Gram matrices by component, `[K, T, T]`: float32 within a chunk, float64 across.

    Float32 gradients are taken as two bfloat16 parts each, 16 bits in all, for the tensor cores:
    plain float32 products run at a tenth of the memory's speed.
    """
    num_tasks = len(stacks[0])
    tasks = max(16, triton.next_power_of_2(num_tasks))
    stacks = [_rows_together(stack) for stack in stacks]
    sums = []
    for aligned, numbers in _launches(stacks):
        parts = [stacks[n] for n in numbers]
        chunks = _chunks_of(parts, [groups[n] for n in numbers], num_groups)
        address, stride = _addresses(parts)
        partial = parts[0].new_empty(chunks.num, tasks, tasks, dtype=torch.float32)
        is_wide = parts[0].dtype == torch.float32
        _grams_kernel[(chunks.num,)](
            parts[0],
            address,
            stride,
            chunks.member,
            chunks.start,
            chunks.sizes,
            partial,
            1.0,
            T=num_tasks,
            TASKS=tasks,
            BLOCK=min(512, 8192 // tasks) if is_wide else 512 if tasks <= 32 else 256,
            CHUNK=chunks.columns,
            IS_WIDE=is_wide,
            ALIGNED=aligned,
            num_warps=8 if tasks == MOST_TASKS and not is_wide else 4,
            num_stages=4 if tasks <= 32 else 3,
        )
        sums.append(chunks.of_group @ partial.flatten(1).double())
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return total.view(num_groups, tasks, tasks)[:, :num_tasks, :num_tasks]


def _rows_together(stack: Tensor) -> Tensor:
    return stack if stack.stride(1) == 1 else stack.contiguous()


@triton.jit
def _combine_many_kernel(
    LIKE,
    ADDRESS,
    STRIDE,
    MEMBER,
    START,
    SIZE,
    GROUP,
    PLACE,
    W,
    OUT,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = tl.program_id(0)
    member = tl.load(MEMBER + chunk)
    start = tl.multiple_of(tl.load(START + chunk), 16) + tl.program_id(1) * BLOCK
    base, stride, size = _place(LIKE, ADDRESS, STRIDE, SIZE, member, ALIGNED)
    place = tl.multiple_of(tl.load(PLACE + member), 64)
    weights = W + tl.load(GROUP + chunk) * T
    columns = start + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for task in range(0, T // 4 * 4, 4):  # four loads on their way at a time
        line = base + task * stride + columns
        row0 = tl.load(line, mask=inside, other=0.0)
        row1 = tl.load(line + stride, mask=inside, other=0.0)
        row2 = tl.load(line + 2 * stride, mask=inside, other=0.0)
        row3 = tl.load(line + 3 * stride, mask=inside, other=0.0)
        total += tl.load(weights + task).to(tl.float32) * row0.to(tl.float32)
        total += tl.load(weights + task + 1).to(tl.float32) * row1.to(tl.float32)
        total += tl.load(weights + task + 2).to(tl.float32) * row2.to(tl.float32)
        total += tl.load(weights + task + 3).to(tl.float32) * row3.to(tl.float32)
    for task in range(T // 4 * 4, T):
        row = tl.load(base + task * stride + columns, mask=inside, other=0.0)
        total += tl.load(weights + task).to(tl.float32) * row.to(tl.float32)
    tl.store(OUT + place + columns, total, mask=inside)


def combine_many(weights: Tensor, stacks: Sequence[Tensor], groups: Sequence[int]) -> list[Tensor]:
    """sum_t weights[k, t] g_t of every parameter, in float32, `[P]` each."""
    num_groups, num_tasks = weights.shape
    weights = weights.contiguous()
    stacks = [_rows_together(stack) for stack in stacks]
    updates: list[Tensor] = [weights] * len(stacks)
    for aligned, numbers in _launches(stacks):
        parts = [stacks[n] for n in numbers]
        chunks = _chunks_of(parts, [groups[n] for n in numbers], num_groups)
        address, stride = _addresses(parts)
        out = parts[0].new_empty(chunks.length, dtype=torch.float32)
        _combine_many_kernel[(chunks.num, chunks.columns // 2048)](
            parts[0],
            address,
            stride,
            chunks.member,
            chunks.start,
            chunks.sizes,
            chunks.group,
            chunks.place,
            weights,
            out,
            T=num_tasks,
            BLOCK=2048,
            ALIGNED=aligned,
            num_warps=8,
        )
        for number, place, part in zip(numbers, chunks.places, parts, strict=True):
            updates[number] = out[place : place + part.shape[1]]
    return updates


@triton.jit
def _clear_kernel(OUT, SIZES, LENGTH, BLOCK: tl.constexpr):
    task = tl.program_id(0)
    if tl.load(SIZES + task) == 0:
        line = OUT + task.to(tl.int64) * LENGTH
        zeros = tl.zeros([BLOCK], OUT.dtype.element_ty)
        for start in range(tl.program_id(1) * BLOCK, LENGTH, tl.num_programs(1) * BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(line + columns, zeros, mask=columns < LENGTH)


def clear_empty(stack: Tensor, sizes: Tensor) -> None:
    """Write zeros to the gradients `[T, ...]` of tasks of size 0; others are not even read."""
    length = stack[0].numel()
    programs = min(triton.cdiv(length, 4096), 2 * processors_of(stack.device))
    _clear_kernel[(len(stack), programs)](stack, sizes, length, BLOCK=4096, num_warps=8)


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

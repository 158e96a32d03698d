"""Triton kernels: Gram matrices and updates of many parameters at once, and sums by task.

Bound by memory: each reads its inputs once. Their references are the torch branches of `Stacked` in
`stacks.py`, and of `Segments.sum` and `norm_sums` in `segments.py`.
"""

# K components, T tasks, P parameters, N entries, D width

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvac.engine.kernels.segments import Segments
from gradvac.utils.devices import RECORDED, index_on, is_captured

MOST_TASKS = 128  # a tile holds all tasks; beyond this the torch form is used
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # float64 is for checking: torch's
WIDEST = 8192  # a row of a normalisation is held in registers


# -- many parameters at once -----------------------------------------------------------------
# A chunk is a range of one parameter's columns; every program takes one chunk.


class _Chunks:
    """Where the chunks of some parameters lie; the same every step, but for addresses."""

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[int],
        num_groups: int,
        device: torch.device,
    ) -> None:
        # So many columns that there are about eight programs per processor.
        wanted = sum(sizes) // (8 * processors_of(device))
        self.columns = max(2048, triton.cdiv(wanted, 2048) * 2048)
        member: list[int] = []
        start: list[int] = []
        for number, size in enumerate(sizes):
            first = range(0, size, self.columns)
            member += [number] * len(first)
            start += first
        padded = [(size + 63) // 64 * 64 for size in sizes]  # updates begin at whole 256 bytes
        *places, self.length = accumulate(padded, initial=0)
        self.pieces: list[int] = []  # updates, and what lies between them
        self.updates: list[int] = []  # which of the pieces they are
        for size, end in zip(sizes, padded, strict=True):
            self.updates.append(len(self.pieces))
            self.pieces += [size, end - size] if end > size else [size]
        self.num = len(member)
        self.member = index_on(member, device)
        self.start = index_on(start, device)
        self.sizes = index_on(sizes, device)
        self.place = index_on(places, device)
        self.group = index_on([groups[m] for m in member], device)
        every = torch.arange(num_groups, device=device)[:, None]
        self.of_group = (self.group == every).double()  # [K, chunks]


_chunks = lru_cache(maxsize=64)(_Chunks)


class _Launch(NamedTuple):
    """Parameters that one launch takes together: of one dtype, and aligned alike."""

    numbers: Sequence[int]  # which of all parameters they are
    chunks: _Chunks
    where: tuple[Tensor, ...]  # what both kernels are told of their task gradients
    aligned: bool  # 16 bytes can be read at once


def _on(device: torch.device, rows: Sequence[Sequence[int]]) -> Tensor:
    """Numbers of this step, `[rows, P]`, on the device."""
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
    if is_captured(device):
        RECORDED.append(table)  # a recorded graph copies from it again
    return table.to(device, non_blocking=True)


class Launched:
    """As `Stacked` in `stacks.py`, in few launches."""

    def __init__(self, stacks: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> None:
        self._num_tasks = len(stacks[0])
        stacks = [stack if stack.stride(1) == 1 else stack.contiguous() for stack in stacks]
        self._stacks = stacks  # kept, because kernels know nothing but their addresses
        # Number, component, columns, where gradients begin, and how far tasks lie apart.
        together: dict[tuple[torch.dtype, bool], list[tuple[int, int, int, int, int]]] = {}
        for number, (stack, group) in enumerate(zip(stacks, groups, strict=True)):
            size, address, stride = stack.shape[1], stack.data_ptr(), stack.stride(0)
            aligned = not (address % 16 or stride % 16 or size % 16)
            known = (number, group, size, address, stride)
            together.setdefault((stack.dtype, aligned), []).append(known)
        self._launches: list[_Launch] = []
        for (_, aligned), parts in together.items():
            numbers, members, sizes, *addresses = zip(*parts, strict=True)
            first = stacks[numbers[0]]
            given = (sizes, members, num_groups, first.device)
            if is_captured(first.device):
                RECORDED.append(chunks := _Chunks(*given))
            else:
                chunks = _chunks(*given)
            table = _on(first.device, addresses)
            where = (first, *table.unbind(), chunks.member, chunks.start, chunks.sizes)
            self._launches.append(_Launch(numbers, chunks, where, aligned))

    def grams(self) -> Tensor:
        """Gram matrices by component, `[K, T, T]`: float32 within a chunk, float64 across.

        Float32 gradients are taken as two bfloat16 parts each, 16 bits in all, for the tensor
        cores: plain float32 products run at a tenth of the memory's speed.
        """
        tasks = max(16, triton.next_power_of_2(self._num_tasks))
        sums = []
        for launch in self._launches:
            chunks, first = launch.chunks, launch.where[0]
            partial = first.new_empty(chunks.num, tasks, tasks, dtype=torch.float32)
            is_wide = first.dtype == torch.float32
            _grams_kernel[(chunks.num,)](
                *launch.where,
                partial,
                1.0,
                T=self._num_tasks,
                TASKS=tasks,
                BLOCK=min(512, 8192 // tasks) if is_wide else 512 if tasks <= 32 else 256,
                CHUNK=chunks.columns,
                IS_WIDE=is_wide,
                ALIGNED=launch.aligned,
                num_warps=8 if tasks == MOST_TASKS and not is_wide else 4,
                num_stages=4 if tasks <= 32 else 3,
            )
            sums.append(chunks.of_group @ partial.flatten(1).double())
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        return total.view(-1, tasks, tasks)[:, : self._num_tasks, : self._num_tasks]

    def combine(self, weights: Tensor) -> list[Tensor]:
        """sum_t weights[k, t] g_t of every parameter, in float32, `[P]` each."""
        weights = weights.contiguous()
        updates: dict[int, Tensor] = {}
        for launch in self._launches:
            chunks = launch.chunks
            out = launch.where[0].new_empty(chunks.length, dtype=torch.float32)
            _combine_kernel[(chunks.num, chunks.columns // 2048)](
                *launch.where,
                chunks.group,
                chunks.place,
                weights,
                out,
                T=self._num_tasks,
                BLOCK=2048,
                ALIGNED=launch.aligned,
                num_warps=8,
            )
            pieces = out.split(chunks.pieces)
            for number, piece in zip(launch.numbers, chunks.updates, strict=True):
                updates[number] = pieces[piece]
        return [updates[number] for number in range(len(updates))]


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


@triton.jit
def _combine_kernel(
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


# -- sums over the entries of each task, for shifts, scales and normalisations -----------------


@triton.jit
def _norm_kernel(
    GY,
    X,
    MEAN,
    SCALE,
    ORDER,
    ENDS,
    OUT,
    PER_ROW,
    D,
    BLOCK: tl.constexpr,
    RMS: tl.constexpr,
    SORTED: tl.constexpr,
):
    task, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    start = tl.load(ENDS + task - 1, mask=task > 0, other=0)
    end = tl.load(ENDS + task)
    by_scale = tl.zeros([BLOCK], tl.float32)
    by_shift = tl.zeros([BLOCK], tl.float32)
    for entry in range(start + part, end, parts):
        if SORTED:
            row = entry.to(tl.int64)
        else:
            row = tl.load(ORDER + entry // PER_ROW) * PER_ROW + entry % PER_ROW
        x = tl.load(X + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        gy = tl.load(GY + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            x = x - tl.load(MEAN + row)
        by_scale += gy * x * tl.load(SCALE + row)
        by_shift += gy
    place = (task * parts + part) * D + columns
    tl.store(OUT + place, by_scale, mask=inside)
    if not RMS:
        tl.store(OUT + tl.num_programs(0) * parts * D + place, by_shift, mask=inside)


def norm_segment_sums(
    gradient: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Gradients of a normalisation's scale and shift by task, `[T, D]` each, in one pass."""
    width = x.shape[-1]
    length = x.numel() // width
    num_tasks = segments.num_tasks
    parts = max(1, 8 * processors_of(x.device) // num_tasks)
    partial = x.new_empty(1 if mean is None else 2, num_tasks, parts, width, dtype=torch.float32)
    _norm_kernel[(num_tasks, parts)](
        gradient.contiguous(),
        x.contiguous(),
        (scale if mean is None else mean).contiguous(),
        scale.contiguous(),
        segments.tasks if segments.order is None else segments.order,
        segments.offsets(length),
        partial,
        length // segments.num_rows,
        width,
        BLOCK=triton.next_power_of_2(width),
        RMS=mean is None,
        SORTED=segments.order is None,
        num_warps=4 if width <= 2048 else 8,
    )
    sums = partial.sum(2)
    return sums[0], sums[-1]


@triton.jit
def _sums_kernel(
    X,
    ORDER,
    ENDS,
    OUT,
    PER_ROW,
    D,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
):
    task, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(2)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    start = tl.load(ENDS + task - 1, mask=task > 0, other=0)
    end = tl.load(ENDS + task)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start + part * ROWS, end, parts * ROWS):
        entry = first + tl.arange(0, ROWS)
        here = entry < end
        if SORTED:
            row = entry.to(tl.int64)
        else:
            row = tl.load(ORDER + entry // PER_ROW, mask=here, other=0) * PER_ROW + entry % PER_ROW
        place = row[:, None] * D + columns[None, :]
        total += tl.load(X + place, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(OUT + (part * tl.num_programs(0) + task) * D + columns, tl.sum(total, 0), mask=inside)


def segment_sums(values: Tensor, segments: Segments) -> Tensor:
    """Sums over the entries of each task, `[N, D]` -> `[T, D]`, in float32."""
    length, width = values.shape
    num_tasks = segments.num_tasks
    block = min(128, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, block)
    wanted = triton.cdiv(16 * processors_of(values.device), num_tasks * blocks)
    parts = min(triton.cdiv(length, 64 * num_tasks), wanted)
    partial = values.new_empty(parts, num_tasks, width, dtype=torch.float32)
    _sums_kernel[(num_tasks, blocks, parts)](
        values.contiguous(),
        segments.tasks if segments.order is None else segments.order,
        segments.offsets(length),
        partial,
        length // segments.num_rows,
        width,
        ROWS=32,
        BLOCK=block,
        SORTED=segments.order is None,
        num_warps=4,
    )
    return partial[0] if parts == 1 else partial.sum(0)

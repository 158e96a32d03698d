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


@lru_cache(maxsize=64)
def _of_group(every: tuple[_Chunks, ...]) -> Tensor:
    """Which chunks belong to which component, `[K, chunks]`."""
    parts = [chunks.of_group for chunks in every]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Launch(NamedTuple):
    """Parameters that one launch takes together: of one dtype, and aligned alike."""

    numbers: Sequence[int]  # which of all parameters they are
    chunks: _Chunks
    where: tuple[Tensor, ...]  # what both kernels are told of their task gradients
    aligned: bool  # 16 bytes can be read at once


class Launched:
    """As `Stacked` in `stacks.py`, in few launches."""

    def __init__(self, blocks: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> None:
        self._num_tasks = blocks[0].shape[-2]
        blocks = [block if block.stride(-1) == 1 else block.contiguous() for block in blocks]
        self._blocks = blocks  # kept, because kernels know nothing but their addresses
        like = {block.dtype: block for block in blocks}
        # Number, component, columns, where gradients begin, and how far tasks lie apart.
        together: dict[tuple[torch.dtype, bool], tuple[list[int], ...]] = {}
        num = 0
        for block in blocks:
            size, stride, first = block.shape[-1], block.stride(-2), block.data_ptr()
            many, apart = (len(block), block.stride(0)) if block.dim() == 3 else (1, 0)
            step = apart * block.itemsize
            aligned = not (first % 16 or step % 16 or stride % 16 or size % 16)
            columns = together.setdefault((block.dtype, aligned), ([], [], [], [], []))
            begin = [first + n * step for n in range(many)]
            own = (range(num, num + many), groups[num : num + many], [size] * many, begin)
            for column, values in zip(columns, (*own, [stride] * many), strict=True):
                column.extend(values)
            num += many
        self._launches: list[_Launch] = []
        for (dtype, aligned), (numbers, members, sizes, *addresses) in together.items():
            device = like[dtype].device
            given = (tuple(sizes), tuple(members), num_groups, device)
            if is_captured(device):
                RECORDED.append(chunks := _Chunks(*given))
            else:
                chunks = _chunks(*given)
            table = [index_on(column, device) for column in addresses]
            where = (like[dtype], *table, chunks.member, chunks.start, chunks.sizes)
            self._launches.append(_Launch(numbers, chunks, where, aligned))

    def grams(self) -> Tensor:
        """Gram matrices by component, `[K, T, T]`: float32 within a chunk, float64 across.

        Float32 gradients are taken as two bfloat16 parts each, for the tensor cores. Products of
        two low parts are left out, some 3e-6 of a squared norm.
        """
        tasks = max(16, triton.next_power_of_2(self._num_tasks))
        every = tuple(launch.chunks for launch in self._launches)
        num = [chunks.num for chunks in every]
        partial = self._blocks[0].new_empty(sum(num), tasks, tasks, dtype=torch.float64)
        for launch, out in zip(self._launches, partial.split(num), strict=True):
            chunks, first = launch.chunks, launch.where[0]
            is_wide = first.dtype == torch.float32
            parts, block, warps, stages = _gram_tile(tasks, is_wide)
            _grams_kernel[(chunks.num,)](
                *launch.where,
                out,
                chunks.columns,
                1.0,
                T=self._num_tasks,
                TASKS=tasks,
                PARTS=parts,
                BLOCK=block,
                IS_WIDE=is_wide,
                ALIGNED=launch.aligned,
                num_warps=warps,
                num_stages=stages,
            )
        is_recorded = is_captured(partial.device)
        of_group = _of_group.__wrapped__(every) if is_recorded else _of_group(every)
        total = of_group @ partial.flatten(1)
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


def _gram_tile(tasks: int, is_wide: bool) -> tuple[int, int, int, int]:
    """Parts of a tile, columns of a part, warps, stages: what was fastest on an H200."""
    if tasks <= 32:  # a part for each warp, which such small matrices would not occupy together
        return 4, 64, 4, 3
    return 1, (8192 if is_wide else 16384) // tasks, 8 if tasks == MOST_TASKS else 4, 3


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
    CHUNK,  # columns of one: differs from launch to launch, and is no reason to compile anew
    ONE,  # 1.0, but unknown to the compiler, which would let the tensor cores add
    T: tl.constexpr,
    TASKS: tl.constexpr,
    PARTS: tl.constexpr,  # of the columns of a tile, whose products are summed up at the end
    BLOCK: tl.constexpr,
    IS_WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    chunk = tl.program_id(0)
    member = tl.load(MEMBER + chunk)
    first = tl.multiple_of(tl.load(START + chunk), 16)
    base, stride, size = _place(LIKE, ADDRESS, STRIDE, SIZE, member, ALIGNED)
    tasks = tl.arange(0, TASKS)
    if PARTS == 1:
        rows = tasks[:, None]
        columns = tl.arange(0, BLOCK)[None, :]
        total = tl.zeros([TASKS, TASKS], tl.float32)
    else:
        rows = tasks[None, :, None]
        columns = tl.arange(0, PARTS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        total = tl.zeros([PARTS, TASKS, TASKS], tl.float32)
    mixed = total
    lines = base + rows.to(tl.int64) * stride
    end = tl.minimum(first + CHUNK, size)
    if ALIGNED:
        end = tl.multiple_of(end, 16)
    for start in range(first, end, PARTS * BLOCK):
        inside = (rows < T) & (start + columns < end)
        tile = tl.load(lines + (start + columns), mask=inside, other=0.0)
        # Tensor cores cut off what an addition loses: tiles are added up here.
        high = tile.to(tl.bfloat16) if IS_WIDE else tile
        turned = tl.trans(high) if PARTS == 1 else tl.permute(high, (0, 2, 1))
        total += tl.dot(high, turned) * ONE
        if IS_WIDE:
            low = (tile - high.to(tl.float32)).to(tl.bfloat16)
            mixed += tl.dot(low, turned) * ONE
    if PARTS > 1:
        total = tl.sum(total, 0)
        mixed = tl.sum(mixed, 0)
    gram = total + mixed + tl.trans(mixed) if IS_WIDE else total
    tl.store(OUT + chunk * TASKS * TASKS + tasks[:, None] * TASKS + tasks[None, :], gram)


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


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it has a unit that copies blocks of tensors, and our kernels were measured on it."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def can_multiply(device: torch.device) -> bool:
    """Whether kernels with products were made for such a GPU: its tensor cores know bfloat16."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


# -- sums over the entries of each task, for shifts, scales and normalisations -----------------


def addresses_of(*parts: Sequence[Tensor]) -> Tensor:
    """Where tensors begin, `[parts * n]`: they are read where they lie, and need not be joined.

    An allocator gives out the same addresses step by step: mostly nothing is moved to the device.
    """
    addresses = [tensor.data_ptr() for part in parts for tensor in part]
    return index_on(addresses, parts[0][0].device)


def are_aligned(*tensors: Tensor) -> bool:
    """Whether 16 bytes can be read at once, which the compiler cannot know of addresses."""
    return not any(tensor.data_ptr() % 16 for tensor in tensors)


@triton.jit
def entry_row(ORDER, entry, here, PER_ROW, SORTED: tl.constexpr):
    """Where entries lie, which are counted task by task."""
    if SORTED:
        return entry.to(tl.int64)
    return tl.load(ORDER + entry // PER_ROW, mask=here, other=0) * PER_ROW + entry % PER_ROW


@triton.jit(do_not_specialize=["NUM", "T"])  # which differ from launch to launch
def _norm_kernel(
    ADDRESS,
    GY_LIKE,
    X_LIKE,
    SCALE_LIKE,
    ORDER,
    ENDS,
    OUT,
    NUM,
    T,
    PER_ROW,
    D,
    BLOCK: tl.constexpr,
    RMS: tl.constexpr,
    SORTED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    number, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    member, task = number // T, number % T
    GY = tl.load(ADDRESS + member).to(GY_LIKE.dtype)
    X = tl.load(ADDRESS + NUM + member).to(X_LIKE.dtype)
    SCALE = tl.load(ADDRESS + 2 * NUM + member).to(SCALE_LIKE.dtype)
    MEAN = tl.load(ADDRESS + 3 * NUM + member).to(SCALE_LIKE.dtype)
    if ALIGNED:
        GY = tl.multiple_of(GY, 16)
        X = tl.multiple_of(X, 16)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    start = tl.load(ENDS + task - 1, mask=task > 0, other=0)
    end = tl.load(ENDS + task)
    by_scale = tl.zeros([BLOCK], tl.float32)
    by_shift = tl.zeros([BLOCK], tl.float32)
    for entry in range(start + part, end, parts):
        row = entry_row(ORDER, entry, True, PER_ROW, SORTED)
        x = tl.load(X + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        gy = tl.load(GY + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            x = x - tl.load(MEAN + row)
        by_scale += gy * x * tl.load(SCALE + row)
        by_shift += gy
    place = (number * parts + part) * D + columns
    tl.store(OUT + place, by_scale, mask=inside)
    if not RMS:
        tl.store(OUT + tl.num_programs(0) * parts * D + place, by_shift, mask=inside)


def norm_segment_sums(
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    means: Sequence[Tensor],
    scales: Sequence[Tensor],
    segments: Segments,
) -> tuple[Tensor, Tensor]:
    """Gradients of the scales and shifts of normalisations by task, `[n, T, D]` each, in one pass.

    Without means they are RMS normalisations.
    """
    given = [[one.contiguous() for one in part] for part in (gradients, inputs, scales, means)]
    gradients, inputs, scales, means = given  # kept: the kernel knows nothing but their addresses
    (x, *_), width, num, num_tasks = inputs, inputs[0].shape[-1], len(inputs), segments.num_tasks
    length = x.numel() // width
    parts = max(1, 8 * processors_of(x.device) // (num * num_tasks))
    num_sums = 2 if means else 1
    partial = x.new_empty(num_sums, num, num_tasks, parts, width, dtype=torch.float32)
    _norm_kernel[(num * num_tasks, parts)](
        addresses_of(gradients, inputs, scales, means or scales),
        gradients[0],
        x,
        scales[0],
        segments.tasks if segments.order is None else segments.order,
        segments.offsets(length),
        partial,
        num,
        num_tasks,
        length // segments.num_rows,
        width,
        BLOCK=triton.next_power_of_2(width),
        RMS=not means,
        SORTED=segments.order is None,
        ALIGNED=are_aligned(*gradients, *inputs),
        num_warps=4 if width <= 2048 else 8,
    )
    sums = partial.sum(3)
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
        row = entry_row(ORDER, entry, here, PER_ROW, SORTED)
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

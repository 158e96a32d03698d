"""Triton kernels: Gram matrix, combination, and sums over the entries of each task.

All are bound by memory: each reads its inputs once. Their references are the torch branches of
`Segments.sum` in `_segments.py` and of `_norm` in `_fast_paths.py`, and `gram_reference`
and `combine_reference` in `_kernels.py`.
"""

# T tasks, P parameters, N entries, D width

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvac.gradients._segments import Segments

MOST_TASKS = 128  # a tile holds all tasks; beyond this the torch form is used
WIDEST = 8192  # a row of a normalisation is held in registers
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _gram_kernel(
    J,
    OUT,
    P,
    T: tl.constexpr,
    TASKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.arange(0, TASKS)
    columns = tl.arange(0, BLOCK)
    base = J + rows[:, None].to(tl.int64) * P
    total = tl.zeros([TASKS, TASKS], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, P, tl.num_programs(0) * BLOCK):
        inside = (rows < T)[:, None] & (start + columns < P)[None, :]
        tile = tl.load(base + (start + columns)[None, :], mask=inside, other=0.0)
        total = tl.dot(tile, tl.trans(tile), total, input_precision=PRECISION)
    place = tl.program_id(0) * TASKS * TASKS + rows[:, None] * TASKS + rows[None, :]
    tl.store(OUT + place, total)


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows of `[T, P]`: float32 within a program, float64 across."""
    num_tasks, size = gradients.shape
    gradients = gradients.contiguous()
    tasks = max(16, triton.next_power_of_2(num_tasks))
    block = max(32, 8192 // tasks)
    programs = min(triton.cdiv(size, block), _PROGRAMS_PER_PROCESSOR * _processors(gradients))
    partial = gradients.new_empty(programs, tasks, tasks, dtype=torch.float32)
    _gram_kernel[(programs,)](
        gradients,
        partial,
        size,
        T=num_tasks,
        TASKS=tasks,
        BLOCK=block,
        PRECISION="ieee",
        num_warps=4,
        num_stages=4,
    )
    return partial.sum(0, dtype=torch.float64)[:num_tasks, :num_tasks]


@triton.jit
def _combine_kernel(J, W, OUT, P, T: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < P
    kind = tl.float64 if WIDE else tl.float32
    total = tl.zeros([BLOCK], kind)
    for task in range(T):
        row = tl.load(J + task * tl.cast(P, tl.int64) + place, mask=inside, other=0.0)
        total += tl.load(W + task).to(kind) * row.to(kind)
    tl.store(OUT + place, total, mask=inside)


def combine(weights: Tensor, gradients: Tensor) -> Tensor:
    """sum_t weights[t] gradients[t] for `[T, P]`, in float32 or better."""
    num_tasks, size = gradients.shape
    gradients = gradients.contiguous()
    out = gradients.new_empty(size, dtype=torch.promote_types(gradients.dtype, torch.float32))
    _combine_kernel[(triton.cdiv(size, 2048),)](
        gradients,
        weights.contiguous(),
        out,
        size,
        T=num_tasks,
        BLOCK=2048,
        WIDE=out.dtype == torch.float64,
        num_warps=8,
    )
    return out


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


def norm_sums(
    gradient: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Gradients of a normalisation's scale and shift by task, `[T, D]` each, in one pass."""
    width = x.shape[-1]
    length = x.numel() // width
    num_tasks = segments.num_tasks
    parts = max(1, 8 * _processors(x) // num_tasks)
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


SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # what `segment_sums` takes


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
    parts = min(
        triton.cdiv(length, 64 * num_tasks),
        triton.cdiv(4 * _processors(values), num_tasks * blocks),
    )
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


def _processors(tensor: Tensor) -> int:
    return _processors_of(tensor.device)


@cache
def _processors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

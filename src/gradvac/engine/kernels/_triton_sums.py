"""Triton kernels: sums over the entries of each task, for shifts, scales and normalisations.

Bound by memory: each reads its inputs once. Their references are the torch branches of
`Segments.sum` in `_segments.py` and of `norm_sums` in `_kernels.py`.
"""

# T tasks, N entries, D width

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvac.engine.kernels._segments import Segments
from gradvac.engine.kernels._triton_stacks import processors_of

WIDEST = 8192  # a row of a normalisation is held in registers
SUMMED = (torch.bfloat16, torch.float16, torch.float32)  # what `segment_sums` takes


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

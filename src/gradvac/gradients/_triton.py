"""Triton kernels: Gram matrix, combination, and normalisation layers by task.

All three are bound by memory: each reads its inputs once. Their references are `gram_reference`
and `combine_reference` in `_kernels.py`, and the torch branch of `NormTasks` in `_layers.py`.
"""

# T tasks, P parameters, N entries, D width

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvac.gradients._rows import Segments

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
    WEIGHT,
    ORDER,
    ENDS,
    GX,
    DW,
    DB,
    PER_ROW,
    D,
    BLOCK: tl.constexpr,
    RMS: tl.constexpr,
    SORTED: tl.constexpr,
):
    task, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = tl.load(WEIGHT + columns, mask=inside, other=0.0).to(tl.float32)
    start = tl.load(ENDS + task - 1, mask=task > 0, other=0)
    end = tl.load(ENDS + task)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for entry in range(start + part, end, parts):
        if SORTED:
            row = entry.to(tl.int64)
        else:
            row = tl.load(ORDER + entry // PER_ROW) * PER_ROW + entry % PER_ROW
        x = tl.load(X + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        gy = tl.load(GY + row * D + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + row)
        normal = x * scale
        if not RMS:
            normal = tl.where(inside, (x - tl.load(MEAN + row)) * scale, 0.0)
        inner = gy * weight
        gx = inner - normal * (tl.sum(inner * normal) / D)
        if not RMS:
            gx -= tl.sum(inner) / D
        tl.store(GX + row * D + columns, gx * scale, mask=inside)
        dw += gy * normal
        db += gy
    place = (task * parts + part) * D + columns
    tl.store(DW + place, dw, mask=inside)
    if not RMS:
        tl.store(DB + place, db, mask=inside)


def norm_backward(
    gy: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    segments: Segments,
    is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Input gradient `[N, D]`, and gradients of scale and shift by task `[T, D]`.

    One pass over the rows, where torch takes one for the input and one for the parameters.
    """
    length, width = x.shape
    num_tasks = segments.num_tasks
    parts = max(1, 8 * _processors(x) // num_tasks)
    gx = torch.empty_like(x)
    partial = x.new_empty(1 if is_rms else 2, num_tasks, parts, width, dtype=torch.float32)
    order = segments.tasks if segments.order is None else segments.order
    _norm_kernel[(num_tasks, parts)](
        gy.contiguous(),
        x.contiguous(),
        mean.contiguous(),
        scale.contiguous(),
        weight,
        order,
        segments.offsets(length),
        gx,
        partial[0],
        partial[-1],
        length // segments.num_rows,
        width,
        BLOCK=triton.next_power_of_2(width),
        RMS=is_rms,
        SORTED=segments.order is None,
        num_warps=4 if width <= 2048 else 8,
    )
    by_task = partial.sum(2)
    return gx, by_task[0], by_task[-1]


def _processors(tensor: Tensor) -> int:
    return _processors_of(tensor.device)


@cache
def _processors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

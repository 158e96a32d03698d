"""Products of inputs and output gradients by task, for linear layers, on CUDA.

Their reference is the torch branch of `outer_products` in `segments.py`.
"""

# N entries, T tasks, O outputs, I inputs, n layers that are alike

import math
from collections.abc import Collection, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gradvac.engine.kernels.segments import Segments
from gradvac.engine.kernels.triton_kernels import (
    addresses_of,
    are_aligned,
    can_multiply,
    entry_row,
    is_hopper,
    processors_of,
)
from gradvac.utils.devices import index_on

__all__ = ["can_copy_rows", "can_multiply", "products"]

_TILES = {2: (128, 64, 8), 4: (64, 16, 4)}  # bytes of a number: sides and entries of a tile, warps
_ROW_TILE = (128, 256, 64)  # outputs, inputs, entries: what was fastest on an H200


@triton.jit(do_not_specialize=["NUM", "T"])
def _products_kernel(
    ADDRESS,
    LIKE,
    ORDER,
    ENDS,
    OUT,
    SHIFTS,
    NUM,
    T,
    PER_ROW,
    OUTPUTS,
    INPUTS,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    SORTED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    tiles = tl.cdiv(OUTPUTS, BLOCK_O) * tl.cdiv(INPUTS, BLOCK_I)
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile_o, tile_i = tile // tl.cdiv(INPUTS, BLOCK_I), tile % tl.cdiv(INPUTS, BLOCK_I)
    member, task = number // T, number % T
    LEFT = tl.load(ADDRESS + member).to(LIKE.dtype)
    RIGHT = tl.load(ADDRESS + NUM + member).to(LIKE.dtype)
    if ALIGNED:
        LEFT = tl.multiple_of(LEFT, 16)
        RIGHT = tl.multiple_of(RIGHT, 16)
    start = tl.load(ENDS + task - 1, mask=task > 0, other=0)
    end = tl.load(ENDS + task)
    outputs = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    inputs = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        here = entry < end
        row = entry_row(ORDER, entry, here, PER_ROW, SORTED)[:, None]
        left = tl.load(
            LEFT + row * OUTPUTS + outputs[None, :],
            mask=here[:, None] & (outputs < OUTPUTS)[None, :],
            other=0.0,
        )
        right = tl.load(
            RIGHT + row * INPUTS + inputs[None, :],
            mask=here[:, None] & (inputs < INPUTS)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    place = (number.to(tl.int64) * OUTPUTS + outputs[:, None]) * INPUTS + inputs[None, :]
    inside = (outputs < OUTPUTS)[:, None] & (inputs < INPUTS)[None, :]
    tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=inside)
    if SHIFT:  # sums of the left ones, or of the right ones, by the programs of one edge
        IS_LEFT: tl.constexpr = SHIFT == 1
        if (tile_i if IS_LEFT else tile_o) == 0:
            COLUMNS: tl.constexpr = BLOCK_O if IS_LEFT else BLOCK_I
            width = OUTPUTS if IS_LEFT else INPUTS
            columns = outputs if IS_LEFT else inputs
            values = LEFT if IS_LEFT else RIGHT
            sums = tl.zeros([BLOCK, COLUMNS], tl.float32)
            for first in range(start, end, BLOCK):
                entry = first + tl.arange(0, BLOCK)
                here = entry < end
                row = entry_row(ORDER, entry, here, PER_ROW, SORTED)[:, None]
                shown = here[:, None] & (columns < width)[None, :]
                read = tl.load(values + row * width + columns[None, :], mask=shown, other=0.0)
                sums += read.to(tl.float32)
            tl.store(SHIFTS + number * width + columns, tl.sum(sums, 0), mask=columns < width)


@triton.jit(do_not_specialize=["NUM", "T", "PARTS", "OUTPUTS", "INPUTS"])
def _rows_kernel(
    LEFT,
    RIGHT,
    OUT,
    PLACES,
    ORDER,
    ENDS,
    SHIFTS,
    NUM,
    T,
    PARTS,  # of a row
    OUTPUTS,
    INPUTS,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    SORTED: tl.constexpr,
):
    tiles_o, tiles_i = tl.cdiv(OUTPUTS, BLOCK_O), tl.cdiv(INPUTS, BLOCK_I)
    tiles = tiles_o * tiles_i
    for program in range(tl.program_id(0), NUM * T * tiles, tl.num_programs(0)):
        number, tile = program // tiles, program % tiles
        # Eight tiles below each other share what they read with those at their side.
        above = tile // (8 * tiles_i) * 8
        height = min(tiles_o - above, 8)
        tile_o, tile_i = above + tile % (8 * tiles_i) % height, tile % (8 * tiles_i) // height
        outputs, inputs = tile_o * BLOCK_O, tile_i * BLOCK_I
        member, task = number // T, number % T
        left_place = tl.load(PLACES + member).to(tl.int32)
        right_place = tl.load(PLACES + NUM + member).to(tl.int32)
        start = tl.load(ENDS + task - 1, mask=task > 0, other=0) * PARTS
        end = tl.load(ENDS + task) * PARTS
        total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        for part in range(start, end):
            row, entry = _row_of(ORDER, part, PARTS, SORTED), part % PARTS * BLOCK
            left = LEFT.load([left_place, row, entry, outputs]).reshape(BLOCK, BLOCK_O)
            right = RIGHT.load([right_place, row, entry, inputs]).reshape(BLOCK, BLOCK_I)
            total = tl.dot(left.T, right, total)
        made = total.to(OUT.dtype).reshape(1, BLOCK_O, BLOCK_I)
        OUT.store([number, outputs, inputs], made)
        if SHIFT:  # every tile of a line, or column, sums up a share of what it read
            IS_LEFT: tl.constexpr = SHIFT == 1
            COLUMNS: tl.constexpr = BLOCK_O if IS_LEFT else BLOCK_I
            share, shares = (tile_i, tiles_i) if IS_LEFT else (tile_o, tiles_o)
            first, width = (outputs, OUTPUTS) if IS_LEFT else (inputs, INPUTS)
            sums = tl.zeros([BLOCK, COLUMNS], tl.float32)
            for part in tl.range(start + share, end, shares, num_stages=3):
                row, entry = _row_of(ORDER, part, PARTS, SORTED), part % PARTS * BLOCK
                if IS_LEFT:
                    values = LEFT.load([left_place, row, entry, first])
                else:
                    values = RIGHT.load([right_place, row, entry, first])
                sums += values.reshape(BLOCK, COLUMNS).to(tl.float32)
            columns = first + tl.arange(0, COLUMNS)
            place = (number * shares + share) * width + columns
            tl.store(SHIFTS + place, tl.sum(sums, 0), mask=columns < width)


@triton.jit
def _row_of(ORDER, part, PARTS, SORTED: tl.constexpr):
    if SORTED:
        return part // PARTS
    return tl.load(ORDER + part // PARTS).to(tl.int32)


def can_copy_rows(per_row: int, outputs: int, inputs: int, device: torch.device) -> bool:
    """Whether blocks of rows can be copied by the unit of Hopper GPUs that does, mostly full."""
    if outputs % 8 or inputs % 8 or not is_hopper(device):
        return False
    block = _ROW_TILE[-1]
    return 8 * per_row >= 7 * triton.cdiv(per_row, block) * block


def products(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], segments: Segments, sums_of: int
) -> tuple[Tensor, Tensor | None]:
    """left[entries of t]^T right[entries of t] for every pair and task, `[n, T, O, I]`.

    And, in float32, the sums of the left (`sums_of` 1) or right ones (2) over the same entries,
    `[n, T, O]` or `[n, T, I]`; neither: 0.
    """
    length, num_outputs = lefts[0].shape
    num_inputs, num, num_tasks = rights[0].shape[1], len(lefts), segments.num_tasks
    per_row, device = length // segments.num_rows, lefts[0].device
    out = lefts[0].new_empty(num, num_tasks, num_outputs, num_inputs)
    width = num_outputs if sums_of == 1 else num_inputs
    order = segments.tasks if segments.order is None else segments.order
    sizes = (num, num_tasks)
    if out.element_size() == 2 and can_copy_rows(per_row, num_outputs, num_inputs, device):
        left, right = (_Rows(parts, segments.num_rows) for parts in (lefts, rights))
        if left.are_near and right.are_near:
            side_o, side_i, entries = _ROW_TILE
            tiles_o, tiles_i = triton.cdiv(num_outputs, side_o), triton.cdiv(num_inputs, side_i)
            shares = tiles_i if sums_of == 1 else tiles_o
            sums = out.new_empty(*sizes, shares, width, dtype=torch.float32) if sums_of else None
            _rows_kernel[(min(num * num_tasks * tiles_o * tiles_i, processors_of(device)),)](
                left.descriptor(entries, side_o),
                right.descriptor(entries, side_i),
                TensorDescriptor.from_tensor(out.flatten(0, 1), [1, side_o, side_i]),
                index_on(left.places + right.places, device),
                order,
                segments.offsets(segments.num_rows),
                out if sums is None else sums,
                *sizes,
                triton.cdiv(per_row, entries),
                num_outputs,
                num_inputs,
                BLOCK_O=side_o,
                BLOCK_I=side_i,
                BLOCK=entries,
                SHIFT=sums_of,
                SORTED=segments.order is None,
                num_warps=8,
                num_stages=3 if segments.order is None else 5,  # the order is read in stages too
            )
            return out, None if sums is None else sums.sum(2)
    lefts, rights = [[one.contiguous() for one in part] for part in (lefts, rights)]
    sums = out.new_empty(*sizes, width, dtype=torch.float32) if sums_of else None
    side, entries, warps = _TILES[out.element_size()]
    tiles = triton.cdiv(num_outputs, side) * triton.cdiv(num_inputs, side)
    _products_kernel[(num * num_tasks * tiles,)](
        addresses_of(lefts, rights),
        lefts[0],
        order,
        segments.offsets(length),
        out,
        out if sums is None else sums,
        *sizes,
        per_row,
        num_outputs,
        num_inputs,
        BLOCK_O=side,
        BLOCK_I=side,
        BLOCK=entries,
        SHIFT=sums_of,
        SORTED=segments.order is None,
        ALIGNED=are_aligned(*lefts, *rights),
        num_warps=warps,
        num_stages=3,
    )
    return out, sums


class _Rows:
    """Matrices `[N, D]` of one shape as one tensor `[places, B, N / B, D]`, wherever they lie.

    The outermost stride is the largest that leads from one to any other; what is between them is
    never read.
    """

    def __init__(self, parts: Sequence[Tensor], num_rows: int) -> None:
        addresses, strides = [one.data_ptr() for one in parts], {one.stride() for one in parts}
        if not _are_copyable(addresses, strides):
            parts = [one.clone(memory_format=torch.contiguous_format) for one in parts]
            addresses = [one.data_ptr() for one in parts]
        lowest = min(addresses)
        self._first = parts[addresses.index(lowest)]
        self._parts, self._num_rows = parts, num_rows  # kept until the kernel was launched
        distances = [address - lowest for address in addresses]
        self._unit = math.gcd(*distances) or 16
        self.places = [distance // self._unit for distance in distances]

    @property
    def are_near(self) -> bool:
        """Whether their places can be told in 31 bits, which only slices of some may not be."""
        return max(self.places) < 1 << 31

    def descriptor(self, entries: int, columns: int) -> TensorDescriptor:
        """For blocks of so many entries of a row, and columns."""
        first, stride = self._first, self._first.stride(0)
        per_row = len(first) // self._num_rows
        shape = [max(self.places) + 1, self._num_rows, per_row, first.shape[1]]
        strides = [self._unit // first.element_size(), per_row * stride, stride, 1]
        return TensorDescriptor(first, shape, strides, [1, 1, entries, columns])


def _are_copyable(addresses: Sequence[int], strides: Collection[tuple[int, ...]]) -> bool:
    """Whether rows begin at whole 16 bytes, as far apart in one matrix as in another."""
    (apart, step), *others = strides
    return step == 1 and not others and not (apart % 8 or any(a % 16 for a in addresses))

"""Kernels: what is computed of tensors alone; nothing here knows of autograd, models or losses.

_kernels.py        Gram matrices, combinations and grouped products of stacked task gradients
_segments.py       entries by task: bring together, sum, mask
_marks.py          a few numbers per vector, by which gradients are compared
_triton_stacks.py  Gram matrices and combinations on CUDA
_triton_sums.py    sums by task on CUDA
"""

from gradvac.engine.kernels._kernels import (
    combine,
    gram,
    grouped_outer,
    norm_sums,
    stacked,
    wide,
)
from gradvac.engine.kernels._marks import mark, negligible, repeatable, tolerance
from gradvac.engine.kernels._segments import Owned, Segments, joined

__all__ = [
    "Owned",
    "Segments",
    "combine",
    "gram",
    "grouped_outer",
    "joined",
    "mark",
    "negligible",
    "norm_sums",
    "repeatable",
    "stacked",
    "tolerance",
    "wide",
]

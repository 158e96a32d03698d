"""Kernels: what is computed of tensors alone; nothing here knows of autograd, models or losses.

stacks.py          Gram matrices and combinations of stacked task gradients
segments.py        entries by task: bring together, sum, multiply, mask
sketches.py        random projections, by which gradients are compared
triton_kernels.py  the same on CUDA
product_kernels.py products by task on CUDA
lookup_kernels.py  lookups by token and task on CUDA
"""

from gradvac.engine.kernels.segments import (
    Owned,
    Segments,
    are_norms_in_place,
    are_products_in_place,
    by_expert,
    grouped_outer,
    joined,
    norm_sums,
    outer_products,
)
from gradvac.engine.kernels.sketches import negligible, repeatable, sketch, tolerance
from gradvac.engine.kernels.stacks import combine, gram, inner_products, stacked, wide

__all__ = [
    "Owned",
    "Segments",
    "are_norms_in_place",
    "are_products_in_place",
    "by_expert",
    "combine",
    "gram",
    "grouped_outer",
    "inner_products",
    "joined",
    "negligible",
    "norm_sums",
    "outer_products",
    "repeatable",
    "sketch",
    "stacked",
    "tolerance",
    "wide",
]

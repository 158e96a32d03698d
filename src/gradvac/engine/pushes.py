"""Pushing T gradients at a time through operations on parameters alone, without T calls.

Task gradients are `[T, ...]`, where an operation knows `...`: what regroups, permutes, cuts or
joins entries does so behind the first dimension, and what works on single entries, or multiplies
matrices, broadcasts over it.
"""

# T tasks

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac.engine.graph import Graph, aside, call_node, saved
from gradvac.engine.junctions import permutation
from gradvac.engine.layouts import VIEWS, kinds, saved_dims

# So are their backwards; where a result shows that one is not, the node is called by task.
ENTRYWISE = kinds(
    """
    Abs Clamp ClampMax ClampMin Cos Div Elu Erf Exp Exp2 Expm1 LeakyRelu Log Log1P Log2
    MaskedFill Maximum Minimum Mul Neg Pow Reciprocal Relu Rsqrt Rsub Sigmoid Silu Sin Softplus
    Sqrt Sub Tanh Tril Triu
    """
)


def push_at_once(
    graph: Graph, position: int, edges: Sequence[int], gradients: Tensor
) -> dict[int, Tensor] | None:
    """The task gradients of a node's inputs (edges) from those of its output, `[T, ...]`.

    None where the node must be called once per task.
    """
    kind, num_tasks = graph.kind(position), len(gradients)
    if not callable(graph.nodes[position]):  # a Python function, which may have any name
        return None
    if kind in VIEWS or kind == "Unsqueeze":
        return {0: gradients.reshape(num_tasks, *graph.shape(*graph.children(position)[0]))}
    if (dims := permutation(graph, position)) is not None:
        inverse = sorted(range(len(dims)), key=dims.__getitem__)
        return {0: gradients.permute(0, *(1 + dim for dim in inverse))}
    described = graph.described(position)[0]
    gradients = gradients.to(described.dtype)
    # A part of what is complex may be real, and is called by task to be taken so.
    if kind in _BY_SHAPE and not described.dtype.is_complex:
        shapes = [None if c < 0 else graph.shape(c, n) for c, n in graph.children(position)]
        return _BY_SHAPE[kind](graph.nodes[position], edges, gradients, shapes)
    if kind in ("Add", "Expand"):
        factor = getattr(graph.nodes[position], "_saved_alpha", 1) if kind == "Add" else 1
        values = {edge: gradients * factor if edge and factor != 1 else gradients for edge in edges}
    elif kind == "Where":  # the mask of every layer: a call, on another thread, takes much longer
        chosen, nothing = saved(graph.nodes[position], "condition"), gradients.new_zeros(())
        pairs = ((gradients, nothing), (nothing, gradients))
        values = {edge: torch.where(chosen, *pairs[edge]) for edge in edges}
    elif kind in ENTRYWISE and not described.dtype.is_complex:
        returned = aside(lambda: call_node(graph.nodes[position], [gradients]), gradients)
        found = {edge: returned[edge] for edge in edges}
        values = {edge: value for edge, value in found.items() if value is not None}
    else:
        return None
    pushed: dict[int, Tensor] = {}
    for edge, value in values.items():
        if value.shape != gradients.shape or value.is_complex():
            return None
        shape = graph.shape(*graph.children(position)[edge])
        broadcast = (1,) * (value.dim() - 1 - len(shape))
        value = value.sum_to_size(num_tasks, *broadcast, *shape).view(num_tasks, *shape)
        # What two inputs share is added to in place.
        pushed[edge] = value.clone() if pushed else value
    return pushed


Shapes = Sequence[tuple[int, ...] | None]
"""Of a node's inputs; None: of one without a gradient."""
Pushed = dict[int, Tensor] | None


def _uncut(node: Any, _: Sequence[int], gradients: Tensor, shapes: Shapes) -> Pushed:
    (shape,), (dim,) = shapes, saved_dims(node, "dim")
    assert shape is not None
    start, end = (saved_dims(node, name) for name in ("start", "end"))
    sizes, cut = (len(gradients), *shape), (*(start or [0]), *(end or [sys.maxsize]))
    dim = dim % len(shape) + 1
    return {0: torch.ops.aten.slice_backward(gradients, sizes, dim, *cut, node._saved_step)}


def _unjoined(node: Any, edges: Sequence[int], gradients: Tensor, shapes: Shapes) -> Pushed:
    dim = saved_dims(node, "dim")[0] % (gradients.dim() - 1)
    alike = [shape for shape in shapes if shape is not None and len(shape) == gradients.dim() - 1]
    sizes = [shape[dim] for shape in alike]
    if len(sizes) < len(shapes) or sum(sizes) != gradients.shape[dim + 1]:
        return None  # one has no gradient, or nothing in it
    parts = gradients.split(sizes, dim + 1)
    return {edge: parts[edge] for edge in edges}


def _of_product(node: Any, edges: Sequence[int], gradients: Tensor, shapes: Shapes) -> Pushed:
    left, right, num_tasks = len(shapes) - 2, len(shapes) - 1, len(gradients)
    names = {left: "mat1" if left else "self", right: "mat2"}
    if left and not node._saved_alpha == node._saved_beta == 1:
        return None
    pushed = {}
    for edge in edges:
        shape = shapes[edge]
        assert shape is not None
        if edge in names:
            factor = saved(node, names[left + right - edge])
            if factor.layout != torch.strided:  # as of a graph's neighbours
                return None
            value = gradients @ factor.t() if edge == left else factor.t() @ gradients
        else:  # a shift, which may be broadcast
            value = gradients.sum_to_size(num_tasks, *(1,) * (2 - len(shape)), *shape)
        pushed[edge] = value.reshape(num_tasks, *shape)
    return pushed


_BY_SHAPE: dict[str, Callable[[Any, Sequence[int], Tensor, Shapes], Pushed]] = {
    "Slice": _uncut,
    "Cat": _unjoined,
    "Mm": _of_product,
    "Addmm": _of_product,
}

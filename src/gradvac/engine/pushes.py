"""Pushing T gradients at a time through operations on parameters alone, without T calls.

Task gradients are `[T, ...]`, where an operation knows `...`: what regroups or permutes entries
does so behind the first dimension, and what works on single entries broadcasts over it.
"""

# T tasks

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac.engine.graph import Graph, aside, call_node, saved
from gradvac.engine.junctions import permutation
from gradvac.engine.layouts import VIEWS, kinds

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

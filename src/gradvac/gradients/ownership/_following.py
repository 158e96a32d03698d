"""Where rows lie, followed from the losses down, operation by operation.

Row r of the batch owns entry r of the losses. Where its entries are in what an operation was made
of follows from what the operation does, whatever the data: along a dimension that it leaves alone
(`_movers.py`). Behind an operation that may move rows, nothing is known.
"""

# B rows

from collections.abc import Iterable, Mapping, Sequence

from gradvac.gradients.graph import LEAF, Graph
from gradvac.gradients.ownership._layouts import Layout, layouts
from gradvac.gradients.ownership._movers import (
    ENTRYWISE,
    HOOKS,
    PRODUCTS,
    VIEWS,
    moves_along,
    told_dims,
)

Followed = list[dict[int, Layout | None]]
"""Position -> output -> where rows lie; None: they may move."""

# Rows lie along a dimension of the same number, though other dimensions come or go.
_SAME_NUMBER = frozenset(
    (
        *("NllLoss", "MultiMarginLoss", "MultilabelMarginLoss", "ViewAsComplex", "ViewAsReal"),
        *("Unfold", "Index", "UnsafeIndex"),
    )
)


def follow(
    graph: Graph,
    holds_rows: Sequence[bool],
    starts: Iterable[tuple[tuple[int, int], Layout]],
    num_rows: int,
) -> Followed:
    """Find where rows lie in every output whose gradient depends on that of the starts.

    Args:
        graph: The graph.
        holds_rows: Which nodes hold rows.
        starts: Where they lie in some outputs (position, number).
        num_rows: B.
    """
    at: Followed = [{} for _ in graph.nodes]
    for output, layout in starts:
        _put(at, output, layout)
    for position in range(len(at) - 1, -1, -1):
        if at[position] and graph.names[position] != LEAF:
            children = graph.children(position)
            edges = [e for e, (child, _) in enumerate(children) if child >= 0 and holds_rows[child]]
            if edges:
                for edge, below in _through(graph, position, at[position], edges, num_rows):
                    if edge in edges:
                        _put(at, children[edge], below)
    return at


def _put(at: Followed, output: tuple[int, int], layout: Layout | None) -> None:
    """Keep what is known of an output: None unless it is the same by every way."""
    position, number = output
    if at[position].setdefault(number, layout) != layout:
        at[position][number] = None


def _through(
    graph: Graph,
    position: int,
    above: Mapping[int, Layout | None],
    edges: Sequence[int],
    num_rows: int,
) -> Iterable[tuple[int, Layout | None]]:
    """From where rows lie in a node's outputs to where they lie in its inputs (edges)."""
    if graph.names[position] in HOOKS:
        return above.items()
    unknown = [(edge, None) for edge in edges]
    known = {number: layout for number, layout in above.items() if layout is not None}
    if len(known) < len(above):
        return unknown
    if (run := graph.run(position)) is not None:
        children = graph.children(position)
        shapes = [graph.shape(*child) if child[0] >= 0 else None for child in children]
        inside: Mapping[int, Layout | None] | None = run.follow(known, num_rows, shapes)
        return unknown if inside is None else inside.items()
    dims, below = moves_along(graph, position, edges), []
    for number, layout in known.items():
        size = len(graph.shape(position, number))
        if dims and layout.dim in {d % size for d in dims if d < size}:
            return unknown
        below += [(e, _below(graph, position, number, e, layout, num_rows)) for e in edges]
    return below


def _below(
    graph: Graph, position: int, number: int, edge: int, above: Layout, num_rows: int
) -> Layout | None:
    """Where rows lie in an input of a node that leaves them alone; None if it is not known."""
    node, kind = graph.nodes[position], graph.kind(position)
    shape, inside = graph.shape(position, number), graph.shape(*graph.children(position)[edge])
    dim, num_more = above.dim, len(inside) - len(shape)
    if kind in ENTRYWISE and inside == shape:
        return above
    if kind in VIEWS or kind == "Unsqueeze":  # as far apart in memory
        stride = above.stride(shape, num_rows)
        every = layouts(inside, num_rows)
        return next((one for one in every if one.stride(inside, num_rows) == stride), None)
    if kind == "Permute":
        dim = told_dims(node, "dims")[dim] % len(shape)
    elif kind in ("T", "Transpose"):
        pair = told_dims(node, "dim0", "dim1") if kind == "Transpose" else [0, 1]
        one, other = (d % len(shape) for d in pair)
        dim = {one: other, other: one}.get(dim, dim)
    elif kind in ENTRYWISE or kind in PRODUCTS:
        dim += num_more  # what is broadcast is aligned at its end
    elif kind in ("CtcLoss", "CudnnCtcLoss"):  # [time, rows, classes]
        dim += 1
    elif kind == "NllLoss2D":
        dim += dim > 0
    elif kind == "Stack":
        dim -= dim > told_dims(node, "dim")[0] % len(shape)
    elif num_more > 0 and hasattr(node, "_saved_dim"):  # that are gone
        for gone in sorted(d % len(inside) for d in told_dims(node, "dim")):
            dim += dim >= gone
    elif num_more and kind not in _SAME_NUMBER:
        return None
    same = 0 <= dim < len(inside) and inside[dim] == shape[above.dim]
    return Layout(dim, above.tiled) if same else None


def follow_losses(graph: Graph, holds_rows: Sequence[bool], num_rows: int) -> Followed:
    """Find where the rows of losses `[B]` lie."""
    start = (graph.root_positions[0], graph.roots[0].output_nr)
    return follow(graph, holds_rows, [(start, Layout(0))], num_rows)

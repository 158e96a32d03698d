"""Junctions: the nodes where something made of parameters alone meets the rows of the batch.

Where they are found decides speed, never exactness. A junction found too late pushes T gradients
through the rest, which is slower. One found too early holds entries that several rows share (a
table of positions looked up once for all rows); a probe shows that, and it is moved up to its
consumers.
"""

# B rows

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from gradvac.engine.graph import ANCHOR, COMPILED, LEAF, Graph, is_python_function, may_write
from gradvac.engine.layouts import saved_dims

_PRODUCTS = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Dot", "Convolution")
)
_LOOKUPS = frozenset(
    f"{name}Backward0"
    for name in ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take")
)


@dataclass
class Junction:
    """A node whose output gradient is separated by task.

    Attributes:
        position: Of the node in the graph.
        edges: The inputs that are made of parameters alone; a product comes before its shift.
        paths: Down from each of them.
        parameters: What these inputs are made of.
        through: Positions of the nodes between them and the parameters, parents first.
        ends: Nothing below the node needs it to run.
        assumed: All its inputs are made of parameters; that it holds rows is an assumption.
        by_column: Every column of its output is made by itself, as with a weight on the left.
    """

    position: int
    edges: tuple[int, ...]
    paths: "tuple[ParameterPath, ...]"
    parameters: frozenset[nn.Parameter]
    through: tuple[int, ...]
    ends: bool
    assumed: bool
    by_column: bool

    def vectors(self, gradient: Tensor) -> Tensor:
        """An output's gradient, each of whose vectors of the last dimension one row made."""
        is_turned = self.by_column and gradient.shape[:-2].numel() == 1
        return gradient.mT if is_turned else gradient


@dataclass
class Partition:
    """A graph with its junctions.

    Attributes:
        junctions: In the order of the graph.
        outside: Positions of leaves that are not the model's.
        row_nodes: Positions of the nodes that a backward to the junctions runs through.
        holds_rows: For every node, whether it is not made of parameters alone.
        holds_no_rows: The roots are made of parameters alone.
        has_taps: Compiled regions left some parameters outside.
        paths: Down from every input of the nodes between junctions and parameters.
        num_above: How many junctions such a node gets something from.
        functions: Numbers of the junctions that are Python functions on the way.
        writers: Positions of functions among `row_nodes` that may write over what they get.
    """

    junctions: list[Junction] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    row_nodes: list[int] = field(default_factory=list)
    holds_rows: Sequence[bool] = ()
    holds_no_rows: bool = False
    has_taps: bool = False
    paths: "dict[int, list[ParameterPath]]" = field(default_factory=dict)
    num_above: Counter[int] = field(default_factory=Counter)
    functions: set[int] = field(default_factory=set)
    writers: list[int] = field(default_factory=list)

    def leaves_outside(self, graph: Graph) -> list[Tensor]:
        """The leaves that get their joint gradient."""
        return [graph.nodes[position].variable for position in self.outside]


def find_junctions(
    graph: Graph,
    tracked: Collection[nn.Parameter],
    num_rows: Callable[[int], int | None],
    rowless: Collection[int],
) -> Partition:
    """Find the junctions.

    Args:
        graph: The graph.
        tracked: The model's parameters.
        num_rows: How many rows there are where a node (position) works; None if unknown.
        rowless: Positions that were assumed to hold rows and do not.
    """
    partition = Partition()
    made_of: list[frozenset[nn.Parameter] | None] = []  # parameters alone, or None: rows
    below = [False] * len(graph.nodes)  # whether the backward has something to do below
    roots = set(graph.root_positions)
    nothing: frozenset[nn.Parameter] = frozenset()
    for position, name in enumerate(graph.names):
        children = graph.children(position)
        if name == LEAF and position not in roots:
            variable = graph.nodes[position].variable
            if variable is ANCHOR:
                made_of.append(nothing)
                partition.has_taps = below[position] = True
                continue
            is_ours = variable in tracked
            made_of.append(frozenset([variable]) if is_ours else None)
            if not is_ours:
                partition.outside.append(position)
                below[position] = True
            continue
        inner = [child for child, _ in children if child >= 0]
        deeper = any(below[child] for child in inner)
        edges: tuple[int, ...] = ()
        parameters, alone = nothing, False
        if any(made_of[child] for child in inner):
            edges = tuple([e for e, (c, _) in enumerate(children) if c >= 0 and made_of[c]])
            parameters = nothing.union(*(made_of[children[e][0]] or () for e in edges))
            alone = all(made_of[child] is not None for child in inner)
        partition.holds_no_rows |= alone and position in roots
        if alone and position not in roots:
            rows = num_rows(position)
            if position in rowless or not _may_hold_rows(graph, position, rows):
                made_of.append(parameters)
                below[position] = deeper  # a tap's anchor: a pass to it runs whatever is above
                continue
        made_of.append(None)
        partition.row_nodes.append(position)
        is_function = is_python_function(graph.nodes[position]) and not graph.is_tap(position)
        if may_write(graph.nodes[position]) and name != COMPILED and not graph.is_tap(position):
            partition.writers.append(position)
        below[position] = deeper or bool(edges)
        if edges:
            if deeper and is_function:
                partition.functions.add(len(partition.junctions))
            assumed = alone and position not in roots
            partition.junctions.append(
                _junction(graph, position, edges, parameters, ends=not deeper, assumed=assumed)
            )
    partition.holds_rows = [parameters is None for parameters in made_of]
    partition.num_above = Counter(p for j in partition.junctions for p in j.through)
    for position in partition.num_above:
        children = graph.children(position)
        partition.paths[position] = [
            parameter_path(graph, *child) if child[0] >= 0 else NO_PATH for child in children
        ]
    return partition


def _junction(
    graph: Graph,
    position: int,
    edges: Sequence[int],
    parameters: frozenset[nn.Parameter],
    *,
    ends: bool,
    assumed: bool,
) -> Junction:
    children = graph.children(position)
    edges = tuple(sorted(edges, key=lambda e: -math.prod(graph.shape(*children[e]))))
    paths = tuple(parameter_path(graph, *children[edge]) for edge in edges)
    through = _nodes_below(graph, [top for top, _, _ in paths])
    by_column = all(_is_by_column(graph, position, edge) for edge in edges)
    return Junction(position, edges, paths, parameters, through, ends, assumed, by_column)


def _is_by_column(graph: Graph, position: int, edge: int) -> bool:
    """Whether the last dimension of an output `[..., O, N]` counts what an input serves."""
    shape, given = graph.shape(position), graph.shape(*graph.children(position)[edge])
    if graph.kind(position) in ("Mm", "Addmm", "Bmm", "Baddbmm"):
        return edge == len(graph.children(position)) - 2 or given[-1:] == (1,) != shape[-1:]
    return len(given) > 1 and given[-1:] == (1,) != shape[-1:] and given[-2:-1] == shape[-2:-1]


ParameterPath = tuple[int, int, bool]
"""A node (position) and the number of its output; whether there is a transposition on the way."""
NO_PATH = (-1, 0, False)


def _nodes_below(graph: Graph, tops: Iterable[int]) -> tuple[int, ...]:
    """These nodes and all below them but for leaves, parents first."""
    found = [position for position in dict.fromkeys(tops) if graph.names[position] != LEAF]
    for position in found:  # grows on the way
        below = {child for child, _ in graph.children(position)} - {-1, *found}
        found += [child for child in below if graph.names[child] != LEAF]
    return tuple(sorted(found, reverse=True))


def parameter_path(graph: Graph, position: int, number: int) -> ParameterPath:
    """From an input of a node through casts, copies and transpositions, mostly to a parameter."""
    transposed = False
    while True:
        dims = permutation(graph, position)
        *outer, row, column = (0, 0) if dims is None or len(dims) < 2 else range(len(dims))
        is_same = graph.is_plain_cast(position) if dims is None else dims == (*range(len(dims)),)
        if not is_same and dims != (*outer, column, row):  # of a matrix, or of each of a stack
            return position, number, transposed
        transposed ^= not is_same
        position, number = graph.children(position)[0]


def permutation(graph: Graph, position: int) -> tuple[int, ...] | None:
    """Which dimension of its input each dimension of a node's output is; None: it does more."""
    node, kind, size = graph.nodes[position], graph.kind(position), len(graph.shape(position))
    dims = list(range(size))
    if kind == "Permute":
        dims = [dim % size for dim in saved_dims(node, "dims")]
    elif kind == "Transpose":
        one, other = (dim % size for dim in saved_dims(node, "dim0", "dim1"))
        dims[one], dims[other] = other, one
    elif kind == "T":
        dims.reverse()
    elif kind not in ("Alias", "Clone"):
        return None
    return tuple(dims) if callable(node) else None  # a Python function may have any name


def _may_hold_rows(graph: Graph, position: int, rows: int | None) -> bool:
    """Whether a node of parameters may have taken rows in: as a hidden operand, or by shape."""
    name, children = graph.names[position], graph.children(position)
    if is_python_function(graph.nodes[position]) or graph.is_tap(position):
        return True
    hidden = any(child < 0 for child, _ in children)
    if name in _PRODUCTS:
        return hidden
    shape = graph.shape(position)
    if name in _LOOKUPS:
        return rows is None or math.prod(shape[:-1]) >= rows
    inner = [graph.shape(child, number) for child, number in children if child >= 0]
    if shape in inner:
        return False
    grown = all(math.prod(shape) > math.prod(input_shape) for input_shape in inner)
    return (hidden or grown) and (rows is None or any(d and d % rows == 0 for d in shape))

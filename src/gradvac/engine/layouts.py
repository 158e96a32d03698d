"""Where rows lie in tensors, followed from the losses down, operation by operation.

Row r of the batch owns entry r of the losses. Where its entries are in what an operation was made
of follows from what the operation does, whatever the data, and whatever the parameters become:
along a dimension that it leaves alone. An index that moves entries of the first dimension (tokens
that are brought to their experts, and back) is saved in the graph, and says where to (`Move`).
Behind any other operation that may move rows, or that is not known here, owners are measured every
step.
"""

# B rows

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradvac.engine.graph import (
    COMPILED,
    LEAF,
    Graph,
    indexed_dims,
    is_pooled,
    kind_of,
    padded_dims,
    settings,
)
from gradvac.engine.slices import Memory, Place


class Layout(NamedTuple):
    """Rows lie along `dim`: together, or coming round again (`tiled`).

    Behind an index (the position of its operation), every entry counts as a row.
    """

    dim: int
    tiled: bool = False
    moved_by: int | None = None

    def stride(self, shape: Sequence[int], num_rows: int) -> int | None:
        """From one row to the next in the order of memory; None where rows cannot lie so.

        Entry e belongs to row (e // stride) % B, in both forms.
        """
        if self.dim >= len(shape) or not shape[self.dim] or shape[self.dim] % num_rows:
            return None
        inner = math.prod(shape[self.dim + 1 :])
        return inner if self.tiled else inner * (shape[self.dim] // num_rows)

    def rows(self, size: int, num_rows: int, device: torch.device) -> Tensor:
        """The row of every entry of the dimension."""
        every = torch.arange(size, device=device)
        if not size:  # an expert without a row
            return every
        return every % num_rows if self.tiled else every // (size // num_rows)

    def __str__(self) -> str:
        which = ("first", "second", "third", "fourth")
        where = which[self.dim] if self.dim < len(which) else f"{self.dim + 1}th"
        how = ", moved by an index" if self.moved_by is not None else ""
        return f"rows along the {where} dimension" + (", repeated" if self.tiled else "") + how


def layouts(shape: Sequence[int], num_rows: int) -> Iterator[Layout]:
    """The layouts that rows may have in a tensor, the usual one first."""
    for dim, size in enumerate(shape):
        if size and size % num_rows == 0:
            yield Layout(dim)
            if size > num_rows:
                yield Layout(dim, tiled=True)


class Move(NamedTuple):
    """Where rows lie above and below an operation (position) that moves them by an index."""

    position: int
    above: Layout
    below: Layout


class Moves:
    """The indices of a graph that move rows, as they are met.

    Args:
        known: What was seen in another graph of its structure, to be checked in this one
            (`all_agree`); None: it is to be seen in this one, which waits for the device.

    Attributes:
        made: What was met.
    """

    def __init__(self, known: Iterable[Move] | None = None) -> None:
        self._known = None if known is None else {move[:2]: move.below for move in known}
        self.made: list[Move] = []

    def below(self, graph: Graph, position: int, above: Layout, num_rows: int) -> Layout | None:
        """Where rows lie in what an index took or added; None where entries of several meet."""
        if self._known is not None:
            return self._known.get((position, above))
        options = [Layout(0, moved_by=position)]
        is_whole = _num_behind(graph, position) % num_rows == 0
        if graph.names[position] != _SUM_BY_INDEX and is_whole:
            options.insert(0, Layout(0))  # back where they were
        for below in options:
            move = Move(position, above, below)
            if bool(_agrees(graph, move, num_rows)):
                self.made.append(move)
                return below
        return None


def all_agree(graph: Graph, moves: Sequence[Move], num_rows: int) -> bool:
    """Whether indices move rows as those of another graph did. Waits for the device.

    Keeps which row every entry behind an index belongs to (`Graph.moved`).
    """
    if not all(_is_at_hand(graph, move.position) for move in moves):
        return False
    agree = [_agrees(graph, move, num_rows) for move in moves]
    return bool(torch.stack(agree).all()) if agree else True


def _agrees(graph: Graph, move: Move, num_rows: int) -> Tensor:
    position, above, below = move
    node, name = graph.nodes[position], graph.names[position]
    index = node._saved_indices[0] if name in _BY_INDICES else node._saved_index.reshape(-1)
    index = index.long()
    device, size, num_behind = index.device, len(index), _num_behind(graph, position)
    if name == _SUM_BY_INDEX:  # the gradient of what it added is taken
        rows = rows_of(graph, above, graph.shape(position)[0], num_rows, device)
        graph.moved[position] = rows[index]
        return torch.ones((), dtype=torch.bool, device=device)
    rows, index = rows_of(graph, above, size, num_rows, device), index % max(1, num_behind)
    if below.moved_by is None:
        expected = rows_of(graph, below, num_behind, num_rows, device)
    else:
        expected = graph.moved[position] = rows.new_zeros(num_behind).scatter_(0, index, rows)
    return (expected[index] == rows).all()


def _is_at_hand(graph: Graph, position: int) -> bool:
    """Whether an operation by an index works along the first dimension, and it is at hand.

    Behind hooks, of a checkpoint for instance, reading it would run a part of the forward.
    """
    node, name = graph.nodes[position], graph.names[position]
    if not callable(node):  # somebody's function of that name
        return False
    if name not in _BY_INDICES:
        is_first = saved_dims(node, "dim")[0] % len(graph.shape(position)) == 0
        return is_first and node._raw_saved_index.unpack_hook is None
    if any(one.unpack_hook is not None for one in node._raw_saved_indices):
        return False
    dims, every = indexed_dims(node), node._saved_indices
    if not dims or dims != (*range(len(dims)),) or every[0].dtype not in (torch.int64, torch.int32):
        return False  # others, or a mask
    return all(every[dim].shape == graph.shape(position)[:1] for dim in dims)


def _num_behind(graph: Graph, position: int) -> int:
    """Entries along the first dimension of what an index took or added."""
    return graph.shape(*graph.children(position)[-1])[0]


def count_rows(graph: Graph, layout: Layout, num_rows: int) -> int:
    """How many rows a dimension counts where rows lie so."""
    return num_rows if layout.moved_by is None else _num_behind(graph, layout.moved_by)


def rows_of(graph: Graph, layout: Layout, size: int, num_rows: int, device: torch.device) -> Tensor:
    """The row of every entry of a dimension."""
    rows = layout.rows(size, count_rows(graph, layout, num_rows), device)
    return rows if layout.moved_by is None else graph.moved[layout.moved_by].to(device)[rows]


Followed = list[dict[int, Layout | None]]
"""Position -> output -> where rows lie; None: they may move."""


def follow(
    graph: Graph,
    holds_rows: Sequence[bool],
    starts: Iterable[tuple[tuple[int, int], Layout]],
    num_rows: int,
    moves: Moves | None = None,
) -> Followed:
    """From where rows lie in some outputs (position, number) to all whose gradients depend on them.

    Only what holds rows is followed; behind an index only if it is told how (`moves`).
    """
    at: Followed = [{} for _ in graph.nodes]
    for output, layout in starts:
        _put(at, output, layout)
    for position in range(len(at) - 1, -1, -1):
        if at[position] and graph.names[position] != LEAF:
            children = graph.children(position)
            edges = [e for e, (child, _) in enumerate(children) if child >= 0 and holds_rows[child]]
            if edges:
                for edge, below in _through(graph, position, at[position], edges, num_rows, moves):
                    if edge in edges:
                        _put(at, children[edge], below)
    return at


def follow_losses(
    graph: Graph, holds_rows: Sequence[bool], num_rows: int, moves: Moves
) -> Followed:
    """Find where the rows of losses `[B]` lie."""
    start = (graph.root_positions[0], graph.roots[0].output_nr)
    return follow(graph, holds_rows, [(start, Layout(0))], num_rows, moves)


def _put(at: Followed, output: tuple[int, int], layout: Layout | None) -> None:
    """Keep what is known of an output: None unless it is the same along every path."""
    position, number = output
    if at[position].setdefault(number, layout) != layout:
        at[position][number] = None


def _through(
    graph: Graph,
    position: int,
    above: Mapping[int, Layout | None],
    edges: Sequence[int],
    num_rows: int,
    moves: Moves | None,
) -> Iterable[tuple[int, Layout | None]]:
    """From where rows lie in a node's outputs to where they lie in its inputs (edges)."""
    name, node = graph.names[position], graph.nodes[position]
    if name in _HOOKS:
        return above.items()
    known = {number: layout for number, layout in above.items() if layout is not None}
    if len(known) < len(above):
        return [(edge, None) for edge in edges]
    shape, children = graph.shape, graph.children(position)
    is_moved = any(layout.moved_by is not None for layout in known.values())
    if name == COMPILED and (run := graph.run(position)) is not None and not is_moved:
        shapes = [shape(*child) if child[0] >= 0 else None for child in children]
        inside: Mapping[int, Layout | None] | None = run.follow(known, num_rows, shapes)
        return [(edge, None) for edge in edges] if inside is None else inside.items()
    is_by_index = name in _BY_INDEX and not known[0].dim and _is_at_hand(graph, position)
    if is_by_index and moves is not None:
        is_sum = name == _SUM_BY_INDEX  # of what was there and what is added
        moved = [edge for edge in edges if edge or not is_sum]
        behind = moves.below(graph, position, known[0], num_rows) if moved else None
        return [(edge, behind if edge in moved else known[0]) for edge in edges]
    if is_moved:  # whose rows are counted in this graph alone
        return _through_alike(graph, position, known, edges, num_rows)
    key = (
        *(name, type(node), *settings(node), num_rows, len(children), graph.memory(position)),
        *[(number, layout, shape(position, number)) for number, layout in known.items()],
        *[(edge, shape(*children[edge])) for edge in edges],
    )
    below = _ALIKE.get(key)
    if below is None:
        below = _ALIKE[key] = _through_alike(graph, position, known, edges, num_rows)
        if len(_ALIKE) > _MOST_ALIKE:
            del _ALIKE[next(iter(_ALIKE))]
    return below


_ALIKE: dict[object, list[tuple[int, Layout | None]]] = {}
_MOST_ALIKE = 4096  # operations; the layers of a model are


def _through_alike(
    graph: Graph,
    position: int,
    above: Mapping[int, Layout],
    edges: Sequence[int],
    num_rows: int,
) -> list[tuple[int, Layout | None]]:
    """The same for all operations with these settings and shapes."""
    memory = graph.memory(position)
    if memory is not None and above[0].moved_by is None:
        found = _through_memory(graph, position, memory, above[0], edges, num_rows)
        if found is not None:
            return found
    dims, below = _moves_along(graph, position, edges), list[tuple[int, Layout | None]]()
    for number, layout in above.items():
        size = len(graph.shape(position, number))
        if dims and layout.dim in {d % size for d in dims if d < size}:
            return [(edge, None) for edge in edges]
        below += [(e, _below(graph, position, number, e, layout, num_rows)) for e in edges]
    return below


def _below(
    graph: Graph, position: int, number: int, edge: int, above: Layout, num_rows: int
) -> Layout | None:
    """Where rows lie in an input of a node that leaves them alone; None if it is not known."""
    node, kind = graph.nodes[position], graph.kind(position)
    shape, inside = graph.shape(position, number), graph.shape(*graph.children(position)[edge])
    dim, num_more = above.dim, len(inside) - len(shape)
    if kind in _ENTRYWISE and inside == shape:
        return above
    if kind in VIEWS or kind == "Unsqueeze":  # as far apart in memory
        num_rows = count_rows(graph, above, num_rows)
        if not num_rows:  # an expert without entries
            return above
        stride = above.stride(shape, num_rows)
        every = layouts(inside, num_rows)
        below = next((one for one in every if one.stride(inside, num_rows) == stride), None)
        return below if below is None else below._replace(moved_by=above.moved_by)
    if kind == "Permute":
        dim = saved_dims(node, "dims")[dim] % len(shape)
    elif kind in ("T", "Transpose"):
        pair = saved_dims(node, "dim0", "dim1") if kind == "Transpose" else [0, 1]
        one, other = (d % len(shape) for d in pair)
        dim = {one: other, other: one}.get(dim, dim)
    elif kind in _ENTRYWISE or kind in _PRODUCTS:
        dim += num_more  # what is broadcast is aligned at its end
    elif kind in ("CtcLoss", "CudnnCtcLoss"):  # [time, rows, classes]
        dim += 1
    elif kind == "NllLoss2D":
        dim += dim > 0
    elif kind == "Stack":
        dim -= dim > saved_dims(node, "dim")[0] % len(shape)
    elif num_more > 0 and hasattr(node, "_saved_dim"):  # that are gone
        for gone in sorted(d % len(inside) for d in saved_dims(node, "dim")):
            dim += dim >= gone
    elif num_more and kind not in _SAME_NUMBER:
        return None
    same = 0 <= dim < len(inside) and inside[dim] == shape[above.dim]
    return above._replace(dim=dim) if same else None


# -- slices --------------------------------------------------------------------------------------


def _through_memory(
    graph: Graph,
    position: int,
    memory: Memory,
    above: Layout,
    edges: Sequence[int],
    num_rows: int,
) -> list[tuple[int, Layout | None]] | None:
    """Through a slice that is written or read; None: by whatever else is known of it."""
    if not memory.written_by:
        found = _lying(memory.whole, _step(above, memory.slice, num_rows), num_rows)
        return None if found is None else [(edge, found) for edge in edges]
    step, sizes = _step(above, memory.whole, num_rows), memory.slice.sizes
    if not step or kind_of(memory.written_by) not in _ENTRYWISE:
        return None
    inner = _lying(memory.slice, step, num_rows)
    below: list[tuple[int, Layout | None]] = []
    for edge in edges:
        found = inner if edge else above  # what was written over stays where it is
        if edge and inner is not None:  # what is broadcast is aligned at its end
            shape = graph.shape(*graph.children(position)[edge])
            dim = inner.dim + len(shape) - len(sizes)
            same = dim >= 0 and shape[dim] == sizes[inner.dim]
            found = inner._replace(dim=dim) if same else None
        below.append((edge, found))
    return below


def _step(layout: Layout, place: Place, num_rows: int) -> int:
    """From one row to the next in memory; 0 where entries of several rows may share it."""
    size, stride = place.sizes[layout.dim], place.strides[layout.dim]
    step = stride if layout.tiled else stride * (size // num_rows)
    return step if _lying(place, step, num_rows) == layout else 0


def _lying(place: Place, step: int, num_rows: int) -> Layout | None:
    """Where rows lie in memory whose entry e belongs to row (e // step) % B.

    None where that is not along one dimension, from the first row on.
    """
    if 0 in place.sizes or not step or place.offset // step % num_rows:
        return None
    found, rest = None, place.offset % step  # of a step: at the first entry, in the end at most
    for dim, (size, stride) in enumerate(zip(place.sizes, place.strides, strict=True)):
        if size == 1 or stride % (step * num_rows) == 0:  # from a row to itself
            continue
        each = step // stride if step % stride == 0 else 0  # entries of a row
        if each == 0 or size % (each * num_rows):  # within a row
            rest += (size - 1) * stride
            continue
        is_tiled = size > each * num_rows
        if found is not None or (is_tiled and each > 1):
            return None
        found = Layout(dim, is_tiled)
        rest += (each - 1) * stride
    return found if rest < step else None


# -- operations, and the dimensions along which they may move or mix entries ---------------------

_ANY = range(64)  # dimensions


def _moves_along(graph: Graph, position: int, edges: Sequence[int]) -> Sequence[int]:
    """The dimensions of a node's output along which it may move or mix entries of some inputs."""
    kind, node = graph.kind(position), graph.nodes[position]
    if not callable(node):  # a Python function
        return _ANY
    if kind in _KEEPERS:
        return ()
    if kind in _ENTRYWISE:
        return _broadcast(graph, position, edges)
    if kind in _PRODUCTS:
        return _contracted(graph, position, edges)
    if any(edges) and kind in _WITH_WEIGHTS:  # a weight made of rows serves all of them
        return _ANY
    if kind == "GroupedMm":  # rows by an expert each, if neither output nor input counts experts
        inner = [graph.shape(*graph.children(position)[edge]) for edge in edges]
        return _ANY[1:] if {len(s) for s in (graph.shape(position), *inner)} == {2} else _ANY
    if kind in _WITHIN_ROWS or kind.startswith(_OVER_SPACE):
        return _ANY[1:]
    return _BY_SETTING[kind](node) if kind in _BY_SETTING else _ANY


def _broadcast(graph: Graph, position: int, edges: Sequence[int]) -> Sequence[int]:
    """Dimensions along which an input serves several entries, whose gradients are added up."""
    shape, dims = graph.shape(position), set[int]()
    for edge in edges:
        input_shape = graph.shape(*graph.children(position)[edge])
        inner = (*(1 for _ in range(len(shape) - len(input_shape))), *input_shape)
        dims |= {d for d, size in enumerate(inner) if size == 1 or size != shape[d]}
    return tuple(dims)


def _contracted(graph: Graph, position: int, edges: Sequence[int]) -> Sequence[int]:
    """Dimensions that the gradient of a factor is a sum over: a permutation may be a matrix."""
    last = len(graph.shape(position)) - 1
    *added, first, second = range(len(graph.children(position)))
    broadcast = _broadcast(graph, position, [edge for edge in edges if edge in added])
    summed_over = {first: last, second: last - 1}
    return (*broadcast, *(dim for factor, dim in summed_over.items() if factor in edges))


def saved_dims(node: Any, *names: str) -> list[int]:
    """The dimensions that an operation was given."""
    dims: list[int] = []
    for name in names:
        value = getattr(node, f"_saved_{name}")
        dims += (value,) if isinstance(value, int) else value or ()
    return [d if d < 1 << 63 else d - (1 << 64) for d in dims]


def _along(name: str) -> Callable[[Any], Sequence[int]]:
    """Along the dimensions that an operation was given; none: any."""
    return lambda node: saved_dims(node, name) or _ANY


def _after_the_first_index(node: Any) -> Sequence[int]:
    given = indexed_dims(node)
    is_together = given and given[-1] - given[0] < len(given)
    return _ANY[given[0] :] if is_together else _ANY  # apart: their dimension becomes the first


def _normalised(node: Any) -> Sequence[int]:
    return range(-len(node._saved_normalized_shape), 0)


def _by_channel(node: Any) -> Sequence[int]:
    return [d for d in _ANY if d != 1] if node._saved_training else ()


def _recurrent(node: Any) -> Sequence[int]:
    if len(getattr(node, "_saved_batch_sizes", ())):  # packed
        return _ANY
    # On a CPU, time has become the first dimension by then.
    return (1, 2) if hasattr(node, "_saved_batch_sizes") and node._saved_batch_first else (0, 2)


def kinds(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Operations whose effect depends on the sizes of the batch: they regroup entries.
VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias", "Squeeze"))
# Rows lie along a dimension of the same number, though other dimensions come or go.
_SAME_NUMBER = frozenset(
    (
        *("NllLoss", "MultiMarginLoss", "MultilabelMarginLoss", "ViewAsComplex", "ViewAsReal"),
        *("Unfold", "Index", "UnsafeIndex", "Im2Col"),
    )
)
# Python functions that hand on what they get; hooks of FSDP2, too
_HOOKS = kinds("BackwardHookFunctionBackward RegisterPostBackwardFunctionBackward")
_ENTRYWISE = kinds(
    """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Celu Clamp
    ClampMax ClampMin Clone Complex Conj ConjPhysical Copy Copysign Cos Cosh Deg2Rad Digamma Div
    Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 FakeQuantizePerTensorAffineCachemask Fill Fmax Fmin
    Fmod Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh Hypot LeakyRelu Lerp
    Lgamma Log Log10 Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum
    Mish Mul NanToNum NativeDropout Neg Polar Pow PreluKernel Reciprocal Relu Remainder Repeat
    Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Silu Sin Sinc Sinh Softplus Softshrink
    SpecialEntr Sqrt Sub Tan Tanh Threshold ToCopy Tril Triu Where Xlogy Zero
    """
)
# What is one entry above belongs to one row, and so does all that it was made of.
_KEEPERS = kinds(
    """
    Amax Amin Aminmax BinaryCrossEntropy BinaryCrossEntropyWithLogits CtcLoss CudnnCtcLoss
    HuberLoss Kthvalue LinalgVectorNorm Logsumexp Max Mean Median Min Mode MseLoss
    MultiMarginLoss MultilabelMarginLoss Nanmedian Nansum NllLoss NllLoss2D Norm Permute Prod
    ReshapeAlias Select SmoothL1Loss SoftMarginLoss Squeeze Std StdMean Sum T Transpose Unbind
    UnsafeView Unsqueeze Var VarMean View ViewAsComplex ViewAsReal
    """
)
_PRODUCTS = kinds("Mm Addmm Bmm Baddbmm")
_WITHIN_ROWS = kinds(
    """
    ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu
    ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
    ScaledDotProductFusedAttentionOverrideable Convolution NativeGroupNorm Im2Col
    """
)
_OVER_SPACE = (
    *("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "FractionalMaxPool"),
    *("Upsample", "ReflectionPad", "ReplicationPad", "GridSampler"),
)
_WITH_WEIGHTS = kinds(
    """
    Convolution NativeGroupNorm NativeLayerNorm FusedRmsNorm NativeBatchNorm CudnnBatchNorm
    MiopenBatchNorm MkldnnRnnLayer CudnnRnn GroupedMm
    """
)
_SUM_BY_INDEX = "IndexAddBackward0"
_BY_INDICES = kinds("IndexBackward0 UnsafeIndexBackward0")
_BY_INDEX = _BY_INDICES | {"IndexSelectBackward0", _SUM_BY_INDEX}
_ALONG_DIM = kinds(
    """
    IndexSelect IndexAdd IndexCopy IndexReduce Gather Scatter ScatterAdd ScatterReduce
    SliceScatter SelectScatter Sort Topk Slice Split SplitWithSizes UnsafeSplit
    UnsafeSplitWithSizes Stack Cat Glu Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Cummax
    Cummin Logcumsumexp FftC2C FftC2R FftR2C
    """
)
# Of the last two dimensions; those before count matrices.
_OF_MATRICES = kinds(
    """
    Cdist CholeskySolve LinalgCholeskyEx LinalgInvEx LinalgMatrixExp LinalgSolveEx
    LinalgSolveTriangular
    """
)
_BY_SETTING: dict[str, Callable[[Any], Sequence[int]]] = {
    **dict.fromkeys(_OF_MATRICES, lambda _: (-2, -1)),
    **dict.fromkeys(_ALONG_DIM, _along("dim")),
    **dict.fromkeys(("Flip", "Roll"), _along("dims")),
    "Unfold": _along("dimension"),
    **dict.fromkeys(("Index", "UnsafeIndex"), _after_the_first_index),
    "ConstantPadNd": padded_dims,
    "AsStrided": lambda node: () if is_pooled(node) else _ANY,
    **dict.fromkeys(("NativeLayerNorm", "FusedRmsNorm"), _normalised),
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), _by_channel),
    **dict.fromkeys(("PixelShuffle", "PixelUnshuffle"), lambda _: (-3, -2, -1)),
    **dict.fromkeys(("MkldnnRnnLayer", "CudnnRnn"), _recurrent),
    **dict.fromkeys(("ThnnFusedLstmCell", "ThnnFusedGruCell"), lambda _: (-1,)),
}

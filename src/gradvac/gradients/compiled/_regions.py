"""Rows inside compiled regions: whether they stay where they are, read from what was compiled.

A compiled region is one node, through which nobody sees whose gradient is whose. But a region of
our own backend (`_tapping.py`) is known operation by operation. It is run once on tensors without
data; the autograd graph of that run is the same as if nothing had been compiled. From where rows
were found to lie in the region's outputs it follows operation by operation where they lie before
each, down to its inputs, or that some operation may move them.
"""

# B rows

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from gradvac.gradients.compiled._taps import (
    seen_lookup,
    seen_product,
    tapped_lookup,
    tapped_product,
)
from gradvac.gradients.graph import ANY, COMPILED, ENTRYWISE, LEAF, RUN, Graph, moves_along
from gradvac.gradients.ownership import Layout, layouts

_SEEN = {tapped_product: seen_product, tapped_lookup: seen_lookup}


class Given(NamedTuple):
    """An input of a region: a tensor without its data."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype | None  # None: a size, in `shape`
    device: torch.device | None
    requires_grad: bool
    is_rows: bool

    @classmethod
    def of(cls, fake: Any, *, is_rows: bool) -> "Given":
        if not isinstance(fake, Tensor):
            return cls((_expression(fake),), (), None, None, False, False)
        shape, stride = map(_expression, fake.shape), map(_expression, fake.stride())
        return cls(
            tuple(shape), tuple(stride), fake.dtype, fake.device, fake.requires_grad, is_rows
        )

    def at(self, sizes: Mapping[Any, int]) -> Any:
        """The tensor for some sizes."""
        shape = [_value(size, sizes) for size in self.shape]
        if self.dtype is None:
            return shape[0]
        stride = [_value(size, sizes) for size in self.stride]
        value = torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)
        return value.requires_grad_(self.requires_grad)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _value(size: Any, sizes: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(sizes))


class Region:
    """What was compiled.

    Args:
        inside: Its operations.
        given: Its inputs.
        sizes: Symbols of sizes, and their places among the arguments it is called with.
    """

    def __init__(
        self, inside: fx.GraphModule, given: Sequence[Given], sizes: Mapping[Any, int]
    ) -> None:
        self._inside, self._given, self._sizes = inside, given, sizes
        kinds = {one.device.type for one in given if one.device is not None}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self._known: dict[object, bool] = {}

    def name_node(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Let the node of a run be found to be this region's."""
        run = None
        # An output may be an input, whose node is another region's.
        others = {given.grad_fn for given in arguments if isinstance(given, Tensor)}
        for place, output in enumerate(outputs):
            node: Any = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None and node not in others and node.name() == COMPILED:
                if run is None:
                    sizes = tuple([arguments[place] for place in self._sizes.values()])
                    run = Run(self, sizes, {})
                run.places[output.output_nr] = place
                node.metadata[RUN] = run

    def keeps_rows(
        self, sizes: tuple[int, ...], above: Mapping[int, Layout], num_rows: int
    ) -> bool:
        """Whether rows stay along the dimensions they lie along, whatever the data.

        Args:
            sizes: Of this run.
            above: Where rows lie in each output that has a gradient.
            num_rows: B.
        """
        key = (sizes, tuple(above.items()), num_rows)
        if key not in self._known:
            try:
                self._known[key] = self._follow(sizes, above, num_rows)
            except Exception:  # what cannot be run without data is measured every step
                self._known[key] = False
        return self._known[key]

    def _follow(self, sizes: tuple[int, ...], above: Mapping[int, Layout], num_rows: int) -> bool:
        outputs, rows = self._run(dict(zip(self._sizes, sizes, strict=True)))
        numbers = sorted(above)
        roots = [outputs[number] for number in numbers]
        graph = Graph(roots)
        at: _Layouts = [{} for _ in graph.nodes]
        for position, root, number in zip(graph.root_positions, roots, numbers, strict=True):
            fits = above[number].stride(root.shape, num_rows) is not None
            if not fits or not _put(at, (position, root.output_nr), above[number]):
                return False
        return _follow(graph, rows, at, num_rows)

    def _run(self, sizes: Mapping[Any, int]) -> tuple[Sequence[Any], list[Tensor]]:
        """Its outputs without data, and those of its inputs that hold rows."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            given = [one.at(sizes) for one in self._given]
            outputs = _Visible(self._inside).run(*given)
            pairs = zip(given, self._given, strict=True)
            return outputs, [value for value, one in pairs if one.requires_grad and one.is_rows]


class Run(NamedTuple):
    """One run of a region."""

    region: Region
    sizes: tuple[int, ...]
    places: dict[int, int]  # output of the node -> output of the region

    def keeps_rows(self, above: Mapping[int, Layout], num_rows: int) -> bool:
        """See `Region.keeps_rows`; `above` is by output of the node."""
        if not all(number in self.places for number in above):
            return False
        by_place = {self.places[number]: layout for number, layout in above.items()}
        return self.region.keeps_rows(self.sizes, by_place, num_rows)


class _Visible(fx.Interpreter):
    """Runs a region's operations one by one."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_SEEN.get(target, target), args, kwargs)


# -- from a node's output to its inputs --------------------------------------------------------

_Layouts = list[dict[int, Layout]]  # position -> output -> where rows lie
_SAME_ORDER = frozenset(("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"))
_BY_ROW = frozenset(("NllLoss", "ViewAsComplex", "ViewAsReal"))


def _follow(graph: Graph, rows: Sequence[Tensor], at: _Layouts, num_rows: int) -> bool:
    """Whether every node leaves the rows alone that come to it, from those of the roots on."""
    holds_rows: list[bool] = []
    identities = set(map(id, rows))
    for position, name in enumerate(graph.names):
        inner = (child for child, _ in graph.children(position) if child >= 0)
        is_ours = name == LEAF and id(graph.nodes[position].variable) in identities
        holds_rows.append(is_ours or any(holds_rows[child] for child in inner))
    for position in range(len(graph.nodes) - 1, -1, -1):
        if graph.names[position] == LEAF or not at[position]:
            continue
        are_rows = [c >= 0 and holds_rows[c] for c, _ in graph.children(position)]
        if not any(are_rows):
            continue
        dims = moves_along(graph, position, are_rows)
        for number, layout in at[position].items():
            size = len(graph.shape(position, number))
            if dims is ANY or layout.dim in {d % size for d in dims if d < size}:
                return False
            for edge, child in enumerate(graph.children(position)):
                if are_rows[edge]:
                    below = _below(graph, position, number, layout, child, num_rows)
                    if below is None or not _put(at, child, below):
                        return False
    return True


def _put(at: _Layouts, where: tuple[int, int], layout: Layout) -> bool:
    """Keep a layout; whether it is the same by every way."""
    position, number = where
    return at[position].setdefault(number, layout) == layout


def _below(
    graph: Graph,
    position: int,
    number: int,
    above: Layout,
    child: tuple[int, int],
    num_rows: int,
) -> Layout | None:
    """Where rows lie in an input of a node that leaves them alone; None if it is not known."""
    node, name = graph.nodes[position], graph.names[position]
    kind = re.sub(r"^torch::autograd::|Backwards?\d*$", "", name)
    shape, inside = graph.shape(position, number), graph.shape(*child)
    dim = above.dim
    if kind in _SAME_ORDER:
        stride = above.stride(shape, num_rows)
        every = layouts(inside, num_rows)
        return next((one for one in every if one.stride(inside, num_rows) == stride), None)
    if kind == "Permute":
        dim = node._saved_dims[dim]
        dim = (dim if dim < 1 << 63 else dim - (1 << 64)) % len(shape)
    elif kind in ("T", "Transpose"):
        pair = _dims(node, "dim0", "dim1", size=len(shape)) if kind == "Transpose" else [0, 1]
        dim = {pair[0]: pair[1], pair[1]: pair[0]}.get(dim, dim)
    elif kind in ("Select", "Unbind"):
        (gone,) = _dims(node, "dim", size=len(inside))
        dim += dim >= gone
    elif kind in ("Sum", "Mean", "Amax", "Amin", "Logsumexp", "LinalgVectorNorm"):
        if len(shape) != len(inside):
            for gone in sorted(_dims(node, "dim", size=len(inside))):
                dim += dim >= gone
    elif kind in ENTRYWISE:
        dim -= len(shape) - len(inside)  # what is broadcast is aligned at its end
    elif kind not in _BY_ROW and len(shape) != len(inside):
        return None
    same = 0 <= dim < len(inside) and inside[dim] == shape[above.dim]
    return Layout(dim, above.tiled) if same else None


def _dims(node: Any, *names: str, size: int) -> list[int]:
    """Dimensions that an operation was told."""
    dims: list[int] = []
    for name in names:
        value = getattr(node, f"_saved_{name}")
        dims += (value,) if isinstance(value, int) else value
    return [(d if d < 1 << 63 else d - (1 << 64)) % size for d in dims]

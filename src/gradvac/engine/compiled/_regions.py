"""Rows inside compiled regions: whether they stay where they are, read from what was compiled.

A compiled region is one node, through which nobody sees whose gradient is whose. But a region of
our own backend (`_tapping.py`) is known operation by operation. It is run once on tensors without
data; the autograd graph of that run is the same as if nothing had been compiled. From where rows
were found to lie in the region's outputs it follows operation by operation where they lie before
each, down to its inputs, or that some operation may move them.
"""

# B rows

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from gradvac.engine.compiled._taps import (
    seen_lookup,
    seen_product,
    tapped_lookup,
    tapped_product,
)
from gradvac.engine.graph import COMPILED, LEAF, RUN, Graph
from gradvac.engine.layouts import Layout, follow

Below = dict[int, Layout | None]
"""Input (of tensors) -> where rows lie; None: they may move."""
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
        self._inside, self.given, self._sizes = inside, given, sizes
        kinds = {one.device.type for one in given if one.device is not None}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self.known: dict[object, Below | None] = {}  # what runs of it found out

    def name_node(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Let the node of a run be found to be this region's."""
        run = Run(self, tuple([arguments[place] for place in self._sizes.values()]), {})
        # An output may be an input, whose node is another region's.
        others = {given.grad_fn for given in arguments if isinstance(given, Tensor)}
        for place, output in enumerate(outputs):
            node: Any = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None and node not in others and node.name() == COMPILED:
                run.places[output.output_nr] = place
                node.metadata[RUN] = run

    def run_without_data(self, sizes: Sequence[int]) -> tuple[Sequence[Any], list[Any]]:
        """Its outputs and its inputs."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        by_symbol = dict(zip(self._sizes, sizes, strict=True))
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            given = [one.at(by_symbol) for one in self.given]
            return _Visible(self._inside).run(*given), given


class Run(NamedTuple):
    """One run of a region."""

    region: Region
    sizes: tuple[int, ...]
    places: dict[int, int]  # output of the node -> output of the region

    def follow(
        self,
        above: Mapping[int, Layout],
        num_rows: int,
        shapes: Sequence[tuple[int, ...] | None],
    ) -> Below | None:
        """Where rows lie in the region's inputs, whatever the data; None if that is not found out.

        Given where they lie in the node's outputs, and the shapes of its inputs.
        """
        known = self.region.known
        key = (self.sizes, tuple(above.items()), num_rows, tuple(shapes))
        if key not in known:
            try:
                known[key] = self._follow(above, num_rows, shapes)
            except Exception:  # what cannot be run without data is measured every step
                known[key] = None
        return known[key]

    def _follow(
        self,
        above: Mapping[int, Layout],
        num_rows: int,
        shapes: Sequence[tuple[int, ...] | None],
    ) -> Below:
        outputs, given = self.region.run_without_data(self.sizes)
        roots = [outputs[self.places[number]] for number in above]
        graph = Graph(roots)
        places = [(p, r.output_nr) for p, r in zip(graph.root_positions, roots, strict=True)]
        starts = zip(places, above.values(), strict=True)
        followed = follow(graph, self._holds_rows(graph, given), starts, num_rows)
        is_leaf = [name == LEAF for name in graph.names]
        leaves = {id(n.variable): p for p, n in enumerate(graph.nodes) if is_leaf[p]}
        below: Below = {}
        tensors = [value for value in given if isinstance(value, Tensor)]
        for edge, (value, shape) in enumerate(zip(tensors, shapes, strict=True)):
            assert shape is None or tuple(value.shape) == shape
            if id(value) in leaves:
                below[edge] = followed[leaves[id(value)]].get(0)
        return below

    def _holds_rows(self, graph: Graph, given: Sequence[Any]) -> list[bool]:
        """For every node, whether it is made of inputs that hold rows."""
        pairs = zip(given, self.region.given, strict=True)
        rows = {id(value) for value, one in pairs if one.is_rows}
        holds_rows: list[bool] = []
        for position, name in enumerate(graph.names):
            inner = (child for child, _ in graph.children(position) if child >= 0)
            is_given = name == LEAF and id(graph.nodes[position].variable) in rows
            holds_rows.append(is_given or any(holds_rows[child] for child in inner))
        return holds_rows


class _Visible(fx.Interpreter):
    """Runs a region's operations one by one."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_SEEN.get(target, target), args, kwargs)

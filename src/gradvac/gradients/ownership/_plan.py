"""A plan: what is known of graphs with one signature."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from gradvac.gradients.graph import VIEWS, Drawing, Graph, Way, run_of
from gradvac.gradients.ownership._layouts import Layout

_MOST_SIZES = 4096


class How(Enum):
    """How the owner of an entry is known, where it is not a `Layout`."""

    DECLARED = "declared by gradvac.rows"
    REACHED = "reached by one loss alone"
    MEASURED = "measured every step"


Known = Layout | How


class Sized(NamedTuple):
    """Where rows lay at an operation whose effect depends on sizes: in its output, and its input.

    `spans` are the sizes along the rows, in rows, of an operation that changes them.
    """

    position: int
    above: Layout | None
    below: Layout | None
    spans: tuple[float, ...]


@dataclass
class Plan:
    """What is known of graphs with one signature."""

    drawing: Drawing
    known: dict[tuple[int, int], Known] = field(default_factory=dict)  # junction, output -> how
    sized: list[Sized] = field(default_factory=list)
    regions: dict[int, dict[int, Layout]] = field(default_factory=dict)  # rows in their outputs
    sizes: set[object] = field(default_factory=set)  # of batches for which it is known to hold
    unfinished: str | None = None  # why the next batch must be looked at too
    asleep: frozenset[int] = frozenset()  # positions that no gradient has come through so far
    moved: set[int] = field(default_factory=set)
    functions: frozenset[int] = frozenset()  # junctions that are Python functions on the way
    measured: bool = False
    proven: bool = False  # a step with it went well
    refusal: str | None = None  # why no step with it can go well
    lowest: torch.dtype = torch.float32
    tolerance: float = 0.0  # how much of what is measured may stay unexplained
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)
    ways: dict[tuple[int, int], Way] = field(default_factory=dict)  # down from inputs of junctions
    components: list[list[int]] | None = None  # that every junction contributes to
    asked: list[tuple[int, int]] | None = None  # see `sizes_of`

    def parameters(self) -> list[nn.Parameter]:
        """Those that such graphs reach, in the order of the model."""
        reached = {p for junction in self.drawing.junctions for p in junction.parameters}
        return [parameter for parameter in self.names if parameter in reached]

    def sizes_of(self, graph: Graph, num_rows: int | None) -> tuple[object, ...]:
        """The sizes of a batch, as far as what was learned may depend on them."""
        shape, inside = graph.shape, graph.inner_shapes
        return (
            num_rows,
            *[shape(position, output) for position, output in self._asked(graph)],
            *[tuple(inside(sized.position)) for sized in self.sized],
            *[run_of(graph.nodes[position]).sizes for position in self.regions],
        )

    def _asked(self, graph: Graph) -> list[tuple[int, int]]:
        """The outputs (position, number) whose sizes are asked for every step."""
        if self.asked is None:
            junctions = self.drawing.junctions
            outputs = [(junctions[number].position, output) for number, output in self.known]
            outputs += [(sized.position, 0) for sized in self.sized]
            views = (p for p, *_ in self.sized if graph.names[p] in VIEWS)
            viewed = {graph.children(view)[0] for view in views}  # what is inside them
            self.asked = [output for output in outputs if output not in viewed]
        return self.asked

    def holds_for(self, graph: Graph, num_rows: int | None) -> bool:
        """Whether rows lie as they were found to, in a graph of this signature and other sizes.

        Which dimension they lie along follows from the operations, but for those that regroup
        entries by sizes: a view must have rows at the same distance on both sides, and what
        changes the size along the rows must do so as before.
        """
        if num_rows is None:
            return True
        sizes = self.sizes_of(graph, num_rows)
        if sizes in self.sizes:
            return True
        for (number, output), how in self.known.items():
            shape = graph.shape(self.drawing.junctions[number].position, output)
            if isinstance(how, Layout) and how.stride(shape, num_rows) is None:
                return False
        for position, above, below, spans in self.sized:
            if above is None or below is None:  # rows lay in a way that has no name
                return False
            stride = above.stride(graph.shape(position), num_rows)
            if graph.names[position] in VIEWS:
                inside = below.stride(graph.inner_shapes(position)[0], num_rows)
                fits = stride is not None and stride == inside
            else:
                fits = spans_of(graph, position, above, num_rows) == spans
            if not fits:
                return False
        for position, above_region in self.regions.items():
            if not run_of(graph.nodes[position]).keeps_rows(above_region, num_rows):
                return False
        if len(self.sizes) < _MOST_SIZES:
            self.sizes.add(sizes)
        return True

    def describe(self) -> str:
        """How rows lie, in words."""
        count = Counter(
            str(how) if isinstance(how, Layout) else how.value for how in self.known.values()
        )
        return "; ".join(
            f"{what} ({number} of {len(self.known)} places)" for what, number in count.most_common()
        )


def spans_of(
    graph: Graph, position: int, layout: Layout | None, num_rows: int | None
) -> tuple[float, ...]:
    """The sizes along the rows, in rows, of a node that changes them; empty if it does not."""
    if layout is None or num_rows is None:
        return ()
    shapes = [graph.shape(position), *graph.inner_shapes(position)]
    from_end = layout.dim - len(shapes[0])
    sizes = [shape[from_end] if -from_end <= len(shape) else 1 for shape in shapes]
    return tuple(size / num_rows for size in sizes) if len(set(sizes)) > 1 else ()

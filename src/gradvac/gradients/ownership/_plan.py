"""A plan: what is known of graphs with one signature."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from gradvac.gradients.graph import Drawing, Graph, Way
from gradvac.gradients.ownership._following import follow_losses
from gradvac.gradients.ownership._layouts import Layout
from gradvac.gradients.ownership._movers import VIEWS

_MOST_SIZES = 4096


class How(Enum):
    """How the owner of an entry is known, where it is not a `Layout`."""

    DECLARED = "declared by gradvac.rows"
    REACHED = "reached by one loss alone"
    MEASURED = "measured every step"


Known = Layout | How


class _Asked(NamedTuple):
    """What batches of one structure are told apart by."""

    outputs: list[tuple[int, int]]  # (position, number)
    regions: list[int]  # compiled


@dataclass
class Plan:
    """What is known of graphs with one signature."""

    drawing: Drawing
    names: Mapping[nn.Parameter, str]
    lowest: torch.dtype
    moved: set[int]
    known: dict[tuple[int, int], Known] = field(default_factory=dict)  # junction, output -> how
    sizes: set[object] = field(default_factory=set)  # of batches for which it is known to hold
    unfinished: str | None = None  # why the next batch must be looked at too
    asleep: frozenset[int] = frozenset()  # positions that no gradient has come through so far
    proven: bool = False  # a step with it went well
    refusal: str | None = None  # why no step with it can go well
    tolerance: float = 0.0  # how much of what is measured may stay unexplained
    ways: dict[tuple[int, int], Way] = field(default_factory=dict)  # down from inputs of junctions
    components: list[list[int]] | None = None  # that every junction contributes to
    asked: _Asked | None = None

    @property
    def measured(self) -> bool:
        """Whether owners are measured every step somewhere."""
        return How.MEASURED in self.known.values()

    def parameters(self) -> list[nn.Parameter]:
        """Those that such graphs reach, in the order of the model."""
        reached = {p for junction in self.drawing.junctions for p in junction.parameters}
        return [parameter for parameter in self.names if parameter in reached]

    def holds_for(self, graph: Graph, num_rows: int | None) -> bool:
        """Whether rows lie as they were found to, in a graph of this signature and other sizes."""
        if num_rows is None or not any(isinstance(how, Layout) for how in self.known.values()):
            return True
        sizes = self._sizes_of(graph, num_rows)
        if sizes in self.sizes:
            return True
        followed = follow_losses(graph, self.drawing.holds_rows, num_rows)
        for (number, output), how in self.known.items():
            position = self.drawing.junctions[number].position
            if isinstance(how, Layout) and followed[position].get(output, how) != how:
                return False
        if len(self.sizes) < _MOST_SIZES:
            self.sizes.add(sizes)
        return True

    def _sizes_of(self, graph: Graph, num_rows: int) -> tuple[object, ...]:
        """The sizes of a batch, as far as where rows lie may depend on them."""
        if self.asked is None:
            self.asked = self._ask(graph)
        shape, run = graph.shape, graph.run
        shapes = [shape(position, number) for position, number in self.asked.outputs]
        return (num_rows, *shapes, *[run(position).sizes for position in self.asked.regions])

    def _ask(self, graph: Graph) -> _Asked:
        """What the way from the losses to rows that were found depends on."""
        junctions = self.drawing.junctions
        outputs = [(junctions[number].position, output) for number, output in self.known]
        learned = {
            junctions[number].position
            for (number, _), how in self.known.items()
            if isinstance(how, Layout)
        }
        on_the_way = [False] * len(graph.nodes)
        for position in range(len(graph.nodes)):
            inner = (child for child, _ in graph.children(position) if child >= 0)
            on_the_way[position] = position in learned or any(on_the_way[c] for c in inner)
        passed = [position for position in self.drawing.row_nodes if on_the_way[position]]
        for view in (position for position in passed if graph.kind(position) in VIEWS):
            outputs += [(view, 0), graph.children(view)[0]]
        regions = [position for position in passed if graph.run(position) is not None]
        return _Asked(list(dict.fromkeys(outputs)), regions)

    def describe(self) -> str:
        """How rows lie, in words."""
        count = Counter(
            str(how) if isinstance(how, Layout) else how.value for how in self.known.values()
        )
        return "; ".join(
            f"{what} ({number} of {len(self.known)} places)" for what, number in count.most_common()
        )

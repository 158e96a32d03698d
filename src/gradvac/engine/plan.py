"""A plan: what is known of graphs with one signature."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from gradvac.engine.graph import Graph
from gradvac.engine.junctions import Partition
from gradvac.engine.layouts import VIEWS, Layout, follow_losses

_MOST_SIZES = 4096


class How(Enum):
    """How the owner of an entry is known, where it is not a `Layout`."""

    DECLARED = "declared by gradvac.rows"
    REACHED = "reached by one loss alone"
    MEASURED = "measured every step"


Known = Layout | How


class _Learned(NamedTuple):
    """Where rows were found by outputs (position, number), and whose sizes that depends on."""

    layouts: dict[tuple[int, int], Layout]
    outputs: list[tuple[int, int]]
    views: list[int]  # sizes of their inputs
    regions: list[int]  # compiled


@dataclass
class Plan:
    """What is known of graphs with one signature."""

    partition: Partition
    names: Mapping[nn.Parameter, str]
    lowest: torch.dtype
    moved: set[int]
    lengths: Mapping[int, float]  # of tasks' gradients, when looked at where they are measured
    known: dict[tuple[int, int], Known] = field(default_factory=dict)  # junction, output -> how
    sizes: set[object] = field(default_factory=set)  # of batches for which it is known to hold
    unfinished: str | None = None  # why the next batch must be looked at too
    unreached: frozenset[int] = frozenset()  # positions that no gradient has come through so far
    proven: bool = False  # a step with it went well
    refusal: str | None = None  # why no step with it can go well
    tolerance: float = 0.0  # how much of what is measured may stay unexplained
    components: list[list[int]] | None = None  # that every junction contributes to
    learned: _Learned | None = None

    @property
    def measured(self) -> bool:
        """Whether owners are measured every step somewhere."""
        return How.MEASURED in self.known.values()

    def has_seen(self, present: Sequence[int]) -> bool:
        """Whether it is known how large the gradients of tasks are where they are measured."""
        return not self.measured or all(task in self.lengths for task in present)

    def smaller(self, present: Sequence[int]) -> list[list[bool]]:
        """Tasks that others may hide: those that are much smaller, and of these again.

        What is measured may stay unexplained up to a share of the largest gradient, which would be
        all of a small one. Such tasks are measured once more, without the larger ones.
        """
        lengths = [self.lengths.get(task, 0.0) for task in present]
        groups, limit = [], max(lengths)
        for length in sorted({*lengths} - {0.0}, reverse=True):
            if length * (100 if self.lowest.itemsize > 2 else 10) < limit:
                groups.append([0 < one <= length for one in lengths])
                limit = length
        # One that had no gradient so far may have any now.
        return groups + [
            [t == task for t in present] for task in present if not self.lengths.get(task)
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Those that such graphs reach, in the order of the model."""
        reached = {p for junction in self.partition.junctions for p in junction.parameters}
        return [parameter for parameter in self.names if parameter in reached]

    def holds_for(self, graph: Graph, num_rows: int | None) -> bool:
        """Whether rows lie as they were found to, in a graph of this signature and other sizes."""
        if self.learned is None:
            self.learned = self._learn(graph)
        layouts, outputs, views, regions = self.learned
        if num_rows is None or not layouts:
            return True
        shape, nodes = graph.shape, graph.nodes
        sizes = (
            num_rows,
            *[shape(position, number) for position, number in outputs],
            *[nodes[position]._saved_self_sym_sizes for position in views],
            *[graph.run(position).sizes for position in regions],
        )
        if sizes in self.sizes:
            return True
        followed = follow_losses(graph, self.partition.holds_rows, num_rows)
        for (position, number), layout in layouts.items():
            if followed[position].get(number, layout) != layout:
                return False
        if len(self.sizes) < _MOST_SIZES:
            self.sizes.add(sizes)
        return True

    def _learn(self, graph: Graph) -> _Learned:
        """What lies on the way from the losses to rows that were found."""
        junctions = self.partition.junctions
        known = {(junctions[n].position, output): how for (n, output), how in self.known.items()}
        layouts = {output: how for output, how in known.items() if isinstance(how, Layout)}
        found = {position for position, _ in layouts}
        on_the_way = [False] * len(graph.nodes)
        for position in range(len(graph.nodes)):
            inner = (child for child, _ in graph.children(position) if child >= 0)
            on_the_way[position] = position in found or any(on_the_way[c] for c in inner)
        passed = [position for position in self.partition.row_nodes if on_the_way[position]]
        views = [position for position in passed if graph.kind(position) in VIEWS]
        viewed = {graph.children(view)[0] for view in views}
        outputs = dict.fromkeys([*known, *((view, 0) for view in views)])
        regions = [position for position in passed if graph.run(position) is not None]
        return _Learned(layouts, [o for o in outputs if o not in viewed], views, regions)

    def describe(self) -> str:
        """How rows lie, in words."""
        count = Counter(
            str(how) if isinstance(how, Layout) else how.value for how in self.known.values()
        )
        return "; ".join(
            f"{what} ({number} of {len(self.known)} places)" for what, number in count.most_common()
        )

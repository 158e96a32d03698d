"""A plan: what is known of graphs of one structure, and for which sizes of batches it holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from gradvac.engine.graph import Graph, NotSeparable
from gradvac.engine.junctions import Partition
from gradvac.engine.layouts import VIEWS, Layout, Move, Moves, all_agree, follow_losses
from gradvac.engine.ownership import Key
from gradvac.engine.plain_junctions import PlainJunctions
from gradvac.engine.slices import ON_SLICES

_MOST_PROVEN = 4096


class How(Enum):
    """How the owners of an output gradient's entries are known, where it is not a `Layout`."""

    DECLARED = "declared by gradvac.rows"
    REACHED = "reached by one loss alone"
    MEASURED = "measured every step"


Ownership = Layout | How


class _Found(NamedTuple):
    """Where rows were found by outputs (position, number), and whose sizes that depends on."""

    layouts: dict[tuple[int, int], Layout]
    outputs: list[tuple[int, int]]
    views: list[int]  # sizes of their inputs
    slices: list[int]
    regions: list[int]  # compiled


@dataclass(eq=False)
class Plan:
    """What a probe found out about a graph, for all graphs of its structure.

    Attributes:
        partition: The junctions.
        names: Of the model's parameters.
        components: That every junction contributes to.
        owners: How the owners of every output of a junction are known.
        rowless: Positions that were assumed to hold rows and do not.
        moves: Where indices move rows to; checked in every graph.
        lowest: The narrowest dtype on the way.
        tolerance: How much of what is measured may stay unexplained.
        lengths: Of tasks' gradients, as of the last probe of any graph of the model.
        unreached: Positions that no gradient has come through so far.
        unfinished: Why the next batch must be probed too; None: it need not.
        is_proven: A pass with it went well, or those that it was put together from.
        refusal: Why no step with it can go well.
    """

    partition: Partition
    names: Mapping[nn.Parameter, str]
    components: list[list[int]]
    owners: Mapping[Key, Ownership]
    rowless: frozenset[int]
    moves: Sequence[Move]
    lowest: torch.dtype
    tolerance: float
    lengths: Mapping[int, float]
    unreached: frozenset[int]
    unfinished: str | None
    is_proven: bool = field(default=False, init=False)
    refusal: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.is_measured = How.MEASURED in self.owners.values()
        self._sizes: set[object] = set()  # of batches for which it is known to hold
        self._found: _Found | None = None
        self._plain: PlainJunctions | None = None

    @property
    def is_settled(self) -> bool:
        """Whether a step with it went well, and nothing is left to be seen in another one."""
        is_known = not self.is_measured and not self.unreached and self.unfinished is None
        return self.is_proven and is_known

    def succeed(self) -> None:
        """A pass with this plan went well."""
        self.is_proven = True

    def refuse(self, reason: str) -> NoReturn:
        """Raise, now and whenever the plan is to be used again."""
        self.refusal = reason
        raise NotSeparable(reason)

    def expire(self, reason: str) -> None:
        """Let the next batch be probed again."""
        self.unfinished = reason

    def has_seen(self, present: Sequence[int]) -> bool:
        """Whether it is known how large the gradients of tasks are where they are measured."""
        return not self.is_measured or all(task in self.lengths for task in present)

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

    def plain(self, graph: Graph) -> PlainJunctions:
        """The junctions of a plain kind."""
        if self._plain is None:
            self._plain = PlainJunctions(graph, self.partition.junctions)
        return self._plain

    def fits(self, graph: Graph, num_rows: int | None) -> bool:
        """Whether rows lie as they were found to, in a graph of this structure and other sizes.

        Where indices move rows is told to the graph.
        """
        if self._found is None:
            self._found = self._read(graph)
        layouts, outputs, views, slices, regions = self._found
        if num_rows is None or not layouts:
            return True
        shape, nodes = graph.shape, graph.nodes
        sizes = (
            num_rows,
            *[shape(position, number) for position, number in outputs],
            *[nodes[position]._saved_self_sym_sizes for position in views],
            *[graph.memory(position) for position in slices],
            *[graph.run(position).sizes for position in regions],
        )
        if sizes not in self._sizes:
            moves = Moves(self.moves)
            followed = follow_losses(graph, self.partition.holds_rows, num_rows, moves)
            for (position, number), layout in layouts.items():
                if followed[position].get(number, layout) != layout:
                    return False
            if len(self._sizes) < _MOST_PROVEN:
                self._sizes.add(sizes)
        return all_agree(graph, self.moves, num_rows)

    def _read(self, graph: Graph) -> _Found:
        """What lies on the way from the losses to rows that were found."""
        junctions = self.partition.junctions
        known = {(junctions[n].position, output): how for (n, output), how in self.owners.items()}
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
        slices = [position for position in passed if graph.names[position] in ON_SLICES]
        return _Found(layouts, [o for o in outputs if o not in viewed], views, slices, regions)

    def describe(self) -> str:
        """How rows lie, in words."""
        count = Counter(
            str(how) if isinstance(how, Layout) else how.value for how in self.owners.values()
        )
        return "; ".join(
            f"{what} ({number} of {len(self.owners)} places)"
            for what, number in count.most_common()
        )

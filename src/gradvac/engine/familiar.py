"""Graphs of another structure whose operations were all seen in graphs that were probed.

Layers that are skipped at random (layerdrop, stochastic depth) give nearly every step a structure
of its own, and a probe takes many passes. Where rows lie in such a graph follows from its
operations, as it does for batches of other sizes; probes of the schedule verify it as any other.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from gradvac.engine.graph import LEAF, Graph, check_readable, may_write
from gradvac.engine.junctions import Junction, Partition, find_junctions
from gradvac.engine.kernels import tolerance
from gradvac.engine.layouts import Layout, Moves, follow_losses
from gradvac.engine.ownership import Key
from gradvac.engine.plan import Plan
from gradvac.engine.probe import Subject

_MOST_UNPROVEN = 8


class _Seen(NamedTuple):
    """What a probe has seen, for whoever may rely on it once a step with its plan went well.

    Attributes:
        plan: The plan it led to.
        operations: With those that their inputs come from.
        held: Uses of parameters that hold rows.
        rowless: Uses that were assumed to hold rows, and do not.
    """

    plan: Plan
    operations: set[Hashable]
    held: set[Hashable]
    rowless: set[Hashable]


class FamiliarOperations:
    """What probes have seen of a model.

    Args:
        component_of: Parameter -> component.
    """

    def __init__(self, component_of: Mapping[nn.Parameter, int]) -> None:
        self._component_of = component_of
        self._operations: set[Hashable] = set()
        self._held: set[Hashable] = set()
        self._rowless: set[Hashable] = set()
        self._unproven: list[_Seen] = []

    def learn(self, subject: Subject, plan: Plan) -> None:
        """Take in what a probe found, if all of it followed from the operations."""
        graph, left = subject.graph, plan.rowless
        is_followed = all(isinstance(how, Layout) for how in plan.owners.values())
        if not is_followed or plan.unreached or plan.unfinished or not _is_plain(graph):
            return
        rowless: set[Hashable] = set()
        while left:  # those above were found when those below were known
            found = find_junctions(
                graph, plan.names.keys(), subject.num_rows_at, plan.rowless - left
            ).junctions
            too_early = [junction for junction in found if junction.position in left]
            if not too_early:
                return
            rowless.update(_use(graph, junction) for junction in too_early)
            left -= {junction.position for junction in too_early}
        held = {_use(graph, junction) for junction in plan.partition.junctions}
        seen = _Seen(plan, set(_operations(graph)), held, rowless)
        self._unproven = [*self._unproven[-_MOST_UNPROVEN:], seen]

    def _rely_on_proven(self) -> None:
        for seen in self._unproven:
            if seen.plan.is_proven:
                self._operations |= seen.operations
                self._held |= seen.held
                self._rowless |= seen.rowless
        self._unproven = [seen for seen in self._unproven if not seen.plan.is_proven]

    def plan(self, subject: Subject) -> Plan | None:
        """The plan of a graph that is made of what was seen; None for any other."""
        graph, num_rows = subject.graph, subject.num_rows
        self._rely_on_proven()
        is_other = num_rows is None or len(subject.losses.present) < 2 or subject.has_declared
        if is_other or not self._operations or not _is_plain(graph):
            return None
        if not self._operations.issuperset(_operations(graph)):
            return None
        check_readable(graph)
        partition, rowless = self._partition(subject)
        if partition is None:
            return None
        assert num_rows is not None
        moves = Moves()
        followed = follow_losses(graph, partition.holds_rows, num_rows, moves)
        owners: dict[Key, Layout] = {}
        for number, junction in enumerate(partition.junctions):
            for output in range(graph.num_outputs(junction.position)):
                layout = followed[junction.position].get(output)
                if layout is None:
                    return None
                owners[number, output] = layout
        components = ({self._component_of[p] for p in j.parameters} for j in partition.junctions)
        lowest = graph.lowest()
        plan = Plan(
            partition,
            subject.names,
            components=[sorted(found) for found in components],
            owners=owners,
            rowless=rowless,
            moves=moves.made,
            lowest=lowest,
            tolerance=tolerance(lowest),
            lengths={},
            unreached=frozenset(),
            unfinished=None,
        )
        plan.succeed()
        return plan

    def _partition(self, subject: Subject) -> tuple[Partition | None, frozenset[int]]:
        """The junctions, and what holds no rows; None where what was seen does not decide."""
        graph, rowless = subject.graph, frozenset[int]()
        while True:
            partition = find_junctions(graph, subject.names.keys(), subject.num_rows_at, rowless)
            uses = {j.position: _use(graph, j) for j in partition.junctions if j.assumed}
            too_early = {at for at, use in uses.items() if use in self._rowless - self._held}
            if partition.outside or partition.holds_no_rows:
                return None, rowless
            if not too_early:
                return (partition if self._held.issuperset(uses.values()) else None), rowless
            rowless |= too_early


def _is_plain(graph: Graph) -> bool:
    """Whether it has neither hooks nor functions of others, which may do anything."""
    return not graph.has_hooks and not any(map(may_write, graph.nodes))


def _operations(graph: Graph) -> Iterator[Hashable]:
    """Every operation with those that its inputs come from."""
    names = graph.names
    for position, name in enumerate(names):
        if name != LEAF:
            children = graph.children(position)
            yield name, *(names[child] if child >= 0 else "" for child, _ in children)


def _use(graph: Graph, junction: Junction) -> Hashable:
    return graph.names[junction.position], junction.parameters

"""Plans by shape of graph: made once, and verified now and then.

A plan is made once per signature and verified by passes whose start gradients carry codes: on the
first batches, now and then, and until every part of the graph was seen with a gradient. What moves
entries by what the data say (masks, routing, sorting) is not learned: it is measured every step.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from gradvac.gradients._graph import Graph
from gradvac.gradients._look import Look
from gradvac.gradients._losses import Losses
from gradvac.gradients._ownership import Layout
from gradvac.gradients._plan import Plan, Refused
from gradvac.gradients._rows import DeclaredRows

_MOST_KEPT = 256  # plans

Value = TypeVar("Value")


class Planner:
    """Makes and verifies plans.

    Args:
        names: Parameter -> name, of the model.
        tasks: Task names.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], tasks: Sequence[str]) -> None:
        self._names, self._tasks = names, tasks
        self._plans: dict[int, Plan] = {}
        self._refused: dict[int, str] = {}

    def knows(self, graph: Graph) -> bool:
        """Whether such a graph was seen before, without leaves that are not the model's."""
        plan = self._plans.get(graph.signature)
        return plan is not None and not plan.drawing.outside

    def plan(self, graph: Graph, losses: Losses, declared: DeclaredRows, *, look: bool) -> Plan:
        """The plan for a graph, verified if it is new, unfit for these shapes, or on request."""
        reason = self._refused.get(graph.signature)
        if reason is not None:
            raise Refused(reason)
        plan = self._plans.get(graph.signature)
        if plan is None or look or plan.unfinished or not _fits(plan, graph, losses):
            looked = Look(self._names, self._tasks, graph, losses, declared, plan)
            try:
                plan = looked.take()
            except Refused as refusal:
                _remember(self._refused, graph.signature, str(refusal))
                raise
            finally:
                looked.undo()
            _remember(self._plans, graph.signature, plan)
        return plan


def _remember(known: dict[int, Value], signature: int, value: Value) -> None:
    """Keep the latest: a model may make a new graph every step."""
    known.pop(signature, None)
    known[signature] = value
    if len(known) > _MOST_KEPT:
        del known[next(iter(known))]


def _fits(plan: Plan, graph: Graph, losses: Losses) -> bool:
    """Whether the layouts that were learned can be those of these shapes."""
    if losses.index is None:
        return True
    num_rows = len(losses.index)
    for (number, output), how in plan.known.items():
        if isinstance(how, Layout):
            shape = graph.shape(plan.drawing.junctions[number].position, output)
            if len(shape) <= how.dim or shape[how.dim] % num_rows:
                return False
            if shape[how.dim] > num_rows and (number, output) not in plan.expanded:
                return False
    return True

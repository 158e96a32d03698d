"""Plans by structure of graph: made by a probe, kept, and verified now and then."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gradvac.engine.familiar import FamiliarOperations
from gradvac.engine.graph import Graph, GraphSignature, NotSeparable
from gradvac.engine.losses import Losses
from gradvac.engine.plan import Plan
from gradvac.engine.probe import Subject, check_hooks, probe
from gradvac.engine.row_tasks import DeclaredRows, listen
from gradvac.utils.devices import is_captured
from gradvac.utils.hints import warn_caller

_MOST_KEPT = 256  # structures
_MOST_SIZES = 16  # of batches, for which a plan or a refusal is kept by structure


class Planner:
    """Makes plans for the graphs of a model, keeps them by structure, and verifies them.

    Args:
        names: Of the model's parameters.
        component_of: Parameter -> component.
        tasks: Task names.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        component_of: Mapping[nn.Parameter, int],
        tasks: Sequence[str],
    ) -> None:
        self._names, self._component_of, self._tasks = names, component_of, tasks
        self._known: dict[GraphSignature, _Known] = {}
        self._lengths: dict[int, float] = {}  # of tasks' gradients
        self._familiar = FamiliarOperations(component_of)
        self.identities = frozenset(map(id, names))  # by which graphs tell them apart
        listen(self)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """A copy has parameters of its own, and knows nothing of them."""
        return Planner, (self._names, self._component_of, self._tasks)

    def knows(self, graph: Graph) -> bool:
        """Whether such a graph was seen before, without leaves that are not the model's."""
        known = self._known.get(graph.signature)
        return known is not None and any(not plan.partition.outside for plan in known.plans)

    def plan(self, graph: Graph, losses: Losses, declared: DeclaredRows, *, verify: bool) -> Plan:
        """The plan for a graph, probed if it is new, does not hold for its sizes, or on request.

        A new one is not probed if all its operations are familiar.

        Raises:
            NotSeparable: Rows influence each other; or they did whenever such a graph was probed.
        """
        known = self._known.pop(graph.signature, None) or _Known([], {})
        self._known[graph.signature] = known  # the latest: a model may make a new one every step
        if len(self._known) > _MOST_KEPT:
            del self._known[next(iter(self._known))]
        if known.refusals:
            known.check(graph)
        num_rows = None if losses.index is None else len(losses.index)
        is_finished = not any(plan.unfinished for plan in known.plans)
        fitting = next((plan for plan in known.plans if plan.holds_for(graph, num_rows)), None)
        subject = Subject(graph, losses, declared, self._names, self._tasks)
        is_seen = fitting is not None and fitting.has_seen(losses.present)
        if fitting is not None and is_seen and is_finished and not verify:
            if fitting.refusal is not None:
                raise NotSeparable(fitting.refusal)
            if graph.has_hooks:  # others, or they do something else by now
                check_hooks(subject, fitting.partition)
            return fitting
        earlier = known.plans[0] if known.plans else None
        if earlier is None and not known.refusals and not verify:
            followed = self._familiar.plan(subject)
            if followed is not None:
                known.plans.append(followed)
                return followed
        if is_captured(losses.device):
            raise RuntimeError(
                "engine: the step that is being recorded is not built as those before it, which "
                "showed whose rows are whose, and nothing can be looked at now. Some models of "
                "transformers make an attention mask only while they are recorded: give them "
                'attention_mask=... with padding, or attn_implementation="eager".'
            )
        try:
            plan = probe(subject, self._component_of, earlier, self._lengths)
        except NotSeparable as refusal:
            known.refusals[graph.sizes()] = str(refusal)
            if len(known.refusals) > _MOST_KEPT:
                del known.refusals[next(iter(known.refusals))]
            raise
        except torch.OutOfMemoryError:
            if fitting is None or not is_finished:
                raise
            fitting.holds_for(graph, num_rows)  # finds again where indices move rows
            warn_caller(
                "engine: this step was to verify which rows belong to which task, but its passes, "
                "which keep the graph, ran out of memory; verification skipped."
            )
            return fitting
        self._familiar.learn(subject, plan)
        rest = [other for other in known.plans if not other.unfinished and other is not fitting]
        known.plans[:] = [plan, *rest][:_MOST_SIZES]
        return plan


class _Known(NamedTuple):
    """What is known of graphs of one structure: plans, the latest first; refusals by sizes."""

    plans: list[Plan]
    refusals: dict[int, str]

    def check(self, graph: Graph) -> None:
        """Raise if a batch of these sizes was refused, or every one of many sizes."""
        reason = self.refusals.get(graph.sizes())
        if reason is None and not self.plans and len(self.refusals) >= _MOST_SIZES:
            reason = next(iter(self.refusals.values()))
        if reason is not None:
            raise NotSeparable(reason)

"""Plans by structure of graph: made by a probe, kept, and verified now and then."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gradvac.engine.declared_rows import DeclaredRows, listen
from gradvac.engine.familiar import FamiliarOperations
from gradvac.engine.graph import Graph, GraphSignature, NotSeparable
from gradvac.engine.losses import Losses
from gradvac.engine.plan import How, Plan
from gradvac.engine.probe import Subject, check_hooks, probe
from gradvac.utils.devices import is_captured
from gradvac.utils.hints import warn_caller

_MOST_KEPT = 256  # structures, and refusals of each
_MOST_PLANS = 16  # of a structure; where all of so many sizes were refused, others are too


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
        if known.refusals and len(losses.present) > 1:  # rows of one task may influence each other
            known.check(graph)
        subject = Subject(graph, losses, declared, self._names, self._tasks)
        fitting = next((one for one in known.plans if _fits(one, subject)), None)
        is_seen = fitting is not None and fitting.has_seen(losses.present)
        if fitting is not None and is_seen and known.is_finished and not verify:
            if fitting.refusal is not None:
                raise NotSeparable(fitting.refusal)
            if graph.has_hooks:  # others, or they do something else by now
                check_hooks(subject, fitting.partition)
            return fitting
        if not known.plans and not known.refusals and not verify:
            followed = self._familiar.plan(subject)
            if followed is not None:
                known.plans.append(followed)
                return followed
        return self._probe(subject, known, fitting)

    def _probe(self, subject: Subject, known: "_Known", fitting: Plan | None) -> Plan:
        """A plan by a probe; the one that fits where that runs out of memory."""
        graph, losses = subject.graph, subject.losses
        if is_captured(losses.device):
            raise RuntimeError(
                "engine: the step that is being recorded is not built as those before it, which "
                "showed whose rows are whose, and nothing can be looked at now. Some models of "
                "transformers make an attention mask only while they are recorded: give them "
                'attention_mask=... with padding, or attn_implementation="eager".'
            )
        earlier = known.plans[0] if known.plans else None
        try:
            plan = probe(subject, self._component_of, earlier, self._lengths)
        except NotSeparable as refusal:
            known.refuse(graph, str(refusal))
            raise
        except torch.OutOfMemoryError:
            if fitting is None or not known.is_finished:
                raise
            fitting.fits(graph, subject.num_rows)  # finds again where indices move rows
            warn_caller(
                "engine: this step was to verify which rows belong to which task, but its passes, "
                "which keep the graph, ran out of memory; verification skipped."
            )
            return fitting
        self._familiar.learn(subject, plan)
        if fitting is not None:  # for batches of other sizes too
            fitting.expire("a later probe took its place")
        rest = [other for other in known.plans if not other.unfinished]
        known.plans[:] = [plan, *rest][:_MOST_PLANS]
        return plan


def _fits(plan: Plan, subject: Subject) -> bool:
    """Whether a plan holds for these sizes, and this forward declares what that one declared."""
    junctions = plan.partition.junctions
    by_rows = (number for (number, _), how in plan.owners.items() if how is How.DECLARED)
    is_declared = all(subject.declared_at(junctions[n].position) is not None for n in by_rows)
    return is_declared and plan.fits(subject.graph, subject.num_rows)


class _Known(NamedTuple):
    """What is known of graphs of one structure: plans, the latest first; refusals by sizes."""

    plans: list[Plan]
    refusals: dict[int, str]

    @property
    def is_finished(self) -> bool:
        """Whether no plan asks for another probe."""
        return not any(plan.unfinished for plan in self.plans)

    def refuse(self, graph: Graph, reason: str) -> None:
        """Batches of these sizes, from now on."""
        self.refusals[graph.sizes()] = reason
        if len(self.refusals) > _MOST_KEPT:
            del self.refusals[next(iter(self.refusals))]

    def check(self, graph: Graph) -> None:
        """Raise if a batch of these sizes was refused, or every one of many sizes."""
        reason = self.refusals.get(graph.sizes())
        if reason is None and not self.plans and len(self.refusals) >= _MOST_PLANS:
            reason = next(iter(self.refusals.values()))
        if reason is not None:
            raise NotSeparable(reason)

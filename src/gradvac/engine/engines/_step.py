"""The passes of one step over its graph."""

# T tasks

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.fold import Collector
from gradvac.engine.graph import Arrive, Refused, Watcher, refuse_hidden, run_pass
from gradvac.engine.kernels import sketch
from gradvac.engine.losses import Sums
from gradvac.engine.ownership import How, task_codes
from gradvac.engine.uses import Deliver, Former, Use
from gradvac.hints import some


class Again(Exception):  # noqa: N818
    """A part of the graph that no gradient had come through before woke up."""


class Step:
    """One backward: its graph and plan, and the passes over it.

    Args:
        former: Forms what the junctions of the graph contribute.
        keep_graph: Leave the graph whole if the step may still be refused.

    Attributes:
        is_careful: The step may still be refused: nothing may be written before its end.
        keeps_graph: The last pass leaves the graph whole, because it may be needed once more.
    """

    def __init__(self, former: Former, *, keep_graph: bool) -> None:
        self.former = former
        self.graph, self.plan, self.losses = former.graph, former.plan, former.losses
        self.is_careful = not self.plan.proven or self.plan.measured or bool(self.plan.asleep)
        self.keeps_graph = bool(self.plan.asleep) or (self.is_careful and keep_graph)

    def run(
        self,
        collector: Collector,
        done: Callable[[nn.Parameter], None] | None = None,
        *,
        again: bool = False,
    ) -> dict[Tensor, Tensor]:
        """The real pass; returns the plain gradients of leaves that are not the model's.

        Args:
            collector: Takes every use of a parameter.
            done: Called with a parameter when all its uses were delivered; by default, the
                collector is told when those of a component were.
            again: Another pass over this graph will follow.
        """
        plan, former, asleep, sums = self.plan, self.former, self.plan.asleep, Sums()
        junctions = plan.drawing.junctions
        groups: Sequence[Collection[Any]] = [junction.parameters for junction in junctions]
        complete: Callable[[Any], None] | None = done
        if complete is None:
            groups, complete = self._components(collector), collector.component_done
        left = dict(Counter([group for junction_groups in groups for group in junction_groups]))
        watcher = Watcher()
        deliver: Deliver = collector.deliver
        if self.losses.plain is not None:
            deliver = _counted(deliver, sums)

        def arrive(number: int, gradients: Sequence[Tensor | None]) -> None:
            if asleep and junctions[number].position in asleep:
                watcher.see(junctions[number].position, gradients)
            former.form(number, gradients, deliver)
            for group in groups[number]:
                left[group] -= 1
                if not left[group]:
                    complete(group)

        if plan.measured and not former.coded:
            former.codes = codes = task_codes(len(self.losses.present), former.is_coarse)
            every = map(codes.of_tasks, range(codes.num_passes))
            former.coded = [self._marks(self.losses.starts(weights)) for weights in every]
            for smaller in map(torch.tensor, plan.smaller(self.losses.present)):
                former.smaller.append((smaller, self._marks(self.losses.starts(smaller))))
        others: list[tuple[int, Arrive]] = []
        if asleep:
            shown = {junction.position for junction in junctions}
            others = [(position, watcher.see) for position in asleep - shown]
        with nullcontext() if plan.proven else refuse_hidden(plan.names, self.graph):
            gradients = run_pass(
                self.graph,
                plan.drawing,
                self.losses.starts(),
                arrive,
                others=others,
                after_run=self._of_one_task(),
                retain=again or self.keeps_graph,
            )
        if asleep and watcher.asleep() != asleep:  # what is supposed of these parts proves nothing
            plan.unfinished = "a part of it woke up"
            if self.losses.plain is None:  # else this batch was looked at, and it is rounding
                raise Again
        former.refuse_mixed_entries()
        pairs = zip(plan.drawing.leaves_outside(self.graph), gradients, strict=True)
        outside = {leaf: g for leaf, g in pairs if g is not None and leaf.requires_grad}
        if self.losses.plain is not None:
            for leaf, gradient in outside.items():
                sums.add(leaf, gradient)
            self._refuse_differing(self.losses.plain.differing(sums))
        plan.proven = plan.proven or not again
        return outside

    def _refuse_differing(self, wrong: Collection[Tensor]) -> None:
        """Refuse the graph if task gradients do not add up to the plain gradient."""
        if wrong:
            names = [name for p, name in self.plan.names.items() if any(p is w for w in wrong)]
            self.plan.refusal = (
                f"engine: the task gradients of {some(names)} do not add up to the plain gradient, "
                "as with a hook between a parameter and its use, or with a function whose backward "
                'can run only once. Use engine="per_task".'
            )
            raise Refused(self.plan.refusal)

    def _of_one_task(self) -> set[int]:
        """Python functions whose own run gives all that is asked of them.

        A second call would do it too, but some write over what they saved.
        """
        is_alone, known = len(self.losses.present) == 1, self.plan.known
        functions = self.plan.drawing.functions
        return {n for n in functions if is_alone or known.get((n, 0)) is How.REACHED}

    def _components(self, collector: Collector) -> list[list[int]]:
        """The components that every junction contributes to."""
        if self.plan.components is None:
            component_of = collector.component_of
            junctions = self.plan.drawing.junctions
            every = ({component_of[p] for p in junction.parameters} for junction in junctions)
            self.plan.components = [sorted(components) for components in every]
        return self.plan.components

    def _marks(self, starts: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
        """Of a pass with a code per task, at the places where owners depend on the data."""
        marks: dict[tuple[int, int], Tensor] = {}

        def see(number: int, gradients: Sequence[Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                is_measured = self.plan.known.get((number, output)) is How.MEASURED
                if gradient is not None and is_measured:
                    marks[number, output] = sketch(gradient)

        run_pass(self.graph, self.plan.drawing, starts, see, retain=True)
        return marks


def _counted(deliver: Deliver, sums: Sums) -> Deliver:
    """Add up what is delivered."""

    def count(parameter: nn.Parameter, use: Use) -> None:
        sums.add(parameter, use.plain())
        deliver(parameter, use)

    return count

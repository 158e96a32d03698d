"""The passes of one step over its graph."""

# T tasks

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.gradients.fold import Collector
from gradvac.gradients.graph import Arrive, Refused, Watcher, refuse_hidden, run_pass
from gradvac.gradients.kernels import mark
from gradvac.gradients.losses import PlainGradient, Sums
from gradvac.gradients.ownership import How, task_codes
from gradvac.gradients.uses import Deliver, Former, Table, Use
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
        outside: The leaves that are not the model's, and their plain gradients, once it has run.
        slow: Places that were computed task by task.
    """

    def __init__(self, former: Former, *, keep_graph: bool) -> None:
        self._former, self._keep_graph = former, keep_graph
        self.graph, self.plan, self.losses = former.graph, former.plan, former.losses
        self.is_careful = not self.plan.proven or self.plan.measured or bool(self.plan.asleep)
        self.outside: list[tuple[Tensor, Tensor]] = []
        self.slow: list[str] = former.slow

    def run(
        self,
        collector: Collector,
        done: Callable[[nn.Parameter], None] | None = None,
        *,
        again: bool = False,
    ) -> None:
        """The real pass.

        Args:
            collector: Takes every use of a parameter.
            done: Called with a parameter when all its uses were delivered; by default, the
                collector is told when those of a component were.
            again: Another pass over this graph will follow.
        """
        drawing, former, asleep = self.plan.drawing, self._former, self.plan.asleep
        groups: Sequence[Collection[Any]] = [junction.parameters for junction in drawing.junctions]
        complete: Callable[[Any], None] | None = done
        if complete is None:
            groups, complete = self._components(collector), collector.component_done
        left = dict(Counter([group for junction_groups in groups for group in junction_groups]))
        watcher = Watcher()
        deliver = (
            collector.deliver if self.losses.plain is None else self._counted(collector.deliver)
        )

        def arrive(number: int, gradients: Sequence[Tensor | None]) -> None:
            if asleep and drawing.junctions[number].position in asleep:
                watcher.see(drawing.junctions[number].position, gradients)
            former.form(number, gradients, deliver)
            for group in groups[number]:
                left[group] -= 1
                if not left[group]:
                    complete(group)

        if self.plan.measured and not former.coded:
            self._measure()
        others: list[tuple[int, Arrive]] = []
        if asleep:
            junction_positions = {junction.position for junction in drawing.junctions}
            others = [(position, watcher.see) for position in asleep - junction_positions]
        retain = again or bool(asleep) or (self.is_careful and self._keep_graph)
        is_new = not self.plan.proven
        with refuse_hidden(self.plan.names, self.graph) if is_new else nullcontext():
            gradients = run_pass(
                self.graph,
                drawing,
                self.losses.starts(),
                arrive,
                others=others,
                after_run=self._of_one_task(),
                retain=retain,
            )
        former.refuse_mixed_entries()
        if asleep and watcher.asleep() != asleep:
            self.plan.unfinished = "a part of it woke up"
            raise Again
        pairs = zip(drawing.leaves_outside(self.graph), gradients, strict=True)
        outside = [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]
        if self.losses.plain is not None:
            self._compare(self.losses.plain, outside)
        if not again:
            self.outside = outside
            self.plan.proven = True

    def _counted(self, deliver: Deliver) -> Deliver:
        """Add up what is delivered."""
        self._sums = Sums()

        def count(parameter: nn.Parameter, use: Use) -> None:
            ones = torch.ones(use.segments.num_tasks, device=self.losses.device)
            gradient = use.plain() if isinstance(use, Table) else use.weighted(ones)
            self._sums.add(parameter, gradient)
            deliver(parameter, use)

        return count

    def _compare(self, plain: PlainGradient, outside: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse the graph if task gradients do not add up to the plain gradient."""
        for leaf, gradient in outside:
            self._sums.add(leaf, gradient)
        wrong = plain.differing(self._sums)
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
        functions = self.plan.functions
        return {n for n in functions if is_alone or known.get((n, 0)) is How.REACHED}

    def _components(self, collector: Collector) -> list[list[int]]:
        """The components that every junction contributes to."""
        if self.plan.components is None:
            component_of = collector.component_of
            junctions = self.plan.drawing.junctions
            every = ({component_of[p] for p in junction.parameters} for junction in junctions)
            self.plan.components = [sorted(components) for components in every]
        return self.plan.components

    def _measure(self) -> None:
        """Passes with a code per task, for places where owners depend on the data."""
        places = {key for key, how in self.plan.known.items() if how is How.MEASURED}
        codes = task_codes(len(self.losses.present), self._former.is_coarse)
        for number in range(codes.num_passes):
            marks: dict[tuple[int, int], Tensor] = {}

            def see(
                junction: int,
                gradients: Sequence[Tensor | None],
                marks: dict[tuple[int, int], Tensor] = marks,
            ) -> None:
                for output, gradient in enumerate(gradients):
                    if gradient is not None and (junction, output) in places:
                        marks[junction, output] = mark(gradient, columns_too=False).entries

            starts = self.losses.starts(codes.of_tasks(number))
            run_pass(self.graph, self.plan.drawing, starts, see, retain=True)
            self._former.coded.append(marks)
        self._former.codes = codes

    def close(self) -> None:
        """Let go of the graph."""
        self._former.close()

"""The one_backward engine: vaccination for the price of plain training.

The passes of one step over its graph.

The one_backward engine: vaccination for the price of plain training.

The model and its forward are left alone. `backward` reads the ordinary autograd graph, runs one
backward over it *without* parameter gradients, and forms task gradients at the *junctions*, where
parameters meet the rows of the batch. When all uses of a component's parameters have arrived, their
Gram matrix is taken, weighed, the update written to `.grad`, and the task gradients freed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.builder import Deliver, GradientBuilder
from gradvac.engine.contributions import Contribution
from gradvac.engine.graph import Graph, release
from gradvac.engine.kernels import Segments
from gradvac.engine.kernels import mark as sketch
from gradvac.engine.losses import GradientSketches, Losses, is_due
from gradvac.engine.ownership import task_codes
from gradvac.engine.passes import (
    Arrive,
    NotSeparable,
    ReachedNodes,
    check_hidden_backwards,
    check_parameters,
    run_pass,
)
from gradvac.engine.per_task import Expect, Receive
from gradvac.engine.plan import How, Plan
from gradvac.engine.probe import Planner
from gradvac.engine.row_tasks import DeclaredRows
from gradvac.engine.task_gradients import Collector, Weigh, Write, add_to_grad
from gradvac.gram import working_dtype
from gradvac.hints import some, warn_caller

# T tasks


class PlanOutdated(Exception):  # noqa: N818
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

    def __init__(self, builder: GradientBuilder, *, keep_graph: bool) -> None:
        self.builder = builder
        self.graph, self.plan, self.losses = builder.graph, builder.plan, builder.losses
        self.is_careful = not self.plan.proven or self.plan.measured or bool(self.plan.unreached)
        self.keeps_graph = bool(self.plan.unreached) or (self.is_careful and keep_graph)

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
        plan, builder, unreached, sums = (
            self.plan,
            self.builder,
            self.plan.unreached,
            GradientSketches(),
        )
        junctions = plan.partition.junctions
        groups: Sequence[Collection[Any]] = [junction.parameters for junction in junctions]
        complete: Callable[[Any], None] | None = done
        if complete is None:
            groups, complete = self._components(collector), collector.component_done
        left = dict(Counter([group for junction_groups in groups for group in junction_groups]))
        reached_nodes = ReachedNodes()
        deliver: Deliver = collector.deliver
        if self.losses.joint is not None:
            deliver = _counted(deliver, sums)

        def arrive(number: int, gradients: Sequence[Tensor | None]) -> None:
            if unreached and junctions[number].position in unreached:
                reached_nodes.see(junctions[number].position, gradients)
            builder.build(number, gradients, deliver)
            for group in groups[number]:
                left[group] -= 1
                if not left[group]:
                    complete(group)

        if plan.measured and not builder.coded:
            builder.codes = codes = task_codes(len(self.losses.present), builder.is_coarse)
            every = map(codes.of_tasks, range(codes.num_passes))
            builder.coded = [self._marks(self.losses.starts(weights)) for weights in every]
            for smaller in map(torch.tensor, plan.smaller(self.losses.present)):
                builder.smaller.append((smaller, self._marks(self.losses.starts(smaller))))
        others: list[tuple[int, Arrive]] = []
        if unreached:
            shown = {junction.position for junction in junctions}
            others = [(position, reached_nodes.see) for position in unreached - shown]
        with nullcontext() if plan.proven else check_hidden_backwards(plan.names, self.graph):
            gradients = run_pass(
                self.graph,
                plan.partition,
                self.losses.starts(),
                arrive,
                others=others,
                after_run=self._of_one_task(),
                retain=again or self.keeps_graph,
            )
        if (
            unreached and reached_nodes.unreached() != unreached
        ):  # what is supposed of these parts proves nothing
            plan.unfinished = "a part of it woke up"
            if self.losses.joint is None:  # else this batch was looked at, and it is rounding
                raise PlanOutdated
        builder.check_mixed_entries()
        pairs = zip(plan.partition.leaves_outside(self.graph), gradients, strict=True)
        outside = {leaf: g for leaf, g in pairs if g is not None and leaf.requires_grad}
        if self.losses.joint is not None:
            for leaf, gradient in outside.items():
                sums.add(leaf, gradient)
            self._check_sum(self.losses.joint.differing(sums))
        plan.proven = plan.proven or not again
        return outside

    def _check_sum(self, wrong: Collection[Tensor]) -> None:
        """Refuse the graph if task gradients do not add up to the plain gradient."""
        if wrong:
            names = [name for p, name in self.plan.names.items() if any(p is w for w in wrong)]
            self.plan.refusal = (
                f"engine: the task gradients of {some(names)} do not add up to the plain gradient, "
                "as with a hook between a parameter and its use, or with a function whose backward "
                'can run only once. Use engine="per_task".'
            )
            raise NotSeparable(self.plan.refusal)

    def _of_one_task(self) -> set[int]:
        """Python functions whose own run gives all that is asked of them.

        A second call would do it too, but some write over what they saved.
        """
        is_alone, known = len(self.losses.present) == 1, self.plan.known
        functions = self.plan.partition.functions
        return {n for n in functions if is_alone or known.get((n, 0)) is How.REACHED}

    def _components(self, collector: Collector) -> list[list[int]]:
        """The components that every junction contributes to."""
        if self.plan.components is None:
            component_of = collector.component_of
            junctions = self.plan.partition.junctions
            every = ({component_of[p] for p in junction.parameters} for junction in junctions)
            self.plan.components = [sorted(components) for components in every]
        return self.plan.components

    def _marks(self, starts: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
        """Of a pass with a code per task, at the places where owners depend on the data."""
        sketches: dict[tuple[int, int], Tensor] = {}

        def see(number: int, gradients: Sequence[Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                is_measured = self.plan.known.get((number, output)) is How.MEASURED
                if gradient is not None and is_measured:
                    sketches[number, output] = sketch(gradient)

        run_pass(self.graph, self.plan.partition, starts, see, retain=True)
        return sketches


def _counted(deliver: Deliver, sums: GradientSketches) -> Deliver:
    """Add up what is delivered."""

    def count(parameter: nn.Parameter, contribution: Contribution) -> None:
        sums.add(parameter, contribution.total())
        deliver(parameter, contribution)

    return count


# K components, T tasks


class OneBackward:
    """One backward for all tasks.

    Args:
        model: The model; it is only read.
        tasks: Task names.
        collector: Of its components.
        recompute: Two backward passes with the memory of plain training, for components that
            cannot stream (whole_model, enc_dec): the first takes Gram matrices only.
        check: Verify how rows lie on the first batches and now and then, not only where it is new.
        keep_graph: Leave the graph intact where a step may still be refused.
    """

    name = "one_backward"

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[str],
        collector: Collector,
        *,
        recompute: bool,
        check: bool,
        keep_graph: bool,
    ) -> None:
        self._model, self._tasks, self._recompute = model, tuple(tasks), recompute
        self._check, self._keep_graph, self.collector = check, keep_graph, collector
        self._names = {p: n for n, p in model.named_parameters() if p.requires_grad}
        self._planner = Planner(self._names, self._tasks)
        self._steps = 0
        self._last_rows: tuple[Tensor, object, Segments] | None = None
        self._announced: set[str] = set()
        self.plan: Plan | None = None

    def backward(self, losses: Losses, weigh: Weigh) -> None:
        """Differentiate all tasks at once and add the updates to `.grad`.

        Raises:
            Refused: The losses cannot be separated; `.grad` is as it was.
            Again: What was learned of this graph no longer holds; call once more.
        """
        kept: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        with self._step(losses) as step:
            # A step that may still be refused writes at its end.
            write = (lambda *update: kept.append(update)) if step.is_careful else add_to_grad
            try:
                if self._recompute:
                    outside = self._run_twice(step, weigh, write)
                else:
                    self.collector.open(weigh, write)
                    outside = step.run(self.collector)
                    self.collector.close()
            finally:
                self.collector.clear()
        for update in [*kept, (list(outside), list(outside.values()))]:
            add_to_grad(*update)

    def task_gradients(
        self, losses: Losses, receive: Receive, expect: Expect | None = None
    ) -> dict[Tensor, Tensor]:
        """Show every parameter's task gradients.

        Args:
            losses: Of this micro-batch.
            receive: Takes them at the end.
            expect: Is told before which parameters may come; then each comes as soon as it is
                complete, unless the step may still be refused.

        Returns:
            The plain gradients of leaves that are not the model's.
        """
        collector = Collector(self.collector.members)

        def show(parameter: nn.Parameter) -> None:
            buffer = collector.take(parameter)
            if buffer is not None:
                receive(parameter, dict(zip(losses.present, buffer.whole(), strict=True)))

        with self._step(losses) as step:
            collector.open(None, None)
            is_early = expect is not None and not step.is_careful
            if expect is not None and is_early:
                expect(step.plan.parameters())
            outside = step.run(collector, show if is_early else None)
            collector.build_waiting()
        if expect is not None and not is_early:
            expect(collector.collected)
        for parameter in collector.collected:
            show(parameter)
        return outside

    @contextmanager
    def _step(self, losses: Losses) -> Iterator[Step]:
        """A step, which lets another engine go on after an error while the graph is still whole."""
        graph = self._read(losses)
        step = None
        try:
            step = self._begin(graph, losses)
            yield step
            self._announce(step.builder.slow)
            if step.keeps_graph:  # a loop that still holds the losses would hold it all
                for node in graph.nodes:
                    release(node)
        except (NotSeparable, PlanOutdated, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # What cannot be recorded is not recorded in another engine instead, which would be
            # slow for good: whoever records runs a step as it is written, and learns of the error.
            is_whole = step is None or step.is_careful
            if not self._keep_graph or not is_whole or _is_captured(losses.device):
                raise
            raise NotSeparable(
                f"engine: one_backward met {type(error).__name__}: {error}"
            ) from error
        finally:
            if step is not None:
                step.builder.close()

    def describe(self) -> str:
        """Where rows were found, in words."""
        return "no batch so far" if self.plan is None else self.plan.describe()

    def _read(self, losses: Losses) -> Graph:
        graph = Graph(losses.roots, self._planner.identities, settings=losses.index is None)
        if not self._planner.knows(graph):
            check_parameters(self._model, self._names, graph)
        graph.check_compiled()
        return graph

    def _begin(self, graph: Graph, losses: Losses) -> Step:
        declared = DeclaredRows()
        self._steps += 1
        look = self._check and len(losses.present) > 1 and is_due(self._steps)
        look = look and not _is_captured(losses.device)
        plan = self._planner.plan(graph, losses, declared, look=look)
        self.plan = plan
        rows = None if losses.index is None else self._rows_of_losses(losses, losses.index)
        builder = GradientBuilder(graph, plan, losses, rows, declared, self._tasks)
        return Step(builder, keep_graph=self._keep_graph)

    def _rows_of_losses(self, losses: Losses, index: Tensor) -> Segments:
        num_tasks, device = len(losses.present), losses.device
        if _is_captured(losses.device):  # what a graph being recorded makes has no values yet
            return Segments(index, num_tasks, device)
        key = (num_tasks, device, index.device)
        if self._last_rows is not None and index.device.type == "cpu":
            last_index, last_key, segments = self._last_rows  # batches are often laid out alike
            if last_key == key and torch.equal(last_index, index):
                return segments
        segments = Segments(index, num_tasks, device)
        self._last_rows = (index, key, segments)
        return segments

    def _run_twice(self, step: Step, weigh: Weigh, write: Write) -> dict[Tensor, Tensor]:
        """Gram matrices first, one parameter in memory at a time; then the updates, likewise."""
        members, component_of = self.collector.members, self.collector.component_of
        device, num_tasks = step.losses.device, len(step.losses.present)
        shape = (len(members), num_tasks, num_tasks)
        grams = torch.zeros(shape, dtype=working_dtype(device), device=device)
        weights: Tensor | None = None

        def done(parameter: nn.Parameter) -> None:
            buffer, component = collector.take(parameter), component_of[parameter]
            if buffer is not None and weights is None:
                grams[component] += buffer.gram()
            elif buffer is not None and weights is not None:
                write([parameter], [buffer.combine(weights[component])])

        collector = Collector(members, table_bytes=self.collector.table_bytes)
        step.run(collector, done, again=True)
        weights = weigh(range(len(members)), grams)
        return step.run(collector, done)

    def _announce(self, slow: Sequence[str]) -> None:
        """Say once which places are computed task by task."""
        new = [place for place in slow if place not in self._announced]
        self._announced |= set(new)
        if new:
            warn_caller(
                f"engine: {len(new)} place(s) have no fast path and are computed task by task, "
                f"which is exact but slower: {some(new)}."
            )


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: there is no waiting for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

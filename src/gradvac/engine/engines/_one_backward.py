"""The one_backward engine: vaccination for the price of plain training.

The model and its forward are left alone. `backward` reads the ordinary autograd graph, runs one
backward over it *without* parameter gradients, and forms task gradients at the *junctions*, where
parameters meet the rows of the batch. When all uses of a component's parameters have arrived, their
Gram matrix is taken, weighed, the update written to `.grad`, and the task gradients freed.
"""

# K components, T tasks

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradvac.engine.engines._per_task import Expect, Receive
from gradvac.engine.engines._step import Again, Step
from gradvac.engine.fold import Collector, Weigh, Write, add_to_grad
from gradvac.engine.graph import Graph, Refused, refuse_changed, release
from gradvac.engine.kernels import Segments
from gradvac.engine.losses import DeclaredRows, Losses, is_due
from gradvac.engine.ownership import Plan, Planner
from gradvac.engine.uses import Former
from gradvac.gram import working_dtype
from gradvac.hints import some, warn_caller


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
            collector.form_waiting()
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
            self._announce(step.former.slow)
            if step.keeps_graph:  # a loop that still holds the losses would hold it all
                for node in graph.nodes:
                    release(node)
        except (Refused, Again, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # What cannot be recorded is not recorded in another engine instead, which would be
            # slow for good: whoever records runs a step as it is written, and learns of the error.
            is_whole = step is None or step.is_careful
            if not self._keep_graph or not is_whole or _is_captured(losses.device):
                raise
            raise Refused(f"engine: one_backward met {type(error).__name__}: {error}") from error
        finally:
            if step is not None:
                step.former.close()

    def describe(self) -> str:
        """Where rows were found, in words."""
        return "no batch so far" if self.plan is None else self.plan.describe()

    def _read(self, losses: Losses) -> Graph:
        graph = Graph(losses.roots, self._planner.identities, settings=losses.index is None)
        if not self._planner.knows(graph):
            refuse_changed(self._model, self._names, graph)
        graph.refuse_compiled_too_early()
        return graph

    def _begin(self, graph: Graph, losses: Losses) -> Step:
        declared = DeclaredRows()
        self._steps += 1
        look = self._check and len(losses.present) > 1 and is_due(self._steps)
        look = look and not _is_captured(losses.device)
        plan = self._planner.plan(graph, losses, declared, look=look)
        self.plan = plan
        rows = None if losses.index is None else self._rows_of_losses(losses, losses.index)
        former = Former(graph, plan, losses, rows, declared, self._tasks)
        return Step(former, keep_graph=self._keep_graph)

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

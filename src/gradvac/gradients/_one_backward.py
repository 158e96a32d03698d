"""The one_backward engine: vaccination for the price of plain training.

The model and its forward are left alone. `backward` reads the ordinary autograd graph, runs one
backward over it *without* parameter gradients, and forms task gradients at the junctions
(`_junctions.py`), where parameters meet the rows of the batch. When all uses of a component's
parameters have arrived, their Gram matrix is taken, weighed, the update written to `.grad`, and the
task gradients freed.
"""

# K components, T tasks

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradvac.gradients._buffers import Chunked
from gradvac.gradients._collector import Collector, Write
from gradvac.gradients._components import Components, refuse_changed
from gradvac.gradients._forming import Former
from gradvac.gradients._graph import Graph
from gradvac.gradients._kernels import gram
from gradvac.gradients._losses import Losses
from gradvac.gradients._metric import Metric
from gradvac.gradients._plan import Plan, Refused
from gradvac.gradients._planning import Planner
from gradvac.gradients._rows import DeclaredRows
from gradvac.gradients._segments import Segments
from gradvac.gradients._step import Again, Step, WeightedSums
from gradvac.gradients._update import Weigh, add_to_grad
from gradvac.indices import index_on

Deliver = Callable[[nn.Parameter, Tensor], None]
"""Takes a parameter and its task gradients `[T, *shape]`."""
Expect = Callable[[Iterable[nn.Parameter]], None]


class OneBackward:
    """One backward for all tasks.

    Args:
        model: The model; it is only read.
        components: Its components.
        tasks: Task names.
        recompute: Two backward passes with the memory of plain training, for components that
            cannot stream (whole_model, enc_dec): the first takes Gram matrices only.
        check: Verify how rows lie on the first batches and now and then, not only where it is new.
        keep_graph: Leave the graph intact where a step may still be refused.
        stream_bytes: See `Collector`.
        table_bytes: See `Collector`.
        metric: See `Collector`; not with `recompute`.
    """

    name = "one_backward"

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        tasks: Sequence[str],
        *,
        recompute: bool = False,
        check: bool = True,
        keep_graph: bool = False,
        stream_bytes: int = 1 << 28,
        table_bytes: int = 1 << 32,
        metric: Metric | None = None,
    ) -> None:
        assert metric is None or not recompute
        self._model, self._tasks, self._recompute = model, tuple(tasks), recompute
        self._check, self._keep_graph = check, keep_graph
        parameters = dict(model.named_parameters())
        members = [[parameters[p] for p in names] for names in components.values()]
        self._names = {p: n for n, p in parameters.items() if p.requires_grad}
        self.collector = Collector(
            members, stream_bytes=stream_bytes, table_bytes=table_bytes, metric=metric
        )
        self._planner = Planner(self._names, self._tasks)
        self._steps = 0
        self._everyone: tuple[int, ...] = ()  # order of the tasks while accumulating
        self._outside: dict[Tensor, Tensor] = {}  # plain gradients of leaves that are not ours
        self._last_rows: tuple[Tensor, object, Segments] | None = None
        self._announced: set[str] = set()
        self.plan: Plan | None = None

    # -- the three things it does --------------------------------------------------------------

    def backward(self, losses: Losses, weigh: Weigh, *, present: Sequence[int]) -> None:
        """Differentiate all tasks at once and add the updates to `.grad`.

        Raises:
            Refused: The losses cannot be separated; `.grad` is as it was.
            Again: What was learned of this graph no longer holds; call once more.
        """
        everyone = self._everyone or tuple(present)
        if everyone != tuple(present):
            weigh = _for_some(weigh, [everyone.index(task) for task in present])
        graph = self._read(losses)
        with self._giving_way():
            step = self._begin(graph, losses, everyone)
        kept: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        # A step that may still be refused writes at its end.
        write = (lambda *update: kept.append(update)) if step.is_careful else add_to_grad
        try:
            if self._everyone:
                with self._giving_way(step.is_careful):
                    self._add_to_accumulated(step)
                self.collector.open(weigh, write)
                self.collector.close()
            else:
                with self._giving_way(step.is_careful):
                    self._run_whole(step, weigh, write)
        finally:
            step.close()
            if not self._everyone:
                self.collector.clear()
        outside = self._outside
        self.discard()
        for update in kept:
            add_to_grad(*update)
        add_to_grad(list(outside), list(outside.values()))

    def _run_whole(self, step: Step, weigh: Weigh, write: Write) -> None:
        if self._recompute:
            weights = weigh(range(len(self.collector.members)), self._grams(step))
            self._add_weighted(step, weights, write)
        else:
            self.collector.open(weigh, write)
            step.run(self.collector)
            self.collector.close()
        self._keep_outside(step)

    @contextmanager
    def _giving_way(self, is_careful: bool = True) -> Iterator[None]:
        """Let another engine go on after an error, if there is one and the graph is still whole."""
        try:
            yield
        except (Refused, Again, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not (self._keep_graph and is_careful):
                raise
            raise Refused(f"engine: one_backward met {type(error).__name__}: {error}") from error

    def accumulate(self, losses: Losses) -> None:
        """Add a micro-batch to the stored task gradients: `[T, P]` for all tasks and parameters."""
        if self._recompute:
            raise ValueError(
                "accumulate: recompute=True keeps no task gradients to add to; leave out one of "
                'the two, or use engine="per_task".'
            )
        rest = set(range(len(self._tasks))) - set(losses.present)
        everyone = (*losses.present, *sorted(rest, key=self._tasks.__getitem__))
        graph = self._read(losses)
        with self._giving_way():
            step = self._begin(graph, losses, self._everyone or everyone)
        try:
            with self._giving_way(step.is_careful):
                self._add_to_accumulated(step)
        finally:
            step.close()
        self._everyone = self._everyone or everyone

    def _add_to_accumulated(self, step: Step) -> None:
        """Add to what is stored; a pass that is refused leaves it as it was."""
        collector = self.collector
        kept = None
        if step.is_careful and self._everyone:
            kept = {p: buffer.copy() for p, buffer in collector.buffers.items()}
        collector.open(None, None)
        try:
            step.run(collector)
            collector.form_waiting()
        except BaseException:
            if kept is None:
                self.discard()
            else:
                collector.restore(kept)
            raise
        self._keep_outside(step)

    def hand_over(self) -> Iterator[tuple[Tensor, int, Tensor]]:
        """What was accumulated, as (leaf, task, gradient), for another engine to go on with."""
        for parameter in self._names:
            buffer = self.collector.take(parameter)
            if buffer is not None:
                for task, gradient in zip(self._everyone, buffer.whole(), strict=True):
                    yield parameter, task, gradient
        for leaf, gradient in self._outside.items():
            yield leaf, self._everyone[0], gradient
        self.discard()

    def task_gradients(
        self, losses: Losses, deliver: Deliver, expect: Expect | None = None
    ) -> dict[Tensor, Tensor]:
        """Show every parameter's task gradients, in the order of `losses.present`.

        Args:
            losses: Of this micro-batch.
            deliver: Takes them, each as soon as it is complete.
            expect: Is told before which parameters may come; then nothing is delivered by a step
                that may still be refused.

        Returns:
            The plain gradients of leaves that are not the model's.
        """
        graph = self._read(losses)
        with self._giving_way():
            step = self._begin(graph, losses, losses.present)
        collector = Collector(self.collector.members)
        kept: list[tuple[nn.Parameter, Tensor]] = []
        waits = expect is not None and step.is_careful
        if expect is not None and not waits:
            expect(step.plan.parameters())

        def show(parameter: nn.Parameter) -> None:
            buffer = collector.take(parameter)
            if buffer is not None and waits:
                kept.append((parameter, buffer.whole()))
            elif buffer is not None:
                deliver(parameter, buffer.whole())

        try:
            with self._giving_way(step.is_careful):
                step.run(collector, show)
            if expect is not None and waits:
                expect([parameter for parameter, _ in kept])
            for parameter, gradients in kept:
                deliver(parameter, gradients)
            return dict(step.outside)
        finally:
            step.close()

    def discard(self) -> None:
        """Forget what was accumulated."""
        self.collector.clear()
        self._everyone, self._outside = (), {}

    @property
    def has_accumulated(self) -> bool:
        """Whether task gradients of earlier micro-batches are stored."""
        return bool(self._everyone)

    def describe(self) -> str:
        """Where rows were found, in words."""
        return "no batch so far" if self.plan is None else self.plan.describe()

    # -- how -----------------------------------------------------------------------------------

    def _read(self, losses: Losses) -> Graph:
        graph = Graph(losses.roots(), self._planner.identities, settings=losses.index is None)
        if not self._planner.knows(graph):
            refuse_changed(self._model, self._names, graph)
        graph.refuse_compiled_too_early()
        return graph

    def _begin(self, graph: Graph, losses: Losses, present: tuple[int, ...]) -> Step:
        declared = DeclaredRows()
        self._steps += 1
        look = self._check and len(losses.present) > 1 and _is_due(self._steps)
        look = look and not _is_captured(losses.device)
        plan = self._planner.plan(graph, losses, declared, look=look)
        self.plan = plan
        rows = None if losses.index is None else self._rows_of_losses(losses, present)
        former = Former(graph, plan, losses, rows, declared, self._tasks, present)
        return Step(former, keep_graph=self._keep_graph)

    def _rows_of_losses(self, losses: Losses, present: tuple[int, ...]) -> Segments:
        assert losses.index is not None
        index = losses.index
        if present != losses.present:
            moved = [present.index(task) for task in losses.present]
            index = index_on(moved, index.device)[index]
        if _is_captured(losses.device):  # what a graph being recorded makes has no values yet
            return Segments(index, len(present), losses.device)
        key = (len(present), losses.device, index.device)
        if self._last_rows is not None and index.device.type == "cpu":
            last_index, last_key, segments = self._last_rows  # batches are often laid out alike
            if last_key == key and torch.equal(last_index, index):
                return segments
        segments = Segments(index, len(present), losses.device)
        self._last_rows = (index, key, segments)
        return segments

    def _grams(self, step: Step) -> Tensor:
        """Gram matrices of all components `[K, T, T]`, one parameter in memory at a time."""
        collector = Collector(self.collector.members, table_bytes=self.collector.table_bytes)
        grams: dict[int, Tensor] = {}

        def add(parameter: nn.Parameter) -> None:
            buffer = collector.take(parameter)
            if buffer is not None:
                component = self.collector.component_of[parameter]
                matrix = buffer.gram() if isinstance(buffer, Chunked) else gram(buffer.stack())
                grams[component] = grams[component] + matrix if component in grams else matrix

        step.run(collector, add, again=True)
        num_tasks = len(step.losses.present)
        nothing = step.losses.task_losses().new_zeros(num_tasks, num_tasks, dtype=torch.float32)
        empty = torch.zeros_like(next(iter(grams.values()), nothing))
        return torch.stack([grams.get(k, empty) for k in range(len(self.collector.members))])

    def _add_weighted(self, step: Step, weights: Tensor, write: Write) -> None:
        """The second backward: sums of task gradients with weights that are known."""
        sums = WeightedSums(weights, self.collector.component_of)

        def add(parameter: nn.Parameter) -> None:
            update = sums.take(parameter)
            if update is not None:
                write([parameter], [update])

        step.run(sums, add)

    def _announce(self, slow: Sequence[str]) -> None:
        """Say once which places are computed task by task."""
        new = [place for place in slow if place not in self._announced]
        self._announced |= set(new)
        if new:
            shown = ", ".join(new[:4]) + (", ..." if new[4:] else "")
            warnings.warn(
                f"engine: {len(new)} place(s) have no fast path and are computed task by task, "
                f"which is exact but slower: {shown}.",
                stacklevel=6,
            )

    def _keep_outside(self, step: Step) -> None:
        """Add to the plain gradients of leaves that are not the model's."""
        for leaf, gradient in step.outside:
            earlier = self._outside.get(leaf)
            self._outside[leaf] = gradient if earlier is None else earlier + gradient
        self._announce(step.slow)


def _is_due(step: int) -> bool:
    """Steps 1, 2, 10, 100, 1,000, and every thousand from there on."""
    return step in (1, 2, 10, 100) or step % 1000 == 0


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: there is no waiting for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _for_some(weigh: Weigh, chosen: list[int]) -> Weigh:
    """Weigh the chosen tasks of stored gradients that have room for all."""

    def weigh_some(components: Sequence[int], gram: Tensor) -> Tensor:
        index = index_on(chosen, gram.device)
        weights = weigh(components, gram[:, index][:, :, index])
        return weights.new_zeros(gram.shape[:-1]).index_copy(1, index, weights)

    return weigh_some

"""From the output gradients of a junction to what it contributes to its parameters."""

# T tasks

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradvac.engine.budget import WaitingBudget
from gradvac.engine.contributions import Built, Contribution, is_better_unbuilt
from gradvac.engine.declared_rows import DeclaredRows, RowTasks
from gradvac.engine.fast_paths import FAST_PATHS, NodeInput
from gradvac.engine.graph import LEAF, Graph, aside, call_node, may_write
from gradvac.engine.junctions import NO_PATH, Junction, ParameterPath
from gradvac.engine.kernels import Owned, Segments
from gradvac.engine.layouts import Layout
from gradvac.engine.losses import Losses
from gradvac.engine.ownership import MeasuredOwners
from gradvac.engine.passes import copies
from gradvac.engine.plain_junctions import (
    Alike,
    Arrived,
    PlainJunction,
    build_together,
    group_alike,
)
from gradvac.engine.plan import How, Plan
from gradvac.engine.pushes import push_at_once


class Sink(Protocol):
    """Takes what is built."""

    table_bytes: int
    """Task gradients of a matrix above this size are not built."""
    head_bytes: int
    """Those of a head above this size are not built if that takes less."""

    def add(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """What a junction contributes to a parameter."""

    def add_block(self, parameters: Sequence[nn.Parameter], block: Tensor) -> None:
        """All task gradients of a use of some parameters, `[n, T, P]`."""


Captured = tuple[PlainJunction, tuple[Tensor, ...], Segments]
"""A junction, what its node saved, and the tasks of its entries."""

_TABLES = ("EmbeddingBackward0", "IndexBackward0")


@dataclass
class _Below:
    """Task gradients of outputs of a node that is made of parameters alone."""

    gradients: dict[int, Tensor]  # by output: [T, ...]
    segments: Segments


class GradientBuilder:
    """Builds what the junctions of one graph contribute to its parameters.

    Args:
        graph: The graph.
        plan: Its junctions, and how rows lie in them.
        losses: What is differentiated.
        rows: The tasks of the rows of `losses`; None for a mapping.
        declared: Rows that the forward declared.
        tasks: Task names.

    Attributes:
        plain: Junctions that may wait, to be built with others of their kind.
        measured: The owners that depend on the data of this step, if the plan needs any.
        slow: Operations without a fast path that were met.
        num_tasks: T.
        freed_share: Bytes that the pass frees, by byte of what a plain junction is built from.
        take_caught: Gives the junctions that C++ has caught since it was called last.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        losses: Losses,
        rows: Segments | None,
        declared: DeclaredRows,
        tasks: Sequence[str],
    ) -> None:
        self.graph, self.plan, self.losses, self.plain = graph, plan, losses, plan.plain(graph)
        self._rows, self._declared, self._tasks = rows, declared, tasks
        self.num_tasks = len(losses.present)
        self._reached = graph.reached_by() if rows is None else []
        self._segments: dict[int | RowTasks, Segments] = {}
        self._moved: dict[int, Segments] = {}  # by position of the index
        self._flat: dict[tuple[object, tuple[int, ...]], Segments | None] = {}  # of plain junctions
        self._below: dict[int, _Below] = {}  # by position
        self._by_task: Segments | None = None
        self._waiting: list[Arrived] = []
        self.take_caught: Callable[[], list[Alike]] | None = None
        self.measured: MeasuredOwners | None = None
        self.slow: list[str] = []

    def begin(self, sink: Sink, budget: WaitingBudget, *, frees: bool) -> None:
        """Expect a backward.

        Args:
            sink: What is built goes there.
            budget: Of what may wait to be built with others.
            frees: The pass frees what the forward saved.
        """
        self._sink, self._budget = sink, budget
        self.freed_share = self.plain.kept_share if frees else 0.0
        self._num_left = dict(self.plan.partition.num_above)

    def build(
        self, number: int, gradients: Sequence[Tensor | None], captured: Captured | None = None
    ) -> None:
        """Deliver what a junction contributes to its parameters; a plain one may wait for others.

        Args:
            number: Of the junction.
            gradients: Of its outputs.
            captured: What is known of it before the pass.
        """
        arrived = self._as_plain(number, gradients, captured)
        if arrived is None:
            self._build(number, gradients)
            self.pass_on(number)
            return
        num_bytes, budget = arrived.nbytes, self._budget
        budget.freed += self.freed_share * num_bytes
        if arrived.is_large and captured is None:
            self._build_plain(group_alike([arrived]))
            return
        self._waiting.append(arrived)
        budget.operands += num_bytes
        if not budget.operands_fit():
            self.build_waiting()

    def capture(self) -> dict[int, Captured]:
        """Junctions that need nothing but a gradient after the pass."""
        captured = {}
        for number, junction in self.plain.by_number.items():
            shape = self.graph.shape(junction.position)
            rows = None if 0 in shape else self.rows_of_plain(junction, shape)
            if rows is not None:
                saved = junction.read(self.graph, is_early=True)
                if saved is not None:
                    captured[number] = (junction, saved, rows)
        return captured

    def _as_plain(
        self, number: int, gradients: Sequence[Tensor | None], captured: Captured | None
    ) -> Arrived | None:
        gradient = gradients[0]
        if gradient is None or not gradient.numel():
            return None
        if captured is not None:
            junction, saved, rows = captured
            return Arrived(junction, saved, gradient, rows)
        plain = self.plain.by_number.get(number)
        if plain is None or (len(gradients) > 1 and any(g is not None for g in gradients[1:])):
            return None
        segments = self.rows_of_plain(plain, gradient.shape, gradient)
        values = None if segments is None else plain.read(self.graph, is_early=False)
        if segments is None or values is None:
            return None
        return Arrived(plain, values, gradient, segments)

    def rows_of_plain(
        self, junction: PlainJunction, shape: tuple[int, ...], gradient: Tensor | None = None
    ) -> Segments | None:
        """The tasks of a plain junction's entries; None if this backward must see it as any other.

        Or if they are measured, and there is no gradient yet.
        """
        if self._is_unbuilt(junction, shape):
            return None
        if self.num_tasks == 1 or len(shape) < 2 or not junction.fits(self.graph):
            return None
        how = self.plan.owners[junction.number, 0]
        if isinstance(how, Layout):
            return self.rows_at(how, shape)
        if how is How.MEASURED and gradient is None:
            return None
        return _separable(self._owned(junction.number, 0, shape, gradient))

    def rows_at(self, how: Layout, shape: tuple[int, ...]) -> Segments | None:
        """The same where rows lie so, which junctions have in common."""
        if (how, shape) not in self._flat:
            owned = Owned(shape, self._rows_where(how.moved_by), how.dim, how.tiled)
            self._flat[how, shape] = _separable(owned)
        return self._flat[how, shape]

    @property
    def rows_in_order(self) -> bool:
        """Whether the rows of each task are together."""
        return self._rows is not None and self._rows.order is None

    @property
    def limits(self) -> tuple[int, int]:
        """Above these sizes task gradients of heads, and of any matrix, may not be built."""
        return self._sink.head_bytes, self._sink.table_bytes

    def _is_unbuilt(self, junction: PlainJunction, shape: tuple[int, ...]) -> bool:
        built, head = self.num_tasks * junction.weight_bytes, junction.weight
        if built <= min(self._sink.head_bytes, self._sink.table_bytes):
            return False
        assert isinstance(head, nn.Parameter)
        given = (math.prod(shape[:-1]), self.num_tasks)
        return built > self._sink.table_bytes or is_better_unbuilt(head, *given)

    @torch.no_grad()
    def build_waiting(self) -> None:
        """Deliver what waits."""
        caught = [] if self.take_caught is None else self.take_caught()
        waiting, self._waiting, self._budget.operands = self._waiting, [], 0
        groups = group_alike(waiting)
        del waiting  # operands are let go of as they are built
        self._build_plain(groups + caught)

    def _build_plain(self, groups: Sequence[Alike]) -> None:
        numbers = [one.number for group in groups for one in group.junctions]
        for targets, stack, segments in build_together(groups):
            parameters = [one for one in targets if isinstance(one, Tensor)]
            if parameters:  # all are, or none
                self._sink.add_block(parameters, stack)
                continue
            paths = [one for one in targets if not isinstance(one, Tensor)]
            for path, gradients in zip(paths, stack, strict=True):
                shape = (len(gradients), *self.graph.shape(*path[:2]))
                self._wait_below(path, gradients.view(shape), segments)
        for number in numbers:
            self.pass_on(number)

    def build_below(self, made: Mapping[ParameterPath, Tensor]) -> None:
        """Take task gradients `[T, P]` of what is made of parameters, which C++ has built."""
        for path, by_task in made.items():
            shape = (len(by_task), *self.graph.shape(*path[:2]))
            self._wait_below(path, by_task.view(shape), self._row_per_task())

    def pass_on(self, number: int) -> None:
        """Push through what is below a junction, where all has arrived."""
        for position in self.plan.partition.junctions[number].through:
            self._num_left[position] -= 1
            if not self._num_left[position] and position in self._below:
                self._push_through(position, self._below.pop(position))

    def _build(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        graph, junction = self.graph, self.plan.partition.junctions[number]
        if not any(gradient is not None and gradient.numel() for gradient in gradients):
            if any(gradient is not None for gradient in gradients):
                self._deliver_zeros(junction.parameters)
            return
        owned = [
            None if gradient is None else self._owned(number, output, gradient.shape, gradient)
            for output, gradient in enumerate(gradients)
        ]
        position, gradient, owner = junction.position, gradients[0], owned[0]
        fast_path = FAST_PATHS.get(graph.names[position])
        slow: Sequence[int] = junction.edges
        if fast_path is not None and gradient is not None and owner is not None:
            slow, at = [], NodeInput(graph, position, graph.nodes[position], gradient, owner)
            for edge, path in zip(junction.edges, junction.paths, strict=True):
                at.edge, at.path = edge, path
                contribution = fast_path(at)
                if contribution is None:
                    slow.append(edge)
                else:
                    self._push(path, contribution)
        if slow:
            self._call_slowly(junction, slow, gradients, owned)

    def _deliver_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """An expert without rows: autograd gives it zeros, not nothing."""
        for parameter in parameters:
            zeros = parameter.new_zeros(()).expand(self.num_tasks, *parameter.shape)
            self._sink.add(parameter, Built(zeros, self._segments_of(0)))

    def _owned(
        self, number: int, output: int, shape: tuple[int, ...], gradient: Tensor | None
    ) -> Owned:
        if self.num_tasks == 1:
            return Owned(shape, self._segments_of(0))
        how = self.plan.owners[number, output]
        if isinstance(how, Layout):
            return Owned(shape, self._rows_where(how.moved_by), how.dim, how.tiled)
        junction = self.plan.partition.junctions[number]
        position = junction.position
        if how is How.REACHED:
            return Owned(shape, self._segments_of(self._reached[position].bit_length() - 1))
        if how is How.DECLARED:
            rows = self._declared.of(self.graph.nodes[position])
            assert rows is not None
            return Owned(shape, self._segments_of(rows))
        assert self.measured is not None
        assert gradient is not None
        return self.measured.of((number, output), junction, gradient)

    def _rows_where(self, moved_by: int | None) -> Segments:
        """The tasks of the rows of the losses, or of every entry behind an index."""
        assert self._rows is not None
        if moved_by is None:
            return self._rows
        if moved_by not in self._moved:
            tasks = self._rows.tasks[self.graph.moved[moved_by]]
            self._moved[moved_by] = Segments(tasks, self.num_tasks, self.losses.device)
        return self._moved[moved_by]

    def _segments_of(self, rows: int | RowTasks) -> Segments:
        """Of entries that all belong to one task, or of rows that the forward declared."""
        if rows not in self._segments:
            losses, device = self.losses, self.losses.device
            self._segments[rows] = (
                Segments.of_one_task(rows, len(losses.present), device)
                if isinstance(rows, int)
                else rows.resolve(self._tasks, losses, device)
            )
        return self._segments[rows]

    # -- nodes without a fast path ---------------------------------------------------------------

    def _call_slowly(
        self,
        junction: Junction,
        edges: Sequence[int],
        gradients: Sequence[Tensor | None],
        owned: Sequence[Owned | None],
    ) -> None:
        """Call a junction once per task, with the other tasks' entries set to zero."""
        rows = next(owners.rows for owners in owned if owners is not None)
        position, paths = junction.position, dict(zip(junction.edges, junction.paths, strict=True))
        if rows.only is None:
            self.slow.append(self._describe(junction))
        elif may_write(self.graph.nodes[position]):
            gradients = copies(gradients)

        def given(task: int) -> list[Tensor | None]:
            return [_only(g, owners, task) for g, owners in zip(gradients, owned, strict=True)]

        like = next(gradient for gradient in gradients if gradient is not None)
        for edge, by_task in self._call(position, edges, rows, given, like).items():
            self._push(paths[edge], Built(by_task, rows))

    def _call(
        self,
        position: int,
        edges: Sequence[int],
        rows: Segments,
        given: Callable[[int], list[Tensor | None]],
        like: Tensor,
    ) -> dict[int, Tensor]:
        """Call a node with the output gradients that are given for each task; one is like them.

        Exact, because every node is linear in its output gradient.

        Returns:
            The task gradients of some inputs (edges).
        """
        graph, node = self.graph, self.graph.nodes[position]
        by_edge: dict[int, Tensor] = {}
        ran = graph.returned.get(position) if rows.only is not None else None
        operand = [graph.operands[position]] if graph.is_tap(position) else []

        def call(task: int) -> None:
            returned = ran or call_node(node, _complete(node, [*given(task), *operand]))
            for edge in edges:
                part, (child, output) = returned[edge], graph.children(position)[edge]
                if output == 1 and graph.is_tap(child):  # no gradient, but its operand
                    graph.operands[child] = part
                elif part is not None:
                    if part.is_complex() and not graph.is_complex(child, output):
                        part = part.real  # as autograd does between two nodes
                    part, shape = part.to_dense(), graph.shape(child, output)
                    if edge not in by_edge:
                        by_edge[edge] = part.new_zeros(self.num_tasks, *shape)
                    by_edge[edge][task] = part.sum_to_size(shape)

        def call_all() -> None:
            for task in range(self.num_tasks) if rows.only is None else [rows.only]:
                call(task)

        aside(call_all, like)
        return by_edge

    def _describe(self, junction: Junction) -> str:
        kind = self.graph.names[junction.position].removesuffix("0").removesuffix("Backward")
        names = sorted(self.plan.names.get(p, "") for p in junction.parameters)
        return f"{kind} of {names[0]}" if names else kind

    # -- from a junction's input down to parameters ----------------------------------------------

    def _push(self, path: ParameterPath, contribution: Contribution) -> None:
        """Down to a parameter, or to a node on the way."""
        position, _, is_transposed = path
        contribution = contribution.transposed() if is_transposed else contribution
        if self.graph.names[position] == LEAF:
            self._sink.add(self.graph.nodes[position].variable, contribution)
        else:
            self._wait_below(path, contribution.task_gradients(), contribution.segments)

    def _wait_below(self, path: ParameterPath, gradients: Tensor, segments: Segments) -> None:
        """Let task gradients of a node on the way wait for what else arrives."""
        position, number, _ = path
        below = self._below.setdefault(position, _Below({}, segments))
        if below.segments.only != segments.only:
            below.segments = self._row_per_task()
        before = below.gradients.get(number)
        below.gradients[number] = gradients if before is None else before + gradients

    def _row_per_task(self) -> Segments:
        """Of a batch with one row of each task."""
        if self._by_task is None:
            num_tasks = self.num_tasks
            self._by_task = Segments(torch.arange(num_tasks), num_tasks, self.losses.device)
        return self._by_task

    def _push_through(self, position: int, below: _Below) -> None:
        """Through a node that is made of parameters alone, once, T gradients at a time."""
        paths, segments = self.plan.partition.paths[position], below.segments
        if (looked_up := self._look_up(position, paths[0], below)) is not None:
            self._push(paths[0], looked_up)
            return
        edges = [edge for edge, path in enumerate(paths) if path is not NO_PATH]
        pushed = None
        if self.graph.num_outputs(position) == 1:
            pushed = push_at_once(self.graph, position, edges, below.gradients[0])
        if pushed is None:
            given = partial(self._given, position, below.gradients)
            like = next(iter(below.gradients.values()))
            pushed = self._call(position, edges, segments, given, like)
        for edge, gradients in pushed.items():
            self._push(paths[edge], Built(gradients, segments))

    def _look_up(self, position: int, path: ParameterPath, below: _Below) -> Contribution | None:
        """A table of positions: the gradients of all tasks are those of a batch with a row each."""
        name = self.graph.names[position]
        if name not in _TABLES or below.segments.only is not None:
            return None
        gradients, node = below.gradients[0], self.graph.nodes[position]
        owned = Owned(gradients.shape, self._row_per_task())
        at = NodeInput(self.graph, position, node, gradients, owned, path=path)
        return FAST_PATHS[name](at)

    def _given(
        self, position: int, gradients: Mapping[int, Tensor], task: int
    ) -> list[Tensor | None]:
        """The gradients of a node's outputs, of one task."""
        described = self.graph.described(position)
        by_output: list[Tensor | None] = [None] * self.graph.num_outputs(position)
        for number, of_tasks in gradients.items():
            by_output[number] = of_tasks[task].to(described[number].dtype)
        return by_output

    def close(self) -> None:
        """Forget the rows that the forward declared."""
        if self._declared:
            self._declared.forget([self.graph.nodes[p] for p in self.plan.partition.row_nodes])


def _separable(owned: Owned) -> Segments | None:
    """The tasks of entries; None if these are not vectors, or of one task."""
    rows = owned.flat()
    return None if rows is None or rows.only is not None else rows


def _only(gradient: Tensor | None, owned: Owned | None, task: int) -> Tensor | None:
    """The entries of one task, the others zero."""
    if gradient is None or owned is None or owned.rows.only is not None:
        return gradient
    nothing = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return torch.where(owned.tasks() == task, gradient, nothing)


def _complete(node: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What a running backward gives a node: Python functions get zeros for absent gradients."""
    if callable(node):
        return list(gradients)
    described = node._input_metadata
    some = next(g for g in gradients if g is not None)
    return [
        torch.zeros(tuple(d.shape), dtype=d.dtype, device=some.device) if g is None else g
        for g, d in zip(gradients, described, strict=True)
    ]

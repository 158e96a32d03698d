"""From the output gradients of a junction to what it contributes to its parameters."""

# T tasks

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.contributions import Built, Contribution
from gradvac.engine.fast_paths import FAST_PATHS, NodeInput, embedding
from gradvac.engine.graph import LEAF, Graph, call_node, may_write
from gradvac.engine.junctions import ParameterPath, parameter_path
from gradvac.engine.kernels import Owned, Segments
from gradvac.engine.layouts import Layout
from gradvac.engine.losses import Losses
from gradvac.engine.ownership import MeasuredOwners
from gradvac.engine.passes import copies
from gradvac.engine.plan import How, Plan
from gradvac.engine.row_tasks import DeclaredRows, RowTasks

_SAME_NUMBERS = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
)

Deliver = Callable[[nn.Parameter, Contribution], None]


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
        measured: The owners that depend on the data of this step, if the plan needs any.
        slow: Operations without a fast path that were met.
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
        self.graph, self.plan, self.losses = graph, plan, losses
        self._rows, self._declared, self._tasks = rows, declared, tasks
        self._num_tasks = len(losses.present)
        self._reached = graph.reached_by() if rows is None else []
        self._segments: dict[int | RowTasks, Segments] = {}
        self._arrived: dict[int, dict[int, Contribution]] = {}  # position -> output number
        self.measured: MeasuredOwners | None = None
        self.slow: list[str] = []

    def begin(self, deliver: Deliver) -> None:
        """Expect a backward, and deliver what it builds."""
        self._deliver = deliver

    def build(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Deliver what a junction contributes to its parameters."""
        graph, junction = self.graph, self.plan.partition.junctions[number]
        if not [True for gradient in gradients if gradient is not None and gradient.numel()]:
            if any(gradient is not None for gradient in gradients):
                self._deliver_zeros(junction.parameters)
            return
        owned = [
            None if gradient is None else self._owned(number, output, gradient)
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
                    delivered = self._push(path, contribution)
                    at.first = at.first or delivered
        if slow:
            self._call_slowly(position, slow, gradients, owned)
        if self._arrived:
            self._push_on()

    def _deliver_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """An expert without rows: autograd gives it zeros, not nothing."""
        for parameter in parameters:
            zeros = parameter.new_zeros(()).expand(self._num_tasks, *parameter.shape)
            self._deliver(parameter, Built(zeros, self._segments_of(0)))

    def _owned(self, number: int, output: int, gradient: Tensor) -> Owned:
        shape = gradient.shape
        if self._num_tasks == 1:
            return Owned(shape, self._segments_of(0))
        how = self.plan.owners[number, output]
        if isinstance(how, Layout):
            assert self._rows is not None
            return Owned(shape, self._rows, *how)
        position = self.plan.partition.junctions[number].position
        if how is How.REACHED:
            return Owned(shape, self._segments_of(self._reached[position].bit_length() - 1))
        if how is How.DECLARED:
            rows = self._declared.of(self.graph.nodes[position])
            assert rows is not None
            return Owned(shape, self._segments_of(rows))
        assert self.measured is not None
        return self.measured.of((number, output), gradient)

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
        position: int,
        edges: Sequence[int],
        gradients: Sequence[Tensor | None],
        owned: Sequence[Owned | None],
    ) -> None:
        """Call a junction once per task, with the other tasks' entries set to zero."""
        rows = next(owners.rows for owners in owned if owners is not None)
        if rows.only is None:
            self.slow.append(self._describe(position))
        elif may_write(self.graph.nodes[position]):
            gradients = copies(gradients)

        def given(task: int) -> list[Tensor | None]:
            return [_only(g, owners, task) for g, owners in zip(gradients, owned, strict=True)]

        self._call(position, edges, rows, given)

    def _call(
        self,
        position: int,
        edges: Sequence[int],
        rows: Segments,
        given: Callable[[int], list[Tensor | None]],
    ) -> None:
        """Call a node with the output gradients that are given for each task, and push the results.

        Exact, because every node is linear in its output gradient.
        """
        node, children = self.graph.nodes[position], self.graph.children(position)
        by_edge: dict[int, Tensor] = {}  # edge -> task gradients
        for task in range(self._num_tasks) if rows.only is None else [rows.only]:
            returned = self.graph.returned.get(position) if rows.only is not None else None
            if returned is None:
                operand = [self.graph.operands[position]] if self.graph.is_tap(position) else []
                returned = call_node(node, _complete(node, [*given(task), *operand]))
            for edge in edges:
                part, (child, output) = returned[edge], children[edge]
                if output == 1 and self.graph.is_tap(child):  # no gradient, but its operand
                    self.graph.operands[child] = part
                elif part is not None:
                    if part.is_complex() and not self.graph.is_complex(child, output):
                        part = part.real  # as autograd does between two nodes
                    shape = self.graph.shape(child, output)
                    if edge not in by_edge:
                        by_edge[edge] = part.to_dense().new_zeros(self._num_tasks, *shape)
                    by_edge[edge][task] = part.to_dense().sum_to_size(shape)
        for edge, gradients in by_edge.items():
            self._push(parameter_path(self.graph, *children[edge]), Built(gradients, rows))

    def _describe(self, position: int) -> str:
        kind = self.graph.names[position].removesuffix("0").removesuffix("Backward")
        junction = next(j for j in self.plan.partition.junctions if j.position == position)
        names = sorted(self.plan.names.get(p, "") for p in junction.parameters)
        return f"{kind} of {names[0]}" if names else kind

    # -- from a junction's input down to parameters ----------------------------------------------

    def _push(self, path: ParameterPath, contribution: Contribution) -> Contribution | None:
        """Down to a parameter, or to a node on the way, where it waits for what else arrives.

        Returns what a parameter got, if there is nothing but casts and transpositions before it.
        """
        position, number, is_transposed = path
        contribution = contribution.transposed() if is_transposed else contribution
        if self.graph.names[position] == LEAF:
            self._deliver(self.graph.nodes[position].variable, contribution)
            return contribution
        arrived = self._arrived.setdefault(position, {})
        if number in arrived:
            contribution = _together(arrived[number], contribution)
        arrived[number] = contribution
        return None

    def _push_on(self) -> None:
        """Through what was made of parameters alone, T gradients at a time, each node once."""
        while self._arrived:
            position = max(self._arrived)  # children come before parents, so nothing more arrives
            arrived = self._arrived.pop(position)
            child, contribution = self.graph.children(position)[0], next(iter(arrived.values()))
            if (looked_up := self._look_up(position, contribution)) is not None:
                self._push(parameter_path(self.graph, *child), looked_up)
            elif self.graph.names[position] in _SAME_NUMBERS:
                gradients = contribution.task_gradients()
                shape = self.graph.shape(*child)
                built = Built(gradients.reshape(len(gradients), *shape), contribution.segments)
                self._push(parameter_path(self.graph, *child), built)
            else:
                self._push_through(position, arrived)

    def _look_up(self, position: int, contribution: Contribution) -> Contribution | None:
        """A table of positions: the gradients of all tasks are those of a batch with a row each."""
        is_lookup = self.graph.names[position] == "EmbeddingBackward0"
        if not is_lookup or contribution.segments.only is not None:
            return None
        gradients = contribution.task_gradients()
        tasks = Segments(torch.arange(len(gradients)), len(gradients), gradients.device)
        owned, node = Owned(gradients.shape, tasks), self.graph.nodes[position]
        path = parameter_path(self.graph, *self.graph.children(position)[0])
        return embedding(NodeInput(self.graph, position, node, gradients, owned, path=path))

    def _push_through(self, position: int, arrived: Mapping[int, Contribution]) -> None:
        gradients = {number: one.task_gradients() for number, one in arrived.items()}
        described = self.graph.nodes[position]._input_metadata

        def given(task: int) -> list[Tensor | None]:
            by_output: list[Tensor | None] = [None] * self.graph.num_outputs(position)
            for number, of_tasks in gradients.items():
                by_output[number] = of_tasks[task].to(described[number].dtype)
            return by_output

        children = enumerate(self.graph.children(position))
        edges = [edge for edge, (child, _) in children if child >= 0]
        rows = next(iter(arrived.values())).segments
        self._call(position, edges, rows, given)

    def close(self) -> None:
        """Forget the rows that the forward declared."""
        if self._declared:
            self._declared.forget([self.graph.nodes[p] for p in self.plan.partition.row_nodes])


def _together(before: Contribution, contribution: Contribution) -> Contribution:
    """Two contributions to what was made of parameters, from one junction, as one."""
    assert before.segments.only == contribution.segments.only
    return Built(before.task_gradients() + contribution.task_gradients(), contribution.segments)


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

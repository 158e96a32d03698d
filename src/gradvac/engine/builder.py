"""From the output gradients of a junction to the task gradients of its parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.contributions import Built, Contribution
from gradvac.engine.fast_paths import FAST_PATHS, NodeInput, embedding
from gradvac.engine.graph import LEAF, Graph, NotSeparable, call_node
from gradvac.engine.junctions import ParameterPath, parameter_path
from gradvac.engine.kernels import Owned, Segments, negligible
from gradvac.engine.kernels import mark as sketch
from gradvac.engine.layouts import Layout
from gradvac.engine.losses import Losses
from gradvac.engine.ownership import TaskCodes, unexplained
from gradvac.engine.plan import How, Plan
from gradvac.engine.row_tasks import DeclaredRows, RowTasks

# T tasks


_SAME_NUMBERS = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
)

Deliver = Callable[[nn.Parameter, Contribution], None]


class GradientBuilder:
    """Forms uses at the junctions of one graph.

    Args:
        graph: The graph.
        plan: Its junctions, and how rows lie in them.
        losses: What is differentiated.
        rows: The tasks of the rows of `losses`; None for a mapping.
        declared: Rows that the forward named.
        tasks: Task names.
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
        self.coded: list[Mapping[tuple[int, int], Tensor]] = []
        self.codes: TaskCodes | None = None
        self.smaller: list[tuple[Tensor, Mapping[tuple[int, int], Tensor]]] = []  # tasks, marks
        # What these have at entries of larger ones, and in all, by place.
        self._elsewhere: dict[int, list[Tensor]] = defaultdict(list)
        self._seen: dict[tuple[int, ...], list[tuple[Tensor, ...]]] = {}  # by shape: marks, owners
        self._arrived: dict[int, dict[int, Contribution]] = {}  # position -> output number -> use
        self.slow: list[str] = []

    @property
    def is_coarse(self) -> bool:
        """Whether a place that is measured has gradients of 16 bits."""
        return self.plan.lowest.itemsize < 4

    def build(self, number: int, gradients: Sequence[Tensor | None], deliver: Deliver) -> None:
        """Deliver what a junction contributes to its parameters."""
        graph, junction = self.graph, self.plan.partition.junctions[number]
        if not [True for gradient in gradients if gradient is not None and gradient.numel()]:
            if any(gradient is not None for gradient in gradients):
                self._deliver_zeros(junction.parameters, deliver)
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
                    delivered = self._push(path, contribution, deliver)
                    at.first = at.first or delivered
        if slow:
            self._call_slowly(position, slow, gradients, owned, deliver)
        if self._arrived:
            self._push_on(deliver)

    def _deliver_zeros(self, parameters: Iterable[nn.Parameter], deliver: Deliver) -> None:
        """An expert without rows: autograd gives it zeros, not nothing."""
        for parameter in parameters:
            zeros = parameter.new_zeros(()).expand(self._num_tasks, *parameter.shape)
            deliver(parameter, Built(zeros, self._segments_of(0)))

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
            block = self._declared.of(self.graph.nodes[position])
            assert block is not None
            return Owned(shape, self._segments_of(block))
        return self._measured(number, output, gradient)

    def _segments_of(self, rows: int | RowTasks) -> Segments:
        """Of entries that all belong to one task, or of rows that the forward named."""
        if rows not in self._segments:
            present, device = self.losses.present, self.losses.device
            self._segments[rows] = (
                Segments.of_one_task(rows, len(present), device)
                if isinstance(rows, int)
                else rows.resolve(self._tasks, present, device)
            )
        return self._segments[rows]

    def _measured(self, number: int, output: int, gradient: Tensor) -> Owned:
        assert self.codes is not None
        joint = sketch(gradient)
        coded = [sketches[number, output] for sketches in self.coded]
        owner = self.codes.owners(joint, coded)
        self._seen.setdefault(tuple(joint.shape), []).append((owner, joint, *coded))
        for group, (tasks, sketches) in enumerate(self.smaller):
            size = sketches[number, output].abs().sum(-1)
            own = torch.where(tasks.to(owner.device)[owner], size, 0.0)
            self._elsewhere[group].append(torch.stack([size.sum() - own.sum(), size.sum()]))
        segments = Segments(owner.reshape(-1), self._num_tasks, owner.device)
        return Owned(gradient.shape, segments, None)

    def check_mixed_entries(self) -> None:
        """Raise if entries that were measured belong to several tasks."""
        if not self._seen:
            return
        assert self.codes is not None
        shares, amounts, sizes = [], [], []
        for places in self._seen.values():  # all places of one shape at once
            owner, joint, *coded = (torch.stack(tensors) for tensors in zip(*places, strict=True))
            codes, _ = self.codes.on(joint.device, joint.dtype)
            share, amount = unexplained(joint, coded, codes, owner, len(places))
            shares.append(share)
            amounts.append(amount)
            sizes.append(torch.stack([joint, *coded]).abs().flatten(2).amax((0, 2)))
        self._seen = {}
        share, amount, size = torch.cat(shares), torch.cat(amounts), torch.cat(sizes)
        most = negligible(self.plan.lowest) * size.max()  # rounding may leave so much
        counts = (share * size > most) & (amount > most / 4)
        is_mixed = float(torch.where(counts, share, 0.0).max()) > self.plan.tolerance
        if is_mixed or any(map(self._is_elsewhere, self._elsewhere.values())):
            raise NotSeparable(
                "engine: rows of the batch influence each other in this step, so that gradients "
                'cannot be separated by task in one backward. Use engine="per_task".'
            )

    def _is_elsewhere(self, by_place: list[Tensor]) -> bool:
        elsewhere, size = torch.stack(by_place, dim=1)
        most = negligible(self.plan.lowest) * size.max()
        return bool(((elsewhere > self.plan.tolerance * size) & (elsewhere > most)).any())

    # -- nodes without a fast path ---------------------------------------------------------------

    def _call_slowly(
        self,
        position: int,
        edges: Sequence[int],
        gradients: Sequence[Tensor | None],
        owned: Sequence[Owned | None],
        deliver: Deliver,
    ) -> None:
        """Call a junction once per task, with the other tasks' entries set to zero."""
        rows = next(owners.rows for owners in owned if owners is not None)
        if rows.only is None:
            self.slow.append(self._place(position))

        def given(task: int) -> list[Tensor | None]:
            return [_only(g, owners, task) for g, owners in zip(gradients, owned, strict=True)]

        self._call(position, edges, rows, given, deliver)

    def _call(
        self,
        position: int,
        edges: Sequence[int],
        rows: Segments,
        given: Callable[[int], list[Tensor | None]],
        deliver: Deliver,
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
            self._push(parameter_path(self.graph, *children[edge]), Built(gradients, rows), deliver)

    def _place(self, position: int) -> str:
        kind = self.graph.names[position].removesuffix("0").removesuffix("Backward")
        junction = next(j for j in self.plan.partition.junctions if j.position == position)
        names = sorted(self.plan.names.get(p, "") for p in junction.parameters)
        return f"{kind} of {names[0]}" if names else kind

    # -- from a junction's input down to parameters ----------------------------------------------

    def _push(
        self, path: ParameterPath, contribution: Contribution, deliver: Deliver
    ) -> Contribution | None:
        """Down to a parameter, or to a node on the way, where it waits for what else arrives.

        Returns what a parameter got, if there is nothing but casts and transpositions before it.
        """
        position, number, is_transposed = path
        contribution = contribution.transposed() if is_transposed else contribution
        if self.graph.names[position] == LEAF:
            deliver(self.graph.nodes[position].variable, contribution)
            return contribution
        arrived = self._arrived.setdefault(position, {})
        arrived[number] = (
            _together(arrived[number], contribution) if number in arrived else contribution
        )
        return None

    def _push_on(self, deliver: Deliver) -> None:
        """Through what was made of parameters alone, T gradients at a time, each node once."""
        while self._arrived:
            position = max(self._arrived)  # children come before parents, so nothing more arrives
            arrived = self._arrived.pop(position)
            child, contribution = self.graph.children(position)[0], next(iter(arrived.values()))
            if (looked_up := self._look_up(position, contribution)) is not None:
                self._push(parameter_path(self.graph, *child), looked_up, deliver)
            elif self.graph.names[position] in _SAME_NUMBERS:
                gradients = contribution.task_gradients()
                shape = self.graph.shape(*child)
                built = Built(gradients.reshape(len(gradients), *shape), contribution.segments)
                self._push(parameter_path(self.graph, *child), built, deliver)
            else:
                self._push_through(position, arrived, deliver)

    def _look_up(self, position: int, contribution: Contribution) -> Contribution | None:
        """A table of positions: the gradients of all tasks are those of a batch with a row each."""
        if (
            self.graph.names[position] != "EmbeddingBackward0"
            or contribution.segments.only is not None
        ):
            return None
        gradients = contribution.task_gradients()
        tasks = Segments(torch.arange(len(gradients)), len(gradients), gradients.device)
        owned, node = Owned(gradients.shape, tasks), self.graph.nodes[position]
        path = parameter_path(self.graph, *self.graph.children(position)[0])
        return embedding(NodeInput(self.graph, position, node, gradients, owned, path=path))

    def _push_through(
        self, position: int, arrived: Mapping[int, Contribution], deliver: Deliver
    ) -> None:
        gradients = {
            number: contribution.task_gradients() for number, contribution in arrived.items()
        }
        described = self.graph.nodes[position]._input_metadata

        def given(task: int) -> list[Tensor | None]:
            by_output: list[Tensor | None] = [None] * self.graph.num_outputs(position)
            for number, of_tasks in gradients.items():
                by_output[number] = of_tasks[task].to(described[number].dtype)
            return by_output

        children = enumerate(self.graph.children(position))
        edges = [edge for edge, (child, _) in children if child >= 0]
        rows = next(iter(arrived.values())).segments
        self._call(position, edges, rows, given, deliver)

    def close(self) -> None:
        """Forget the rows that the forward named."""
        if self._declared:
            self._declared.forget([self.graph.nodes[p] for p in self.plan.partition.row_nodes])


def _together(before: Contribution, contribution: Contribution) -> Contribution:
    """Two uses of what was made of parameters, from one junction, as one."""
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

"""One look at a graph: passes whose start gradients carry codes, and what they show."""

# B rows, T tasks

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradvac.gradients._graph import LEAF, Graph
from gradvac.gradients._junctions import ANY, Drawing, Junction, draw
from gradvac.gradients._losses import Losses
from gradvac.gradients._ownership import (
    SAME,
    Layout,
    Marks,
    TaskCodes,
    fit,
    layouts,
    mark,
    row_codes,
    tolerance,
)
from gradvac.gradients._passes import Arrive, Watcher, run_pass
from gradvac.gradients._plan import How, Known, Plan, Refused, Route
from gradvac.gradients._rows import DeclaredRows, RowTasks

_MOST_ATTEMPTS = 24
_FEW = 40  # nodes that are cheap to push T gradients through


class Look:
    """One look at a graph: passes with codes, and what they show."""

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        tasks: Sequence[str],
        graph: Graph,
        losses: Losses,
        declared: DeclaredRows,
        earlier: Plan | None,
    ) -> None:
        self.names, self.tasks, self.graph = names, tasks, graph
        self.losses, self.declared = losses, declared
        self.moved = set(earlier.moved) if earlier else set()
        self.reached = graph.reached_by() if losses.index is None else []
        self.num_rows = None if losses.index is None else len(losses.index)
        self.mixed: list[Junction] = []
        self.rounding = 0.0
        self.num_alone = len(graph.nodes)  # nodes made of parameters alone, before any was moved
        self.spent: list[torch.Tensor] = []  # what all passes together started from

    def take(self) -> Plan:
        """Draw junctions until none is too early, and find out how rows lie in each."""
        num_nodes = len(self.graph.nodes)
        for _ in range(_MOST_ATTEMPTS):
            drawing = draw(self.graph, self.names.keys(), self._rows_at, self.moved)
            num_alone = len(self.graph.nodes) - len(drawing.row_nodes)
            self.num_alone = min(self.num_alone, num_alone)
            pushed = num_alone - self.num_alone  # nodes that T gradients are pushed through
            if self.moved and (drawing.holds_no_rows or pushed > max(_FEW, num_nodes // 4)):
                # What was supposed to hold rows does, and they are mixed on the way to the losses.
                raise Refused(self._coupled(self.mixed))
            self.drawing = drawing
            self._refuse_odd_graphs()
            plan = self._try()
            if plan is not None:
                plan.moved = self.moved
                plan.uses = _count_uses(self.graph, self.drawing)
                plan.measured = How.MEASURED in plan.known.values()
                plan.lowest, plan.names = self._lowest(), self.names
                plan.routes = [_routes(self.graph, own) for own in self.drawing.junctions]
                plan.tolerance = tolerance(plan.lowest) + 4 * self.rounding
                return plan
        raise Refused(self._coupled(self.mixed))

    def _rows_at(self, position: int) -> int | None:
        block = self._block(position)
        return len(block) if block is not None else self.num_rows

    def _block(self, position: int) -> RowTasks | None:
        return self.declared.of(self.graph.nodes[position]) if self.declared else None

    def _refuse_odd_graphs(self) -> None:
        for position in self.graph.root_positions:
            if self.graph.names[position] == LEAF:
                raise Refused('losses: are a parameter themselves; use engine="per_task".')
        if self.graph.is_reentrant:
            raise Refused(
                "engine: reentrant activation checkpointing hides the parameters it uses; "
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or use "
                'engine="per_task".'
            )

    def _try(self) -> Plan | None:
        """A plan, or None if a junction had to be moved."""
        plan = Plan(self.drawing)
        todo: list[tuple[int, int]] = []  # where codes must tell
        for number, junction in enumerate(self.drawing.junctions):
            for output in range(max(1, len(self.graph.nodes[junction.position]._input_metadata))):
                if self._is_reached_by_one(junction):
                    plan.known[number, output] = How.REACHED
                else:
                    todo.append((number, output))
        if not todo or len(self.losses.present) == 1:
            if self.losses.index is not None and len(self.losses.present) == 1:
                plan.known = {}
                plan.unfinished = "only one task so far"
            return plan
        return self._measure(plan, todo)

    def _is_reached_by_one(self, junction: Junction) -> bool:
        return bool(self.reached) and self.reached[junction.position].bit_count() == 1

    def _measure(self, plan: Plan, todo: list[tuple[int, int]]) -> Plan | None:
        graph, losses = self.graph, self.losses
        plain, plan.asleep = self._marks(losses.starts(), watch=True)
        self.tolerance = tolerance(self._lowest())
        finite = all(bool(m.entries.isfinite().all()) for m in plain.values())
        if not finite:
            plan.known |= {key: self._unseen(key) for key in todo}
            plan.unfinished = "the gradients were not finite"
            return plan
        self.same, _ = self._marks([SAME * start for start in losses.starts()])
        codes = None
        by_row: dict[tuple[int, int], Marks] = {}
        by_task: list[dict[tuple[int, int], Marks]] = []
        if self.num_rows is not None:
            codes = row_codes(self.num_rows)
            by_row, _ = self._marks((codes.to(losses.roots()[0]),))
        moving = self._moving(plain, by_row, codes)
        task_codes = TaskCodes(len(losses.present), is_coarse=self._lowest().itemsize < 4)
        mixed: list[Junction] = []
        for key in todo:
            if key not in plain or not bool(plain[key].entries.any()):
                plan.known[key] = self._unseen(key)
                continue
            number, output = key
            junction = self.drawing.junctions[number]
            shape = graph.shape(junction.position, output)
            how: Known | None = None
            block = self._block(junction.position)
            if block is None and codes is not None and number not in moving:
                how = self._layout(plain[key], by_row[key], shape, codes, plan, key)
            if how is None:
                if not by_task:
                    by_task = [
                        self._marks(losses.starts(task_codes.of_tasks(n)))[0]
                        for n in range(task_codes.num_passes)
                    ]
                how = self._by_task(plain, by_task, key, shape, block, task_codes)
            if how is None:
                mixed.append(junction)
            else:
                plan.known[key] = how
        if mixed:
            early = {junction.position for junction in mixed if junction.supposed}
            if not early:
                raise Refused(self._coupled(mixed))
            self.mixed, self.moved = mixed, self.moved | early
            return None
        return plan

    def _layout(
        self,
        plain: Marks,
        coded: Marks,
        shape: Sequence[int],
        codes: torch.Tensor,
        plan: Plan,
        key: tuple[int, int],
    ) -> Layout | None:
        num_rows = len(codes)
        for layout in layouts(shape, num_rows):
            result = fit(plain, self.same[key], coded, shape, layout, codes)
            if self._is_explained(result.unexplained, result.rounding):
                if result.num_rows_seen < (num_rows + 1) // 2:
                    plan.unfinished = "few rows have a gradient so far"
                if shape[layout.dim] > num_rows:
                    plan.expanded.add(key)
                return layout
        return None

    def _by_task(
        self,
        plain: Mapping[tuple[int, int], Marks],
        coded: Sequence[Mapping[tuple[int, int], Marks]],
        key: tuple[int, int],
        shape: Sequence[int],
        block: RowTasks | None,
        codes: TaskCodes,
    ) -> How | None:
        marks, same = plain[key].entries, self.same[key].entries
        others = [own[key].entries for own in coded]

        def is_explained(owner: torch.Tensor) -> bool:
            unexplained = codes.unexplained(marks, others, owner)
            return self._is_explained(float(unexplained), float(codes.rounding(marks, same, owner)))

        if block is not None and shape and shape[0] % len(block) == 0:
            present = self.losses.present
            segments = block.resolve(self.tasks, present, marks.device)
            along = segments.along(shape[0]).view(-1, *(1,) * (marks.dim() - 2))
            if is_explained(along.expand(marks.shape[:-1])):
                return How.DECLARED
        owner, _ = codes.decode(marks, others)
        return How.MEASURED if is_explained(owner) else None

    def _is_explained(self, unexplained: float, rounding: float) -> bool:
        self.rounding = max(self.rounding, rounding)
        return unexplained <= self.tolerance + 4 * rounding

    def _unseen(self, key: tuple[int, int]) -> Known:
        """A place without a gradient: whatever is supposed of it, its task gradients are zero."""
        block = self._block(self.drawing.junctions[key[0]].position)
        shape = self.graph.shape(self.drawing.junctions[key[0]].position, key[1])
        if block is not None and shape and shape[0] % len(block) == 0:
            return How.DECLARED
        if self.num_rows and shape and shape[0] % self.num_rows == 0:
            return Layout(0)
        return How.MEASURED

    def _moving(
        self,
        plain: Mapping[Any, Marks],
        coded: Mapping[Any, Marks],
        codes: torch.Tensor | None,
    ) -> set[int]:
        """Junctions whose entries are moved by what the data say, along the rows."""
        moving: set[int] = set()
        for mover in self.drawing.movers:
            behind = self.drawing.behind_movers[mover]
            if behind and not behind <= moving and not self._keeps_rows(mover, plain, coded, codes):
                moving |= behind
        return moving

    def _keeps_rows(
        self,
        mover: int,
        plain: Mapping[Any, Marks],
        coded: Mapping[Any, Marks],
        codes: torch.Tensor | None,
    ) -> bool:
        key = ("mover", mover)
        dims = self.drawing.movers[mover]
        if dims is ANY or codes is None or key not in plain or key not in coded:
            return False
        shape = self.graph.shape(mover)
        moved = {d % len(shape) if d < 0 else d for d in dims}
        for layout in layouts(shape, len(codes)):
            result = fit(plain[key], self.same[key], coded[key], shape, layout, codes)
            if self._is_explained(result.unexplained, result.rounding):
                return layout.dim not in moved
        return False

    def _lowest(self) -> torch.dtype:
        dtypes = {
            described.dtype
            for position in self.drawing.row_nodes
            for described in self.graph.nodes[position]._input_metadata
            if described.dtype.is_floating_point
        }
        return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)

    def _marks(
        self, starts: Sequence[torch.Tensor], *, watch: bool = False
    ) -> tuple[dict[Any, Marks], frozenset[int]]:
        """Marks of junctions and movers, and with `watch` the nodes that no gradient reached."""
        found: dict[Any, Marks] = {}
        watcher = Watcher()

        def see(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                if gradient is not None and gradient.numel():
                    found[number, output] = mark(gradient)
            if watch:
                watcher.see(self.drawing.junctions[number].position, gradients)

        def see_mover(position: int, gradients: Sequence[torch.Tensor | None]) -> None:
            if gradients and gradients[0] is not None and gradients[0].numel():
                found["mover", position] = mark(gradients[0])

        movers = self.drawing.movers
        others = [(mover, see_mover) for mover in movers if movers[mover] is not ANY]
        if watch:
            inner = set(self.drawing.row_nodes) - {j.position for j in self.drawing.junctions}
            others += [(position, watcher.see) for position in inner]
        self._pass(starts, see, others)
        return found, watcher.asleep()

    def _pass(
        self, starts: Sequence[torch.Tensor], see: Arrive, others: Sequence[tuple[int, Arrive]] = ()
    ) -> None:
        spent = self.spent or [torch.zeros_like(start) for start in starts]
        self.spent = [one + other for one, other in zip(spent, starts, strict=True)]
        run_pass(self.graph, self.drawing, starts, see, others=others, retain=True)

    def undo(self) -> None:
        """Take back what `retain_grad` of activations has added up so far."""
        if self.spent:
            self._pass([-start for start in self.spent], lambda *_: None)

    def _coupled(self, junctions: Sequence[Junction]) -> str:
        parameters = [p for junction in junctions for p in junction.parameters]
        names = list(dict.fromkeys(self.names[p] for p in parameters))
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        if self.num_rows is None:
            return (
                "engine: parts of the batch serve several tasks at once, so the gradients of "
                f'{shown} cannot be separated by task in one backward. Use engine="per_task".'
            )
        norms = any("BatchNorm" in name for name in self.graph.names)
        why = (
            "normalisation over the batch in training mode (put it into eval mode, or replace it)"
            if norms
            else "in-batch negatives, a loss, a router or a normalisation over the whole batch"
        )
        return (
            f"engine: rows of the batch influence each other, so the gradients of {shown} cannot "
            f'be separated by task in one backward: {why}. Use engine="per_task".'
        )


def _count_uses(graph: Graph, drawing: Drawing) -> dict[nn.Parameter, int]:
    uses: Counter[nn.Parameter] = Counter()
    for junction in drawing.junctions:
        for edge in junction.edges:
            child = graph.children(junction.position)[edge][0]
            if graph.names[child] == LEAF:
                uses[graph.nodes[child].variable] += 1
            else:
                uses.update(junction.parameters)
    return dict(uses)


def _routes(graph: Graph, junction: Junction) -> list[Route]:
    found = []
    for edge in junction.edges:
        child = graph.children(junction.position)[edge]
        position, transposed = child[0], False
        while graph.names[position] in ("TBackward0", "ToCopyBackward0"):
            transposed ^= graph.names[position] == "TBackward0" and len(graph.shape(position)) == 2
            position = graph.children(position)[0][0]
        parameter = graph.nodes[position].variable if graph.names[position] == LEAF else None
        found.append(Route(edge, child, parameter, transposed))
    return found

"""One look at a graph: passes whose start gradients carry codes, and what they show."""

# B rows, T tasks

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradvac.gradients.graph import (
    LEAF,
    Arrive,
    Graph,
    Junction,
    Refused,
    Watcher,
    draw,
    is_python_function,
    refuse_hidden,
    run_pass,
)
from gradvac.gradients.kernels import Marks, mark
from gradvac.gradients.losses import DeclaredRows, Losses, PlainGradient, RowTasks
from gradvac.gradients.ownership._codes import SAME, task_codes
from gradvac.gradients.ownership._evidence import Evidence
from gradvac.gradients.ownership._layouts import Layout, layouts
from gradvac.gradients.ownership._plan import How, Known, Plan, Sized, spans_of

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
        self.num_alone = len(graph.nodes)  # nodes made of parameters alone, before any was moved
        self.by_task: list[dict[Any, Marks]] = []
        self.spent: list[torch.Tensor] = []  # what all passes together started from

    def take(self) -> Plan:
        """A plan for the graph.

        Raises:
            Refused: Rows influence each other, or parameters are hidden.
        """
        with refuse_hidden(self.names, self.graph):
            try:
                return self._find()
            finally:
                self._undo()

    def _find(self) -> Plan:
        """Draw junctions until none is too early, and find out how rows lie in each."""
        self._refuse_odd_graphs()
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
            plan = self._try()
            if plan is not None:
                plan.moved = self.moved
                plan.functions = frozenset(
                    number
                    for number, junction in enumerate(drawing.junctions)
                    if not junction.ends
                    and is_python_function(self.graph.nodes[junction.position])
                    and not self.graph.is_tap(junction.position)
                )
                plan.measured = How.MEASURED in plan.known.values()
                plan.lowest, plan.names = self.shown.lowest, self.names
                plan.tolerance = self.shown.tolerance
                plan.sizes = {plan.sizes_of(self.graph, self.num_rows)}
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
        if self.graph.is_nested:
            raise Refused(
                "engine: nested tensors have no rows of one size; pad them "
                '(torch.nested.to_padded_tensor) before the model, or use engine="per_task".'
            )

    def _try(self) -> Plan | None:
        """A plan, or None if a junction had to be moved."""
        plan = Plan(self.drawing)
        self.by_task = []
        self.shown = Evidence(self.graph, self.drawing, self.num_rows)
        todo: list[tuple[int, int]] = []  # where codes must tell
        for number, junction in enumerate(self.drawing.junctions):
            for output in range(self.graph.num_outputs(junction.position)):
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

    def _leaves(self) -> list[torch.Tensor]:
        return list(dict.fromkeys([*self.names, *self.graph.leaves()]))

    def _is_reached_by_one(self, junction: Junction) -> bool:
        return bool(self.reached) and self.reached[junction.position].bit_count() == 1

    def _measure(self, plan: Plan, todo: list[tuple[int, int]]) -> Plan | None:
        losses, shown = self.losses, self.shown
        if losses.plain is None:
            losses.plain = PlainGradient(self.graph, losses.starts(), self._leaves())
            self.spent = list(losses.starts())
        shown.plain, plan.asleep = self._marks(losses.starts(), watch=True)
        marks = [shown.plain[key].entries for key in todo if key in shown.plain]
        if not all(bool(entries.isfinite().all()) for entries in marks):
            plan.known |= {key: self._unseen(key) for key in todo}
            plan.unfinished = "the gradients were not finite"
            return plan
        shown.same, _ = self._marks([SAME * start for start in losses.starts()])
        if self.num_rows is not None:
            shown.by_row, _ = self._marks((shown.codes.to(losses.roots[0]),))
        moving = shown.moving()
        mixed: list[Junction] = []
        for key in todo:
            junction = self.drawing.junctions[key[0]]
            how = self._how(key, plan, is_moving=moving[junction.position])
            if how is None:
                mixed.append(junction)
            else:
                plan.known[key] = how
        mixed += self._shared_unseen(plan)
        if mixed:
            early = {junction.position for junction in mixed if junction.supposed}
            if not early:
                raise Refused(self._coupled(mixed))
            self.mixed, self.moved = mixed, self.moved | early
            return None
        plan.sized = self._sized(plan)
        plan.regions = shown.kept_inside
        return plan

    def _how(self, key: tuple[int, int], plan: Plan, *, is_moving: bool) -> Known | None:
        """How the owners at a place are known; None if rows are mixed there."""
        position = self.drawing.junctions[key[0]].position
        shape, block = self.graph.shape(position, key[1]), self._block(position)
        if not self.shown.is_awake(key):
            if block is None and is_moving:
                return How.MEASURED
            if block is None and 0 in shape:
                plan.unfinished = "a part of it was empty"
            return self._unseen(key)
        if block is None and not is_moving:
            layout, num_seen = self.shown.layout(key, shape)
            if layout is not None:
                assert self.num_rows is not None
                if num_seen < (self.num_rows + 1) // 2:
                    plan.unfinished = "few rows have a gradient so far"
                return layout
        return self._by_task(key, shape, block)

    def _by_task(
        self, key: tuple[int, int], shape: Sequence[int], block: RowTasks | None
    ) -> How | None:
        codes = task_codes(len(self.losses.present), self.shown.lowest.itemsize < 4)
        if not self.by_task:
            self.by_task = [
                self._marks(self.losses.starts(codes.of_tasks(n)))[0]
                for n in range(codes.num_passes)
            ]
        marks, same = self.shown.plain[key].entries, self.shown.same[key].entries
        others = [coded[key].entries for coded in self.by_task]

        def is_explained(owner: torch.Tensor) -> bool:
            unexplained = codes.unexplained(marks, others, owner)
            rounding = float(codes.rounding(marks, same, owner))
            return self.shown.is_explained(float(unexplained), rounding, marks)

        if block is not None and shape and shape[0] % len(block) == 0:
            present = self.losses.present
            segments = block.resolve(self.tasks, present, marks.device)
            along = segments.along(shape[0]).view(-1, *(1,) * (marks.dim() - 2))
            if is_explained(along.expand(marks.shape[:-1])):
                return How.DECLARED
        return How.MEASURED if is_explained(codes.owners(marks, others)) else None

    def _shared_unseen(self, plan: Plan) -> list[Junction]:
        """Junctions whose entries are shared by a task that is too small for codes to show it.

        Only where it is a guess that there are rows: what a weight is made of may have their shape.
        A pass per task shows where else than at its own entries its gradient is.
        """
        keys = [key for key, how in plan.known.items() if how is How.MEASURED]
        keys = [key for key in keys if self.drawing.junctions[key[0]].supposed]
        keys = [key for key in keys if self.shown.is_awake(key)]
        if not keys:
            return []
        codes = task_codes(len(self.losses.present), self.shown.lowest.itemsize < 4)
        shared: dict[int, Junction] = {}
        for task, alone in enumerate(torch.eye(len(self.losses.present))):
            marks, _ = self._marks(self.losses.starts(alone))
            for key in keys:
                coded = [by_task[key].entries for by_task in self.by_task]
                owner = codes.owners(self.shown.plain[key].entries, coded)
                sizes = marks[key].entries.abs().sum(-1)
                elsewhere = torch.where(owner == task, 0.0, sizes).sum()
                if elsewhere > self.shown.tolerance * sizes.sum():
                    shared[key[0]] = self.drawing.junctions[key[0]]
        return list(shared.values())

    def _unseen(self, key: tuple[int, int]) -> Known:
        """A place without a gradient: whatever is supposed of it, its task gradients are zero."""
        block = self._block(self.drawing.junctions[key[0]].position)
        shape = self.graph.shape(self.drawing.junctions[key[0]].position, key[1])
        if block is not None and shape and shape[0] % len(block) == 0:
            return How.DECLARED
        if self.num_rows and shape and shape[0] % self.num_rows == 0:
            return Layout(0)
        return How.MEASURED

    def _sized(self, plan: Plan) -> list[Sized]:
        """Where rows lie at operations that depend on sizes, if something behind them relies on it.

        Those that no gradient has come through are looked at when they wake up.
        """
        learned = {
            self.drawing.junctions[number].position
            for (number, _), how in plan.known.items()
            if isinstance(how, Layout)
        }
        relied_on = [False] * len(self.graph.nodes)
        for position in range(len(self.graph.nodes)):
            inner = (child for child, _ in self.graph.children(position) if child >= 0)
            relied_on[position] = position in learned or any(relied_on[child] for child in inner)
        sized = []
        for position in self.drawing.sized:
            if relied_on[position] and self.shown.is_awake(self.shown.key(position)):
                above = self.shown.above(position)
                below = None if above is None else self.shown.below(position, above)
                spans = spans_of(self.graph, position, above, self.num_rows)
                sized.append(Sized(position, above, below, spans))
        return sized

    def _marks(
        self, starts: Sequence[torch.Tensor], *, watch: bool = False
    ) -> tuple[dict[Any, Marks], frozenset[int]]:
        """Marks of junctions and movers, and with `watch` the nodes that no gradient reached."""
        marks: dict[Any, Marks] = {}
        watcher = Watcher()

        def see(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                if gradient is not None and gradient.numel():
                    marks[number, output] = mark(gradient)
            if watch:
                watcher.see(self.drawing.junctions[number].position, gradients)

        def see_inner(position: int, gradients: Sequence[torch.Tensor | None]) -> None:
            for output in self.shown.seen_outputs(position):
                gradient = gradients[output] if output < len(gradients) else None
                if gradient is not None and gradient.numel():
                    marks[self.shown.key(position, output)] = self._mark(gradient)

        others = [(position, see_inner) for position in self.shown.inner()]
        if watch:
            inner = set(self.drawing.row_nodes) - {j.position for j in self.drawing.junctions}
            others += [(position, watcher.see) for position in inner]
        self._pass(starts, see, others)
        return marks, watcher.asleep()

    def _mark(self, gradient: torch.Tensor) -> Marks:
        """Marks that show no more than along which dimension rows lie: a few numbers per row."""
        dims = {layout.dim for layout in layouts(gradient.shape, self.num_rows or 1)}
        return mark(gradient, columns_too=gradient.dim() - 1 in dims, kept=dims)

    def _pass(
        self, starts: Sequence[torch.Tensor], see: Arrive, others: Sequence[tuple[int, Arrive]] = ()
    ) -> None:
        spent = self.spent or [torch.zeros_like(start) for start in starts]
        self.spent = [one + other for one, other in zip(spent, starts, strict=True)]
        run_pass(self.graph, self.drawing, starts, see, others=others, retain=True)

    def _undo(self) -> None:
        """Take back what `retain_grad` of activations has added up so far."""
        if self.spent:
            self.by_task = []
            self.shown.forget()
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

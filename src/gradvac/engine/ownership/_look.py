"""One look at a graph: passes with a code per row, and of one task alone; what they show."""

# B rows, T tasks

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gradvac.engine.graph import (
    LEAF,
    Arrive,
    Drawing,
    Graph,
    Junction,
    Refused,
    Watcher,
    draw,
    has_changing_hook,
    refuse_hidden,
    refuse_unreadable,
    run_pass,
)
from gradvac.engine.kernels import sketch
from gradvac.engine.losses import DeclaredRows, Losses, PlainGradient, RowTasks
from gradvac.engine.ownership._evidence import SAME, Evidence, Key, Owners, row_codes
from gradvac.engine.ownership._following import follow_losses
from gradvac.engine.ownership._layouts import Layout
from gradvac.engine.ownership._plan import How, Known, Plan
from gradvac.hints import some

_FEW = 40  # nodes that are cheap to push T gradients through


class Look:
    """One look at a graph."""

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        tasks: Sequence[str],
        graph: Graph,
        losses: Losses,
        declared: DeclaredRows,
        earlier: Plan | None,
        lengths: dict[int, float],
    ) -> None:
        self.names, self.tasks, self.graph = names, tasks, graph
        self.losses, self.declared, self.lengths = losses, declared, lengths
        self.moved = set(earlier.moved) if earlier else set()
        self.reached = graph.reached_by() if losses.index is None else []
        self.num_rows = None if losses.index is None else len(losses.index)
        self.mixed: list[Junction] = []
        self.num_alone = len(graph.nodes)  # nodes made of parameters alone, before any was moved
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
        refuse_unreadable(self.graph)
        plan = None
        while plan is None:
            self.drawing = self._draw()
            self.layouts = self._follow()
            plan = self._try()
        self._refuse_hooks()
        plan.tolerance = self.shown.tolerance
        return plan

    def _draw(self) -> Drawing:
        drawing = draw(self.graph, self.names.keys(), self._rows_at, self.moved)
        num_nodes = len(self.graph.nodes)
        num_alone = num_nodes - len(drawing.row_nodes)
        self.num_alone = min(self.num_alone, num_alone)
        pushed = num_alone - self.num_alone  # nodes that T gradients are pushed through
        if self.moved and (drawing.holds_no_rows or pushed > max(_FEW, num_nodes // 4)):
            # What was supposed to hold rows does, and they are mixed on the way to the losses.
            raise Refused(self._coupled(self.mixed))
        return drawing

    def _follow(self) -> dict[Key, Layout]:
        """Places where it is known how rows lie, unless the forward named others there."""
        if self.num_rows is None:
            return {}
        followed = follow_losses(self.graph, self.drawing.holds_rows, self.num_rows)
        return {
            (number, output): layout
            for number, junction in enumerate(self.drawing.junctions)
            if self._block(junction.position) is None
            for output in range(self.graph.num_outputs(junction.position))
            # What has no gradient in any batch may belong to anybody.
            if (layout := followed[junction.position].get(output, Layout(0))) is not None
        }

    def _rows_at(self, position: int) -> int | None:
        block = self._block(position)
        return len(block) if block is not None else self.num_rows

    def _block(self, position: int) -> RowTasks | None:
        return self.declared.of(self.graph.nodes[position]) if self.declared else None

    def _refuse_hooks(self) -> None:
        """Nodes made of parameters alone are called, and their hooks are not.

        That task gradients add up to the plain gradient does not show it for a task that is tiny
        beside the others, nor for a hook that clips what is large.
        """
        for position, holds_rows in enumerate(self.drawing.holds_rows):
            is_called = not holds_rows and self.graph.names[position] != LEAF
            if is_called and has_changing_hook(self.graph, position):
                raise Refused(
                    "engine: a hook changes the gradient between a parameter and its use: "
                    f'{some(self._names_below(position))}. Use engine="per_task".'
                )

    def _names_below(self, position: int) -> list[str]:
        below = [position]
        for at in below:  # grows on the way
            below += {child for child, _ in self.graph.children(at)} - {-1, *below}
        leaves = [self.graph.nodes[at].variable for at in below if self.graph.names[at] == LEAF]
        return [self.names[leaf] for leaf in leaves if leaf in self.names]

    def _try(self) -> Plan | None:
        """A plan, or None if a junction had to be moved."""
        self.shown = Evidence(self.graph.lowest())
        plan = Plan(self.drawing, self.names, self.shown.lowest, self.moved, self.lengths)
        todo: list[Key] = []  # where codes must tell
        for number, junction in enumerate(self.drawing.junctions):
            outputs = [(number, o) for o in range(self.graph.num_outputs(junction.position))]
            if self.num_rows is None and self.reached[junction.position].bit_count() == 1:
                plan.known |= dict.fromkeys(outputs, How.REACHED)
            else:
                todo += outputs
        if len(self.losses.present) > 1 and todo:
            return self._measure(plan, todo)
        if self.num_rows is not None:
            plan.unfinished = "only one task so far"
        return plan

    def _measure(self, plan: Plan, todo: Sequence[Key]) -> Plan | None:
        losses, shown, self.silent = self.losses, self.shown, False
        if losses.plain is None:
            leaves = list(dict.fromkeys([*self.names, *self.graph.leaves()]))
            losses.plain = PlainGradient(self.graph, losses.starts(), leaves)
            self.spent = list(losses.starts())
        shown.plain = self._marks(losses.starts())
        watcher = Watcher()  # tasks may cancel each other out: codes tell that from no gradient
        shown.coded = self._marks(self._coded_starts(), watcher)
        plan.asleep = watcher.asleep()
        if not shown.is_finite(todo):
            plan.known |= {key: self._unseen(key) for key in todo}
            plan.unfinished = "the gradients were not finite"
            return plan
        shown.same = self._marks([SAME * start for start in losses.starts()])
        known: dict[Key, Known | None] = {}  # None: rows are mixed
        for key in todo:
            known[key] = self._by_layout(key) if shown.is_awake(key) else self._unseen(key)
        known |= self._by_task([key for key, how in known.items() if how is How.MEASURED])
        mixed = [self.drawing.junctions[key[0]] for key, how in known.items() if how is None]
        if mixed:
            early = {junction.position for junction in mixed if junction.supposed}
            if not early:
                raise Refused(self._coupled(mixed))
            self.mixed, self.moved = mixed, self.moved | early
            return None
        plan.known |= {key: how for key, how in known.items() if how is not None}
        measured = [key for key, how in plan.known.items() if how is How.MEASURED]
        if self.silent and any(self.drawing.junctions[key[0]].supposed for key in measured):
            plan.unfinished = "some tasks had no gradient so far"
        return plan

    def _coded_starts(self) -> list[torch.Tensor]:
        """A code for every row, or for every loss of a mapping."""
        roots = self.losses.roots
        if self.num_rows is not None:
            return [row_codes(self.num_rows).to(roots[0])]
        pairs = zip(row_codes(len(roots)), roots, strict=True)
        return [code.to(root).expand_as(root) for code, root in pairs]

    def _by_layout(self, key: Key) -> Known | None:
        """How rows lie where it is known from the operations; None if they are seen not to."""
        layout = self.layouts.get(key)
        if layout is None or self.num_rows is None:
            return How.MEASURED
        is_last = layout.dim > 0 and layout.dim == len(self._shape(key)) - 1
        # The vectors of the last dimension hold all rows, and were turned to be marked.
        seen = layout._replace(dim=0) if is_last else layout
        if self.shown.rows_lie(seen, key, self.num_rows):
            return layout
        return None if is_last else How.MEASURED

    def _unseen(self, key: Key) -> Known:
        """A place without a gradient: whatever is supposed of it, its task gradients are zero."""
        unknown = How.MEASURED if self._block_of_rows(key) is None else How.DECLARED
        return self.layouts.get(key, unknown)

    def _shape(self, key: Key) -> tuple[int, ...]:
        return self.graph.shape(self.drawing.junctions[key[0]].position, key[1])

    def _block_of_rows(self, key: Key) -> RowTasks | None:
        """The rows that the forward named for a place, if its first dimension counts such rows."""
        block, shape = self._block(self.drawing.junctions[key[0]].position), self._shape(key)
        return block if block is not None and shape and shape[0] % len(block) == 0 else None

    def _by_task(self, every: Sequence[Key]) -> dict[Key, Known | None]:
        """How owners are known where rows may move; None where several tasks share entries."""
        keys = [key for key in every if self.shown.is_awake(key)]
        plain, num_tasks = self.shown.plain, len(self.losses.present)
        owners = {key: Owners(plain[key], self._named(key)) for key in keys}
        for task, alone in enumerate(torch.eye(num_tasks) if keys else ()):
            marks = self._marks(self.losses.starts(alone))
            for key, seen in owners.items():
                seen.see(task, marks.get(key, torch.zeros_like(plain[key])))
        for number, task in enumerate(self.losses.present if every else ()):
            length = sum(seen.length(number) for seen in owners.values())
            self.silent |= not length
            if length or task not in self.lengths:
                self.lengths[task] = length
        known: dict[Key, Known | None] = dict.fromkeys(keys)
        for key, seen in owners.items():
            for how, owner in ((How.MEASURED, seen.measured), (How.DECLARED, seen.named)):
                if owner is not None:
                    most, _ = self.shown.tolerance_at(key, owner, num_tasks)
                    known[key] = how if seen.elsewhere(owner) <= most else known[key]
        return known

    def _named(self, key: Key) -> torch.Tensor | None:
        """The tasks of all entries of a place, if the forward named them."""
        block, marks = self._block_of_rows(key), self.shown.plain[key]
        if block is None:
            return None
        segments = block.resolve(self.tasks, self.losses.present, marks.device)
        along = segments.along(marks.shape[0]).view(-1, *(1,) * (marks.dim() - 2))
        return along.expand(marks.shape[:-1])

    def _marks(
        self, starts: Sequence[torch.Tensor], watcher: Watcher | None = None
    ) -> dict[Key, torch.Tensor]:
        """Marks of junctions; a watcher sees all nodes."""
        marks: dict[Key, torch.Tensor] = {}
        junctions = self.drawing.junctions

        def see(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                if gradient is not None and gradient.numel():
                    layout = self.layouts.get((number, output))
                    is_last = layout is not None and layout.dim == gradient.dim() - 1
                    marks[number, output] = sketch(
                        gradient.transpose(0, -1) if is_last else gradient
                    )
            if watcher is not None:
                watcher.see(junctions[number].position, gradients)

        others: list[tuple[int, Arrive]] = []
        if watcher is not None:
            inner = set(self.drawing.row_nodes).difference(j.position for j in junctions)
            others = [(position, watcher.see) for position in inner]
        self._pass(starts, see, others)
        return marks

    def _pass(
        self, starts: Sequence[torch.Tensor], see: Arrive, others: Sequence[tuple[int, Arrive]] = ()
    ) -> None:
        spent = self.spent or [torch.zeros_like(start) for start in starts]
        self.spent = [one + other for one, other in zip(spent, starts, strict=True)]
        run_pass(self.graph, self.drawing, starts, see, others=others, retain=True)

    def _undo(self) -> None:
        """Take back what `retain_grad` of activations has added up so far."""
        if self.spent:
            self.shown = Evidence(self.shown.lowest)  # marks take memory
            self._pass([-start for start in self.spent], lambda *_: None)

    def _coupled(self, junctions: Sequence[Junction]) -> str:
        shown = some(self.names[p] for junction in junctions for p in junction.parameters)
        if self.num_rows is None:
            return (
                "engine: parts of the batch serve several tasks at once, so the gradients of "
                f'{shown} cannot be separated by task in one backward. Use engine="per_task".'
            )
        why = (
            "normalisation over the batch in training mode (put it into eval mode, or replace it)"
            if any("BatchNorm" in name for name in self.graph.names)
            else "in-batch negatives, a loss, a router or a normalisation over the whole batch"
        )
        return (
            f"engine: rows of the batch influence each other, so the gradients of {shown} cannot "
            f'be separated by task in one backward: {why}. Use engine="per_task".'
        )

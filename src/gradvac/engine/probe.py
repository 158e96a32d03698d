"""Probes: passes with codes, and the plan they lead to.

What the passes of one look show, by place: (junction, output).

One look at a graph: passes with a code per row, and of one task alone; what they show.

Plans by shape of graph: made once, and verified now and then.

A plan is made once per signature by a look (`_look.py`), and verified by others: on the first
batches, now and then, and until every part of the graph was seen with a gradient. What moves
entries by what the data say (masks, routing, sorting) is not learned: it is measured every step.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradvac.engine.graph import LEAF, Graph, GraphSignature
from gradvac.engine.junctions import Junction, Partition, find_junctions
from gradvac.engine.kernels import mark as sketch
from gradvac.engine.kernels import negligible, repeatable, tolerance
from gradvac.engine.layouts import Layout, follow_losses
from gradvac.engine.losses import JointGradient, Losses
from gradvac.engine.ownership import unexplained
from gradvac.engine.passes import (
    Arrive,
    NotSeparable,
    ReachedNodes,
    check_hidden_backwards,
    check_readable,
    has_changing_hook,
    run_pass,
)
from gradvac.engine.plan import How, Known, Plan
from gradvac.engine.row_tasks import DeclaredRows, RowTasks, listen
from gradvac.hints import some, warn_caller

# B rows, T tasks


Key = tuple[int, int]
Marks = Mapping[Key, Tensor]

SAME = 0.6  # a code that all rows share shows what rounding alone does


def row_codes(num_rows: int) -> Tensor:
    """A code for every row, between 1/4 and 1: no overflow that the plain pass would not have."""
    generator = torch.Generator().manual_seed(num_rows)
    return 4.0 ** -torch.rand(num_rows, generator=generator, dtype=torch.float64)


class Evidence:
    """Marks of passes.

    Args:
        lowest: The narrowest dtype on the way.

    Attributes:
        plain: Marks of the plain pass.
        same: Of a pass with one code for all.
        coded: Of a pass with a code per row, or per loss of a mapping.
        tolerance: How much of a mark may stay unexplained.
    """

    def __init__(self, lowest: torch.dtype) -> None:
        self.joint: Marks = {}
        self.same: Marks = {}
        self.coded: Marks = {}
        self.lowest, self.tolerance = lowest, tolerance(lowest)

    def is_finite(self, keys: Sequence[Key]) -> bool:
        """Whether the gradients of all these places are."""
        return all(bool(self.joint[key].isfinite().all()) for key in keys if key in self.joint)

    def is_reached(self, key: Key) -> bool:
        """Whether a gradient other than zero came."""
        return key in self.coded and bool(self.coded[key].any())

    def rows_lie(self, layout: Layout, key: Key, num_rows: int) -> bool:
        """Whether rows are seen to lie along a dimension of the marks."""
        joint = self.joint[key]
        view = [1] * (joint.dim() - 1)
        view[layout.dim] = -1
        row = layout.rows(joint.shape[layout.dim], num_rows).to(joint.device)
        row = row.view(view).expand(joint.shape[:-1])
        codes = row_codes(num_rows)[None].to(joint)
        share, amount = map(float, unexplained(joint, [self.coded[key]], codes, row))
        allowed, noise = self.tolerance_at(key, row, num_rows)
        return share <= allowed or amount <= noise

    def tolerance_at(self, key: Key, owner: Tensor, num_owners: int) -> tuple[float, float]:
        """How much of the marks of one place may stay unexplained: a share of those of an owner.

        Where a gradient cancels out, rounding is all that is left of it, and is not smaller for a
        smaller code: any share, up to an amount. Elsewhere that is 0.

        Raises:
            Refused: What one code for all does is no rounding.
        """
        joint = self.joint[key]
        one_code = joint.new_full((1, num_owners), SAME)
        rounding, amount = map(float, unexplained(joint, [self.same[key]], one_code, owner))
        allowed = tolerance(self.lowest) + 4 * rounding
        if rounding <= repeatable(self.lowest):
            self.tolerance = max(self.tolerance, allowed)
            return allowed, 0.0
        noise = negligible(self.lowest) * self._largest()
        if rounding * float(joint.abs().max()) > noise and amount > noise / 4:
            raise NotSeparable(
                "engine: the backward of this model is not linear in the losses, or not the same "
                "when it runs again (a hook that clips or normalises gradients, or draws random "
                'numbers), so that tasks cannot be told apart. Use engine="per_task".'
            )
        return allowed, noise / 4

    def _largest(self) -> float:
        return max(float(sketches.abs().max()) for sketches in self.joint.values())


class Owners:
    """Whose the entries of one place are: shown by passes of one task alone, one after the other.

    However small the gradient of a task is beside those of others, it shows where it is.

    Args:
        marks: Of the plain pass, `[..., R]`.
        named: The owners that the forward named, `[...]`.
    """

    def __init__(self, sketches: Tensor, named: Tensor | None) -> None:
        self.named, self.measured = named, torch.zeros_like(sketches[..., 0], dtype=torch.int64)
        self._most = torch.zeros_like(sketches[..., 0])  # of one task, at every entry
        self._sums: list[Tensor] = []  # by task: over all entries, and over those named as its own

    def see(self, task: int, sketches: Tensor) -> None:
        """Take note of the marks of a task alone."""
        size = sketches.abs().sum(-1)
        self.measured = torch.where(size > self._most, task, self.measured)
        self._most = torch.maximum(size, self._most)
        own = size if self.named is None else torch.where(self.named == task, size, 0.0)
        self._sums.append(torch.stack([size.sum(), own.sum()]))

    def length(self, task: int) -> float:
        """The sum over all entries of a task's marks."""
        return float(self._sums[task][0])

    def elsewhere(self, owner: Tensor) -> float:
        """The largest share of a task's gradient that is not at its own entries."""
        total, own = torch.stack(self._sums, dim=1)
        if owner is self.measured:
            every = range(len(total))
            own = torch.stack([torch.where(owner == t, self._most, 0.0).sum() for t in every])
        return float(((total - own) / total.clamp_min(torch.finfo(total.dtype).tiny)).max())


# B rows, T tasks


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
        with check_hidden_backwards(self.names, self.graph):
            try:
                return self._find()
            finally:
                self._undo()

    def _find(self) -> Plan:
        """Draw junctions until none is too early, and find out how rows lie in each."""
        check_readable(self.graph)
        plan = None
        while plan is None:
            self.partition = self._find_junctions()
            self.layouts = self._follow()
            plan = self._try()
        self._check_hooks()
        plan.tolerance = self.shown.tolerance
        return plan

    def _find_junctions(self) -> Partition:
        partition = find_junctions(self.graph, self.names.keys(), self._rows_at, self.moved)
        num_nodes = len(self.graph.nodes)
        num_alone = num_nodes - len(partition.row_nodes)
        self.num_alone = min(self.num_alone, num_alone)
        pushed = num_alone - self.num_alone  # nodes that T gradients are pushed through
        if self.moved and (partition.holds_no_rows or pushed > max(_FEW, num_nodes // 4)):
            # What was supposed to hold rows does, and they are mixed on the way to the losses.
            raise NotSeparable(self._coupled(self.mixed))
        return partition

    def _follow(self) -> dict[Key, Layout]:
        """Places where it is known how rows lie, unless the forward named others there."""
        if self.num_rows is None:
            return {}
        followed = follow_losses(self.graph, self.partition.holds_rows, self.num_rows)
        return {
            (number, output): layout
            for number, junction in enumerate(self.partition.junctions)
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

    def _check_hooks(self) -> None:
        """Nodes made of parameters alone are called, and their hooks are not.

        That task gradients add up to the plain gradient does not show it for a task that is tiny
        beside the others, nor for a hook that clips what is large.
        """
        for position, holds_rows in enumerate(self.partition.holds_rows):
            is_called = not holds_rows and self.graph.names[position] != LEAF
            if is_called and has_changing_hook(self.graph, position):
                raise NotSeparable(
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
        plan = Plan(self.partition, self.names, self.shown.lowest, self.moved, self.lengths)
        todo: list[Key] = []  # where codes must tell
        for number, junction in enumerate(self.partition.junctions):
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
        if losses.joint is None:
            leaves = list(dict.fromkeys([*self.names, *self.graph.leaves()]))
            losses.joint = JointGradient(self.graph, losses.starts(), leaves)
            self.spent = list(losses.starts())
        shown.joint = self._marks(losses.starts())
        reached_nodes = (
            ReachedNodes()
        )  # tasks may cancel each other out: codes tell that from no gradient
        shown.coded = self._marks(self._coded_starts(), reached_nodes)
        plan.unreached = reached_nodes.unreached()
        if not shown.is_finite(todo):
            plan.known |= {key: self._unseen(key) for key in todo}
            plan.unfinished = "the gradients were not finite"
            return plan
        shown.same = self._marks([SAME * start for start in losses.starts()])
        known: dict[Key, Known | None] = {}  # None: rows are mixed
        for key in todo:
            known[key] = self._by_layout(key) if shown.is_reached(key) else self._unseen(key)
        known |= self._by_task([key for key, how in known.items() if how is How.MEASURED])
        mixed = [self.partition.junctions[key[0]] for key, how in known.items() if how is None]
        if mixed:
            early = {junction.position for junction in mixed if junction.assumed}
            if not early:
                raise NotSeparable(self._coupled(mixed))
            self.mixed, self.moved = mixed, self.moved | early
            return None
        plan.known |= {key: how for key, how in known.items() if how is not None}
        measured = [key for key, how in plan.known.items() if how is How.MEASURED]
        if self.silent and any(self.partition.junctions[key[0]].assumed for key in measured):
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
        return self.graph.shape(self.partition.junctions[key[0]].position, key[1])

    def _block_of_rows(self, key: Key) -> RowTasks | None:
        """The rows that the forward named for a place, if its first dimension counts such rows."""
        block, shape = self._block(self.partition.junctions[key[0]].position), self._shape(key)
        return block if block is not None and shape and shape[0] % len(block) == 0 else None

    def _by_task(self, every: Sequence[Key]) -> dict[Key, Known | None]:
        """How owners are known where rows may move; None where several tasks share entries."""
        keys = [key for key in every if self.shown.is_reached(key)]
        joint, num_tasks = self.shown.joint, len(self.losses.present)
        owners = {key: Owners(joint[key], self._named(key)) for key in keys}
        for task, alone in enumerate(torch.eye(num_tasks) if keys else ()):
            sketches = self._marks(self.losses.starts(alone))
            for key, seen in owners.items():
                seen.see(task, sketches.get(key, torch.zeros_like(joint[key])))
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
        block, sketches = self._block_of_rows(key), self.shown.joint[key]
        if block is None:
            return None
        segments = block.resolve(self.tasks, self.losses.present, sketches.device)
        along = segments.along(sketches.shape[0]).view(-1, *(1,) * (sketches.dim() - 2))
        return along.expand(sketches.shape[:-1])

    def _marks(
        self, starts: Sequence[torch.Tensor], reached_nodes: ReachedNodes | None = None
    ) -> dict[Key, torch.Tensor]:
        """Marks of junctions; a watcher sees all nodes."""
        sketches: dict[Key, torch.Tensor] = {}
        junctions = self.partition.junctions

        def see(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                if gradient is not None and gradient.numel():
                    layout = self.layouts.get((number, output))
                    is_last = layout is not None and layout.dim == gradient.dim() - 1
                    sketches[number, output] = sketch(
                        gradient.transpose(0, -1) if is_last else gradient
                    )
            if reached_nodes is not None:
                reached_nodes.see(junctions[number].position, gradients)

        others: list[tuple[int, Arrive]] = []
        if reached_nodes is not None:
            inner = set(self.partition.row_nodes).difference(j.position for j in junctions)
            others = [(position, reached_nodes.see) for position in inner]
        self._pass(starts, see, others)
        return sketches

    def _pass(
        self, starts: Sequence[torch.Tensor], see: Arrive, others: Sequence[tuple[int, Arrive]] = ()
    ) -> None:
        spent = self.spent or [torch.zeros_like(start) for start in starts]
        self.spent = [one + other for one, other in zip(spent, starts, strict=True)]
        run_pass(self.graph, self.partition, starts, see, others=others, retain=True)

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


_MOST_KEPT = 256  # signatures
_MOST_SIZES = 16  # of batches, for which a plan or a refusal is kept by signature


class Planner:
    """Makes and verifies plans for a model's parameters, given with their names."""

    def __init__(self, names: Mapping[nn.Parameter, str], tasks: Sequence[str]) -> None:
        self._names, self._tasks = names, tasks
        self._known: dict[GraphSignature, _Known] = {}
        self._lengths: dict[int, float] = {}  # of tasks' gradients
        self.identities = frozenset(map(id, names))  # by which graphs tell them apart
        listen(self)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """A copy has parameters of its own, and knows nothing of them."""
        return Planner, (self._names, self._tasks)

    def knows(self, graph: Graph) -> bool:
        """Whether such a graph was seen before, without leaves that are not the model's."""
        known = self._known.get(graph.signature)
        return known is not None and any(not plan.partition.outside for plan in known.plans)

    def plan(self, graph: Graph, losses: Losses, declared: DeclaredRows, *, look: bool) -> Plan:
        """The plan for a graph, verified if it is new, does not hold for its sizes, or on request.

        Raises:
            Refused: Rows influence each other; or they did whenever such a graph was looked at.
        """
        known = self._known.pop(graph.signature, None) or _Known([], {})
        self._known[graph.signature] = known  # the latest: a model may make a new one every step
        if len(self._known) > _MOST_KEPT:
            del self._known[next(iter(self._known))]
        if known.refusals:
            known.refuse(graph)
        num_rows = None if losses.index is None else len(losses.index)
        is_finished = not any(plan.unfinished for plan in known.plans)
        fitting = [plan for plan in known.plans if plan.holds_for(graph, num_rows)]
        is_seen = bool(fitting) and fitting[0].has_seen(losses.present)
        if is_seen and is_finished and not look:
            if fitting[0].refusal is not None:
                raise NotSeparable(fitting[0].refusal)
            return fitting[0]
        earlier = known.plans[0] if known.plans else None
        try:
            plan = Look(
                self._names, self._tasks, graph, losses, declared, earlier, self._lengths
            ).take()
        except NotSeparable as refusal:
            known.refusals[graph.sizes()] = str(refusal)
            if len(known.refusals) > _MOST_KEPT:
                del known.refusals[next(iter(known.refusals))]
            raise
        except torch.OutOfMemoryError:
            if not fitting or not is_finished:
                raise
            warn_caller(
                "engine: this step was to verify whose gradients are whose, but its passes, which "
                "keep the graph, ran out of memory; verification skipped."
            )
            return fitting[0]
        rest = [other for other in known.plans if not other.unfinished and other not in fitting]
        known.plans[:] = [plan, *rest][:_MOST_SIZES]
        return plan


class _Known(NamedTuple):
    """What is known of graphs with one signature: plans, the latest first; refusals by sizes."""

    plans: list[Plan]
    refusals: dict[int, str]

    def refuse(self, graph: Graph) -> None:
        """Raise if a batch of these sizes was refused, or every one of many sizes."""
        reason = self.refusals.get(graph.sizes())
        if reason is None and not self.plans and len(self.refusals) >= _MOST_SIZES:
            reason = next(iter(self.refusals.values()))
        if reason is not None:
            raise NotSeparable(reason)

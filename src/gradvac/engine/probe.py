"""Probes: passes over a graph that show whose its gradients are, and the plan they lead to.

A probe finds the junctions of a graph, runs passes with a code per row or of one task alone, and
keeps *sketches* of what arrives at the junctions (`Evidence`). They show how the entries of every
output gradient are owned, or that a junction was found too early, or that rows influence each
other. The result is a `Plan` for all graphs of this structure.

A plan is made once per structure, and verified by further probes: on the first batches, now and
then, and until every part of the graph was seen with a gradient. What moves entries by what the
data say (masks, routing, sorting) is not learned: it is measured every step.
"""

# B rows, T tasks, R numbers of a sketch per vector

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradvac.engine.declared_rows import DeclaredRows, RowTasks
from gradvac.engine.graph import LEAF, Graph, NotSeparable, check_readable, check_repeatable
from gradvac.engine.joint_gradient import JointGradient
from gradvac.engine.junctions import Junction, Partition, find_junctions
from gradvac.engine.kernels import negligible, repeatable, sketch, tolerance
from gradvac.engine.layouts import Layout, Move, Moves, follow_losses, rows_of
from gradvac.engine.losses import Losses
from gradvac.engine.ownership import Key, row_codes, unexplained
from gradvac.engine.passes import (
    Arrive,
    ReachedNodes,
    check_hidden_backwards,
    has_changing_hook,
    run_pass,
)
from gradvac.engine.plan import How, Ownership, Plan
from gradvac.utils.hints import some

_FEW = 40  # nodes that are cheap to push T gradients through
_SAME = 0.6  # a code that all rows share shows what rounding alone does

Sketches = Mapping[Key, Tensor]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is probed: a graph, its losses, the rows that its forward declared, and names."""

    graph: Graph
    losses: Losses
    declared: DeclaredRows
    names: Mapping[nn.Parameter, str]
    tasks: Sequence[str]

    @property
    def num_rows(self) -> int | None:
        """Of the losses; None for a mapping."""
        return None if self.losses.index is None else len(self.losses.index)

    @property
    def has_declared(self) -> bool:
        """Whether the forward may have declared rows: others leave theirs behind."""
        oldest = min([node._sequence_nr() for node in self.graph.nodes]) if self.declared else 0
        return self.declared.since(oldest)

    def declared_at(self, position: int) -> RowTasks | None:
        """The rows that the forward declared where a node was made."""
        return self.declared.of(self.graph.nodes[position]) if self.declared else None

    def num_rows_at(self, position: int) -> int | None:
        """How many rows there are where a node works."""
        declared = self.declared_at(position)
        return self.num_rows if declared is None else len(declared)


@dataclass(frozen=True, eq=False)
class Candidate:
    """Junctions of a subject, some of which may be too early; where rows are expected to lie.

    And where indices are expected to move them.
    """

    subject: Subject
    partition: Partition
    layouts: Mapping[Key, Layout]
    moves: Sequence[Move]

    def junction(self, key: Key) -> Junction:
        """The junction of an output."""
        return self.partition.junctions[key[0]]

    def shape(self, key: Key) -> tuple[int, ...]:
        """Of an output."""
        return self.subject.graph.shape(self.junction(key).position, key[1])

    def rows_are_last(self, key: Key) -> bool:
        """Whether vectors of the last dimension hold all rows."""
        layout = self.layouts.get(key)
        return layout is not None and 0 < layout.dim == len(self.shape(key)) - 1

    def vectors(self, key: Key, gradient: Tensor) -> Tensor:
        """The gradient of an output as it is sketched: a row each in the vectors of the last."""
        if key in self.layouts:
            return gradient.transpose(0, -1) if self.rows_are_last(key) else gradient
        return gradient if self.declared(key) is not None else self.junction(key).vectors(gradient)

    def declared(self, key: Key) -> RowTasks | None:
        """The rows declared for an output, if its first dimension counts such rows."""
        rows, shape = self.subject.declared_at(self.junction(key).position), self.shape(key)
        return rows if rows is not None and shape and shape[0] % len(rows) == 0 else None

    def assumed(self, key: Key) -> Ownership:
        """Of an output without a gradient: whatever is assumed, its task gradients are zero."""
        unknown = How.MEASURED if self.declared(key) is None else How.DECLARED
        return self.layouts.get(key, unknown)


@dataclass
class Findings:
    """What a probe found out about a candidate.

    Attributes:
        owners: How the owners of every output are known.
        tolerance: How much of a sketch may stay unexplained.
        unreached: Positions that no gradient came through.
        unfinished: Why the next batch must be probed too.
        mixed: Junctions at which rows share entries; then there is no plan.
    """

    owners: dict[Key, Ownership]
    tolerance: float
    unreached: frozenset[int] = frozenset()
    unfinished: str | None = None
    mixed: Sequence[Junction] = ()


def probe(
    subject: Subject,
    component_of: Mapping[nn.Parameter, int],
    earlier: Plan | None,
    lengths: dict[int, float],
) -> Plan:
    """A plan for graphs like that of a subject.

    Args:
        subject: What is probed.
        component_of: Parameter -> component.
        earlier: Another plan for graphs of this structure.
        lengths: Of tasks' gradients where owners are measured; updated.

    Raises:
        NotSeparable: Rows influence each other, or parameters are hidden.
    """
    passes = _Passes(subject.graph)
    with check_hidden_backwards(subject.names, subject.graph):
        try:
            check_readable(subject.graph)
            check_repeatable(subject.graph)
            rowless = earlier.rowless if earlier else frozenset()
            candidate, findings, rowless = _examine(subject, passes, rowless, lengths)
            if subject.graph.num_hooks:
                check_hooks(subject, candidate.partition)
        finally:
            passes.undo()
    partition = candidate.partition
    by_junction = ({component_of[p] for p in j.parameters} for j in partition.junctions)
    return Plan(
        partition,
        subject.names,
        components=[sorted(components) for components in by_junction],
        owners=findings.owners,
        rowless=rowless,
        moves=candidate.moves,
        lowest=subject.graph.lowest(),
        tolerance=findings.tolerance,
        lengths=lengths,
        unreached=findings.unreached,
        unfinished=findings.unfinished,
    )


def _examine(
    subject: Subject, passes: "_Passes", rowless: frozenset[int], lengths: dict[int, float]
) -> tuple[Candidate, Findings, frozenset[int]]:
    """Move junctions that are too early until there are none; also returns which were."""
    graph, mixed = subject.graph, list[Junction]()
    num_nodes = fewest = len(graph.nodes)
    while True:
        partition = find_junctions(graph, subject.names.keys(), subject.num_rows_at, rowless)
        num_constant = num_nodes - len(partition.row_nodes)  # made of parameters alone
        fewest = min(fewest, num_constant)
        pushed = num_constant - fewest  # nodes that T gradients are pushed through
        if rowless and (partition.holds_no_rows or pushed > max(_FEW, num_nodes // 4)):
            # What was assumed to hold rows does, and they are mixed on the way to the losses.
            raise NotSeparable(_coupled(subject, mixed))
        candidate = Candidate(subject, partition, *_expected_layouts(subject, partition))
        findings = _find_owners(candidate, passes, lengths)
        if not findings.mixed:
            return candidate, findings, rowless
        mixed = list(findings.mixed)
        too_early = {junction.position for junction in mixed if junction.assumed}
        if not too_early:
            raise NotSeparable(_coupled(subject, mixed))
        rowless = rowless | too_early


def _expected_layouts(
    subject: Subject, partition: Partition
) -> tuple[dict[Key, Layout], list[Move]]:
    """How rows lie where that follows from the operations, unless the forward declared others.

    And where indices move them. From operations and hooks it does not follow: these may begin to do
    anything.
    """
    moves = Moves()
    if subject.num_rows is None or subject.graph.has_hooks:
        return {}, moves.made
    followed = follow_losses(subject.graph, partition.holds_rows, subject.num_rows, moves)
    layouts = dict[Key, Layout]()
    for number, junction in enumerate(partition.junctions):
        if subject.declared_at(junction.position) is not None:
            continue
        for output in range(subject.graph.num_outputs(junction.position)):
            shape = subject.graph.shape(junction.position, output)
            # What has no gradient in any batch may belong to anybody.
            nobodys = Layout(0) if shape and shape[0] % subject.num_rows == 0 else None
            layout = followed[junction.position].get(output, nobodys)
            if layout is not None:
                layouts[number, output] = layout
    return layouts, moves.made


def _find_owners(candidate: Candidate, passes: "_Passes", lengths: dict[int, float]) -> Findings:
    """How the owners of every output are known; passes are taken where it does not follow."""
    subject, junctions = candidate.subject, candidate.partition.junctions
    graph, losses = subject.graph, subject.losses
    reached_by = graph.reached_by() if subject.num_rows is None else []
    findings, todo = Findings({}, tolerance(graph.lowest())), list[Key]()
    for number, junction in enumerate(junctions):
        outputs = [(number, o) for o in range(graph.num_outputs(junction.position))]
        if reached_by and reached_by[junction.position].bit_count() == 1:
            findings.owners |= dict.fromkeys(outputs, How.REACHED)
        else:
            todo += outputs
    if len(losses.present) == 1 or not todo:
        if subject.num_rows is not None:
            findings.unfinished = "only one task so far"
        return findings
    reached_nodes = ReachedNodes()
    evidence = _gather(candidate, passes, todo, reached_nodes)
    findings.unreached = reached_nodes.unreached()
    if evidence is None:
        findings.owners |= {key: candidate.assumed(key) for key in todo}
        findings.unfinished = "the gradients were not finite"
        return findings
    owners: dict[Key, Ownership | None] = {}  # None: rows are mixed
    for key in todo:
        is_reached = evidence.is_reached(key)
        owners[key] = _by_layout(candidate, evidence, key) if is_reached else candidate.assumed(key)
    measured = [key for key, how in owners.items() if how is How.MEASURED]
    by_task, task_lengths = _by_task(candidate, evidence, passes, measured)
    owners |= by_task
    findings.mixed = [candidate.junction(key) for key, how in owners.items() if how is None]
    findings.owners |= {key: how for key, how in owners.items() if how is not None}
    findings.tolerance = evidence.tolerance
    for task, length in task_lengths.items():
        if length or task not in lengths:
            lengths[task] = length
    measured = [key for key, how in owners.items() if how is How.MEASURED]
    is_assumed = any(candidate.junction(key).assumed for key in measured)
    if is_assumed and not all(task_lengths.values()):
        findings.unfinished = "some tasks had no gradient so far"
    return findings


def _gather(
    candidate: Candidate, passes: "_Passes", keys: Sequence[Key], reached_nodes: ReachedNodes
) -> "Evidence | None":
    """Sketches of a joint pass, one with codes, and one with the same code for all.

    None if the gradients of some outputs are not finite.
    """
    subject = candidate.subject
    losses = subject.losses
    if losses.joint is None:
        leaves = list(dict.fromkeys([*subject.names, *subject.graph.leaves()]))
        losses.joint = JointGradient(subject.graph, losses.starts(), leaves)
        passes.count(losses.starts())
    joint = passes.sketch(candidate, losses.starts())
    if subject.num_rows is not None:
        starts = [row_codes(subject.num_rows).to(losses.roots[0])]
    else:
        pairs = zip(row_codes(len(losses.roots)), losses.roots, strict=True)
        starts = [code.to(root).expand_as(root) for code, root in pairs]
    # Tasks may cancel each other out: codes tell that from no gradient.
    coded = passes.sketch(candidate, starts, reached_nodes)
    if not all(bool(joint[key].isfinite().all()) for key in keys if key in joint):
        return None
    same = passes.sketch(candidate, [_SAME * start for start in losses.starts()])
    return Evidence(subject.graph.lowest(), joint, coded, same)


def _by_layout(candidate: Candidate, evidence: "Evidence", key: Key) -> Ownership | None:
    """How rows lie where it follows from the operations; None if they are seen not to."""
    layout, num_rows = candidate.layouts.get(key), candidate.subject.num_rows
    if layout is None or num_rows is None:
        return How.MEASURED
    are_last = candidate.rows_are_last(key)
    seen = layout._replace(dim=0) if are_last else layout  # as its vectors were sketched
    size, device = evidence.joint[key].shape[seen.dim], evidence.joint[key].device
    rows = rows_of(candidate.subject.graph, seen, size, num_rows, device)
    if evidence.rows_lie(rows, seen.dim, key, num_rows):
        return layout
    return None if are_last else How.MEASURED


def _by_task(
    candidate: Candidate, evidence: "Evidence", passes: "_Passes", measured: Sequence[Key]
) -> tuple[dict[Key, Ownership | None], dict[int, float]]:
    """How owners are known where rows may move, and how long the tasks' gradients are there.

    None where several tasks share entries, however little: a task alone leaves the entries of
    others at 0, which no precision rounds.
    """
    losses = candidate.subject.losses
    keys, num_tasks = [key for key in measured if evidence.is_reached(key)], len(losses.present)
    seen = {
        key: TaskOwners(evidence.joint[key], _declared_owners(candidate, evidence, key))
        for key in keys
    }
    for number, alone in enumerate(torch.eye(num_tasks) if keys else ()):
        sketches = passes.sketch(candidate, losses.starts(alone))
        for key, owners in seen.items():
            owners.see(number, sketches.get(key, torch.zeros_like(evidence.joint[key])))
    lengths = {
        task: sum(owners.length(number) for owners in seen.values())
        for number, task in enumerate(losses.present if measured else ())
    }
    found: dict[Key, Ownership | None] = dict.fromkeys(keys)
    for key, owners in seen.items():
        for how, owner in ((How.MEASURED, owners.measured), (How.DECLARED, owners.declared)):
            if owner is not None:
                evidence.tolerance_at(key, owner, num_tasks)  # of steps between probes; may refuse
                found[key] = how if owners.are_apart(owner) else found[key]
    return found, lengths


def _declared_owners(candidate: Candidate, evidence: "Evidence", key: Key) -> Tensor | None:
    """The tasks of all entries of an output, if the forward declared them."""
    rows, sketches, subject = candidate.declared(key), evidence.joint[key], candidate.subject
    if rows is None:
        return None
    segments = rows.resolve(subject.tasks, subject.losses, sketches.device)
    along = segments.along(sketches.shape[0]).view(-1, *(1,) * (sketches.dim() - 2))
    return along.expand(sketches.shape[:-1])


def check_hooks(subject: Subject, partition: Partition) -> None:
    """Nodes made of parameters alone are called, and their hooks are not.

    That task gradients add up to the joint gradient does not show it for a task that is tiny
    beside the others, nor for a hook that clips what is large.
    """
    graph, names = subject.graph, subject.names
    for position, holds_rows in enumerate(partition.holds_rows):
        is_called = not holds_rows and graph.names[position] != LEAF
        if is_called and has_changing_hook(graph, position):
            below = [position]
            for at in below:  # grows on the way
                below += {child for child, _ in graph.children(at)} - {-1, *below}
            leaves = [graph.nodes[at].variable for at in below if graph.names[at] == LEAF]
            raise NotSeparable(
                "engine: a hook changes the gradient between a parameter and its use: "
                f'{some(names[leaf] for leaf in leaves if leaf in names)}. Use engine="per_task".'
            )


def _coupled(subject: Subject, junctions: Sequence[Junction]) -> str:
    shown = some(subject.names[p] for junction in junctions for p in junction.parameters)
    if subject.num_rows is None:
        return (
            "engine: parts of the batch serve several tasks at once, so the gradients of "
            f'{shown} cannot be separated by task in one backward. Use engine="per_task".'
        )
    why = (
        "normalisation over the batch in training mode (put it into eval mode, or replace it)"
        if any("BatchNorm" in name for name in subject.graph.names)
        else "in-batch negatives, a loss, a router or a normalisation over the whole batch"
    )
    return (
        f"engine: rows of the batch influence each other, so the gradients of {shown} cannot "
        f'be separated by task in one backward: {why}. Use engine="per_task".'
    )


class _Passes:
    """The passes of a probe, and what they started from, to be undone at its end."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._partition: Partition | None = None
        self._started: list[Tensor] = []  # the sum of all start gradients

    def count(self, starts: Sequence[Tensor]) -> None:
        """Take note of the start gradients of a pass."""
        started = self._started or [torch.zeros_like(start) for start in starts]
        self._started = [one + other for one, other in zip(started, starts, strict=True)]

    def sketch(
        self,
        candidate: Candidate,
        starts: Sequence[Tensor],
        reached_nodes: ReachedNodes | None = None,
    ) -> dict[Key, Tensor]:
        """Sketches of what arrives at the junctions; `reached_nodes` sees all nodes."""
        self._partition = candidate.partition
        junctions = candidate.partition.junctions
        sketches: dict[Key, Tensor] = {}

        def see(number: int, gradients: Sequence[Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                if gradient is not None and gradient.numel():
                    vectors = candidate.vectors((number, output), gradient)
                    sketches[number, output] = sketch(vectors)
            if reached_nodes is not None:
                reached_nodes.see(junctions[number].position, gradients)

        others: list[tuple[int, Arrive]] = []
        if reached_nodes is not None:
            inner = set(candidate.partition.row_nodes).difference(j.position for j in junctions)
            others = [(position, reached_nodes.see) for position in inner]
        self.count(starts)
        run_pass(self._graph, candidate.partition, starts, see, others=others, retain=True)
        return sketches

    def undo(self) -> None:
        """Take back what `retain_grad` of activations has added up so far."""
        if self._partition is not None:
            starts = [-start for start in self._started]
            run_pass(self._graph, self._partition, starts, lambda *_: None, retain=True)


@dataclass(eq=False)
class Evidence:
    """Sketches of passes.

    Attributes:
        lowest: The narrowest dtype on the way.
        joint: Of the joint pass.
        coded: Of a pass with a code per row, or per loss of a mapping.
        same: Of a pass with one code for all.
        tolerance: How much of a sketch may stay unexplained.
    """

    lowest: torch.dtype
    joint: Sketches
    coded: Sketches
    same: Sketches

    def __post_init__(self) -> None:
        self.tolerance = tolerance(self.lowest)

    def is_reached(self, key: Key) -> bool:
        """Whether a gradient other than zero came."""
        return key in self.coded and bool(self.coded[key].any())

    def rows_lie(self, rows: Tensor, dim: int, key: Key, num_rows: int) -> bool:
        """Whether the entries of a dimension of the sketches are seen to belong to these rows."""
        joint = self.joint[key]
        view = [1] * (joint.dim() - 1)
        view[dim] = -1
        row = rows.view(view).expand(joint.shape[:-1])
        codes = row_codes(num_rows)[None].to(joint)
        share, amount = map(float, unexplained(joint, [self.coded[key]], codes, row))
        allowed, noise = self.tolerance_at(key, row, num_rows)
        return share <= allowed or amount <= noise

    def tolerance_at(self, key: Key, owner: Tensor, num_owners: int) -> tuple[float, float]:
        """How much of the sketches of an output may stay unexplained: a share of an owner's.

        Where a gradient cancels out, rounding is all that is left of it, and is not smaller for a
        smaller code: any share, up to an amount. Elsewhere that is 0.

        Raises:
            NotSeparable: What one code for all does is no rounding.
        """
        joint = self.joint[key]
        one_code = joint.new_full((1, num_owners), _SAME)
        rounding, amount = map(float, unexplained(joint, [self.same[key]], one_code, owner))
        allowed = tolerance(self.lowest) + 4 * rounding
        if rounding <= repeatable(self.lowest):
            self.tolerance = max(self.tolerance, allowed)
            return allowed, 0.0
        largest = max(float(sketches.abs().max()) for sketches in self.joint.values())
        noise = negligible(self.lowest) * largest
        if rounding * float(joint.abs().max()) > noise and amount > noise / 4:
            raise NotSeparable(
                "engine: the backward of this model is not linear in the losses, or not the same "
                "when it runs again (a hook that clips or normalises gradients, or draws random "
                'numbers), so that tasks cannot be told apart. Use engine="per_task".'
            )
        return allowed, noise / 4


class TaskOwners:
    """The owners of one output's entries: shown by passes of one task alone, one after the other.

    However small the gradient of a task is beside those of others, it shows where it is.

    Args:
        sketches: Of the joint pass, `[..., R]`.
        declared: The owners that the forward declared, `[...]`.
    """

    def __init__(self, sketches: Tensor, declared: Tensor | None) -> None:
        self.declared = declared
        self.measured = torch.zeros_like(sketches[..., 0], dtype=torch.int64)
        self._most = torch.zeros_like(sketches[..., 0])  # of one task, at every entry
        self._sums: list[Tensor] = []  # by task: over all entries, and over its declared ones

    def see(self, task: int, sketches: Tensor) -> None:
        """Take note of the sketches of a task alone."""
        size = sketches.abs().sum(-1)
        self.measured = torch.where(size > self._most, task, self.measured)
        self._most = torch.maximum(size, self._most)
        local = size if self.declared is None else torch.where(self.declared == task, size, 0.0)
        self._sums.append(torch.stack([size.sum(), local.sum()]))

    def length(self, task: int) -> float:
        """The sum over all entries of a task's sketches."""
        return float(self._sums[task][0])

    def are_apart(self, owner: Tensor) -> bool:
        """Whether no task has a gradient at entries of others, to the rounding of their sum."""
        total, local = torch.stack(self._sums, dim=1)
        if owner is self.measured:
            every = range(len(total))
            local = torch.stack([torch.where(owner == t, self._most, 0.0).sum() for t in every])
        return bool((total - local <= torch.finfo(total.dtype).eps * total).all())

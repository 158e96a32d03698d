"""What C++ does of a step (`cpp/`), where it is built: plans are executed without Python.

Python finds, verifies and plans (`planner.py`), and takes the first step of a plan and its sizes.
What distinguishes its graph, sizes included, is kept as numbers. A later graph with the same
numbers needs no planning, and Python meets only those of its nodes that it needs.

`Execution`: small steps on a CPU, from the losses to `.grad`, with one question for weights. What
C++ does not know of them is built in Python after the pass: what is below sums for nodes that are
made of parameters alone, and junctions at which the pass ends.
`CaughtJunctions`: steps that build on the way; C++ collects what plain junctions are built from.

Whatever is unusual (hooks, declared rows, functions in Python, a step that verifies) goes Python's
way, which is the reference.
"""

# K components, T tasks, B rows, D width

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradvac.engine.budget import WaitingBudget
from gradvac.engine.builder import GradientBuilder
from gradvac.engine.contributions import Contribution
from gradvac.engine.declared_rows import DeclaredRows
from gradvac.engine.graph import (
    LEAF,
    Graph,
    count_hooks,
    is_marked,
    is_of_torch,
    settings,
    without_memory,
)
from gradvac.engine.junctions import Junction, ParameterPath
from gradvac.engine.kernels import Owned, Segments
from gradvac.engine.layouts import Layout
from gradvac.engine.losses import Losses
from gradvac.engine.passes import arrive_at_tap, stands_for_model_alone
from gradvac.engine.plain_junctions import Alike, Arrived, PlainJunctions, Target, target_of
from gradvac.engine.plan import Plan
from gradvac.engine.task_gradients import (
    ParameterGradients,
    TaskGradients,
    Weigh,
    add_to_grad,
    has_hooks,
)
from gradvac.utils.native import native

_MOST_KEPT = 64  # graphs, of up to a megabyte
_DTYPES = ({torch.float32}, {torch.float64})  # one for all parameters


class _NodeKind(IntEnum):
    """What tells C++ whether it may take a node for another of its type."""

    WITHOUT_SETTINGS, WITH_SETTINGS, UNKNOWN, MARKED = range(4)


def _node_kind(node: Any) -> _NodeKind:
    if not is_of_torch(node):
        return _NodeKind.MARKED if is_marked(node) else _NodeKind.UNKNOWN
    return _NodeKind.WITH_SETTINGS if settings(node) else _NodeKind.WITHOUT_SETTINGS


class _Kind(IntEnum):
    """What C++ knows of junctions."""

    PRODUCT, NORM, SCALE, SUM, LOOKUP, TABLE = range(6)


_PLAIN_KINDS = {
    "AddmmBackward0": _Kind.PRODUCT,
    "MmBackward0": _Kind.PRODUCT,
    "NativeLayerNormBackward0": _Kind.NORM,
    "FusedRmsNormBackward0": _Kind.NORM,
    "MulBackward0": _Kind.SCALE,
    "ExpandBackward0": _Kind.SUM,
}


@dataclass(frozen=True)
class Execution:
    """How graphs of one structure and the same sizes are executed.

    Attributes:
        compiled: Their plan in C++.
        parameters: That it reaches, and stand-ins of the size of what is made of parameters.
        numbers: Of the parameters among them, by `id`.
        paths: To what is made of parameters, in their order.
        above: Junctions above nodes that are made of parameters alone.
        others: Junctions that Python builds.
        layouts: Where rows lie in outputs (shape, layout) of junctions, beside the usual place.
        budget: Of what may wait, which is all.
        operand_bytes: Of all junctions.
        gradient_bytes: Of the gradient of one task, and of what it is pushed down from.
        largest_bytes: Of a parameter, or of what is made of some.
    """

    compiled: Any
    parameters: list[Tensor]
    numbers: dict[int, int]
    paths: list[ParameterPath]
    above: list[int]
    others: list[int]
    layouts: list[tuple[tuple[int, ...], Layout]]
    budget: WaitingBudget
    operand_bytes: int
    gradient_bytes: int
    largest_bytes: int

    def may_run(self, num_tasks: int, gradients: TaskGradients) -> bool:
        """Whether task gradients of the whole step may be held at once."""
        if num_tasks * self.largest_bytes > min(self.budget.limit, gradients.table_bytes):
            return False
        return self.budget.all_may_wait(self.operand_bytes, num_tasks * self.gradient_bytes)


@dataclass
class KnownGraphs:
    """Graphs of one structure and the same sizes, with which a step went well.

    Attributes:
        plan: Their plan.
        graph: What they have in common.
        execution: How C++ executes a whole step; None: it does not.
        catchable: The junctions that C++ may catch on the way (number, place in a walk, operation,
            edge of a factor).
        regions: Compiled ones; as long as they are kept, no other has the same address.
        caught: Those that it does, by number of tasks, whether their rows are in order, and what is
            not built.
    """

    plan: Plan
    graph: Graph
    execution: Execution | None
    catchable: list[tuple[int, int, int, int]]
    regions: list[object]
    caught: "dict[tuple[int, bool, tuple[int, int]], _Catch]" = field(default_factory=dict)


class Executor:
    """What is known of the graphs of a model.

    Args:
        kernels: The module in C++.
        component_of: Parameter -> component.
        gradients: Whose settings hold.
    """

    def __init__(
        self, kernels: Any, component_of: Mapping[nn.Parameter, int], gradients: TaskGradients
    ) -> None:
        self._kernels, self._component_of, self._gradients = kernels, component_of, gradients
        self._components = range(len(gradients.members))
        self._known: dict[object, KnownGraphs] = {}

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        """A copy has parameters of its own, and knows nothing of them."""
        return executor, (self._component_of, self._gradients)

    def walk(self, losses: Losses) -> Any:
        """The graph of some losses; None if this is not for C++."""
        if losses.index is None or len(losses.present) < 2 or losses.roots[0].is_leaf:
            return None
        walk = self._kernels.Walk(losses.roots[0])
        is_hooked = walk.has_hooks or count_hooks(walk.oldest)
        return None if is_hooked or DeclaredRows().since(walk.oldest) else walk

    def find(self, walk: Any) -> KnownGraphs | None:
        """What is known of such graphs."""
        known = self._known.pop(walk.content, None) if walk.is_known else None
        if known is None or not known.plan.is_settled:
            return None
        self._known[walk.content] = known  # the latest used last
        return known

    def execute(
        self,
        walk: Any,
        execution: Execution,
        rows: Segments,
        weigh: Weigh,
        builder: Callable[[], GradientBuilder],
    ) -> bool:
        """Run a step; False if this cannot be done here: nothing was changed."""
        if not execution.may_run(rows.num_tasks, self._gradients) or rows.tasks.is_cuda:
            return False
        every = (Owned(s, rows, how.dim, how.tiled).flat() for s, how in execution.layouts)
        indices = [None if segments is None else segments.tasks for segments in (rows, *every)]
        parameters = execution.parameters
        step = execution.compiled.run(parameters, walk, indices, rows.num_tasks)
        if step is None:
            return False
        if execution.paths or execution.others:
            _build_rest(step, execution, builder())
        execution.compiled.release(walk)  # nodes at which the pass ended did not run
        # C++ cannot tell hooks from those that are gone, as a probe's are.
        hooked = [n for n, p in enumerate(parameters) if has_hooks(p)]
        left = step.apply(weigh(self._components, step.grams()), hooked)
        if left:
            add_to_grad([parameters[p] for p, _ in left], [update for _, update in left])
        return True

    def catch(self, walk: Any, known: KnownGraphs, *given: Any) -> "CaughtJunctions":
        """Catch plain junctions on the way of a pass."""
        return CaughtJunctions(self._kernels, walk, known, *given)

    def meet(self, walk: Any, graph: Graph) -> None:
        """See what kinds of operations a graph has, before a pass.

        What was known of it is forgotten until the step has gone well: it may be refused.
        """
        if walk.is_known:
            self._known.pop(walk.content, None)
        else:
            kinds = [_NodeKind.UNKNOWN] * len(graph.nodes)
            for where, node in zip(graph.signature.order, graph.nodes, strict=True):
                kinds[where] = _node_kind(node)
            walk.learn(kinds)

    def learn(self, walk: Any, graph: Graph, plan: Plan) -> None:
        """A step went well in Python: others like it need not be planned."""
        if not walk.is_known or not plan.is_settled or plan.partition.outside:
            return
        caught, execution = _catchable(graph, plan), self._execution(graph, plan)
        regions = [graph.run(position).region for position in graph.signature.compiled]
        known = KnownGraphs(plan, graph.template(), execution, caught, regions)
        self._known[walk.content] = known
        if len(self._known) > _MOST_KEPT:
            del self._known[next(iter(self._known))]

    def _execution(self, graph: Graph, plan: Plan) -> Execution | None:
        junctions, plain = plan.partition.junctions, plan.plain(graph)
        is_on_host = graph.roots[0].device.type == "cpu"
        if plan.moves or self._gradients.metric is not None or not is_on_host:
            return None
        made = _Junctions(graph, plan, plain)
        if not all(map(made.add, range(len(junctions)))) or not made.junctions:
            return None
        parameters = [target for target in made.targets if isinstance(target, nn.Parameter)]
        are_frozen = not all(parameter.requires_grad for parameter in parameters)
        if are_frozen or {parameter.dtype for parameter in parameters} not in _DTYPES:
            return None
        components = [
            self._component_of[target] if isinstance(target, nn.Parameter) else -1
            for target in made.targets
        ]
        dtype = parameters[0].dtype
        every = [_stand_in(graph, target, dtype) for target in made.targets]
        # What Python builds waits too, and what is made of parameters may be larger than they are.
        beside = [one for one, k in zip(every, components, strict=True) if k < 0]
        beside += [p for number in made.others for p in junctions[number].parameters]
        places = [graph.signature.order[junctions[number].position] for number in made.others]
        given = (made.junctions, every, components, len(self._components), places)
        operands = plain.operand_bytes(graph)
        stream_bytes = self._gradients.stream_bytes
        return Execution(
            self._kernels.Plan(*given),
            every,
            {id(parameter): made.targets[parameter] for parameter in parameters},
            [target for target in made.targets if not isinstance(target, nn.Parameter)],
            made.above,
            made.others,
            list(made.layouts),
            WaitingBudget.of_step(operands, plain.parameter_bytes, stream_bytes),
            operands,
            plain.gradient_bytes + sum(one.nbytes for one in beside),
            max(one.nbytes for one in every),
        )


def executor(component_of: Mapping[nn.Parameter, int], gradients: TaskGradients) -> Executor | None:
    """An executor, where C++ is built."""
    kernels = native()
    return None if kernels is None else Executor(kernels, component_of, gradients)


def _build_rest(step: Any, execution: Execution, builder: GradientBuilder) -> None:
    """Let Python build what C++ does not know."""
    rest = _Rest()
    builder.begin(rest, WaitingBudget(1 << 62), frees=False)
    with torch.no_grad():
        for number, gradient in zip(execution.others, step.others, strict=True):
            builder.build(number, (gradient,))
        builder.build_waiting()
        made = zip(execution.paths, step.made(), strict=True)
        builder.build_below({path: by_task for path, by_task in made if by_task is not None})
        for number in execution.above:
            builder.pass_on(number)
        for identity, gradients in rest.gradients.items():
            step.add(execution.numbers[identity], gradients.stack(dense=True))


class _Rest:
    """Takes what Python builds of a step in C++."""

    table_bytes = head_bytes = 1 << 62

    def __init__(self) -> None:
        self.gradients: dict[int, ParameterGradients] = {}  # by `id`

    def _of(self, parameter: nn.Parameter) -> ParameterGradients:
        known = self.gradients.get(id(parameter))
        if known is None:
            known = self.gradients[id(parameter)] = ParameterGradients(parameter, 0, 1 << 62)
        return known

    def add(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """What a junction contributes to a parameter."""
        self._of(parameter).add(contribution)

    def add_block(self, parameters: Sequence[nn.Parameter], block: Tensor) -> None:
        """All task gradients of a use of some parameters, `[n, T, P]`."""
        for number, parameter in enumerate(parameters):
            self._of(parameter).add_stack(block, number)


class _Catch(NamedTuple):
    """Junctions that are caught, as C++ is told of them, and where rows lie in them."""

    given: list[tuple[Any, ...]]  # as in KnownGraphs; equal where alike; number of the place
    places: list[tuple[Layout, tuple[int, ...]]]  # layout and shape


def _choose(known: KnownGraphs, builder: GradientBuilder) -> _Catch:
    """Those that wait for others once they have arrived."""
    graph, plan = builder.graph, builder.plan
    given = list[tuple[Any, ...]]()
    places: dict[tuple[Layout, tuple[int, ...]], int] = {}
    for one in known.catchable:
        junction, how = builder.plain.by_number[one[0]], plan.owners[one[0], 0]
        shape = graph.shape(junction.position)
        rows = None if 0 in shape else builder.rows_of_plain(junction, shape)
        if rows is None or not isinstance(how, Layout):
            continue
        described, size = graph.described(junction.position)[0], math.prod(shape[:-1])
        like = partial(without_memory, dtype=described.dtype, device=rows.device)
        saved = (like((size, junction.inner)),) if junction.inner else ()
        if not Arrived(junction, saved, like(shape), rows).is_large:
            given.append((*one, junction.like, places.setdefault((how, shape), len(places))))
    return _Catch(given, list(places))


class CaughtJunctions:
    """Plain junctions of one pass, which C++ collects until they are built.

    Args:
        kernels: The module in C++.
        walk: The graph.
        known: What is known of it.
        builder: Builds them.
        budget: Of what may wait.
        groups: Of every junction.
        done: Called with a group whose junctions have all run.
        arrive: Called with a junction that is not plain after all, and its output gradients.

    Attributes:
        numbers: Of the junctions.
    """

    def __init__(
        self,
        kernels: Any,
        walk: Any,
        known: KnownGraphs,
        builder: GradientBuilder,
        budget: WaitingBudget,
        groups: Sequence[Sequence[int]],
        done: Callable[[int], None],
        arrive: Callable[[int, Sequence[Tensor | None]], None],
    ) -> None:
        self._builder, self._budget, self._done, self._arrive = builder, budget, done, arrive
        key = (builder.num_tasks, builder.rows_in_order, builder.limits)
        if key not in known.caught:
            known.caught[key] = _choose(known, builder)
        given, places = known.caught[key]
        every = (builder.rows_at(*place) for place in places)
        self._rows = [rows for rows in every if rows is not None]  # all: they were chosen so
        called = (self._overflow, self._complete, self._other)
        self._arrivals = kernels.Arrivals(walk, given, groups, builder.freed_share, *called)
        self._allow()
        self.numbers = frozenset(self._arrivals.start())
        builder.take_caught = self.take

    def take(self) -> list[Alike]:
        """What has arrived and was not taken yet."""
        self._count()
        by_number = self._builder.plain.by_number
        return [
            Alike([by_number[n] for n in numbers], gradients, saved, self._rows[place])
            for numbers, gradients, saved, place in self._arrivals.take()
        ]

    def complete_with(self, number: int) -> list[int]:
        """The groups that are complete, now that a junction has arrived."""
        complete: list[int] = self._arrivals.count(number)
        return complete

    def stop(self) -> None:
        """The pass is over: whoever knows us is forgotten, or the graph would wait for that."""
        self._arrivals.stop()
        self._builder.take_caught = None
        del self._done, self._arrive

    def _count(self) -> None:
        operands, freed = self._arrivals.take_counts()
        self._budget.operands += operands
        self._budget.freed += freed

    def _allow(self) -> None:
        budget = self._budget
        self._arrivals.allow(budget.limit - budget.operands, budget.freed - budget.gradients)

    def _overflow(self) -> None:
        self._builder.build_waiting()
        self._allow()

    def _complete(self, groups: Sequence[int]) -> None:
        self._count()
        for group in groups:
            self._done(group)
        self._allow()

    def _other(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        self._count()
        graph, junction = self._builder.graph, self._builder.plan.partition.junctions[number]
        arrive = partial(self._arrive, number)
        if graph.is_tap(junction.position):
            arrive_at_tap(graph, junction.position, arrive, gradients)
        else:
            arrive(gradients)
        self._allow()


class _Junctions:
    """Collects junctions in the form that C++ is given."""

    def __init__(self, graph: Graph, plan: Plan, plain: PlainJunctions) -> None:
        self._graph, self._plan, self._plain = graph, plan, plain
        (self._num_rows,) = graph.shape(graph.root_positions[0])
        self.junctions: list[tuple[int, int, int, int, bool, int, int, int]] = []
        self.targets: dict[Target, int] = {}
        self.above: list[int] = []
        self.others: list[int] = []
        self.layouts: dict[tuple[tuple[int, ...], Layout], int] = {}

    def add(self, number: int) -> bool:
        """Add a junction; False if neither C++ nor, after the pass, Python can build it."""
        junction, how = self._plan.partition.junctions[number], self._plan.owners[number, 0]
        if not isinstance(how, Layout) or how.moved_by is not None:
            return False
        shape = self._graph.shape(junction.position)
        rows = self._rows(shape, how)
        found = None if rows is None else self._read(number, junction, rows)
        if found is not None:
            self.junctions.append(found)
            if junction.through:
                self.above.append(number)
        elif junction.ends and self._graph.num_outputs(junction.position) == 1:
            self.others.append(number)
        else:
            return False
        for parameter in junction.parameters:
            self._number(parameter)
        dtype = self._graph.described(junction.position)[0].dtype
        return all(p.dtype == dtype and p.is_contiguous() for p in junction.parameters)

    def _rows(self, shape: tuple[int, ...], how: Layout) -> int | None:
        """The number of the index of a junction's rows."""
        if how == Layout(0):
            return 0
        if len(shape) < 2 or how.dim >= len(shape) - 1:
            return None
        return self.layouts.setdefault((shape, how), len(self.layouts) + 1)

    def _read(
        self, number: int, junction: Junction, rows: int
    ) -> tuple[int, int, int, int, bool, int, int, int] | None:
        graph, position = self._graph, junction.position
        name, shape = graph.names[position], graph.shape(junction.position)
        where, plain = graph.signature.order, self._plain.by_number.get(number)
        if plain is not None and name in _PLAIN_KINDS and plain.fits(graph) and len(shape) > 1:
            weight = self._number(plain.weight)
            shift = -1 if plain.shift is None else self._number(plain.shift)
            kind, edge = _PLAIN_KINDS[name], plain.kind.weight
            return (kind, where[position], weight, shift, plain.is_transposed, edge, -1, rows)
        if len(junction.edges) > 1 or junction.paths[0][2]:
            return None
        edge, (below, output, _) = junction.edges[0], junction.paths[0]
        if name == "EmbeddingBackward0" and graph.names[below] == LEAF:
            weight = self._number(graph.nodes[below].variable)
            return (_Kind.LOOKUP, where[position], weight, -1, False, edge, -1, rows)
        if name != "AddBackward0" or len(shape) < 2:
            return None
        inner = graph.shape(below, output)
        is_for_rows = rows == 0 and shape[0] == self._num_rows and _trimmed(inner) == shape[1:]
        is_table = graph.names[below] == "EmbeddingBackward0" and junction.through == (below,)
        table = graph.children(below)[0][0] if is_table else -1
        if is_for_rows and table >= 0 and graph.names[table] == LEAF:
            weight = self._number(graph.nodes[table].variable)
            return (_Kind.TABLE, where[position], weight, -1, False, edge, where[below], rows)
        is_vector = inner[-1:] == shape[-1:] == (math.prod(inner),)
        if not (is_for_rows or is_vector):
            return None
        weight = self._number(target_of(graph, junction.paths[0]))
        return (_Kind.SUM, where[position], weight, -1, False, edge, -1, rows)

    def _number(self, target: Target) -> int:
        return self.targets.setdefault(target, len(self.targets))


def _stand_in(graph: Graph, target: Target, dtype: torch.dtype) -> Tensor:
    """A parameter, or a tensor without memory of the size of what is made of parameters."""
    if isinstance(target, nn.Parameter):
        return target
    return without_memory(graph.shape(*target[:2]), dtype, graph.roots[0].device)


_CATCHABLE = {name: number for number, name in enumerate(_PLAIN_KINDS)}
_TAP, _END = len(_CATCHABLE), len(_CATCHABLE) + 1


def _catchable(graph: Graph, plan: Plan) -> list[tuple[int, int, int, int]]:
    """Plain junctions of which nothing but a gradient is to come."""
    found = []
    for number, one in plan.plain(graph).by_number.items():
        junction, place = plan.partition.junctions[number], graph.signature.order[one.position]
        kind = _CATCHABLE.get(graph.names[one.position])
        if graph.is_tap(one.position) and stands_for_model_alone(graph, junction):
            kind = _TAP
        elif junction.ends:
            kind = _END if plan.partition.has_taps else None
        if kind is not None:
            found.append((number, place, kind, one.kind.weight))
    return found


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of size 1 in front, along which rows are."""
    return shape[1:] if shape[:1] == (1,) else shape

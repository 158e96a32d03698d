"""The one_backward engine: vaccination for the price of plain training.

The model and its forward are left alone. `backward` reads the ordinary autograd graph, runs one
backward over it *without* parameter gradients, and builds task gradients at the *junctions*, where
parameters meet the rows of the batch. When all contributions to a component's parameters have
arrived, alone or with other components that wait, their Gram matrices are taken and weighed, the
updates written to `.grad`, and the task gradients freed.
"""

# K components, T tasks

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradvac.engine.budget import WaitingBudget
from gradvac.engine.builder import GradientBuilder
from gradvac.engine.contributions import Contribution
from gradvac.engine.declared_rows import DeclaredRows
from gradvac.engine.executor import CaughtJunctions, KnownGraphs, executor
from gradvac.engine.graph import Graph, NotSeparable, check_parameters, release
from gradvac.engine.joint_gradient import GradientSketches, is_due
from gradvac.engine.kernels import Segments, sketch, wide
from gradvac.engine.layouts import all_agree
from gradvac.engine.losses import Losses
from gradvac.engine.ownership import Key, MeasuredOwners, task_codes
from gradvac.engine.passes import (
    ReachedNodes,
    autocast_off,
    check_hidden_backwards,
    copies,
    run_pass,
)
from gradvac.engine.per_task import Expect, Receive
from gradvac.engine.plan import How, Plan
from gradvac.engine.planner import Planner
from gradvac.engine.task_gradients import TaskGradients, Weigh, Write, add_to_grad
from gradvac.gram import working_dtype
from gradvac.utils.devices import is_captured
from gradvac.utils.hints import some, warn_caller


class Walked(NamedTuple):
    """A graph in C++, and what is known of such graphs; None where that is not for C++."""

    walk: Any
    known: KnownGraphs | None


class PlanOutdated(Exception):  # noqa: N818
    """A gradient came through a part of the graph that none had reached before: probe again."""


class OneBackward:
    """One backward for all tasks.

    Args:
        model: The model; it is only read.
        tasks: Task names.
        gradients: Of its components.
        recompute: Two backward passes with the memory of plain training, for components that
            cannot stream (whole_model, enc_dec): the first takes Gram matrices only.
        check: Verify how rows lie on the first batches and now and then, not only where it is new.
        has_fallback: Another engine can go on where a step is refused, if the graph is intact.
    """

    name = "one_backward"

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[str],
        gradients: TaskGradients,
        *,
        recompute: bool,
        check: bool,
        has_fallback: bool,
    ) -> None:
        self._model, self._tasks, self._recompute = model, tuple(tasks), recompute
        self._check, self._has_fallback, self.gradients = check, has_fallback, gradients
        self._names = {p: n for n, p in model.named_parameters() if p.requires_grad}
        members = enumerate(gradients.members)
        self._component_of = {p: k for k, parameters in members for p in parameters}
        self._planner = Planner(self._names, self._component_of, self._tasks)
        # glibc keeps twice the largest block it has seen freed, up to this size, instead of giving
        # it back: task gradients come and go, and their pages need not be faulted in every step.
        torch.empty(31 << 20, dtype=torch.uint8)
        self._executor = executor(self._component_of, gradients)
        self._steps = 0
        self._last_rows: tuple[Tensor, object, Segments] | None = None
        self._announced: set[str] = set()
        self.plan: Plan | None = None

    def backward(self, losses: Losses, weigh: Weigh) -> None:
        """Differentiate all tasks at once and add the updates to `.grad`.

        Raises:
            NotSeparable: The losses cannot be separated; `.grad` is as it was.
            PlanOutdated: What was learned of this graph no longer holds; call once more.
        """
        walked = self._walk(losses)
        if self._execute(walked, losses, weigh):
            return
        kept: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        with self._planned(losses, walked) as planned:
            # A step that may still be refused writes at its end.
            write = (lambda *update: kept.append(update)) if planned.may_be_refused else add_to_grad
            try:
                if self._recompute:
                    outside = self._run_twice(planned, weigh, write)
                else:
                    outside = planned.run_by_component(self.gradients, weigh, write)
                    self.gradients.finish()
            finally:
                self.gradients.clear()
        for update in [*kept, (list(outside), list(outside.values()))]:
            add_to_grad(*update)

    def _walk(self, losses: Losses) -> "Walked":
        """The graph in C++, where that is built, and what is known of such graphs."""
        walk = None if self._executor is None else self._executor.walk(losses)
        if self._executor is None or walk is None or self._is_to_verify(losses, self._steps + 1):
            return Walked(walk, None)
        return Walked(walk, self._executor.find(walk))

    def _execute(self, walked: "Walked", losses: Losses, weigh: Weigh) -> bool:
        """A whole step in C++, if one like it went well and it is small."""
        walk, known = walked
        if self._executor is None or known is None or known.execution is None or self._recompute:
            return False
        assert losses.index is not None
        rows = self._rows_of_losses(losses, losses.index)

        def builder() -> GradientBuilder:
            graph = known.graph.again(losses.roots, walk)
            return GradientBuilder(graph, known.plan, losses, rows, DeclaredRows(), self._tasks)

        with autocast_off(losses.device):
            has_run = self._executor.execute(walk, known.execution, rows, weigh, builder)
        if has_run:
            self._steps, self.plan = self._steps + 1, known.plan
        return has_run

    def _is_to_verify(self, losses: Losses, step: int) -> bool:
        is_due_now = self._check and len(losses.present) > 1 and is_due(step)
        return is_due_now and not is_captured(losses.device)

    def task_gradients(self, losses: Losses, receive: Receive) -> dict[Tensor, Tensor]:
        """Show `receive` every parameter's task gradients, once all are there.

        Returns:
            The joint gradients of leaves that are not the model's.
        """
        gradients = TaskGradients(self.gradients.members)
        with self._planned(losses, self._walk(losses)) as planned:
            outside = planned.run_by_component(gradients)
        for parameter in gradients.collected:
            _show(gradients, parameter, losses, receive)
        return outside

    def stream(self, losses: Losses, receive: Receive, expect: Expect) -> dict[Tensor, Tensor]:
        """The same, each parameter as soon as it is complete, unless the step may be refused.

        `expect` is called before, with the parameters that may come.
        """
        gradients = TaskGradients(self.gradients.members)

        def done(parameter: nn.Parameter) -> None:
            if not planned.may_be_refused:
                _show(gradients, parameter, losses, receive)

        with self._planned(losses, self._walk(losses)) as planned:
            if not planned.may_be_refused:
                expect(planned.plan.parameters())
            outside = planned.run_by_parameter(gradients, done)
        if planned.may_be_refused:
            expect(gradients.collected)
        for parameter in gradients.collected:
            _show(gradients, parameter, losses, receive)
        return outside

    def describe(self) -> str:
        """Where rows were found, in words."""
        return "no batch so far" if self.plan is None else self.plan.describe()

    @contextmanager
    def _planned(self, losses: Losses, walked: "Walked") -> "Iterator[PlannedBackward]":
        """A backward; lets another engine continue after an error while the graph is intact."""
        walk, known = walked
        if known is not None:
            graph = known.graph.again(losses.roots, walk)
            if not all_agree(graph, known.plan.moves, len(losses.roots[0])):
                walked = Walked(walk, None)  # indices move rows in another way
        if walked.known is None:
            graph = Graph(losses.roots, self._planner.identities, settings=losses.index is None)
            if not self._planner.knows(graph):
                check_parameters(self._model, self._names, graph)
            graph.check_compiled()
        planned = None
        try:
            with autocast_off(losses.device):
                planned = self._plan(graph, losses, walked)
                yield planned
            self._announce(planned.builder.slow)
            if walked.known is None and walk is not None and self._executor is not None:
                self._executor.learn(walk, graph, planned.plan)
            if planned.keeps_graph:  # a loop that still holds the losses would hold it all
                for node in graph.nodes:
                    release(node)
        except (NotSeparable, PlanOutdated, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # What cannot be recorded is not recorded in another engine instead, which would be
            # slow for good: whoever records runs a step as it is written, and learns of the error.
            is_intact = planned is None or planned.may_be_refused
            if not self._has_fallback or not is_intact or is_captured(losses.device):
                raise
            met = f"engine: one_backward met {type(error).__name__}: {error}"
            raise NotSeparable(met) from error
        finally:
            if planned is not None:
                planned.builder.close()

    def _plan(self, graph: Graph, losses: Losses, walked: "Walked") -> "PlannedBackward":
        declared = DeclaredRows()
        self._steps += 1
        if walked.known is not None:
            self.plan = walked.known.plan
        else:
            if self._executor is not None and walked.walk is not None:
                self._executor.meet(walked.walk, graph)
            verify = self._is_to_verify(losses, self._steps)
            self.plan = self._planner.plan(graph, losses, declared, verify=verify)
        rows = None if losses.index is None else self._rows_of_losses(losses, losses.index)
        builder = GradientBuilder(graph, self.plan, losses, rows, declared, self._tasks)
        catch = None
        if self._executor is not None and walked.known is not None:
            catch = partial(self._executor.catch, walked.walk, walked.known)
        return PlannedBackward(builder, catch, has_fallback=self._has_fallback)

    def _rows_of_losses(self, losses: Losses, index: Tensor) -> Segments:
        num_tasks, device = len(losses.present), losses.device
        if is_captured(losses.device):  # what a graph being recorded makes has no values yet
            return Segments(index, num_tasks, device)
        key = (num_tasks, device, index.device)
        if self._last_rows is not None and index.device.type == "cpu":
            last_index, last_key, segments = self._last_rows  # batches are often laid out alike
            if last_key == key and torch.equal(last_index, index):
                return segments
        segments = Segments(index, num_tasks, device)
        self._last_rows = (index, key, segments)
        return segments

    def _run_twice(
        self, planned: "PlannedBackward", weigh: Weigh, write: Write
    ) -> dict[Tensor, Tensor]:
        """Gram matrices first, one parameter in memory at a time; then the updates, likewise."""
        members, losses = self.gradients.members, planned.losses
        device, num_tasks = losses.device, len(losses.present)
        shape = (len(members), num_tasks, num_tasks)
        grams = torch.zeros(shape, dtype=working_dtype(device), device=device)
        gradients = TaskGradients(members, table_bytes=self.gradients.table_bytes)

        def add_gram(parameter: nn.Parameter) -> None:
            if (collected := gradients.take(parameter)) is not None:
                grams[self._component_of[parameter]] += collected.gram()

        def write_update(parameter: nn.Parameter) -> None:
            if (collected := gradients.take(parameter)) is not None:
                update = collected.combine(weights[self._component_of[parameter]])
                write([parameter], [update])

        planned.run_by_parameter(gradients, add_gram, again=True)
        weights = weigh(range(len(members)), grams)
        return planned.run_by_parameter(gradients, write_update)

    def _announce(self, slow: Sequence[str]) -> None:
        """Warn once of operations that are computed task by task."""
        new = [operation for operation in slow if operation not in self._announced]
        self._announced |= set(new)
        if new:
            warn_caller(
                f"engine: {len(new)} place(s) have no fast path and are computed task by task, "
                f"which is exact but slower: {some(new)}."
            )


class PlannedBackward:
    """One backward by a plan: the passes over its graph.

    Args:
        builder: Builds what the junctions of the graph contribute.
        catch: Lets C++ catch junctions on the way, where it can.
        has_fallback: Another engine can go on if the step is refused.

    Attributes:
        may_be_refused: The step may still be refused: nothing may be written before its end.
        keeps_graph: The last pass leaves the graph intact, because it may be needed once more.
    """

    def __init__(
        self,
        builder: GradientBuilder,
        catch: Callable[..., CaughtJunctions] | None,
        *,
        has_fallback: bool,
    ) -> None:
        self.builder, self._catch = builder, catch
        self.graph, self.plan, self.losses = builder.graph, builder.plan, builder.losses
        plan = self.plan
        self.may_be_refused = not plan.is_proven or plan.is_measured or bool(plan.unreached)
        # With hooks, nodes of parameters alone may run before they are called.
        self.keeps_graph = self.graph.has_hooks or bool(plan.unreached)
        self.keeps_graph |= self.may_be_refused and has_fallback

    def run_by_component(
        self, gradients: TaskGradients, weigh: Weigh | None = None, write: Write | None = None
    ) -> dict[Tensor, Tensor]:
        """The backward; `gradients` weighs components as they are complete, if it is told how.

        Returns:
            The joint gradients of leaves that are not the model's.
        """
        builder, num_tasks = self.builder, len(self.losses.present)
        plain, operands = builder.plain, builder.plain.operand_bytes(self.graph)
        budget = WaitingBudget.of_step(operands, plain.parameter_bytes, gradients.stream_bytes)
        entry_bytes = num_tasks * self.plan.lowest.itemsize
        gradients.begin(weigh, write, builder.build_waiting, entry_bytes, budget)
        # A GPU would wait for what is launched so late; hooks may write over what is captured.
        can_wait = self.losses.device.type == "cpu" and not self.graph.has_hooks
        fits = budget.all_may_wait(operands, num_tasks * plain.gradient_bytes)
        return self._run(
            gradients,
            budget,
            None if can_wait and fits else self.plan.components,
            gradients.component_done,
            frees=not self.keeps_graph,
        )

    def run_by_parameter(
        self,
        gradients: TaskGradients,
        done: Callable[[nn.Parameter], None],
        *,
        again: bool = False,
    ) -> dict[Tensor, Tensor]:
        """The same; calls `done` when a parameter is complete. `again`: another will follow."""
        groups = [junction.parameters for junction in self.plan.partition.junctions]
        return self._run(gradients, WaitingBudget(0), groups, done, again=again)

    def _run(
        self,
        gradients: TaskGradients,
        budget: WaitingBudget,
        groups: Sequence[Collection[Any]] | None,
        done: Callable[[Any], None],
        *,
        frees: bool = False,
        again: bool = False,
    ) -> dict[Tensor, Tensor]:
        """The backward; calls `done` when all junctions that have a group in `groups` have run.

        Without groups nothing is done before the end, and plain junctions are built then.
        """
        plan, builder, has_hooks = self.plan, self.builder, self.graph.has_hooks
        junctions, unreached = plan.partition.junctions, plan.unreached
        reached_nodes, after_run = ReachedNodes(), self._of_one_task()
        counted = None if self.losses.joint is None else _CountedGradients(gradients)
        builder.begin(counted or gradients, budget, frees=frees)
        captured = builder.capture() if groups is None else {}
        complete_with = _countdown(groups)

        def arrive(number: int, output_gradients: Sequence[Tensor | None]) -> None:
            if unreached and junctions[number].position in unreached:
                reached_nodes.see(junctions[number].position, output_gradients)
            if has_hooks:  # contributions hold gradients, over which some hooks write
                output_gradients = copies(output_gradients)
            builder.build(number, output_gradients, captured.get(number))
            complete = complete_with(number)
            if not complete:
                return

            def finish(*_: object) -> None:
                for group in complete:
                    done(group)

            # What follows may change the parameters, which a node reads when it runs.
            if (junctions[number].ends and not has_hooks) or number in after_run:
                finish()
            else:
                node = self.graph.nodes[junctions[number].position]
                hooks.callback(node.register_hook(finish).remove)

        if plan.is_measured and builder.measured is None:
            builder.measured = self._measure()
        shown = {junction.position for junction in junctions} if unreached else set()
        others = [(position, reached_nodes.see) for position in unreached - shown]
        caught = frozenset[int]()
        with ExitStack() as hooks:
            if self._catch is not None and groups is plan.components:
                by_executor = self._catch(builder, budget, groups, done, arrive)
                hooks.callback(by_executor.stop)
                caught, complete_with = by_executor.numbers, by_executor.complete_with
            if not plan.is_proven:
                hooks.enter_context(check_hidden_backwards(plan.names, self.graph))
            returned = run_pass(
                self.graph,
                plan.partition,
                self.losses.starts(),
                arrive,
                captured=captured,
                caught=caught,
                others=others,
                after_run=after_run,
                retain=again or self.keeps_graph,
            )
            builder.build_waiting()
        self._check_reached(reached_nodes)
        if builder.measured is not None:
            builder.measured.check()
        outside = self._outside(returned, counted)
        if not again:
            plan.succeed()
        return outside

    def _outside(
        self, returned: Sequence[Tensor | None], counted: "_CountedGradients | None"
    ) -> dict[Tensor, Tensor]:
        """The joint gradients of leaves that are not the model's, once all sums were checked."""
        pairs = zip(self.plan.partition.leaves_outside(self.graph), returned, strict=True)
        outside = {leaf: g for leaf, g in pairs if g is not None and leaf.requires_grad}
        if counted is not None:
            assert self.losses.joint is not None
            for leaf, gradient in outside.items():
                counted.sums.add(leaf, gradient)
            self._check_sum(self.losses.joint.differing(counted.sums))
        return outside

    def _check_reached(self, reached_nodes: ReachedNodes) -> None:
        """Let the plan expire if a gradient came through what none had come through before."""
        if self.plan.unreached and reached_nodes.unreached() != self.plan.unreached:
            self.plan.expire("a gradient reached a part of it for the first time")
            if self.losses.joint is None:  # else this batch was probed, and it is rounding
                raise PlanOutdated

    def _check_sum(self, wrong: Collection[Tensor]) -> None:
        """Refuse the graph if task gradients do not add up to the joint gradient."""
        if wrong:
            names = [name for p, name in self.plan.names.items() if any(p is w for w in wrong)]
            self.plan.refuse(
                f"engine: the task gradients of {some(names)} do not add up to the joint gradient, "
                "as with a hook between a parameter and its use, or with a function whose backward "
                'can run only once. Use engine="per_task".'
            )

    def _of_one_task(self) -> set[int]:
        """Python functions whose own run gives all that is asked of them.

        A second call would do it too, but some write over what they saved.
        """
        is_alone, owners = len(self.losses.present) == 1, self.plan.owners
        functions = self.plan.partition.functions
        return {n for n in functions if is_alone or owners.get((n, 0)) is How.REACHED}

    def _measure(self) -> MeasuredOwners:
        """Passes with a code per task, where owners depend on the data."""
        plan, losses = self.plan, self.losses
        codes = task_codes(len(losses.present), plan.lowest.itemsize < 4)
        every = map(codes.of_tasks, range(codes.num_passes))
        coded = [self._sketch(losses.starts(weights)) for weights in every]
        groups = map(torch.tensor, plan.smaller(losses.present))
        smaller = [(tasks, self._sketch(losses.starts(tasks))) for tasks in groups]
        return MeasuredOwners(codes, coded, smaller, plan.lowest, plan.tolerance)

    def _sketch(self, starts: Sequence[Tensor]) -> dict[Key, Tensor]:
        sketches: dict[Key, Tensor] = {}

        def see(number: int, gradients: Sequence[Tensor | None]) -> None:
            for output, gradient in enumerate(gradients):
                is_measured = self.plan.owners.get((number, output)) is How.MEASURED
                if gradient is not None and is_measured:
                    junction = self.plan.partition.junctions[number]
                    sketches[number, output] = sketch(junction.vectors(gradient))

        run_pass(self.graph, self.plan.partition, starts, see, retain=True)
        return sketches


def _countdown(groups: Sequence[Collection[Any]] | None) -> Callable[[int], list[Any]]:
    """Tells which groups are complete, now that a junction has arrived."""
    num_left = Counter([group for of_junction in groups or () for group in of_junction])

    def complete_with(number: int) -> list[Any]:
        arrived = () if groups is None else groups[number]
        num_left.subtract(arrived)
        return [group for group in arrived if not num_left[group]]

    return complete_with


class _CountedGradients:
    """Adds up what is delivered to some task gradients, on the way to them."""

    def __init__(self, gradients: TaskGradients) -> None:
        self._gradients, self.sums = gradients, GradientSketches()
        self.table_bytes, self.head_bytes = gradients.table_bytes, gradients.head_bytes

    def add(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        self.sums.add(parameter, contribution.total())
        self._gradients.add(parameter, contribution)

    def add_block(self, parameters: Sequence[nn.Parameter], block: Tensor) -> None:
        for parameter, stack in zip(parameters, block, strict=True):
            self.sums.add(parameter, stack.sum(0, dtype=wide(stack.dtype)).view(parameter.shape))
        self._gradients.add_block(parameters, block)


def _show(
    gradients: TaskGradients, parameter: nn.Parameter, losses: Losses, receive: Receive
) -> None:
    """Hand over the task gradients of a parameter, if there are any."""
    collected = gradients.take(parameter)
    if collected is not None:
        receive(parameter, dict(zip(losses.present, collected.dense(), strict=True)))

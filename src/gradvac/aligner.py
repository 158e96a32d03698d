"""The Aligner: `aligner.backward(losses, tasks)` instead of `losses.sum().backward()`."""

# K components, T tasks, B rows

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.alignment import Alignment, WeighedComponents, assemble, warn_if_identical
from gradvac.engine import (
    ENGINES,
    Components,
    Exchange,
    Granularity,
    LocalEngine,
    Losses,
    Metric,
    Ranks,
    TasksOfRows,
    Weigh,
    digest,
    read_local_losses,
    read_losses,
    sharded_modules,
    split,
    unsharded_backward,
)
from gradvac.engine.models import allow_second_passes, check_later_changes, is_sharded, unwrap
from gradvac.rules import Rule, as_rule
from gradvac.tasks import read_names
from gradvac.utils.devices import index_on
from gradvac.utils.hints import some

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Aligner:
    """Combines task gradients by a rule, per component and step.

    Args:
        model: The model to train; with several processes, in `DistributedDataParallel` or sharded
            by FSDP2. Its trainable parameters are divided into components here, once.
        tasks: Task names, in the order you want to see them.
        rule: How task gradients are combined: a rule, or its name; default `GradVac()`.
        granularity: Which parameters share a component: "whole_model", "enc_dec", "all_layer",
            "all_matrix", or a callable from parameter name to component name.
        engine: "one_backward" (one backward on a mixed batch), "per_task" (one per task, any
            model), or "auto": the first where it applies.
        recompute: one_backward takes a second backward pass instead of storing task gradients of
            components that complete only at the end ("whole_model", "enc_dec").
        storage_dtype: per_task stores task gradients in this dtype; None: each parameter's own.
        offload: per_task stores task gradients in host memory.
        check: one_backward verifies, on the first batches and occasionally later, whose gradients
            are whose; a new graph structure is verified in any case.
        stream_bytes: Complete components wait up to this size, to be weighed together; None: a
            small share of what the step needs, and more as the backward frees activations.
        table_bytes: one_backward never builds task gradients of a matrix larger than this, and
            takes a second product instead; nor those of smaller heads where that costs more.
        process_group: The processes that together train a model without DistributedDataParallel;
            None: each trains a model of its own.
        exact: With several processes, False leaves out the inner products between gradients of
            different processes, and sends less; see docs/processes.md.
        metric: What Gram matrices, and so rules and the returned similarities, see of task
            gradients, such as `AdamMetric`; None: the gradients as they are.

    Examples:
        >>> import torch
        >>> from gradvac import Aligner, GradVac
        >>> model = torch.nn.Linear(3, 1)
        >>> aligner = Aligner(model, tasks=["fr", "hi"], rule=GradVac(beta=1e-2))
        >>> losses = model(torch.randn(4, 3)).squeeze(1).square()
        >>> alignment = aligner.backward(losses, ["fr", "fr", "hi", "hi"])
        >>> alignment.similarity.shape
        torch.Size([1, 2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: Sequence[str],
        rule: Rule | str | None = None,
        granularity: Granularity = "all_layer",
        engine: str = "auto",
        *,
        recompute: bool = False,
        storage_dtype: torch.dtype | None = None,
        offload: bool = False,
        check: bool = True,
        stream_bytes: int | None = None,
        table_bytes: int = 1 << 32,
        process_group: "ProcessGroup | Literal['auto'] | None" = "auto",
        exact: bool = True,
        metric: Metric | None = None,
    ) -> None:
        self.tasks = read_names(tasks)
        self._given, self._metric = model, metric
        model, group = unwrap(model, process_group)
        _check_options(
            engine,
            switches={"recompute": recompute, "offload": offload, "check": check, "exact": exact},
            sizes={"stream_bytes": stream_bytes or 0, "table_bytes": table_bytes},
            storage_dtype=storage_dtype,
            metric=metric,
            is_shared=group is not None,
            is_sharded=group is not None and is_sharded(model),
        )
        self.rule = as_rule(rule)
        self.components: Components = split(model, granularity)
        self.rule.bind(self.tasks, tuple(self.components))
        num_parts = self.rule.parts_per_task
        parts = self.tasks  # what engines know as tasks
        if num_parts > 1:
            parts = tuple(f"{task} #{p}" for task in self.tasks for p in range(num_parts))
        with unsharded_backward(sharded_modules(model)):
            self._engine = LocalEngine(
                engine,
                model,
                self.components,
                parts,
                recompute=recompute,
                storage_dtype=storage_dtype,
                offload=offload,
                check=check,
                stream_bytes=stream_bytes,
                table_bytes=table_bytes,
                is_shared=group is not None,
                metric=metric,
            )
        allow_second_passes()
        self._pending: dict[int, Tensor] = {}  # losses of accumulated tasks, by position
        self._num_accumulated = 0  # micro-batches
        self._first = True
        self._exchange: Exchange | None = None
        if group is not None:
            self._exchange = Exchange(
                model, self.components, parts, Ranks(group), exact=exact, facts=self._facts
            )

    @property
    def engine(self) -> str:
        """The engine that ran last, or will run first: "one_backward" or "per_task"."""
        return self._engine.ran.name

    @overload
    def backward(
        self,
        losses: Tensor | Mapping[str, Tensor],
        tasks_of_rows: TasksOfRows | None = None,
        *,
        accumulate: Literal[False] = False,
    ) -> Alignment: ...

    @overload
    def backward(
        self,
        losses: Tensor | Mapping[str, Tensor],
        tasks_of_rows: TasksOfRows | None = None,
        *,
        accumulate: bool,
    ) -> Alignment | None: ...

    def backward(
        self,
        losses: Tensor | Mapping[str, Tensor],
        tasks_of_rows: TasksOfRows | None = None,
        *,
        accumulate: bool = False,
    ) -> Alignment | None:
        """Differentiate, combine by the rule, and add the update to `.grad`.

        Entries of one task are summed, so normalise them as you want them weighted. With `Sum()`
        the result equals `losses.sum().backward()`. With several processes, each passes its own
        rows, and the update is the mean over processes, as it is without an aligner; a process
        without rows calls `backward({})`, because the others wait for it.

        Args:
            losses: One entry per row of the batch, `[B]`, with `tasks_of_rows`; or a mapping
                task -> scalar loss, from one or several forward passes.
            tasks_of_rows: The task of every entry, by name or position: a list, or a tensor. A
                tensor on a GPU is not synchronised: all tasks count as present, and those without
                rows have norm 0.
            accumulate: Add this micro-batch to the stored task gradients and leave `.grad` alone;
                the next call without it takes everything into account.

        Returns:
            What the rule did; None with `accumulate=True`.
        """
        step = _RuleStep(self.rule, self._exchange, len(self.components))
        given = (losses, tasks_of_rows, self.tasks, self.rule.parts_per_task, self._first_part)
        if self._exchange is None:  # a call with wrong arguments changes nothing
            run = partial(self._backward_alone, read_losses(*given))
        else:
            read = partial(read_local_losses, *given)
            run = partial(self._backward_together, self._exchange, read)
        try:
            run(step, accumulate)
            if accumulate:
                self._num_accumulated += 1
                return None
            self._pending, self._num_accumulated = {}, 0
            return self._report(step)
        except BaseException:
            self.detach()
            raise

    @property
    def _first_part(self) -> int:
        """Where dealing rows to parts starts: parts stay equal however rows are spread."""
        rank = 0 if self._exchange is None else self._exchange.ranks.rank
        return rank + self._num_accumulated

    def _backward_alone(self, losses: Losses, step: "_RuleStep", accumulate: bool) -> None:
        if not accumulate and not self._pending:
            opened = partial(step.open, losses.present, losses.task_losses())
            self._engine.step(losses, losses.present, opened)
            return
        losses.add_to(self._pending)
        if accumulate:
            self._engine.accumulate(losses)
            return
        present = tuple(self._pending)
        values = torch.stack([self._pending[position] for position in present])
        self._engine.step(losses, present, partial(step.open, present, values))

    def _backward_together(
        self,
        exchange: Exchange,
        read: Callable[[], Losses | None],
        step: "_RuleStep",
        accumulate: bool,
    ) -> None:
        """What each of several processes does: all of them agree, or none moves."""

        def check_and_read() -> Losses | None:
            check_later_changes(self._given)
            return read()

        pending = self._pending
        error = exchange.take_part(self._engine, check_and_read, pending, accumulate=accumulate)
        if not accumulate:
            agreed = exchange.close(pending, error)
            exchange.apply(agreed, step.open(agreed.present, agreed.losses))

    def _report(self, step: "_RuleStep") -> Alignment:
        """Close a step of the rule, and describe what it did."""
        step.finish()
        positions = sorted(step.present)
        names = tuple(self.tasks[position] for position in positions)
        order = [step.present.index(position) for position in positions]
        alignment = assemble(
            step.weighed, names, tuple(self.components), order, step.losses, exact=self.is_exact
        )
        if self._first and len(names) > 1 and bool(alignment.gram.isfinite().all()):
            self._first = False
            warn_if_identical(alignment)
        return alignment

    def detach(self) -> None:
        """Let go of the model. There is nothing to undo: the model was only read."""
        self._engine.discard()
        if self._exchange is not None:
            self._exchange.discard()
        self._pending, self._num_accumulated = {}, 0

    @property
    def num_processes(self) -> int:
        """How many processes train the model together."""
        return 1 if self._exchange is None else self._exchange.ranks.size

    @property
    def is_exact(self) -> bool:
        """Whether Gram matrices are those of the whole batch of all processes."""
        return self._exchange is None or self._exchange.exact

    def _facts(self) -> dict[str, object]:
        """What all processes have to agree on, besides the model."""
        return {
            "rule": self.rule,
            "the state of the rule": digest(self.rule.state_dict()),
            "exact": self.is_exact,
        }

    def state_dict(self, *, partial: bool = False) -> dict[str, Any]:
        """Everything a resumed run needs, with the task and component names it belongs to.

        Args:
            partial: Also in the middle of a step: warn that the micro-batches accumulated so far
                are not part of the state, instead of raising an error.
        """
        if self._pending:
            lost = "state_dict: accumulated task gradients are not part of the state"
            if not partial:
                raise ValueError(f"{lost}; call backward without accumulate=True first.")
            warnings.warn(f"{lost}: this step will lack them when it is resumed.", stacklevel=2)
        return {"rule": type(self.rule).__name__, **self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> "Restored":
        """Restore by name: tasks and components may have been added, removed or reordered.

        Returns:
            What did not match; a warning says so too.
        """
        _check_state(state, rule=type(self.rule).__name__, components=tuple(self.components))
        try:
            self.rule.load_state_dict(state)
        except KeyError as error:
            raise ValueError(f"state: lacks {error}; load another one.") from error
        if self._exchange is not None:
            self._exchange.agreement.state_changed()
        restored = Restored(
            *_only_in_one(self.tasks, state["tasks"]),
            *_only_in_one(tuple(self.components), state["components"]),
        )
        if not restored.complete:
            warnings.warn(f"state: {restored}.", stacklevel=2)
        return restored

    def __repr__(self) -> str:
        tasks = f"{len(self.tasks)} tasks ({some(self.tasks)})"
        where, metric = "", "" if self._metric is None else f", metric={self._metric}"
        if self._exchange is not None:
            how = "exact" if self._exchange.exact else "approximate: no products between processes"
            where = f", {self._exchange.ranks.size} processes ({how}{self._exchange.shards})"
        return (
            f"Aligner({tasks}, rule={self.rule}, {len(self.components)} components, "
            f"engine={self.engine} ({self._engine.asked}: {self._engine.why}){where}{metric})"
        )


class _RuleStep:
    """One step of a rule: whatever the engine, its rule is called here and nowhere else.

    Args:
        rule: The rule.
        exchange: With other processes, which all use the weights of the first.
        num_components: K.

    Attributes:
        present: Positions of the tasks of this step, in the order of the Gram matrices' rows.
        losses: Of these tasks, in the same order.
        weighed: What the rule decided, by components.
    """

    def __init__(self, rule: Rule, exchange: Exchange | None, num_components: int) -> None:
        self._rule, self._exchange, self._num_components = rule, exchange, num_components
        self.present: tuple[int, ...] = ()
        self.weighed: list[WeighedComponents] = []

    def open(self, present: tuple[int, ...], losses: Tensor) -> Weigh:
        """Open the step, anew if an engine could not finish it; returns what the engine calls.

        Args:
            present: Positions of what the engine separates: tasks, or parts of them.
            losses: Theirs.
        """
        self._parts: _Parts | None = None
        self._num_rows, self.weighed = len(present), []
        if self._rule.parts_per_task > 1:
            self._parts = _Parts(present, self._rule.parts_per_task, losses.device)
            present, losses = self._parts.tasks, self._parts.add_up(losses, 0)
        self.present, self.losses = present, losses
        self._rule.start_step(present, losses)
        return self._weigh

    def _weigh(self, components: Sequence[int], gram: Tensor) -> Tensor:
        parts = self._parts
        weighing = self._rule.weigh(components, gram if parts is None else parts.complete(gram))
        weights = weighing.weights
        if self._exchange is not None:  # whatever a rule draws, replicas stay equal
            weights = self._exchange.ranks.from_first(weights)
        of_tasks = gram if parts is None else parts.add_up(parts.add_up(gram, 1), 2)
        self.weighed.append(
            WeighedComponents(components, of_tasks, weights, weighing.target, weighing.active)
        )
        return weights if parts is None else weights[:, parts.task_of_part]

    def finish(self) -> None:
        """Weigh what no loss reached, so that it can be reported, and let the rule learn."""
        done = {k for weighed in self.weighed for k in weighed.components}
        unused = [k for k in range(self._num_components) if k not in done]
        if unused:
            shape = (len(unused), self._num_rows, self._num_rows)
            dtype = geometry.working_dtype(self.losses.device)
            self._weigh(unused, self.losses.new_zeros(shape, dtype=dtype))
        self._rule.commit()


class _Parts:
    """The parts of tasks in a step whose rule divides each task's rows.

    Args:
        present: Positions of the parts that have rows, in the engine's order.
        num: Parts of a task.
        device: Of the gradients.

    Attributes:
        tasks: Positions of the tasks, in the order in which they come.
        task_of_part: Position in `tasks` of every present part.
    """

    def __init__(self, present: Sequence[int], num: int, device: torch.device) -> None:
        self.tasks = tuple(dict.fromkeys(part // num for part in present))
        owners = [self.tasks.index(part // num) for part in present]
        self.task_of_part = index_on(owners, device)
        rows = [num * owner + part % num for owner, part in zip(owners, present, strict=True)]
        self._rows, self._num_rows = index_on(rows, device), num * len(self.tasks)

    def add_up(self, values: Tensor, dim: int) -> Tensor:
        """Sums over the parts of every task."""
        shape = [*values.shape[:dim], len(self.tasks), *values.shape[dim + 1 :]]
        return values.new_zeros(shape).index_add(dim, self.task_of_part, values)

    def complete(self, gram: Tensor) -> Tensor:
        """Gram matrices with a row for every part of every task, 0 for those without rows."""
        complete = gram.new_zeros(len(gram), self._num_rows, self._num_rows)
        complete[:, self._rows[:, None], self._rows] = gram
        return complete


# -- options -------------------------------------------------------------------------------------


def _check_options(
    engine: str,
    *,
    switches: Mapping[str, bool],
    sizes: Mapping[str, object],
    storage_dtype: object,
    metric: object,
    is_shared: bool,
    is_sharded: bool,
) -> None:
    """Raise for options of the wrong type, that would be ignored, or that exclude each other.

    `is_shared` and `is_sharded` say whether several processes train the model, and whether FSDP2
    divides it among them.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: must be one of {ENGINES}, got {engine!r}.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: must be True or False, got {value!r}.")
    for name, size in sizes.items():
        if not (type(size) is int and size >= 0):
            raise ValueError(f"{name}: must be a whole number of bytes, 0 or more, got {size!r}.")
    if storage_dtype is not None and not (
        isinstance(storage_dtype, torch.dtype) and storage_dtype.is_floating_point
    ):
        raise ValueError(
            "storage_dtype: must be a floating-point dtype such as torch.bfloat16, got "
            f"{storage_dtype!r}."
        )
    if metric is not None and (isinstance(metric, type) or not callable(metric)):
        raise ValueError(
            "metric: must be a callable such as AdamMetric(optimizer), from a parameter and its "
            f"task gradients to what Gram matrices see of them, got {metric!r}."
        )
    check_together(
        engine,
        recompute=switches["recompute"],
        has_storage=switches["offload"] or storage_dtype is not None,
        has_metric=metric is not None,
        is_shared=is_shared,
    )
    exact = switches["exact"]
    if not is_shared and not exact:
        raise ValueError("exact: False is for several processes; a single one is exact.")
    if not exact and is_sharded:
        raise ValueError(
            "exact: False needs the whole gradient in every process, which FSDP2 does not "
            "keep; give every process few tasks instead."
        )


def check_together(
    engine: str, *, recompute: bool, has_storage: bool, has_metric: bool, is_shared: bool = False
) -> None:
    """Raise for options that exclude each other; settings of a config are checked by it too."""
    if engine == "per_task" and recompute:
        raise ValueError('recompute: is for engine="one_backward"; per_task stores gradients.')
    if engine == "one_backward" and has_storage:
        raise ValueError(
            'offload, storage_dtype: are for engine="per_task"; one_backward stores nothing.'
        )
    if is_shared and (recompute or has_storage):
        raise ValueError(
            "recompute, offload, storage_dtype: are for a single process; with several, each "
            "keeps the task gradients of its own rows until they are exchanged."
        )
    if has_metric and (recompute or is_shared):
        raise ValueError(
            "metric (align.space of a config): needs the task gradients of the whole batch in "
            "one process, which are not kept with recompute=True or with several processes."
        )


# -- state ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restored:
    """What `Aligner.load_state_dict` could not match: names on one side only."""

    new_tasks: tuple[str, ...]
    dropped_tasks: tuple[str, ...]
    new_components: tuple[str, ...]
    dropped_components: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything matched."""
        return not any(
            (self.new_tasks, self.dropped_tasks, self.new_components, self.dropped_components)
        )

    def __str__(self) -> str:
        lists = {
            "tasks that start afresh": self.new_tasks,
            "saved tasks not used": self.dropped_tasks,
            "components that start afresh": self.new_components,
            "saved components not used": self.dropped_components,
        }
        shown = [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]
        return "; ".join(shown) or "everything matched"


def _only_in_one(
    here: Sequence[str], there: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that only the first has, and names that only the second has."""
    new = tuple(name for name in here if name not in there)
    return new, tuple(name for name in there if name not in here)


def _check_state(state: Mapping[str, Any], *, rule: str, components: Sequence[str]) -> None:
    """Raise for what is not the state of an aligner with this rule and some of these components."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: must be what state_dict() gave, got {state!r}.")
    saved = state.get("rule")
    if saved is None or not {"tasks", "components"} <= state.keys():
        raise ValueError(f"state: is not the state of an Aligner; it has {some(list(state))}.")
    if saved != rule:
        raise ValueError(f"state: was saved by rule {saved}, but this aligner has {rule}.")
    if not set(state["components"]) & set(components):
        raise ValueError(
            f"state: was saved with other components ({some(state['components'])}; here "
            f"{some(components)}); use the granularity it was saved with."
        )

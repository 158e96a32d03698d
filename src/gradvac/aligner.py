"""The Aligner: `aligner.backward(losses, tasks)` in the place of `losses.sum().backward()`."""

# K components, T tasks, B rows

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.alignment import Alignment, Part, assemble, warn_if_identical
from gradvac.gradients import (
    Again,
    Components,
    Granularity,
    Losses,
    OneBackward,
    PerTask,
    Refused,
    TasksOfRows,
    read_losses,
    split,
)
from gradvac.hints import some
from gradvac.models import allow_second_passes, refuse_replicas
from gradvac.rules import GradVac, Rule, rule_named

ENGINES = ("auto", "one_backward", "per_task")


@dataclass(frozen=True)
class Restored:
    """What `Aligner.load_state_dict` found: names on one side only."""

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
        said = {
            "tasks that start afresh": self.new_tasks,
            "saved tasks not used": self.dropped_tasks,
            "components that start afresh": self.new_components,
            "saved components not used": self.dropped_components,
        }
        found = [f"{what}: {', '.join(names)}" for what, names in said.items() if names]
        return "; ".join(found) or "everything matched"


class Aligner:
    """Combines task gradients by a rule, per component and step.

    Args:
        model: The model to train. Its trainable parameters are divided once, here.
        tasks: Names, in the order you want to see them.
        rule: How task gradients are combined, or the name of such a rule; default `GradVac()`.
        granularity: Which parameters share a component: "whole_model", "enc_dec", "all_layer",
            "all_matrix", or a callable from parameter name to component name.
        engine: "one_backward" (one backward on a mixed batch), "per_task" (one per task, any
            model), or "auto": the first where it applies.
        recompute: one_backward takes a second backward pass instead of storing task gradients of
            components that complete only at the end ("whole_model", "enc_dec").
        storage_dtype: per_task stores task gradients in this dtype; None: each parameter's own.
        offload: per_task stores task gradients in host memory.
        check: one_backward verifies on the first batches and now and then whose gradients are
            whose; a new shape of graph is looked at in any case.
        stream_bytes: one_backward lets complete components wait for each other up to this size.
        table_bytes: one_backward never forms task gradients of a matrix larger than this, and
            takes a second product instead.

    Example:
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
        stream_bytes: int = 1 << 28,
        table_bytes: int = 1 << 32,
    ) -> None:
        self.tasks = _read_tasks(tasks)
        if engine not in ENGINES:
            raise ValueError(f"engine: must be one of {ENGINES}, got {engine!r}.")
        if engine == "per_task" and recompute:
            raise ValueError('recompute: is for engine="one_backward"; per_task stores gradients.')
        if engine == "one_backward" and (offload or storage_dtype is not None):
            raise ValueError(
                'offload, storage_dtype: are for engine="per_task"; one_backward stores nothing.'
            )
        refuse_replicas(model)
        rule = GradVac() if rule is None else rule
        self.rule = rule_named(rule) if isinstance(rule, str) else rule
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper renames parameters
        self.components: Components = split(model, granularity)
        self.rule.bind(self.tasks, tuple(self.components))
        self._asked, self._said = engine, set[str]()
        self._per_task = PerTask(
            model, self.components, storage_dtype=storage_dtype, offload=offload
        )
        self._one_backward: OneBackward | None = None
        if engine != "per_task":
            self._one_backward = OneBackward(
                model,
                self.components,
                self.tasks,
                recompute=recompute,
                check=check,
                keep_graph=engine == "auto",
                stream_bytes=stream_bytes,
                table_bytes=table_bytes,
            )
        allow_second_passes()
        self._ran: OneBackward | PerTask = self._one_backward or self._per_task
        self._why = "as asked" if engine == "per_task" else "no batch so far"
        self._pending: dict[int, Tensor] = {}  # losses of accumulated tasks, by position
        self._first = True

    @property
    def engine(self) -> str:
        """The engine that ran last, or will run first: "one_backward" or "per_task"."""
        return self._ran.name

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
        the result equals `losses.sum().backward()`.

        Args:
            losses: One entry per row of the batch, `[B]`, with `tasks_of_rows`; or a mapping
                task -> scalar loss, from one or several forward passes.
            tasks_of_rows: The task of every entry, by name or position: a list, or a tensor. A
                tensor on the device is not waited for: then all tasks count as present, and those
                without rows have norm 0.
            accumulate: Add this micro-batch to the stored task gradients and leave `.grad` alone;
                the next call without it folds everything in.

        Returns:
            What was done; None with `accumulate=True`.
        """
        given = read_losses(losses, tasks_of_rows, self.tasks)
        earlier = dict(self._pending)
        for position, loss in zip(given.present, given.task_losses(), strict=True):
            before = self._pending.get(position)
            self._pending[position] = loss if before is None else before + loss
        try:
            alignment = self._run(given, bool(earlier), accumulate)
        except BaseException:
            for engine in (self._one_backward, self._per_task):
                if engine is not None:
                    engine.discard()
            self._pending = {}
            raise
        if not accumulate:
            self._pending = {}
        return alignment

    def _run(self, losses: Losses, is_later: bool, accumulate: bool) -> Alignment | None:
        """One micro-batch, in one_backward if that is possible."""
        engine = self._one_backward
        if engine is None or (is_later and self._ran is self._per_task):
            return self._run_in(self._per_task, losses, accumulate)
        try:
            alignment = self._run_in(engine, losses, accumulate)
        except Refused as refusal:
            if self._asked == "one_backward" or (is_later and not engine.has_accumulated):
                raise
            self._continue_per_task(str(refusal))
            return self._run_in(self._per_task, losses, accumulate)
        self._why = engine.describe()
        return alignment

    def _continue_per_task(self, reason: str) -> None:
        assert self._one_backward is not None
        self._per_task.take_over(self._one_backward.hand_over())
        self._why = reason.removeprefix("engine: ").removesuffix(' Use engine="per_task".')
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f'engine: "auto" continues with per_task. {self._why}', stacklevel=5)

    def _run_in(
        self, engine: OneBackward | PerTask, losses: Losses, accumulate: bool
    ) -> Alignment | None:
        try:
            alignment = self._one_try(engine, losses, accumulate)
        except Again:  # it was learned anew: once more
            alignment = self._one_try(engine, losses, accumulate)
        self._ran = engine
        return alignment

    def _one_try(
        self, engine: OneBackward | PerTask, losses: Losses, accumulate: bool
    ) -> Alignment | None:
        if not accumulate:
            return self._step(engine, losses, tuple(self._pending))
        engine.accumulate(losses)
        return None

    def _step(
        self, engine: OneBackward | PerTask, given: Losses, present: tuple[int, ...]
    ) -> Alignment:
        losses = torch.stack([self._pending[position] for position in present])
        parts: list[Part] = []

        def weigh(components: Sequence[int], gram: Tensor) -> Tensor:
            weighing = self.rule.weigh(components, gram)
            parts.append(Part(components, gram, weighing.weights, weighing.target, weighing.active))
            return weighing.weights

        self.rule.begin(present, losses)
        engine.backward(given, weigh, present=present)
        unused = sorted(set(range(len(self.components))) - {k for p in parts for k in p.components})
        if unused:  # no module of theirs ran: nothing to weigh, but something to report
            dtype = geometry.working_dtype(given.device)
            weigh(unused, losses.new_zeros(len(unused), len(present), len(present), dtype=dtype))
        self.rule.commit()
        names = [self.tasks[position] for position in sorted(present)]
        order = [present.index(position) for position in sorted(present)]
        alignment = assemble(parts, tuple(names), tuple(self.components), order)
        if self._first and len(names) > 1 and bool(alignment.gram.isfinite().all()):
            self._first = False
            warn_if_identical(alignment)
        return alignment

    def detach(self) -> None:
        """Let go of the model. There is nothing to undo: the model was only read."""
        for engine in (self._one_backward, self._per_task):
            if engine is not None:
                engine.discard()
        self._pending = {}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, with the task and component names it belongs to."""
        if self._pending:
            raise ValueError(
                "state_dict: accumulated task gradients are not part of the state; call backward "
                "without accumulate=True first."
            )
        return {"rule": type(self.rule).__name__, **self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """Restore by name: tasks and components may have been added, removed or reordered.

        Returns:
            What did not match; a warning says so too.
        """
        if state["rule"] != type(self.rule).__name__:
            raise ValueError(
                f"state: was saved by rule {state['rule']}, but this aligner has "
                f"{type(self.rule).__name__}."
            )
        if not set(state["components"]) & set(self.components):
            raise ValueError(
                f"state: was saved with other components ({some(state['components'])}; here "
                f"{some(list(self.components))}); use the granularity it was saved with."
            )
        self.rule.load_state_dict(state)
        found = Restored(
            *_differences(self.tasks, state["tasks"]),
            *_differences(tuple(self.components), state["components"]),
        )
        if not found.complete:
            warnings.warn(f"state: {found}.", stacklevel=2)
        return found

    def __repr__(self) -> str:
        tasks = f"{len(self.tasks)} tasks ({some(self.tasks)})"
        return (
            f"Aligner({tasks}, rule={self.rule}, {len(self.components)} components, "
            f"engine={self.engine} ({self._asked}: {self._why}))"
        )


def _read_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tasks, str) or not all(isinstance(task, str) for task in tasks) or not tasks:
        raise ValueError(f"tasks: must be a non-empty list of names, got {tasks!r}.")
    twice = [task for task in tasks if list(tasks).count(task) > 1]
    if twice:
        raise ValueError(f"tasks: {twice[0]!r} occurs twice; every task needs a name of its own.")
    return tuple(tasks)


def _differences(
    here: Sequence[str], there: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    new = tuple(name for name in here if name not in there)
    return new, tuple(name for name in there if name not in here)

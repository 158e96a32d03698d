"""The Aligner: `aligner.backward(losses, tasks)` in the place of `losses.sum().backward()`."""

# K components, T tasks, B rows

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.alignment import Alignment, Part, assemble
from gradvac.gradients import (
    Batch,
    Components,
    Granularity,
    OneBackward,
    PerTask,
    TasksOfRows,
    find_mismatches,
    read_losses,
    split,
)
from gradvac.rules import GradVac, Rule

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
        rule: How task gradients are combined; default `GradVac()`.
        granularity: Which parameters share a component: "whole_model", "enc_dec", "all_layer",
            "all_matrix", or a callable from parameter name to component name.
        engine: "one_backward" (one backward on a mixed batch), "per_task" (one per task, any
            model), or "auto": the first where it applies.
        recompute: one_backward takes a second backward pass instead of storing task gradients of
            components that complete only at the end ("whole_model", "enc_dec").
        storage_dtype: per_task stores task gradients in this dtype; None: each parameter's own.
        offload: per_task stores task gradients in host memory.
        check: one_backward compares its task gradients with plain autograd on the first batch.
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
        rule: Rule | None = None,
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
        self.rule = GradVac() if rule is None else rule
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper renames parameters
        self._model = model
        self.components: Components = split(model, granularity)
        self.rule.bind(self.tasks, tuple(self.components))
        self._asked, self._why, self._check = engine, "as asked", check
        self._per_task = PerTask(
            model, self.components, storage_dtype=storage_dtype, offload=offload
        )
        self._one_backward: OneBackward | None = None
        if engine != "per_task":
            self._attach(recompute=recompute, stream_bytes=stream_bytes, table_bytes=table_bytes)
        self._pending: dict[int, Tensor] = {}  # losses of accumulated tasks, by position
        self._accumulating: OneBackward | PerTask = self._per_task
        self._first = True

    def _attach(self, **options: Any) -> None:
        try:
            self._one_backward = OneBackward(self._model, self.components, self.tasks, **options)
            self._why = "every module is supported"
            # Whoever lets go of an aligner finds the model as it was, ready for another.
            weakref.finalize(self, self._one_backward.detach).atexit = False
        except ValueError as reason:
            if self._asked == "one_backward":
                raise
            self._why = str(reason).removeprefix("engine: ")
            warnings.warn(f'engine: "auto" continues with per_task. {self._why}', stacklevel=3)

    @property
    def engine(self) -> str:
        """The engine in use: "one_backward" or "per_task"."""
        return "per_task" if self._one_backward is None else "one_backward"

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
        batch = read_losses(losses, tasks_of_rows, self.tasks)
        engine = self._choose(batch)
        if self._pending and engine is not self._accumulating:
            raise ValueError(
                f"losses: earlier micro-batches of this step went to {self._accumulating.name}, "
                f"this one needs {engine.name}; give all of them in the same form, or set engine "
                "to one of the two."
            )
        self._accumulating = engine
        for position, loss in zip(batch.present, batch.task_losses(), strict=True):
            earlier = self._pending.get(position)
            self._pending[position] = loss if earlier is None else earlier + loss
        try:
            if accumulate:
                engine.accumulate(batch)
                return None
            present = tuple(self._pending)
            alignment = self._step(engine, batch, present)
        except BaseException:
            engine.discard()
            self._pending = {}
            raise
        self._pending = {}
        return alignment

    def _step(
        self, engine: OneBackward | PerTask, batch: Batch, present: tuple[int, ...]
    ) -> Alignment:
        losses = torch.stack([self._pending[position] for position in present])
        parts: list[Part] = []

        def weigh(components: Sequence[int], gram: Tensor) -> Tensor:
            found = self.rule.weigh(components, gram)
            parts.append(Part(components, gram, found.weights, found.target, found.active))
            return found.weights

        self.rule.begin(present, losses)
        engine.backward(batch, weigh, present=present)
        unused = sorted(set(range(len(self.components))) - {k for p in parts for k in p.components})
        if unused:  # no module of theirs ran: nothing to weigh, but something to report
            dtype = geometry.working_dtype(batch.device)
            weigh(unused, losses.new_zeros(len(unused), len(present), len(present), dtype=dtype))
        self.rule.commit()
        names = [self.tasks[position] for position in sorted(present)]
        order = [present.index(position) for position in sorted(present)]
        alignment = assemble(parts, tuple(names), tuple(self.components), order)
        if self._first and len(names) > 1 and bool(alignment.gram.isfinite().all()):
            self._first = False
            _warn_if_identical(alignment)
        return alignment

    def _choose(self, batch: Batch) -> OneBackward | PerTask:
        """The engine for this batch; on the first one, after checking that it is right."""
        engine = self._one_backward
        if engine is None:
            return self._per_task
        if self._asked == "auto" and batch.index is None and not engine.knows_rows:
            return self._per_task  # losses of separate forward passes: no rows to tell apart
        if self._check and engine.unchecked:
            try:
                wrong = find_mismatches(engine, batch, self._model)
            except ValueError as reason:
                return self._give_up(str(reason))
            if wrong:
                return self._give_up(
                    f"engine: the task gradients of {_some(wrong)} differ from plain autograd's. "
                    "Either rows of the batch influence each other (in-batch negatives, a loss or "
                    "layer over the whole batch), or the batch is not dimension 0 of every module."
                )
            engine.unchecked = wrong is None
        return engine

    def _give_up(self, reason: str) -> PerTask:
        """Continue with per_task if the choice was ours, else say why not."""
        if self._asked == "one_backward":
            raise ValueError(
                f'{reason} Use engine="per_task".' if "per_task" not in reason else reason
            )
        assert self._one_backward is not None
        self._one_backward.detach()
        self._one_backward = None
        self._why = reason.removeprefix("engine: ")
        warnings.warn(f'engine: "auto" continues with per_task. {self._why}', stacklevel=4)
        return self._per_task

    def detach(self) -> None:
        """Leave the model as it was before this aligner was made."""
        if self._one_backward is not None:
            self._one_backward.detach()

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
                f"state: was saved with other components ({_some(state['components'])}; here "
                f"{_some(list(self.components))}); use the granularity it was saved with."
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
        tasks = f"{len(self.tasks)} tasks ({_some(self.tasks)})"
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _warn_if_identical(alignment: Alignment) -> None:
    """Once, on the first step to compare: the mistake of separating what was already summed."""
    used = alignment.norms.amax(-1) > 0
    similarity, norms = alignment.similarity[used], alignment.norms[used]
    alike = bool((similarity > 1 - 1e-9).all()) and bool(
        torch.isclose(norms, norms[:, :1], rtol=1e-6).all()
    )
    if alike and len(norms):
        warnings.warn(
            "losses: all tasks have the same gradient. If every task was given the loss of the "
            "whole batch, its gradients were summed before they came here and cannot be "
            "separated; give each task the loss of its own rows.",
            stacklevel=4,
        )

"""The Aligner: `aligner.backward(losses, tasks)` instead of `losses.sum().backward()`."""

# K components, T tasks, B rows

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.alignment import Alignment, Part, assemble, warn_if_identical
from gradvac.engine import (
    ENGINES,
    Components,
    Engines,
    Exchange,
    Granularity,
    Losses,
    Metric,
    Ranks,
    TasksOfRows,
    Weigh,
    digest,
    read_losses,
    read_own_losses,
    sharded_modules,
    split,
    unsharded_backward,
)
from gradvac.hints import some
from gradvac.models import allow_second_passes, is_sharded, refuse_later_changes, unwrap
from gradvac.options import refuse_contradictions, refuse_wrong_kinds
from gradvac.restored import Restored, differences, require_state
from gradvac.rules import Rule, as_rule
from gradvac.tasks import read_names

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
        stream_bytes: one_backward lets complete components wait for each other up to this size;
            None: 256 MiB; on a GPU 1 GiB, at most a 64th of its memory.
        table_bytes: one_backward never forms task gradients of a matrix larger than this, and
            takes a second product instead.
        process_group: The processes that together train a model without DistributedDataParallel;
            None: each trains a model of its own.
        exact: With several processes, False leaves out the inner products between gradients of
            different processes, and sends less; see docs/processes.md.
        metric: What Gram matrices, and so rules and the returned similarities, see of task
            gradients, such as `AdamMetric`; None: the gradients as they are.

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
        stream_bytes: int | None = None,
        table_bytes: int = 1 << 32,
        process_group: "ProcessGroup | Literal['auto'] | None" = "auto",
        exact: bool = True,
        metric: Metric | None = None,
    ) -> None:
        self.tasks = read_names(tasks)
        if engine not in ENGINES:
            raise ValueError(f"engine: must be one of {ENGINES}, got {engine!r}.")
        refuse_wrong_kinds(
            {"recompute": recompute, "offload": offload, "check": check, "exact": exact},
            {"stream_bytes": stream_bytes or 0, "table_bytes": table_bytes},
            storage_dtype,
            metric,
        )
        self._given, self._metric = model, metric
        model, group = unwrap(model, process_group)
        refuse_contradictions(
            engine,
            recompute=recompute,
            has_storage=offload or storage_dtype is not None,
            has_metric=metric is not None,
            exact=exact,
            is_shared=group is not None,
            is_sharded=group is not None and is_sharded(model),
        )
        self.rule = as_rule(rule)
        self.components: Components = split(model, granularity)
        self.rule.bind(self.tasks, tuple(self.components))
        with unsharded_backward(sharded_modules(model)):
            self._engines = Engines(
                engine,
                model,
                self.components,
                self.tasks,
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
        self._first = True
        self._exchange: Exchange | None = None
        if group is not None:
            self._exchange = Exchange(
                model, self.components, self.tasks, Ranks(group), exact=exact, facts=self._facts
            )

    @property
    def engine(self) -> str:
        """The engine that ran last, or will run first: "one_backward" or "per_task"."""
        return self._engines.ran.name

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
                the next call without it folds everything in.

        Returns:
            What the rule did; None with `accumulate=True`.
        """
        given = (losses, tasks_of_rows, self.tasks)
        if self._exchange is None:
            take = partial(self._take_part_alone, read_losses(*given))
        else:
            take = partial(self._take_part, self._exchange, lambda: read_own_losses(*given))
        try:
            alignment = take(accumulate)
        except BaseException:
            self.detach()
            raise
        if not accumulate:
            self._pending = {}
        return alignment

    def _take_part_alone(self, losses: Losses, accumulate: bool) -> Alignment | None:
        losses.add_to(self._pending)
        if accumulate:
            self._engines.accumulate(losses)
            return None
        present = tuple(self._pending)
        values = torch.stack([self._pending[position] for position in present])
        return self._engines.step(losses, present, lambda fold: self._align(fold, present, values))

    def _take_part(
        self, exchange: Exchange, read: Callable[[], Losses | None], accumulate: bool
    ) -> Alignment | None:
        """What each of several processes does: all of them agree, or none moves."""

        def check_and_read() -> Losses | None:
            refuse_later_changes(self._given)
            return read()

        pending, engines = self._pending, self._engines
        error = exchange.take_part(engines, check_and_read, pending, accumulate=accumulate)
        if accumulate:
            return None
        agreed = exchange.close(pending, error)
        return self._align(partial(exchange.apply, agreed), agreed.present, agreed.losses)

    def _align(
        self, fold: Callable[[Weigh], None], present: tuple[int, ...], losses: Tensor
    ) -> Alignment:
        """One step of the rule: `fold` reduces the gradients and asks it for weights."""
        parts: list[Part] = []

        def weigh(components: Sequence[int], gram: Tensor) -> Tensor:
            weighing = self.rule.weigh(components, gram)
            weights = weighing.weights
            if self._exchange is not None:  # whatever a rule draws, replicas stay equal
                weights = self._exchange.ranks.from_first(weights)
            parts.append(Part(components, gram, weights, weighing.target, weighing.active))
            return weights

        self.rule.begin(present, losses)
        fold(weigh)
        unused = sorted(set(range(len(self.components))) - {k for p in parts for k in p.components})
        if unused:  # none of their modules ran: nothing to weigh, but something to report
            dtype = geometry.working_dtype(losses.device)
            weigh(unused, losses.new_zeros(len(unused), len(present), len(present), dtype=dtype))
        self.rule.commit()
        names = [self.tasks[position] for position in sorted(present)]
        order = [present.index(position) for position in sorted(present)]
        alignment = assemble(
            parts, tuple(names), tuple(self.components), order, exact=self.is_exact
        )
        if self._first and len(names) > 1 and bool(alignment.gram.isfinite().all()):
            self._first = False
            warn_if_identical(alignment)
        return alignment

    def detach(self) -> None:
        """Let go of the model. There is nothing to undo: the model was only read."""
        self._engines.discard()
        if self._exchange is not None:
            self._exchange.discard()
        self._pending = {}

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
                are not part of the state, instead of refusing.
        """
        if self._pending:
            lost = "state_dict: accumulated task gradients are not part of the state"
            if not partial:
                raise ValueError(f"{lost}; call backward without accumulate=True first.")
            warnings.warn(f"{lost}: this step will lack them when it is resumed.", stacklevel=2)
        return {"rule": type(self.rule).__name__, **self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """Restore by name: tasks and components may have been added, removed or reordered.

        Returns:
            What did not match; a warning says so too.
        """
        require_state(state, rule=type(self.rule).__name__, components=tuple(self.components))
        try:
            self.rule.load_state_dict(state)
        except KeyError as error:
            raise ValueError(f"state: is not whole, it lacks {error}; load another one.") from error
        if self._exchange is not None:
            self._exchange.agreement.state_changed()
        restored = Restored(
            *differences(self.tasks, state["tasks"]),
            *differences(tuple(self.components), state["components"]),
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
            f"engine={self.engine} ({self._engines.asked}: {self._engines.why}){where}{metric})"
        )

"""Which engine runs: the fast one where it applies, the reference where it does not."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradvac.engine.components import Components
from gradvac.engine.losses import Losses
from gradvac.engine.metric import Metric
from gradvac.engine.one_backward import OneBackward, PlanOutdated
from gradvac.engine.passes import NotSeparable
from gradvac.engine.per_task import Expect, PerTask, Receive
from gradvac.engine.task_gradients import Collector, Stored, Weigh
from gradvac.hints import warn_caller

ENGINES = ("auto", "one_backward", "per_task")
Engine = OneBackward | PerTask
Fold = Callable[[Weigh], None]
Found = TypeVar("Found")


class Engines:
    """The engine that was asked for, what it falls back on, and what both have accumulated.

    Its arguments are those of `Aligner`; `is_shared` says that other processes train the model too.

    Attributes:
        ran: The engine that ran last, or will run first.
    """

    def __init__(
        self,
        asked: str,
        model: nn.Module,
        components: Components,
        tasks: Sequence[str],
        *,
        recompute: bool = False,
        storage_dtype: torch.dtype | None = None,
        offload: bool = False,
        check: bool = True,
        stream_bytes: int | None = None,
        table_bytes: int = 1 << 32,
        is_shared: bool = False,
        metric: Metric | None = None,
    ) -> None:
        self.asked, self._recompute = asked, recompute
        self._members = components.members(model)
        self._per_task = PerTask(model, is_shared=is_shared, check=check)
        self._one_backward: OneBackward | None = None
        if asked != "per_task":
            assert metric is None or not recompute
            collector = Collector(
                self._members, stream_bytes=stream_bytes, table_bytes=table_bytes, metric=metric
            )
            self._one_backward = OneBackward(
                model,
                tasks,
                collector,
                recompute=recompute,
                check=check,
                keep_graph=asked == "auto",
            )
        self._stored = Stored(storage_dtype=storage_dtype, offload=offload, metric=metric)
        self.ran: Engine = self._one_backward or self._per_task
        self._why: str | None = "as asked" if asked == "per_task" else None
        self._warned: set[str] = set()

    def task_gradients(
        self, losses: Losses, receive: Receive, expect: Expect | None = None
    ) -> dict[Tensor, Tensor]:
        """Show every parameter's task gradients; see `OneBackward.task_gradients`."""
        if expect is not None and len(losses.present) == 1:  # its plain gradient needs no engine
            self._why = "one task in the last batch of this process, so a plain backward"
            return self._run_in(self._per_task, lambda e: e.task_gradients(losses, receive, expect))
        return self._run(lambda engine: engine.task_gradients(losses, receive, expect))

    def accumulate(self, losses: Losses) -> None:
        """Add the task gradients of a micro-batch to the stored ones; `.grad` is left alone."""
        if self._recompute:
            raise ValueError(
                "accumulate: recompute=True keeps no task gradients to add to; leave out one of "
                'the two, or use engine="per_task".'
            )
        self._run(lambda engine: self._store(engine, losses))

    def step(self, losses: Losses, present: Sequence[int], align: Callable[[Fold], Found]) -> Found:
        """Differentiate the last micro-batch of a step, and write its update to `.grad`.

        Args:
            losses: Of this micro-batch.
            present: The tasks of this step: those of `losses` and of what was accumulated before.
            align: Begins a step of the rule and calls the fold with what gives weights; called
                again where a batch has to be differentiated again.
        """
        return self._run(lambda engine: align(partial(self._fold, engine, losses, present)))

    def _fold(self, engine: Engine, losses: Losses, present: Sequence[int], weigh: Weigh) -> None:
        if isinstance(engine, OneBackward) and not self._stored:
            engine.backward(losses, weigh)
        else:
            self._store(engine, losses)
            self._stored.fold(self._members, present, weigh)

    def _store(self, engine: Engine, losses: Losses) -> None:
        self._stored.add_outside(engine.task_gradients(losses, self._stored.add))

    def _run(self, do: Callable[[Engine], Found]) -> Found:
        """Do something with a micro-batch, in one_backward if that is possible."""
        if self._one_backward is None:
            return self._run_in(self._per_task, do)
        try:
            result = self._run_in(self._one_backward, do)
        except NotSeparable as refusal:
            if self.asked == "one_backward":
                raise
            self._explain(str(refusal))
            return self._run_in(self._per_task, do)
        self._why = None
        return result

    def _run_in(self, engine: Engine, do: Callable[[Engine], Found]) -> Found:
        try:
            result = do(engine)
        except PlanOutdated:  # it was learned anew: once more
            result = do(engine)
        self.ran = engine
        return result

    @property
    def why(self) -> str:
        """Why it is that engine which ran last, in words."""
        if self._why is None:
            assert self._one_backward is not None
            return self._one_backward.describe()
        return self._why

    def discard(self) -> None:
        """Forget what was accumulated."""
        self._stored.clear()

    def _explain(self, reason: str) -> None:
        self._why = reason.removeprefix("engine: ").removesuffix(' Use engine="per_task".')
        if reason not in self._warned:
            self._warned.add(reason)
            warn_caller(f'engine: "auto" continues with per_task. {self.why}')

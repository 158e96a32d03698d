"""Which engine runs: the fast one where it applies, the reference where it does not."""

# T tasks

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradvac.engine.components import Components
from gradvac.engine.graph import NotSeparable, own_hooks, remember_hooks
from gradvac.engine.losses import Losses
from gradvac.engine.metric import Metric
from gradvac.engine.one_backward import OneBackward, PlanOutdated
from gradvac.engine.per_task import Expect, PerTask, Receive
from gradvac.engine.task_gradients import (
    AccumulatedGradients,
    TaskGradients,
    Weigh,
    add_to_grad,
)
from gradvac.utils.hints import warn_caller

ENGINES = ("auto", "one_backward", "per_task")
Found = TypeVar("Found")

OpenStep = Callable[[], Weigh]
"""Opens a step of a rule, and gives what weighs its components."""


class LocalEngine:
    """The engines of one process: which of them runs, and what both have accumulated.

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
        members = components.members(model)
        self._gradients = TaskGradients(members, stream_bytes, table_bytes, metric)
        self._accumulated = AccumulatedGradients(storage_dtype=storage_dtype, offload=offload)
        self._per_task = PerTask(model, is_shared=is_shared, check=check)
        self._one_backward: OneBackward | None = None
        if asked != "per_task":
            self._one_backward = OneBackward(
                model,
                tasks,
                self._gradients,
                recompute=recompute,
                check=check,
                has_fallback=asked == "auto",
            )
        self.ran: OneBackward | PerTask = self._one_backward or self._per_task
        self._why: str | None = "as asked" if asked == "per_task" else None
        self._warned: set[str] = set()
        remember_hooks()

    def step(self, losses: Losses, tasks: Sequence[int], open_step: OpenStep) -> None:
        """Differentiate the last micro-batch of a step, and add its update to `.grad`.

        Args:
            losses: Of this micro-batch.
            tasks: Of this step: those of `losses` and of what was accumulated before.
            open_step: Called again where a batch has to be differentiated again.
        """
        self._run(lambda engine: self._step(engine, losses, tasks, open_step()))

    def accumulate(self, losses: Losses) -> None:
        """Add the task gradients of a micro-batch to those before; `.grad` is left alone."""
        if self._recompute:
            raise ValueError(
                "accumulate: recompute=True keeps no task gradients to add to; leave out one of "
                'the two, or use engine="per_task".'
            )
        self._accumulated.add_outside(self.task_gradients(losses, self._accumulated.add))

    def task_gradients(self, losses: Losses, receive: Receive) -> dict[Tensor, Tensor]:
        """Show `receive` every parameter's task gradients.

        Returns:
            The joint gradients of leaves that are not the model's.
        """
        return self._run(lambda engine: engine.task_gradients(losses, receive))

    def stream(self, losses: Losses, receive: Receive, expect: Expect) -> dict[Tensor, Tensor]:
        """The same, each parameter as soon as it is complete.

        `expect` is called before, with the parameters that may come.
        """
        if len(losses.present) == 1:  # its joint gradient needs no engine
            with own_hooks():
                outside = self._per_task.stream_one_task(losses, receive, expect)
            self._why = "one task in the last batch of this process, so a plain backward"
            self.ran = self._per_task
            return outside
        return self._run(lambda engine: engine.stream(losses, receive, expect))

    def _step(
        self, engine: OneBackward | PerTask, losses: Losses, tasks: Sequence[int], weigh: Weigh
    ) -> None:
        if isinstance(engine, OneBackward) and not self._accumulated:
            engine.backward(losses, weigh)
            return
        outside = engine.task_gradients(losses, self._accumulated.add)
        self._accumulated.add_outside(outside)
        updates: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        try:
            self._gradients.begin(weigh, lambda *update: updates.append(update))
            self._gradients.add_accumulated(self._accumulated, tasks)
            self._gradients.finish()
        finally:
            self._gradients.clear()
        outside = self._accumulated.outside
        for update in (*updates, (list(outside), list(outside.values()))):
            add_to_grad(*update)
        self._accumulated.clear()

    def _run(self, do: Callable[[OneBackward | PerTask], Found]) -> Found:
        """Do something with a micro-batch: in one_backward if that is possible."""

        def do_with(engine: OneBackward | PerTask) -> Found:
            with own_hooks(), _uncompiled_passes():
                return do(engine)

        if self._one_backward is None:
            return do_with(self._per_task)
        return self._run_first(self._one_backward, do_with)

    def _run_first(
        self, one_backward: OneBackward, do: Callable[[OneBackward | PerTask], Found]
    ) -> Found:
        try:
            try:
                result = do(one_backward)
            except PlanOutdated:  # it is probed anew
                result = do(one_backward)
        except NotSeparable as refusal:
            if self.asked == "one_backward":
                raise
            self._explain(str(refusal))
            result = do(self._per_task)
            self.ran = self._per_task
            return result
        self._why, self.ran = None, one_backward
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
        self._accumulated.clear()

    def _explain(self, reason: str) -> None:
        self._why = reason.removeprefix("engine: ").removesuffix(' Use engine="per_task".')
        if reason not in self._warned:
            self._warned.add(reason)
            warn_caller(f'engine: "auto" continues with per_task. {self.why}')


def _uncompiled_passes() -> AbstractContextManager[None]:
    """Torch's own engine: what compiled autograd makes of a pass has freed what nodes saved."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None or not module.compiled_autograd_enabled:
        return nullcontext()
    disabled: AbstractContextManager[None] = module._disable()
    return disabled

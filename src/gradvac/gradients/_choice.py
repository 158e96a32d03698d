"""Which engine runs: the fast one where it applies, the reference where it does not."""

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from gradvac.gradients._components import Components
from gradvac.gradients._metric import Metric
from gradvac.gradients._one_backward import OneBackward
from gradvac.gradients._per_task import PerTask
from gradvac.gradients._plan import Refused
from gradvac.gradients._step import Again

ENGINES = ("auto", "one_backward", "per_task")
Engine = OneBackward | PerTask
Found = TypeVar("Found")


class Engines:
    """The engine that was asked for, and what it falls back on.

    Args:
        asked: One of `ENGINES`.
        model: The model.
        components: Its components.
        tasks: Task names.
        recompute: See `OneBackward`.
        storage_dtype: See `PerTask`.
        offload: See `PerTask`.
        check: See `OneBackward`.
        stream_bytes: See `Collector`.
        table_bytes: See `Collector`.
        is_shared: See `PerTask`.
        metric: See `PerTask`.

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
        recompute: bool,
        storage_dtype: torch.dtype | None,
        offload: bool,
        check: bool,
        stream_bytes: int,
        table_bytes: int,
        is_shared: bool,
        metric: Metric | None = None,
    ) -> None:
        self.asked = asked
        self._per_task = PerTask(
            model,
            components,
            storage_dtype=storage_dtype,
            offload=offload,
            is_shared=is_shared,
            metric=metric,
        )
        self._one_backward: OneBackward | None = None
        if asked != "per_task":
            self._one_backward = OneBackward(
                model,
                components,
                tasks,
                recompute=recompute,
                check=check,
                keep_graph=asked == "auto",
                stream_bytes=stream_bytes,
                table_bytes=table_bytes,
                metric=metric,
            )
        self.ran: Engine = self._one_backward or self._per_task
        self._why: str | None = "as asked" if asked == "per_task" else "no batch so far"
        self._said: set[str] = set()

    def run(self, do: Callable[[Engine], Found], *, is_later: bool) -> Found:
        """Do something with a micro-batch, in one_backward if that is possible.

        Args:
            do: What is done with an engine.
            is_later: Whether an engine has accumulated a micro-batch of this step.
        """
        engine = self._one_backward
        if engine is None or (is_later and self.ran is self._per_task):
            return self._run_in(self._per_task, do)
        try:
            result = self._run_in(engine, do)
        except Refused as refusal:
            if self.asked == "one_backward" or (is_later and not engine.has_accumulated):
                raise
            self._continue_per_task(engine, str(refusal))
            return self._run_in(self._per_task, do)
        self._why = None
        return result

    @property
    def why(self) -> str:
        """Why it is that engine which ran last, in words."""
        if self._why is None:
            assert self._one_backward is not None
            return self._one_backward.describe()
        return self._why

    def run_one_task(self, do: Callable[[Engine], Found]) -> Found:
        """Do something with a micro-batch of one task: its plain gradient needs no engine."""
        self._why = "one task in the last batch of this process, so a plain backward"
        return self._run_in(self._per_task, do)

    def discard(self) -> None:
        """Forget what was accumulated."""
        for engine in (self._one_backward, self._per_task):
            if engine is not None:
                engine.discard()

    def _continue_per_task(self, engine: OneBackward, reason: str) -> None:
        self._per_task.take_over(engine.hand_over())
        self._why = reason.removeprefix("engine: ").removesuffix(' Use engine="per_task".')
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f'engine: "auto" continues with per_task. {self.why}', stacklevel=5)

    def _run_in(self, engine: Engine, do: Callable[[Engine], Found]) -> Found:
        try:
            result = do(engine)
        except Again:  # it was learned anew: once more
            result = do(engine)
        self.ran = engine
        return result

"""One optimizer step: forward, aligned backward, clipping, update; eager, or as a CUDA graph.

A graph replays a step that was recorded once, so that the host's only work is to copy the next
batch to where the recorded one lay. It needs batches of one size whose tasks live on the device
(`static_shape`), and an aligner that decides nothing on the host.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from gradvac import Alignment
from gradvac.engine import positions
from gradvac.lab.training.environment import around_forward
from gradvac.lab.training.log import BY_TASK
from gradvac.lab.training.optimizer import clip, step_unless
from gradvac.lab.training.settings import RunConfig
from gradvac.lab.training.state import RunState
from gradvac.lab.training.workload import BatchT, StepLosses
from gradvac.utils.cuda_graph import CudaGraph
from gradvac.utils.devices import index_on

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step leaves, on the device.

    Attributes:
        sums: The loss and what else is shown, summed over the tokens of the step, in all
            processes; by task where tokens are known (`log.BY_TASK`).
        norm: Of the gradient, before clipping.
        bad: Whether loss or gradient was not finite, so that the step was skipped.
        alignment: What the rule did; None without one.
    """

    sums: Mapping[str, Tensor | float]
    norm: Tensor
    bad: Tensor
    alignment: Alignment | None


class EagerStep(Generic[BatchT]):
    """A step that runs as it is written."""

    def __init__(self, settings: RunConfig, state: RunState[BatchT]) -> None:
        self._settings, self._state = settings, state

    def __call__(self, batches: Sequence[BatchT]) -> StepResult:
        """Take a step, which skips itself, on the device, if it is not finite."""
        num_tokens = max(1, sum(batch.num_tokens for batch in batches))
        return self.take(batches, torch.tensor(float(num_tokens), dtype=torch.float64))

    def take(self, batches: Sequence[BatchT], num_tokens: Tensor) -> StepResult:
        """Take a step whose number of tokens is a tensor."""
        state, sums = self._state, dict[str, Tensor | float]()
        alignment = None
        mean_tokens = num_tokens / state.job.size  # gradients are means over processes
        for position, batch in enumerate(batches, start=1):
            is_last = position == len(batches)
            with around_forward(self._settings.train.precision, state.device):
                step_losses = state.losses(batch, is_last)
            losses = step_losses.losses / mean_tokens
            if state.aligner is None:
                with state.job.naming_who_is_gone():
                    losses.sum().backward()
            else:
                alignment = state.aligner.backward(
                    losses, step_losses.tasks, accumulate=not is_last
                )
            for name, value in {
                "loss": step_losses.losses.detach().sum(),
                **step_losses.shown,
                **sums_by_task(step_losses, state.tasks),
            }.items():
                sums[name] = sums.get(name, 0.0) + value
        sums = state.job.add_up(sums, state.device)
        norm = clip(state.model, self._settings.optimizer.clip_norm)
        bad = ~(norm.isfinite() & torch.as_tensor(sums["loss"]).isfinite())
        step_unless(state.optimizer, bad)
        state.optimizer.zero_grad()
        return StepResult(sums, norm, bad, alignment)


def sums_by_task(step_losses: StepLosses, tasks: Sequence[str]) -> dict[str, Tensor]:
    """Losses and tokens of every task, `[2, T]`, where the recipe counts the tokens of rows."""
    if step_losses.tokens is None:
        return {}
    losses = step_losses.losses.detach()
    index = index_on(positions(step_losses.tasks, tasks, "tasks"), losses.device)
    rows = torch.stack([losses.double(), step_losses.tokens.to(losses.device).double()])
    return {BY_TASK: rows.new_zeros(2, len(tasks)).index_add(1, index, rows)}


class GraphStep(Generic[BatchT]):
    """A step that is recorded after a few, and replayed from then on.

    If recording fails, it logs a warning, and steps go on as they are written.
    """

    def __init__(self, step: EagerStep[BatchT], device: torch.device) -> None:
        self._step, self._device = step, device
        self._inputs: list[Any] | None = None
        self._num_tokens = torch.ones((), dtype=torch.float64, device=device)
        self._recording = CudaGraph(self._take, device, "train.cuda_graph", logger.warning)

    @property
    def works(self) -> bool:
        """Whether steps can be recorded, as far as it was tried."""
        return self._recording.works

    def __call__(self, batches: Sequence[BatchT]) -> StepResult:
        """Take a step."""
        if not self.works:
            return self._step(batches)
        self._receive(batches)
        return self._recording()

    def _receive(self, batches: Sequence[Any]) -> None:
        """Copy batches to where the recorded step looks for them."""
        if self._inputs is None:
            self._inputs = [batch.to(self._device).copy() for batch in batches]
        else:
            for recorded, batch in zip(self._inputs, batches, strict=True):
                recorded.copy_(batch)
        self._num_tokens.fill_(float(max(1, sum(batch.num_tokens for batch in batches))))

    def _take(self) -> StepResult:
        assert self._inputs is not None
        result = self._step.take(self._inputs, self._num_tokens)
        loose = [name for name, value in result.sums.items() if not torch.is_tensor(value)]
        if loose and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{loose[0]!r} is a number on the host, which would never change")
        return result

"""One optimizer step: forward, aligned backward, clipping, update; eager, or as a CUDA graph.

A graph replays a step that was recorded once, so that the host's only work is to copy the next
batch to where the recorded one lay. It needs batches of one size whose tasks live on the device
(`frame`), and an aligner that decides nothing on the host.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic

import torch
from torch import Tensor

from gradvac import Alignment
from gradvac.training.ahead import DEVICE_WORK
from gradvac.training.optimizer import clip, step_unless
from gradvac.training.processes import free_generator
from gradvac.training.recipe import BatchT
from gradvac.training.settings import RunConfig
from gradvac.training.state import RunState


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step leaves, on the device.

    Attributes:
        sums: The loss and what else is shown, summed over the tokens of the step, in all
            processes.
        norm: Of the gradient, before clipping.
        bad: Whether loss or gradient was not finite, so that the step was skipped.
        alignment: What the rule did; None without one.
    """

    sums: Mapping[str, Tensor | float]
    norm: Tensor
    bad: Tensor
    alignment: Alignment | None


class Step(Generic[BatchT]):
    """A step that runs as it is written.

    Args:
        settings: The run's config.
        state: Model, losses, aligner and optimizer.
    """

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
            with autocast(self._settings, state.device):
                found = state.losses(batch, is_last)
            losses = found.losses / mean_tokens
            if state.aligner is None:
                with state.job.naming_who_is_gone():
                    losses.sum().backward()
            else:
                alignment = state.aligner.backward(losses, found.tasks, accumulate=not is_last)
            for name, value in {"loss": found.losses.detach().sum(), **found.shown}.items():
                sums[name] = sums.get(name, 0.0) + value
        sums = state.job.add_up(sums, state.device)
        norm = clip(state.model, self._settings.optimizer.clip_norm)
        bad = ~(norm.isfinite() & torch.as_tensor(sums["loss"]).isfinite())
        step_unless(state.optimizer, bad)
        state.optimizer.zero_grad()
        return StepResult(sums, norm, bad, alignment)


class GraphStep(Generic[BatchT]):
    """A step that is recorded after a few, and replayed from then on.

    Now and then a step runs as it is written, so that the aligner can look whether rows and tasks
    are still what they were said to be.

    Args:
        step: The step.
        device: A GPU.
        say: Told if recording fails; steps then go on as they are written.
    """

    def __init__(
        self, step: Step[BatchT], device: torch.device, *, say: Callable[[str], None]
    ) -> None:
        self._step, self._device, self._say = step, device, say
        self._stream = torch.cuda.Stream(device)
        self._inputs: list[Any] | None = None
        self._num_tokens = torch.ones((), dtype=torch.float64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded: StepResult | None = None
        self._num_calls, self.works = 0, True

    def __call__(self, batches: Sequence[BatchT]) -> StepResult:
        """Take a step."""
        if not self.works:
            return self._step(batches)
        # One stream for all: what is recorded must not meet leaves that belong to another.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._take(batches)
        current.wait_stream(self._stream)
        return result

    def _take(self, batches: Sequence[BatchT]) -> StepResult:
        inputs = self._receive(batches)
        self._num_calls += 1
        if _is_looked_at(self._num_calls):
            return self._step.take(inputs, self._num_tokens)
        if self._graph is None:
            self._record(inputs)
        if self._graph is None or self._recorded is None:
            return self._step.take(inputs, self._num_tokens)
        self._graph.replay()
        return _copy(self._recorded)

    def _receive(self, batches: Sequence[Any]) -> list[Any]:
        """Copy batches to where the recorded step looks for them."""
        if self._inputs is None:
            self._inputs = [batch.to(self._device).copy() for batch in batches]
        else:
            for own, batch in zip(self._inputs, batches, strict=True):
                own.copy_(batch)
        self._num_tokens.fill_(float(max(1, sum(batch.num_tokens for batch in batches))))
        return self._inputs

    def _record(self, inputs: list[Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads of the process may use the device
        try:
            with (
                DEVICE_WORK,
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode=mode),
            ):
                recorded = self._step.take(inputs, self._num_tokens)
            loose = [name for name, value in recorded.sums.items() if not torch.is_tensor(value)]
            if loose:
                raise RuntimeError(
                    f"{loose[0]!r} is a number of the host, which would never change"
                )
        except (RuntimeError, ValueError) as error:
            self._give_up(graph, error)
            return
        self._graph, self._recorded = graph, recorded

    def _give_up(self, graph: torch.cuda.CUDAGraph, error: Exception) -> None:
        """Go on without: nothing that was recorded has run, so that the step is still to take."""
        self.works = False
        graph.reset()
        free_generator(self._device)
        message = f"train.graph: steps are not recorded as a CUDA graph, but slower: {error}"
        self._say(message)
        warnings.warn(message, stacklevel=2)


def autocast(settings: RunConfig, device: torch.device) -> torch.autocast:
    """What surrounds forward passes."""
    on = settings.train.precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=on)


def _is_looked_at(call: int) -> bool:
    """The first three steps, and the 10th, 100th, 1000th, ..."""
    return call <= 3 or str(call).strip("0") == "1"


def _copy(result: StepResult) -> StepResult:
    """Results that the next replay leaves alone."""
    sums = {name: torch.as_tensor(value).clone() for name, value in result.sums.items()}
    alignment = result.alignment
    if alignment is not None:
        own: dict[str, Any] = {f.name: getattr(alignment, f.name) for f in fields(alignment)}
        own |= {name: value.clone() for name, value in own.items() if torch.is_tensor(value)}
        alignment = Alignment(**own)
    return StepResult(sums, result.norm.clone(), result.bad.clone(), alignment)

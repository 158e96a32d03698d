"""Steps of another trainer as CUDA graphs: forward and aligned backward, replayed.

Small models on fast GPUs wait for the host, which starts their kernels one by one; a graph starts
them all at once. Every batch shape has its own graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradvac import Alignment
from gradvac.recording import Recording

MOST_SHAPES = 8  # each holds the memory of a step


@dataclass(frozen=True, eq=False)
class Backward:
    """What a backward pass leaves besides `.grad`: the loss, and what the rule did."""

    loss: Tensor
    alignment: Alignment | None


Take = Callable[[Mapping[str, Tensor]], Backward]


class RecordedSteps:
    """A forward and an aligned backward, recorded once for every shape of batch.

    A model that was changed in between (layers unfrozen or put in evaluation mode, parameters
    moved) is recorded again.

    Args:
        take: Runs both on some inputs, and decides nothing on the host.
        model: What is trained; no parameter may have a `.grad` before a step.
        device: A GPU.
    """

    def __init__(self, take: Take, model: nn.Module, device: torch.device) -> None:
        self._take, self._model, self._device = take, model, device
        self._by_shape: dict[object, _OfOneShape] = {}
        self._state: object = None

    def __call__(self, inputs: Mapping[str, Tensor]) -> Backward:
        """Take a step on inputs of any shape; from the ninth shape on, eagerly."""
        parameters = list(self._model.parameters())
        if any(p.grad is not None for p in parameters):
            raise ValueError(
                "recorded: a parameter has a gradient before the step, which a replay would "
                "overwrite; call zero_grad() after every step, or leave recorded out."
            )
        state = (
            [(p.data_ptr(), p.requires_grad) for p in parameters],
            [module.training for module in self._model.modules()],
        )
        if state != self._state:
            self._by_shape.clear()
            self._state = state
        shape = tuple((name, one.shape, one.dtype) for name, one in sorted(inputs.items()))
        if shape not in self._by_shape:
            if len(self._by_shape) == MOST_SHAPES:
                return self._take(inputs)
            self._by_shape[shape] = _OfOneShape(self._take, parameters, self._device, inputs)
        return self._by_shape[shape](inputs)


class _OfOneShape:
    def __init__(
        self,
        take: Take,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        inputs: Mapping[str, Tensor],
    ) -> None:
        self._take, self._parameters = take, parameters
        self._inputs = {name: one.clone() for name, one in inputs.items()}
        self._recording = Recording(self._take_afresh, device, "recorded")
        self._gradients: list[Tensor | None] | None = None  # where the graph leaves them

    def __call__(self, inputs: Mapping[str, Tensor]) -> Backward:
        for name, one in inputs.items():
            self._inputs[name].copy_(one, non_blocking=True)
        result = self._recording()
        if self._recording.is_replayed:
            if self._gradients is None:
                self._gradients = [p.grad for p in self._parameters]
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        return result

    def _take_afresh(self) -> Backward:
        for parameter in self._parameters:  # a recording that failed has left some
            parameter.grad = None
        return self._take(self._inputs)

"""GPU work that is recorded once as a CUDA graph, and replayed from then on.

Small models on fast GPUs wait for the host, which starts their kernels one by one; a graph starts
them all at once.
"""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

ResultT = TypeVar("ResultT")

# Held while recording, and by threads that prepare work for the device: what they ask of it in the
# meantime can spoil a recording.
DEVICE_WORK = threading.Lock()
MOST_SHAPES = 8  # each holds the memory of a step


class CudaGraph(Generic[ResultT]):
    """A call that is recorded after a few runs, and replayed from then on.

    Occasionally it still runs eagerly, so that an aligner can verify which rows belong to which
    task.

    Attributes:
        works: False once recording has failed; later calls run eagerly.
        is_replayed: Whether the last call was a replay.

    Args:
        take: What to record. It reads tensors at fixed addresses, decides nothing on the host, and
            returns tensors, alone or in dataclasses and mappings. Every call returns its own
            copies; anything else it writes is overwritten by the next call.
        device: A GPU.
        setting: Name of the setting that asked for it, for the message if recording fails.
        log: Called with that message, in addition to a warning.
    """

    def __init__(
        self,
        take: Callable[[], ResultT],
        device: torch.device,
        setting: str,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._take, self._device, self._setting, self._log = take, device, setting, log
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: ResultT | None = None
        self._num_calls, self.works, self.is_replayed = 0, True, False

    def __call__(self) -> ResultT:
        """Run eagerly, record or replay, whichever is due."""
        # One stream for all: what is recorded must not meet leaves that belong to another.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._run()
        current.wait_stream(self._stream)
        return result

    def _run(self) -> ResultT:
        self._num_calls += 1
        self.is_replayed = False
        if not self.works or _is_eager(self._num_calls):
            return self._take()
        if self._graph is None:
            self._record()
        if self._graph is None or self._result is None:
            return self._take()
        self._graph.replay()
        self.is_replayed = True
        copied: ResultT = _copied(self._result)
        return copied

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads of the process may use the device
        try:
            with (
                DEVICE_WORK,
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode=mode),
            ):
                result = self._take()
        except (RuntimeError, ValueError) as error:
            self._give_up(graph, error)
            return
        self._graph, self._result = graph, result

    def _give_up(self, graph: torch.cuda.CUDAGraph, error: Exception) -> None:
        """Continue without a graph: nothing recorded has run, so the call is still to be made."""
        self.works = False
        graph.reset()
        free_generator(self._device)
        message = f"{self._setting}: not recorded as a CUDA graph, which is slower: {error}"
        if self._log is not None:
            self._log(message)
        warnings.warn(message, stacklevel=2)


class GraphedStep(Generic[ResultT]):
    """A forward and a backward, with one CUDA graph for every static shape of the inputs.

    A model that was changed in between (layers unfrozen or put in evaluation mode, parameters
    moved) is recorded again.

    Args:
        take: Runs both on some inputs, and decides nothing on the host.
        model: What is trained; no parameter may have a `.grad` before a step.
        device: A GPU.

    Attributes:
        graphs: Shapes of inputs -> their graph.
    """

    def __init__(
        self,
        take: Callable[[Mapping[str, Tensor]], ResultT],
        model: nn.Module,
        device: torch.device,
    ) -> None:
        self._take, self._model, self._device = take, model, device
        self.graphs: dict[object, _StaticStep[ResultT]] = {}
        self._state: object = None

    def __call__(self, inputs: Mapping[str, Tensor]) -> ResultT:
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
            self.graphs.clear()
            self._state = state
        shapes = tuple((name, one.shape, one.dtype) for name, one in sorted(inputs.items()))
        if shapes not in self.graphs:
            if len(self.graphs) == MOST_SHAPES:
                return self._take(inputs)
            self.graphs[shapes] = _StaticStep(self._take, parameters, self._device, inputs)
        return self.graphs[shapes](inputs)


class _StaticStep(Generic[ResultT]):
    """A step on inputs of one shape, which are copied to where its graph reads them."""

    def __init__(
        self,
        take: Callable[[Mapping[str, Tensor]], ResultT],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        inputs: Mapping[str, Tensor],
    ) -> None:
        self._take, self._parameters = take, parameters
        self._inputs = {name: one.clone() for name, one in inputs.items()}
        self.graph = CudaGraph(self._take_afresh, device, "recorded")
        self._gradients: list[Tensor | None] | None = None  # where the graph leaves them

    def __call__(self, inputs: Mapping[str, Tensor]) -> ResultT:
        for name, one in inputs.items():
            self._inputs[name].copy_(one, non_blocking=True)
        result = self.graph()
        if self.graph.is_replayed:
            if self._gradients is None:
                self._gradients = [p.grad for p in self._parameters]
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        return result

    def _take_afresh(self) -> ResultT:
        for parameter in self._parameters:  # a recording that failed has left some
            parameter.grad = None
        return self._take(self._inputs)


def _is_eager(call: int) -> bool:
    """The first three calls, and the 10th, 100th, 1000th, ..."""
    return call <= 3 or str(call).strip("0") == "1"


def _copied(result: Any) -> Any:
    """A copy that the next replay does not overwrite."""
    if isinstance(result, Tensor):
        return result.clone()
    if isinstance(result, Mapping):
        return {name: _copied(value) for name, value in result.items()}
    if is_dataclass(result) and not isinstance(result, type):
        copies = {field.name: _copied(getattr(result, field.name)) for field in fields(result)}
        return replace(result, **copies)
    return result


def free_generator(device: torch.device) -> None:
    """Make a GPU's random generator usable after a CUDA graph whose recording failed.

    The generator still belongs to the recording; a copy has the same state and does not.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())

"""What a recipe gives to the loop: a model, batches, losses by task, and a validation.

The loop (`loop.py`) knows nothing of translation or tagging. It knows a `Workload`:

    seed_everything(config.train.seed)       # before the model is built
    workload = MyWorkload(config)            # builds the model, opens the data
    train(workload, config, "runs/first")    # trains, or continues where the run stopped

Who does what:

- The *workload* builds the model (on the CPU), cuts the data into batches, and computes one summed
  loss per row. `train` moves the model to the device before anything else; a workload moves its
  batches there itself.
- The *loop* puts autocast around `losses` and `validate`, divides by the number of tokens of the
  step, calls the aligner, clips, steps, logs, validates, saves.
- What must survive a restart and is not model, optimizer, aligner or a global random state lives in
  the batch stream and is returned by its `state_dict`.
"""

# B rows (entries)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from gradvac.engine import TasksOfRows


@dataclass(frozen=True)
class BatchSlice:
    """The rows of every batch that a process gets: slice `number` of `of`, equally expensive.

    The batches of a run are the same whatever the number of processes, and so is what a step
    computes: a run can be continued by more or fewer of them, and no row is lost or seen twice.
    """

    number: int = 0
    of: int = 1

    def cut(self, costs: Sequence[float] | npt.NDArray[Any]) -> slice:
        """The local rows of a batch: neighbours, so that a process gets the rows of few tasks.

        Every slice has a row if there are enough of them. A slice without any takes a row of the
        batch that does not count, because all processes have to take part in a step.

        Args:
            costs: Cost of every row of the batch, such as its number of tokens.
        """
        num = len(costs)
        ends = np.cumsum(np.asarray(costs, dtype=np.float64))
        middles = ends - np.diff(ends, prepend=0.0) / 2  # a row belongs where its middle lies
        edges = np.linspace(0.0, ends[-1] if num else 0.0, self.of + 1)[:-1]
        numbers = np.arange(self.of)
        starts = np.maximum.accumulate(np.searchsorted(middles, edges) - numbers)
        starts = np.minimum(np.clip(starts, 0, max(0, num - self.of)) + numbers, num)
        bounds = [*starts.tolist(), num]
        return slice(bounds[self.number], bounds[self.number + 1])


FULL_BATCH = BatchSlice()


class MicroBatch(Protocol):
    """One micro-batch: anything that knows how many tokens it is worth.

    A batch with an attribute `static_shape` that is not None says that all batches of the run have
    it; there are also `to(device)`, `copy()` and `copy_(other)`, and all tensors, the tasks of rows
    included, move to the device. A step can then be recorded as a CUDA graph.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens that carry a loss (target tokens without padding); rows where there are none.

        Of the full batch, also where this is only the slice of one process.
        """
        ...


BatchT = TypeVar("BatchT", bound=MicroBatch)
BatchCo = TypeVar("BatchCo", bound=MicroBatch, covariant=True)


class BatchStream(Protocol[BatchCo]):
    """An endless iterator of batches that can be stopped and continued exactly.

    `state_dict` describes the position after the last batch handed out, whatever was read ahead; a
    stream that loads it continues with the next one. The state holds plain values (numbers,
    strings, lists, dicts) and tensors only.
    """

    def __next__(self) -> BatchCo:
        """The next batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        ...


@dataclass(frozen=True, eq=False)
class StepLosses:
    """The losses of one micro-batch.

    Attributes:
        losses: `[B]`, one entry per row of the batch: its loss *summed* over the row's tokens, not
            normalised. The loop divides by the tokens of all micro-batches of the step, so that
            accumulation changes nothing. To give a row more weight, multiply it here.
        tasks: The task of every entry, by name or position: a list, or a tensor.
        shown: Further values for the log, as sums over the micro-batch of quantities per token
            (such as the unsmoothed loss), the same names every time. The loop divides by tokens
            and logs `train/NAME`. Tensors may stay on the device.
        tokens: `[B]`, the tokens that every loss is a sum over, for `train/loss/TASK` in the log;
            None: it has only the loss of all tasks.
    """

    losses: Tensor
    tasks: TasksOfRows
    shown: Mapping[str, Tensor | float] = field(default_factory=dict)
    tokens: Tensor | None = None


class Workload(Protocol[BatchT]):
    """A training task for the loop."""

    @property
    def tasks(self) -> Sequence[str]:
        """Task names, in the order to show them."""
        ...

    @property
    def model(self) -> nn.Module:
        """The model, not compiled or wrapped."""
        ...

    @property
    def resource_levels(self) -> Mapping[str, str]:
        """Task -> "high", "medium", "low", ...; `[align]` may name levels. May be empty."""
        ...

    def batches(self, batch_slice: BatchSlice) -> BatchStream[BatchT]:
        """A stream at its beginning; called once per `train`.

        With several processes, each gets its slice of every batch. What is drawn, and the stream's
        state, belong to the full batches, so they do not depend on the slice.

        A temperature schedule counts optimizer steps: a stream that hands out its n-th micro-batch
        (from 0) is in step `n // config.optimizer.accumulation`.
        """
        ...

    def losses(self, batch: BatchT) -> StepLosses:
        """Forward pass; the model is in training mode, and autocast is on if configured."""
        ...

    def validate(self) -> Mapping[str, float]:
        """Scores by flat name, such as "dev/loss/en-fr", and their summary "dev/loss".

        Called in eval mode without gradients; global random state is restored afterwards. The
        entry `config.train.metric` decides which weights are best, and when to stop early.
        """
        ...

    def data_signature(self) -> str:
        """A hash of everything that was read: same hash, same training data."""
        ...

"""Accelerate: one line in the place of `accelerator.backward(loss)`.

    aligner = AcceleratedAligner(accelerator, Aligner(accelerator.unwrap_model(model), tasks))
    for batch in loader:
        with accelerator.accumulate(model):
            losses, tasks_of_rows = ...               # one loss per row
            aligner.backward(losses, tasks_of_rows)   # not accelerator.backward(losses.sum())
            optimizer.step()
            optimizer.zero_grad()

Gradient accumulation, loss scaling and `save_state` / `load_state` are Accelerate's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from gradvac import Aligner, Alignment
from gradvac.gradients import TasksOfRows
from gradvac.integrations._one_process import refuse_several

_PLAIN = (DistributedType.NO,)


class AcceleratedAligner:
    """An aligner that follows an accelerator's accumulation, loss scaling and checkpoints.

    Args:
        accelerator: The accelerator; the aligner's state is registered with it.
        aligner: An aligner of the unwrapped model.

    Raises:
        ValueError: There are several processes, or an engine (DeepSpeed, FSDP) that runs the
            backward pass itself.
    """

    def __init__(self, accelerator: Accelerator, aligner: Aligner) -> None:
        refuse_several(accelerator.num_processes, "accelerate launch --num_processes 1")
        if accelerator.distributed_type not in _PLAIN:
            raise ValueError(
                f"accelerator: {accelerator.distributed_type} runs the backward pass itself; use "
                "an accelerator without it."
            )
        self.accelerator, self.aligner = accelerator, aligner
        accelerator.register_for_checkpointing(self)

    def backward(
        self, losses: Tensor | Mapping[str, Tensor], tasks_of_rows: TasksOfRows | None = None
    ) -> Alignment | None:
        """What `accelerator.backward` does to a loss, to the losses of rows or tasks.

        Returns:
            What was done; None while gradients are accumulated.
        """
        if isinstance(losses, Mapping):
            scaled: Any = {task: self._scale(loss) for task, loss in losses.items()}
        else:
            scaled = self._scale(losses)
        is_last = self.accelerator.sync_gradients
        return self.aligner.backward(scaled, tasks_of_rows, accumulate=not is_last)

    def _scale(self, losses: Tensor) -> Tensor:
        losses = losses / self.accelerator.gradient_accumulation_steps
        scaler = self.accelerator.scaler
        scaled: Tensor = losses if scaler is None else scaler.scale(losses)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """The aligner's state, for `accelerator.save_state`."""
        return self.aligner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there; called by `accelerator.load_state`."""
        self.aligner.load_state_dict(state)


__all__ = ["AcceleratedAligner"]

"""Accelerate: one line instead of `accelerator.backward(loss)`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    aligner = AcceleratedAligner(accelerator, Aligner(model, tasks))
    for batch in loader:
        with accelerator.accumulate(model):
            losses, tasks_of_rows = ...               # one loss per row
            aligner.backward(losses, tasks_of_rows)   # not accelerator.backward(losses.sum())
            optimizer.step()
            optimizer.zero_grad()

Gradient accumulation, loss scaling and `save_state` / `load_state` are Accelerate's. In several
processes (`accelerate launch`, `torchrun`) the gradients are means over them, as without an
aligner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from gradvac import Aligner, Alignment
from gradvac.engine import TasksOfRows
from gradvac.integrations._shared import check_backend, check_processes


class AcceleratedAligner:
    """An aligner that follows an accelerator's accumulation, loss scaling and checkpoints.

    Args:
        accelerator: The accelerator; the aligner's state is registered with it.
        aligner: An aligner of the prepared model.

    Raises:
        ValueError: The backward pass is run by something else (DeepSpeed, FSDP), or the aligner
            does not know of the accelerator's processes.
    """

    def __init__(self, accelerator: Accelerator, aligner: Aligner) -> None:
        check_backend(str(accelerator.distributed_type.value), "accelerator")
        check_processes(aligner, accelerator.num_processes, "aligner")
        self.accelerator, self.aligner = accelerator, aligner
        accelerator.register_for_checkpointing(self)

    def backward(
        self, losses: Tensor | Mapping[str, Tensor], tasks_of_rows: TasksOfRows | None = None
    ) -> Alignment | None:
        """Do to the losses of rows or tasks what `accelerator.backward` does to a loss.

        Returns:
            What the rule did; None while gradients are accumulated.
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

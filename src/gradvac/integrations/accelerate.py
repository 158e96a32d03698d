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
aligner; models may be replicas or divided by FSDP2.

To mix tasks, and to see them in `gradvac report out`:

    loader = DataLoader(data, batch_sampler=TaskBatchSampler(data["task"], 32, temperature=5.0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    aligner = AcceleratedAligner(accelerator, Aligner(model, tasks), loader=loader, record="out")
    ...
        accelerator.log(aligner.log_values(), step=aligner.step)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from gradvac import Aligner, Alignment
from gradvac.engine import TasksOfRows
from gradvac.integrations._shared import (
    RunRecord,
    check_backend,
    check_processes,
    has_fsdp2,
    log_values,
    sampler_of,
    unscaled,
)


class AcceleratedAligner:
    """An aligner that follows an accelerator's accumulation, loss scaling and checkpoints.

    Args:
        accelerator: The accelerator; the aligner's state is registered with it.
        aligner: An aligner of the prepared model.
        loader: The prepared loader, if it mixes tasks by a `TaskBatchSampler`: its position becomes
            part of checkpoints, and after `load_state` it goes on there. Not with a stateful
            loader, which keeps its position itself.
        record: A folder for `gradvac report`.
        record_every: Optimizer steps between records.

    Attributes:
        step: Optimizer steps so far.
        alignment: What the last one did; None before the first.

    Raises:
        ValueError: The backward pass is run by something else (DeepSpeed), or the aligner does not
            know of the accelerator's processes.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        aligner: Aligner,
        *,
        loader: Any = None,
        record: str | os.PathLike[str] | None = None,
        record_every: int = 10,
    ) -> None:
        kind = str(accelerator.distributed_type.value)
        check_backend(kind, "accelerator", is_fsdp2=has_fsdp2(accelerator))
        check_processes(aligner, accelerator.num_processes, "aligner")
        self.accelerator, self.aligner = accelerator, aligner
        self.step, self._num_batches = 0, 0
        self.alignment: Alignment | None = None
        self._loader, self._sampler = loader, sampler_of(loader)
        if loader is not None and self._sampler is None:
            raise ValueError(
                "loader: has no gradvac.sampling.TaskBatchSampler as its batch_sampler; leave it "
                "out, as other loaders know themselves how to go on."
            )
        self._record: RunRecord | None = None
        if record is not None:
            self._record = RunRecord(
                record, aligner, every=record_every, is_first=accelerator.is_main_process
            )
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
        alignment = self.aligner.backward(scaled, tasks_of_rows, accumulate=not is_last)
        self._num_batches += 1
        if alignment is None:
            return None
        self.step += 1
        scaler = self.accelerator.scaler
        one = alignment.losses.new_ones(())
        self.alignment = unscaled(alignment, None if scaler is None else scaler.scale(one))
        if self._record is not None:
            self._record(self.step, self.alignment)
        return self.alignment

    def log_values(self) -> dict[str, float]:
        """What the last step did, by names for a log: similarities, conflicts, losses, norms.

        They also go into the record, where there is one. Waits for the device.
        """
        if self.alignment is None:
            return {}
        values = log_values(self.alignment)
        if self._record is not None:
            self._record.log_step(self.step, self.alignment, values)
        return values

    def _scale(self, losses: Tensor) -> Tensor:
        losses = losses / self.accelerator.gradient_accumulation_steps
        scaler = self.accelerator.scaler
        scaled: Tensor = losses if scaler is None else scaler.scale(losses)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """The aligner's state and the loader's position, for `accelerator.save_state`."""
        if self._record is not None:
            self._record.flush()
        state = {"aligner": self.aligner.state_dict(), "step": self.step}
        if self._sampler is not None:
            taken = self._num_batches * self._batches_at_once()
            state["sampler"] = self._sampler.state_dict(taken)
        return state | {"num_batches": self._num_batches}

    def _batches_at_once(self) -> int:
        """Batches of the sampler that the processes take together."""
        inner = self._loader.batch_sampler
        is_shared = getattr(inner, "split_batches", False) or inner is self._sampler
        return 1 if is_shared else self.accelerator.num_processes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there; called by `accelerator.load_state`."""
        self.aligner.load_state_dict(state["aligner"])
        self.step, self._num_batches = state["step"], state["num_batches"]
        if self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])
            self._loader.set_epoch(state["sampler"]["batch"] // len(self._sampler))


__all__ = ["AcceleratedAligner"]

"""Lightning: a mixin that aligns the losses of a `LightningModule`.

    class Model(AlignedModule, LightningModule):
        def configure_aligner(self):
            return Aligner(self.net, tasks=["de", "fr"], rule=GradVac())

        def training_step(self, batch, batch_idx):
            losses = ...                                    # one entry per row
            return self.aligned_loss(losses, batch["tasks"])

Precision plugins, accumulation, clipping and checkpoints are Lightning's; the aligner's state is
part of every checkpoint. With `strategy="ddp"` the aligner has to know of the other processes:
`Aligner(self.net, ..., process_group=torch.distributed.group.WORLD)`. FSDP2 is
`strategy=ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)`, with

    def configure_model(self):
        for part in (*self.net.layers, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

A loader with a `TaskBatchSampler` mixes tasks; its position is part of every checkpoint too. In
several processes, give rank and num_ranks to the sampler and use_distributed_sampler=False to the
Trainer.
`record = "out"` in the class, or set before training, writes what `gradvac report out` reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradvac import Aligner, Alignment
from gradvac.engine import TasksOfRows, own_hooks
from gradvac.integrations._loss_parts import reached
from gradvac.integrations._shared import (
    RunRecord,
    check_processes,
    log_values,
    sampler_of,
    unscaled,
)

_STATE = "gradvac_aligner"
_SAMPLER = "gradvac_sampler"


class AlignedModule:
    """A mixin; put it before `LightningModule` among the bases, and define `configure_aligner`.

    Attributes:
        record: A folder for `gradvac report`; None: nothing is recorded.
        record_every: Optimizer steps between records.
        alignment: What the last optimizer step did; None before the first.
    """

    record: str | os.PathLike[str] | None = None
    record_every: int = 10

    alignment: Alignment | None = None
    _aligner: Aligner | None = None
    _aligner_state: Mapping[str, Any] | None = None
    _sampler_state: Mapping[str, Any] | None = None
    _losses: tuple[Tensor | Mapping[str, Tensor], TasksOfRows | None] | None = None
    _is_checked = _is_aligning = False
    _run_record: RunRecord | None = None

    def configure_aligner(self) -> Aligner:
        """Make the aligner; called once, when training starts."""
        raise ValueError(
            f"{type(self).__name__}.configure_aligner: is missing; return an Aligner of the "
            "parameters that are trained."
        )

    @property
    def aligner(self) -> Aligner:
        """The aligner; made on first use."""
        if self._aligner is None:
            self._aligner = self.configure_aligner()
            if self._aligner_state is not None:
                self._aligner.load_state_dict(self._aligner_state)
                self._aligner_state = None
        return self._aligner

    def aligned_loss(
        self, losses: Tensor | Mapping[str, Tensor], tasks_of_rows: TasksOfRows | None = None
    ) -> Tensor:
        """The loss that `training_step` returns: the sum of the rows, whose tasks are remembered.

        Args:
            losses: One entry per row with `tasks_of_rows`, or a mapping task -> loss.
            tasks_of_rows: The task of every entry.
        """
        self._losses = (losses, tasks_of_rows)
        rows = torch.stack(list(losses.values())) if isinstance(losses, Mapping) else losses
        loss = rows.sum()
        if loss.requires_grad:
            with own_hooks():
                loss.register_hook(self._refuse_plain_backward)
        return loss

    def _refuse_plain_backward(self, _: Tensor) -> None:
        if not self._is_aligning:
            raise ValueError(
                "training_step: the loss of self.aligned_loss is being differentiated as it is, "
                "which aligns nothing; call self.manual_backward(loss), and use no strategy with a "
                "backward of its own (DeepSpeed)."
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Align instead of `loss.backward()`; called by Lightning with the scaled loss."""
        if args or kwargs:
            raise ValueError(f"backward: takes the loss alone, got also {[*args, *kwargs]}.")
        if self._losses is None:
            raise ValueError(
                "training_step: its loss did not come from self.aligned_loss(losses, tasks), so "
                "the tasks of its rows are unknown; return what that gives."
            )
        losses, tasks = self._losses
        self._losses = None
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        if not self._is_checked:
            self._check_strategy(trainer)
            self._is_checked = True
        scaled = self._scaled_like(loss, losses)
        is_accumulating = self.automatic_optimization and trainer.fit_loop._should_accumulate()  # type: ignore[attr-defined]
        alignment = self.aligner.backward(scaled, tasks, accumulate=is_accumulating)
        if alignment is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            one = alignment.losses.new_ones(())
            self.alignment = unscaled(alignment, None if scaler is None else scaler.scale(one))
            self._keep(trainer, self.alignment)

    def _keep(self, trainer: Any, alignment: Alignment) -> None:
        """Record a step, and log it when Lightning logs."""
        step = trainer.global_step + 1
        if self.record is not None and self._run_record is None:
            is_first = trainer.is_global_zero
            self._run_record = RunRecord(
                self.record, self.aligner, every=self.record_every, is_first=is_first
            )
        if self._run_record is not None:
            self._run_record(step, alignment)
        if step % trainer.log_every_n_steps == 0:
            values = log_values(alignment)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step - 1)  # as Lightning counts
            if self._run_record is not None:
                self._run_record.log_step(step, alignment, values)

    def on_train_end(self) -> None:
        """Write what is left of the record."""
        super().on_train_end()  # type: ignore[misc]
        if self._run_record is not None:
            self._run_record.flush()

    def _check_strategy(self, trainer: Any) -> None:
        name = type(trainer.strategy).__name__
        if trainer.world_size > 1 and name not in ("DDPStrategy", "ModelParallelStrategy"):
            raise ValueError(
                f"Trainer: {name} runs or divides the backward pass in its own way; use "
                'strategy="ddp", or FSDP2 (see the docstring of gradvac.integrations.lightning).'
            )
        check_processes(self.aligner, trainer.world_size, "configure_aligner")

    def _scaled_like(self, loss: Tensor, losses: Tensor | Mapping[str, Tensor]) -> Any:
        """The losses, scaled as Lightning scaled their sum: accumulation and loss scaling."""
        parts = list(losses.values()) if isinstance(losses, Mapping) else [losses]
        self._is_aligning = True
        try:
            factors = torch.autograd.grad(loss, parts, retain_graph=True)
        except RuntimeError as error:
            raise ValueError(
                "training_step: its loss does not depend on the rows of self.aligned_loss; return "
                "what that gives."
            ) from error
        finally:
            self._is_aligning = False
        _check_other_terms(loss, parts)
        scaled = [part * factor for part, factor in zip(parts, factors, strict=True)]
        return dict(zip(losses, scaled, strict=True)) if isinstance(losses, Mapping) else scaled[0]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the aligner's state into a checkpoint.

        Lightning takes some in the middle of a step (by the clock, or when it is told to stop), and
        gradients are in none of them.
        """
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        if self._aligner is not None:
            checkpoint[_STATE] = self._aligner.state_dict(partial=True)
        if self._run_record is not None:
            self._run_record.flush()
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        sampler = sampler_of(trainer.train_dataloader)
        if sampler is not None:
            passes = trainer.fit_loop.epoch_progress.current
            is_within = passes.started > passes.processed
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.processed
            taken = passes.processed * len(sampler) + (batches if is_within else 0)
            checkpoint[_SAMPLER] = sampler.state_dict(taken)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it; the aligner may be made later."""
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        state = checkpoint.get(_STATE)
        if state is not None and self._aligner is not None:
            self._aligner.load_state_dict(state)
        else:
            self._aligner_state = state
        self._sampler_state = checkpoint.get(_SAMPLER)

    def on_train_start(self) -> None:
        """Let the loader go on where the checkpoint was taken."""
        super().on_train_start()  # type: ignore[misc]
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        sampler = sampler_of(trainer.train_dataloader)
        if sampler is not None and self._sampler_state is not None:
            sampler.load_state_dict(self._sampler_state)
            self._sampler_state = None
            iter(trainer.fit_loop._data_fetcher)  # workers have asked for the first batches already


def _check_other_terms(loss: Tensor, parts: list[Tensor]) -> None:
    """A loss depends on parameters through its rows alone, or a part of it would be lost."""
    leaf = reached(loss, parts)[1]
    if leaf is not None:
        raise ValueError(
            f"training_step: its loss has a term that is not a row of self.aligned_loss, and "
            f"reaches a parameter of shape {list(leaf.shape)} without them: it would be left "
            "out. Add it to the rows, or make it a task."
        )


__all__ = ["AlignedModule"]

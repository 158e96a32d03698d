"""Transformers: a `Trainer` whose batches mix tasks and whose backward pass is aligned.

    trainer = AlignedTrainer(
        model=model,
        args=TrainingArguments("out", per_device_train_batch_size=32),
        train_dataset=dataset,                  # every example has a column "task"
        tasks=["de", "fr", "sw"],
        rule=GradVac(),
    )
    trainer.train()

Everything else is the Trainer's: precision, clipping, accumulation, evaluation, logging,
checkpoints and `resume_from_checkpoint`, which include the aligner. With `rule=Sum()` the
gradients equal those of the plain Trainer, also in several processes (torchrun).
"""

# B rows

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gradvac import Aligner, Alignment, Sum
from gradvac.analysis import step_values
from gradvac.engine import positions
from gradvac.integrations._collator import TASKS_OF_ROWS, TaskCollator, refuse_other_numbers
from gradvac.integrations._processes import refuse_engine, require_together
from gradvac.integrations._recorded import Backward, RecordedSteps
from gradvac.integrations._row_losses import Normaliser, sum_by_row, tensor_of

_NUM_ITEMS = "num_items_in_batch"
_STATE = "aligner.pt"
RowLosses = Callable[[Any, Tensor, Tensor | int | None], Tensor]


if TYPE_CHECKING:  # a mixin of either trainer
    _AnyTrainer = Trainer
else:
    _AnyTrainer = object


class _Aligned(_AnyTrainer):
    """A Hugging Face Trainer whose batches mix tasks and whose backward pass is aligned.

    Args:
        tasks: Names, in the order to show them.
        rule: How task gradients are combined; default `GradVac()`.
        granularity: Which parameters share a component.
        engine: How task gradients are obtained.
        aligner_options: Further arguments of `Aligner`.
        task_column: The column of the examples that holds the name of their task.
        row_losses: For losses that are not plain cross-entropy or squared error: a function of the
            model's outputs, the labels and `num_items_in_batch` (the labels of the whole step, or
            None) that returns one loss per row, `[B]`. Divide by `num_items_in_batch` if it is
            given, by the labels of the batch otherwise.
        recorded: Replay forward and backward as CUDA graphs, one for each shape of batch. For
            models so small that the host is the bottleneck, in bf16, with batches padded to few
            different lengths, without accumulation.
        options: The Trainer's own arguments.

    Raises:
        ValueError: An option replaces the loss or the backward pass (DeepSpeed, FSDP).
    """

    def __init__(
        self,
        *args: Any,
        tasks: Sequence[str],
        rule: Any = None,
        granularity: Any = "all_layer",
        engine: str = "auto",
        aligner_options: Mapping[str, Any] | None = None,
        task_column: str = "task",
        row_losses: RowLosses | None = None,
        recorded: bool = False,
        **options: Any,
    ) -> None:
        self._task_column, self._row_losses = task_column, row_losses
        super().__init__(*args, **options)
        self._refuse()
        refuse_other_numbers(self.train_dataset, task_column, tasks)
        assert self.model is not None
        if not isinstance(self.data_collator, TaskCollator):
            self.data_collator = TaskCollator(self.data_collator, task_column)
        together = {"process_group": distributed.group.WORLD} if self.args.world_size > 1 else {}
        chosen = {**together, **(aligner_options or {})}
        self.aligner = Aligner(self.model, tasks, rule, granularity, engine, **chosen)
        require_together(self.aligner, self.args.world_size, "aligner_options")
        self.alignment: Alignment | None = None
        self._normaliser = Normaliser()
        base: Any = self.model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base  # peft's wrapper
        self._is_causal = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self._recorded = self._make_recorded() if recorded else None

    def _refuse(self) -> None:
        args = self.args
        if args.n_gpu > 1:
            raise ValueError(
                f"args: this process would divide batches over {args.n_gpu} GPUs (DataParallel); "
                "start one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one."
            )
        refuse_engine(str(self.accelerator.distributed_type.value), "args")
        if "lomo" in str(args.optim).lower():
            raise ValueError(
                "optim: LOMO takes its steps in the Trainer's own backward pass, which is "
                "replaced; choose another optimizer."
            )
        is_overridden = type(self).compute_loss is not Trainer.compute_loss
        replaced = {
            "compute_loss": is_overridden and self._row_losses is None,
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": bool(args.label_smoothing_factor),
        }
        for name, is_on in replaced.items():
            if is_on:
                raise ValueError(
                    f"{name}: gives one loss for the whole batch; give row_losses instead, which "
                    "gives one per row."
                )
        if self.model_init is not None:
            raise ValueError("model_init: the aligner belongs to one model; give model instead.")

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        if self._task_column not in self._signature_columns:
            self._signature_columns.append(self._task_column)

    def get_train_dataloader(self) -> Any:
        """The Trainer's own, with the rows of a task together in every batch."""
        is_dispatched = self.accelerator.dispatch_batches
        if is_dispatched is None:
            is_dispatched = isinstance(self.train_dataset, IterableDataset)
        if is_dispatched and self.args.world_size > 1:
            raise ValueError(
                "train_dataset: one process would read it for all and cut up its batches, which "
                "cannot be done with names of tasks; let each process read its own: "
                'TrainingArguments(accelerator_config={"dispatch_batches": False}).'
            )
        given = self.data_collator
        assert isinstance(given, TaskCollator)
        self.data_collator = grouped = copy(given)
        grouped.is_grouped = True
        try:
            return super().get_train_dataloader()
        finally:  # in evaluation, rows stay in their order
            self.data_collator = given

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One micro-batch: forward, losses of rows, aligned backward."""
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        inputs = dict(inputs)
        tasks = inputs.pop(TASKS_OF_ROWS)
        inputs = self._prepare_inputs(inputs)
        if self._recorded is None:
            backward = self._backward(model, inputs, tasks, num_items_in_batch)
        else:
            backward = self._recorded(self._on_device(inputs, tasks, num_items_in_batch))
        if backward.alignment is not None:
            self.alignment = backward.alignment
        return backward.loss

    def _backward(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        tasks: Sequence[str] | Tensor,
        num_items: Tensor | int | None,
    ) -> Backward:
        with self.compute_loss_context_manager():
            losses = self._losses(model, inputs, num_items)
        is_of_step = self.model_accepts_loss_kwargs and num_items is not None
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)  # what a user said, since 5.22
        if not (is_of_step if is_scaled is None else is_scaled):
            losses = losses / self.current_gradient_accumulation_steps
        if is_of_step and self.args.average_tokens_across_devices:  # labels of all, and a mean
            losses = losses * self.aligner.num_processes
        if len(losses) != len(tasks):
            raise ValueError(
                f"row_losses: gave {len(losses)} entries for {len(tasks)} rows; give one per row."
            )
        scaler = self.accelerator.scaler
        alignment = self.aligner.backward(
            losses if scaler is None else scaler.scale(losses),
            tasks,
            accumulate=not self.accelerator.sync_gradients,
        )
        return Backward(losses.detach().sum(), alignment)

    def _make_recorded(self) -> RecordedSteps:
        args = self.args
        missing = {
            "a GPU": args.device.type == "cuda",
            "one process": args.world_size == 1,
            "bf16=True": args.bf16,
            "gradient_accumulation_steps=1": args.gradient_accumulation_steps == 1,
        }
        if not all(missing.values()):
            needs = ", ".join(name for name, is_there in missing.items() if not is_there)
            raise ValueError(f"recorded: needs {needs}; leave it out, or change args.")

        def take(given: Mapping[str, Tensor]) -> Backward:
            inputs = dict(given)
            tasks, num_items = inputs.pop(TASKS_OF_ROWS), inputs.pop(_NUM_ITEMS, None)
            return self._backward(self.model_wrapped, inputs, tasks, num_items)

        assert self.model is not None
        return RecordedSteps(take, self.model, args.device)

    def _on_device(
        self, inputs: dict[str, Any], tasks: Sequence[str], num_items: Tensor | int | None
    ) -> dict[str, Tensor]:
        """Everything a step depends on, as tensors."""
        loose = [name for name, value in inputs.items() if not isinstance(value, Tensor)]
        if loose:
            raise ValueError(
                f"recorded: the batches' {loose[0]!r} is not a tensor; leave recorded out."
            )
        numbers = positions(tasks, self.aligner.tasks, "train_dataset")
        inputs = {**inputs, TASKS_OF_ROWS: numbers.to(self.args.device, non_blocking=True)}
        if num_items is not None:
            inputs[_NUM_ITEMS] = torch.as_tensor(num_items, device=self.args.device)
        return inputs

    def _losses(
        self, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None
    ) -> Tensor:
        """Losses of rows that add up to what the Trainer would have called the loss."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            raise ValueError("train_dataset: its batches have no labels; give them.")
        if self._row_losses is not None:
            return self._row_losses(model(**inputs), labels, num_items)
        normaliser = self._normaliser
        if normaliser.is_known:
            outputs = model(**_without_labels(self.accelerator.unwrap_model(model), inputs))
        elif self.model_accepts_loss_kwargs and num_items is not None:
            outputs = model(**inputs, **{_NUM_ITEMS: normaliser.told(num_items)})
        else:
            outputs = model(**inputs)
        sums, counts = sum_by_row(tensor_of(outputs, "logits"), labels, shifted=self._is_causal)
        if not normaliser.is_known:
            normaliser.learn(sums, counts, num_items, tensor_of(outputs, "loss"))
        return sums / normaliser.divisor(counts, num_items).to(sums.dtype)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        """Evaluate without the tasks of rows, which the model does not know."""
        rest = {key: value for key, value in inputs.items() if key != TASKS_OF_ROWS}
        return super().prediction_step(model, rest, *args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log what the last step did, beside the loss."""
        if "loss" in logs and self.alignment is not None:
            values = step_values(self.alignment)
            logs |= {f"gradvac/{name}": value for name, value in values.items()}
        super().log(logs, *args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.aligner.state_dict(), os.path.join(output_dir, _STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, _STATE)
        if os.path.isfile(path):
            self.aligner.load_state_dict(torch.load(path, weights_only=True))
        elif not isinstance(self.aligner.rule, Sum):
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint} has no {_STATE}, so the rule's state is "
                "lost; to start afresh from its weights, load the model from there instead."
            )


def _without_labels(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs without labels, so that the model need not compute its own loss, where possible."""
    rest = {key: value for key, value in inputs.items() if key != "labels"}
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in rest:
        return rest
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None:
        return inputs
    return {**rest, "decoder_input_ids": prepare(labels=inputs["labels"])}


class AlignedTrainer(_Aligned, Trainer):
    __doc__ = _Aligned.__doc__


class AlignedSeq2SeqTrainer(_Aligned, Seq2SeqTrainer):
    __doc__ = _Aligned.__doc__


__all__ = ["TASKS_OF_ROWS", "AlignedSeq2SeqTrainer", "AlignedTrainer", "TaskCollator"]

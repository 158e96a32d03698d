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

import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer, Trainer, default_data_collator
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gradvac import Aligner, Alignment, Sum
from gradvac.analysis import step_values
from gradvac.cuda_graph import GraphedStep
from gradvac.engine import positions
from gradvac.integrations._shared import check_backend, check_processes

TASKS_OF_ROWS = "tasks_of_rows"
_NUM_ITEMS = "num_items_in_batch"
_STATE = "aligner.pt"
_IGNORED = -100  # a label that does not count
RowLosses = Callable[[Any, Tensor, Tensor | int | None], Tensor]

if TYPE_CHECKING:  # a mixin of either trainer
    _AnyTrainer = Trainer
else:
    _AnyTrainer = object


class TaskCollator:
    """A data collator that adds the task of every example to the batch of another collator.

    Args:
        collator: Makes a batch of the examples without their tasks.
        column: Name of the column that holds the tasks.
        is_grouped: Group the examples by task, which saves the aligner from regrouping every
            layer's rows; for training, where the order within a batch does not matter.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any] = default_data_collator,
        column: str = "task",
        *,
        is_grouped: bool = False,
    ) -> None:
        self.collator, self.column, self.is_grouped = collator, column, is_grouped

    @property
    def tokenizer(self) -> Any:
        """The other collator's, which a Trainer saves with its checkpoints."""
        return self.collator.tokenizer  # type: ignore[attr-defined]

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate, and put the tasks under "tasks_of_rows".

        Examples for evaluation need no task.
        """
        missing = [number for number, one in enumerate(features) if self.column not in one]
        if len(missing) == len(features) and not self.is_grouped:
            return dict(self.collator(list(features)))
        if missing:
            raise ValueError(
                f"train_dataset: example {missing[0]} of the batch has no column {self.column!r} "
                f"with its task; its columns are {', '.join(features[missing[0]])}."
            )
        if self.is_grouped:
            places = {one[self.column]: place for place, one in enumerate(features)}
            features = sorted(features, key=lambda one: places[one[self.column]])
        tasks = [one[self.column] for one in features]
        rest = [{k: v for k, v in one.items() if k != self.column} for one in features]
        return {**self.collator(rest), TASKS_OF_ROWS: tasks}


def check_task_numbers(dataset: Any, column: str, tasks: Sequence[str]) -> None:
    """Raise if the numbers of a column (`ClassLabel`) name the tasks in another order."""
    feature = (getattr(dataset, "features", None) or {}).get(column)
    names = getattr(feature, "names", None)
    if names is not None and list(names) != list(tasks)[: len(names)]:
        raise ValueError(
            f"tasks: the numbers in column {column!r} of train_dataset stand for {list(names)}, "
            f"but tasks are {list(tasks)}; give them in the same order."
        )


@dataclass(frozen=True, eq=False)
class Backward:
    """What a backward pass leaves besides `.grad`: the loss, and what the rule did."""

    loss: Tensor
    alignment: Alignment | None


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
        self._check_options()
        check_task_numbers(self.train_dataset, task_column, tasks)
        assert self.model is not None
        if not isinstance(self.data_collator, TaskCollator):
            self.data_collator = TaskCollator(self.data_collator, task_column)
        together = {"process_group": distributed.group.WORLD} if self.args.world_size > 1 else {}
        chosen = {**together, **(aligner_options or {})}
        self.aligner = Aligner(self.model, tasks, rule, granularity, engine, **chosen)
        check_processes(self.aligner, self.args.world_size, "aligner_options")
        self.alignment: Alignment | None = None
        self._normaliser = Normaliser()
        base: Any = self.model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base  # peft's wrapper
        self._is_causal = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self.graphed_step = self._make_graphed_step() if recorded else None

    def _check_options(self) -> None:
        args = self.args
        if args.n_gpu > 1:
            raise ValueError(
                f"args: this process would divide batches over {args.n_gpu} GPUs (DataParallel); "
                "start one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one."
            )
        check_backend(str(self.accelerator.distributed_type.value), "args")
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
        if self.graphed_step is None:
            backward = self._backward(model, inputs, tasks, num_items_in_batch)
        else:
            backward = self.graphed_step(self._on_device(inputs, tasks, num_items_in_batch))
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

    def _make_graphed_step(self) -> GraphedStep[Backward]:
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
        return GraphedStep(take, self.model, args.device)

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
        normaliser, twice = self._normaliser, None if num_items is None else 2 * num_items
        if normaliser.is_known:
            outputs = model(**_without_labels(self.accelerator.unwrap_model(model), inputs))
        elif self.model_accepts_loss_kwargs and twice is not None:
            outputs = model(**inputs, **{_NUM_ITEMS: twice})
        else:
            outputs = model(**inputs)
        sums, counts = sum_by_row(tensor_of(outputs, "logits"), labels, shifted=self._is_causal)
        if not normaliser.is_known:
            normaliser.learn(sums, counts, twice, tensor_of(outputs, "loss"))
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


def sum_by_row(logits: Tensor, labels: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """Losses of rows, and how many labels they are sums over.

    Args:
        logits: `[B, S, V]` with labels `[B, S]`; or `[B, V]` with labels `[B]`, which are numbers
            of classes, or values for V = 1.
        labels: -100 is ignored.
        shifted: Whether token s is predicted from those before it (causal language models).

    Returns:
        `[B]` and `[B]`.

    Raises:
        ValueError: The shapes are none of these.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logits.dim() == 3 and labels.dim() == 2 and not labels.is_floating_point():
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none"
        )
        return losses.sum(1), (labels != _IGNORED).sum(1)
    if logits.dim() == 2 and labels.dim() == 1:
        ones = torch.ones(len(labels), dtype=torch.int64, device=labels.device)
        if labels.is_floating_point() and logits.shape[1] == 1:
            return (logits[:, 0] - labels.to(logits.dtype)).square(), ones
        if not labels.is_floating_point() and logits.shape[1] > 1:
            losses = F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="none")
            return losses, (labels != _IGNORED).long()
    raise ValueError(
        f"row_losses: cannot be guessed from logits {list(logits.shape)} and labels "
        f"{list(labels.shape)} ({labels.dtype}); give row_losses, a function of the model's "
        "outputs, the labels and num_items_in_batch that returns one loss per row."
    )


class Normaliser:
    """What a model divides the sum of its losses by, learned from the model itself.

    Some models divide by the labels of the whole step (`num_items_in_batch`), others by those of
    the micro-batch; their signatures do not say which. So a model is given twice the number once,
    and its loss compared with the sum of rows.

    Attributes:
        is_known: Whether it has been learned; until then, the model's own loss is needed.
    """

    def __init__(self) -> None:
        self.is_known = self._by_items = False

    def learn(
        self, sums: Tensor, counts: Tensor, num_items: Tensor | int | None, loss: Tensor
    ) -> None:
        """Compare with the model's own loss, unless there is nothing to compare.

        Args:
            sums: `[B]`.
            counts: `[B]`.
            num_items: What the model was given as the labels of the whole step; None: nothing.
            loss: The model's loss of this micro-batch.

        Raises:
            ValueError: The model's loss is neither: rows would silently be weighted differently.
        """
        total, here = float(sums.detach().sum()), int(counts.sum())
        value = float(loss.detach())
        if not (math.isfinite(value) and total):
            return
        divisors = [here] if num_items is None else [here, int(num_items)]
        gaps = [abs(total / max(1, divisor) - value) for divisor in divisors]
        is_half = loss.dtype in (torch.float16, torch.bfloat16)
        if min(gaps) > (1e-2 if is_half else 1e-4) * max(abs(value), 1e-6):
            raise ValueError(
                f"row_losses: the model's loss is {value:.6g}, but its rows give {total:.6g} over "
                f"{' or '.join(map(str, divisors))} labels; it computes another loss than cross-"
                "entropy or squared error. Give row_losses, one loss per row."
            )
        self.is_known, self._by_items = True, gaps[-1] < gaps[0]

    def divisor(self, counts: Tensor, num_items: Tensor | int | None) -> Tensor:
        """What the sums of rows are divided by to add up to the model's loss."""
        here = counts.sum()
        labels = torch.as_tensor(num_items, device=here.device) if self._by_items else here
        return labels.clamp_min(1)


def tensor_of(outputs: Any, name: str) -> Tensor:
    """The logits or the loss of a model's outputs."""
    found = outputs.get(name) if isinstance(outputs, dict) else None
    if not isinstance(found, Tensor):
        names = ", ".join(outputs) if isinstance(outputs, dict) else type(outputs).__name__
        raise ValueError(f"row_losses: the model gives no {name} ({names}); give row_losses.")
    return found


class AlignedTrainer(_Aligned, Trainer):
    __doc__ = _Aligned.__doc__


class AlignedSeq2SeqTrainer(_Aligned, Seq2SeqTrainer):
    __doc__ = _Aligned.__doc__


__all__ = ["TASKS_OF_ROWS", "AlignedSeq2SeqTrainer", "AlignedTrainer", "TaskCollator"]

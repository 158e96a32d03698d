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

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, default_data_collator
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from gradvac import MGDA, Aligner, Alignment, GradNorm, Sum
from gradvac.analysis import (
    Similarities,
    concatenate,
    load_similarities,
    measure,
    save_similarities,
)
from gradvac.analysis.run_files import RunFiles
from gradvac.engine import own_hooks, positions
from gradvac.engine.joint_gradient import is_due
from gradvac.engine.models import is_sharded
from gradvac.integrations._loss_parts import LossParts, check_logits
from gradvac.integrations._shared import (
    RunRecord,
    check_backend,
    check_processes,
    has_fsdp2,
    log_values,
    sampler_of,
    unscaled,
)
from gradvac.sampling import TaskBatchSampler
from gradvac.utils.cuda_graph import GraphedStep
from gradvac.utils.devices import index_on, is_captured

TASKS_OF_ROWS = "tasks_of_rows"
_NUM_ITEMS = "num_items_in_batch"
_STATE = "aligner.pt"
_IGNORED = -100  # a label that does not count
_SEPARATED = 2  # batches on which a trainer's own loss is checked
_WRAP_TRAINING_STEP = ("SFTTrainer", "DPOTrainer")  # in a context that is kept, and no more
_LOADER_OPTIONS = (  # of a loader that is made again with another sampler
    *("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor"),
    *("persistent_workers", "multiprocessing_context", "in_order"),
)
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
    """What a backward pass leaves besides `.grad`.

    Attributes:
        loss: The loss of the micro-batch.
        alignment: What the rule did; None while gradients are accumulated.
        by_task: `[2, T]`: the tasks' parts of the loss, and what they are means over (labels, or
            rows); None before anything is known.
    """

    loss: Tensor
    alignment: Alignment | None
    by_task: Tensor | None = None


class AlignedMixin(_AnyTrainer):
    """Makes a Hugging Face Trainer, or a subclass, one whose backward pass is aligned.

    Put it before the trainer among the bases: `class MyTrainer(AlignedMixin, SFTTrainer): ...`.

    Losses of rows come from the model's logits where the trainer uses the model's own loss (label
    smoothing included). A trainer with a loss of its own (`compute_loss`, as TRL's `SFTTrainer` and
    `DPOTrainer`, or `compute_loss_func`) keeps it: it is taken apart by the rows of the model's
    outputs, so that gradients are exact; losses by task are known where the loss is a sum over
    them, as in SFT.

    Args:
        tasks: Names, in the order to show them.
        rule: How task gradients are combined; default `GradVac()`.
        granularity: Which parameters share a component.
        engine: How task gradients are obtained.
        aligner_options: Further arguments of `Aligner`.
        task_column: The column of the examples that holds the name of their task.
        task_key: Instead of a column: the entry of a batch that names the one task of all its rows,
            for trainers that make batches of one task (sentence-transformers: "dataset_name").
            Tasks meet in a step by gradient accumulation.
        sampling: Mix tasks instead of shuffling examples: arguments of
            `gradvac.sampling.TaskBatchSampler` such as `{"temperature": "auto", "most_epochs": 4}`;
            a table of how often each task will be seen is printed before training.
        record: A folder for `gradvac report`: what every `record_every`-th step did, and the log.
        record_every: Steps between records.
        row_losses: A function of the model's outputs, the labels and `num_items_in_batch` (the
            labels of the whole step, or None) that returns one loss per row, `[B]`, where neither
            way above applies. Divide by `num_items_in_batch` if it is given, by the labels of the
            batch otherwise.
        recorded: Replay forward and backward as CUDA graphs, one for each shape of batch. For
            models so small that the host is the bottleneck, in bf16, with batches padded to few
            different lengths, without accumulation.
        options: The Trainer's own arguments.

    Raises:
        ValueError: Something else runs the backward pass (DeepSpeed), or an option cannot be kept.
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
        task_key: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        record: str | os.PathLike[str] | None = None,
        record_every: int = 10,
        row_losses: RowLosses | None = None,
        recorded: bool = False,
        **options: Any,
    ) -> None:
        self._task_column, self._task_key, self._row_losses = task_column, task_key, row_losses
        self._sampling = sampling
        self._aligner: Aligner | None = None
        super().__init__(*args, **options)
        self._check_options()
        if task_key is None:
            check_task_numbers(self.train_dataset, task_column, tasks)
            if not isinstance(self.data_collator, TaskCollator):
                self.data_collator = TaskCollator(self.data_collator, task_column)
        together = {"process_group": distributed.group.WORLD} if self.args.world_size > 1 else {}
        chosen = {**({} if self.is_fsdp_enabled else together), **(aligner_options or {})}
        self._aligner_options = {
            "tasks": tasks,
            "rule": rule,
            "granularity": granularity,
            "engine": engine,
            **chosen,
        }
        self._is_causal = self._model_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self.alignment: Alignment | None = None
        self._normaliser, self._separated = Normaliser(), 0
        self._by_task: Tensor | None = None
        self._steps_summed = 0
        if not self.is_fsdp_enabled:  # which divides the model when training begins
            check_processes(self.aligner, self.args.world_size, "aligner_options")
        self._record: RunRecord | None = None
        self._record_into, self._record_every = record, record_every
        self.graphed_step = self._make_graphed_step() if recorded else None

    @property
    def aligner(self) -> Aligner:
        """The aligner of the model as it is trained."""
        if self._aligner is None:
            assert self.model is not None
            self._aligner = Aligner(self.model, **self._aligner_options)
        return self._aligner

    def _model_name(self) -> str:
        base: Any = self.model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base  # peft's wrapper
        return type(base).__name__

    def _check_options(self) -> None:
        args = self.args
        if args.n_gpu > 1:
            raise ValueError(
                f"args: this process would divide batches over {args.n_gpu} GPUs (DataParallel); "
                "start one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one."
            )
        kind = str(self.accelerator.distributed_type.value)
        check_backend(kind, "args", is_fsdp2=has_fsdp2(self.accelerator))
        config = getattr(self.accelerator, "parallelism_config", None)
        for name in ("tp", "cp", "sp"):
            if getattr(config, f"{name}_enabled", False):
                raise ValueError(
                    f"args: {name}_size divides every row among processes, so that none has the "
                    "loss of a row; leave it out."
                )
        if "lomo" in str(args.optim).lower():
            raise ValueError(
                "optim: LOMO takes its steps in the Trainer's own backward pass, which is "
                "replaced; choose another optimizer."
            )
        lineage = type(self).__mro__
        for parent in lineage[lineage.index(AlignedMixin) + 1 : lineage.index(Trainer)]:
            if "training_step" in vars(parent) and parent.__name__ not in _WRAP_TRAINING_STEP:
                raise ValueError(
                    f"{parent.__name__}.training_step: would be left out, as this trainer replaces "
                    "it; use a trainer that overrides compute_loss alone."
                )
        if self.model_init is not None:
            raise ValueError("model_init: the aligner belongs to one model; give model instead.")
        if self._sampling is not None and self._task_key is not None:
            raise ValueError("sampling: mixes tasks within batches; leave it out with task_key.")

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        if self._task_column not in self._signature_columns:
            self._signature_columns.append(self._task_column)

    def get_train_dataloader(self) -> Any:
        """The Trainer's own, with the rows of a task together in every batch."""
        if self._task_key is not None:
            return super().get_train_dataloader()
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
            loader = super().get_train_dataloader()
            return loader if self._sampling is None else self._mix(loader, self._sampling)
        finally:  # in evaluation, rows stay in their order
            self.data_collator = given

    def _mix(self, loader: Any, sampling: Mapping[str, Any]) -> Any:
        """The same loader with batches of mixed tasks."""
        args, dataset = self.args, self.train_dataset
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "sampling: needs a train_dataset whose rows have numbers; mix a stream where it is "
                "made, as with datasets.interleave_datasets."
            )
        batches_per_step = args.gradient_accumulation_steps * args.world_size
        size = self._train_batch_size
        tasks = _column(dataset, self._task_column, self.aligner.tasks)
        per_pass = -(-len(tasks) // size)
        num = args.max_steps * batches_per_step
        num = num if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_pass)
        sampler = TaskBatchSampler(
            tasks,
            size,
            **{
                "num_rows": num * size,
                "batches_per_step": batches_per_step,
                "seed": args.data_seed if args.data_seed is not None else args.seed,
                **sampling,
            },
        )
        if self.is_world_process_zero():
            print(f"What training will see:\n{sampler.table(num)}", flush=True)
        options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        return self.accelerator.prepare(
            DataLoader(loader.dataset, batch_sampler=sampler, **options)
        )

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        """Make the aligner once FSDP2 has divided the model, and before it is gathered.

        A record begins here, or goes on after a checkpoint.
        """
        prepared = super()._prepare_for_training(*args, **options)
        self._by_task, self._steps_summed = None, 0
        check_processes(self.aligner, self.args.world_size, "aligner_options")
        if self._record_into is not None:
            self._record = RunRecord(
                self._record_into,
                self.aligner,
                every=self._record_every,
                is_first=self.is_world_process_zero(),
            )
        return prepared

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, and write what is left of the record."""
        try:
            return super().train(*args, **options)
        finally:
            if self._record is not None:
                self._record.flush()

    def _run_epoch(self, *args: Any, **options: Any) -> Any:
        """Let the sampler know which pass begins; what is put around it may not tell it."""
        named = inspect.signature(super()._run_epoch).bind(*args, **options).arguments
        sampler = sampler_of(named["train_dataloader"])
        if sampler is not None:
            sampler.set_epoch(named["epoch"])
        return super()._run_epoch(*args, **options)

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
        if self._task_key is not None and self._task_key not in inputs:
            raise ValueError(
                f"task_key: a batch has no entry {self._task_key!r}, only {', '.join(inputs)}. "
                "sentence-transformers names the data set if every one has a loss of its own: "
                "loss={name: loss for name in train_dataset}."
            )
        tasks = inputs.pop(TASKS_OF_ROWS) if self._task_key is None else inputs[self._task_key]
        inputs = self._prepare_inputs(inputs)
        with getattr(self, "maybe_activation_offload_context", nullcontext()):  # TRL's
            if self.graphed_step is None:
                backward = self._backward(model, inputs, tasks, num_items_in_batch)
            else:
                backward = self.graphed_step(self._on_device(inputs, tasks, num_items_in_batch))
        if backward.by_task is not None:
            before = 0.0 if self._by_task is None else self._by_task
            self._by_task = backward.by_task + before
        if backward.alignment is not None:
            self.alignment = backward.alignment
            self._steps_summed += 1
            if self._record is not None:
                self._record(self.state.global_step + 1, backward.alignment)
        return backward.loss

    def _backward(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        tasks: Sequence[str] | Tensor,
        num_items: Tensor | int | None,
    ) -> Backward:
        is_taken_apart = self._has_own_loss()
        loss: Any
        with self.compute_loss_context_manager():
            if self._task_key is not None:
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
                losses, counts = loss.reshape(1), loss.new_ones(1)
                tasks = [str(tasks)]
            elif is_taken_apart:
                parts, tasks = self._take_apart(model, inputs, tasks, num_items)
                loss, losses = parts.loss, parts.rows()
                counts = torch.ones_like(losses)
            else:
                losses, counts = self._losses(model, inputs, num_items)
                loss = losses.sum()
        is_of_step = self.model_accepts_loss_kwargs and num_items is not None
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)  # what a user said, since 5.22
        if is_scaled is None:
            is_scaled = is_of_step or self.compute_loss_func is not None
        scale = 1.0 if is_scaled else 1.0 / self.current_gradient_accumulation_steps
        is_own = is_taken_apart or self._task_key is not None  # and knows of all processes
        if is_of_step and self.args.average_tokens_across_devices and not is_own:
            scale *= self.aligner.num_processes  # labels of all, and a mean
        losses = losses * scale
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
        if alignment is not None and scaler is not None:
            alignment = unscaled(alignment, scaler.scale(losses.new_ones(())))
        by_task = self._sum_by_task(losses.detach(), counts, tasks)
        return Backward(loss.detach() * scale, alignment, by_task)

    def _sum_by_task(self, losses: Tensor, counts: Tensor, tasks: Any) -> Tensor:
        index = index_on(positions(tasks, self.aligner.tasks, "train_dataset"), losses.device)
        rows = torch.stack([losses.double(), counts.to(losses.device).double()])
        return rows.new_zeros(2, len(self.aligner.tasks)).index_add(1, index, rows)

    def _has_own_loss(self) -> bool:
        """Whether the trainer computes a loss from the model's outputs in its own way."""
        is_overridden = type(self).compute_loss is not Trainer.compute_loss
        return self._row_losses is None and (is_overridden or self.compute_loss_func is not None)

    def _take_apart(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        tasks: Sequence[str] | Tensor,
        num_items: Tensor | int | None,
    ) -> tuple[LossParts, Tensor]:
        """The trainer's own loss by the rows of the model's outputs, and their tasks."""
        outputs: list[Any] = []
        with own_hooks():
            hook = model.register_forward_hook(lambda *given: outputs.append(given[2]))
        try:
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        finally:
            hook.remove()
        num_copies = 2 if any(c.__name__ == "DPOTrainer" for c in type(self).__mro__) else 1
        parts = LossParts.find(loss, outputs, num_copies * len(tasks))
        of_rows = positions(tasks, self.aligner.tasks, "train_dataset").repeat(num_copies)
        if self._separated < _SEPARATED and len(of_rows.unique()) > 1:
            parts.check_separate(of_rows)
            if isinstance(self.aligner.rule, GradNorm | MGDA) and not parts.is_sum:
                raise ValueError(
                    f"rule: {type(self.aligner.rule).__name__} looks at the tasks' losses, and "
                    f"those of {type(self).__name__} are not known: its loss is no sum over rows "
                    "of the model's outputs; choose another rule, or give row_losses."
                )
            self._separated += 1
        return parts, of_rows

    def _make_graphed_step(self) -> GraphedStep[Backward]:
        args = self.args
        missing = {
            "a GPU": args.device.type == "cuda",
            "one process": args.world_size == 1,
            "bf16=True": args.bf16,
            "gradient_accumulation_steps=1": args.gradient_accumulation_steps == 1,
            "the model's own loss or row_losses": not self._has_own_loss(),
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
    ) -> tuple[Tensor, Tensor]:
        """Losses of rows that add up to the Trainer's loss, and how much each counts."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"train_dataset: its batches have no labels (but {', '.join(inputs)}); give them, "
                "or let a subclass of your trainer compute the loss from these: AlignedMixin "
                "before it, and a compute_loss that returns model(**inputs).loss."
            )
        if self._row_losses is not None:
            losses = self._row_losses(model(**inputs), labels, num_items)
            return losses, torch.ones_like(losses)
        smoothing = self.args.label_smoothing_factor
        normaliser, twice = self._normaliser, None if num_items is None else 2 * num_items
        compares = not smoothing and normaliser.compares_next(self.args.device)
        if not compares:
            outputs = model(**_without_labels(self.accelerator.unwrap_model(model), inputs))
        elif self.model_accepts_loss_kwargs and twice is not None:
            outputs = model(**inputs, **{_NUM_ITEMS: twice})
        else:
            outputs = model(**inputs)
        logits = tensor_of(outputs, "logits")
        sums, counts = sum_by_row(logits, labels, shifted=self._is_causal, smoothing=smoothing)
        if smoothing:
            knows_items = _NUM_ITEMS in inspect.signature(LabelSmoother.__call__).parameters
            divisor = num_items if knows_items and num_items is not None else counts.sum()
            return sums / torch.as_tensor(divisor, device=sums.device).to(sums.dtype), counts
        if compares:
            loss = tensor_of(outputs, "loss")
            check_logits(loss, logits)
            if not normaliser.is_known:
                normaliser.learn(sums, counts, twice, loss)
        return sums / normaliser.divisor(counts, num_items).to(sums.dtype), counts

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        """Evaluate without the tasks of rows, which the model does not know."""
        rest = {key: value for key, value in inputs.items() if key != TASKS_OF_ROWS}
        return super().prediction_step(model, rest, *args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log the losses of tasks and what the last step did, beside the loss."""
        if "loss" in logs and self.alignment is not None:
            steps, self._steps_summed = self._steps_summed, 0
            by_task = self._read_losses(steps)
            values = log_values(self.alignment)
            logs |= by_task
            logs |= {k: v for k, v in values.items() if not k.startswith("gradvac/loss/")}
            if self._record is not None:
                entry = {"loss": logs["loss"], **by_task}
                entry |= {k.removeprefix("gradvac/"): v for k, v in values.items() if k in logs}
                self._record.log(
                    self.state.global_step, {f"train/{name}": v for name, v in entry.items()}
                )
        super().log(logs, *args, **options)

    def _read_losses(self, num_steps: int) -> dict[str, float]:
        """The mean loss of every task since the last entry, on the scale of the Trainer's loss.

        Tasks whose losses are not known (see the class) are left out.
        """
        if self._by_task is None:
            return {}
        total: Any = self.accelerator.reduce(self._by_task, "sum")
        self._by_task = None
        losses, counts = total.tolist()
        every = sum(counts)
        scale = every / max(1, num_steps) / self.args.world_size
        means = {
            f"loss/{task}": loss * scale / count
            for task, loss, count in zip(self.aligner.tasks, losses, counts, strict=True)
            if count
        }
        return {name: value for name, value in means.items() if not math.isnan(value)}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._record is not None:
            self._record.flush()
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


class MeasureConflicts(TrainerCallback):
    """For a plain Trainer: which tasks conflict, measured now and then; training stays as it is.

        trainer = Trainer(..., callbacks=[MeasureConflicts("out", {"de": [...], "fr": [...]})])
        trainer.train()            # then: gradvac report out

    Every `every` steps the gradients of given batches are compared, without dropout, and what was
    found is added to `similarity.npz` in the folder. It costs two passes over all batches.

    Args:
        folder: For `gradvac report`.
        batches: Task -> two or more batches as the model takes them, labels included; the model
            gives their mean loss. Batches with the same content in all tasks (such as translations)
            compare tasks rather than their data.
        every: Optimizer steps between measurements.
        granularity: Which parameters share a component.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        batches: Mapping[str, Sequence[Mapping[str, Any]]],
        *,
        every: int = 100,
        granularity: Any = "all_layer",
    ) -> None:
        self._path, self._batches, self._every = RunFiles(Path(folder)), batches, every
        self._granularity = granularity
        self._found: list[Sequence[Similarities]] = []

    def on_train_begin(self, *given: Any, **_: Any) -> None:
        """Go on with what an earlier part of this training measured."""
        state, self._found = given[1], []
        if state.global_step and self._path.similarity.is_file():
            self._found = [load_similarities(self._path.similarity)[0]]

    def on_step_end(self, *given: Any, **named: Any) -> None:
        """Measure, if it is due."""
        state, model = given[1], named["model"]
        if state.global_step % self._every or not state.is_world_process_zero:
            return
        if is_sharded(model):
            raise ValueError(
                "MeasureConflicts: needs the whole model in one process, but FSDP divides it; use "
                "AlignedTrainer with rule=Sum() and record, which trains as the plain Trainer does."
            )
        was_training = model.training
        model.eval()
        try:
            batches = {
                task: [partial(_sum_of_losses, model, batch) for batch in own]
                for task, own in self._batches.items()
            }
            measured = measure(model, batches, self._granularity, step=state.global_step)
        finally:
            model.train(was_training)
        self._found.append(measured.parts)
        self._path.path.mkdir(parents=True, exist_ok=True)
        joined = [concatenate(parts) for parts in zip(*self._found, strict=True)]
        save_similarities(self._path.similarity, joined, "by MeasureConflicts, without dropout")


def _sum_of_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss of a batch, as a sum over its labels."""
    device = next(model.parameters()).device
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    labels = inputs["labels"]
    count = (labels != _IGNORED).sum() if not labels.is_floating_point() else labels.numel()
    return tensor_of(model(**inputs), "loss") * count


def _column(dataset: Any, column: str, tasks: Sequence[str]) -> list[str]:
    """The task of every row, by name."""
    try:
        given = list(dataset[column])  # of datasets; it reads no other column
    except (TypeError, KeyError, IndexError, ValueError):
        given = [dataset[number][column] for number in range(len(dataset))]
    return [one if isinstance(one, str) else tasks[int(one)] for one in given]


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


def sum_by_row(
    logits: Tensor, labels: Tensor, *, shifted: bool, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses of rows, and how many labels they are sums over.

    Args:
        logits: `[B, S, V]` with labels `[B, S]`; or `[B, V]` with labels `[B]`, which are numbers
            of classes, or values for V = 1.
        labels: -100 is ignored.
        shifted: Whether token s is predicted from those before it (causal language models).
        smoothing: Share of every label that is spread over all classes.

    Returns:
        `[B]` and `[B]`.

    Raises:
        ValueError: The shapes are none of these.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    cross_entropy = partial(
        F.cross_entropy, ignore_index=_IGNORED, reduction="none", label_smoothing=smoothing
    )
    is_sequence = logits.dim() == 3 and logits.shape[:2] == labels.shape
    if is_sequence and not labels.is_floating_point():
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = cross_entropy(logits.transpose(1, 2), labels)
        return losses.sum(1), (labels != _IGNORED).sum(1)
    if logits.dim() == 2 and logits.shape[:1] == labels.shape:
        ones = torch.ones(len(labels), dtype=torch.int64, device=labels.device)
        if labels.is_floating_point() and logits.shape[1] == 1:
            return (logits[:, 0] - labels.to(logits.dtype)).square(), ones
        if not labels.is_floating_point() and logits.shape[1] > 1:
            losses = cross_entropy(logits, labels)
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
        is_known: Whether it has been learned.
    """

    def __init__(self) -> None:
        self.is_known = self._by_items = False
        self._num_batches = 0

    def compares_next(self, device: torch.device) -> bool:
        """Whether the next batch needs the model's own loss: now and then it is looked at again."""
        self._num_batches += 1
        return not self.is_known or (is_due(self._num_batches) and not is_captured(device))

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
        means = [total / max(1, divisor) for divisor in divisors]
        gaps = [abs(mean - value) for mean in means]
        is_half = loss.dtype in (torch.float16, torch.bfloat16)
        if min(gaps) > (1e-2 if is_half else 1e-4) * max(abs(value), 1e-6):
            raise ValueError(
                f"row_losses: the model's loss is {value:.6g}, but its rows give "
                f"{means[gaps.index(min(gaps))]:.6g}; it computes another loss than cross-entropy "
                "or squared error, or adds a term. Give row_losses, one loss per row."
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


class AlignedTrainer(AlignedMixin, Trainer):
    __doc__ = AlignedMixin.__doc__


class AlignedSeq2SeqTrainer(AlignedMixin, Seq2SeqTrainer):
    __doc__ = AlignedMixin.__doc__


__all__ = [
    "TASKS_OF_ROWS",
    "AlignedMixin",
    "AlignedSeq2SeqTrainer",
    "AlignedTrainer",
    "MeasureConflicts",
    "TaskCollator",
]

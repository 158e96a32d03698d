"""The translation recipe: what the training loop, and the registry, need to know."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from gradvac.analysis import Similarities
from gradvac.lab.recipes.common.similarity import MeasuredSet, measure_run
from gradvac.lab.recipes.nmt.batches import Batch
from gradvac.lab.recipes.nmt.model import Size, Transformer
from gradvac.lab.recipes.nmt.preparation import (
    VOCABULARY,
    PreparedCorpus,
    aligned_lines,
    open_corpus,
    prepare_corpus,
)
from gradvac.lab.recipes.nmt.score import score_lines, score_translation
from gradvac.lab.recipes.nmt.settings import DEV, TRAIN, ModelConfig, NmtConfig
from gradvac.lab.recipes.nmt.stream import Numbers, Stream, TaskData, gather_batch
from gradvac.lab.recipes.nmt.translator import Translator
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary
from gradvac.lab.recipes.registry import Recipe
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import (
    FULL_BATCH,
    BatchSlice,
    Display,
    Prefetch,
    Result,
    StepLosses,
    checkpoint,
    join,
    seed_everything,
    train,
)
from gradvac.lab.training.config import load as load_config
from gradvac.lab.training.stream import has_static_shape, is_on_gpu
from gradvac.sampling import TaskEpochs
from gradvac.tasks import parse
from gradvac.utils.hints import log_to

_MOST_EPOCHS = 100


class TranslationWorkload:
    """Many directions of translation, one model."""

    def __init__(self, config: NmtConfig, prepared: PreparedCorpus) -> None:
        self.config, self.prepared = config, prepared
        self.tasks = config.data.all_tasks()
        self.model: Transformer = config.model.build(len(prepared.vocabulary))
        self._parent = start_from(config.model, self.model, prepared.vocabulary)
        self._sizes = {task: prepared.train_size(task) for task in self.tasks}
        levels = config.data.resource_levels
        self.resource_levels = {task: levels.of(size) for task, size in self._sizes.items()}
        self._dev = [TaskData.open(prepared, DEV, task) for task in self.tasks]

    def _is_packed(self) -> bool:
        config = self.config
        if config.batch.packed != "auto":
            return config.batch.packed
        if config.batch.fixed is True:
            return True
        return is_on_gpu(config.train) and config.train.precision == "bf16"

    def batches(self, batch_slice: BatchSlice = FULL_BATCH) -> Prefetch[Batch]:
        """The training data, from their beginning; the next batches are prefetched."""
        pin = Batch.pin if is_on_gpu(self.config.train) else None
        return Prefetch(self._stream(batch_slice), prepare=pin)

    def _stream(self, batch_slice: BatchSlice = FULL_BATCH) -> Stream:
        config, is_packed = self.config, self._is_packed()
        is_static = has_static_shape(
            config.batch.fixed, config.train, batch_slice, is_possible=is_packed
        )
        return Stream(
            [TaskData.open(self.prepared, TRAIN, task) for task in self.tasks],
            config.sampling,
            config.batch,
            packed=is_packed,
            longest=config.data.max_tokens + 2 if is_static else None,
            accumulation=config.optimizer.accumulation,
            num_steps=config.train.max_steps,
            seed=config.train.seed,
            batch_slice=batch_slice,
        )

    def losses(self, batch: Batch) -> StepLosses:
        """The loss of every sentence pair, summed over its tokens."""
        device = next(self.model.parameters()).device
        batch = batch.to(device)
        return StepLosses(self.model(batch), batch.tasks, tokens=batch.tokens_by_sentence())

    def validate(self) -> Mapping[str, float]:
        """The loss per token of every task without smoothing, their mean, and BLEU."""
        scores = {f"dev/loss/{data.name}": self._dev_loss(data) for data in self._dev}
        scores["dev/loss"] = float(np.mean(list(scores.values())))
        if self.config.validation.bleu_sentences:
            translator = self._translator()
            bleu = {f"dev/bleu/{task}": self._dev_bleu(task, translator) for task in self.tasks}
            scores |= bleu | {"dev/bleu": float(np.mean(list(bleu.values())))}
        return scores

    def _dev_loss(self, data: TaskData) -> float:
        device = next(self.model.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        num_tokens = 0
        for numbers in self._dev_batches(data):
            batch = gather_batch([data], [numbers], packed=self._is_packed()).to(device)
            total += self.model(batch).double().sum()
            num_tokens += batch.num_tokens
        return float(total) / num_tokens

    def _dev_batches(self, data: TaskData) -> list[Numbers]:
        numbers = np.arange(min(len(data), self.config.validation.sentences))
        lengths = data.lengths(numbers).max(0)
        numbers = numbers[np.argsort(-lengths, kind="stable")]
        batches = []
        while len(numbers):
            longest = int(data.lengths(numbers[:1]).max())
            size = max(1, self.config.batch.tokens // longest)
            batches.append(numbers[:size])
            numbers = numbers[size:]
        return batches

    def _translator(self) -> Translator:
        """Greedy search with the current weights."""
        return Translator(
            self.model,
            self.prepared.vocabulary,
            self.config.decoding.model_copy(update={"beams": 1}),
            targets=[parse(task).target for task in self.tasks],
            max_tokens=self.config.data.max_tokens,
            precision=self.config.train.precision,
        )

    def _dev_bleu(self, task: str, translator: Translator) -> float:
        target, most = parse(task).target, self.config.validation.bleu_sentences
        sources, references = self.prepared.task_text(DEV, task)
        lines = translator.translate(sources[:most], target)
        return score_lines(lines, references[:most], target).bleu

    def data_signature(self) -> str:
        """A hash of the prepared data, the tasks, and the weights to start from."""
        parent = f"|{self._parent}" if self._parent else ""
        return f"{self.prepared.signature}|{' '.join(self.tasks)}{parent}"

    def epochs(self) -> list[TaskEpochs]:
        """How often training will see the data of every task."""
        config = self.config
        return config.sampling.effective_epochs(
            self._sizes,
            num_steps=config.train.max_steps,
            rows_per_step=self._stream().rows_per_batch * config.optimizer.accumulation,
        )

    def epochs_table(self, epochs: Sequence[TaskEpochs]) -> Table:
        """The epochs as a table."""
        shown = Table(title="What training will see", title_justify="left")
        for column in ("task", "level"):
            shown.add_column(column)
        for column in ("sentence pairs", "share of batches", "pairs seen", "epochs"):
            shown.add_column(column, justify="right")
        for row in epochs:
            level = self.resource_levels[row.task]
            seen, passes = f"{row.num_drawn:,.0f}", f"{row.epochs:.1f}"
            shown.add_row(row.task, level, f"{row.size:,}", f"{row.probability:.1%}", seen, passes)
        return shown


def train_translation(
    config: NmtConfig, run: str | Path, *, display: Display | None = None
) -> Result:
    """Prepare the data if need be, and train into a run folder, or continue the run there.

    Args:
        config: The run's settings.
        run: The run folder; it gets a copy of the vocabulary.
        display: Where progress and messages go.
    """
    with join(config.train.device) as job:
        display = job.display(display)
        if Path(run).resolve() == config.data.prepared.resolve():
            raise ValueError(f"run: {run} is data.prepared; choose another folder for the run.")
        if Path(run).is_file():
            raise ValueError(f"run: {run} is a file; choose the name of a folder for the run.")
        job.together(lambda: check_parent(config.model))
        with log_to(display.show_message):
            prepared = job.first_then_others(lambda: open_corpus(config.data))
        seed_everything(config.train.seed)
        workload = TranslationWorkload(config, prepared)
        epochs = workload.epochs()
        display.console.print(workload.epochs_table(epochs))
        for warning in warn_of_schedule(config, epochs):
            display.show_message(warning)
        vocabulary = {RunFolder(Path(run)).vocabulary.name: prepared.path(VOCABULARY).read_bytes()}
        return train(workload, config, run, display=display, files=vocabulary)


# -- before training: weights of another run to start from, warnings of the schedule -------------


def check_parent(settings: ModelConfig) -> None:
    """Check, before anything is prepared, the run to start from: its sizes and its weights.

    Raises:
        ValueError: There is no such run, its model has another size, or the weights are missing.
    """
    if settings.init is None:
        return
    folder = RunFolder(settings.init)
    if not folder.config.is_file():
        raise ValueError(f"model.init: {settings.init} is no run folder: it has no config.toml.")
    theirs = load_config(NmtConfig, folder.config).model
    for name in (*Size._fields, "norm_first"):
        wanted, found = (
            getattr(model if name == "norm_first" else model.dimensions(), name)
            for model in (settings, theirs)
        )
        if wanted != found:
            raise ValueError(
                f"model.init: {settings.init} has model.{name} = {found}, but this run {wanted}; "
                "take over its [model] settings."
            )
    checkpoint.resolve_weights(settings.init, settings.init_weights)


def start_from(settings: ModelConfig, model: Transformer, vocabulary: Vocabulary) -> str:
    """Give a model the weights of the run that `model.init` names; empty without one.

    Pieces that the other run does not have keep the embedding they were drawn with.

    Returns:
        A hash of those weights: what a run starts from is part of its data.

    Raises:
        ValueError: The other run has another vocabulary.
    """
    if settings.init is None:
        return ""
    folder = RunFolder(settings.init)
    pieces = Vocabulary.load(folder.vocabulary).pieces()
    if vocabulary.pieces()[: len(pieces)] != pieces:
        raise ValueError(
            f"model.init: {settings.init} has other pieces than the prepared data; leave "
            "data.vocabulary.model unset, and choose another folder for data.prepared."
        )
    weights = dict(checkpoint.weights(settings.init, settings.init_weights))
    drawn = model.state_dict()
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    # Only the embedding can have more rows: new pieces follow the others.
    model.load_state_dict(
        {name: torch.cat([weights[name], new[len(weights[name]) :]]) for name, new in drawn.items()}
    )
    return digest.hexdigest()


def warn_of_schedule(settings: NmtConfig, epochs: Sequence[TaskEpochs]) -> Iterator[str]:
    """What a schedule cannot do, with the settings that decide it, to log before training."""
    steps, warmup = settings.train.max_steps, settings.optimizer.warmup_steps
    if warmup >= steps:
        yield (
            f"warning: optimizer.warmup_steps = {warmup:,} is not less than train.max_steps = "
            f"{steps:,}: the learning rate never reaches optimizer.lr, and little is learned."
        )
    for what, rows in (
        ("never sees all of", [row for row in epochs if row.epochs < 1]),
        (f"sees more than {_MOST_EPOCHS} times", [r for r in epochs if r.epochs > _MOST_EPOCHS]),
    ):
        if rows:
            shown = ", ".join(f"{row.task} ({_shown(row.epochs)} epochs)" for row in rows[:4])
            more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
            yield (
                f"note: training {what} {shown}{more}; it depends on train.max_steps, batch.tokens "
                "and sampling.temperature."
            )


def _shown(epochs: float) -> str:
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"


# -- gradient similarity ---------------------------------------------------------------------------


def measure_translation(run: str | Path, **options: Any) -> tuple[Similarities, ...]:
    """Measure the similarity of all tasks; `measure_run` lists the options."""
    options.setdefault("granularities", ("all_layer", "enc_dec", "whole_model"))
    return measure_run(run, NmtConfig, _open_set, **options)


def _open_set(settings: NmtConfig, run: Path, split: str, num_lines: int | None) -> MeasuredSet:
    tasks = settings.data.all_tasks()
    prepared = PreparedCorpus.require(settings.data, run)
    prepared.check_vocabulary_of(run)
    lines = aligned_lines(prepared, split, tasks, num_lines)
    data = [TaskData.open(prepared, split, task) for task in tasks]
    rows = [lines[task] for task in tasks]

    def losses(model: nn.Module, chosen: Sequence[Numbers]) -> tuple[Tensor, Any]:
        batch = gather_batch(data, chosen)
        return model(batch.to(next(model.parameters()).device)), batch.tasks

    lengths = [of_task.lengths(numbers) for of_task, numbers in zip(data, rows, strict=True)]
    return MeasuredSet(
        tasks,
        settings.model.build(len(prepared.vocabulary)),
        rows,
        losses,
        prepared.signature,
        np.max(lengths, axis=(0, 1)),
        lambda longest: settings.batch.tokens // longest,
    )


TRANSLATION = Recipe(
    "nmt",
    NmtConfig,
    prepare=lambda config: prepare_corpus(config.data),
    train=train_translation,
    score=score_translation,
    measure=measure_translation,
)

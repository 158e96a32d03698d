"""The tagging recipe: what the one training loop needs to know about tagging."""

# B rows, S sub-words, L labels

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from gradvac.analysis import Similarities
from gradvac.lab.recipes.common.similarity import MeasuredSet, Numbers, measure_run
from gradvac.lab.recipes.registry import Recipe
from gradvac.lab.recipes.tagging.encoder import NO_LABEL, load_model, load_tokenizer
from gradvac.lab.recipes.tagging.metrics import score_tags
from gradvac.lab.recipes.tagging.preparation import (
    PreparedSentences,
    open_sentences,
    prepare_sentences,
)
from gradvac.lab.recipes.tagging.score import score_tagging
from gradvac.lab.recipes.tagging.settings import DEV, TRAIN, TaggingConfig
from gradvac.lab.recipes.tagging.tagger import (
    ENCODER,
    TagBatch,
    load_run_model,
    load_run_tokenizer,
    logits_of,
    make_tag_batch,
    pad_token,
    predict_windows,
)
from gradvac.lab.training import (
    FULL_BATCH,
    BatchSlice,
    Display,
    Prefetch,
    Result,
    RowStream,
    StepLosses,
    join,
    seed_everything,
    train,
)
from gradvac.lab.training.stream import has_static_shape, is_on_gpu
from gradvac.utils.hints import log_to

_FEWEST_WINDOWS = 10  # of a language, to compare gradients


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every row, summed over its words: logits `[B, S, L]` and labels -> `[B]`."""
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=NO_LABEL, reduction="none"
    )
    return losses.sum(1)


class TaggingWorkload:
    """Many languages, one tagger."""

    def __init__(self, config: TaggingConfig, prepared: PreparedSentences) -> None:
        self.config, self.prepared = config, prepared
        self.tasks = config.data.languages
        self.labels = config.data.all_labels()
        self.tokenizer = load_tokenizer(config.model.encoder)
        self.model = load_model(config.model.encoder, self.labels, dropout=config.model.dropout)
        self.resource_levels = config.data.resource_levels
        self._dev = {task: prepared.windows(DEV, task) for task in self.tasks}
        self._gold = {
            task: [one.tags for one in prepared.sentences(DEV, task)] for task in self.tasks
        }
        self._pad = pad_token(self.tokenizer)

    def batches(self, batch_slice: BatchSlice = FULL_BATCH) -> Prefetch[TagBatch]:
        """The training data, from their beginning."""
        windows = [self.prepared.windows(TRAIN, task) for task in self.tasks]
        longest = max(int(of_task.lengths.max()) for of_task in windows)
        train, fixed = self.config.train, self.config.batch.fixed
        is_possible = train.precision == "bf16" and batch_slice.of == 1
        is_static = has_static_shape(fixed, train, batch_slice, is_possible=is_possible)
        width = longest if is_static else None
        stream = RowStream(
            self.config,
            {task: len(of_task) for task, of_task in zip(self.tasks, windows, strict=True)},
            lambda chosen: make_tag_batch(windows, chosen, pad=self._pad, width=width),
            rows=self.config.batch.rows,
            batch_slice=batch_slice,
        )
        return Prefetch(stream, prepare=TagBatch.pin if is_on_gpu(train) else None)

    def losses(self, batch: TagBatch) -> StepLosses:
        """The loss of every row, summed over its words."""
        batch = batch.to(next(self.model.parameters()).device)
        losses = row_losses(logits_of(self.model, batch), batch.labels)
        return StepLosses(losses, batch.tasks, tokens=(batch.labels != NO_LABEL).sum(1))

    def validate(self) -> Mapping[str, float]:
        """Loss per word, F1 and accuracy of every language's dev set, and their means."""
        scores: dict[str, float] = {}
        for task, windows in self._dev.items():
            losses: list[Tensor] = []

            def add(batch: TagBatch, logits: Tensor, to: list[Tensor] = losses) -> None:
                to.append(row_losses(logits, batch.labels))

            predicted = predict_windows(
                self.model,
                windows,
                len(self._gold[task]),
                labels=self.labels,
                pad=self._pad,
                rows=self.config.batch.score_rows,
                see=add,
            )
            num_words = max(1, int((windows.labels != NO_LABEL).sum()))
            score = score_tags(self._gold[task], predicted, self.config.data.kind)
            scores[f"dev/loss/{task}"] = float(torch.cat(losses).double().sum()) / num_words
            scores[f"dev/f1/{task}"] = score.f1
            scores[f"dev/accuracy/{task}"] = score.accuracy
        for name in ("loss", "f1", "accuracy"):
            values = [scores[f"dev/{name}/{task}"] for task in self.tasks]
            scores[f"dev/{name}"] = float(np.mean(values))
        return scores

    def data_signature(self) -> str:
        """A hash of the prepared data."""
        return self.prepared.signature

    def epochs(self) -> Table:
        """How often training will see the data of every language, as a table."""
        config = self.config
        sizes = self.prepared.sizes[TRAIN]
        report = self.prepared.read_report()
        rows = config.sampling.effective_epochs(
            sizes,
            num_steps=config.train.max_steps,
            rows_per_step=config.batch.rows * config.optimizer.accumulation,
        )
        title = f"What training will see in {config.train.max_steps:,} steps"
        shown = Table(title=title, title_justify="left")
        shown.add_column("language")
        for column in ("sentences", "words", "windows", "share", "windows seen", "epochs"):
            shown.add_column(column, justify="right")
        for row in rows:
            counted = report[f"{TRAIN} {row.task}"]
            counts = (f"{counted['sentences']:,}", f"{counted['words']:,}", f"{row.size:,}")
            rest = (f"{row.probability:.1%}", f"{row.num_drawn:,.0f}", f"{row.epochs:.1f}")
            shown.add_row(row.task, *counts, *rest)
        return shown


def train_tagging(
    config: TaggingConfig, run: str | Path, *, display: Display | None = None
) -> Result:
    """Prepare the data if need be, and train into a run folder, or continue the run there.

    Args:
        config: The run's settings; `batch.epochs` sets the number of steps.
        run: The run folder; it gets the encoder's config and tokenizer.
        display: Where progress and messages go.
    """
    with join(config.train.device) as job:
        display = job.display(display)
        with log_to(display.show_message):
            prepared = job.first_then_others(lambda: open_sentences(config))
            settings = config.with_steps(
                sum(config.sampling.thinned(prepared.sizes[TRAIN]).values())
            )
        seed_everything(settings.train.seed)
        workload = TaggingWorkload(settings, prepared)
        display.console.print(workload.epochs())
        return train(workload, settings, run, display=display, files=_encoder_files(workload))


def _encoder_files(workload: TaggingWorkload) -> dict[str, bytes]:
    """What a run keeps so that it can tag wherever its folder is moved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.tokenizer.save_pretrained(folder)
        contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    settings = workload.model.config.to_dict()  # type: ignore[union-attr, operator]
    settings.pop("transformers_version", None)  # a newer one makes it no other model
    contents["config.json"] = json.dumps(settings, indent=1, sort_keys=True, default=str).encode()
    return {f"{ENCODER}/{name}": content for name, content in contents.items()}


def measure_tagging(run: str | Path, **options: Any) -> tuple[Similarities, ...]:
    """Measure the similarity of all languages; `measure_run` lists the options.

    The sentences differ between languages, unless the set is aligned, as it is for the constructed
    languages: then the n-th sentences correspond.
    """
    return measure_run(run, TaggingConfig, _open_set, **options)


def _open_set(settings: TaggingConfig, run: Path, split: str, num_lines: int | None) -> MeasuredSet:
    tasks = settings.data.languages
    prepared = PreparedSentences.require(settings, run)
    windows = [prepared.windows(split, task) for task in tasks]
    smallest, name = min((len(one), task) for one, task in zip(windows, tasks, strict=True))
    most = smallest if num_lines is None else num_lines
    num = min(most, smallest) // 2 * 2
    if num < min(_FEWEST_WINDOWS, max(2, most)):
        raise ValueError(
            f"set: {name} has {smallest} windows in {split}, too few to compare gradients; choose "
            "another set with --set."
        )
    pad = pad_token(load_run_tokenizer(run))

    def losses(model: nn.Module, chosen: Sequence[Numbers]) -> tuple[Tensor, Any]:
        batch = make_tag_batch(windows, chosen, pad=pad).to(next(model.parameters()).device)
        return row_losses(logits_of(model, batch), batch.labels), batch.tasks

    return MeasuredSet(
        tasks,
        load_run_model(run),
        [np.arange(num)] * len(tasks),
        losses,
        prepared.signature,
        np.max([one.lengths[:num] for one in windows], axis=0),
    )


TAGGING = Recipe(
    "tagging",
    TaggingConfig,
    prepare=prepare_sentences,
    train=train_tagging,
    score=score_tagging,
    measure=measure_tagging,
)

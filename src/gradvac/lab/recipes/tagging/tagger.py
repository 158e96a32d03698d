"""The tagger: windows of several languages in a batch, labels out; sentences in, tags out."""

# T tasks, B rows, S sub-words, L labels

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvac.lab.recipes.tagging.encoder import (
    NO_LABEL,
    Numbers,
    Windows,
    WordEncoder,
    build_model,
    load_tokenizer,
)
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import BatchSlice, FromRun, TensorBatch, checkpoint
from gradvac.lab.training.environment import around_forward

ENCODER = "encoder"  # folder of a run: the encoder's config and tokenizer, without weights


@dataclass(frozen=True, eq=False)
class TagBatch(TensorBatch):
    """Rows of several languages.

    Attributes:
        tokens: `[B, S]`, padded.
        mask: True where there is a sub-word, `[B, S]`.
        labels: The label of a word on its first sub-word, `NO_LABEL` elsewhere, `[B, S]`.
        tasks: The task of every row; rows of a task are together. On the host, where an aligner
            can read them without waiting, unless the batch has a static shape.
        num_tokens: Words with a label, of all parts of the batch.
        static_shape: Rows and columns that all batches of the run have; None: these are its own.
    """

    tokens: Tensor
    mask: Tensor
    labels: Tensor
    tasks: list[int] | Tensor
    num_tokens: int
    static_shape: tuple[int, int] | None = None

    def take(self, batch_slice: BatchSlice, costs: Sequence[float] | None = None) -> TagBatch:
        """The part of one process; if it has no rows, one row whose words have no label."""
        if batch_slice.of == 1:
            return self
        ours = batch_slice.cut(self.mask.sum(1).numpy() if costs is None else costs)
        is_empty = ours.start == ours.stop
        rows = slice(0, 1) if is_empty else ours
        columns = slice(0, int(self.mask[rows].sum(1).max()))
        labels = self.labels[rows, columns]
        return TagBatch(
            self.tokens[rows, columns].contiguous(),
            self.mask[rows, columns].contiguous(),
            torch.full_like(labels, NO_LABEL) if is_empty else labels.contiguous(),
            self.tasks[rows],
            self.num_tokens,
        )


def make_tag_batch(
    tasks: Sequence[Windows], chosen: Sequence[Numbers], *, pad: int, width: int | None = None
) -> TagBatch:
    """Make a batch of the chosen windows of every task.

    Args:
        tasks: The windows of every task.
        chosen: Which windows of every task.
        pad: The padding token.
        width: Columns that all batches of the run have; None: as many as the longest row needs.
    """
    rows = [(task, int(n)) for task, numbers in enumerate(chosen) for n in numbers]
    has_static_shape = width is not None
    width = width or max(int(tasks[task].lengths[n]) for task, n in rows)
    tokens = np.full((len(rows), width), pad, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=bool)
    labels = np.full((len(rows), width), NO_LABEL, dtype=np.int64)
    for row, (task, n) in enumerate(rows):
        windows = tasks[task]
        first, last = windows.starts[n], windows.starts[n + 1]
        tokens[row, : last - first] = windows.tokens[first:last]
        mask[row, : last - first] = True
        words = slice(windows.words[n], windows.words[n + 1])
        labels[row, windows.places[words]] = windows.labels[words]
    owners = [task for task, _ in rows]
    return TagBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(mask),
        torch.from_numpy(labels),
        torch.tensor(owners) if has_static_shape else owners,
        int((labels != NO_LABEL).sum()),
        (len(rows), width) if has_static_shape else None,
    )


def by_length(windows: Windows, rows: int) -> Iterator[Numbers]:
    """All windows in batches of similar length, the longest first."""
    order = np.argsort(-windows.lengths, kind="stable")
    for first in range(0, len(order), rows):
        yield order[first : first + rows]


def logits_of(model: nn.Module, batch: TagBatch) -> Tensor:
    """The scores of all labels, `[B, S, L]`."""
    logits: Tensor = model(input_ids=batch.tokens, attention_mask=batch.mask.long()).logits
    return logits


def predict_windows(
    model: nn.Module,
    windows: Windows,
    num_sentences: int,
    *,
    labels: Sequence[str],
    pad: int,
    rows: int,
    see: Callable[[TagBatch, Tensor], object] | None = None,
) -> list[list[str]]:
    """The tags of every sentence, joined from its windows.

    Args:
        model: For token classification, on its device, in eval mode.
        windows: The windows of the sentences.
        num_sentences: Number of sentences, including those without words.
        labels: The model's labels.
        pad: The padding token.
        rows: Windows per batch.
        see: Called with every batch and its logits.
    """
    device = next(model.parameters()).device
    predicted = np.zeros(len(windows.places), dtype=np.int64)
    for numbers in by_length(windows, rows):
        batch = make_tag_batch([windows], [numbers], pad=pad).to(device)
        logits = logits_of(model, batch)
        best = logits.argmax(-1).cpu().numpy()  # [B, S]
        for row, number in enumerate(numbers):
            words = slice(windows.words[number], windows.words[number + 1])
            predicted[words] = best[row, windows.places[words]]
        if see is not None:
            see(batch, logits)
    tags: list[list[str]] = [[] for _ in range(num_sentences)]
    for number, sentence in enumerate(windows.sentences):
        words = slice(windows.words[number], windows.words[number + 1])
        tags[sentence] += [labels[label] for label in predicted[words]]
    return tags


class Tagger(FromRun):
    """Tags with a trained model.

    Args:
        model: On its device, in eval mode.
        tokenizer: The encoder's, a fast one.
        labels: The model's labels.
        max_tokens: Maximum number of sub-words in a window.
        rows: Windows per batch.
        precision: "bf16" runs under autocast on a GPU.

    Attributes:
        counts: What happened to sentences and words -> how often.

    ```python
    tagger = Tagger.from_run("runs/ner")
    tagger.tag([["Ada", "lived", "in", "London"]])  # [["B-PER", "O", "O", "B-LOC"]]
    ```
    """

    settings_class = TaggingConfig

    def __init__(
        self,
        model: nn.Module,
        tokenizer: object,
        labels: Sequence[str],
        *,
        max_tokens: int,
        rows: int = 256,
        precision: str = "fp32",
    ) -> None:
        self._model, self._labels, self._rows = model, list(labels), rows
        self._encoder = WordEncoder(tokenizer, max_tokens)
        self._precision = precision
        self.counts: Counter[str] = self._encoder.counts

    @classmethod
    def open(
        cls, run: Path, settings: TaggingConfig, weights: str | int, device: torch.device
    ) -> Tagger:
        """Load the model of a run whose settings have been read."""
        return cls(
            load_run_model(run, weights).to(device).eval(),
            load_run_tokenizer(run),
            settings.data.all_labels(),
            max_tokens=settings.model.max_tokens,
            rows=settings.batch.score_rows,
            precision=settings.train.precision,
        )

    def tag(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Tag sentences of words: one tag per word; a sentence without words gives none."""
        return self.tag_windows(self._encoder.encode(sentences), len(sentences))

    def tag_windows(self, windows: Windows, num_sentences: int) -> list[list[str]]:
        """Tag sentences that were prepared."""
        device = next(self._model.parameters()).device
        precision = "fp32" if device.type == "cpu" else self._precision
        with torch.no_grad(), around_forward(precision, device):
            return predict_windows(
                self._model,
                windows,
                num_sentences,
                labels=self._labels,
                pad=pad_token(self._encoder.tokenizer),
                rows=self._rows,
            )


def load_run_model(run: Path, weights: str | int | None = None) -> nn.Module:
    """The model of a run, on the CPU, with or without some of its weights."""
    _check_encoder(run)
    model = build_model(run / ENCODER)
    if weights is not None:
        checkpoint.resolve_weights(run, weights).load_into(model)
    return model


def load_run_tokenizer(run: Path) -> Any:
    """The tokenizer of a run."""
    _check_encoder(run)
    return load_tokenizer(str(run / ENCODER))


def _check_encoder(run: Path) -> None:
    """Refuse what is not a tagging run, and files that are not what it was trained with."""
    if not (run / ENCODER / "config.json").is_file():
        raise ValueError(f"{run}: has no {ENCODER}/config.json; it is not a tagging run.")
    RunFolder(run).verify_saved()


def pad_token(tokenizer: object) -> int:
    """The padding token; 0 where there is none, which the mask hides anyway."""
    return getattr(tokenizer, "pad_token_id", None) or 0

"""The tagger: sentences of words in, tags out."""

# B rows, S sub-words, L labels

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvac.lab.recipes.tagging.batch import TagBatch, by_length, make_batch
from gradvac.lab.recipes.tagging.encoder import build_model, load_tokenizer
from gradvac.lab.recipes.tagging.encoding import Windows, WordEncoder
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import FromRun, checkpoint
from gradvac.lab.training.environment import around_forward

ENCODER = "encoder"  # folder of a run: the encoder's config and tokenizer, without weights


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
        batch = make_batch([windows], [numbers], pad=pad).to(device)
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
    _require_encoder(run)
    model = build_model(run / ENCODER)
    if weights is not None:
        checkpoint.load_into(model, run, weights)
    return model


def load_run_tokenizer(run: Path) -> Any:
    """The tokenizer of a run."""
    _require_encoder(run)
    return load_tokenizer(str(run / ENCODER))


def _require_encoder(run: Path) -> None:
    """Refuse what is not a tagging run, and files that are not what it was trained with."""
    if not (run / ENCODER / "config.json").is_file():
        raise ValueError(f"{run}: has no {ENCODER}/config.json; it is not a tagging run.")
    RunFolder(run).verify_saved()


def pad_token(tokenizer: object) -> int:
    """The padding token; 0 where there is none, which the mask hides anyway."""
    return getattr(tokenizer, "pad_token_id", None) or 0

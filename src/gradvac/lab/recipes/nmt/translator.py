"""The translator: lines of text in, lines of text out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from gradvac.lab.recipes.nmt.batches import Ragged
from gradvac.lab.recipes.nmt.beam_search import BeamSearch, SearchOptions
from gradvac.lab.recipes.nmt.model import Transformer
from gradvac.lab.recipes.nmt.settings import DecodingConfig, NmtConfig
from gradvac.lab.recipes.nmt.vocabulary import BOS, EOS, Vocabulary
from gradvac.lab.training import FromRun, checkpoint
from gradvac.tasks import parse


@dataclass
class Counts:
    """What happened to the lines.

    Attributes:
        lines: Lines translated, empty ones included.
        empty: Empty lines; their translation is empty.
        cut: Lines with too many tokens, of which only the beginning was translated.
    """

    lines: int = 0
    empty: int = 0
    cut: int = 0


class Translator(FromRun):
    """Translates with a trained model.

    Args:
        model: On its device.
        vocabulary: The model's.
        settings: How to search.
        targets: Languages it was trained to translate into.
        max_tokens: Longer lines are cut, and counted.
        precision: "bf16" searches with a copy of the weights in bf16, on a GPU.

    ```python
    translator = Translator.from_run("runs/demo/gradvac")
    translator.translate(["the old man sleeps"], "qso")
    ```
    """

    settings_class = NmtConfig

    def __init__(
        self,
        model: Transformer,
        vocabulary: Vocabulary,
        settings: DecodingConfig,
        *,
        targets: Sequence[str],
        max_tokens: int,
        precision: str = "fp32",
    ) -> None:
        self.model, self.vocabulary, self.settings = model, vocabulary, settings
        self.targets = tuple(dict.fromkeys(targets))
        self.max_tokens, self._precision = max_tokens, precision
        self.counts = Counts()

    @classmethod
    def open(
        cls, run: Path, settings: NmtConfig, weights: str | int, device: torch.device
    ) -> Translator:
        """Load the model of a run whose settings have been read."""
        vocabulary = Vocabulary.of_run(run)
        model = settings.model.build(len(vocabulary))
        checkpoint.resolve_weights(run, weights).load_into(model)
        return cls(
            model.to(device).eval(),
            vocabulary,
            settings.decoding,
            targets=[parse(task).target for task in settings.data.all_tasks()],
            max_tokens=settings.data.max_tokens,
            precision=settings.train.precision,
        )

    def translate(self, lines: Sequence[str], target: str) -> list[str]:
        """Translate lines into a language.

        Args:
            lines: Sentences, in any of the source languages.
            target: Code of the target language.

        Raises:
            ValueError: The model was not trained to translate into that language.
        """
        if target not in self.targets:
            raise ValueError(
                f"target language: {target!r} is unknown; this model translates into "
                f"{', '.join(self.targets)}."
            )
        tag = self.vocabulary.tag(target)
        pieces = self.vocabulary.encode(lines)
        self.counts.lines += len(lines)
        self.counts.empty += sum(not sentence for sentence in pieces)
        self.counts.cut += sum(len(sentence) > self.max_tokens for sentence in pieces)
        pieces = [sentence[: self.max_tokens] for sentence in pieces]
        translations = [""] * len(lines)
        rows = [row for row, sentence in enumerate(pieces) if sentence]
        if rows:
            sources = Ragged.of([pieces[row] for row in rows]).add_special_tokens(tag, EOS)
            for row, text in zip(rows, self._translate_tokens(sources), strict=True):
                translations[row] = text
        return translations

    def stream(self, lines: Iterable[str], target: str, *, window: int = 1024) -> Iterator[str]:
        """Translate lines as they come, a window at a time, in order."""
        waiting = iter(lines)
        while block := list(islice(waiting, window)):
            yield from self.translate(block, target)

    @cached_property
    def _beam_search(self) -> BeamSearch:
        """Made when it is needed; on a GPU it has a copy of the weights in bf16."""
        settings, model = self.settings, self.model
        if self._precision == "bf16" and model.embedding.weight.device.type != "cpu":
            model = copy.deepcopy(model).bfloat16()
        forbidden = tuple(self.vocabulary.unspeakable)
        options = SearchOptions(BOS, EOS, settings.beams, settings.length_penalty, forbidden)
        memory = None if settings.memory is None else int(settings.memory * (1 << 30))
        return BeamSearch(model, options, memory=memory, graphs=settings.cuda_graph)

    def _translate_tokens(self, sources: Ragged) -> list[str]:
        settings = self.settings
        limits = np.ceil((sources.lengths - 2) * settings.max_ratio) + settings.max_extra
        hypotheses = self._beam_search.decode(sources, limits.astype(int).tolist())
        return [self.vocabulary.decode(hypothesis.tokens) for hypothesis in hypotheses]

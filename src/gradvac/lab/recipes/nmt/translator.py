"""The translator: lines of text in, lines of text out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gradvac.lab.recipes.nmt.batches import Ragged
from gradvac.lab.recipes.nmt.beam_search import BeamSearch, Hypothesis
from gradvac.lab.recipes.nmt.ct2 import CT2Search, longest_text
from gradvac.lab.recipes.nmt.model import Transformer
from gradvac.lab.recipes.nmt.settings import DecodingConfig, NmtConfig
from gradvac.lab.recipes.nmt.vocabulary import EOS, Vocabulary
from gradvac.lab.training import FromRun, checkpoint
from gradvac.tasks import parse


@dataclass
class Counts:
    """What happened to the lines."""

    lines: int = 0  # lines translated, empty ones included
    empty: int = 0  # empty lines; their translation is empty
    cut: int = 0  # lines with too many tokens, of which only the beginning was translated


class Translation(NamedTuple):
    """A translation of a line.

    Attributes:
        text: The translation.
        score: Its log-probability divided by the length penalty.
    """

    text: str
    score: float


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
        return [found[0].text for found in self.n_best(lines, target, 1)]

    def n_best(self, lines: Sequence[str], target: str, num: int) -> list[list[Translation]]:
        """Find several translations of every line, the best first; as many as are drawn.

        Args:
            lines: As in `translate`.
            target: Likewise.
            num: How many of each; more than one needs `decoding.engine = "ctranslate2"`. A search
                may find fewer.
        """
        decoding = self.settings
        if num > 1 and decoding.engine is None:
            raise ValueError("n-best: needs decoding.engine=ctranslate2; our own search keeps one.")
        if num > decoding.beams and decoding.sampling_topk is None:
            raise ValueError(
                f"n-best: {num} translations need as many beams, but decoding.beams is "
                f"{decoding.beams}."
            )
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
        translations = [[Translation("", 0.0)] for _ in lines]
        rows = [row for row, sentence in enumerate(pieces) if sentence]
        if rows:
            sources = Ragged.of([pieces[row] for row in rows]).add_special_tokens(tag, EOS)
            for row, found in zip(rows, self._search_tokens(sources, num), strict=True):
                texts = (self.vocabulary.decode(one.tokens) for one in found)
                scores = (one.score for one in found)
                translations[row] = [*map(Translation, texts, scores)]
        return translations

    def stream(
        self, lines: Iterable[str], target: str, *, window: int = 1024, num: int = 1
    ) -> Iterator[list[Translation]]:
        """Translate lines as they come, a window at a time, in order; as `n_best` does."""
        waiting = iter(lines)
        while block := list(islice(waiting, window)):
            yield from self.n_best(block, target, num)

    @cached_property
    def _search(self) -> BeamSearch | CT2Search:
        """Made when it is needed; on a GPU it has a copy of the weights in bf16."""
        settings, model = self.settings, self.model
        forbidden = self.vocabulary.unspeakable
        if settings.engine is not None:
            longest = longest_text(settings, self.max_tokens)
            pieces = self.vocabulary.pieces()
            return CT2Search(model, pieces, settings, forbidden, longest=longest)
        if self._precision == "bf16" and model.embedding.weight.device.type != "cpu":
            model = copy.deepcopy(model).bfloat16()
        return BeamSearch(model, settings, forbidden)

    def _search_tokens(self, sources: Ragged, num: int) -> list[list[Hypothesis]]:
        settings = self.settings
        lengths = np.ceil((sources.lengths - 2) * settings.max_ratio) + settings.max_extra
        limits = lengths.astype(int).tolist()
        if isinstance(self._search, CT2Search):
            return self._search.decode_several(sources, limits, num)
        return [[hypothesis] for hypothesis in self._search.decode(sources, limits)]

"""The encoder: its tokenizer and model, from a hub name or a folder; words -> windows of sub-words.

A word's label sits on its first sub-word, and its prediction is read there. A sentence with more
sub-words than the model takes is cut between words into several windows; every word is in exactly
one. Words that the tokenizer drops (a lone mark of writing direction) get the unknown token, and
words longer than a whole window keep their first sub-words; both are counted.
"""

# W windows, N sub-words, M words

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

Numbers = npt.NDArray[np.int64]
NO_LABEL = -100  # what torch's cross-entropy ignores
_AT_ONCE = 2000  # sentences
_BYTE_LEVEL = ("roberta", "longformer", "gpt2", "deberta", "bart", "modernbert")


def load_tokenizer(encoder: str) -> Any:
    """The tokenizer of an encoder.

    Raises:
        ValueError: It cannot be loaded, or is not a fast one.
    """
    # Byte-level BPE attaches a blank to the word after it: split words need their own.
    config = _load(AutoConfig, encoder)
    options = {"add_prefix_space": True} if config.model_type in _BYTE_LEVEL else {}
    tokenizer = _load(AutoTokenizer, encoder, **options)
    known = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    if not known:  # what transformers makes of a folder without a tokenizer
        raise ValueError(
            f"model.encoder: {encoder} has a tokenizer that knows no word, or none; give a folder "
            "with its tokenizer.json."
        )
    own = known - set(tokenizer.get_added_vocab())
    largest = max(tokenizer.convert_tokens_to_ids(list(own)), default=0)
    if largest >= getattr(config, "vocab_size", math.inf):
        raise ValueError(
            f"model.encoder: the tokenizer of {encoder} has numbers up to {largest:,}, but its "
            f"model knows {config.vocab_size:,} tokens; they are not of one model."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"model.encoder: {encoder} has no fast tokenizer ({type(tokenizer).__name__}); only "
            "fast ones say which sub-words make up a word. Choose one with a tokenizer.json."
        )
    return tokenizer


def load_model(encoder: str, labels: Sequence[str], *, dropout: float | None) -> nn.Module:
    """The encoder with a new layer that gives a score to every label.

    Raises:
        ValueError: It cannot be loaded, or has no weights for a part of the encoder itself.
    """
    options: dict[str, Any] = {} if dropout is None else _dropout(encoder, dropout)
    options |= {**_label_names(labels), "output_loading_info": True}
    model, loading = _load(AutoModelForTokenClassification, encoder, **options)
    lost = [name for name in loading["missing_keys"] if name.startswith(model.base_model_prefix)]
    if lost:
        raise ValueError(
            f"model.encoder: {encoder} has no weights for {len(lost)} parameters, such as "
            f"{sorted(lost)[0]}, which would stay random; give the folder of a trained model."
        )
    return model.float()  # type: ignore[no-any-return]


def build_model(folder: Path) -> nn.Module:
    """The model of a run, without weights: from the config that training kept."""
    with quiet_transformers():
        model: nn.Module = AutoModelForTokenClassification.from_config(
            AutoConfig.from_pretrained(folder)
        )
    return model


def _label_names(labels: Sequence[str]) -> dict[str, Any]:
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def _dropout(encoder: str, dropout: float) -> dict[str, Any]:
    """The settings by which an architecture controls its dropout."""
    config = _load(AutoConfig, encoder)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    dropouts = {name: dropout for name in names if hasattr(config, name)}
    if not dropouts:
        raise ValueError(
            f"model.dropout: {encoder} ({config.model_type}) has none of {', '.join(names)}; leave "
            "it out."
        )
    return dropouts


def _load(kind: Any, encoder: str, **options: Any) -> Any:
    """What transformers makes of an encoder's files, without running code that lies among them.

    Raises:
        ValueError: It makes nothing of them. What it raises then depends on the file.
    """
    try:
        with quiet_transformers():
            return kind.from_pretrained(encoder, trust_remote_code=False, **options)
    except Exception as error:
        reason = next(filter(None, str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"model.encoder: {encoder} cannot be loaded ({reason}). Give a folder in Hugging Face "
            "format, such as one made by examples/pretrain_encoder.py, or a name on the hub if it "
            "can be reached."
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence reports and progress bars; what matters in them is checked here."""
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a set of sentences, one after the other."""

    tokens: npt.NDArray[np.int32]  # sub-words, with special tokens around each window, `[N]`
    starts: Numbers  # first sub-word of every window, and the end, `[W + 1]`
    places: npt.NDArray[np.int32]  # position of every word's first sub-word in its window, `[M]`
    words: Numbers  # first word of every window, and the end, `[W + 1]`
    sentences: Numbers  # the sentence of every window, `[W]`
    labels: npt.NDArray[np.int32]  # label of every word; `NO_LABEL` where there is none, `[M]`

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def lengths(self) -> Numbers:
        """Sub-words of every window."""
        return np.diff(self.starts)

    def save(self, file: BinaryIO) -> None:
        """Write all arrays."""
        np.savez(file, **{one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Windows:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(**{one.name: arrays[one.name] for one in fields(cls)})


@dataclass
class WordEncoder:
    """Cuts sentences into windows of sub-words.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        max_tokens: Maximum number of sub-words in a window, special tokens included.

    Attributes:
        counts: What happened to sentences and words -> how often.
    """

    tokenizer: Any
    max_tokens: int
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        before, after = _special_tokens(self.tokenizer)
        self._before, self._after = before, after
        self._room = self.max_tokens - len(before) - len(after)
        if self._room < 1:
            raise ValueError(
                f"model.max_tokens: {self.max_tokens} leaves no room beside the "
                f"{len(before) + len(after)} special tokens; give more."
            )
        if self.tokenizer.unk_token_id is None and self.tokenizer.pad_token_id is None:
            raise ValueError("model.encoder: its tokenizer has no padding token; set one.")

    def encode(
        self, sentences: Sequence[Sequence[str]], labels: Sequence[Sequence[int]] | None = None
    ) -> Windows:
        """Encode sentences of words.

        Args:
            sentences: Words; a sentence without any has no window.
            labels: The number of every word's label; None for text without labels.
        """
        tokens, places, starts, words, owners = list[int](), list[int](), [0], [0], list[int]()
        for first in range(0, len(sentences), _AT_ONCE):
            block = sentences[first : first + _AT_ONCE]
            for number, pieces in enumerate(self._pieces(block), start=first):
                windows = self._cut(pieces)
                self.counts["sentences cut into windows"] += len(windows) > 1
                for window in windows:
                    tokens += self._before
                    for subwords in window:
                        places.append(len(tokens) - starts[-1])
                        tokens += subwords
                    tokens += self._after
                    starts.append(len(tokens))
                    words.append(len(places))
                    owners.append(number)
        given = [NO_LABEL] * len(places) if labels is None else [n for row in labels for n in row]
        assert len(given) == len(places), "every word is in exactly one window"
        return Windows(
            np.array(tokens, dtype=np.int32),
            np.array(starts, dtype=np.int64),
            np.array(places, dtype=np.int32),
            np.array(words, dtype=np.int64),
            np.array(owners, dtype=np.int64),
            np.array(given, dtype=np.int32),
        )

    def _pieces(self, block: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """The sub-words of every word."""
        full = [list(words) for words in block if words]
        if not full:
            return [[] for _ in block]
        encoding = self.tokenizer(
            full,
            is_split_into_words=True,
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,  # about lengths: long sentences are cut below
        )
        encoded = iter(range(len(full)))
        return [
            self._by_word(encoding, next(encoded), len(words)) if words else [] for words in block
        ]

    def _by_word(self, encoding: Any, row: int, num_words: int) -> list[list[int]]:
        pieces: list[list[int]] = [[] for _ in range(num_words)]
        for token, word in zip(encoding["input_ids"][row], encoding.word_ids(row), strict=True):
            pieces[word].append(token)
        for place, subwords in enumerate(pieces):
            if not subwords:
                self.counts["words without sub-words"] += 1
                unknown = self.tokenizer.unk_token_id
                pieces[place] = [self.tokenizer.pad_token_id if unknown is None else unknown]
            elif len(subwords) > self._room:
                self.counts["words longer than a window"] += 1
                pieces[place] = subwords[: self._room]
        return pieces

    def _cut(self, pieces: list[list[int]]) -> list[list[list[int]]]:
        """Cut a sentence between words, where the next one no longer fits."""
        windows: list[list[list[int]]] = []
        used = 0
        for subwords in pieces:
            if not windows or used + len(subwords) > self._room:
                windows.append([])
                used = 0
            windows[-1].append(subwords)
            used += len(subwords)
        return windows


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a sentence."""
    encoded = tokenizer([["a"]], is_split_into_words=True)
    words, tokens = encoded.word_ids(0), encoded["input_ids"][0]
    inside = [place for place, word in enumerate(words) if word is not None]
    if not inside:
        raise ValueError(
            "model.encoder: its tokenizer makes nothing of the letter a; give another folder."
        )
    return tokens[: inside[0]], tokens[inside[-1] + 1 :]

"""A tokenizer trained on the text, and saved in Hugging Face format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from gradvac.lab.training import Section, task_probabilities

PAD, UNKNOWN, BEGIN, END, MASK = SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class TokenizerConfig(Section):
    """[tokenizer]: how words are cut.

    Attributes:
        kind: "wordpiece" (BERT's) or "unigram" (SentencePiece's).
        size: Maximum number of sub-words, special tokens included.
        lines: Maximum number of lines to learn from, over all languages.
        temperature: Decides the languages' shares of these lines, as in [sampling].
    """

    kind: Literal["wordpiece", "unigram"] = "wordpiece"
    size: int = Field(default=16_000, ge=100)
    lines: PositiveInt = 500_000
    temperature: PositiveFloat = 3.0


def train_tokenizer(
    texts: Mapping[str, Sequence[str]], config: TokenizerConfig, *, max_tokens: int, seed: int
) -> Any:
    """Learn a tokenizer.

    Args:
        texts: Language -> lines.
        config: Its settings.
        max_tokens: Maximum length that the model takes; stored with the tokenizer.
        seed: Seed of the choice of lines.
    """
    tokenizer = _wordpiece() if config.kind == "wordpiece" else _unigram()
    options: dict[str, Any] = {
        "vocab_size": config.size,
        "special_tokens": SPECIAL,
        "show_progress": False,
    }
    trainer: Any
    if config.kind == "wordpiece":
        trainer = trainers.WordPieceTrainer(**options)
    else:
        trainer = trainers.UnigramTrainer(**options, unk_token=UNKNOWN)
    tokenizer.train_from_iterator(_chosen(texts, config, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}",
        pair=f"{BEGIN} $A {END} $B:1 {END}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (BEGIN, END)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_tokens,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=BEGIN,
        sep_token=END,
        mask_token=MASK,
    )


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=False, strip_accents=False, handle_chinese_chars=True
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _chosen(
    texts: Mapping[str, Sequence[str]], config: TokenizerConfig, seed: int
) -> Iterator[str]:
    """Lines of all languages, in the shares that the temperature gives, none twice."""
    shares = task_probabilities(
        {lang: len(lines) for lang, lines in texts.items()}, config.temperature
    )
    for number, (lang, lines) in enumerate(texts.items()):
        most = min(len(lines), round(config.lines * shares[lang]))
        order = np.random.default_rng([seed, number]).permutation(len(lines))[:most]
        yield from (lines[place] for place in sorted(order))

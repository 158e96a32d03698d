"""Tagging: the paper's second system, parts of speech and named entities in many languages.

One Hugging Face encoder learns all languages; a task is a language. `prepare_sentences` checks and
encodes tagged files, `train_tagging` fine-tunes, `Tagger` tags, `score_tagging` scores as conlleval
and XTREME do. Without a hub, examples/pretrain_encoder.py makes a small multilingual encoder first.

    settings.py     the config of a run, and the label set that all languages share
    readers.py      sentences from CoNLL-U, WikiAnn, CoNLL, Hugging Face, constructed languages
    metrics.py      tags -> spans, as conlleval reads them; repair of broken tags; F1, accuracy
    encoder.py      tokenizer and model; words -> windows of sub-words
    preparation.py  files -> checked sentences -> windows
    tagger.py       batches that mix languages; words -> tags
    score.py        the scores of a run
    recipe.py       what the training loop needs to know, and the entry of the registry
"""

from gradvac.lab.recipes.tagging.encoder import Windows
from gradvac.lab.recipes.tagging.metrics import (
    Span,
    find_spans,
    find_strict_spans,
    repair,
    score_tags,
)
from gradvac.lab.recipes.tagging.preparation import prepare_sentences
from gradvac.lab.recipes.tagging.readers import read_sentences
from gradvac.lab.recipes.tagging.recipe import train_tagging
from gradvac.lab.recipes.tagging.score import score_tagging
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.recipes.tagging.tagger import Tagger

__all__ = [
    "Span",
    "Tagger",
    "TaggingConfig",
    "Windows",
    "find_spans",
    "find_strict_spans",
    "prepare_sentences",
    "read_sentences",
    "repair",
    "score_tagging",
    "score_tags",
    "train_tagging",
]

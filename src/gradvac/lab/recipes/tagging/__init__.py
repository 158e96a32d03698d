"""Tagging: the paper's second system, parts of speech and named entities in many languages.

One Hugging Face encoder learns all languages; a task is a language. `prepare` checks and encodes
tagged files, `train_tagging` fine-tunes, `Tagger` tags, `score_run` scores as conlleval and XTREME
do. Without a hub, `pretrain` makes a small multilingual encoder first.

    sentences.py    words with their tags
    readers.py      sentences from CoNLL-U, WikiAnn, CoNLL, constructed languages
    hub.py          sentences from Hugging Face datasets
    labels.py       the label set that all languages share
    spans.py        tags -> spans, as conlleval reads them; repair of broken tags
    metrics.py      F1 and accuracy
    encoder.py      tokenizer and model of an encoder
    encoding.py     words -> windows of sub-words, a label on the first sub-word of each
    preparation.py  files -> checked sentences -> windows
    batch.py        padded batches that mix languages
    settings.py     the config of a run
    recipe.py       what the training loop needs to know
    tagger.py       words -> tags
    score.py        the scores of a run
    similarity.py   gradient similarity between languages at every checkpoint
    text.py         plain text, for pretraining
    tokenizer.py    trains a WordPiece or Unigram tokenizer
    masking.py      blocks of text, and what is hidden in them
    pretraining.py  the recipe of masked language modelling
"""

from gradvac.lab.recipes.tagging.encoding import Windows, WordEncoder
from gradvac.lab.recipes.tagging.metrics import TagScore, score_tags
from gradvac.lab.recipes.tagging.preparation import Prepared, open_or_prepare, prepare
from gradvac.lab.recipes.tagging.pretraining import PretrainConfig, PretrainRecipe, pretrain
from gradvac.lab.recipes.tagging.readers import read_sentences
from gradvac.lab.recipes.tagging.recipe import TaggingRecipe, train_tagging
from gradvac.lab.recipes.tagging.score import Scores, score_run
from gradvac.lab.recipes.tagging.sentences import Sentence
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.recipes.tagging.spans import Span, find_spans, find_strict_spans, repair
from gradvac.lab.recipes.tagging.tagger import Tagger

__all__ = [
    "Prepared",
    "PretrainConfig",
    "PretrainRecipe",
    "Scores",
    "Sentence",
    "Span",
    "TagScore",
    "Tagger",
    "TaggingConfig",
    "TaggingRecipe",
    "Windows",
    "WordEncoder",
    "find_spans",
    "find_strict_spans",
    "open_or_prepare",
    "prepare",
    "pretrain",
    "read_sentences",
    "repair",
    "score_run",
    "score_tags",
    "train_tagging",
]

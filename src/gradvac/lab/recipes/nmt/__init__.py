"""Translation: the paper's system, for whoever has parallel text.

One Transformer learns all directions; the target language is the first token of the source. A task
is a direction such as "en-fr". `prepare_corpus` turns text files into token files,
`train_translation` trains, `Translator` translates, `score_translation` scores with sacreBLEU.

    settings.py        the config of a run: [data], [model], [batch], [validation], [decoding]
    readers.py         sentence pairs from text, tables, JSON, TMX, Hugging Face, our own languages
    cleaning.py        what is dropped, repetitions above all, and the report of it
    data_warnings.py   the wrong language, sets that overlap
    workers.py         work on all cores, in order
    vocabulary.py      SentencePiece with a token <2xx> for every target language
    tokens.py          token files: written by tokenising text, mapped into memory
    preparation.py     text -> clean text -> vocabulary -> token files, and the folder opened
    batches.py         a batch, padded or packed, of any or of a static shape
    stream.py          batches that mix tasks, cut from token files
    model.py           the Transformer: layers, attention, KV cache
    loss.py            cross-entropy in few passes over the logits
    triton_kernels.py  attention and loss on a GPU
    beam_search.py     beam and greedy search, many sentences at a time
    ct2.py             the model for CTranslate2, and its search
    translator.py      text -> text
    score.py           BLEU, chrF++, wrong language
    comet.py           COMET, by its own command
    serve.py           a page to type into, and JSON for programs
    export.py          the model for Hugging Face and CTranslate2
    recipe.py          what the training loop needs to know, and the entry of the registry
"""

from gradvac.lab.recipes.nmt.batches import Batch, Ragged, make_batch
from gradvac.lab.recipes.nmt.beam_search import BeamSearch, Hypothesis
from gradvac.lab.recipes.nmt.cleaning import Report
from gradvac.lab.recipes.nmt.export import export_run
from gradvac.lab.recipes.nmt.model import SIZES, Size, Transformer
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus, open_corpus, prepare_corpus
from gradvac.lab.recipes.nmt.readers import read_pairs
from gradvac.lab.recipes.nmt.recipe import train_translation
from gradvac.lab.recipes.nmt.score import (
    Score,
    TranslationScores,
    score_files,
    score_lines,
    score_translation,
)
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.stream import Stream, TaskData
from gradvac.lab.recipes.nmt.tokens import TokenFile, TokenWriter
from gradvac.lab.recipes.nmt.translator import Translation, Translator
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary

__all__ = [
    "SIZES",
    "Batch",
    "BeamSearch",
    "Hypothesis",
    "NmtConfig",
    "PreparedCorpus",
    "Ragged",
    "Report",
    "Score",
    "Size",
    "Stream",
    "TaskData",
    "TokenFile",
    "TokenWriter",
    "Transformer",
    "Translation",
    "TranslationScores",
    "Translator",
    "Vocabulary",
    "export_run",
    "make_batch",
    "open_corpus",
    "prepare_corpus",
    "read_pairs",
    "score_files",
    "score_lines",
    "score_translation",
    "train_translation",
]

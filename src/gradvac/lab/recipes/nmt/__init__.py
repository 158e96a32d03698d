"""Translation: the paper's system, for whoever has parallel text.

One Transformer learns all directions; the target language is the first token of the source. A task
is a direction such as "en-fr". `prepare` turns text files into token files, `train_translation`
trains, `Translator` translates, `score_run` scores with sacreBLEU.

    settings.py        the config of a run: [model], [batch], [validation], [decoding]
    data_settings.py   its [data]: sources, pairs, directions
    readers.py         sentence pairs from text, TSV, JSONL, TMX, Hugging Face, our own languages
    lines.py           lines of files, packed or not: all of them, or an error
    columns.py         which column of a table holds which language
    doubts.py          warnings: text that is not what its name says, test sentences in dev
    cleaning.py        what is dropped, and the report
    seen.py            repetitions, known by fingerprints on disk
    workers.py         work on all cores, in order
    vocabulary.py      SentencePiece with a token <2xx> for every target language
    tokens.py          token files, mapped into memory
    sealed.py          files whose size and hash are known, so that damage is told
    preparation.py     text -> clean text -> vocabulary -> token files
    cutting.py         the last step: text cut into tokens, shard by shard
    prepared.py        what the preparation left, opened
    batches.py         a batch, padded or packed, of any or of a static shape
    stream.py          batches that mix tasks, cut from token files
    model.py           the Transformer: layers, attention, KV cache
    loss.py            cross-entropy in few passes over the logits
    triton_kernels.py  attention and loss on a GPU
    beam_search.py     beam and greedy search, many sentences at a time
    translator.py      text -> text
    score.py           BLEU and chrF++
    similarity.py      gradient similarity of a translation run
    export.py          the model for Hugging Face and CTranslate2
    start.py           another run's weights to start from; schedules that cannot work
    recipe.py          what the training loop needs to know
    demo.py            two trainings side by side and all that follows, in a few minutes
"""

from gradvac.lab.recipes.nmt.batches import Batch, Ragged, Side, make_batch
from gradvac.lab.recipes.nmt.beam_search import BeamSearch, Hypothesis, SearchOptions
from gradvac.lab.recipes.nmt.cleaning import CleaningConfig, Report
from gradvac.lab.recipes.nmt.data_settings import DataConfig
from gradvac.lab.recipes.nmt.export import export_run
from gradvac.lab.recipes.nmt.model import SIZES, Size, Transformer
from gradvac.lab.recipes.nmt.preparation import open_or_prepare, prepare
from gradvac.lab.recipes.nmt.prepared import Prepared
from gradvac.lab.recipes.nmt.readers import read_pairs
from gradvac.lab.recipes.nmt.recipe import TranslationRecipe, train_translation
from gradvac.lab.recipes.nmt.score import Score, Scores, score_files, score_lines, score_run
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.stream import Stream, TaskData
from gradvac.lab.recipes.nmt.tokens import TokenFile, TokenWriter
from gradvac.lab.recipes.nmt.translator import Translator
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary, VocabularyConfig

__all__ = [
    "SIZES",
    "Batch",
    "BeamSearch",
    "CleaningConfig",
    "DataConfig",
    "Hypothesis",
    "NmtConfig",
    "Prepared",
    "Ragged",
    "Report",
    "Score",
    "Scores",
    "SearchOptions",
    "Side",
    "Size",
    "Stream",
    "TaskData",
    "TokenFile",
    "TokenWriter",
    "Transformer",
    "TranslationRecipe",
    "Translator",
    "Vocabulary",
    "VocabularyConfig",
    "export_run",
    "make_batch",
    "open_or_prepare",
    "prepare",
    "read_pairs",
    "score_files",
    "score_lines",
    "score_run",
    "train_translation",
]

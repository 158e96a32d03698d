"""Constructed languages with a known family tree, and the table of real ones.

To ask whether related languages have similar gradients, one must know which languages are related,
and how nearly. For real languages that is an estimate, their texts differ in domain and size, and
the data has to be fetched. This package makes languages instead. A small grammar of meanings (who
did what to whom, where, when) is put into English and into any number of constructed languages. A
family has an ancestor with its own words, word order, morphology and script; branches change its
sounds by regular rules and replace some of its words; single languages drift on, and borrow from
neighbours.

So proximity is known by construction (the share of cognates, the share of grammar parameters that
differ), every language has exactly the data size it was given, and the development, test and
evaluation sets say the same things in all languages. The default set has 16 languages in 4
families; a few lines of TOML make another. Everything follows from a seed, on any machine.

    corpus = default_corpus()
    corpus.pairs("qso", "train")       # [(English, Ostrel), ...], 20,000 pairs
    corpus.aligned("eval")             # {"en": (...), "qso": (...), ...}, line by line
    corpus.distances().distance        # [16, 16]
    write_corpus(corpus, "data/constructed")

    corpus.py      what users see: sentences, splits, distances, export
    families.py    family trees from TOML, with errors that name the key
    meanings.py    what sentences are about, and an endless stream of plausible meanings
    grammar.py     the parameters in which languages differ
    sounds.py      sounds, regular sound change, and scripts
    words.py       how words descend, change, are replaced, borrowed and inflected
    rendering.py   meanings put into English and into a constructed language
    real.py        real languages: the paper's tables, family tree, distances
    known.py       families, names and distances of tasks, from these tables or from files

`real` is the table of the paper's real languages. How nearly real languages are related say
`genealogical_distances` and, with the package `urielplus`, `uriel_distances`.
"""

from gradvac.lab.languages import real
from gradvac.lab.languages.corpus import (
    Corpus,
    Distances,
    default_corpus,
    load_corpus,
    write_corpus,
)
from gradvac.lab.languages.families import PIVOT, RESOURCE_LEVELS, SPLITS, Language
from gradvac.lab.languages.meanings import Clause, Sentence, Thing
from gradvac.lab.languages.real import genealogical_distances, uriel_distances
from gradvac.lab.languages.rendering import Word, part_of_speech

__all__ = [
    "PIVOT",
    "RESOURCE_LEVELS",
    "SPLITS",
    "Clause",
    "Corpus",
    "Distances",
    "Language",
    "Sentence",
    "Thing",
    "Word",
    "default_corpus",
    "genealogical_distances",
    "load_corpus",
    "part_of_speech",
    "real",
    "uriel_distances",
    "write_corpus",
]

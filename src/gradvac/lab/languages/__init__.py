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

    corpus = corpora.default()
    corpus.pairs("qso", "train")       # [(English, Ostrel), ...], 20,000 pairs
    corpus.aligned("eval")             # {"en": (...), "qso": (...), ...}, line by line
    corpus.distances().distance        # [16, 16]
    corpora.write(corpus, "data/constructed")

    _corpus.py            Corpus: what users see of the constructed languages
    _settings.py          families from TOML, with errors that name the key
    _tree.py              the family tree: languages, their sizes and resource levels
    _draw.py              draws that are the same on every machine
    _concepts.py          what sentences are about, with the English words
    _meaning.py           meanings: small typed trees that every language can put into words
    _sampling.py          an endless stream of plausible meanings
    _generator.py         sentences in every language, held-out ones kept apart
    _pivot.py             meanings in English
    _grammar.py           the parameters in which languages differ
    _lexicon.py           how words descend, change, are replaced and are borrowed
    _sounds.py            sounds and regular sound change
    _scripts.py           spellings of the sounds
    _inflection.py        from a concept and its features to a written word
    _rendering.py         meanings in a constructed language
    _parts_of_speech.py   the part of speech of every word
    _dictionary.py        translation word by word, a baseline
    _distance.py          distances known by construction
    _export.py            a corpus as plain files
    languages.py          the table of the paper's real languages
    known.py              families, names and distances of tasks, from these tables or from files
    _genealogy.py         the family tree of real languages, and distances read off it
    _uriel.py             distances after URIEL
    _nearest.py           suggestions for error messages

`languages` is the table of the paper's real languages. How nearly real languages are related say
`genealogical_distances` and, with the package `urielplus`, `uriel_distances`.
"""

from gradvac.lab.languages import languages
from gradvac.lab.languages._corpus import Corpus, default, load
from gradvac.lab.languages._dictionary import dictionary_translate
from gradvac.lab.languages._distance import Distances
from gradvac.lab.languages._export import describe, write
from gradvac.lab.languages._genealogy import genealogical_distances
from gradvac.lab.languages._grammar import Grammar
from gradvac.lab.languages._meaning import Clause, Sentence, Thing
from gradvac.lab.languages._parts_of_speech import part_of_speech
from gradvac.lab.languages._pivot import PIVOT, Word
from gradvac.lab.languages._sounds import SoundChange
from gradvac.lab.languages._tree import RESOURCE_LEVELS, SPLITS, Language
from gradvac.lab.languages._uriel import URIEL_KINDS, uriel_distances

__all__ = [
    "PIVOT",
    "RESOURCE_LEVELS",
    "SPLITS",
    "URIEL_KINDS",
    "Clause",
    "Corpus",
    "Distances",
    "Grammar",
    "Language",
    "Sentence",
    "SoundChange",
    "Thing",
    "Word",
    "default",
    "describe",
    "dictionary_translate",
    "genealogical_distances",
    "languages",
    "load",
    "part_of_speech",
    "uriel_distances",
    "write",
]

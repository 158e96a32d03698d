"""The corpus: what users see of the constructed languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from gradvac.lab.languages._distance import Distances, measure_distances
from gradvac.lab.languages._generator import Generator, text
from gradvac.lab.languages._meaning import Sentence
from gradvac.lab.languages._nearest import nearest
from gradvac.lab.languages._pivot import PIVOT, Word
from gradvac.lab.languages._settings import read_tree
from gradvac.lab.languages._tree import SPLITS, Language, Split, Tree, resource_level

DEFAULT_PATH = Path(__file__).with_name("default.toml")


@dataclass(frozen=True)
class Corpus:
    """A multi-way parallel corpus of English and constructed languages.

    Make one with `default` or `load`. Sentences are generated on first use and kept.

    Attributes:
        tree: The family tree it is drawn from.
        languages: Code to language, for the languages selected from the tree.

    Example:
        >>> corpus = default().select(["qso", "qsm"]).resize({"qso": 100})
        >>> english, ostrel = corpus.pairs("qso", "train")[0]
        >>> len(english.split()), len(ostrel.split())
        (10, 7)
    """

    tree: Tree
    languages: Mapping[str, Language]
    _generator: Generator = field(repr=False, compare=False)

    @classmethod
    def from_toml(cls, path: str | Path, *, seed: int | None = None) -> Corpus:
        """Read the families from a TOML file.

        Args:
            path: The file; `docs/languages.md` explains its keys.
            seed: Replaces the file's seed: other words, other sentences, the same grammars.

        Raises:
            ValueError: A key or value is wrong; the message names it and the fix.
        """
        tree = read_tree(Path(path), seed=seed)
        languages = {code: lineage.language for code, lineage in tree.lineages.items()}
        return cls(tree, MappingProxyType(languages), Generator(tree))

    def __repr__(self) -> str:
        """Name the languages; the whole tree would fill pages."""
        return f"Corpus(seed={self.tree.seed}, languages={', '.join(self.languages)})"

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of the languages, without the pivot."""
        return tuple(self.languages)

    @property
    def families(self) -> dict[str, tuple[str, ...]]:
        """Name of each family to the codes of its languages."""
        families: dict[str, tuple[str, ...]] = {}
        for code, language in self.languages.items():
            families[language.family] = (*families.get(language.family, ()), code)
        return families

    def select(self, codes: Sequence[str]) -> Corpus:
        """Keep only some languages; their text stays the same.

        Args:
            codes: Codes of the languages to keep, in the order wanted.
        """
        kept = {code: self.languages[self._known(code)] for code in codes}
        return Corpus(self.tree, MappingProxyType(kept), self._generator)

    def resize(self, train: Mapping[str, int]) -> Corpus:
        """Change the number of training pairs of some languages.

        A smaller size keeps the first pairs, a larger one adds pairs at the end.

        Args:
            train: Code to number of pairs.
        """
        languages = dict(self.languages)
        for code, num_pairs in train.items():
            language = languages[self._known(code)]
            if num_pairs < 0:
                raise ValueError(f"train[{code!r}] = {num_pairs}: give a number of pairs from 0 up")
            level = resource_level(num_pairs, self.tree.thresholds)
            languages[code] = replace(language, train=num_pairs, resource_level=level)
        return Corpus(self.tree, MappingProxyType(languages), self._generator)

    def pairs(self, code: str, split: Split | Literal["train"]) -> list[tuple[str, str]]:
        """Sentence pairs (English, language).

        Args:
            code: Code of the language.
            split: "train", or an aligned split: "dev", "test", "eval" or "novel".
        """
        language = self.languages[self._known(code)]
        if split == "train":
            return self._generator.training(code, language.train)
        lines = self._lines(split, PIVOT), self._lines(split, code)
        return list(zip(*lines, strict=True))

    def aligned(self, split: Split) -> dict[str, tuple[str, ...]]:
        """The lines of an aligned split by code, English first: line i is one meaning."""
        return {code: self._lines(split, code) for code in (PIVOT, *self.languages)}

    def spoken(self, code: str, split: Split | Literal["train"]) -> list[list[Word]]:
        """The sentences of a language as words, each with the concept it stands for.

        Args:
            code: Code of the language.
            split: As in `pairs`; sentence i is the language's side of pair i.
        """
        language = self.languages[self._known(code)]
        if split == "train":
            said: Sequence[Sentence] = self._generator.training_meanings(code, language.train)
        else:
            said = self.meanings(split)
        return [self._generator.say(meaning, code) for meaning in said]

    def words(self, meaning: Sentence, code: str) -> list[Word]:
        """Put a meaning into words, each with the concept it stands for.

        Args:
            meaning: What to say.
            code: Code of a language, or "en".
        """
        return self._generator.say(meaning, code if code == PIVOT else self._known(code))

    def say(self, meaning: Sentence, code: str) -> str:
        """Put a meaning into a line of text; see `words`."""
        return text(self.words(meaning, code))

    def meanings(self, split: Split) -> tuple[Sentence, ...]:
        """The meanings of an aligned split, line by line."""
        return tuple(self._generator.held_out[self._split(split)])

    @cached_property
    def _distances(self) -> Distances:
        lexicons = {code: self._generator.lexicon(code) for code in self.languages}
        grammars = {code: language.grammar for code, language in self.languages.items()}
        return measure_distances(self.codes, lexicons, grammars)

    def distances(self) -> Distances:
        """Cognate shares, typological distances and their combination, with names."""
        return self._distances

    def _lines(self, split: Split, code: str) -> tuple[str, ...]:
        return self._generator.aligned(self._split(split), code)

    def _split(self, split: Split) -> Split:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: {nearest(split, ('train', *SPLITS))}")
        return split

    def _known(self, code: str) -> str:
        if code not in self.languages:
            raise ValueError(f"no language {code!r} in this corpus; {nearest(code, self.codes)}")
        return code


def load(path: str | Path, *, seed: int | None = None) -> Corpus:
    """Load a corpus from a TOML file of families; see `Corpus.from_toml`."""
    return Corpus.from_toml(path, seed=seed)


def default(*, seed: int | None = None) -> Corpus:
    """Load the default corpus: 16 languages in 4 families, from 20,000 to 400 training pairs.

    Args:
        seed: Another seed gives other words and sentences with the same grammars and sizes.
    """
    return Corpus.from_toml(DEFAULT_PATH, seed=seed)

"""The corpus: what users see of the constructed languages, and what it is made with.

The generator draws meanings, keeps the held-out ones apart, and has every language put them into
words. What belongs to one language is drawn from streams with its code in the key, so neither the
size of another language nor its presence changes a letter of it. All languages draw their training
meanings from one endless pool, each taking a third of it: a size only decides how far down the pool
a language reads, and two languages share a third of what they have both read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.languages.families import (
    PIVOT,
    SPLITS,
    Language,
    Split,
    Tree,
    read_tree,
    resource_level,
)
from gradvac.lab.languages.grammar import typological_distance
from gradvac.lab.languages.meanings import CONTENT, Combinations, Draw, Sentence, meanings
from gradvac.lab.languages.rendering import Speaker, Word, in_english
from gradvac.lab.languages.words import Inflection, Lexicon, lexicon_of
from gradvac.utils.files import read_json, write_json, write_text
from gradvac.utils.hints import nearest


@dataclass(frozen=True, eq=False)
class Distances:
    """How near the languages of a corpus are to each other.

    Attributes:
        codes: Codes of the languages, in the order of rows and columns.
        cognates: Share of the concepts whose words go back to the same etymon, [L, L].
        typology: Share of the grammar parameters that differ, [L, L].
        distance: Mean of `1 - cognates` and `typology`: 0 is the same language, [L, L].
    """

    codes: tuple[str, ...]
    cognates: NDArray[np.float64]
    typology: NDArray[np.float64]
    distance: NDArray[np.float64]


_POOL_SHARE = 1 / 3


def text(words: Iterable[Word]) -> str:
    """Write words as a line of text."""
    return " ".join(word.form for word in words)


class _Line(NamedTuple):
    meaning: Sentence
    english: str
    text: str


class Generator:
    """Generates the sentences of a tree on demand and keeps them.

    Args:
        tree: The family tree; the training sizes in it are not used here.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.combinations = Combinations(tree.seed)
        self.held_out: dict[Split, list[Sentence]] = {}
        self._seen: set[str] = set()
        for split in SPLITS:
            stream = meanings(self.combinations, tree.seed, split, novel=split == "novel")
            fresh = (meaning for meaning, _ in self._unseen(stream))
            self.held_out[split] = list(islice(fresh, tree.splits[split]))
        self._pool: list[tuple[Sentence, str]] = []
        self._stream = self._unseen(meanings(self.combinations, tree.seed, "pool"))
        self._lexicons: dict[str, Lexicon] = {}
        self._speakers: dict[str, Speaker] = {}
        self._aligned: dict[tuple[Split, str], tuple[str, ...]] = {}
        self._training: dict[str, list[_Line]] = {}
        self._readers: dict[str, Iterator[_Line]] = {}

    def _unseen(self, stream: Iterable[Sentence]) -> Iterator[tuple[Sentence, str]]:
        """Pass on the meanings whose English no split has had before."""
        for meaning in stream:
            english = text(in_english(meaning))
            if english not in self._seen:
                self._seen.add(english)
                yield meaning, english

    def lexicon(self, code: str) -> Lexicon:
        """The lexicon of a language."""
        if code not in self._lexicons:
            self._lexicons[code] = lexicon_of(self.tree, code)
        return self._lexicons[code]

    def render(self, meaning: Sentence, code: str) -> list[Word]:
        """Put a meaning into the words of a language or of the pivot."""
        if code == PIVOT:
            return in_english(meaning)
        if code not in self._speakers:
            language = self.tree.lineages[code].language
            inflection = Inflection(language.grammar, self.lexicon(code), language.script)
            self._speakers[code] = Speaker(language.grammar, inflection)
        return self._speakers[code].render(meaning)

    def aligned(self, split: Split, code: str) -> tuple[str, ...]:
        """The lines of a held-out split in one language."""
        key = (split, code)
        if key not in self._aligned:
            self._aligned[key] = tuple(text(self.render(m, code)) for m in self.held_out[split])
        return self._aligned[key]

    def training(self, code: str, num_pairs: int) -> list[tuple[str, str]]:
        """The first training pairs of a language."""
        return [(line.english, line.text) for line in self._training_lines(code, num_pairs)]

    def training_meanings(self, code: str, num_pairs: int) -> list[Sentence]:
        """What the first training pairs of a language say."""
        return [line.meaning for line in self._training_lines(code, num_pairs)]

    def _training_lines(self, code: str, num_lines: int) -> list[_Line]:
        lines = self._training.setdefault(code, [])
        reader = self._readers.setdefault(code, self._read(code))
        lines.extend(islice(reader, max(num_lines - len(lines), 0)))
        return lines[:num_lines]

    def _read(self, code: str) -> Iterator[_Line]:
        """Read down the pool, taking a share of it, for ever."""
        # A language may say two meanings alike; what it says in a held-out line is left out too.
        held_out = {line for split in SPLITS for line in self.aligned(split, code)}
        draw = Draw(self.tree.seed, "training", code)
        position = 0
        while True:
            if position == len(self._pool):
                self._pool.append(next(self._stream))
            if draw.chance(_POOL_SHARE):
                meaning, english = self._pool[position]
                line = text(self.render(meaning, code))
                if line not in held_out:
                    yield _Line(meaning, english, line)
            position += 1


DEFAULT_PATH = Path(__file__).with_name("default.toml")


@dataclass(frozen=True)
class Corpus:
    """A multi-way parallel corpus of English and constructed languages.

    Make one with `default_corpus` or `load_corpus`. Sentences are generated on first use and kept.

    Attributes:
        tree: The family tree it is drawn from.
        languages: Code to language, for the languages selected from the tree.
        generator: What says its sentences, with the words of every language.

    Examples:
        >>> corpus = default_corpus().select(["qso", "qsm"]).resize({"qso": 100})
        >>> english, ostrel = corpus.pairs("qso", "train")[0]
        >>> len(english.split()), len(ostrel.split())
        (10, 7)
    """

    tree: Tree
    languages: Mapping[str, Language]
    generator: Generator = field(repr=False, compare=False)

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
        return Corpus(self.tree, MappingProxyType(kept), self.generator)

    def resize(self, train: Mapping[str, int]) -> Corpus:
        """Change the number of training pairs of some languages.

        A smaller size keeps the first pairs, a larger one adds pairs at the end.
        """
        languages = dict(self.languages)
        for code, num_pairs in train.items():
            language = languages[self._known(code)]
            if num_pairs < 0:
                raise ValueError(f"train[{code!r}] = {num_pairs}: give a number of pairs from 0 up")
            level = resource_level(num_pairs, self.tree.thresholds)
            languages[code] = replace(language, train=num_pairs, resource_level=level)
        return Corpus(self.tree, MappingProxyType(languages), self.generator)

    def pairs(self, code: str, split: Split | Literal["train"]) -> list[tuple[str, str]]:
        """Sentence pairs (English, language).

        Args:
            code: Code of the language.
            split: "train", or an aligned split: "dev", "test", "eval" or "novel".
        """
        language = self.languages[self._known(code)]
        if split == "train":
            return self.generator.training(code, language.train)
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
            chosen: Sequence[Sentence] = self.generator.training_meanings(code, language.train)
        else:
            chosen = self.meanings(split)
        return [self.generator.render(meaning, code) for meaning in chosen]

    def words(self, meaning: Sentence, code: str) -> list[Word]:
        """Put a meaning into words, each with the concept it stands for."""
        return self.generator.render(meaning, code if code == PIVOT else self._known(code))

    def render(self, meaning: Sentence, code: str) -> str:
        """Put a meaning into a line of text; see `words`."""
        return text(self.words(meaning, code))

    def meanings(self, split: Split) -> tuple[Sentence, ...]:
        """The meanings of an aligned split, line by line."""
        return tuple(self.generator.held_out[self._split(split)])

    def distances(self) -> Distances:
        """Cognate shares, typological distances and their combination, with names."""
        lexicons = [self.generator.lexicon(code) for code in self.codes]
        grammars = [language.grammar for language in self.languages.values()]
        etyma = np.array([[lexicon.stems[word].etymon for word in CONTENT] for lexicon in lexicons])
        cognates = (etyma[:, None, :] == etyma[None, :, :]).mean(axis=2)  # [L, L]
        typology = np.array(
            [[typological_distance(one, other) for other in grammars] for one in grammars]
        )
        return Distances(self.codes, cognates, typology, (1 - cognates + typology) / 2)

    def _lines(self, split: Split, code: str) -> tuple[str, ...]:
        return self.generator.aligned(self._split(split), code)

    def _split(self, split: Split) -> Split:
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: {nearest(split, ('train', *SPLITS))}")
        return split

    def _known(self, code: str) -> str:
        if code not in self.languages:
            raise ValueError(f"no language {code!r} in this corpus; {nearest(code, self.codes)}")
        return code


def load_corpus(path: str | Path, *, seed: int | None = None) -> Corpus:
    """Load a corpus from a TOML file of families.

    Args:
        path: The file; `docs/languages.md` explains its keys.
        seed: Replaces the file's seed: other words, other sentences, the same grammars.

    Raises:
        ValueError: A key or value is wrong; the message names it and the fix.
    """
    tree = read_tree(Path(path), seed=seed)
    languages = {code: lineage.language for code, lineage in tree.lineages.items()}
    return Corpus(tree, MappingProxyType(languages), Generator(tree))


def default_corpus(*, seed: int | None = None) -> Corpus:
    """Load the default corpus: 16 languages in 4 families, from 20,000 to 400 training pairs."""
    return load_corpus(DEFAULT_PATH, seed=seed)


MANIFEST = "languages.json"
_GENERATOR = "gradvac.lab.languages"


def write_corpus(corpus: Corpus, directory: str | Path) -> list[Path]:
    """Write a corpus as text files.

    `train.en-xx.tsv` holds English and the language, tab between them; `dev.xx`, `test.xx`,
    `eval.xx` and `novel.xx` hold one sentence a line, and line i of a split is the same meaning in
    every language, English included. `languages.json` holds the facts and the distances; it is
    written last.

    Args:
        corpus: What to write.
        directory: A new or empty one, or that of an earlier export, whose files are replaced.

    Returns:
        The written files.

    Raises:
        ValueError: The directory holds something else.
    """
    directory = Path(directory)
    stale = _previous(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)  # half an export does not pass for one
    lines: dict[str, Iterable[str]] = {
        f"train.{PIVOT}-{code}.tsv": map("\t".join, corpus.pairs(code, "train"))
        for code in corpus.codes
    }
    for split in SPLITS:
        lines |= {f"{split}.{code}": said for code, said in corpus.aligned(split).items()}
    for name, content in lines.items():
        write_text(directory / name, "".join(f"{line}\n" for line in content))
    for name in stale - lines.keys():
        (directory / name).unlink(missing_ok=True)
    names = [*lines, MANIFEST]
    write_json(directory / MANIFEST, describe_corpus(corpus) | {"files": names})
    return [directory / name for name in names]


def _previous(directory: Path) -> set[str]:
    """The files of an earlier export; a directory that is not one is refused."""
    if directory.is_file():
        raise ValueError(f"directory {directory}: is a file; give a new or empty directory")
    manifest = read_json(directory / MANIFEST)
    if manifest.get("generator") == _GENERATOR:
        return set(manifest["files"])
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(
            f"directory {directory}: is not empty and not an earlier export; give a new directory"
        )
    return set()


def describe_corpus(corpus: Corpus) -> dict[str, object]:
    """The facts about a corpus, ready for JSON: languages, sizes and distances."""
    languages = {code: asdict(language) for code, language in corpus.languages.items()}
    distances = corpus.distances()
    return {
        "generator": _GENERATOR,
        "seed": corpus.tree.seed,
        "pivot": PIVOT,
        "splits": dict(corpus.tree.splits),
        "resource_levels": dict(corpus.tree.thresholds),
        "languages": languages,
        "distances": {
            "codes": list(distances.codes),
            "cognates": distances.cognates.round(6).tolist(),
            "typology": distances.typology.round(6).tolist(),
            "distance": distances.distance.round(6).tolist(),
        },
    }

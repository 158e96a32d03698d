"""The generator: draws meanings, keeps the held-out ones apart, and has every language say them.

What belongs to one language is drawn from streams with its code in the key, so neither the size of
another language nor its presence changes a letter of it. All languages draw their training meanings
from one endless pool, each taking a third of it: a size only decides how far down the pool a
language reads, and two languages share a third of what they have both read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from gradvac.lab.languages import _pivot
from gradvac.lab.languages._draw import Draw
from gradvac.lab.languages._inflection import Inflection
from gradvac.lab.languages._lexicon import Lexicon, lexicon_of
from gradvac.lab.languages._meaning import Sentence
from gradvac.lab.languages._pivot import PIVOT, Word
from gradvac.lab.languages._rendering import Speaker
from gradvac.lab.languages._sampling import Combinations, meanings
from gradvac.lab.languages._tree import SPLITS, Split, Tree

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
            english = text(_pivot.say(meaning))
            if english not in self._seen:
                self._seen.add(english)
                yield meaning, english

    def lexicon(self, code: str) -> Lexicon:
        """The lexicon of a language."""
        if code not in self._lexicons:
            self._lexicons[code] = lexicon_of(self.tree, code)
        return self._lexicons[code]

    def say(self, meaning: Sentence, code: str) -> list[Word]:
        """Put a meaning into the words of a language or of the pivot."""
        if code == PIVOT:
            return _pivot.say(meaning)
        if code not in self._speakers:
            language = self.tree.lineages[code].language
            inflection = Inflection(language.grammar, self.lexicon(code), language.script)
            self._speakers[code] = Speaker(language.grammar, inflection)
        return self._speakers[code].say(meaning)

    def aligned(self, split: Split, code: str) -> tuple[str, ...]:
        """The lines of a held-out split in one language."""
        key = (split, code)
        if key not in self._aligned:
            self._aligned[key] = tuple(text(self.say(m, code)) for m in self.held_out[split])
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
                line = text(self.say(meaning, code))
                if line not in held_out:
                    yield _Line(meaning, english, line)
            position += 1

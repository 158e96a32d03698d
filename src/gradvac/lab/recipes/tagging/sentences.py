"""Tagged sentences, and a count of what was skipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Sentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass
class Reading:
    """The sentences of a file, and what was skipped.

    Attributes:
        sentences: In order.
        skipped: What is not a sentence or word -> how often: multi-word tokens, empty nodes,
            sentences without words, document marks.
    """

    sentences: list[Sentence] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, words: list[str], tags: list[str]) -> None:
        """Add a sentence, or count that it has no words.

        Raises:
            ValueError: A word is empty or holds a tab or an end of line.
        """
        bad = [word for word in words if not word or not {"\t", "\n", "\r"}.isdisjoint(word)]
        if bad:
            raise ValueError(
                f"data: the word {bad[0]!r} (in {' '.join(words)[:60]!r}) is empty or holds a tab "
                "or an end of line; fix the data."
            )
        if words:
            self.sentences.append(Sentence(tuple(words), tuple(tags)))
        else:
            self.skipped["sentences without words"] += 1

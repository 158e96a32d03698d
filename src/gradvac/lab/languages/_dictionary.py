"""The dictionary baseline: translation word by word, with a perfect dictionary and no grammar.

What a trained model must beat. Each word is replaced by the form that most often stands for it,
found with the true word alignment; order, agreement and particles stay as they were in the source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

from gradvac.lab.languages._corpus import Corpus
from gradvac.lab.languages._pivot import PIVOT, Word
from gradvac.lab.languages._sampling import Combinations, meanings

_NUM_MEANINGS = 4000


def dictionary_translate(
    corpus: Corpus,
    code: str,
    lines: Iterable[str],
    *,
    direction: Literal["from_en", "to_en"] = "from_en",
) -> list[str]:
    """Translate lines word by word.

    Args:
        corpus: The corpus.
        code: Code of the language.
        lines: Lines to translate.
        direction: From English into the language, or the other way.

    Returns:
        The translated lines. Words that have no counterpart of their own, such as an article where
        the other language has none, are dropped; unknown words are copied.
    """
    if direction not in ("from_en", "to_en"):
        raise ValueError(f"direction {direction!r}: use 'from_en' or 'to_en'")
    ends = (PIVOT, code) if direction == "from_en" else (code, PIVOT)
    table = _most_frequent(corpus, *ends)
    translated = ([table.get(word, word) for word in line.split()] for line in lines)
    return [" ".join(word for word in words if word) for words in translated]


def _most_frequent(corpus: Corpus, source: str, target: str) -> dict[str, str]:
    """Source form -> the target form it is most often aligned with, or nothing."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    combinations = Combinations(corpus.tree.seed)
    stream = meanings(combinations, corpus.tree.seed, "dictionary")
    for meaning in islice(stream, _NUM_MEANINGS):
        pairs = _align(corpus.words(meaning, source), corpus.words(meaning, target))
        for form, aligned in pairs:
            counts[form][aligned] += 1
    # Ties go to the form seen first, so the table does not depend on hashing.
    return {form: max(counter, key=counter.__getitem__) for form, counter in counts.items()}


def _align(source: Sequence[Word], target: Sequence[Word]) -> list[tuple[str, str]]:
    """Pair the n-th word for a concept with the n-th word for it on the other side."""
    waiting: dict[str, list[str]] = defaultdict(list)
    for word in reversed(target):
        waiting[word.concept].append(word.form)
    return [
        (word.form, waiting[word.concept].pop() if waiting[word.concept] else "") for word in source
    ]

"""Universal Dependencies and WikiAnn, where they are at hand: counts that their source states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gradvac.lab.recipes.tagging.metrics import count_broken, find_spans
from gradvac.lab.recipes.tagging.readers import read_sentences
from gradvac.lab.recipes.tagging.settings import UNIVERSAL_TAGS

from .. import needs


@pytest.fixture(scope="module")
def real_data() -> Path:
    """The folder of real data; tests that need it are skipped where it is absent."""
    return needs.real_data("pos")


@pytest.mark.parametrize(
    ("lang", "sentences", "words"), [("fr", 1328, 31_901), ("te", 1025, 4980), ("ar", 700, 14_615)]
)
def test_parts_of_speech(real_data: Path, lang: str, sentences: int, words: int) -> None:
    source = "pos/{lang}/{split}.conllu.gz"
    reading = read_sentences(source, lang, "train", root=real_data, form="auto")
    assert len(reading.sentences) == sentences
    tags = Counter(tag for one in reading.sentences for tag in one.tags)
    assert tags.total() == words
    assert set(tags) <= set(UNIVERSAL_TAGS)


@pytest.mark.parametrize(
    ("lang", "sentences", "words", "entities"),
    [("sw", 755, 4385, (336, 404, 202)), ("id", 1522, 51_354, (1483, 2446, 943))],
)
def test_entities(
    real_data: Path, lang: str, sentences: int, words: int, entities: tuple[int, ...]
) -> None:
    source = "ner/{lang}/{split}.tsv.gz"
    reading = read_sentences(source, lang, "train", root=real_data, form="auto")
    assert len(reading.sentences) == sentences
    assert sum(len(one.words) for one in reading.sentences) == words
    found = Counter(span.type for one in reading.sentences for span in find_spans(one.tags))
    assert tuple(found[kind] for kind in ("PER", "LOC", "ORG")) == entities
    assert not sum(count_broken(one.tags) for one in reading.sentences)

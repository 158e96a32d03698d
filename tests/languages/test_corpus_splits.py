"""Splits: aligned line by line, apart from each other, and as large as they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from gradvac.lab.languages import SPLITS, Clause, Corpus, Sentence, Thing


def combinations(meaning: Sentence) -> Iterator[tuple[str, str]]:
    """Yield (action, patient) and (noun, property) pairs of a sentence."""
    for clause in (meaning.main, meaning.second):
        if clause is not None:
            yield from _in_clause(clause, None)


def _in_clause(clause: Clause, head: Thing | None) -> Iterator[tuple[str, str]]:
    patient = head if clause.gap == "patient" else clause.patient
    if patient is not None:
        yield clause.action, patient.concept
    if clause.quality is not None and clause.agent is not None:
        yield clause.agent.concept, clause.quality
    for thing in (clause.agent, clause.patient, clause.recipient, clause.place):
        if thing is not None:
            yield from _in_thing(thing)
    if clause.content is not None:
        yield from _in_clause(clause.content, None)


def _in_thing(thing: Thing) -> Iterator[tuple[str, str]]:
    for word in thing.properties:
        yield thing.concept, word
    for inner in (thing.owner, thing.also):
        if inner is not None:
            yield from _in_thing(inner)
    if thing.relative is not None:
        yield from _in_clause(thing.relative, thing)


def test_sizes(corpus: Corpus) -> None:
    for split in SPLITS:
        lines = corpus.aligned(split)
        assert list(lines) == ["en", *corpus.codes]
        assert {len(of_code) for of_code in lines.values()} == {corpus.tree.splits[split]}
    for code in ("qsm", "qtm"):
        assert len(corpus.pairs(code, "train")) == corpus.languages[code].train


def test_aligned_lines_say_the_same_meaning(corpus: Corpus) -> None:
    lines = corpus.aligned("eval")
    for row, meaning in enumerate(corpus.meanings("eval")):
        for code in ("en", "qsd", "qpl"):
            assert lines[code][row] == corpus.render(meaning, code)
    assert corpus.pairs("qsd", "eval") == list(zip(lines["en"], lines["qsd"], strict=True))


@pytest.mark.parametrize("code", ["qso", "qtu", "qnm", "qpt"])
def test_no_held_out_line_is_in_training_on_either_side(corpus: Corpus, code: str) -> None:
    train = corpus.resize({code: 3000}).pairs(code, "train")
    for side, of_code in enumerate(("en", code)):
        trained = {pair[side] for pair in train}
        for split in SPLITS:
            assert not trained & set(corpus.aligned(split)[of_code])
    assert len({english for english, _ in train}) == len(train)


def test_no_leak_where_a_language_says_two_meanings_alike(
    load_text: Callable[[str], Corpus],
) -> None:
    """Without articles "a dog" and "the dog" are the same words: such a pair would be a leak."""
    corpus = load_text(
        """
        [families.bare]
        consonants = "p t k s m n l r"
        vowels = "a i u e"
        article = "none"
        [families.bare.branches.only.languages.qaa]
        train = 4000
        """
    )
    held_out = {line for split in SPLITS for line in corpus.aligned(split)["qaa"]}
    trained = {line for _, line in corpus.pairs("qaa", "train")}
    pool = {corpus.render(meaning, "qaa") for meaning, _ in corpus.generator._pool}
    assert held_out & pool  # it does happen
    assert not held_out & trained


def test_held_out_splits_do_not_overlap(corpus: Corpus) -> None:
    lines = [line for split in SPLITS for line in corpus.aligned(split)["en"]]
    assert len(set(lines)) == len(lines)


def test_training_samples_overlap_but_differ(corpus: Corpus) -> None:
    ours = {english for english, _ in corpus.pairs("qsm", "train")}
    theirs = {english for english, _ in corpus.pairs("qtb", "train")}
    assert 0.2 < len(ours & theirs) / len(ours) < 0.45


def test_novel_sentences_have_combinations_that_no_other_sentence_has(corpus: Corpus) -> None:
    known = {
        pair
        for split in ("dev", "test", "eval")
        for meaning in corpus.meanings(split)
        for pair in combinations(meaning)
    }
    generator = corpus.generator
    generator.training("qso", 3000)
    known |= {pair for meaning, _ in generator._pool for pair in combinations(meaning)}
    words = {word for pair in known for word in pair}
    for meaning in corpus.meanings("novel"):
        new = [pair for pair in combinations(meaning) if pair not in known]
        assert new, corpus.render(meaning, "en")
    parts = {w for m in corpus.meanings("novel") for pair in combinations(m) for w in pair}
    assert parts <= words  # each part is known, only together they are new


def test_sentences_have_a_sensible_length(corpus: Corpus) -> None:
    lengths = [len(line.split()) for line in corpus.aligned("test")["en"]]
    assert 8 < sum(lengths) / len(lengths) < 11
    assert min(lengths) >= 2
    assert max(lengths) <= 35


def test_some_words_are_common_and_some_are_rare(corpus: Corpus) -> None:
    counts = Counter(" ".join(corpus.aligned("test")["en"]).split())
    common, rare = ("man", "woman", "child", "friend"), ("miller", "nurse", "painter", "judge")
    assert sum(counts[word] for word in common) > 2.5 * sum(counts[word] for word in rare)
    small = set(" ".join(english for english, _ in corpus.pairs("qtm", "train")).split())
    missing = [word for word in counts if word not in small]
    assert 0.05 < len(missing) / len(counts) < 0.5


def test_no_language_says_different_things_alike(corpus: Corpus) -> None:
    """Every language tells apart what English tells apart, so both directions can be learnt."""
    for code in corpus.codes:
        english_of: dict[str, str] = {}
        alike = 0
        for split in ("test", "novel"):
            for english, line in corpus.pairs(code, split):
                alike += english_of.setdefault(line, english) != english
        assert alike <= 2, code


def test_representation_is_short(corpus: Corpus) -> None:
    assert repr(corpus.select(["qso", "qtm"])) == "Corpus(seed=0, languages=qso, qtm)"


def test_wrong_names_are_answered_with_the_nearest(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"'tests'.*'test'"):
        corpus.aligned("tests")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'qsoo'.*'qso'"):
        corpus.pairs("qsoo", "train")
    with pytest.raises(ValueError, match=r"train\['qso'\] = -1"):
        corpus.resize({"qso": -1})

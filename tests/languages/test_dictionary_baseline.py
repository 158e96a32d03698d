"""The dictionary baseline knows the words and not the grammar."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradvac.lab.languages import Corpus, Word, dictionary_translate
from gradvac.lab.languages.corpus import _align


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU on words, without smoothing; equal to sacreBLEU's where it counts."""
    matches, totals, lengths = Counter[int](), Counter[int](), [0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        ours, theirs = hypothesis.split(), reference.split()
        lengths[0] += len(ours)
        lengths[1] += len(theirs)
        for n in range(1, 5):
            grams, others = (
                Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
                for words in (ours, theirs)
            )
            matches[n] += (grams & others).total()
            totals[n] += grams.total()
    if not all(matches[n] for n in range(1, 5)):
        return 0.0
    brevity = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(brevity + sum(math.log(matches[n] / totals[n]) for n in range(1, 5)) / 4)


def test_bleu_of_the_test_agrees_with_sacrebleu(corpus: Corpus) -> None:
    import sacrebleu

    lines = corpus.aligned("test")
    translated = dictionary_translate(corpus, "qso", lines["en"])
    theirs = sacrebleu.corpus_bleu(translated, [list(lines["qso"])], tokenize="none").score
    assert bleu(translated, lines["qso"]) == pytest.approx(theirs, abs=1e-6)


def test_dictionary_scores_low_in_every_family(corpus: Corpus) -> None:
    lines = corpus.aligned("test")
    scores = {
        code: bleu(dictionary_translate(corpus, code, lines["en"]), lines[code])
        for code in corpus.codes[2::4]
    }
    page = (Path(__file__).parents[2] / "docs" / "languages.md").read_text(encoding="utf-8")
    for code, score in scores.items():
        assert f"| `{code}` | {score:.1f} |" in page, (code, score)
    assert max(scores.values()) <= 15, scores


@pytest.mark.parametrize("code", ["qso", "qtu", "qnk", "qpl"])
def test_dictionary_knows_the_words(corpus: Corpus, code: str) -> None:
    """Into English, most content words are right: what is missing is the grammar."""
    lines = corpus.aligned("test")
    translated = dictionary_translate(corpus, code, lines[code], direction="to_en")
    found = total = 0
    for hypothesis, reference in zip(translated, lines["en"], strict=True):
        common = Counter(hypothesis.split()) & Counter(reference.split())
        found += common.total()
        total += len(hypothesis.split())
    assert found / total > 0.7


def test_words_are_aligned_by_concept_and_turn() -> None:
    english = [Word("the", "definite"), Word("man", "man"), Word("to", "to"), Word("a", "definite")]
    other = [Word("la", "definite"), Word("lo", "definite"), Word("om", "man")]
    assert _align(english, other) == [("the", "la"), ("man", "om"), ("to", ""), ("a", "lo")]


def test_unknown_words_are_copied_and_wrong_direction_is_refused(corpus: Corpus) -> None:
    assert dictionary_translate(corpus, "qso", ["zzz"]) == ["zzz"]
    with pytest.raises(ValueError, match="'from_en' or 'to_en'"):
        dictionary_translate(corpus, "qso", [], direction="en")  # type: ignore[arg-type]

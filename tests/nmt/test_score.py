"""TranslationScores: sacreBLEU's numbers, our grouping."""

from __future__ import annotations

import io
import itertools

import pytest
import sacrebleu
from rich.console import Console

from gradvac.lab.recipes.nmt import Score, TranslationScores, score_lines
from gradvac.lab.recipes.nmt.score import bleu_p_value

REFERENCES = ["the old man sees a dog", "two women are singing in the garden", "it rains today"]
LINES = ["the old man saw a dog", "two women sing in the garden", "it is raining today"]


def test_numbers_and_signatures_are_sacrebleus() -> None:
    score = score_lines(LINES, REFERENCES, "en")
    assert score.bleu == sacrebleu.corpus_bleu(LINES, [REFERENCES]).score
    assert score.chrf == sacrebleu.corpus_chrf(LINES, [REFERENCES], word_order=2).score
    assert "tok:13a" in score.bleu_signature
    assert "nw:2" in score.chrf_signature
    assert f"version:{sacrebleu.__version__}" in score.bleu_signature


@pytest.mark.parametrize(
    ("code", "tokenizer"),
    [
        *(("zh", "zh"), ("zh_tw", "zh"), ("zho_Hant", "zh"), ("cmn", "zh"), ("yue", "zh")),
        *(("ja", "char"), ("jpn", "char"), ("tha", "char"), ("my_mm", "char"), ("bod", "char")),
        *(("ko", "13a"), ("fr", "13a"), ("qso", "13a")),
    ],
)
def test_languages_without_blanks_are_cut_otherwise(code: str, tokenizer: str) -> None:
    line = "\u6211\u559c\u6b22\u8fd9\u672c\u4e66"
    score = score_lines([line], [line], code)
    assert f"|tok:{tokenizer}|" in score.bleu_signature
    assert score.bleu == pytest.approx(0 if tokenizer == "13a" else 100)  # 13a sees one word


def test_every_line_needs_its_reference() -> None:
    with pytest.raises(ValueError, match=r"2, .*3 references"):
        score_lines(LINES[:2], REFERENCES, "en")
    with pytest.raises(ValueError, match="at least one"):
        score_lines([], [], "en")


def test_p_values_are_two_sided() -> None:
    """Against all ways to deal the sentences to the two systems, counted one by one."""
    references = [f"{line} number {n} of the list" for n in range(2) for line in REFERENCES]
    one = [
        " ".join(reversed(line.split())) if n in (0, 4) else line[:-9] + line[-9:]
        for n, line in enumerate(references)
    ]
    other = [line.replace("number", "nr") for line in references]

    def difference(swapped: tuple[bool, ...]) -> float:
        sides = [(b, a) if swap else (a, b) for a, b, swap in zip(one, other, swapped, strict=True)]
        scores = [
            sacrebleu.corpus_bleu(list(side), [references]).score
            for side in zip(*sides, strict=True)
        ]
        return abs(scores[0] - scores[1])

    real = difference((False,) * len(references))
    dealt = [difference(swapped) for swapped in itertools.product((False, True), repeat=6)]
    expected = sum(found > real + 1e-9 for found in dealt) / len(dealt)
    assert 0.1 < expected < 0.9
    assert bleu_p_value(one, other, references, "en") == pytest.approx(expected, abs=0.04)
    assert bleu_p_value(other, one, references, "en") == pytest.approx(expected, abs=0.04)


def test_a_real_difference_is_told_from_none() -> None:
    references = [f"{line} number {n} of the long list" for n in range(30) for line in REFERENCES]
    worse = [" ".join(reversed(line.split())) for line in references]
    assert bleu_p_value(references, worse, references, "en") < 0.01
    assert bleu_p_value(references, references, references, "en") > 0.5


def test_means_by_level_and_table() -> None:
    def score(bleu: float) -> Score:
        return Score(bleu, bleu + 10, 5, "b", "c")

    by_task = {"en-fr": score(30.0), "en-cs": score(20.0), "en-hi": score(10.0)}
    levels = {"en-fr": "high", "en-cs": "high", "en-hi": "low"}
    scores = TranslationScores("runs/x", "test", "best", by_task, levels, "rule:sum", 7)
    assert scores.means() == {"high": (25.0, 35.0), "low": (10.0, 20.0), "all": (20.0, 30.0)}
    assert scores.to_dict()["means"]["high"] == {"bleu": 25.0, "chrf": 35.0}
    console = Console(file=io.StringIO(), width=120)
    console.print(scores.table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in shown for text in ("en-hi", "25.0", "30.0"))
    assert scores.notes()[:2] == ["BLEU b", "chrF++ c"]
    assert "7 of the sources" in scores.notes()[2]


def test_every_signature_is_told_with_its_tasks() -> None:
    by_task = {"en-zh": Score(1, 2, 5, "z", "c"), "en-fr": Score(3, 4, 5, "f", "c")}
    scores = TranslationScores(
        "runs/x", "test", "best", by_task, dict.fromkeys(by_task, "low"), "", 0
    )
    assert scores.notes() == ["BLEU f  (en-fr)", "BLEU z  (en-zh)", "chrF++ c"]

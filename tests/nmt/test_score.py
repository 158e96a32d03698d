"""TranslationScores: sacreBLEU's numbers, our grouping."""

from __future__ import annotations

import io

import pytest
import sacrebleu
from rich.console import Console

from gradvac.lab.recipes.nmt import Score, TranslationScores, score_lines

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

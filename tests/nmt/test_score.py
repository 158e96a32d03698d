"""TranslationScores: sacreBLEU's numbers, our grouping."""

from __future__ import annotations

import io
import itertools
import sys
from functools import partial
from pathlib import Path

import pytest
import sacrebleu
import torch
from rich.console import Console

from gradvac.lab.experiments import compare_runs
from gradvac.lab.recipes.common.scoring import Scorer, score_run
from gradvac.lab.recipes.nmt import Score, TranslationScores, score_lines
from gradvac.lab.recipes.nmt.comet import Text, open_comet
from gradvac.lab.recipes.nmt.data_warnings import in_other_languages
from gradvac.lab.recipes.nmt.score import SCORE_FORMULAS, judge_task
from gradvac.lab.training import RunConfig

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
    means = {"high": 25.0, "low": 10.0, "all": 20.0}
    assert scores.to_dict()["means"]["BLEU"] == means
    assert scores.to_dict()["means"]["chrF++"] == {
        level: bleu + 10 for level, bleu in means.items()
    }
    console = Console(file=io.StringIO(), width=120)
    console.print(scores.table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in shown for text in ("en-hi", "25.0", "30.0"))
    assert scores.notes()[:2] == ["BLEU b", "chrF++ c"]
    assert "7 of the sources" in scores.notes()[-1]


def test_every_signature_is_told_with_its_tasks() -> None:
    by_task = {"en-zh": Score(1, 2, 5, "z", "c"), "en-fr": Score(3, 4, 5, "f", "c")}
    scores = TranslationScores(
        "runs/x", "test", "best", by_task, dict.fromkeys(by_task, "low"), "", 0
    )
    assert scores.notes()[:3] == ["BLEU f  (en-fr)", "BLEU z  (en-zh)", "chrF++ c"]


FRENCH = [
    "elle a dit qu'ils reviendraient après la guerre",
    "il ne voulait plus en parler avec nous",
    "nous avons mangé du pain et du fromage",
    "les enfants jouent dans le jardin de leur grand-mère",
]


def test_translations_in_the_wrong_language_are_counted() -> None:
    """Beside the same guess at the references; nobody knows a constructed language."""
    english = ["she said that they would come back after the war", ""]
    score = score_lines([*FRENCH[:2], *english], FRENCH, "fra")
    assert (score.wrong_language, score.wrong_references) == (25.0, 0.0)  # an empty line is in none
    unknown = score_lines(FRENCH, FRENCH, "qso")
    assert (unknown.wrong_language, unknown.wrong_references) == (None, None)
    by_task = {"en-fr": score, "en-qso": unknown}
    levels = dict.fromkeys(by_task, "low")
    scores = TranslationScores("runs/x", "test", "best", by_task, levels, "", 0)
    wrong = {one.metric: one for one in scores.by_metric()}["wrong language"]
    assert wrong.by_task == {"en-fr": 25.0}
    assert not wrong.higher_is_better
    assert wrong.by_level() == {"low": 25.0, "all": 25.0}
    console = Console(file=io.StringIO(), width=120)
    console.print(scores.table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "of references" in shown
    assert any("no number for en-qso" in note for note in scores.notes())
    alone = TranslationScores("runs/x", "test", "best", {"en-qso": unknown}, levels, "", 0)
    assert "wrong language" not in [one.metric for one in alone.by_metric()]


def test_runs_are_compared_by_it(tmp_path: Path) -> None:
    """On the tasks that have a number, where less is better."""
    english = ["she said that they would come back after the war"] * 2
    said = {"joint": [*FRENCH[:2], *english], "gradvac": FRENCH}
    for name, seed in itertools.product(said, range(2)):
        run = tmp_path / name / f"seed-{seed}"
        run.mkdir(parents=True)
        rule = "sum" if name == "joint" else name
        (run / "config.toml").write_text(f'[train]\nseed = {seed}\n[align]\nrule = "{rule}"\n')
        scorer = Scorer(
            ["en-fr", "en-qso"],
            lambda task, name=name: judge_task(said[name], FRENCH, task[3:]),  # type: ignore[misc]
            SCORE_FORMULAS,
            partial(TranslationScores, num_cut=0),
        )
        score_run(run, RunConfig, lambda *_, scorer=scorer: scorer)
    found = compare_runs([tmp_path], metric="wrong language")
    (row,) = found.rows
    assert {method: cell.mean for method, cell in row.cells.items()} == {
        "joint": 50.0,
        "gradvac": 0.0,
    }
    assert not row.higher_is_better
    assert {row.name for row in compare_runs([tmp_path]).rows} == {"all", "en-fr", "en-qso"}


@pytest.mark.parametrize("code", ["nb", "no", "fil", "tl", "zh_tw", "heb"])
def test_the_guesser_knows_languages_by_other_codes(code: str) -> None:
    assert in_other_languages(["ord"], code) is not None


STUB = """#!{python}
import json, sys
options = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
sources, lines, references = ([*open(options[key], encoding="utf-8")] for key in ("-s", "-t", "-r"))
if options["--model"] == "broken":
    sys.exit("no such model on the hub")
rows = [{{"COMET": 0.8 if a == b else 0.5}} for a, b in zip(lines, references, strict=True)]
assert len(sources) == len(lines)
json.dump({{options["-t"]: rows[options["--model"] == "short" :]}}, open(options["--to_json"], "w"))
"""


def test_comet_runs_as_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with comet-score's options and files; all tasks go through one process."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"comet: .*pipx install unbabel-comet"):
        open_comet("Unbabel/wmt22-comet-da", torch.device("cpu"))
    (tmp_path / "comet-score").write_text(STUB.format(python=sys.executable))
    (tmp_path / "comet-score").chmod(0o755)
    with pytest.raises(ValueError, match=r"comet: there is no file missing\.ckpt"):
        open_comet("missing.ckpt", torch.device("cpu"))
    texts = {
        "en-fr": Text(["one\rline", "two"], ["un", "deux"], ["un", "trois"]),
        "en-de": Text(["x"], [""], ["y"]),
    }
    scores = open_comet("some/model", torch.device("cpu"))(texts)
    assert {task: found.tolist() for task, found in scores.items()} == {
        "en-fr": [0.8, 0.5],
        "en-de": [0.5],
    }
    for model, reason in (("broken", "code 1: no such model"), ("short", "2 of 3 sentences")):
        with pytest.raises(ValueError, match=reason):
            open_comet(model, torch.device("cpu"))(texts)

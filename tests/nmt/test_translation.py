"""The whole way: a tiny model must learn a toy task, translate and be scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sacrebleu

from gradvac.lab.recipes.nmt import Translator, score_translation
from gradvac.lab.recipes.nmt.recipe import measure_translation
from gradvac.lab.runs import RunFolder, read_scores


def text(run: Path, name: str) -> list[str]:
    folder = run.parent / "prepared" / "text"
    return (folder / name).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("weights", ["best", "last", "averaged"])
def test_the_toy_languages_are_learned(toy_run: Path, weights: str) -> None:
    scores = score_translation(toy_run, weights=weights)
    least = {"best": 98.0, "last": 98.0, "averaged": 60.0}[weights]
    assert {task: score.bleu > least for task, score in scores.by_task.items()} == {
        "en-xx": True,
        "en-yy": True,
    }


def test_scores_are_sacrebleus_own_and_kept(toy_run: Path) -> None:
    scores = score_translation(toy_run, split="dev", max_lines=40)
    for task, target in (("en-xx", "xx"), ("en-yy", "yy")):
        lines = (toy_run / "scores" / f"dev.best.{task}.txt").read_text().splitlines()
        references = text(toy_run, f"dev.{task}.{target}")[:40]
        score = scores.by_task[task]
        assert score.bleu == sacrebleu.corpus_bleu(lines, [references]).score
        assert score.chrf == sacrebleu.corpus_chrf(lines, [references], word_order=2).score
        assert score.num_lines == 40
    saved = json.loads((toy_run / "scores" / "dev.best.json").read_text())
    assert saved["details"]["by_task"]["en-xx"]["bleu"] == scores.by_task["en-xx"].bleu
    bleu, chrf = read_scores(RunFolder(toy_run).scores_of("dev", "best"))
    assert (bleu.metric, chrf.metric) == ("BLEU", "chrF++")
    assert bleu.by_task == {task: score.bleu for task, score in scores.by_task.items()}
    assert "dev set, best weights; BLEU nrefs:1" in bleu.note
    signature = saved["details"]["signature"]
    assert signature.startswith("rule:gradvac|")
    assert all(signature.count(f"{name}:") == 1 for name in ("engine", "seed", "data"))
    assert "signature:" not in signature  # it would hold itself
    assert set(saved["details"]["means"]["BLEU"]) == {"high", "all"}


def test_lines_come_back_in_order_whatever_their_length(toy_run: Path) -> None:
    translator = Translator.from_run(toy_run)
    lines = ["ba de fi go hu", "ka le mi", "no pu ba de", "", "go go go hu"]
    expected = [" ".join(reversed(line.split())) for line in lines]
    assert translator.translate(lines, "xx") == expected
    assert [found[0].text for found in translator.stream(lines, "xx", window=2)] == expected
    assert translator.counts.empty == 2


def test_beams_and_batches_do_not_change_a_sure_translation(toy_run: Path) -> None:
    lines = text(toy_run, "test.en-yy.en")
    plain = Translator.from_run(toy_run).translate(lines, "yy")
    for override in ("decoding.beams=1", "decoding.memory=1e-9", "decoding.beams=5"):
        assert Translator.from_run(toy_run, overrides=[override]).translate(lines, "yy") == plain


@pytest.mark.parametrize("override", ["optimizer.lr=3", "align.rule=sum", "sampling.temperature=2"])
def test_settings_of_training_are_refused_when_it_is_over(toy_run: Path, override: str) -> None:
    for use in (Translator.from_run, score_translation, measure_translation):
        with pytest.raises(ValueError, match=f"{override}: .*leave it out"):
            use(toy_run, overrides=[override])


def test_long_lines_are_cut_and_counted(toy_run: Path) -> None:
    translator = Translator.from_run(toy_run)
    found = translator.translate(["ba " * 100, "ba de fi"], "yy")
    assert found[1] == "AB ED IF"
    assert translator.counts.cut == 1
    assert translator.counts.lines == 2


def test_unknown_target_language_names_those_trained(toy_run: Path) -> None:
    with pytest.raises(ValueError, match=r"'fr' .*xx, yy"):
        Translator.from_run(toy_run).translate(["ba"], "fr")
    with pytest.raises(ValueError, match="'en'"):  # a token, but no task
        Translator.from_run(toy_run).translate(["ba"], "en")


def test_a_run_translates_without_the_prepared_data(toy_run: Path) -> None:
    translator = Translator.from_run(toy_run, overrides=["data.prepared=/nowhere"])
    assert translator.translate(["ba de fi"], "xx") == ["fi de ba"]
    with pytest.raises(ValueError, match=r"data\.prepared: /nowhere"):
        score_translation(toy_run, overrides=["data.prepared=/nowhere"])

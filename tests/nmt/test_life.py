"""The life of a model: started from another run, with a language more, and scored on any file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gradvac.lab.recipes.nmt import (
    NmtConfig,
    Translator,
    Vocabulary,
    score_files,
    score_translation,
    train_translation,
)
from gradvac.lab.recipes.nmt.vocabulary import extend
from gradvac.lab.training import Display, checkpoint, config
from gradvac.utils.hints import log_to

SHORT = ["train.max_steps=1", "train.validate_every=0", "train.checkpoint_every=1"]


def child(toy_run: Path, *overrides: str) -> NmtConfig:
    given = [f"model.init={toy_run}", *SHORT, *overrides]
    return config.load(NmtConfig, toy_run / "config.toml", given)


def test_a_run_starts_from_another_and_may_change_what_it_likes(
    toy_run: Path, tmp_path: Path, quiet: Display
) -> None:
    settings = child(toy_run, "optimizer.lr=1e-9", "align.rule=pcgrad", "model.init_weights=last")
    assert settings.data.vocabulary.model == toy_run / "vocabulary.model"
    train_translation(settings, tmp_path / "child", display=quiet)
    old, new = (checkpoint.weights(run, "last") for run in (toy_run, tmp_path / "child"))
    for name, value in old.items():
        torch.testing.assert_close(new[name], value, rtol=0, atol=1e-7)
    again = config.load(NmtConfig, tmp_path / "child" / "config.toml")
    assert again.model.init == toy_run  # it names its parent
    signatures = [
        json.loads((run / "signature.json").read_text()) for run in (toy_run, tmp_path / "child")
    ]
    assert signatures[0]["data"] != signatures[1]["data"]


def test_a_language_is_added_and_one_dropped(
    toy_run: Path, toy_folder: Path, tmp_path: Path, quiet: Display
) -> None:
    for split in ("train", "dev", "test"):
        rows = (toy_folder / f"{split}.en-yy.tsv").read_text().splitlines()[:80]
        (tmp_path / f"{split}.en-zz.tsv").write_text("\n".join(rows) + "\n")
    settings = child(
        toy_run,
        'data.languages=["yy", "zz"]',
        f"data.train={{yy = '{toy_folder}/train.en-yy.tsv', zz = '{tmp_path}/train.en-zz.tsv'}}",
        f"data.dev={{yy = '{toy_folder}/dev.en-yy.tsv', zz = '{tmp_path}/dev.en-zz.tsv'}}",
        f"data.test={{yy = '{toy_folder}/test.en-yy.tsv', zz = '{tmp_path}/test.en-zz.tsv'}}",
        "data.root=/",
        f"data.prepared={tmp_path / 'prepared'}",
        "optimizer.lr=1e-9",
    )
    train_translation(settings, tmp_path / "child", display=quiet)
    old, new = (Vocabulary.load(r / "vocabulary.model") for r in (toy_run, tmp_path / "child"))
    assert new.pieces() == [*old.pieces(), "<2zz>"]
    assert new.tag("zz") == len(old)
    translator = Translator.from_run(tmp_path / "child", weights="last")
    assert translator.translate(["ba de fi go"], "yy") == ["AB ED IF OG"]  # nothing is forgotten
    assert translator.targets == ("yy", "zz")
    assert new.tag("zz") in new.unspeakable
    before, after = (checkpoint.weights(r, "last") for r in (toy_run, tmp_path / "child"))
    assert len(after["embedding.weight"]) == len(before["embedding.weight"]) + 1


def test_tags_are_appended_once(toy_run: Path) -> None:
    model = (toy_run / "vocabulary.model").read_bytes()
    assert extend(model, ["en", "xx", "yy"]) == model
    longer = extend(model, ["yy", "qq"])
    assert Vocabulary(longer).languages == (*Vocabulary(model).languages, "qq")
    assert extend(longer, ["qq"]) == longer
    text = ["ba de fi go"]
    assert Vocabulary(longer).encode(text) == Vocabulary(model).encode(text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.size=small"], r"model\.init: .*model\.width = 64, .*256"),
        (["model.norm_first=false"], r"model\.norm_first = True, .*False"),
        (["model.init_weights=17"], "17; .*averaged, best, last"),
        (["model.init=/nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_a_parent_is_refused(
    toy_run: Path, tmp_path: Path, quiet: Display, overrides: list[str], message: str
) -> None:
    late = f"data.prepared={tmp_path / 'prepared'}"
    with pytest.raises((ValueError, checkpoint.CheckpointError), match=message):
        train_translation(child(toy_run, late, *overrides), tmp_path / "child", display=quiet)
    assert not (tmp_path / "prepared").exists()  # told before hours of preparation


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"optimizer": {"warmup_steps": 8}},
            "warmup_steps = 8 is not less than train.max_steps = 8",
        ),
        (
            {"data": {"limit": {"yy": 1}}, "sampling": {"temperature": 100.0}},
            "sees more than 100 times en-yy",
        ),
        ({}, "never sees all of en-xx"),
    ],
)
def test_schedules_that_cannot_work_are_told_before(
    toy_config: Callable[..., NmtConfig],
    tmp_path: Path,
    sections: dict[str, dict[str, Any]],
    message: str,
) -> None:
    shown = Display(Console(file=io.StringIO(), width=300))
    settings = toy_config(**{"train": {"max_steps": 8, "validate_every": 0}, **sections})
    train_translation(settings, tmp_path / "run", display=shown)
    file = shown.console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    assert message in text
    assert text.index(message) < text.index("Finished")


def test_any_file_is_scored_as_a_set_is(toy_run: Path, tmp_path: Path) -> None:
    scores = score_translation(toy_run, overrides=["decoding.beams=3", "decoding.cuda_graph=false"])
    notes = [one.note for one in scores.by_metric()]
    assert all(note.startswith("test set, best weights, decoding.beams = 3; ") for note in notes)
    whole = score_translation(toy_run).by_task["en-yy"]
    text = toy_run.parent / "prepared" / "text"
    paths = [text / "test.en-yy.en", text / "test.en-yy.yy"]
    said: list[str] = []
    with log_to(said.append):
        found, lines = score_files(toy_run, *paths, direction="en-yy")
    assert found == whole
    assert len(lines) == found.num_lines
    assert said == []
    with log_to(said.append):
        score_files(toy_run, *paths, direction="xx-yy")
    assert said == ["xx-yy was not trained; this run knows en-xx, en-yy."]
    (tmp_path / "short").write_text("ba\n")
    with pytest.raises(ValueError, match=r"1 lines, .*60"):
        score_files(toy_run, paths[0], tmp_path / "short", direction="en-yy")
    (tmp_path / "holes").write_text("AB\n\nAB\n \n\n")
    (tmp_path / "five").write_text("ba\nba\nba\nba\n\n")
    with pytest.raises(ValueError, match=r"2 of 5 lines, .*line 2"):
        score_files(toy_run, tmp_path / "five", tmp_path / "holes", direction="en-yy")
    (tmp_path / "blank").write_text("\n\n")
    with pytest.raises(ValueError, match=r"source: .*blank .*no line"):
        score_files(toy_run, tmp_path / "blank", tmp_path / "blank", direction="en-yy")


def test_sources_by_language_name_them_all(toy_config: Callable[..., NmtConfig]) -> None:
    with pytest.raises(ValueError, match="none for en-yy"):
        toy_config(data={"train": {"xx": "train.en-xx.tsv"}})
    with pytest.raises(ValueError, match="'qq'"):
        toy_config(data={"dev": {"xx": "a", "yy": "b", "qq": "c"}})
    both = toy_config(data={"train": {"xx": ["a.tsv", "b.tsv"], "en-yy": "c.tsv"}}).data
    assert both.sources_of("train", "en-xx") == ["a.tsv", "b.tsv"]
    assert both.sources_of("train", "en-yy") == ["c.tsv"]

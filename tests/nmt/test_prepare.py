"""Preparing data: complete, accounted for, and only once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradvac.lab.recipes.nmt import (
    NmtConfig,
    PreparedCorpus,
    open_corpus,
    prepare_corpus,
    train_translation,
)
from gradvac.lab.recipes.nmt.settings import DataConfig
from gradvac.lab.training import Display
from gradvac.utils.hints import log_to

Build = Callable[..., NmtConfig]


class Log(list[str]):
    def steps(self, *starts: str) -> list[str]:
        return [line for line in self if line.startswith(starts or ("Clean", "Learn", "Token"))]


def run(config: DataConfig) -> tuple[PreparedCorpus, Log]:
    log = Log()
    with log_to(log.append):
        return prepare_corpus(config), log


def test_tokens_are_the_clean_text(toy_config: Build) -> None:
    prepared, _ = run(toy_config().data)
    assert prepared.sizes["train"]["en-yy"] == 300
    assert prepared.sizes["test"] == {"en-xx": 60, "en-yy": 60}
    english, backwards = prepared.text("train", "en-xx")
    assert [" ".join(reversed(line.split())) for line in english] == backwards
    tokens = prepared.tokens("train", "en-xx")[1]
    read = [tokens.gather(np.array([n])).tokens.tolist() for n in range(20)]
    assert list(map(prepared.vocabulary.decode, read)) == backwards[:20]


def test_a_task_is_a_pair_or_a_pair_turned_round(toy_config: Build) -> None:
    prepared, _ = run(toy_config().data)
    assert prepared.task_text("dev", "xx-en") == prepared.text("dev", "en-xx")[::-1]
    with pytest.raises(ValueError, match=r"'novel'.*train, dev, test"):
        prepared.text("novel", "en-xx")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_call_does_nothing(toy_config: Build, processes: int) -> None:
    config = toy_config(data={"processes": processes}).data
    first, _ = run(config)
    before = {path: path.stat().st_mtime_ns for path in config.prepared.rglob("*.bin")}
    second, log = run(config)
    assert log.steps() == []
    assert second.signature == first.signature
    assert {path: path.stat().st_mtime_ns for path in config.prepared.rglob("*.bin")} == before


def test_only_what_depends_on_a_change_is_done_again(toy_config: Build) -> None:
    run(toy_config().data)
    changed = toy_config(data={"max_tokens": 12}).data
    _, log = run(changed)
    assert log.steps() == ["Tokenising train en-xx", "Tokenising train en-yy"]
    _, log = run(toy_config(data={"limit": {"yy": 200}}).data)
    assert log.steps("Clean") == ["Cleaning train en-yy"]
    assert log.steps("Learn")


def test_changed_text_is_noticed_and_touched_text_is_not(toy_config: Build, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for split in ("train", "dev", "test"):
        lines = [f"{split} line {n}\t{split} ligne {n}" for n in range(60)]
        (root / f"{split}.en-xx.tsv").write_text("\n".join(lines) + "\n")
    config = toy_config(data={"root": str(root), "languages": ["xx"], "limit": {}}).data
    first, _ = run(config)
    path = root / "train.en-xx.tsv"
    path.touch()
    assert run(config)[1].steps() == []
    path.write_text(path.read_text() + "one more\tune de plus\n")
    second, log = run(config)
    assert "Cleaning train en-xx" in log
    assert first.signature != second.signature


def test_an_interrupted_step_is_done_again(
    toy_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config().data
    whole, _ = run(config)
    for file in config.prepared.rglob("*"):
        if file.is_file():
            file.unlink()

    def fail(*args: object, **kwargs: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradvac.lab.recipes.nmt.preparation.learn", fail)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert PreparedCorpus.open(config) is None
    monkeypatch.undo()
    resumed, log = run(config)
    assert log.steps("Clean") == []
    assert resumed.signature == whole.signature


def test_prepared_data_open_without_the_text_they_came_from(toy_config: Build) -> None:
    prepared, _ = run(toy_config().data)
    elsewhere = toy_config(data={"root": "/nowhere", "directions": "any-to-en"}).data
    log = Log()
    with log_to(log.append):
        assert open_corpus(elsewhere).signature == prepared.signature
    assert log == []


def test_long_pairs_are_dropped_from_training_alone_and_counted(toy_config: Build) -> None:
    prepared, _ = run(toy_config(data={"max_tokens": 12}).data)
    report = prepared.reports()["train en-xx"]
    assert report.dropped["too many tokens"] > 0
    assert report.num_read == report.num_kept + report.dropped.total()
    tokens = prepared.tokens("train", "en-xx")
    assert len(tokens[0]) == report.num_kept
    assert max(side.lengths(np.arange(len(side))).max() for side in tokens) <= 12
    assert prepared.sizes["dev"]["en-xx"] == 60


def test_training_that_prepares_its_data_says_what_was_dropped(toy_config: Build) -> None:
    log = Log()
    with log_to(log.append):
        prepared = open_corpus(toy_config(data={"max_tokens": 12}).data)
    reports = prepared.reports()
    assert reports["train en-xx"].dropped["too many tokens"] > 0
    told = [line for line in log if line.startswith("train en-xx: ")]
    assert told == [f"train en-xx: {reports['train en-xx']}"]
    assert "pairs kept; dropped: 137 too many tokens, 63 identical sides." in told[0]
    assert not any(line.startswith("dev ") for line in log)


@pytest.mark.parametrize("num_wrong", [3, 4])
def test_text_in_another_encoding_is_refused_and_a_stray_line_counted(
    toy_config: Build, tmp_path: Path, num_wrong: int
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for split in ("train", "dev", "test"):
        lines = [f"{split} line {n}\t{split} ligne {n}\n".encode() for n in range(300)]
        if split == "train":
            for place in range(num_wrong):
                lines[70 * place] = b"summer\t\xe9t\xe9\n"
        (root / f"{split}.en-xx.tsv").write_bytes(b"".join(lines))
    config = toy_config(data={"root": str(root), "languages": ["xx"], "limit": {}}).data
    if num_wrong == 3:
        assert run(config)[0].reports()["train en-xx"].dropped == {"not UTF-8": 3}
        return
    with pytest.raises(ValueError, match=r"4 of 300 .*iconv -f LATIN1"):
        run(config)


def test_training_lines_of_any_pair_that_are_held_out_are_removed(
    toy_config: Build, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for code in ("xx", "yy"):
        train = [f"sentence number {n}\t{code} {n}" for n in range(80)]
        (root / f"train.en-{code}.tsv").write_text("\n".join(train) + "\n")
        held = "Sentence, number 5!" if code == "xx" else "another one"
        (root / f"dev.en-{code}.tsv").write_text(f"{held}\theld out\n")
    config = toy_config(data={"root": str(root), "test": None, "limit": {}}).data
    prepared, _ = run(config)
    # English of the one pair's development set is held out from both.
    for pair in ("en-xx", "en-yy"):
        assert prepared.reports()[f"train {pair}"].dropped == {"held out": 1}
        assert "sentence number 5" not in prepared.text("train", pair)[0]


def test_test_sentences_in_dev_are_told(toy_config: Build) -> None:
    config = toy_config(data={"dev": ["dev.{pair}.tsv", "test.{pair}.tsv"]}).data
    prepared, log = run(config)
    told = [line for line in log if "are in dev too" in line]
    assert [line.split(" are ")[0] for line in told] == [
        f"warning: 60 of the 60 sentence pairs of test en-{code}" for code in ("xx", "yy")
    ]
    assert prepared.warnings == told  # training says so again
    assert run(config)[1] == told
    assert run(toy_config().data)[0].warnings == []


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(toy_config: Build) -> None:
    vocabulary = {"size": 64_000, "threads": 1}
    prepared, log = run(toy_config(data={"vocabulary": vocabulary}).data)
    assert len(prepared.vocabulary) < 1000
    said = [line for line in log if "was asked for" in line]
    assert len(said) == 1
    assert "64,000" in said[0]


def test_an_empty_language_is_an_error_with_the_reasons(toy_config: Build, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for split in ("train", "dev", "test"):
        text = "same\tsame\n\tempty\n" if split == "train" else "a\tb\n"
        (root / f"{split}.en-xx.tsv").write_text(text)
    config = toy_config(data={"root": str(root), "languages": ["xx"], "limit": {}}).data
    with pytest.raises(ValueError, match="left of train en-xx; 2"):
        run(config)


def test_training_does_not_replace_what_another_run_may_need(toy_config: Build) -> None:
    prepared, _ = run(toy_config().data)
    other = toy_config(data={"limit": {"yy": 200}}).data
    with pytest.raises(ValueError, match=r"other settings .*data\.limit"):
        open_corpus(other)
    again = PreparedCorpus.open(toy_config().data)
    assert again is not None
    assert again.signature == prepared.signature
    assert prepare_corpus(other).sizes["train"]["en-yy"] == 200


def test_runs_and_prepared_data_do_not_share_a_folder(
    toy_config: Build, tmp_path: Path, quiet: Display
) -> None:
    """Both hold a `vocabulary.model`, and one would lose its own."""
    config = toy_config()
    with pytest.raises(ValueError, match=r"run: .*data\.prepared"):
        train_translation(config, tmp_path / "x" / ".." / "prepared", display=quiet)
    config.data.prepared.mkdir()
    (config.data.prepared / "config.toml").write_text("")
    with pytest.raises(ValueError, match=r"data\.prepared: .*run folder"):
        prepare_corpus(config.data)
    assert [path.name for path in config.data.prepared.iterdir()] == ["config.toml"]

"""Export: what is written is what the corpus says, and nothing foreign is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gradvac.lab.languages import SPLITS, Corpus, write_corpus
from gradvac.lab.languages import corpus as corpus_module

CODES = ["qtm", "qnm"]


@pytest.fixture
def small(corpus: Corpus) -> Corpus:
    return corpus.select(CODES)


def read(path: Path) -> list[str]:
    data = path.read_bytes().decode("utf-8")
    assert data.endswith("\n")
    assert "\r" not in data
    return data[:-1].split("\n")


def test_round_trip(small: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "new" / "corpus"
    written = write_corpus(small, out)
    assert sorted(written) == sorted(out.iterdir())
    for code in CODES:
        pairs = [tuple(line.split("\t")) for line in read(out / f"train.en-{code}.tsv")]
        assert pairs == small.pairs(code, "train")
    for split in SPLITS:
        for code, lines in small.aligned(split).items():
            assert tuple(read(out / f"{split}.{code}")) == lines
    facts = json.loads((out / "languages.json").read_text(encoding="utf-8"))
    language = facts["languages"]["qtm"]
    assert language["family"] == "Turmek"
    assert language["branch"] == "Lake"
    assert language["script"] == "cyrillic"
    assert language["train"] == 400
    assert language["resource_level"] == "extremely_low"
    assert language["grammar"]["order"] == "SOV"
    assert facts["distances"]["codes"] == CODES
    np.testing.assert_allclose(
        facts["distances"]["distance"], small.distances().distance, atol=1e-6
    )
    assert not list(tmp_path.glob("new/.*"))


def test_earlier_export_is_replaced_and_stale_files_go(small: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    write_corpus(small, out)
    (out / "notes.txt").write_text("mine")
    write_corpus(small.select(["qnm"]), out)
    assert not (out / "train.en-qtm.tsv").exists()
    assert not (out / "dev.qtm").exists()
    assert (out / "train.en-qnm.tsv").exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_foreign_directory_is_refused_unless_told(small: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    out.mkdir()
    write_corpus(small, out)  # empty is fine
    (out / "languages.json").write_text('{"generator": "another"}')
    before = sorted(out.iterdir())
    with pytest.raises(ValueError, match=r"not empty .*overwrite"):
        write_corpus(small, out)
    assert sorted(out.iterdir()) == before
    (out / "notes.txt").write_text("mine")
    write_corpus(small, out, overwrite=True)
    assert json.loads((out / "languages.json").read_text())["generator"] == "gradvac.lab.languages"
    assert (out / "notes.txt").read_text() == "mine"
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write_corpus(small, file)


def test_failure_leaves_nothing_behind(
    small: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(corpus: Corpus) -> dict[str, object]:
        raise OSError("disk full")

    monkeypatch.setattr(corpus_module, "describe_corpus", fail)
    with pytest.raises(OSError, match="disk full"):
        write_corpus(small, tmp_path / "corpus")
    assert not list(tmp_path.iterdir())


def test_interrupted_replacement_does_not_pass_for_an_export(
    small: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "corpus"
    write_corpus(small, out)
    moved: list[Path] = []

    def fail_after_two(source: Path, target: Path) -> None:
        if len(moved) == 2:
            raise OSError("interrupted")
        moved.append(source.rename(target))

    monkeypatch.setattr(corpus_module.os, "replace", fail_after_two)
    with pytest.raises(OSError, match="interrupted"):
        write_corpus(small.select(["qnm"]), out)
    assert not (out / "languages.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not an earlier export"):
        write_corpus(small, out)


def test_a_manifest_cannot_delete_files_elsewhere(small: Corpus, tmp_path: Path) -> None:
    out, outside = tmp_path / "corpus", tmp_path / "precious"
    outside.write_text("mine")
    write_corpus(small, out)
    manifest = json.loads((out / "languages.json").read_text(encoding="utf-8"))
    manifest["files"].append("../precious")
    (out / "languages.json").write_text(json.dumps(manifest), encoding="utf-8")
    write_corpus(small, out)
    assert outside.read_text() == "mine"

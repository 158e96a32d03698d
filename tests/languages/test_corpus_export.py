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


def test_foreign_directory_is_refused(small: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    out.mkdir()
    write_corpus(small, out)  # empty is fine
    (out / "languages.json").write_text('{"generator": "another"}')
    before = sorted(out.iterdir())
    with pytest.raises(ValueError, match=r"not empty .*new directory"):
        write_corpus(small, out)
    assert sorted(out.iterdir()) == before
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write_corpus(small, file)


def test_half_an_export_does_not_pass_for_one(
    small: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(corpus: Corpus) -> dict[str, object]:
        raise OSError("disk full")

    out = tmp_path / "corpus"
    write_corpus(small, out)
    monkeypatch.setattr(corpus_module, "describe_corpus", fail)
    with pytest.raises(OSError, match="disk full"):
        write_corpus(small.select(["qnm"]), out)
    assert not (out / "languages.json").exists()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not an earlier export"):
        write_corpus(small, out)

"""Preparation: label sets, repairs, counts, and files that are made again only when they must."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gradvac.lab.recipes.tagging import TaggingConfig, prepare_sentences
from gradvac.lab.recipes.tagging.preparation import open_sentences
from gradvac.utils.hints import log_to

Settings = Callable[..., TaggingConfig]


@pytest.fixture
def ner(tmp_path: Path, settings: Settings) -> Callable[..., TaggingConfig]:
    """Settings of entity files, whose text is given by language and split."""

    def make(texts: dict[str, str], **data: Any) -> TaggingConfig:
        for name, text in texts.items():
            path = tmp_path / "ner" / f"{name}.tsv"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        own = {
            "kind": "ner",
            "root": tmp_path,
            "languages": ["aa", "bb"],
            "train": "ner/{lang}.train.tsv",
            "dev": "ner/{lang}.dev.tsv",
            "test": None,
        }
        return settings(data=own | data)

    return make


GOOD = "Ada\tB-PER\nsees\tO\nRom\tB-LOC\nCity\tI-LOC\n\nsees\tO\n"


def test_what_was_read_is_counted(settings: Settings) -> None:
    prepared = prepare_sentences(
        settings(data=settings().data.model_dump() | {"limit": {"aa": 40}, "dev_limit": 7})
    )
    assert prepared.sizes["train"] == {"aa": 40, "bb": 60, "cc": 60}
    report = prepared.read_report()["train aa"]
    assert (report["sentences"], report["words"]) == (40, 200)
    assert report["sentences over the limit"] == 20
    assert prepared.sizes["dev"] == {"aa": 7, "bb": 7, "cc": 7}
    assert prepared.sizes["test"]["aa"] == 12
    assert set(report["labels never seen"]) >= {"ADP", "X"}
    assert not {"NOUN", "VERB"} & set(report["labels never seen"])
    assert prepared.sentences("test", "cc")[0].tags[-1] == "PUNCT"
    with pytest.raises(ValueError, match=r"'extra'.*train, dev, test"):
        prepared.windows("extra", "aa")


def test_broken_tags_are_repaired_and_counted(ner: Callable[..., TaggingConfig]) -> None:
    broken = "Ada\tI-PER\nLove\tI-PER\nsees\tO\nRom\tI-LOC\n"
    texts = {"aa.train": broken, "aa.dev": GOOD, "bb.train": GOOD, "bb.dev": GOOD}
    prepared = prepare_sentences(ner(texts))
    assert prepared.read_report()["train aa"]["broken tags repaired"] == 2
    assert "broken tags repaired" not in prepared.read_report()["train bb"]
    assert prepared.sentences("train", "aa")[0].tags == ("B-PER", "I-PER", "O", "B-LOC")


def test_two_languages_with_other_label_sets(ner: Callable[..., TaggingConfig]) -> None:
    other = GOOD.replace("PER", "PERSON").replace("LOC", "GPE")
    texts = {"aa.train": GOOD, "aa.dev": GOOD, "bb.train": other, "bb.dev": other}
    with pytest.raises(ValueError, match=r"bb train .*label set") as told:
        prepare_sentences(ner(texts))
    assert "B-PERSON (1 words)" in str(told.value)
    assert "data.rename" in str(told.value)
    renamed = ner(texts, rename={"PERSON": "PER", "GPE": "O"})
    prepared = prepare_sentences(renamed)
    assert prepared.sentences("train", "bb")[0].tags == ("B-PER", "O", "O", "O")
    assert prepared.read_report()["train bb"]["words renamed"] == 3
    listed = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-PERSON", "I-PERSON", "B-GPE", "I-GPE"]
    prepared = prepare_sentences(ner(texts, labels=listed))
    assert "B-GPE" in prepared.read_report()["train aa"]["labels never seen"]


def test_a_label_unknown_in_training_counts_as_wrong(ner: Callable[..., TaggingConfig]) -> None:
    odd = GOOD.replace("LOC", "PLANET")
    texts = {"aa.train": GOOD, "aa.dev": odd, "bb.train": GOOD, "bb.dev": GOOD}
    prepared = prepare_sentences(ner(texts))
    assert prepared.read_report()["dev aa"]["words with a label unknown in training"] == 2
    assert prepared.sentences("dev", "aa")[0].tags[2] == "B-PLANET"
    assert (prepared.windows("dev", "aa").labels == -100).sum() == 2


def test_a_file_without_a_sentence(ner: Callable[..., TaggingConfig]) -> None:
    texts = {"aa.train": "\n\n", "aa.dev": GOOD, "bb.train": GOOD, "bb.dev": GOOD}
    with pytest.raises(ValueError, match=r"train aa .*no sentence"):
        prepare_sentences(ner(texts))


def test_only_what_changed_is_made_again(settings: Settings, tmp_path: Path) -> None:
    said: list[str] = []
    with log_to(said.append):
        first = prepare_sentences(settings())
        assert len(said) == 9
        assert prepare_sentences(settings()).signature == first.signature
        assert open_sentences(settings()).signature == first.signature
        assert len(said) == 9
        longer = settings(model={"encoder": settings().model.encoder, "max_tokens": 5})
        with pytest.raises(ValueError, match=r"other settings .*model\.max_tokens"):
            open_sentences(longer)
        second = prepare_sentences(longer)
        assert second.signature != first.signature
        assert len(said) == 18
        (tmp_path / "data" / "dev.aa.tsv").unlink()
        prepare_sentences(longer)
    assert said[18:] == ["Preparing dev aa"]
    assert (tmp_path / "data" / "dev.aa.tsv").is_file()


@pytest.mark.parametrize("name", ["train.aa.npz", "dev.bb.tsv", "prepared.json", "report.json"])
def test_damage_is_refused_and_mended(settings: Settings, tmp_path: Path, name: str) -> None:
    whole = prepare_sentences(settings())
    path = tmp_path / "data" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)

    def use() -> None:
        prepared = open_sentences(settings())
        prepared.windows("train", "aa")
        prepared.sentences("dev", "bb")
        prepared.read_report()

    with pytest.raises(ValueError, match="gradvac tagging prepare"):
        use()
    assert prepare_sentences(settings()).signature == whole.signature
    use()


def test_a_missing_file_costs_nothing_of_what_was_prepared(
    ner: Callable[..., TaggingConfig], tmp_path: Path
) -> None:
    texts = {"aa.train": GOOD, "aa.dev": GOOD, "bb.train": GOOD, "bb.dev": GOOD}
    first = prepare_sentences(ner(texts))
    (tmp_path / "ner" / "bb.dev.tsv").unlink()
    with pytest.raises(ValueError, match="no file"):
        prepare_sentences(ner({}))
    assert open_sentences(ner({})).signature == first.signature


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"languages": []}, "languages: .*at least one"),
        ({"languages": ["aa", "aa"]}, "once"),
        ({"train": "all.conllu"}, r"\{lang\}"),
        ({"limit": {"zz": 3}}, "limit: 'zz' .*aa, bb, cc"),
        ({"labels": ["A", "A"]}, "'A' .*twice"),
        ({"kind": "ner", "labels": ["O", "PER"]}, "'PER' .*IOB2"),
        ({"kind": "ner", "labels": ["B-PER"]}, "O .*missing"),
        ({"kind": "ner", "labels": ["O", "I-PER"]}, "B-PER"),
    ],
)
def test_settings_that_cannot_be_used(settings: Settings, data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        settings(data=settings().data.model_dump() | data)

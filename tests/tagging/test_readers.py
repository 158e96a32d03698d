"""Readers: every format as its own files have it, and clear words about files that break it."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gradvac.lab.recipes.tagging.readers import Reading, TaggedSentence, read_sentences

CONLLU = """# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_
5.1\tfue\tir\tVERB\t_\t_\t_\t_\t0:exroot\t_

# sent_id = 2
1\tNew York\tNew York\tPROPN\t_\t_\t0\troot\t_\t_

# a sentence of which only the comment is left


"""

Read = Callable[..., Reading]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def write_and_read(
        name: str, text: str | bytes, form: Any = "auto", lang: str = "es"
    ) -> Reading:
        content = text.encode() if isinstance(text, str) else text
        (tmp_path / name).write_bytes(content)
        return read_sentences(name, "es", "train", root=tmp_path, form=form)

    return write_and_read


def test_conllu_has_syntactic_words_and_counts_the_other_lines(read: Read) -> None:
    reading = read("a.conllu", CONLLU)
    assert reading.sentences == [
        TaggedSentence(("vamos", "nos", "a", "el", "mar"), ("VERB", "PRON", "ADP", "DET", "NOUN")),
        TaggedSentence(("New York",), ("PROPN",)),
    ]
    assert reading.skipped == {
        "lines of multi-word tokens": 2,
        "lines of empty nodes": 1,
        "sentences without words": 1,
    }


def test_wikiann_with_and_without_the_language(read: Read) -> None:
    expected = [
        TaggedSentence(("Ada", ":", "a:b"), ("B-PER", "O", "O")),
        TaggedSentence(("Rom",), ("B-LOC",)),
    ]
    marked = "es:Ada\tB-PER\nes::\tO\nes:a:b\tO\n\n\n\nes:Rom\tB-LOC\n"
    assert read("a.tsv", marked).sentences == expected
    assert read("b.tsv", marked.replace("es:", "")).sentences == expected
    assert read("c.tsv.gz", gzip.compress(marked.encode())).sentences == expected
    packed = zstandard.ZstdCompressor().compress(marked.encode())
    assert read("d.tsv.zst", packed).sentences == expected


def test_rows_that_name_their_columns(read: Read, tmp_path: Path) -> None:
    rows = [{"tokens": ["Ada", "sings"], "upos": ["PROPN", "VERB"]}, {"tokens": [], "upos": []}]
    expected = [TaggedSentence(("Ada", "sings"), ("PROPN", "VERB"))]
    found = read("a.jsonl.gz", gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert found.sentences == expected
    assert found.skipped == {"sentences without words": 1}
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "b.parquet")
    assert read("b.parquet", (tmp_path / "b.parquet").read_bytes()).sentences == expected


def test_a_word_with_a_colon_of_its_own_stays(read: Read) -> None:
    reading = read("a.tsv", "es:wiki\tO\nAda\tB-PER\nRom\tB-LOC\n")
    assert reading.sentences[0].words == ("es:wiki", "Ada", "Rom")


def test_conll_has_the_word_first_and_the_tag_last(read: Read) -> None:
    text = (
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nGerman JJ B-NP B-MISC\n"
    )
    reading = read("a.conll", text)
    assert [one.tags for one in reading.sentences] == [("B-ORG", "O"), ("B-MISC",)]
    assert reading.skipped == {"document marks": 1}
    assert read("a.txt", text, form="conll").sentences == reading.sentences


def test_comments_marks_and_odd_spaces_of_conll(read: Read) -> None:
    """A blank that does not break stays in its word; comments are told by their columns."""
    text = "# id 7 domain=en x\n-DOCSTART- O\n\n10\u00a0000 NUM O\n# NN O\nAda\tNNP  B-PER"
    found = read("a.conll", text)
    assert found.sentences == [
        TaggedSentence(("10\u00a0000", "#", "Ada"), ("O", "O", "B-PER")),
    ]
    assert found.skipped == {"lines of comments": 1, "document marks": 1}
    found = read("a.tsv", "-DOCSTART-\tO\n\nAda\tB-PER\n")
    assert found.sentences == [TaggedSentence(("Ada",), ("B-PER",))]
    assert found.skipped["document marks"] == 1


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_words(read: Read) -> None:
    reading = read("a.tsv", b"\xef\xbb\xbfAda\tB-PER\r\nsings\tO\r\n\r\n")
    assert reading.sentences == [TaggedSentence(("Ada", "sings"), ("B-PER", "O"))]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.tsv", "Ada B-PER\n", r"a\.tsv, line 1: .*tab"),
        ("a.tsv", "Ada\tB-PER\n\nx\t\n", "line 3: .*tab"),
        ("a.tsv", "Ada\tB-PER\textra\n", "line 1: .*tab"),
        ("a.conll", "Ada\n", "line 1: .*2 columns"),
        ("a.conll", "EU NNP B-ORG\nrejects VBZ O\nit O\n", "line 3: .*3 columns"),
        ("a.tsv", "nb:Ada\tO\nnb:c\tO\n", "'nb:'.*'es'"),
        ("a.conllu", "1\tAda\tPROPN\n", "line 1: .*10 columns"),
        ("a.tsv", b"\xe9t\xe9\tO\n", "line 1: .*UTF-8"),
        ("a.tsv", "Ada\tO\n".encode("utf-16"), "UTF-16"),
        ("a.tsv.gz", b"no gzip", "to its end"),
        ("a.tsv.zst", zstandard.ZstdCompressor().compress(b"Ada\tO\n" * 99)[:-3], "cut off"),
        ("a.conllu.zst", b"", "empty"),
        ("a.jsonl", '{"tokens": ["a"]}', "tokens .*ner_tags"),
        ("a.jsonl", "{broken", "row 1: .*malformed"),
        ("a.tsv", "es:Ada\tO\nes:\tO\nes:b\tO\n", "nothing follows"),
        ("a.tsv", "es:Ada\tO\nes:c\tO\nb\tO\n", "2 of 3 .*'es:'"),
    ],
)
def test_what_cannot_be_read_is_named(read: Read, name: str, text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(name, text)


def test_a_missing_language_says_which_are_there(tmp_path: Path) -> None:
    for lang in ("de", "fr"):
        (tmp_path / "ner" / lang).mkdir(parents=True)
    source = "ner/{lang}/{split}.tsv"
    with pytest.raises(ValueError, match=r"ner/xx/dev\.tsv .*'xx'.*de, fr"):
        read_sentences(source, "xx", "dev", root=tmp_path, form="auto")
    with pytest.raises(ValueError, match="holds nothing"):
        read_sentences(source, "de", "dev", root=tmp_path, form="auto")
    with pytest.raises(ValueError, match=r"data\.root"):
        read_sentences(source, "de", "dev", root=tmp_path / "nowhere", form="auto")


def test_constructed_languages_have_tags_by_construction(tmp_path: Path) -> None:
    parts = read_sentences("constructed:dev", "qso", "dev", root=tmp_path, form="auto")
    names = read_sentences("constructed-names:dev", "qso", "dev", root=tmp_path, form="auto")
    assert [one.words for one in parts.sentences] == [one.words for one in names.sentences]
    flat = [
        (part, name)
        for one, other in zip(parts.sentences, names.sentences, strict=True)
        for part, name in zip(one.tags, other.tags, strict=True)
    ]
    assert all((part == "PROPN") == (name == "B-PER") for part, name in flat)
    assert ("PROPN", "B-PER") in flat


class FakeDataset(list):  # type: ignore[type-arg]
    """As much of `datasets.Dataset` as is read; the package is optional and large."""

    def __init__(self, rows: list[dict[str, Any]], features: dict[str, Any]) -> None:
        super().__init__(rows)
        self.features = features


def fake(rows: list[dict[str, Any]], **features: Any) -> SimpleNamespace:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, split: str) -> FakeDataset:
        asked.append((name, config, split))
        return FakeDataset(rows, features)

    return SimpleNamespace(load_dataset=load_dataset, asked=asked)


def test_hugging_face_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(feature=SimpleNamespace(names=["O", "B-PER"]))
    rows = [{"tokens": ["Ada", "sings"], "ner_tags": [1, 0]}, {"tokens": [], "ner_tags": []}]
    module = fake(rows, tokens=None, ner_tags=names)
    monkeypatch.setitem(sys.modules, "datasets", module)
    reading = read_sentences("hf:wikiann:{lang}:{split}", "de", "dev", root=tmp_path, form="auto")
    assert module.asked == [("wikiann", "de", "dev")]
    assert reading.sentences == [TaggedSentence(("Ada", "sings"), ("B-PER", "O"))]
    assert reading.skipped == {"sentences without words": 1}
    hidden = fake([{"tokens": ["Ada"], "ner_tags": [-1]}], tokens=None, ner_tags=names)
    monkeypatch.setitem(sys.modules, "datasets", hidden)
    with pytest.raises(ValueError, match="tag -1"):
        read_sentences("hf:wikiann:de:test", "de", "test", root=tmp_path, form="auto")


def test_real_datasets_on_disk(tmp_path: Path) -> None:
    import datasets

    labels = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": labels}
    )
    rows = {"tokens": [["Ada", "sings"], []], "ner_tags": [[1, 0], []]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"dev": made}).save_to_disk(str(tmp_path / "all"))
    made.save_to_disk(str(tmp_path / "one"))

    def read(source: str) -> Reading:
        return read_sentences(source, "de", "dev", root=tmp_path, form="auto")

    assert read("hf:all::{split}").sentences == [TaggedSentence(("Ada", "sings"), ("B-PER", "O"))]
    assert read("hf:one::").skipped == {"sentences without words": 1}
    with pytest.raises(ValueError, match=r"'train'.*dev"):
        read("hf:all::train")
    with pytest.raises(ValueError, match="hf:FOLDER::"):
        read("hf:one::dev")
    with pytest.raises(ValueError, match="loaded"):
        read("hf:nobody/nothing:de:dev")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, r"\.\[datasets\]"),
        (fake([], tokens=None), "tokens .*ner_tags"),
        (fake([{"tokens": ["a"], "upos": []}], tokens=None, upos=None), "1 tokens .*0 tags"),
        (fake([{"tokens": ["a\tb"], "upos": ["X"]}], tokens=None, upos=None), "tab"),
    ],
)
def test_datasets_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ValueError, match=said):
        read_sentences("hf:udpos:{lang}:train", "de", "train", root=tmp_path, form="auto")

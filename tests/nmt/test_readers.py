"""Sentence pairs from every kind of file."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from gradvac.nmt.readers import Problem, read_pairs

PAIRS = [("a dog", "un chien"), ("two dogs", "deux chiens")]


def read(source: str, root: Path, first: str = "en", second: str = "fr") -> list[object]:
    return list(read_pairs(source, first, second, root=root))


def test_moses_pair(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a dog\ntwo dogs\n")
    (tmp_path / "train.fr").write_text("un chien\ndeux chiens\n")
    assert read("train.{lang}", tmp_path) == PAIRS


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_are_unpacked(tmp_path: Path, suffix: str) -> None:
    text = b"a dog\tun chien\ntwo dogs\tdeux chiens\n"
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    (tmp_path / f"train.en-fr.tsv.{suffix}").write_bytes(pack(text))
    assert read(f"train.{{pair}}.tsv.{suffix}", tmp_path) == PAIRS


def test_a_truncated_archive_is_an_error_and_not_a_short_corpus(tmp_path: Path) -> None:
    whole = gzip.compress(b"a dog\tun chien\n" * 1000)
    (tmp_path / "t.tsv.gz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"t\.tsv\.gz cannot be read to its end"):
        read("t.tsv.gz", tmp_path)


def test_sides_of_unequal_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    (tmp_path / "t.en").write_text("a\nb\nc\n")
    (tmp_path / "t.fr").write_text("a\n")
    with pytest.raises(ValueError, match=r"t\.en has 3 lines, but .*t\.fr has 1"):
        read("t.{lang}", tmp_path)


def test_lines_that_are_not_utf8_are_reported_and_keep_the_alignment(tmp_path: Path) -> None:
    (tmp_path / "t.en").write_bytes(b"a dog\n\xff\xfe\ntwo dogs\n")
    (tmp_path / "t.fr").write_bytes(b"un chien\nx\ndeux chiens\n")
    assert read("t.{lang}", tmp_path) == [PAIRS[0], Problem.NOT_UTF8, PAIRS[1]]


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    # U+2028 and U+0085 are line breaks to str.splitlines, and occur in real text.
    (tmp_path / "t.en").write_text("a\u2028dog\r\ntwo\x85dogs\r\n", newline="")
    (tmp_path / "t.fr").write_text("\ufeffun chien\ndeux chiens\n", newline="")
    assert read("t.{lang}", tmp_path) == PAIRS


def test_tsv_with_header_takes_its_columns_and_gaps(tmp_path: Path) -> None:
    text = "key\tde\tfr\ten\n1\tein Hund\tun chien\ta dog\n2\tx\t\ttwo dogs\n3\tzwei\n"
    (tmp_path / "all.tsv").write_text(text)
    assert read("all.tsv", tmp_path) == [PAIRS[0], ("two dogs", ""), ("", "")]
    assert read("all.tsv", tmp_path, "de", "fr")[0] == ("ein Hund", "un chien")


def test_tsv_without_header_needs_two_columns(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("1\ta dog\tun chien\n")
    with pytest.raises(ValueError, match=r"3 column.*no header that names 'en' and 'fr'"):
        read("t.tsv", tmp_path)


def test_tsv_line_without_tab_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a dog\tun chien\na dog un chien\n")
    assert read("t.tsv", tmp_path) == [PAIRS[0], Problem.MALFORMED]


def test_jsonl(tmp_path: Path) -> None:
    rows = [
        {"en": "a dog", "fr": "un chien"},
        {"translation": {"fr": "deux chiens", "en": "two dogs"}},
        {"en": "a gap", "fr": None},
        {"en": 3, "fr": "trois"},
        {"en": "half a letter \ud800", "fr": "x"},
        ["a list"],
    ]
    text = "\n".join(map(json.dumps, rows)) + "\n{broken\n"
    (tmp_path / "t.jsonl").write_text(text)
    malformed = Problem.MALFORMED
    assert read("t.jsonl", tmp_path) == [
        *PAIRS,
        ("a gap", ""),
        malformed,
        Problem.NOT_UTF8,
        malformed,
        malformed,
    ]


TMX = """<?xml version="1.0"?><tmx version="1.4"><header/><body>
<tu><tuv xml:lang="en-GB"><seg>a <bpt i="1">b</bpt>dog</seg></tuv>
    <tuv xml:lang="FR"><seg>un chien</seg></tuv><tuv xml:lang="fr"><seg>other</seg></tuv></tu>
<tu><tuv lang="en"><seg>alone</seg></tuv></tu></body></tmx>"""


def test_tmx(tmp_path: Path) -> None:
    (tmp_path / "t.tmx.gz").write_bytes(gzip.compress(TMX.encode()))
    assert read("t.tmx.gz", tmp_path) == [("a bdog", "un chien"), ("alone", "")]


def test_broken_tmx_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.tmx").write_text("<tmx><body>")
    with pytest.raises(ValueError, match=r"t\.tmx is not valid TMX"):
        read("t.tmx", tmp_path)


def test_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[object]:
        asked.append((name, config, split))
        return [{"translation": dict(zip(("en", "fr"), pair, strict=True))} for pair in PAIRS]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read("hf:opus:{pair}:train", tmp_path) == PAIRS
    assert asked == [("opus", "en-fr", "train")]


def test_missing_datasets_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        read("hf:opus:en-fr:train", tmp_path)


def test_constructed_languages_in_both_orders(tmp_path: Path) -> None:
    there = read("constructed:dev", tmp_path, "en", "qpl")
    back = read("constructed:dev", tmp_path, "qpl", "en")
    assert len(there) == 500
    assert [pair[::-1] for pair in back] == there  # type: ignore[index]


def test_missing_file_names_path_and_root(tmp_path: Path) -> None:
    (tmp_path / "train.en").touch()
    with pytest.raises(ValueError, match=r"no file .*train\.fr for en-fr.*data\.root"):
        read("train.{lang}", tmp_path)


def test_one_plain_file_is_not_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    with pytest.raises(ValueError, match=r"\{lang\} in the name"):
        read("train.txt", tmp_path)

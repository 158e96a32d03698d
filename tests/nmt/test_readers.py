"""Sentence pairs from every kind of file."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from gradvac.lab.recipes.common.readers import Problem
from gradvac.lab.recipes.nmt.readers import read_pairs

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
    with pytest.raises(ValueError, match=r"t\.tsv\.gz .*to its end"):
        read("t.tsv.gz", tmp_path)


def test_sides_of_unequal_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    (tmp_path / "t.en").write_text("a\nb\nc\n")
    (tmp_path / "t.fr").write_text("a\n")
    with pytest.raises(ValueError, match=r"t\.en .*3 lines, .*t\.fr .*1"):
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
    with pytest.raises(ValueError, match=r"3 column.*'en' and 'fr'"):
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


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.json", '[{"en": "a", "fr": "b"}]', r"jq -c '\.\[\]' t\.json"),
        ("t.csv", "a;b\n", "'a;b', .*commas"),
        ("t.tsv", "a ||| b\n", "single column; tabs"),
    ],
)
def test_other_forms_of_the_same_are_refused_with_the_right_one(
    tmp_path: Path, name: str, content: str, told: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=told):
        read(name, tmp_path)


def test_tmx(tmp_path: Path) -> None:
    (tmp_path / "t.tmx.gz").write_bytes(gzip.compress(TMX.encode()))
    assert read("t.tmx.gz", tmp_path) == [("a bdog", "un chien"), ("alone", "")]


def test_broken_tmx_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.tmx").write_text("<tmx><body>")
    with pytest.raises(ValueError, match=r"t\.tmx .*TMX"):
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
    with pytest.raises(ValueError, match=r"pip install .\.\[datasets\]"):
        read("hf:opus:en-fr:train", tmp_path)


def test_constructed_languages_in_both_orders(tmp_path: Path) -> None:
    there = read("constructed:dev", tmp_path, "en", "qpl")
    back = read("constructed:dev", tmp_path, "qpl", "en")
    assert len(there) == 500
    assert [pair[::-1] for pair in back] == there  # type: ignore[index]


def test_missing_file_names_path_and_root(tmp_path: Path) -> None:
    (tmp_path / "train.en").touch()
    with pytest.raises(ValueError, match=r"train\.fr .*en-fr.*data\.root"):
        read("train.{lang}", tmp_path)


def test_one_plain_file_is_not_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    with pytest.raises(ValueError, match=r"\{lang\}"):
        read("train.txt", tmp_path)


@pytest.mark.parametrize("cut", [1, 5, 20, 2000])
def test_a_truncated_zst_is_an_error_and_not_a_short_corpus(tmp_path: Path, cut: int) -> None:
    text = b"".join(b"a dog %d\tun chien %d\n" % (n, n) for n in range(3000))
    whole = zstandard.ZstdCompressor().compress(text)
    (tmp_path / "t.tsv.zst").write_bytes(whole[:-cut])
    with pytest.raises(ValueError, match=r"t\.tsv\.zst .*cut off"):
        read("t.tsv.zst", tmp_path)


def test_zst_files_put_together_are_read_to_the_last(tmp_path: Path) -> None:
    parts = [zstandard.ZstdCompressor().compress(line) for line in (b"a dog\tun chien\n",) * 3]
    (tmp_path / "t.tsv.zst").write_bytes(b"".join(parts))
    assert read("t.tsv.zst", tmp_path) == [PAIRS[0]] * 3


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_an_archive_of_no_bytes_was_cut_off(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"t.tsv.{suffix}").touch()
    with pytest.raises(ValueError, match="empty"):
        read(f"t.tsv.{suffix}", tmp_path)


def test_a_damaged_archive_is_told_and_not_a_traceback(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"a dog\tun chien\n" * 1000))
    packed[30] ^= 255
    (tmp_path / "t.tsv.gz").write_bytes(packed)
    (tmp_path / "t.tmx.gz").write_bytes(packed)
    for name in ("t.tsv.gz", "t.tmx.gz"):
        with pytest.raises(ValueError, match="to its end"):
            read(name, tmp_path)


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused_with_the_way_out(tmp_path: Path, code: str) -> None:
    (tmp_path / "t.tsv").write_bytes("a dog\tun chien\n".encode(code) * 20)
    with pytest.raises(ValueError, match="iconv"):
        read("t.tsv", tmp_path)


def test_columns_are_what_the_config_says(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("un chien\ta dog\ndeux chiens\ttwo dogs\n")
    (tmp_path / "h.tsv").write_text("fr\ten\nun chien\ta dog\ndeux chiens\ttwo dogs\n")
    (tmp_path / "k.tsv").write_text("1\tun chien\ta dog\n2\tdeux chiens\ttwo dogs\n")
    for name, columns in (
        ("t.tsv", ["fr", "en"]),
        ("t.tsv", ["{xx}", "en"]),
        ("h.tsv", ["fr", "en"]),
        ("h.tsv", []),
        ("k.tsv", ["key", "fr", "en"]),
    ):
        found = list(read_pairs(name, "en", "fr", root=tmp_path, columns=columns))
        assert found == PAIRS, (name, columns)


@pytest.mark.parametrize(
    ("columns", "text", "message"),
    [
        (["de", "en"], "x\ty\n", "'en' or no 'fr'"),
        (["fr", "en"], "en\tfr\nx\ty\n", "2 cells: 'en', 'fr'"),
        (["fr", "en"], "1\tx\ty\n", "3 cells"),
        ([], "en\ten\tfr\nx\ty\tz\n", "'en' twice"),
        ([], "en\tde\nx\ty\n", "header"),
        ([], "EN\tFR\nx\ty\n", "header"),
        ([], "English\tFrench\nx\ty\n", "header"),
        ([], "source\ttarget\nx\ty\n", "header"),
        ([], "en_US\tfr-FR\nx\ty\n", "header"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(
    tmp_path: Path, columns: list[str], text: str, message: str
) -> None:
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_pairs("t.tsv", "en", "fr", root=tmp_path, columns=columns))


def test_a_row_with_other_cells_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a dog\tun chien\na\tdog\tun chien\n")
    (tmp_path / "h.tsv").write_text("en\tfr\na dog\tun chien\na\tb\tc\nen\tfr\n")
    malformed = Problem.MALFORMED
    assert read("t.tsv", tmp_path) == [PAIRS[0], malformed]
    # A header in the middle: two files put together.
    assert read("h.tsv", tmp_path) == [PAIRS[0], malformed, malformed]


def test_two_nameless_columns_cannot_be_several_pairs(tmp_path: Path) -> None:
    (tmp_path / "all.tsv").write_text("a dog\tun chien\n")
    with pytest.raises(ValueError, match=r'data\.columns = \["en", "fr"\]'):
        list(read_pairs("all.tsv", "en", "fr", root=tmp_path, is_shared=True))


@pytest.mark.parametrize("name", ["t.jsonl", "t.tmx"])
def test_other_keys_are_told_instead_of_an_empty_corpus(tmp_path: Path, name: str) -> None:
    rows = [json.dumps({"en": "a dog", "french": "un chien"})] * 100
    tmx = TMX.replace("FR", "fra").replace('"fr"', '"fra"')
    (tmp_path / name).write_text(tmx if name == "t.tmx" else "\n".join(rows) + "\n")
    with pytest.raises(ValueError, match=r"'fr'; .*'(french|fra)'"):
        read(name, tmp_path)


def test_odd_json_is_malformed(tmp_path: Path) -> None:
    good = json.dumps({"en": "a dog", "fr": "un chien"})
    odd = [
        '{"en": "a", "en": "b", "fr": "c"}',
        "[" * 100_000,
        '{"en": ' + "1" * 5000 + "}",
        '{"en": "a\\u0000b", "fr": "c"}',
    ]
    (tmp_path / "t.jsonl").write_text("\n".join([good, *odd]) + "\n")
    assert read("t.jsonl", tmp_path) == [PAIRS[0], *[Problem.MALFORMED] * len(odd)]


@pytest.mark.parametrize("source", ["t.{language}.tsv", "t.{}.tsv", "t.{lang.__class__}.tsv"])
def test_unknown_placeholders_are_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match=r"\{pair\}, \{xx\} and \{lang\}"):
        read(source, tmp_path)

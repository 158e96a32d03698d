"""Real data sets from checkouts of their sources: tiny ones, in the formats of the real ones."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from ..drivers import load_module
from .conftest import ROOT

FOLDER = ROOT / "docs" / "data"


@pytest.fixture
def build() -> ModuleType:
    return load_module(FOLDER / "build.py")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_first_documents_without_repeated_lines(build: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "MicrosoftTranslator" / "NTREX"
    write(folder / "DOCUMENT_IDS.tsv", f"a\na\n{build.LAST_DOCUMENT}\n{build.LAST_DOCUMENT}\nz\n")
    write(folder / "NTREX-128/newstest2019-src.eng.txt", "one\n two  words\none\nthree\nfour\n")
    for name in build.NTREX.values():
        lines = "1\n2\n3\nu\u0308\n5\n"
        write(folder / f"NTREX-128/newstest2019-ref.{name}.txt", lines)
    made = dict(build.ntrex(tmp_path))
    assert made["mt/ntrex/eval.en"] == "one\ntwo words\nthree\n"
    assert made["mt/ntrex/eval.be"] == "1\n2\n\u00fc\n"
    assert made["mt/ntrex/eval.docid"] == f"a\na\n{build.LAST_DOCUMENT}\n"


def test_verses_by_their_names(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path)
    verses = {"bible_nt": {"train": {"MAT 1": "1-2,4"}, "dev": {"MAT 2": "1"}}}
    write(tmp_path / "verses.json", json.dumps(verses))
    folder = tmp_path / "BibleNLP" / "ebible"
    names = ["MAT 1:1", "MAT 1:2", "MAT 1:3", "MAT 1:4", "MAT 2:1"]
    write(folder / "metadata/vref.txt", "\n".join(names) + "\n")
    write(folder / "corpus/hun-hun.txt", "a\nb\x85c\n\nd\ne\n")
    made = dict(build.bible(tmp_path, "bible_nt", {"hu": "hun-hun"}))
    assert made["mt/bible_nt/train.hu"] == "a\nb c\nd\n"
    assert made["mt/bible_nt/dev.hu"] == "e\n"
    assert made["mt/bible_nt/train.vref"] == "MAT 1:1\nMAT 1:2\nMAT 1:4\n"


def test_pairs_come_in_the_order_of_their_digests(
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path)
    lines = {"train.en-lv.tsv": ["b\t2", "a\t1"], "test.en-lv.tsv": ["c\t\u00fc", "gone\t9"]}
    counts = json.dumps({name: len(own) for name, own in lines.items()}).encode()
    every = b"".join(build.digest(line) for own in lines.values() for line in own)
    (tmp_path / "tatoeba.lines").write_bytes(counts + b"\n" + every)
    folder = tmp_path / "Helsinki-NLP" / "Tatoeba-Challenge" / "data"
    write(folder / "dev/eng-lav/dev.txt", "eng\tlav\ta\t1\neng\tlav\tother\t7\n")
    old = folder / "release/test/v1/tatoeba-test-v1.deu-lav.txt"
    write(old, "deu\tlav\tb\t2\nlav\teng\tu\u0308 \tc\n")
    new = write(folder / "devtest/lav-eng/test.txt.gz", "")
    new.write_bytes(gzip.compress(b"lav\teng\t2\tb\n"))
    made = dict(build.tatoeba(tmp_path))
    assert made["mt/tatoeba/train.en-lv.tsv"] == "b\t2\na\t1\n"
    assert made["mt/tatoeba/test.en-lv.tsv"] == "c\t\u00fc\n"
    assert "lacks 1 lines of test.en-lv.tsv" in capsys.readouterr().out


def tree(*words: str) -> str:
    rows = [f"{n}\t{word}\t_\tNOUN" for n, word in enumerate(words, start=1)]
    return "\n".join([f"# text = {' '.join(words)}", *rows]) + "\n\n"


def test_treebanks_are_cut_and_do_not_leak(build: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "UniversalDependencies"
    pud = "".join(tree(f"word{n}") for n in range(20))
    write(folder / "UD_Arabic-PUD/ar_pud-ud-test.conllu", pud)
    made = dict(build.pos(tmp_path, "ar"))
    assert made["pos/ar/test.conllu"].count("# text") == 4
    assert made["pos/ar/dev.conllu"] == tree("word2") + tree("word12")
    assert made["pos/ar/train.conllu"].startswith(tree("word3"))
    official = folder / "UD_Tamil-TTB"
    write(official / "ta_ttb-ud-test.conllu", tree("a"))
    write(official / "ta_ttb-ud-dev.conllu", tree("a") + tree("b"))
    write(official / "ta_ttb-ud-train.conllu", tree("c") + tree("b") + tree("c") + tree("d", "e"))
    made = dict(build.pos(tmp_path, "ta"))
    assert made["pos/ta/dev.conllu"] == tree("b")
    assert made["pos/ta/train.conllu"] == tree("c") + tree("d", "e")


def test_entities_have_three_classes_that_begin(build: ModuleType) -> None:
    tagged = build.tagged(("x I-PERSON", "y I-PERSON", "z B-GPE", "w B-MONEY", "v I-NEO", "u O"))
    assert [line.split("\t")[1] for line in tagged] == [
        "B-PER",
        "I-PER",
        "B-LOC",
        "O",
        "B-ORG",
        "O",
    ]


def test_tagalog_is_cut_by_position(build: ModuleType, tmp_path: Path) -> None:
    for name, first, count in (("TRG", 0, 12), ("Ugnayan", 12, 4)):
        rows = (f"# text = w{n}\n1\tw{n}\tB-LOC\t-\tx\n\n" for n in range(first, first + count))
        folder = tmp_path / "UniversalNER" / f"UNER_Tagalog-{name}"
        write(folder / f"tl_{name.lower()}-ud-test.iob2", "".join(rows))
    made = dict(build.ner(tmp_path, "tl"))
    numbers = {"test": (0, 5, 6, 10, 15), "dev": (1, 11), "train": (2, 3, 4, 7, 8, 9, 12, 13, 14)}
    for split, own in numbers.items():
        assert made[f"ner/tl/{split}.tsv"] == "".join(f"w{n}\tB-LOC\n\n" for n in own)


def test_files_are_held_against_their_checksums(
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    panx = tmp_path / "sources/masakhane-io/masakhane-ner/transfer_corpus/panx"
    write(panx / "yo/train.txt", "b B-PER\n\na O\n\nb B-PER\n\n")
    write(panx / "yor/dev.txt", "c O\n\n")
    write(panx / "yo/test.txt", "a O\n\n")
    texts = {"train": "b\tB-PER\n\n", "dev": "c\tO\n\n", "test": "other"}
    monkeypatch.setattr(build, "HERE", tmp_path)
    sums = [
        f"{hashlib.sha256(text.encode()).hexdigest()}  ner/yo/{split}.tsv"
        for split, text in texts.items()
    ]
    write(tmp_path / "sha256.txt", "\n".join(sums) + "\n")
    write(tmp_path / "verses.json", json.dumps({"bible_full": {}, "bible_nt": {}}))
    with pytest.raises(SystemExit, match="True"):
        build.main(["build", str(tmp_path / "sources"), str(tmp_path / "data")])
    said = capsys.readouterr().out
    assert "yo/test.tsv.gz: differs from" in said
    assert "2 of 3 files are as they should be." in said
    assert "UD_Arabic-PUD/ar_pud-ud-test.conllu: is not there" in said
    made = tmp_path / "data/ner/yo/test.tsv.gz"
    made.write_bytes(gzip.compress(b"other"))
    with pytest.raises(SystemExit, match="False"):
        build.main(["check", str(tmp_path / "data")])


def test_the_lists_fit_together(build: ModuleType) -> None:
    """Every verse list has its file, and what is built has a checksum."""
    known = build.checksums()
    assert len(known) == 259
    for name, splits in json.loads((FOLDER / "verses.json").read_text("utf-8")).items():
        for split, chapters in splits.items():
            text = build.joined(build.listed(chapters))
            assert hashlib.sha256(text.encode()).hexdigest() == known[f"mt/{name}/{split}.vref"]
    counts = {name: len(own) for name, own in build.digests().items()}
    assert {f"mt/tatoeba/{name}" for name in counts} <= known.keys()
    assert sum(counts[name] for name in counts if name.startswith("train")) == 830_756
    assert {f"ner/{code}/train.tsv" for code in build.ENTITIES} <= known.keys()
    assert {f"pos/{code}/train.conllu" for code in build.TREEBANKS} <= known.keys()
    assert {f"mt/ntrex/eval.{code}" for code in build.NTREX} <= known.keys()


def test_nothing_to_build_from_is_no_success(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        build.main(["build", str(tmp_path / "sources"), str(tmp_path / "data")])
    assert ended.value.code == 1

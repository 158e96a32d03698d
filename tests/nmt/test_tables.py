"""CSV, parquet and saved datasets: the real libraries write, we read."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradvac.lab.recipes.common.readers import Problem
from gradvac.lab.recipes.nmt.readers import read_pairs

PAIRS = [("a dog, or two", "un chien"), ('say "yes"', "deux chiens")]
ROWS = {"fr": [right for _, right in PAIRS], "en": [left for left, _ in PAIRS]}


def read(source: str, root: Path) -> list[object]:
    return list(read_pairs(source, "en", "fr", root=root))


@pytest.mark.parametrize("packed", [False, True])
def test_csv_with_quotes_and_line_breaks(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    with gzip.open(path, "wt", newline="") if packed else path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "fr", "en"])
        writer.writerows([number, fr, en] for number, (en, fr) in enumerate(PAIRS))
        writer.writerow([2, "trois\nchiens", "three dogs"])
    assert read(path.name, tmp_path) == [*PAIRS, ("three dogs", "trois chiens")]


def test_damage_in_csv_is_counted(tmp_path: Path) -> None:
    lines = [b"en,fr", b"a,b", b"\xff,x", b'"c"d,e', b"f,g"]
    (tmp_path / "t.csv").write_bytes(b"\n".join(lines) + b"\n")
    found = read("t.csv", tmp_path)
    assert [line for line in found if not isinstance(line, Problem)] == [("a", "b"), ("f", "g")]
    assert Problem.NOT_UTF8 in found
    assert Problem.MALFORMED in found


def test_every_line_that_a_broken_quote_swallows_is_counted(tmp_path: Path) -> None:
    lines = ["en,fr", "a,b", '"c,d', "e,f", "g,h", 'i" j,k', "l,m"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert read("t.csv", tmp_path) == [("a", "b"), *[Problem.MALFORMED] * 4, ("l", "m")]
    (tmp_path / "t.csv").write_text("\n".join(lines[:5]) + "\n")
    with pytest.raises(ValueError, match=r"t\.csv: .*line 3 .*never closed"):
        read("t.csv", tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_parquet(tmp_path: Path, nested: bool) -> None:
    rows = [{"en": en, "fr": fr} for en, fr in PAIRS]
    table = pa.Table.from_pylist([{"translation": r} for r in rows] if nested else rows)
    pq.write_table(table, tmp_path / "news.parquet")
    assert read("news.parquet", tmp_path) == PAIRS


def test_a_cut_off_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"t\.parquet .*to its end"):
        read("t.parquet", tmp_path)


def test_parquet_without_the_language_names_what_there_is(tmp_path: Path) -> None:
    pq.write_table(pa.table({"en": ROWS["en"], "de": ROWS["fr"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="'fr'"):
        read("t.parquet", tmp_path)


def test_saved_datasets_with_and_without_splits(tmp_path: Path) -> None:
    plain = datasets.Dataset.from_dict(ROWS)
    plain.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": plain}).save_to_disk(str(tmp_path / "splits"))
    assert read("hf:plain::", tmp_path) == PAIRS
    assert read("hf:splits::train", tmp_path) == PAIRS
    with pytest.raises(ValueError, match=r"'dev'.*train"):
        read("hf:splits::dev", tmp_path)
    with pytest.raises(ValueError, match="hf:FOLDER::"):
        read("hf:plain::train", tmp_path)


def test_a_folder_of_parquet_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.table(ROWS), tmp_path / "folder" / "train-00000-of-00001.parquet")
    assert read("hf:folder::train", tmp_path) == PAIRS

"""What is known of tasks: tables of languages, URIEL, and files of the user's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradvac.analysis import KnownDistances
from gradvac.lab.languages import default_corpus, genealogical_distances
from gradvac.lab.languages.known import GENEALOGY, find_distances, find_families

SQUARE = "\tfr\ten-es\tde\nfr\t0\t1\t2\nen-es\t1\t0\t3\nde\t2\t3\t0\n"


def one(source: str | Path, *tasks: str) -> KnownDistances:
    """The distances of a single run that has some."""
    (found,) = find_distances(str(source), [tasks])
    assert found is not None
    return found


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_real_languages_are_known_by_descent() -> None:
    found = one(GENEALOGY, "fr-en", "en-fr", "en-xx", "en-cs", "en")
    assert found.name == "genealogical distance"
    assert found.tasks == ("fr-en", "en-fr", "en-cs", "en")
    assert np.array_equal(found.values, genealogical_distances(["fr", "fr", "cs", "en"]))


def test_the_more_numerous_of_real_and_constructed_count() -> None:
    built = one(GENEALOGY, "en-qso", "en-qsm", "en-qtu", "en-fr", "en-cs")
    assert built.tasks == ("en-qso", "en-qsm", "en-qtu")
    assert built.name == "distance by construction"
    known = default_corpus().select(["qso", "qsm"]).distances()
    assert built.values[0, 1] == known.distance[0, 1]
    real = one(GENEALOGY, "en-qso", "en-qsm", "en-fr", "en-cs", "en-de")
    assert real.tasks == ("en-fr", "en-cs", "en-de")


def test_too_little_is_nothing() -> None:
    runs = [("en-fr", "en-cs"), ("tag", "parse", "rank"), ("fr-cs", "cs-de", "de-fr")]
    assert find_distances(GENEALOGY, runs) == [None, None, None]


def test_uriel() -> None:
    found = one("uriel:geographic", "en-fr", "en-cs", "en-tdx", "en-qso")
    assert found.tasks == ("en-fr", "en-cs", "en-tdx")
    assert found.name == "URIEL geographic distance"
    assert found.values[0, 1] < found.values[0, 2]
    with pytest.raises(ValueError, match=r"uriel:featural: .*en-tdx, en-qso"):
        find_distances("uriel:featural", [("en-tdx", "en-qso", "en-fr")])


def test_a_file_names_tasks_or_languages(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.tsv", SQUARE)
    found = one(path, "en-de", "en-es", "fr-en", "es-en", "en-fr")
    assert found.tasks == ("en-de", "en-es", "fr-en", "en-fr")
    expected = [[0, 3, 2, 2], [3, 0, 1, 1], [2, 1, 0, 0], [2, 1, 0, 0]]
    assert np.array_equal(found.values, expected)
    assert found.name == "the distance of mine.tsv"
    # A run that the file does not know is left alone if it knows another.
    assert find_distances(str(path), [("tag", "rank"), found.tasks])[0] is None


def test_a_file_may_be_a_triangle_in_any_order(tmp_path: Path) -> None:
    text = "\ufeff;a;b;c;d\nc;2;3;;\n\na;;;;\nb;1,5;;;\nd;;;;0\n".replace(",", ".")
    found = one(written(tmp_path / "half.csv", text), "a", "b", "c", "d")
    assert found.tasks == ("a", "b", "c")  # nothing is said of d
    assert np.array_equal(found.values, [[0, 1.5, 2], [1.5, 0, 3], [2, 3, 0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "each once; got nothing"),
        (SQUARE.replace("\nde\t2\t3\t0", ""), "fr, en-es, de and fr, en-es"),
        (SQUARE.replace("\nde", "\nfr"), "each once"),
        (SQUARE.replace("2\t3\t0", "2\t3"), "row de .*2 values"),
        (SQUARE.replace("2\t3\t0", "2\tfar\t0"), "row de: .*'far'"),
        (SQUARE.replace("2\t3\t0", "2\t4\t0"), r"\(en-es, de\) .*mirror"),
        (SQUARE.replace("2\t3\t0", "2\t3\t1"), r"\(de, de\) .*similarities"),
        (SQUARE.replace("2", "-2"), r"-2 \(fr, de\) .*below 0"),
        (SQUARE.replace("2", "inf"), r"inf \(fr, de\) .*infinite"),
        (SQUARE.replace("fr", "it"), "fewer than 3 of en-fr, en-es, en-de"),
    ],
)
def test_bad_files_of_distances(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "mine.tsv", text)
    with pytest.raises(ValueError, match=f"^--distances .*mine.tsv: .*{message}"):
        find_distances(str(path), [("en-fr", "en-es", "en-de")])


def test_no_such_distances(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"genealgy: .*genealogy, uriel:KIND"):
        find_distances("genealgy", [("en-fr",)])
    (tmp_path / "table.xlsx").write_bytes(b"PK\xff\xfe")
    with pytest.raises(ValueError, match="CSV or TSV"):
        find_distances(str(tmp_path / "table.xlsx"), [("en-fr",)])


def test_families_of_a_file_go_before_the_tables(tmp_path: Path) -> None:
    text = 'fr = "Romance"\nen-es = "Iberian"\n"tag:de" = "tagging"\nxx = "unused"\n'
    path = written(tmp_path / "families.toml", text)
    tasks = ["en-fr", "fr-en", "en-es", "es-en", "tag:de", "en-qso", "rank"]
    (found,) = find_families([tasks], path)
    assert found == {
        "en-fr": "Romance",
        "fr-en": "Romance",
        "en-es": "Iberian",
        "es-en": "Western European",
        "tag:de": "tagging",
        "en-qso": "Sarvan",
        "rank": "",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fr: Romance", ".*TOML"),
        ("fr = 3", '.*in quotes, .*fr = "Romance"'),
        ('it = "Romance"', ".*none of en-fr, en-es"),
    ],
)
def test_bad_files_of_families(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "families.toml", text)
    with pytest.raises(ValueError, match=f"^--families .*families.toml: {message}"):
        find_families([["en-fr", "en-es"]], path)


def test_languages_by_long_codes() -> None:
    tasks = ["eng-fra", "eng-deu", "eng-swe", "eng-zho_Hans", "eng-qqq"]
    (families,) = find_families([tasks])
    assert list(families.values()) == ["Western European"] * 3 + ["Sino-Tibetan", ""]
    (known,) = find_distances("genealogy", [tasks])
    assert known is not None
    assert known.tasks == tuple(tasks[:4])
    assert known.values[1, 2] < known.values[0, 1] < known.values[0, 3]

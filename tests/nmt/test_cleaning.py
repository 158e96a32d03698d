"""What is dropped, and that every pair is accounted for."""

from __future__ import annotations

import io

from rich.console import Console

from gradvac.lab.recipes.common.readers import Problem
from gradvac.lab.recipes.nmt.cleaning import (
    CleaningConfig,
    Report,
    clean_pairs,
    fingerprint,
    keep_readable,
    letters,
    report_table,
)
from gradvac.lab.recipes.nmt.readers import Line

LONG = "word " * 30
LINES: list[Line] = [
    ("a dog barks", "un chien aboie"),
    ("", "vide"),
    ("x" * 1001, "y" * 1000),
    (LONG, "court"),
    ("OK", "OK"),
    ("a dog barks", "un chien aboie"),
    Problem.NOT_UTF8,
    Problem.MALFORMED,
    ("The secret, test sentence!", "inconnu"),
    ("yes", "oui, bien s\u00fbr"),
]
HELD_OUT = ({fingerprint(letters("the SECRET test sentence"))}, set[int]())


def test_every_pair_is_kept_or_counted_once_with_its_reason() -> None:
    report = Report()
    kept = list(clean_pairs(LINES, CleaningConfig(), report, held_out=HELD_OUT))
    assert kept == [LINES[0], LINES[9]]
    assert report.num_read == len(LINES) == report.num_kept + report.dropped.total()
    assert report.num_kept == 2
    assert report.dropped == {
        "empty": 1,
        "too long": 1,
        "length ratio": 1,
        "identical sides": 1,
        "repetition": 1,
        "not UTF-8": 1,
        "malformed": 1,
        "held out": 1,
    }
    assert report.examples["held out"] == [LINES[8]]
    report.drop("too long", ("a" * 10**6, "b"))
    assert len(report.examples["too long"][-1][0]) == 300  # a file to be read by people


def test_what_is_switched_off_is_kept() -> None:
    off = CleaningConfig(
        max_characters=2000,
        max_ratio=100.0,
        drop_identical=False,
        deduplicate=False,
        drop_held_out=False,
    )
    kept = list(clean_pairs(LINES, off, Report(), held_out=HELD_OUT))
    assert kept == [line for line in LINES if not isinstance(line, Problem) and all(line)]


def test_the_held_out_side_counts_for_its_own_language_only() -> None:
    lines: list[Line] = [("inconnu", "the secret test sentence")]
    assert list(clean_pairs(lines, CleaningConfig(), Report(), held_out=HELD_OUT)) == lines


def test_limit_keeps_the_first_and_counts_the_rest() -> None:
    lines: list[Line] = [(f"line {n}", f"ligne {n}") for n in range(10)]
    report = Report()
    assert list(clean_pairs(lines, CleaningConfig(), report, limit=3)) == lines[:3]
    assert report.dropped == {"beyond the limit": 7}


def test_evaluation_sets_lose_only_what_cannot_be_scored() -> None:
    report = Report()
    kept = list(keep_readable(LINES, report))
    assert len(kept) == 7
    assert report.dropped == {"empty": 1, "not UTF-8": 1, "malformed": 1}


def test_comparison_ignores_case_and_punctuation_but_not_vowel_signs() -> None:
    assert letters("It's  HERE.") == letters("its here")
    assert letters("\u0915\u0940") != letters("\u0915\u0947")  # two Hindi words, other vowel signs
    assert letters("?!") != letters("...")


def test_report_survives_json_and_shows_all_reasons() -> None:
    report = Report()
    list(clean_pairs(LINES, CleaningConfig(), report, held_out=HELD_OUT))
    back = Report.from_dict(report.to_dict())
    assert back == Report(report.num_read, report.num_kept, report.dropped, back.examples)
    console = Console(file=io.StringIO(), width=200)
    console.print(report_table({"train en-fr": report}))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(reason in shown for reason in report.dropped)

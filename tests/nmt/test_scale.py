"""What makes large corpora possible: work on all cores in order, and fingerprints on disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gradvac.nmt import workers
from gradvac.nmt.cleaning import CleaningConfig, Report, clean
from gradvac.nmt.readers import Line, Problem
from gradvac.nmt.seen import Seen
from gradvac.nmt.workers import chunks, ordered_map


def test_seen_is_a_set() -> None:
    draw = np.random.default_rng(0)
    seen, known = Seen(), set[int]()
    for size in [5, 0, 1, 300, 40, 2000, 7, 900]:
        marks = draw.integers(0, 3000, size).astype(np.uint64)
        expected = []
        for mark in marks.tolist():
            expected.append(mark not in known)
            known.add(mark)
        assert seen.add(marks).tolist() == expected
    assert sum(map(len, seen._runs)) == len(known)
    assert len(seen._runs) < 8


def test_results_come_in_the_order_of_the_items() -> None:
    found = list(ordered_map(pow, range(60), shared=(3,), processes=1, alone=2))
    assert found == [(number, number**3) for number in range(60)]
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]


def lines() -> Iterator[Line]:
    for number in range(2300):
        if number % 500 == 7:
            yield Problem.NOT_UTF8
        yield f"sentence number {number % 1200}", f"satz nummer {number % 1200}"


def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LINES_AT_ONCE", 100)
    monkeypatch.setattr(workers, "_ALONE", 3)
    results = []
    for processes in (1, 2):
        report = Report()
        held_out = ({1}, {2})
        kept = clean(lines(), CleaningConfig(), report, held_out=held_out, processes=processes)
        results.append((sum(hash(pair) for pair in kept), report.to_dict()))
    assert results[0] == results[1]
    assert results[0][1]["kept"] == 1200
    assert results[0][1]["dropped"] == {"repetition": 1100, "not UTF-8": 5}

"""Cleaning: which sentence pairs are worth training on, and what became of the others."""

from __future__ import annotations

import hashlib
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from rich.table import Table

from gradvac.lab.recipes.common.readers import Problem
from gradvac.lab.recipes.nmt.readers import Line, Pair
from gradvac.lab.recipes.nmt.workers import chunks, ordered_map
from gradvac.lab.training import Section

Fingerprints = npt.NDArray[np.uint64]
HeldOut = tuple[set[int], set[int]]
_NUM_EXAMPLES = 3
_LONGEST_EXAMPLE = 300  # characters
# Two short sentences say little about their ratio: "Oui." and "Yes, of course."
_SHORTEST_COMPARED = 20


class CleaningConfig(Section):
    """[data.cleaning]: which training pairs are dropped. Empty and unreadable ones always are.

    Attributes:
        max_characters: Longest sentence, on either side.
        max_ratio: Largest ratio of the two lengths, in characters; sides shorter than 20 characters
            count as 20.
        drop_identical: Drop pairs whose sides are the same.
        deduplicate: Drop repetitions of a pair.
        drop_held_out: Drop pairs with a side that is also a development or test sentence of that
            language, in any pair: compared without case, punctuation and white space.
    """

    max_characters: int = Field(default=1000, ge=1)
    max_ratio: float = Field(default=4.0, ge=1)
    drop_identical: bool = True
    deduplicate: bool = True
    drop_held_out: bool = True


@dataclass
class Report:
    """What became of the pairs of one language pair and split.

    Attributes:
        num_read: Pairs read.
        num_kept: Pairs kept.
        dropped: Reason -> number of pairs.
        examples: Reason -> the beginnings of the first few, to look at.
    """

    num_read: int = 0
    num_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Pair]] = field(default_factory=dict)

    def drop(self, reason: str, pair: Pair | None = None) -> None:
        """Count a pair that is not kept."""
        self.dropped[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if pair is not None and len(shown) < _NUM_EXAMPLES:
            source, target = pair
            shown.append((source[:_LONGEST_EXAMPLE], target[:_LONGEST_EXAMPLE]))

    def drop_later(self, later: Report) -> None:
        """Count what a later step dropped of the pairs that were kept."""
        self.num_kept -= later.dropped.total()
        self.dropped += later.dropped
        self.examples = later.examples | self.examples

    def to_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return {
            "read": self.num_read,
            "kept": self.num_kept,
            "dropped": dict(self.dropped),
            "examples": {reason: pairs for reason, pairs in self.examples.items() if pairs},
        }

    def check_not_empty(self, where: str) -> None:
        """Refuse to continue with nothing."""
        if self.num_kept:
            return
        why = f"{self.num_read:,} were read, and dropped: {self._reasons()}"
        why = why if self.dropped else "none was read"
        raise ValueError(f"data: no sentence pair is left of {where}; {why}.")

    def __str__(self) -> str:
        return f"{self.num_kept:,} of {self.num_read:,} pairs kept; dropped: {self._reasons()}."

    def _reasons(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Report:
        """Read back what `to_dict` gave."""
        examples = {
            reason: [(a, b) for a, b in pairs] for reason, pairs in saved["examples"].items()
        }
        return cls(saved["read"], saved["kept"], Counter(saved["dropped"]), examples)


def clean_pairs(
    lines: Iterable[Line],
    config: CleaningConfig,
    report: Report,
    *,
    held_out: HeldOut = (set(), set()),
    limit: int | None = None,
    processes: int = 1,
    backend: str = "processes",
) -> Iterator[Pair]:
    """Pass on the training pairs to keep, and count the others.

    Args:
        lines: What a reader gives.
        config: What to drop.
        report: Where to count.
        held_out: Fingerprints of the held-out sentences of each of the two languages.
        limit: Keep no more pairs than this; reading goes on, so that damage further down is found.
        processes: Processes that look at the lines; 0: one for every core.
        backend: What runs them: "processes" of this machine, or "ray".
    """
    seen, shared = SeenFingerprints(), (config, held_out)
    judged = ordered_map(judge, chunks(lines), shared=shared, processes=processes, backend=backend)
    for block, (reasons, fingerprints) in judged:
        if config.deduplicate:
            open_ones = [place for place, reason in enumerate(reasons) if reason is None]
            for place, is_new in zip(open_ones, seen.add(fingerprints[open_ones]), strict=True):
                reasons[place] = None if is_new else "repetition"
        for line, reason in zip(block, reasons, strict=True):
            report.num_read += 1
            pair = None if isinstance(line, Problem) else line
            if reason is None and limit is not None and report.num_kept >= limit:
                reason, pair = "beyond the limit", None
            if reason is not None:
                report.drop(reason, pair)
            else:
                report.num_kept += 1
                assert not isinstance(line, Problem)
                yield line


def judge(
    lines: Sequence[Line], config: CleaningConfig, held_out: HeldOut
) -> tuple[list[str | None], Fingerprints]:
    """For every line, why it is dropped, if it is, and its fingerprint."""
    reasons = [_reason(line, config, held_out) for line in lines]
    fingerprints = np.zeros(len(lines), dtype=np.uint64)
    if config.deduplicate:
        for place, (line, reason) in enumerate(zip(lines, reasons, strict=True)):
            if reason is None and not isinstance(line, Problem):
                fingerprints[place] = fingerprint("\t".join(line))
    return reasons, fingerprints


def keep_readable(lines: Iterable[Line], report: Report) -> Iterator[Pair]:
    """Pass on evaluation pairs: only what is empty or unreadable is left out, and counted."""
    for line in lines:
        report.num_read += 1
        if isinstance(line, Problem):
            report.drop(line.value)
        elif not all(line):
            report.drop("empty", line)
        else:
            report.num_kept += 1
            yield line


def _reason(line: Line, config: CleaningConfig, held_out: HeldOut) -> str | None:
    if isinstance(line, Problem):
        return line.value
    if not all(line):
        return "empty"
    lengths = [len(text) for text in line]
    if max(lengths) > config.max_characters:
        return "too long"
    short, long = sorted(max(length, _SHORTEST_COMPARED) for length in lengths)
    if long > config.max_ratio * short:
        return "length ratio"
    if config.drop_identical and line[0] == line[1]:
        return "identical sides"
    if config.drop_held_out and any(
        known and fingerprint(letters(text)) in known
        for text, known in zip(line, held_out, strict=True)
    ):
        return "held out"
    return None


def report_table(reports: Mapping[str, Report]) -> Table:
    """Reports by name, with one column per reason."""
    reasons = sorted({reason for report in reports.values() for reason in report.dropped})
    shown = Table(title="Sentence pairs", title_justify="left")
    shown.add_column("pair")
    for column in ("read", "kept", *reasons):
        shown.add_column(column, justify="right")
    for name, report in reports.items():
        counts = (report.num_read, report.num_kept, *(report.dropped[r] for r in reasons))
        shown.add_row(name, *(f"{count:,}" if count else "" for count in counts))
    return shown


# -- sentences compared by 64 bits ----------------------------------------------------------------


def letters(text: str) -> str:
    """Reduce a sentence to its letters, marks and digits, without case, to compare it."""
    return unicodedata.normalize("NFKC", text).casefold().translate(_LETTERS) or text


class _Letters(dict[int, int | None]):
    """What `str.translate` makes of a character: itself, or nothing; decided when it is met."""

    def __missing__(self, code: int) -> int | None:
        character = chr(code)
        is_kept = character.isalnum() or unicodedata.category(character).startswith("M")
        self[code] = code if is_kept else None
        return self[code]


_LETTERS = _Letters()


def fingerprint(text: str) -> int:
    """Hash a sentence to 64 bits; two of four billion may share one by chance."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class SeenFingerprints:
    """Fingerprints of everything so far, on disk, so that memory stays flat.

    They are kept in sorted files, each at least twice as long as the next: a few binary searches
    tell whether a fingerprint is new, and every fingerprint is merged a few times only.

    The files have no names, and go with this object.
    """

    def __init__(self) -> None:
        self._runs: list[Fingerprints] = []

    def add(self, fingerprints: Fingerprints) -> npt.NDArray[np.bool_]:
        """Keep fingerprints; returns which are new, the first of equal ones counting."""
        distinct, first = np.unique(fingerprints, return_index=True)
        known = np.zeros(len(distinct), dtype=np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, distinct), len(run) - 1)
            known |= run[places] == distinct
        is_new = np.zeros(len(fingerprints), dtype=np.bool_)
        is_new[first[~known]] = True
        self._keep(distinct[~known])
        return is_new

    def _keep(self, fingerprints: Fingerprints) -> None:
        if not len(fingerprints):
            return
        merged = [fingerprints]
        while self._runs and len(self._runs[-1]) < 2 * sum(map(len, merged)):
            merged.append(self._runs.pop())
        with tempfile.TemporaryFile() as file:  # what is mapped outlives its name
            run: Fingerprints = np.memmap(file, np.uint64, "w+", shape=(sum(map(len, merged)),))
        np.concatenate(merged, out=run)
        run.sort(kind="stable")
        self._runs.append(run)

"""Fingerprints: sentences compared by 64 bits, and those of everything so far on disk."""

from __future__ import annotations

import hashlib
import tempfile
import unicodedata

import numpy as np
import numpy.typing as npt

Fingerprints = npt.NDArray[np.uint64]


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

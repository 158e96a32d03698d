"""What has been seen: fingerprints on disk, in sorted runs, so that memory stays flat."""

from __future__ import annotations

import tempfile

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.uint64]


class Seen:
    """Fingerprints of everything so far.

    They are kept in sorted files, each at least twice as long as the next: a few binary searches
    tell whether a fingerprint is new, and every fingerprint is merged a few times only.

    The files have no names, and go with this object.
    """

    def __init__(self) -> None:
        self._runs: list[Marks] = []

    def add(self, marks: Marks) -> npt.NDArray[np.bool_]:
        """Keep fingerprints; returns which are new, the first of equal ones counting."""
        distinct, first = np.unique(marks, return_index=True)
        known = np.zeros(len(distinct), dtype=np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, distinct), len(run) - 1)
            known |= run[places] == distinct
        is_new = np.zeros(len(marks), dtype=np.bool_)
        is_new[first[~known]] = True
        self._keep(distinct[~known])
        return is_new

    def _keep(self, marks: Marks) -> None:
        if not len(marks):
            return
        merged = [marks]
        while self._runs and len(self._runs[-1]) < 2 * sum(map(len, merged)):
            merged.append(self._runs.pop())
        with tempfile.TemporaryFile() as file:  # what is mapped outlives its name
            run: Marks = np.memmap(file, np.uint64, "w+", shape=(sum(map(len, merged)),))
        np.concatenate(merged, out=run)
        run.sort(kind="stable")
        self._runs.append(run)

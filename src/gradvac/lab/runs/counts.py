"""The counts behind a score, sentence by sentence, so that it can be computed for other samples.

BLEU and F1 are not means over sentences but functions of sums over them: matching n-grams, correct
entities. With those counts, the score of any sample of the sentences is one sum away, which is
what a bootstrap needs. A recipe writes them next to its scores, in
`RUN/scores/SET.WEIGHTS.npz`.
"""

# N sentences, C counts

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac.utils.files import hash_of, open_arrays, write_bytes

Counts = NDArray[np.int64] | NDArray[np.float64]
Floats = NDArray[np.float64]
_ABOUT = "about"
_MOST_BYTES = 1 << 30  # unpacked; 100 tasks of 10,000 sentences take a tenth
_ORDER = 4  # longest n-gram of BLEU


@dataclass(frozen=True)
class SentenceCounts:
    """The counts that one metric is computed from.

    Attributes:
        metric: Its name, as in `TaskScores`.
        formula: How a score follows from the sum of counts: one of `FORMULAS`.
        by_task: Task -> counts of every sentence, `[N, C]`.
        sentences: Task -> what identifies the sentences and what was to be found in them, from
            `identify`; only scores of the same ones can be compared sentence by sentence.
    """

    metric: str
    formula: str
    by_task: Mapping[str, Counts]
    sentences: Mapping[str, str]

    def score(self, task: str) -> float:
        """The score of all sentences."""
        return float(FORMULAS[self.formula](self.by_task[task].sum(0).astype(np.float64)))


def identify(lines: Sequence[str] | Sequence[Sequence[str]]) -> str:
    """A hash that identifies a set of sentences and what was to be found in them."""
    return hash_of([line if isinstance(line, str) else list(line) for line in lines])


def bleu(sums: Floats) -> Floats:
    """sacreBLEU's corpus BLEU with its default smoothing, `[..., C]` -> `[...]`.

    Args:
        sums: Matches by n-gram length, n-grams by length, words of the translation and of the
            reference.
    """
    matches, totals = sums[..., :_ORDER], sums[..., _ORDER : 2 * _ORDER]
    ours, theirs = sums[..., 2 * _ORDER], sums[..., 2 * _ORDER + 1]
    has_some = totals > 0
    # A length without a match counts as half a match, the next one as a quarter, and so on.
    halvings = np.cumsum(has_some & (matches == 0), axis=-1)
    matched = np.where(matches > 0, matches, 0.5**halvings)
    precisions = np.divide(matched, totals, out=np.zeros_like(matched), where=has_some)
    logs = np.log(precisions, out=np.full_like(precisions, -np.inf), where=precisions > 0)
    ratio = np.divide(theirs, ours, out=np.full_like(ours, np.inf), where=ours > 0)
    with np.errstate(invalid="ignore"):
        score = 100.0 * np.exp(np.minimum(0.0, 1.0 - ratio) + logs.mean(-1))
    return np.where(matches.any(-1), score, 0.0)


def f1(sums: Floats) -> Floats:
    """F1 in percent, from the numbers of correct, predicted and gold spans."""
    total = sums[..., 1] + sums[..., 2]
    return np.divide(200.0 * sums[..., 0], total, out=np.zeros_like(total), where=total > 0)


def percentage(sums: Floats) -> Floats:
    """How many of all, in percent: words with the right tag, words. Or a mean, times 100."""
    part, total = sums[..., 0], sums[..., 1]
    return np.divide(100.0 * part, total, out=np.zeros_like(total), where=total > 0)


FORMULAS: dict[str, Callable[[Floats], Floats]] = {"bleu": bleu, "f1": f1, "percentage": percentage}


def write_counts(path: Path, counts: Sequence[SentenceCounts]) -> None:
    """Write the counts of one set; see `RunFolder.counts_of`."""
    about = [
        {"metric": one.metric, "formula": one.formula, "sentences": dict(one.sentences)}
        for one in counts
    ]
    arrays: dict[str, Any] = {_ABOUT: np.array(json.dumps(about))}
    for number, one in enumerate(counts):
        arrays |= {f"{number} {task}": values for task, values in one.by_task.items()}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    write_bytes(path, file.getvalue())


def read_counts(path: Path) -> dict[str, SentenceCounts]:
    """Metric -> counts; empty if there is no such file.

    Raises:
        ValueError: The file is damaged, or something else.
    """
    if not path.is_file():
        return {}
    try:
        with open_arrays(path.read_bytes(), _MOST_BYTES) as arrays:
            counts = [
                SentenceCounts(
                    one["metric"],
                    one["formula"],
                    {task: arrays[f"{number} {task}"] for task in one["sentences"]},
                    one["sentences"],
                )
                for number, one in enumerate(json.loads(str(arrays[_ABOUT])))
            ]
    except Exception as error:  # odd contents make zipfile, zlib and NumPy raise anything
        raise ValueError(
            f"{path}: holds no counts by sentence, or is damaged ({error}); score the run again."
        ) from None
    unknown = [one.formula for one in counts if one.formula not in FORMULAS]
    if unknown:
        raise ValueError(
            f"{path}: has a metric of formula {unknown[0]!r}, but there are {', '.join(FORMULAS)}; "
            "it was written by another version: score the run again."
        )
    return {one.metric: one for one in counts}

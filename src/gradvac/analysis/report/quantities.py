"""What every pair of tasks has, by step and component (similarity, target, ...), and its packing.

The arrays become short text that a browser unpacks at once. A cosine is shown with three digits, so
it is kept as an integer number of thousandths. Similarities move slowly, so each step is stored as
the difference to the step before; the high bytes, nearly all alike, are put apart from the low
ones, and gzip finds little left to say.
"""

import base64
import gzip
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis import statistics, views
from gradvac.analysis.record import Record
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known
from gradvac.sides import side_of

Values = NDArray[np.floating]

ALL = "all components"
UNIT = 0.001
MISSING = -32768
_LIMIT = 32.0


@dataclass(frozen=True, eq=False)
class Quantity:
    """Something that every pair of tasks has.

    Attributes:
        key: Name in the page's controls.
        values: `[S, K, T, T]`.
        steps: `[S]`.
        rows: What the task of a row is, in words; "" where (i, j) is (j, i), so that half of the
            values will do.
        columns: What the task of a column is.
        whole: Whether its one "step" stands for the whole of training.
        averages: Mean -> position of the component that holds it, where it is not a mean of others.
    """

    key: str
    values: Values
    steps: NDArray[np.int64]
    rows: str = ""
    columns: str = ""
    whole: bool = False
    averages: dict[str, int] = field(default_factory=dict)

    def packed(self, stride: int) -> dict[str, Any]:
        """Every `stride`-th step and the last, and the mean over all, as the page reads it."""
        kept = np.unique(np.append(np.arange(0, len(self.steps), stride), len(self.steps) - 1))
        num_tasks = self.values.shape[-1]
        rows, columns = np.tril_indices(num_tasks, num_tasks if self.rows else -1)
        pairs = self.values[:, :, rows, columns]
        return {
            "key": self.key,
            "steps": self.steps[kept].tolist(),
            "numSteps": len(self.steps),
            "shape": list(pairs[kept].shape),
            "symmetric": not self.rows,
            "rows": self.rows,
            "columns": self.columns,
            "whole": self.whole,
            "averages": self.averages,
            "limit": _limit(self.values),
            "packed": pack(pairs[kept]),
            "mean": pack(mean_where_known(pairs, axis=0)[None]),
        }


def quantities(similarities: Similarities, run: Run) -> list[Quantity]:
    """Everything that the pairs of a source have."""
    made = [Quantity("similarity", similarities.values, similarities.steps)]
    if similarities.across is not None:
        made.append(_without_noise(similarities))
    if similarities.lines == "training" and run.record is not None:
        made += _rule_quantities(run.record)
    return made


def _without_noise(similarities: Similarities) -> Quantity:
    """Pooled over steps, and over components for means: no mean of values that were divided."""
    assert similarities.across is not None
    by_component = mean_where_known(similarities.across, axis=0)  # [K, T, T]
    values = [statistics.correct(one).values for one in by_component]
    sides = {side_of(name) for name in similarities.components}
    means: dict[str, str | None] = {ALL: None}
    means |= {side: side for side in views.SIDES if side in sides and len(sides) > 1}
    averages = {}
    for name, side in means.items():
        corrected = statistics.corrected(similarities, side)
        if corrected is not None and name not in similarities.components:
            averages[name] = len(values)
            values.append(corrected.values)
    last = similarities.steps[-1:]
    return Quantity("without noise", np.stack(values)[None], last, whole=True, averages=averages)


def _rule_quantities(record: Record) -> list[Quantity]:
    """Targets, and how often a pair was active, where the rule has them."""
    made = []
    rows, columns = "the task that is altered", "against this task"
    if not np.isnan(record.target).all():
        made.append(Quantity("target", record.target, record.steps, rows, columns))
    if record.active.any():
        active = np.where(np.isnan(record.similarity), np.nan, record.active)
        spared = np.setdiff1d(np.arange(len(record.tasks)), record.eligible())
        active[:, :, spared] = np.nan  # never altered, whatever they do
        share = mean_where_known(active, axis=0)[None]
        last = record.steps[-1:]
        made.append(Quantity("share of steps active", share, last, rows, columns, whole=True))
    return made


def _limit(values: Values) -> float:
    """Where colours end: nearly all pairs lie within, and outliers do not pale the rest."""
    others = values[..., ~np.eye(values.shape[-1], dtype=bool)]
    sizes = np.abs(others[~np.isnan(others)])
    return round(float(np.quantile(sizes, 0.995)), 3) if sizes.size else 1.0


def pack(values: NDArray[np.floating]) -> str:
    """Pack `[S, K, P]` into text; NaN is kept, and what is not within +-32 is cut off."""
    missing = np.isnan(values)
    whole = np.rint(np.where(missing, 0.0, values).clip(-_LIMIT, _LIMIT) / UNIT)
    coded = np.where(missing, MISSING, whole).astype("<i2").view("<u2")
    # Unsigned: differences wrap around, and the running sum in the browser wraps back.
    moves = np.diff(coded, axis=0, prepend=np.zeros_like(coded[:1]))
    planes = moves.reshape(-1).view(np.uint8).reshape(-1, 2).T  # low bytes, then high bytes
    return base64.b64encode(gzip.compress(planes.tobytes(), 6, mtime=0)).decode("ascii")


def unpack(text: str, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """What the page does, in NumPy: the inverse of `pack` up to rounding."""
    planes = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1)
    moves = np.ascontiguousarray(planes.T).view("<u2").reshape(shape)
    coded = np.cumsum(moves, axis=0, dtype=np.uint16).view(np.int16)
    return np.where(coded == MISSING, np.nan, coded * UNIT)

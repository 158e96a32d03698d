"""How often a rule could act, and did."""

# S steps, K components, T tasks

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.components import weighty
from gradvac.analysis.record import Record

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RuleCounts:
    """Directed pairs (i, j) at every step, over the layers of the model, each `[S]`.

    Only eligible pairs count: task i is vaccinated, and their similarity is known. Normalisations
    are left out: they hold few numbers and would count as much as a layer.

    Attributes:
        eligible: Pairs that the rule could alter.
        active: Of these, pairs that it altered.
        conflicts: Of these, pairs with negative similarity, where PCGrad would act.
    """

    eligible: Counts
    active: Counts
    conflicts: Counts

    def share(self, part: Counts) -> NDArray[np.float64]:
        """Part of the eligible pairs at every step; NaN where there are none."""
        shares = np.full(len(part), np.nan)
        np.divide(part, self.eligible, out=shares, where=self.eligible > 0)
        return shares


def rule_counts(record: Record) -> RuleCounts:
    """Count what the rule could do and what it did."""
    layers = weighty(record.components)
    rows = np.ix_(np.arange(len(record.steps)), np.flatnonzero(layers), record.eligible())
    others = ~np.eye(len(record.tasks), dtype=bool)[record.eligible()]
    similarity = record.similarity[rows]
    eligible = ~np.isnan(similarity) & others

    def counted(which: NDArray[np.bool_]) -> Counts:
        return np.asarray((which & eligible).sum(axis=(1, 2, 3)), dtype=np.int64)

    return RuleCounts(counted(eligible), counted(record.active[rows]), counted(similarity < 0))

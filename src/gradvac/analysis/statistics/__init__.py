"""Statistics of similarities: do relatives share gradients, where, when, and does it matter?

Matrices are `[T, T]` cosines, rows in task order. Pairs (i, j) of a matrix share tasks and are not
independent, so every p-value here comes from permuting *tasks* (or runs), and every interval from
resampling them. A p-value is (1 + as extreme) / (1 + permutations): never 0. NaN (unknown) pairs
are left out.

    _summaries.py   by side, by layer, by step, counts of active pairs
    _families.py    cluster order, dendrogram, family contrast, Mantel test
    _runs.py        similarity against score, comparison of two runs
"""

from gradvac.analysis.statistics._families import (
    Correlation,
    FamilyContrast,
    cluster_order,
    dendrogram,
    families_of,
    family_contrast,
    mantel,
)
from gradvac.analysis.statistics._runs import (
    RankCorrelation,
    RunComparison,
    compare_runs,
    match_tasks,
    similarity_against_score,
)
from gradvac.analysis.statistics._summaries import (
    active_counts,
    by_layer,
    by_step,
    conflict_counts,
    encoder_minus_decoder,
    known_counts,
    mean_matrix,
    mean_of_pairs,
)

__all__ = [
    "Correlation",
    "FamilyContrast",
    "RankCorrelation",
    "RunComparison",
    "active_counts",
    "by_layer",
    "by_step",
    "cluster_order",
    "compare_runs",
    "conflict_counts",
    "dendrogram",
    "encoder_minus_decoder",
    "families_of",
    "family_contrast",
    "known_counts",
    "mantel",
    "match_tasks",
    "mean_matrix",
    "mean_of_pairs",
    "similarity_against_score",
]

"""Statistics of similarities: do related tasks share gradients? Where, when, and does it matter?

Matrices are `[T, T]` cosines, rows in task order. Pairs (i, j) of a matrix share tasks and are not
independent, so every p-value and interval here is two-sided and comes from permuting *tasks* (or
runs), or from leaving them out one at a time. Where all permutations can be enumerated, they are;
otherwise a p-value is (1 + as extreme) / (1 + permutations), never 0. NaN (unknown) pairs are left
out. Parallel tests are corrected by `holm`.

    _summaries.py    by side, by layer, by step
    _chance.py       permutations, tests over tasks, several tests at once
    _families.py     cluster order, dendrogram, family contrast, Mantel test
    _differences.py  sides, layers, steps: differences within pairs
    _reliability.py  similarity without the noise of small samples
    _groups.py       groups of tasks that are stable
    _pushes.py       who pushes whom: predicted changes of losses
    _rule.py         how often the rule acted
    _runs.py         similarity against score, comparison of two runs
"""

from gradvac.analysis.statistics._chance import OverTasks, holm, mean_over_tasks
from gradvac.analysis.statistics._differences import (
    Change,
    ChangeOverSteps,
    Depth,
    change_over_steps,
    depth,
    encoder_minus_decoder,
    paired,
)
from gradvac.analysis.statistics._families import (
    Correlation,
    FamilyContrast,
    cluster_order,
    dendrogram,
    families_of,
    family_contrast,
    mantel,
)
from gradvac.analysis.statistics._groups import Group, Groups, stable_groups
from gradvac.analysis.statistics._pushes import (
    Pushes,
    measured_pushes,
    recorded_products,
    recorded_pushes,
)
from gradvac.analysis.statistics._reliability import REACH, Corrected, correct, corrected
from gradvac.analysis.statistics._rule import RuleCounts, rule_counts
from gradvac.analysis.statistics._runs import (
    RankCorrelation,
    RunComparison,
    compare_runs,
    match_tasks,
    similarity_against_score,
)
from gradvac.analysis.statistics._summaries import (
    by_layer,
    by_step,
    layer_matrices,
    mean_matrix,
    mean_of_pairs,
)

__all__ = [
    "REACH",
    "Change",
    "ChangeOverSteps",
    "Corrected",
    "Correlation",
    "Depth",
    "FamilyContrast",
    "Group",
    "Groups",
    "OverTasks",
    "Pushes",
    "RankCorrelation",
    "RuleCounts",
    "RunComparison",
    "by_layer",
    "by_step",
    "change_over_steps",
    "cluster_order",
    "compare_runs",
    "correct",
    "corrected",
    "dendrogram",
    "depth",
    "encoder_minus_decoder",
    "families_of",
    "family_contrast",
    "holm",
    "layer_matrices",
    "mantel",
    "match_tasks",
    "mean_matrix",
    "mean_of_pairs",
    "mean_over_tasks",
    "measured_pushes",
    "paired",
    "recorded_products",
    "recorded_pushes",
    "rule_counts",
    "similarity_against_score",
    "stable_groups",
]

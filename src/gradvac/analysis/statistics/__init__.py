"""Statistics of similarities: do related tasks share gradients? Where, when, and does it matter?

Matrices are `[T, T]` cosines, rows in task order. Pairs (i, j) of a matrix share tasks and are not
independent, so every p-value and interval here is two-sided and comes from permuting *tasks* (or
runs), or from leaving them out one at a time. Where all permutations can be enumerated, they are;
otherwise a p-value is (1 + as extreme) / (1 + permutations), never 0. NaN (unknown) pairs are left
out. Parallel tests are corrected by `holm`.

    summaries.py     means by side, layer, step; the rule; cosines without noise; influence
    significance.py  permutations, tests over tasks, families, Mantel, differences, runs
    clusters.py      cluster order, dendrogram, groups of tasks that are stable
"""

from gradvac.analysis.statistics.clusters import (
    TaskGroup,
    TaskGroups,
    cluster_order,
    dendrogram,
    stable_groups,
)
from gradvac.analysis.statistics.significance import (
    Change,
    ChangeOverSteps,
    Correlation,
    Depth,
    FamilyContrast,
    OverTasks,
    RankCorrelation,
    SimilarityComparison,
    change_over_steps,
    compare_similarities,
    depth,
    encoder_minus_decoder,
    families_of,
    family_contrast,
    holm,
    mantel,
    match_tasks,
    mean_over_tasks,
    paired,
    similarity_against_score,
)
from gradvac.analysis.statistics.summaries import (
    REACH,
    Corrected,
    Influence,
    RuleCounts,
    correct,
    corrected,
    layer_matrices,
    mean_by_layer,
    mean_by_step,
    mean_matrix,
    mean_of_pairs,
    measured_influence,
    recorded_influence,
    recorded_products,
    rule_counts,
)

__all__ = [
    "REACH",
    "Change",
    "ChangeOverSteps",
    "Corrected",
    "Correlation",
    "Depth",
    "FamilyContrast",
    "Influence",
    "OverTasks",
    "RankCorrelation",
    "RuleCounts",
    "SimilarityComparison",
    "TaskGroup",
    "TaskGroups",
    "change_over_steps",
    "cluster_order",
    "compare_similarities",
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
    "mean_by_layer",
    "mean_by_step",
    "mean_matrix",
    "mean_of_pairs",
    "mean_over_tasks",
    "measured_influence",
    "paired",
    "recorded_influence",
    "recorded_products",
    "rule_counts",
    "similarity_against_score",
    "stable_groups",
]

"""Statistics of similarities: do related tasks share gradients? Where, when, and does it matter?

Matrices are `[T, T]` cosines, rows in task order. Pairs (i, j) of a matrix share tasks and are not
independent, so that questions about *pairs* (relatives, distances) are tested by permuting tasks.
Where all permutations can be enumerated, they are; otherwise a p-value is (1 + as extreme) /
(1 + permutations), never 0. Questions about *means* (one side of the model against the other, one
step against another) are tested by leaving out tasks one at a time, and over the records of
training (`over_steps`), because whatever moves all tasks at once is one observation, however many
tasks there are; both have to agree. Two tasks are tested over records alone, and a measurement,
which has one set of lines, over tasks alone. A trend over layers also has to stand out from how
layers differ anyway. All tests are two-sided, NaN (unknown) pairs are left out, a test that is not
possible is NaN, and parallel tests are corrected by `holm`.

    summaries.py   by pair, layer and step, in clusters; nothing is tested
    noise.py       what noise does to cosines, and what is left without it
    means.py       tests of means, tasks left out one at a time
    over_steps.py  tests over the records of training, which resemble their neighbours
    pairs.py       tests of pairs, tasks permuted: relatives, distances, scores, two runs
    influence.py   the predicted effect of a step of one task on the loss of another
"""

from gradvac.analysis.statistics.influence import (
    Influence,
    measured_influence,
    recorded_influence,
    recorded_products,
)
from gradvac.analysis.statistics.means import (
    Change,
    Estimate,
    change_over_steps,
    depth,
    holm,
    mean_over_tasks,
    paired,
)
from gradvac.analysis.statistics.noise import (
    REACH,
    correct,
    corrected,
    noise_in_common,
    pair_pattern,
    task_means,
    without_factors,
    without_task_means,
)
from gradvac.analysis.statistics.pairs import (
    Correlation,
    SimilarityComparison,
    compare_similarities,
    families_of,
    family_contrast,
    mantel,
    match_tasks,
    similarity_against_score,
)
from gradvac.analysis.statistics.summaries import (
    LEAST,
    LayerSimilarity,
    RuleCounts,
    by_step,
    cluster_order,
    dendrogram,
    encoder_minus_decoder,
    layers_of,
    mean_by_layer,
    mean_by_step,
    mean_matrix,
    mean_of_pairs,
    rule_counts,
)

__all__ = [
    "LEAST",
    "REACH",
    "Change",
    "Correlation",
    "Estimate",
    "Influence",
    "LayerSimilarity",
    "RuleCounts",
    "SimilarityComparison",
    "by_step",
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
    "layers_of",
    "mantel",
    "match_tasks",
    "mean_by_layer",
    "mean_by_step",
    "mean_matrix",
    "mean_of_pairs",
    "mean_over_tasks",
    "measured_influence",
    "noise_in_common",
    "pair_pattern",
    "paired",
    "recorded_influence",
    "recorded_products",
    "rule_counts",
    "similarity_against_score",
    "task_means",
    "without_factors",
    "without_task_means",
]

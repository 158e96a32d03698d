"""What similarities are, before anything is tested: by pair, layer and step, in clusters."""

# S steps, K components, T tasks, L layers

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from gradvac.analysis.record import Record
from gradvac.analysis.similarities import Floats, Similarities, layer_of, mean_where_known, weighty
from gradvac.engine.components import DECODER, ENCODER, side_of

Matrix = NDArray[np.floating]
Counts = NDArray[np.int64]
NOTHING = 1e-7  # rounding errors around 0
LEAST = 0.01  # differences of cosines that are worth a claim


def mean_matrix(similarities: Similarities, side: str | None = None) -> Floats:
    """Mean over steps and over the components of a side (None: all), `[T, T]`.

    Of the components, those that `weighty` names.
    """
    chosen = weighty(similarities.components, side)
    if not any(chosen):
        raise ValueError(
            f"side: no component is in {side!r}; the components are "
            f"{', '.join(similarities.components[:6])}."
        )
    return mean_where_known(similarities.values[:, chosen], axis=(0, 1))


def mean_of_pairs(values: Matrix) -> Floats:
    """Mean over all pairs of different tasks, `[..., T, T]` -> `[...]`; NaN without any."""
    apart = ~np.eye(values.shape[-1], dtype=bool)
    return mean_where_known(values[..., apart], axis=-1)


def mean_by_layer(similarities: Similarities) -> dict[str, list[tuple[int, float]]]:
    """Side -> (layer, mean similarity of all pairs and steps), from the first layer to the last."""
    return {
        side: [(layer.number, float(mean_of_pairs(layer.matrix))) for layer in layers]
        for side, layers in layers_of(similarities).items()
    }


@dataclass(frozen=True, eq=False)
class LayerSimilarity:
    """A layer: mean similarity of pairs over steps `[T, T]`, and of all pairs by step `[S]`."""

    number: int
    matrix: Floats
    by_step: Floats


def layers_of(similarities: Similarities) -> dict[str, list[LayerSimilarity]]:
    """Side -> its layers, from the first to the last."""
    by_side: dict[str, dict[int, list[int]]] = {}
    for k, counts in enumerate(weighty(similarities.components)):
        name = similarities.components[k]
        number = layer_of(name)
        if number is not None and counts:
            by_side.setdefault(side_of(name), {}).setdefault(number, []).append(k)

    def made(number: int, members: list[int]) -> LayerSimilarity:
        values = similarities.values[:, members]
        by_step = mean_where_known(mean_of_pairs(values), axis=1)
        return LayerSimilarity(number, mean_where_known(values, axis=(0, 1)), by_step)

    return {
        side: [made(number, layers[number]) for number in sorted(layers)]
        for side, layers in by_side.items()
    }


def mean_by_step(similarities: Similarities, pair: tuple[str, str] | None = None) -> Floats:
    """Mean similarity at every step over components, of one pair or (None) of all, `[S]`."""
    chosen = weighty(similarities.components)
    if pair is None:
        return mean_where_known(mean_of_pairs(similarities.values[:, chosen]), axis=1)
    values = similarities.select(tasks=pair).values
    return mean_where_known(values[:, chosen, 0, -1], axis=1)


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

    def share(self, part: Counts, window: int = 1) -> NDArray[np.float64]:
        """Part of the eligible pairs at every step, or near it; NaN where there are none."""
        near = np.ones(window)
        some, all_pairs = (np.convolve(counts, near, "same") for counts in (part, self.eligible))
        shares = np.full(len(part), np.nan)
        np.divide(some, all_pairs, out=shares, where=all_pairs > 0)
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


def symmetric(matrix: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"matrix: must be square, [T, T], got shape {values.shape}.")
    return (values + values.T) / 2


def encoder_minus_decoder(similarities: Similarities) -> Floats:
    """How much more similar tasks are in the encoder than in the decoder, `[T, T]`."""
    return mean_matrix(similarities, ENCODER) - mean_matrix(similarities, DECODER)


def by_step(similarities: Similarities, side: str | None = None) -> Floats:
    """Mean over the components of a side (None: all), `[S, T, T]`."""
    return mean_where_known(similarities.values[:, weighty(similarities.components, side)], axis=1)


def dendrogram(matrix: Matrix) -> NDArray[np.float64]:
    """SciPy's linkage of the tasks `[T, T]`: average linkage on 1 - cosine, leaves in order."""
    if len(matrix) < 2:
        raise ValueError("matrix: one task has nothing to be clustered with; give at least two.")
    distances = 1.0 - np.asarray(symmetric(matrix), dtype=np.float64)
    unknown = np.isnan(distances)
    distances[unknown] = np.max(distances[~unknown], initial=1.0)
    np.fill_diagonal(distances, 0.0)
    condensed = squareform(distances.clip(min=0.0), checks=False)
    tree = hierarchy.linkage(condensed, method="average", optimal_ordering=True)
    return np.asarray(tree, dtype=np.float64)


def cluster_order(matrix: Matrix) -> list[int]:
    """Task positions such that similar tasks are neighbours."""
    if len(matrix) < 2:
        return list(range(len(matrix)))
    order: list[int] = hierarchy.leaves_list(dendrogram(matrix)).tolist()
    return order

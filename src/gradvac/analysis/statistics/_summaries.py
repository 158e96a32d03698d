"""Means over steps, components and pairs."""

# S steps, K components, T tasks

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.components import DECODER, ENCODER, layer_of, side_of, weighty
from gradvac.analysis.record import Record
from gradvac.analysis.similarities import Floats, Similarities, mean_where_known

Matrix = NDArray[np.floating]


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


def encoder_minus_decoder(similarities: Similarities) -> Floats:
    """How much more similar tasks are in the encoder than in the decoder, `[T, T]`."""
    return mean_matrix(similarities, ENCODER) - mean_matrix(similarities, DECODER)


def by_layer(similarities: Similarities) -> dict[str, list[tuple[int, float]]]:
    """Side -> (layer, mean similarity of all pairs and steps), from the first layer to the last."""
    means = mean_of_pairs(similarities.mean_over_steps())
    found: dict[str, dict[int, list[float]]] = {}
    chosen = weighty(similarities.components)
    for name, mean, counts in zip(similarities.components, means.tolist(), chosen, strict=True):
        layer = layer_of(name)
        if layer is not None and counts:
            found.setdefault(side_of(name), {}).setdefault(layer, []).append(mean)
    return {
        side: [(n, float(mean_where_known(np.array(own[n]), axis=0))) for n in sorted(own)]
        for side, own in found.items()
    }


def by_step(similarities: Similarities, pair: tuple[str, str] | None = None) -> Floats:
    """Mean similarity at every step over components, of one pair or (None) of all, `[S]`."""
    chosen = weighty(similarities.components)
    if pair is None:
        return mean_where_known(mean_of_pairs(similarities.values[:, chosen]), axis=1)
    values = similarities.select(tasks=pair).values
    return mean_where_known(values[:, chosen, 0, -1], axis=1)


def active_counts(record: Record) -> NDArray[np.int64]:
    """Pairs the rule altered at every step, over all components, `[S]`; (i, j) is not (j, i)."""
    return np.asarray(record.active.sum(axis=(1, 2, 3)), dtype=np.int64)


def conflict_counts(record: Record) -> NDArray[np.int64]:
    """Pairs with negative similarity, `[S]`, counted like `active_counts`."""
    return np.asarray((record.similarity < 0).sum(axis=(1, 2, 3)), dtype=np.int64)


def known_counts(record: Record) -> NDArray[np.int64]:
    """Pairs whose similarity is known, `[S]`, counted like `active_counts`."""
    others = ~np.eye(len(record.tasks), dtype=bool)
    return np.asarray((~np.isnan(record.similarity[..., others])).sum(axis=(1, 2)), dtype=np.int64)

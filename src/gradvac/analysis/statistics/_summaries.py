"""Means over steps, components and pairs."""

# S steps, K components, T tasks

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.components import layer_of, weighty
from gradvac.analysis.similarities import Floats, Similarities, mean_where_known
from gradvac.sides import side_of

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


def by_layer(similarities: Similarities) -> dict[str, list[tuple[int, float]]]:
    """Side -> (layer, mean similarity of all pairs and steps), from the first layer to the last."""
    return {
        side: [(layer, float(mean_of_pairs(matrix))) for layer, matrix in matrices]
        for side, matrices in layer_matrices(similarities).items()
    }


def layer_matrices(similarities: Similarities) -> dict[str, list[tuple[int, Floats]]]:
    """Side -> (layer, mean similarity of every pair over steps `[T, T]`), from the first layer."""
    means = similarities.mean_over_steps()
    by_side: dict[str, dict[int, list[Floats]]] = {}
    chosen = weighty(similarities.components)
    for name, mean, counts in zip(similarities.components, means, chosen, strict=True):
        layer = layer_of(name)
        if layer is not None and counts:
            by_side.setdefault(side_of(name), {}).setdefault(layer, []).append(mean)
    return {
        side: [
            (layer, mean_where_known(np.stack(layers[layer]), axis=0)) for layer in sorted(layers)
        ]
        for side, layers in by_side.items()
    }


def by_step(similarities: Similarities, pair: tuple[str, str] | None = None) -> Floats:
    """Mean similarity at every step over components, of one pair or (None) of all, `[S]`."""
    chosen = weighty(similarities.components)
    if pair is None:
        return mean_where_known(mean_of_pairs(similarities.values[:, chosen]), axis=1)
    values = similarities.select(tasks=pair).values
    return mean_where_known(values[:, chosen, 0, -1], axis=1)

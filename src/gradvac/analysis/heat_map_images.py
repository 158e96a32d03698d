"""Heat maps as bare pixels, for dashboards that show pictures while a run trains."""

# K components, T tasks

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradvac import Alignment
from gradvac.sides import side_of

# Orange for conflict, white for 0, blue for agreement, as in report and figures.
_COLOURS = np.array([[179, 88, 6], [250, 250, 250], [33, 102, 172]], dtype=np.float64)
_UNKNOWN = 160
_CELL = 16


def heat_maps(alignment: Alignment, tasks: Sequence[str]) -> dict[str, NDArray[np.uint8]]:
    """Similarity in each side of the model as pixels; waits for the device.

    Args:
        alignment: Of a step.
        tasks: All tasks, in the order of rows and columns; those absent from the step are grey.

    Returns:
        "similarity/encoder" and so on -> `[16 T, 16 T, 3]`; "similarity" for a model without sides.
    """
    places = [tasks.index(task) for task in alignment.tasks]
    similarity = alignment.similarity.float().cpu().numpy()
    sides = [side_of(name) for name in alignment.components]
    drawn = {}
    for side in dict.fromkeys(sides):
        chosen = [position for position, other in enumerate(sides) if other == side]
        matrix = np.full((len(tasks), len(tasks)), np.nan)
        matrix[np.ix_(places, places)] = similarity[chosen].mean(axis=0)
        name = f"similarity/{side}" if len(set(sides)) > 1 else "similarity"
        drawn[name] = _pixels(matrix)
    return drawn


def _pixels(matrix: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Colours of cosines; they end at the largest one, and the diagonal, always 1, is left out."""
    values = matrix.copy()
    np.fill_diagonal(values, np.nan)
    known = ~np.isnan(values)
    limit = float(np.abs(values[known]).max(initial=0.0)) or 1.0
    scaled = np.where(known, values, 0.0) / limit
    channels = [np.interp(scaled, [-1.0, 0.0, 1.0], _COLOURS[:, c]) for c in range(3)]
    pixels = np.stack(channels, axis=-1)
    pixels[~known] = _UNKNOWN
    return pixels.round().astype(np.uint8).repeat(_CELL, axis=0).repeat(_CELL, axis=1)

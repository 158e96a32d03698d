"""A heat map as bare pixels, for dashboards that show pictures while a run trains."""

import numpy as np
from numpy.typing import NDArray

# Blue for conflict, white for 0, red for agreement: told apart by all kinds of sight.
_COLOURS = np.array([[33, 102, 172], [247, 247, 247], [178, 24, 43]], dtype=np.float64)
_UNKNOWN = 160


def heat_map(matrix: NDArray[np.floating], *, cell: int = 16) -> NDArray[np.uint8]:
    """Colours of a matrix of cosines, `[T, T]` -> `[cell T, cell T, 3]`; NaN is grey."""
    values = np.clip(np.asarray(matrix, dtype=np.float64), -1.0, 1.0)
    channels = [np.interp(values, [-1.0, 0.0, 1.0], _COLOURS[:, c]) for c in range(3)]
    pixels = np.stack(channels, axis=-1)
    pixels[np.isnan(values)] = _UNKNOWN
    return pixels.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)

"""Arrays as short text that a browser unpacks at once.

A cosine is shown with three digits, so it is kept as an integer number of thousandths. Similarities
move slowly, so each step is stored as the difference to the step before; the high bytes, nearly all
alike, are put apart from the low ones, and gzip finds little left to say.
"""

# S steps, K components, P pairs

import base64
import gzip
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIT = 0.001
MISSING = -32768
_LIMIT = 32.0


def pack(values: NDArray[np.floating]) -> str:
    """Pack `[S, K, P]` into text; NaN is kept, and what is not within +-32 is cut off."""
    missing = np.isnan(values)
    whole = np.rint(np.where(missing, 0.0, values).clip(-_LIMIT, _LIMIT) / UNIT)
    coded = np.where(missing, MISSING, whole).astype("<i2").view("<u2")
    # Unsigned: differences wrap around, and the running sum in the browser wraps back.
    moves = np.diff(coded, axis=0, prepend=np.zeros_like(coded[:1]))
    planes = moves.reshape(-1).view(np.uint8).reshape(-1, 2).T  # low bytes, then high bytes
    return base64.b64encode(gzip.compress(planes.tobytes(), 6, mtime=0)).decode("ascii")


def pack_tasks(values: NDArray[np.floating]) -> list[list[float | None]]:
    """`[K, T]` with two digits: what fading needs."""
    nested: list[list[float | None]] = rounded(values, 2)
    return nested


def unpack(text: str, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """What the page does, in NumPy: the inverse of `pack` up to rounding."""
    planes = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1)
    moves = np.ascontiguousarray(planes.T).view("<u2").reshape(shape)
    coded = np.cumsum(moves, axis=0, dtype=np.uint16).view(np.int16)
    return np.where(coded == MISSING, np.nan, coded * UNIT)


def rounded(values: Any, digits: int = 4) -> Any:
    """Nested lists of short numbers for JSON; None where a value is not finite."""
    array = np.asarray(values, dtype=np.float64)
    nested = np.round(array, digits).astype(object)
    nested[~np.isfinite(array)] = None
    return nested.tolist()

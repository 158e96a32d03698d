"""One step for a log: its Alignment as a few numbers, and as pixels for dashboards."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gradvac.alignment import Alignment
from gradvac.engine.components import side_of

_MOST_PAIRS = 45  # of ten tasks; more would drown a log, and a record has them all


def step_values(alignment: Alignment) -> dict[str, float]:
    """What a step did and says of its tasks, for a log; waits for the device once.

    Returns:
        Means over components: "update_cosine" and "update_ratio", direction and length of the
        update against the plain sum; "active", share of pairs that were altered; "similarity", mean
        cosine between tasks with a gradient, and "conflicts", share of these below 0; NaN without
        any. Then of every task "loss/TASK", its part of the loss as it was given, and "norm/TASK",
        length of its whole gradient. "similarity/TASK~OTHER", mean cosine over components, of up to
        ten tasks; of more, "lowest/TASK", that of the pair in which the task conflicts most.
    """
    tasks, num = alignment.tasks, len(alignment.tasks)
    apart = ~torch.eye(num, dtype=torch.bool, device=alignment.gram.device)
    known = alignment.known_similarity.double()  # [K, T, T]
    cosines = known.where(apart, torch.nan)
    numbers = (~cosines.isnan()).sum()
    by_pair = cosines.nanmean(0)  # [T, T]
    pieces = {
        "update_cosine": alignment.update_cosine.mean(),
        "update_ratio": alignment.update_ratio.mean(),
        "active": alignment.active.sum().double()
        / max(1, len(alignment.components) * num * (num - 1)),
        "similarity": cosines.nansum() / numbers,
        "conflicts": (cosines < 0).sum().double() / numbers,
    }
    norms = alignment.gram.diagonal(dim1=1, dim2=2).sum(0).clamp_min(0).sqrt()
    pieces |= {f"loss/{task}": loss for task, loss in zip(tasks, alignment.losses, strict=True)}
    pieces |= {f"norm/{task}": norm for task, norm in zip(tasks, norms, strict=True)}
    if num * (num - 1) // 2 <= _MOST_PAIRS:
        pieces |= {
            f"similarity/{tasks[j]}~{tasks[i]}": by_pair[i, j] for i in range(num) for j in range(i)
        }
    else:
        lowest = by_pair.nan_to_num(torch.inf).amin(1)
        pieces |= {
            f"lowest/{task}": one
            for task, one in zip(tasks, lowest.where(lowest.isfinite(), torch.nan), strict=True)
        }
    values = torch.stack([piece.double() for piece in pieces.values()]).tolist()
    return dict(zip(pieces, values, strict=True))


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
    positions = [tasks.index(task) for task in alignment.tasks]
    similarity = alignment.similarity.float().cpu().numpy()
    sides = [side_of(name) for name in alignment.components]
    drawn = {}
    for side in dict.fromkeys(sides):
        chosen = [position for position, other in enumerate(sides) if other == side]
        matrix = np.full((len(tasks), len(tasks)), np.nan)
        matrix[np.ix_(positions, positions)] = similarity[chosen].mean(axis=0)
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

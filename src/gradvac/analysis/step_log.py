"""One step for a log: its Alignment as a few numbers, and as pixels for dashboards."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gradvac.alignment import Alignment
from gradvac.sides import side_of


def step_values(alignment: Alignment) -> dict[str, float]:
    """What a step did, as four means over components; waits for the device.

    Returns:
        "update_cosine" and "update_ratio": direction and length of the update against the plain
        sum. "active": share of pairs that were altered. "similarity": mean cosine between tasks
        with a gradient; NaN without any.
    """
    return {
        "update_cosine": float(alignment.update_cosine.mean()),
        "update_ratio": float(alignment.update_ratio.mean()),
        "active": _active_share(alignment),
        "similarity": _mean_similarity(alignment),
    }


def _active_share(alignment: Alignment) -> float:
    """Pairs that were altered, of all pairs."""
    num_tasks = len(alignment.tasks)
    num_pairs = len(alignment.components) * num_tasks * (num_tasks - 1)
    return float(alignment.active.sum()) / max(1, num_pairs)


def _mean_similarity(alignment: Alignment) -> float:
    """Over all components and pairs of tasks with a gradient; NaN without any."""
    has_gradient = alignment.norms > 0
    pairs = has_gradient[:, :, None] & has_gradient[:, None, :]
    pairs = pairs & ~torch.eye(len(alignment.tasks), dtype=torch.bool, device=pairs.device)
    return float(alignment.similarity.where(pairs, 0.0).sum() / pairs.sum())


_MOST_PAIRS = 45  # of ten tasks; more would drown a log, and a record has them all


def task_values(alignment: Alignment) -> dict[str, float]:
    """What a step says of tasks and pairs, for a log; waits for the device.

    Returns:
        "conflicts": share of pairs, over components, whose gradients point in opposite directions
        (negative cosine). "loss/TASK": its part of the loss, as it was given. "norm/TASK": length
        of its gradient, all components together. "similarity/TASK~OTHER": mean cosine over
        components, of at most ten tasks.
    """
    tasks, similarity = alignment.tasks, alignment.similarity
    has_gradient = alignment.norms > 0
    known = has_gradient[:, :, None] & has_gradient[:, None, :]
    sums = similarity.where(known, 0.0).sum(0).double()  # [T, T]
    numbers = known.sum(0).double()
    conflicts = (known & (similarity < 0)).sum().double() / (numbers.sum() - numbers.trace())
    norms = alignment.gram.diagonal(dim1=1, dim2=2).sum(0).clamp_min(0).sqrt()
    pieces = [conflicts, alignment.losses, norms, (sums / numbers).flatten()]
    flat = torch.cat([piece.reshape(-1).double().cpu() for piece in pieces]).tolist()
    num = len(tasks)
    values = {"conflicts": flat[0]}
    values |= {f"loss/{task}": flat[1 + n] for n, task in enumerate(tasks)}
    values |= {f"norm/{task}": flat[1 + num + n] for n, task in enumerate(tasks)}
    pairs = [(i, j) for i in range(num) for j in range(i)]
    if len(pairs) <= _MOST_PAIRS:
        cosines = flat[1 + 2 * num :]
        values |= {f"similarity/{tasks[j]}~{tasks[i]}": cosines[i * num + j] for i, j in pairs}
    return values


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

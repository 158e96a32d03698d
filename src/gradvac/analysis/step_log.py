"""An Alignment as a few numbers, for the log of any loop."""

import torch

from gradvac.alignment import Alignment


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

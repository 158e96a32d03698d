"""Which share of the rows each task gets: by size and temperature, cut by a cap on epochs."""

import math
from collections.abc import Mapping


def task_probabilities(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """P_i ~ (L_i / sum L)^(1 / temperature), normalised.

    Args:
        sizes: Task -> number of sentences.
        temperature: Positive; infinity gives equal shares.
    """
    empty = [task for task, size in sizes.items() if size <= 0]
    if empty or not sizes:
        what = f"task {empty[0]!r} has no data" if empty else "there is no task"
        raise ValueError(f"sizes: {what}; leave it out, or give it data.")
    if isinstance(temperature, str) or not temperature > 0:
        raise ValueError(f"temperature: must be a positive number, got {temperature!r}.")
    # Relative to the largest, so that neither extreme of the temperature leaves the number range.
    largest = max(sizes.values())
    powers = {task: (size / largest) ** (1.0 / temperature) for task, size in sizes.items()}
    total = math.fsum(powers.values())
    return {task: power / total for task, power in powers.items()}


def cap_epochs(
    shares: Mapping[str, float], sizes: Mapping[str, int], *, most_epochs: float, num_rows: float
) -> dict[str, float]:
    """Cut shares to what `most_epochs` allows; the rest grow in proportion, up to their own caps.

    Args:
        shares: Task -> share of the rows, adding up to 1.
        sizes: Task -> number of sentences.
        most_epochs: How often a task may be seen.
        num_rows: Rows that are drawn in all.

    Raises:
        ValueError: All tasks together have less data than that.
    """
    caps = {task: most_epochs * sizes[task] / num_rows for task in shares}
    if math.fsum(caps.values()) < 1.0:
        seen = num_rows / sum(sizes[task] for task in shares)
        raise ValueError(
            f"sampling.most_epochs = {most_epochs:g}: training draws {num_rows:,.0f} rows, which "
            f"is {seen:.3g} epochs of all data together; allow more, or train fewer steps."
        )
    cut: dict[str, float] = {}
    while True:
        free = {task: share for task, share in shares.items() if task not in cut}
        growth = (1.0 - math.fsum(cut.values())) / (math.fsum(free.values()) or 1.0)
        beyond = {task: caps[task] for task, share in free.items() if share * growth > caps[task]}
        if not beyond:
            return {task: cut.get(task, share * growth) for task, share in shares.items()}
        cut |= beyond

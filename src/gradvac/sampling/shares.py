"""Which share of the rows each task gets: by size and temperature, cut by a cap on epochs.

The temperature that sizes and length of training call for follows from the law of repetition.
Rows that are seen again teach less. Of n rows drawn from a task with U, as many are worth as

    D = n                                       if n <= U
    D = U (1 + R (1 - exp(-(n / U - 1) / R)))   otherwise

fresh ones, at most 1 + R times U (Muennighoff et al., NeurIPS 2023), and a task's loss falls with
D^-beta. The best temperature minimises the mean over tasks. It is looked for between 1 and 5: there
is no measured optimum outside, and the law knows nothing of what tasks learn from one another.

beta is the literature's for language models. R was found on translation (docs/results/auto.md
says on which runs, and which it was checked on); the literature's 15.4 is for corpora that are seen
a few times, and asks for far too flat mixtures here.
"""

import math
from collections.abc import Mapping

import numpy as np

MOST_USEFUL_REPEATS = 4.5  # R
_BETA = 0.353
_HOTTEST = 5.0


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


def useful_rows(size: float, drawn: float) -> float:
    """How many fresh rows the drawn rows of a task are worth.

    Args:
        size: Rows that the task has.
        drawn: Rows that training draws.
    """
    if drawn <= size:
        return drawn
    repeats = (drawn / size - 1) / MOST_USEFUL_REPEATS
    return float(size * (1 + MOST_USEFUL_REPEATS * (1 - np.exp(-repeats))))


def repetition_temperature(sizes: Mapping[str, int], num_rows: float) -> float:
    """The temperature that the law of repetition calls for, to two digits.

    Args:
        sizes: Task -> number of rows.
        num_rows: Rows that training draws in all.

    Examples:
        >>> sizes = {"fr": 21_305, "cs": 31_467, "hi": 3_000, "tr": 3_000}
        >>> [repetition_temperature(sizes, rows) for rows in (100_000, 450_000, 2_100_000)]
        [4.96, 1.91, 1.18]
    """

    def loss(temperature: float) -> float:
        shares = task_probabilities(sizes, temperature)
        worth = [useful_rows(size, num_rows * shares[task]) for task, size in sizes.items()]
        return float(np.mean(np.array(worth) ** -_BETA))

    tried = np.round(np.exp(np.linspace(0.0, np.log(_HOTTEST), 200)), 2).tolist()
    return float(min(tried, key=loss))

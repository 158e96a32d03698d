"""The temperature that sizes and length of training call for: the law of repetition.

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

from collections.abc import Mapping

import numpy as np

from gradvac.sampling.shares import task_probabilities

MOST_USEFUL_REPEATS = 4.5  # R
_BETA = 0.353
_HOTTEST = 5.0


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

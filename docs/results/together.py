"""Methods that may all be the same: their mean difference to a baseline; do they differ?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Values = Callable[[str], Mapping[int, float]]
"""Of a method: seed -> value."""

_GRADVAC = (
    *("gradvac", "gradvac_all", "gradvac_high", "gradvac_model", "gradvac_sides"),
    *("gradvac_matrices", "gradvac_beta1", "gradvac_beta3", "without_noise", "preconditioned"),
    *("encoder_only", "decoder_only", "table_only", "early", "late"),
)
_OTHERS = ("norm", "shuffled", "random", "frozen", "pcgrad", "pcgrad_layers")
_RULES = ("gradvac", "gradvac_model", "pcgrad", "pcgrad_layers")
_TUNED, _INTO, _INTO_TUNED = "temperature2", "into_english", "into_english_temperature2"


class Group(NamedTuple):
    """Methods that may all be the same, and what they are compared with."""

    said: str
    baseline: str
    methods: tuple[str, ...]


_GROUPS = (
    Group("GradVac with moving targets, all variants", "joint", _GRADVAC),
    Group("its controls, and PCGrad", "joint", _OTHERS),
    Group("both", "joint", _GRADVAC + _OTHERS),
    Group(
        "GradVac and PCGrad at temperature 2",
        _TUNED,
        (
            *(f"{_TUNED}_{rule}" for rule in _RULES),
            *(f"{_TUNED}_gradvac_all", f"{_TUNED}_without_noise"),
        ),
    ),
    Group("... into English", _INTO, tuple(f"{_INTO}_{rule}" for rule in _RULES)),
    Group(
        "... into English at temperature 2",
        _INTO_TUNED,
        tuple(f"{_INTO_TUNED}_{rule}" for rule in _RULES),
    ),
)


class Together(NamedTuple):
    """What some methods have in common.

    Attributes:
        num_methods: That have all seeds.
        num_seeds: That all have.
        mean: Of all differences to the baseline.
        reach: Half of its 95 % interval, over seeds.
        p_value: That methods with one and the same effect differ as much as these (F-test).
    """

    num_methods: int
    num_seeds: int
    mean: float
    reach: float
    p_value: float


def together_table(bleu: Values, loss: Values) -> str:
    """The table, in Markdown.

    Args:
        bleu: Average BLEU.
        loss: The best development loss.
    """
    lines = [
        "| methods | how many (seeds) | BLEU (95 % interval) | do they differ? | "
        "development loss (95 % interval) | do they differ? |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for group in _GROUPS:
        scores, losses = (_differences(group, values) for values in (bleu, loss))
        if scores.shape[0] > 1 and scores.shape[1] > 1:
            found, of_loss = together(scores), together(losses)
            cells = [f"{found.num_methods} ({found.num_seeds})", *_cells(found, 2)]
            lines.append(f"| {group.said} | {' | '.join([*cells, *_cells(of_loss, 4)])} |")
    return "\n".join(lines) + "\n"


def _differences(group: Group, values: Values) -> NDArray[np.float64]:
    """`[methods, seeds]`, of the methods that have as many seeds as most, or more."""
    baseline = values(group.baseline)
    known = {method: values(method) for method in group.methods}
    counts = [len(baseline.keys() & own.keys()) for own in known.values()]
    usual = int(np.median(counts)) if counts else 0
    kept = [own for own, count in zip(known.values(), counts, strict=True) if count >= usual]
    seeds = sorted(set.intersection(set(baseline), *map(set, kept))) if kept else []
    return np.array([[own[seed] - baseline[seed] for seed in seeds] for own in kept])


def together(differences: NDArray[np.float64]) -> Together:
    """The mean of differences `[methods, seeds]`, and whether methods differ.

    The interval is over seeds, since all methods share the baseline's run of a seed; the test is
    that of a two-way layout without repetition.
    """
    methods, seeds = differences.shape
    by_seed, by_method = differences.mean(0), differences.mean(1)
    error = by_seed.std(ddof=1) / np.sqrt(seeds)
    limit = stats.t.ppf(0.975, seeds - 1)
    rest = differences - by_seed - by_method[:, None] + differences.mean()
    noise = (rest**2).sum() / ((methods - 1) * (seeds - 1))
    ratio = seeds * by_method.var(ddof=1) / noise
    p_value = stats.f.sf(ratio, methods - 1, (methods - 1) * (seeds - 1))
    mean, reach = differences.mean(), limit * error
    return Together(methods, seeds, float(mean), float(reach), float(p_value))


def _cells(found: Together, digits: int) -> list[str]:
    low, high = found.mean - found.reach, found.mean + found.reach
    here = f"{found.mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return [here, f"p = {found.p_value:.2f}"]

"""What the paper says of similarities: numbers that the runs of a seed give."""

# P pairs of tasks

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gradvac.analysis import Run, Similarities, statistics, views

_INTO, _FROM, _BOTH = "into_english", "from_english", "both_directions"
_NEWS_INTO, _NEWS_FROM = "news-directions=any-to-en", "news-directions=en-to-any"
_MADE_INTO, _MADE_FROM = "directions=any-to-en", "directions=en-to-any"
_SUBJECT = "en-de"  # whose companion varies
SIDES = ("encoder", "decoder")

Runs = Mapping[str, Run]
"""Kind of run -> the run of a seed."""
Numbers = NDArray[np.float64]


class Claim(NamedTuple):
    """What the paper says of similarities, as a number with a sign.

    Attributes:
        said: In words.
        kinds: Of runs that it is about.
        values: From the runs of a seed to the values of pairs `[P]`, whose mean is the number.
        sign: Of the number in the paper.
        families: The place whose families are shuffled, if it is about families.
    """

    said: str
    kinds: tuple[str, ...]
    values: Callable[[Runs], Numbers]
    sign: int
    families: tuple[str, str] | None = None


def similarities(run: Run, lines: str = "same") -> Similarities:
    """What was measured by layer, on the same lines for all tasks or on different ones."""
    return next(s for s in run.measured if s.lines == lines and s.granularity == "all_layer")


def going(found: Similarities, into: bool) -> Similarities:
    """Only the tasks of a direction, by language."""
    tasks = [task for task in found.tasks if task.endswith("-en") == into]
    return found.select(tasks=sorted(tasks, key=lambda t: t.removeprefix("en-")))


def _pairs(found: Similarities, side: str = "model") -> Numbers:
    return np.asarray(views.pair_values(views.side_matrix(found, side)), dtype=np.float64)


def _mean(kind: str, side: str = "model", lines: str = "same") -> Callable[[Runs], Numbers]:
    return lambda runs: _pairs(similarities(runs[kind], lines), side)


def families_in(run: Run, side: str, step: int | None = None) -> statistics.FamilyContrast:
    """Are relatives more similar in a side of the model, at a step or in the mean of all?"""
    measured = similarities(run)
    found = going(measured, into=measured.tasks[0].endswith("-en"))
    if step is not None:
        found = found.select(steps=[step])
    families = statistics.families_of(found.tasks, run.families)
    return statistics.family_contrast(views.side_matrix(found, side), families)


def _contrast(kind: str, side: str) -> Callable[[Runs], Numbers]:
    return lambda runs: np.array([families_in(runs[kind], side).difference])


def _least_contrast(kind: str, side: str) -> Callable[[Runs], Numbers]:
    """At the checkpoint where relatives differ least from others."""

    def values(runs: Runs) -> Numbers:
        steps = similarities(runs[kind]).steps.tolist()
        return np.array([min(families_in(runs[kind], side, step).difference for step in steps)])

    return values


def _rise(kind: str, side: str) -> Callable[[Runs], Numbers]:
    """The last layer minus the first."""

    def values(runs: Runs) -> Numbers:
        layers = statistics.layers_of(similarities(runs[kind]))[side]
        return views.pair_values(layers[-1].matrix) - views.pair_values(layers[0].matrix)

    return values


def _minus(
    first: Callable[[Runs], Numbers], second: Callable[[Runs], Numbers]
) -> Callable[[Runs], Numbers]:
    return lambda runs: first(runs) - second(runs)


def _ways(runs: Runs) -> Numbers:
    """One model with both directions: into English minus out of it."""
    found = similarities(runs[_BOTH])
    return _pairs(going(found, into=True)) - _pairs(going(found, into=False))


def companions(runs: Runs) -> list[tuple[float, float]]:
    """Similarity of a language with its companion, and its score, of models with two languages."""
    points = []
    for kind, run in runs.items():
        if kind.startswith("with") and run.scores is not None:
            points.append((float(_pairs(similarities(run)).mean()), run.scores.by_task[_SUBJECT]))
    return points


def rank_correlation(runs: Runs) -> Numbers:
    """Of similarity and score, over companions."""
    first, second = zip(*companions(runs), strict=True)
    return np.array([stats.spearmanr(first, second).statistic])


def _family_claim(said: str, kind: str, side: str) -> Claim:
    return Claim(said, (kind,), _contrast(kind, side), 1, (kind, side))


CLAIMS = (
    _family_claim("Families (1), verses: into English, encoder", _INTO, "encoder"),
    _family_claim("Families (10), verses: from English, decoder", _FROM, "decoder"),
    _family_claim("... news in 18 languages: into English, encoder", _NEWS_INTO, "encoder"),
    _family_claim("... from English, decoder", _NEWS_FROM, "decoder"),
    _family_claim("... constructed: into English, encoder", _MADE_INTO, "encoder"),
    _family_claim("... from English, decoder", _MADE_FROM, "decoder"),
    Claim("Into English minus from English (2a), one model, verses", (_BOTH,), _ways, 1),
    Claim(
        "Into minus from English (2a), two models",
        (_INTO, _FROM),
        _minus(_mean(_INTO), _mean(_FROM)),
        1,
    ),
    Claim(
        "... on different lines",
        (_INTO, _FROM),
        _minus(_mean(_INTO, lines="different"), _mean(_FROM, lines="different")),
        1,
    ),
    Claim(
        "... news",
        (_NEWS_INTO, _NEWS_FROM),
        _minus(_mean(_NEWS_INTO), _mean(_NEWS_FROM)),
        1,
    ),
    Claim(
        "... constructed",
        (_MADE_INTO, _MADE_FROM),
        _minus(_mean(_MADE_INTO), _mean(_MADE_FROM)),
        1,
    ),
    *(
        Claim(
            f"{said}, {data}",
            (kind,),
            _minus(_mean(kind, "decoder"), _mean(kind, "encoder")),
            sign,
        )
        for said, sign, of in (
            ("Decoder minus encoder (4a), into English", 1, (_INTO, _NEWS_INTO, _MADE_INTO)),
            ("Decoder minus encoder (4a), from English", -1, (_FROM, _NEWS_FROM, _MADE_FROM)),
        )
        for kind, data in zip(of, ("verses", "news", "constructed"), strict=True)
    ),
    *(
        Claim(f"Last layer minus first (4b), {said}, {side}", (kind,), _rise(kind, side), sign)
        for said, kind, sign in (("into English", _INTO, 1), ("from English", _FROM, -1))
        for side in SIDES
    ),
    *(
        Claim(f"{said}, {side}", (kind,), _least_contrast(kind, side), 1)
        for said, kind, side in (
            ("Families at the worst checkpoint (4c), into English", _INTO, "encoder"),
            ("... from English", _FROM, "decoder"),
        )
    ),
    Claim(
        "Families in a tiny model minus in a small one (9), encoder",
        ("tiny", _FROM),
        _minus(_contrast("tiny", "encoder"), _contrast(_FROM, "encoder")),
        1,
    ),
    Claim(
        "... decoder",
        ("tiny", _FROM),
        _minus(_contrast("tiny", "decoder"), _contrast(_FROM, "decoder")),
        1,
    ),
    Claim(
        "A quarter of the batch minus the whole (11), decoder",
        ("quarter_batches", _FROM),
        _minus(_mean("quarter_batches", "decoder"), _mean(_FROM, "decoder")),
        -1,
    ),
)

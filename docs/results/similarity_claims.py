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
Values = Callable[[Runs], Numbers]


class Claim(NamedTuple):
    """What the paper says of similarities, as a number.

    Attributes:
        said: In words.
        kinds: Of runs that it is about.
        values: From the runs of a seed to the values of pairs `[P]`, whose mean is the number.
        families: The kind and side whose families are shuffled, if it is about families.
    """

    said: str
    kinds: tuple[str, ...]
    values: Values
    families: tuple[str, str] | None = None


def similarities(run: Run, lines: str = "same") -> Similarities:
    """What was measured by layer, on the same lines for all tasks or on different ones."""
    return next(s for s in run.measured if s.lines == lines and s.granularity == "all_layer")


def is_into(kind: str) -> bool:
    """Whether runs of a kind translate into English alone."""
    return kind in (_INTO, _NEWS_INTO, _MADE_INTO)


def going(found: Similarities, into: bool) -> tuple[str, ...]:
    """The tasks of a direction, by language."""
    tasks = [task for task in found.tasks if task.endswith("-en") == into]
    return tuple(sorted(tasks, key=lambda task: task.removeprefix("en-")))


def families_in(
    run: Run, side: str, *, into: bool, step: int | None = None
) -> statistics.FamilyContrast:
    """Are relatives more similar in a side of the model, at a step or in the mean of all?

    The means are of all pairs on the same lines; tested is what the report tests, similarities on
    different lines without the noise of tasks.
    """
    found = similarities(run)
    tasks = going(found, into)
    matrix = views.side_matrix(found if step is None else found.select(steps=[step]), side, tasks)
    return statistics.family_contrast(
        matrix,
        statistics.families_of(tasks, run.families),
        tested=views.side_pattern(views.for_pairs(found, run), side, tasks),
        in_common=views.shared_noise(found, run, tasks),
    )


def _pairs(found: Similarities, side: str = views.MODEL, *, into: bool | None = None) -> Numbers:
    tasks = None if into is None else going(found, into)
    matrix = views.side_matrix(found, side, tasks)
    return np.asarray(views.pair_values(matrix), dtype=np.float64)


def _mean(kind: str, side: str = views.MODEL, lines: str = "same") -> Values:
    return lambda runs: _pairs(similarities(runs[kind], lines), side, into=is_into(kind))


def _contrast(kind: str, side: str, step: int | None = None) -> Values:

    def values(runs: Runs) -> Numbers:
        found = families_in(runs[kind], side, into=is_into(kind), step=step)
        return np.array([found.within - found.between])

    return values


def _least_contrast(kind: str, side: str) -> Values:
    """At the checkpoint where relatives differ least from others."""

    def values(runs: Runs) -> Numbers:
        steps = similarities(runs[kind]).steps.tolist()
        return np.min([_contrast(kind, side, step)(runs) for step in steps], axis=0)

    return values


def _rise(kind: str, side: str) -> Values:
    """The last layer minus the first."""

    def values(runs: Runs) -> Numbers:
        layers = statistics.layers_of(similarities(runs[kind]))[side]
        return views.pair_values(layers[-1].matrix) - views.pair_values(layers[0].matrix)

    return values


def _minus(first: Values, second: Values) -> Values:
    return lambda runs: first(runs) - second(runs)


def _ways(runs: Runs) -> Numbers:
    """One model with both directions: into English minus out of it."""
    found = similarities(runs[_BOTH])
    return _pairs(found, into=True) - _pairs(found, into=False)


def companions(runs: Runs) -> list[tuple[float, float]]:
    """Similarity of a language with its companion, and its score, of models with two languages."""
    return [
        (float(_pairs(similarities(run)).mean()), run.scores.by_task[_SUBJECT])
        for run in runs.values()
        if run.scores is not None
    ]


def rank_correlation(runs: Runs) -> Numbers:
    """Of similarity and score, over companions."""
    first, second = zip(*companions(runs), strict=True)
    return np.array([stats.spearmanr(first, second).statistic])


def _family_claim(said: str, kind: str, side: str) -> Claim:
    return Claim(said, (kind,), _contrast(kind, side), (kind, side))


CLAIMS = (
    _family_claim("Families (1), verses: into English, encoder", _INTO, "encoder"),
    _family_claim("Families (10), verses: from English, decoder", _FROM, "decoder"),
    _family_claim("... news in 18 languages: into English, encoder", _NEWS_INTO, "encoder"),
    _family_claim("... from English, decoder", _NEWS_FROM, "decoder"),
    _family_claim("... constructed: into English, encoder", _MADE_INTO, "encoder"),
    _family_claim("... from English, decoder", _MADE_FROM, "decoder"),
    Claim("Into English minus from English (2a), one model, verses", (_BOTH,), _ways),
    Claim(
        "Into minus from English (2a), two models",
        (_INTO, _FROM),
        _minus(_mean(_INTO), _mean(_FROM)),
    ),
    Claim(
        "... on different lines",
        (_INTO, _FROM),
        _minus(_mean(_INTO, lines="different"), _mean(_FROM, lines="different")),
    ),
    Claim("... news", (_NEWS_INTO, _NEWS_FROM), _minus(_mean(_NEWS_INTO), _mean(_NEWS_FROM))),
    Claim(
        "... constructed", (_MADE_INTO, _MADE_FROM), _minus(_mean(_MADE_INTO), _mean(_MADE_FROM))
    ),
    *(
        Claim(
            f"Decoder minus encoder (4a), {said}, {data}",
            (kind,),
            _minus(_mean(kind, "decoder"), _mean(kind, "encoder")),
        )
        for said, of in (
            ("into English", (_INTO, _NEWS_INTO, _MADE_INTO)),
            ("from English", (_FROM, _NEWS_FROM, _MADE_FROM)),
        )
        for kind, data in zip(of, ("verses", "news", "constructed"), strict=True)
    ),
    *(
        Claim(f"Last layer minus first (4b), {said}, {side}", (kind,), _rise(kind, side))
        for said, kind in (("into English", _INTO), ("from English", _FROM))
        for side in SIDES
    ),
    *(
        Claim(f"{said}, {side}", (kind,), _least_contrast(kind, side))
        for said, kind, side in (
            ("Families at the worst checkpoint (4c), into English", _INTO, "encoder"),
            ("... from English", _FROM, "decoder"),
        )
    ),
    *(
        Claim(
            f"{said} {side}",
            ("tiny", _FROM),
            _minus(_contrast("tiny", side), _contrast(_FROM, side)),
        )
        for said, side in (
            ("Families in a tiny model minus in a small one (9),", "encoder"),
            ("...", "decoder"),
        )
    ),
    Claim(
        "A quarter of the batch minus the whole (11), decoder",
        ("quarter_batches", _FROM),
        _minus(_mean("quarter_batches", "decoder"), _mean(_FROM, "decoder")),
    ),
)

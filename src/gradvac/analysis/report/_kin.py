"""Sentences on relatives: families, known distances, groups."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.report._wording import (
    Sentence,
    inside,
    is_clear,
    listed,
    p_text,
    together,
    way,
    where,
)
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities

FAMILIES, DISTANCE, GROUPS = "Relatives", "Distance", "Groups"
_SLIGHT = 0.015  # differences that two digits hardly show


@dataclass(frozen=True)
class Finding:
    """What a test found in one part of the model, for the sentence and for the headline.

    Attributes:
        claim: The sentence if the test is clear.
        numbers: The numbers alone.
        p_value: Of the test, before others are considered.
    """

    claim: str
    numbers: str
    p_value: float


def family_findings(main: Similarities, run: Run) -> list[Finding]:
    """Within families against between them, in every part that has both."""
    findings = []
    noun = _noun(main).capitalize()
    for part in views.parts(main):
        families = statistics.families_of(part.tasks, run.families)
        try:
            contrast = statistics.family_contrast(
                views.side_matrix(main, part.side, part.tasks), families
            )
        except ValueError:  # no pair of relatives, or of others, is known
            continue
        within, between, difference, p_value, least = contrast
        digits = 2 if abs(difference) >= _SLIGHT else 3
        more = "more" if difference > 0 else "less"
        shown = abs(round(within, digits) - round(between, digits))  # what a reader subtracts
        claim = (
            f"{noun} of one family are {shown:.{digits}f} {more} similar than "
            f"others{where(part)}: {within:z.{digits}f} against {between:z.{digits}f}"
        )
        few = f"; so few cannot go below {least:.2f}" if least >= 0.05 else ""
        numbers = f"{within:z.2f} against {between:z.2f}{where(part)} ({p_text(p_value)}{few})"
        findings.append(Finding(claim, numbers, p_value))
    return findings


def say_families(main: Similarities, run: Run) -> list[Sentence]:
    """What families have to do with similarity, and who is left out."""
    if not any(run.families.get(task) for task in main.tasks):
        text = "The families of the tasks are not known, so nothing is said about them."
        return [Sentence(FAMILIES, text)]
    noun = _noun(main)
    findings = family_findings(main, run)
    said = _told(FAMILIES, findings, f"{noun.capitalize()} of one family against others")
    if not findings:
        said.append(Sentence(FAMILIES, _why_no_contrast(main, run)))
    for direction, tasks in task_names.directions(main.tasks):
        families = [run.families.get(task, "") for task in tasks]
        large = [name for name in dict.fromkeys(families) if name and families.count(name) > 1]
        members = {
            name: [t for t, f in zip(tasks, families, strict=True) if f == name] for name in large
        }
        if members:
            said.append(Sentence(FAMILIES, _shares(main, members, noun, way(direction))))
    unknown = [task for task in main.tasks if not run.families.get(task)]
    if unknown:
        text = f"Of no known family, and left out of this: {listed(unknown)} (see --families)."
        said.append(Sentence(FAMILIES, text))
    return said


def distance_findings(main: Similarities, run: Run) -> list[Finding]:
    """Similarity against known distance, in every part."""
    findings = []
    for part, matrix, distances in views.against_distance(main, run.distances):
        r, p_value = statistics.mantel(matrix, distances)
        assert run.distances is not None
        follows = "falls with" if r < 0 else "rises with"
        claim = f"Similarity {follows} {run.distances.name}{where(part)}: r = {r:z.2f}"
        findings.append(Finding(claim, f"r = {r:z.2f}{where(part)} ({p_text(p_value)})", p_value))
    return findings


def say_distances(main: Similarities, run: Run) -> list[Sentence]:
    """Whether similarity follows known distances."""
    if run.distances is None:
        return []
    what = f"Similarity against {run.distances.name}"
    said = _told(DISTANCE, distance_findings(main, run), what)
    missing = [task for task in main.tasks if task not in run.distances.tasks]
    if said and missing:
        text = f"Of unknown {run.distances.name}, and left out of this: {listed(missing)}."
        said.append(Sentence(DISTANCE, text))
    return said


def say_groups(main: Similarities, run: Run) -> list[Sentence]:
    """Groups that come back in samples of the data."""
    source = views.two_halves(run) or main
    suggestion = statistics.stable_groups(source)
    if suggestion.agreement is None:
        return [Sentence(GROUPS, f"No groups are suggested: {suggestion.why_none}.")]
    test = f"r = {suggestion.agreement.r:z.2f}, {p_text(suggestion.agreement.p_value)}"
    if not suggestion.found:
        return [Sentence(GROUPS, f"There are no stable groups: {suggestion.why_none} ({test}).")]
    names = dict(zip(source.tasks, task_names.labels(source.tasks), strict=True))
    groups = [
        f"{listed([names[task] for task in group.tasks], 12)} ({group.support:.0%})"
        for group in suggestion.found
    ]
    told = {task for group in suggestion.found for task in group.tasks}
    alone = [names[task] for task in source.tasks if task not in told]
    rest = f". In none: {listed(alone, 12)}" if alone else ""
    text = (
        f"Tasks that could train together, with the share of samples in which they do: "
        f"{together(groups)}{rest}. The same pairs stand out in two halves of the data ({test})."
    )
    return [Sentence(GROUPS, text, claims=True)]


def _told(about: str, findings: list[Finding], what: str) -> list[Sentence]:
    """A sentence for every clear finding, and one for the numbers of all others."""
    adjusted = statistics.holm([one.p_value for one in findings])
    said = [
        Sentence(about, f"{one.claim} ({p_text(p)}).", claims=True)
        for one, p in zip(findings, adjusted, strict=True)
        if is_clear(p)
    ]
    rest = [one.numbers for one, p in zip(findings, adjusted, strict=True) if not is_clear(p)]
    if rest:
        said.append(Sentence(about, f"{what}, not beyond chance: {together(rest)}."))
    return said


def _why_no_contrast(main: Similarities, run: Run) -> str:
    families = [run.families.get(task, "") for task in main.tasks]
    named = [name for name in families if name]
    if len(set(named)) == 1 and len(named) > 1:
        return "All tasks are of one family, so there is nothing to compare it with."
    if len(set(named)) == len(named):
        return "No family has two tasks here, so nothing can be said about families."
    return "Too few pairs are known to compare families."


def _shares(main: Similarities, members: Mapping[str, list[str]], noun: str, suffix: str) -> str:
    """What the most and the least similar families share."""
    sides = views.sides_of(main)
    shared = {
        name: {side: views.pair_mean(views.side_matrix(main, side, tasks)) for side in sides}
        for name, tasks in members.items()
    }
    ranked = sorted(shared, key=lambda name: -np.nan_to_num(max(shared[name].values()), nan=-9))
    shown = ranked if len(ranked) <= 3 else [*ranked[:2], ranked[-1]]
    parts = [
        f"{name} {noun} share "
        + ", ".join(f"{value:z.2f}{inside(side)}" for side, value in shared[name].items())
        for name in shown
    ]
    return together(parts) + suffix + "."


def _noun(main: Similarities) -> str:
    return "languages" if task_names.are_directions(main.tasks) else "tasks"

"""A task's name: which way a translation task goes, and between which languages.

A task may have any name. Two codes with a hyphen between them, as in "en-fr", are a direction:
from English into French. Tasks that share one language, the pivot, translate into it ("xx-en") or
out of it ("en-xx"); which language that is follows from the names of all tasks together.

Only this file takes task names apart or puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

DEFAULT_PIVOT = "en"
_ANY = "xx"  # stands for all languages but the pivot


class Direction(NamedTuple):
    """Two language codes, in the order of a task's name."""

    source: str
    target: str

    @property
    def name(self) -> str:
        """The task, as in "en-fr"."""
        return f"{self.source}-{self.target}"

    @property
    def turned(self) -> Direction:
        """The other way round."""
        return Direction(self.target, self.source)


def parse(task: str) -> Direction:
    """Source and target of a translation task, or the two languages of a pair.

    Raises:
        ValueError: The name is not two different codes with a hyphen between them.
    """
    direction = find_direction(task)
    if direction is None:
        raise ValueError(f"{task!r} must be two different codes, as in 'fr-de'")
    return direction


def find_direction(task: str) -> Direction | None:
    """Source and target of a task; None if its name is not a direction."""
    source, _, target = task.partition("-")
    is_one = bool(source and target) and source != target and "-" not in target
    return Direction(source, target) if is_one else None


def turned(task: str) -> str:
    """The task that goes the other way; the task itself if its name is not a direction."""
    direction = find_direction(task)
    return task if direction is None else direction.turned.name


def languages_of(task: str) -> tuple[str, ...]:
    """The codes in a task's name: two of a direction, else the name itself."""
    return find_direction(task) or (task,)


def pivot_of(tasks: Sequence[str]) -> str:
    """The language that all tasks share; English if none is shared, "" if several could be it."""
    directions = [direction for direction in map(find_direction, tasks) if direction is not None]
    if not directions or len(directions) < len(tasks):
        return DEFAULT_PIVOT
    shared = [code for code in directions[0] if all(code in direction for direction in directions)]
    if DEFAULT_PIVOT in shared or not shared:
        return DEFAULT_PIVOT
    return shared[0] if len(shared) == 1 or len(set(tasks)) > 1 else ""


def into(pivot: str) -> str:
    """The name of the direction into a pivot, as in "xx-en"."""
    return Direction(_ANY, pivot).name


def out_of(pivot: str) -> str:
    """The name of the direction out of a pivot, as in "en-xx"."""
    return Direction(pivot, _ANY).name


def is_into_pivot(direction: str) -> bool:
    """Whether `into` made this name."""
    parsed = find_direction(direction)
    return parsed is not None and parsed.source == _ANY


def direction_of(task: str, pivot: str = DEFAULT_PIVOT) -> str:
    """Whether a task translates into the pivot ("xx-en"), out of it ("en-xx"), or neither ("")."""
    parsed = find_direction(task)
    if parsed is None or pivot not in parsed:
        return ""
    return into(pivot) if parsed.target == pivot else out_of(pivot)


def by_direction(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Tasks by direction; one entry if there is only one."""
    pivot = pivot_of(tasks)
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(direction_of(task, pivot), []).append(task)
    return groups


def directions(tasks: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Directions with their tasks; a single one needs no name and has ""."""
    groups = by_direction(tasks)
    return [(name if len(groups) > 1 else "", members) for name, members in groups.items()]


def read_names(tasks: Sequence[str]) -> tuple[str, ...]:
    """Task names as given by a user: at least one, and all different."""
    has_order = isinstance(tasks, Iterable) and not isinstance(tasks, str | Set)
    names = tuple(tasks) if has_order else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"tasks: must be a non-empty list of names, got {tasks!r}.")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"tasks: {twice[0]!r} occurs twice; every task needs a name of its own.")
    return tuple(map(str, names))


def both_ways(tasks: Sequence[str]) -> tuple[str, list[str], list[str]] | None:
    """The pivot, the tasks into it, and those out of it; None with fewer than two of either."""
    pivot, groups = pivot_of(tasks), by_direction(tasks)
    inward, outward = groups.get(into(pivot), []), groups.get(out_of(pivot), [])
    return (pivot, inward, outward) if min(len(inward), len(outward)) > 1 else None


def are_directions(tasks: Sequence[str]) -> bool:
    """Whether every task translates into the pivot or out of it."""
    return "" not in by_direction(tasks)


def labels(tasks: Sequence[str]) -> list[str]:
    """Short names: the language where all tasks translate in one direction, else the task."""
    if len(by_direction(tasks)) > 1 or not are_directions(tasks):
        return list(tasks)
    return other_languages(tasks)


def other_languages(tasks: Sequence[str]) -> list[str]:
    """The language of each task that is not the pivot: "fr" for "en-fr", "fr-en" and "fr".

    Of a task between two other languages it is the target.
    """
    pivot = pivot_of(tasks)
    return [_other(languages_of(task), pivot) for task in tasks]


def _other(languages: tuple[str, ...], pivot: str) -> str:
    return languages[0] if languages[-1] == pivot else languages[-1]

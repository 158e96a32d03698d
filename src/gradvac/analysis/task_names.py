"""What the name of a translation task says: which way it goes, and of which language it is."""

from collections.abc import Sequence

TO_ENGLISH, FROM_ENGLISH = "xx-en", "en-xx"
_PIVOT = "en"


def direction_of(task: str) -> str:
    """Whether a task translates into English, out of it, or neither ("")."""
    source, _, target = task.partition("-")
    if target == _PIVOT and source != _PIVOT:
        return TO_ENGLISH
    return FROM_ENGLISH if source == _PIVOT and target else ""


def by_direction(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Tasks by direction; one entry if there is only one."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(direction_of(task), []).append(task)
    return found


def directions(tasks: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Directions with their tasks; a single one needs no name and has ""."""
    found = by_direction(tasks)
    return [(name if len(found) > 1 else "", own) for name, own in found.items()]


def labels(tasks: Sequence[str]) -> list[str]:
    """Short names: the language where all tasks translate in one direction, else the task."""
    if len(by_direction(tasks)) > 1 or not direction_of(tasks[0]):
        return list(tasks)
    return [language_of(task) for task in tasks]


def language_of(task: str) -> str:
    """The language of a task that is not English: "fr" for "en-fr", "fr-en" and "fr"."""
    source, _, target = task.partition("-")
    return source if target in ("", _PIVOT) else target

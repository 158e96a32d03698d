"""Statements, and words for numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradvac.analysis import views
from gradvac.analysis.statistics import OverTasks

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Statement:
    """A sentence of the report.

    Attributes:
        about: The question it answers.
        text: The sentence.
        claims: Whether it says more than numbers. Then a test stands behind it.
    """

    about: str
    text: str
    claims: bool = False


def is_clear(p_value: float) -> bool:
    """Whether a test says that something is there; a test that could not be made does not."""
    return bool(p_value < SIGNIFICANT)


def p_text(p_value: float) -> str:
    """A p-value, and a verdict where it shows nothing."""
    if not np.isfinite(p_value):
        return "too few for a test"
    if p_value < 0.0001:
        return "p < 0.0001"
    digits = 4 if p_value < 0.01 else 3 if p_value < 0.1 else 2
    return f"p = {p_value:.{digits}f}" + ("" if is_clear(p_value) else ", not significant")


def range_text(difference: OverTasks) -> str:
    """The interval of a difference, if there is one."""
    low, high = difference.interval
    if np.isnan(low):
        return "too few tasks for a test"
    return f"difference {low:+z.2f} to {high:+z.2f} over tasks"


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 task", "2 tasks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def ordinal(number: int) -> str:
    """As in "every 2nd step"."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"{number}{ending}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, not too many: "a, b and c", "a, b and 7 others"."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} others"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def where(section: views.Section) -> str:
    """As in " in the encoder (en-xx)"."""
    return inside(section.side) + way(section.direction)


def way(direction: str) -> str:
    """As in " (en-xx)"; nothing where all tasks go the same way."""
    return f" ({direction})" if direction else ""


def inside(side: str) -> str:
    """As in " in the encoder"; nothing for the whole model."""
    return f" in the {side}" if side in views.SIDES else ""

"""Words for numbers."""

from dataclasses import dataclass

import numpy as np

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Sentence:
    """What to say, and about what."""

    about: str
    text: str


def p_text(p_value: float) -> str:
    """A p-value, and a verdict where it shows nothing."""
    if not np.isfinite(p_value):
        return "too few for a test"
    digits = 4 if p_value < 0.01 else 3 if p_value < 0.1 else 2
    return f"p = {p_value:.{digits}f}" + ("" if p_value < SIGNIFICANT else ", not significant")


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 task", "2 tasks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

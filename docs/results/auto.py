"""What the law of repetition says of our measured mixtures, for several R, and what it brought.

Development losses are the published ones. The quadratic through them in log(temperature) says where
the optimum is, and what another temperature costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradvac.sampling import repetition_temperature, shares

FOUR = {"fr": 21_305, "cs": 31_467, "hi": 3_000, "tr": 3_000}
SMALL = (50_700, 45_209, 44_033, 33_930, 31_467, 23_369, 21_305, 17_329, 14_266, 7_633)
SMALLER = (7_404, 6_062, 4_975, 1_907, 1_334)
MANY = {str(n): size for n, size in enumerate((*[60_000] * 4, *SMALL, *SMALLER))}
CONSTRUCTED = {
    str(n): size
    for n, size in enumerate((5000, 1500, 3000, 400, 5000, 400, 3000, 1500, 5000, 3000))
}


class Setting(NamedTuple):
    """A setting whose temperatures were measured.

    Attributes:
        name: In words.
        sizes: Rows of every task.
        num_rows: That training sees.
        methods: Temperature -> method.
        part: Of the published numbers.
    """

    name: str
    sizes: dict[str, int]
    num_rows: float
    methods: dict[float, str]
    part: str = "methods"


_SHORT = {1: "temperature1", 2: "temperature2", 3: "temperature3", 5: "joint"}
_MANY = {n: f"many_temperature{n}" for n in (1, 2, 5)}
FITTED = (
    Setting("4 languages, 1,500 steps", FOUR, 1500 * 300, _SHORT),
    Setting("19 languages, 1,200 steps", MANY, 1200 * 600, _MANY),
)
_FULL = {n: f"full-temperature={n}.0" for n in (2, 5)}
CHECKED = (
    Setting("4 languages, 3,000 steps", FOUR, 3000 * 300,
            {2: "long_temperature2", 5: "long_joint"}),
    Setting("4 languages, full length", FOUR, 3500 * 600, _FULL),
    Setting("into English, 1,500 steps", FOUR, 1500 * 300,
            {2: "into_english_temperature2", 5: "into_english"}),
    Setting("constructed", CONSTRUCTED, 1100 * 51, {2: "temperature2", 5: "joint"}, "constructed"),
)  # fmt: skip


def losses(setting: Setting, published: Mapping[str, Any]) -> dict[float, float]:
    """Temperature -> the best development loss."""
    return {
        temperature: float(published[setting.part][name]["loss"][0])
        for temperature, name in setting.methods.items()
    }


def excess(measured: Mapping[float, float], temperature: float) -> tuple[float, float]:
    """The optimal temperature, and what another costs."""
    curve = np.polyfit(np.log(list(measured)), list(measured.values()), 2)
    best = -curve[1] / (2 * curve[0])
    lost = np.polyval(curve, math.log(temperature)) - np.polyval(curve, best)
    return math.exp(best), float(lost)


def law_table(published: Mapping[str, Any]) -> str:
    """What was measured, and what the law says for several R."""
    names = [f"fitted: {one.name}" for one in FITTED] + [f"checked: {one.name}" for one in CHECKED]
    lines = [f"| R | {' | '.join(names)} |", "|" + " --- |" * (1 + len(names))]
    found = []
    for one in FITTED:
        tried = ", ".join(f"{temperature:g}" for temperature in one.methods)
        found.append(f"optimum {excess(losses(one, published), 1.0)[0]:.2f} of {{{tried}}}")
    for one in CHECKED:
        first, second = sorted(one.methods, key=lambda t: losses(one, published)[t])
        found.append(f"{first:g} better than {second:g}")
    lines.append(f"| measured | {' | '.join(found)} |")
    chosen = shares.MOST_USEFUL_REPEATS
    try:
        for repeats in (4.0, 4.5, 5.0, 8.0, 15.4):
            shares.MOST_USEFUL_REPEATS = repeats
            cells = []
            for one in FITTED:
                temperature = repetition_temperature(one.sizes, one.num_rows)
                lost = excess(losses(one, published), temperature)[1]
                cells.append(f"{temperature:.2f}, lost {lost:.4f}")
            cells += [f"{repetition_temperature(one.sizes, one.num_rows):.2f}" for one in CHECKED]
            shown = f"**{repeats:g}**" if repeats == chosen else f"{repeats:g}"
            lines.append(f"| {shown} | {' | '.join(cells)} |")
    finally:
        shares.MOST_USEFUL_REPEATS = chosen
    return "\n".join(lines) + "\n"


def runs_table(published: Mapping[str, Any]) -> str:
    """Four languages, short and at full length: temperatures, and "auto"."""
    head = ["", "1", "2", "3", "5", '"auto"', '"auto" minus the best', "minus 5"]
    lines = []
    for length, own in published["auto"].items():
        means, (loss, every, small) = own["means"].values(), own["minus_5"]
        said = "short" if length == "short" else "full length"
        losses = [f"{one[0]:.3f}" for one in means]
        lines.append([f"{said}: development loss", *losses, _with_ends(own["minus_best"], 3)])
        lines[-1].append(_with_ends(loss, 3))
        scores = [f"{one[1]:.1f} / {one[2]:.1f}" for one in means]
        changes = f"{_with_ends(every, 1)} / {_with_ends(small, 1)}"
        lines.append(["BLEU, all / two small languages", *scores, "", changes])
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _with_ends(numbers: Sequence[float], digits: int) -> str:
    mean, low, high = (f"{number:+.{digits}f}" for number in numbers)
    return f"{mean} ({low} to {high})"

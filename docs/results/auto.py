"""Print what the law of repetition says of our measured mixtures, for several R.

    python docs/results/auto.py

Development losses are those of earlier runs (protocol.md). The quadratic through them in
log(temperature) says where the optimum is, and what another temperature costs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gradvac.sampling import repetition, repetition_temperature

FOUR = {"fr": 21_305, "cs": 31_467, "hi": 3_000, "tr": 3_000}
SMALL = (50_700, 45_209, 44_033, 33_930, 31_467, 23_369, 21_305, 17_329, 14_266, 7_633)
SMALLER = (7_404, 6_062, 4_975, 1_907, 1_334)
MANY = {str(n): size for n, size in enumerate((*[60_000] * 4, *SMALL, *SMALLER))}
CONSTRUCTED = {
    str(n): size
    for n, size in enumerate((5000, 1500, 3000, 400, 5000, 400, 3000, 1500, 5000, 3000))
}


class Setting(NamedTuple):
    """A setting whose temperatures were measured: temperature -> development loss."""

    name: str
    sizes: dict[str, int]
    num_rows: float
    losses: dict[float, float]


FITTED = (
    Setting("4 languages, 1,500 steps", FOUR, 1500 * 300,
            {1: 3.1303, 2: 3.0291, 3: 3.0525, 5: 3.1000}),
    Setting("19 languages, 1,200 steps", MANY, 1200 * 600, {1: 3.8802, 2: 3.7410, 5: 3.7173}),
)  # fmt: skip
CHECKED = (
    Setting("4 languages, 3,000 steps", FOUR, 3000 * 300, {2: 2.7737, 5: 2.9389}),
    Setting("4 languages, full length", FOUR, 3500 * 600, {2: 2.6228, 5: 2.8398}),
    Setting("into English, 1,500 steps", FOUR, 1500 * 300, {2: 2.3223, 5: 2.4145}),
    Setting("constructed, 1,100 steps", CONSTRUCTED, 1100 * 51, {2: 2.4827, 5: 2.6088}),
)


def excess(setting: Setting, temperature: float) -> tuple[float, float]:
    """The optimal temperature, and what another costs."""
    curve = np.polyfit(np.log(list(setting.losses)), list(setting.losses.values()), 2)
    best = -curve[1] / (2 * curve[0])
    lost = np.polyval(curve, math.log(temperature)) - np.polyval(curve, best)
    return math.exp(best), float(lost)


def main() -> None:
    """Print both tables."""
    print("| R | " + " | ".join(f"{one.name}: temperature, lost" for one in FITTED), end=" | ")
    print(" | ".join(f"{one.name}: temperature" for one in CHECKED), "|")
    print("|" + " --- |" * (1 + len(FITTED) + len(CHECKED)))
    chosen = repetition.MOST_USEFUL_REPEATS
    for repeats in (3.0, 4.0, 4.5, 5.0, 6.0, 8.0, 15.4):
        repetition.MOST_USEFUL_REPEATS = repeats
        cells = []
        for one in FITTED:
            found = repetition_temperature(one.sizes, one.num_rows)
            best, lost = excess(one, found)
            cells.append(f"{found:.2f} (optimum {best:.2f}), {lost:+.4f}")
        cells += [f"{repetition_temperature(one.sizes, one.num_rows):.2f}" for one in CHECKED]
        print(f"| {repeats:g}{' *' if repeats == chosen else ''} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

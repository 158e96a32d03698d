"""How often `gradvac compare` calls equal methods different, and how often it finds a difference.

    python benchmarks/comparisons.py                    # 2,000 comparisons a cell, a few minutes
    python benchmarks/comparisons.py --times 200

Scores are made: the difference of two methods is effect + seed + sentence + both, as in
`gradvac.lab.experiments.verdicts`, with runs of one seed that are alike (correlation 0.8, as
training that shares weights and batches makes them). Rows are how many seeds the two methods have;
columns what varies more. *Before*: pairs only where both have the same seeds, and pooled degrees of
freedom (Satterthwaite), as compare did until 2026-11-16.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gradvac.lab.experiments.methods import Method
from gradvac.lab.experiments.verdicts import CLEAR, RowQuantity, Scored, difference, judge_primary

Floats = NDArray[np.float64]
DRAWINGS = 200
ALIKE = 0.8  # correlation of the runs of one seed
SENTENCES = {"seeds alone": 0.0, "mostly seeds": 0.15, "both": 0.4, "mostly sentences": 1.5}
SEEDS = {
    "2 and 2": ((0, 1), (0, 1)),
    "3 and 3": ((0, 1, 2), (0, 1, 2)),
    "4 and 3": ((0, 1, 2, 3), (0, 1, 2)),
    "4 and 4": ((0, 1, 2, 3), (0, 1, 2, 3)),
    "8 and 8": (tuple(range(8)), tuple(range(8))),
    "4 and 4, others": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "4 and 4, two shared": ((0, 1, 2, 3), (2, 3, 4, 5)),
}


def make(
    random: np.random.Generator,
    seeds: tuple[tuple[int, ...], ...],
    by_sentences: float,
    effects: tuple[float, ...],
    noise: Callable[[np.random.Generator, int], Floats],
) -> list[Scored]:
    """Methods whose runs have a standard deviation of 1 over seeds; the first has no effect."""
    shared = noise(random, 1 + max(max(own) for own in seeds))
    made = []
    for own, effect in zip(seeds, effects, strict=True):
        values = effect + math.sqrt(ALIKE) * shared[list(own)]
        values += math.sqrt(1 - ALIKE) * noise(random, len(own))
        made.append(values)
    # what all runs of a method have in common on these sentences, and how it varies on others
    drawn = []
    for values in made:
        on_these = by_sentences * math.sqrt((1 - ALIKE) / 2) * random.standard_normal()
        others = by_sentences * math.sqrt((1 - ALIKE) / 2) * random.standard_normal(DRAWINGS)
        values += on_these
        drawn.append(values[:, None] + others[None])
    return [
        Scored(own, values, again) for own, values, again in zip(seeds, made, drawn, strict=True)
    ]


def before(first: Scored, second: Scored) -> float:
    """The p-value of the former test."""
    assert first.drawn is not None
    assert second.drawn is not None
    shared = float((second.drawn.mean(0) - first.drawn.mean(0)).var(ddof=1))
    if first.seeds == second.seeds:
        sides = [second.values - first.values]
    else:
        sides = [first.values, second.values]
    parts = [float(side.var(ddof=1)) / len(side) for side in sides]
    variance = sum(parts) + shared
    freedom = variance**2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True)
    )
    change = float(second.values.mean() - first.values.mean())
    return float(2 * stats.t.sf(abs(change) / math.sqrt(variance), freedom))


def rates(name: str, sentences: str, effect: float, times: int, noise: str) -> dict[str, float]:
    """How often a difference is called suggestive, now and before."""
    random = np.random.default_rng([len(name), len(sentences), int(10 * effect)])
    kind = NOISES[noise]
    found = {"now": 0, "before": 0}
    for _ in range(times):
        first, second = make(random, SEEDS[name], SENTENCES[sentences], (0.0, effect), kind)
        found["now"] += difference(first, second)[0].p_value() < 0.05
        found["before"] += before(first, second) < 0.05
    return {key: number / times for key, number in found.items()}


def families(num_seeds: int, num_questions: int, times: int) -> float:
    """How often any of some primary questions about equal methods is called clear."""
    random = np.random.default_rng([num_seeds, num_questions])
    seeds = (tuple(range(num_seeds)),) * (1 + num_questions)
    methods = [Method(str(number), ()) for number in range(1 + num_questions)]
    alarms = 0
    for _ in range(times):
        made = make(random, seeds, SENTENCES["both"], (0.0,) * len(seeds), NOISES["normal"])
        by_name = {method.name: scored for method, scored in zip(methods, made, strict=True)}
        quantity = RowQuantity("average", "all", lambda one: by_name[one.name], 2, True)  # noqa: B023
        asked = [(quantity, methods[0], method) for method in methods[1:]]
        answers = judge_primary(asked)
        alarms += any(answer is not None and answer.verdict == CLEAR for answer in answers)
    return alarms / times


NOISES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda random, num: random.standard_normal(num),
    "heavy tails": lambda random, num: random.standard_t(3, num) / math.sqrt(3),
}


def table(title: str, effect: float, times: int, noise: str = "normal") -> dict[str, object]:
    print(f"\n{title}: now (before), %\n")
    print(f"| seeds | {' | '.join(SENTENCES)} |\n|{' --- |' * (1 + len(SENTENCES))}")
    found: dict[str, object] = {}
    for name in SEEDS:
        own = {kind: rates(name, kind, effect, times, noise) for kind in SENTENCES}
        cells = [f"{100 * one['now']:.1f} ({100 * one['before']:.1f})" for one in own.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        found[name] = own
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = {
        "false alarms": table("Equal methods called different", 0.0, given.times),
        "heavy tails": table("The same, seeds with heavy tails", 0.0, given.times, "heavy tails"),
        "power": table("A difference of 1.5 found", 1.5, given.times),
    }
    print("\nAny of 3 primary questions called clear, of equal methods, %\n")
    for num in (2, 3, 4, 8):
        rate = families(num, 3, given.times)
        results[f"any of 3 questions, {num} seeds"] = {"now": rate}
        print(f"{num} seeds: {100 * rate:.1f}")
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

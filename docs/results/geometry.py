"""Write the page about similarities, from runs with several seeds.

    python docs/results/geometry.py runs/one_gpu_figures runs/families

`geometry.md` says how similar tasks are in every kind of run; `index.md` gets the paper's claims,
each a number of which every seed gives one. Claims about runs that are not there are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))

from similarity_claims import (
    CLAIMS,
    SIDES,
    Claim,
    Numbers,
    Runs,
    companions,
    families_in,
    going,
    rank_correlation,
    similarities,
)

from gradvac.analysis import Run, statistics, views
from gradvac.cli.runs import load_runs
from gradvac.files import read_json, write_text
from gradvac.lab.runs import RunFolder

_LEVEL = 0.05
_FAMILIES = ("within", "between")


class OverSeeds(NamedTuple):
    """A number of which every seed gives one; intervals and test are Student's, over seeds."""

    mean: float
    reach: float
    p_value: float


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Mean, half of the 95 % interval, p-value."""
    if len(values) == 1:
        return OverSeeds(values[0], float("nan"), float("nan"))
    error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
    limit = float(stats.t.ppf(0.975, len(values) - 1))
    mean = float(np.mean(values))
    p_value = float(2 * stats.t.sf(abs(mean) / error, len(values) - 1)) if error else float("nan")
    return OverSeeds(mean, limit * error, p_value)


def read_kinds(folders: Sequence[Path]) -> dict[str, dict[int, Run]]:
    """Kind -> seed -> run, of all that are done; a stopped one may lack a checkpoint."""
    found = (run for folder in folders for run in sorted(folder.glob("*/seed-*")))
    paths = [run for run in found if RunFolder(run).similarity.is_file() and _is_done(run)]
    kinds: dict[str, dict[int, Run]] = {}
    for path, run in zip(paths, load_runs(paths) if paths else [], strict=True):
        kinds.setdefault(path.parent.name, {})[int(path.name.removeprefix("seed-"))] = run
    return kinds


def _is_done(run: Path) -> bool:
    result = run.parents[1] / "trials" / f"{run.parent.name}.{run.name}.result.json"
    return read_json(result).get("reason") in ("finished", "early_stop")


def _by_seed(kinds: Mapping[str, Mapping[int, Run]], wanted: Sequence[str]) -> list[Runs]:
    """The runs of every seed that all of these kinds have."""
    seeds = set.intersection(*(set(kinds.get(kind, {})) for kind in wanted))
    return [{kind: kinds[kind][seed] for kind in wanted} for seed in sorted(seeds)]


def claim_table(kinds: Mapping[str, Mapping[int, Run]]) -> str:
    """One row a claim, in Markdown; corrected among them (Holm).

    Families and companions are tested by permutations of languages, other claims over seeds.
    """
    together = tuple(kind for kind in kinds if kind.startswith("with"))
    every = list(CLAIMS)
    if together:
        said = f"Similarity and BLEU (2b): Spearman, {len(together)} companions of German"
        every.append(Claim(said, together, rank_correlation, 1))
    by_seed = [(claim, _by_seed(kinds, claim.kinds)) for claim in every]
    known = [(c, runs) for c, runs in by_seed if len(runs) > (c.families is None)]
    values = [np.array([claim.values(own) for own in runs]) for claim, runs in known]
    found = [over_seeds([float(own.mean()) for own in rows]) for rows in values]
    told = [
        _languages(claim, runs, rows) for (claim, runs), rows in zip(known, values, strict=True)
    ]
    tests = [one.p_value if p is None else p for one, (_, p) in zip(found, told, strict=True)]
    head = ["claim (figure)", "verdict", "here (95 % interval over seeds)"]
    lines = [[*head, "seeds", "over languages"], ["---"] * 5]
    verdicts: Counter[str] = Counter()
    for (claim, runs), one, (beside, _), test, p_value in zip(
        known, found, told, tests, statistics.holm(tests), strict=True
    ):
        verdict = _verdict(claim.sign, one, test, p_value)
        verdicts[verdict.partition(":")[0]] += 1
        lines.append([claim.said, f"**{verdict}**", *_numbers(one, len(runs)), beside])
    ends = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Of {len(known)} rows: {ends}.\n\n{table}\n"


def _numbers(found: OverSeeds, num_seeds: int) -> tuple[str, str]:
    if num_seeds == 1:
        return f"{found.mean:+.3f}", "1"
    low, high = found.mean - found.reach, found.mean + found.reach
    return f"{found.mean:+.3f} ({low:+.3f} to {high:+.3f})", str(num_seeds)


def _verdict(sign: int, found: OverSeeds, p_value: float, adjusted: float) -> str:
    """The words of `gradvac compare`; all rows are claims of the paper, and corrected.

    The p-value is over languages where there is such a test: what seeds share may be chance.
    """
    side = "" if found.mean * sign > 0 else ", against the paper"
    if np.isnan(p_value):
        return "cannot tell"
    if p_value < _LEVEL:
        return f"{'clear' if adjusted < _LEVEL else 'suggestive'}{side}"
    if found.reach < abs(found.mean):
        return "not shown over languages"
    return f"not shown: at most {abs(found.mean) + found.reach:.3f}"


def _languages(claim: Claim, runs: Sequence[Runs], rows: Numbers) -> tuple[str, float | None]:
    """Does it hold over languages? In words, and the p-value of permutations if there is one."""
    if claim.families is not None:
        kind, side = claim.families
        worst = max(families_in(own[kind], side).p_value for own in runs)
        return f"p at most {worst:.4f}", worst
    if claim.values is rank_correlation:
        means = np.mean([companions(own) for own in runs], axis=0)
        found = statistics.similarity_against_score([(a, b) for a, b in means])
        low, high = found.interval
        text = f"of the means {found.rho:+.2f} ({low:+.2f} to {high:+.2f})"
        return f"{text}, p = {found.p_value:.2f}", found.p_value
    if rows.shape[1] == 1:
        return "", None
    pairs = rows.mean(0)
    return f"{int((np.sign(pairs) == np.sign(pairs.mean())).sum())} of {pairs.size} pairs", None


def similarity_table(kinds: Mapping[str, Mapping[int, Run]]) -> str:
    """How similar tasks are, in Markdown: means over seeds; p-values are the largest."""
    lines = [
        "# How similar gradients are",
        "",
        "Cosines on an aligned set, mean of layers and checkpoints, mean over seeds (standard",
        "deviation). *Within* and *between* families; p: 9,999 permutations of languages, the",
        "largest of all seeds. *Different lines*: tasks do not share their sentences.",
        "",
        "| runs | seeds | tasks | side | all pairs | within | between | p | different lines |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, by_seed in kinds.items():
        if kind.startswith("with"):
            continue
        for into in (False, True):
            lines += _kind_rows(kind, list(by_seed.values()), into)
    return "\n".join(lines) + "\n"


def _kind_rows(kind: str, runs: Sequence[Run], into: bool) -> list[str]:
    """A row for each side, of the tasks of a direction."""
    parts = [going(similarities(run), into) for run in runs]
    others = [going(similarities(run, "different"), into) for run in runs]
    if len(parts[0].tasks) < 2:
        return []
    rows = []
    for side in SIDES:
        matrices = [views.side_matrix(part, side) for part in parts]
        families = statistics.families_of(parts[0].tasks, runs[0].families)
        found = [statistics.family_contrast(matrix, families) for matrix in matrices]
        means = [views.pair_mean(matrix) for matrix in matrices]
        apart = np.mean([views.pair_mean(views.side_matrix(other, side)) for other in others])
        spread = f" ({np.std(means, ddof=1):.3f})" if len(means) > 1 else ""
        within, between = (np.mean([getattr(f, part) for f in found]) for part in _FAMILIES)
        tasks = f"{len(parts[0].tasks)} {'into' if into else 'from'} English"
        cells = [kind, str(len(runs)), tasks, side, f"{np.mean(means):.3f}{spread}"]
        cells += [f"{within:.3f}", f"{between:.3f}", f"{max(f.p_value for f in found):.4f}"]
        cells.append(f"{apart:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the table")
    given = parser.parse_args(arguments)
    kinds = read_kinds(given.runs)
    if not kinds:
        raise SystemExit(f"{', '.join(map(str, given.runs))}: no run has measured similarities.")
    given.out.mkdir(parents=True, exist_ok=True)
    write_text(given.out / "geometry.md", similarity_table(kinds))
    print(claim_table(kinds))


if __name__ == "__main__":
    main()

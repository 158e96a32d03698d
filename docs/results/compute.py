"""Compute all numbers of the results pages from the runs that are kept: `published.json`.

    python docs/results/compute.py              (a minute; then write_results.py)

`runs.tar.xz` has the scores of every run (`raw_scores.py`). Methods are compared as by `gradvac
compare`; cosines are tested as by `gradvac report`. Tagging, transfer, equal compute and finishing
alone have files and programs of their own.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import claims
import numpy as np
import similarity_claims
import updates
from equal_compute import mean_and_interval
from numpy.typing import NDArray
from raw_scores import unpack
from scipy import stats
from similarity_claims import SIDES, Runs, going, similarities

from gradvac.analysis import Run, Similarities, statistics, views
from gradvac.lab.experiments import Comparison, compare_runs, find_runs
from gradvac.lab.experiments.methods import LOSS, PART, SEED_FOLDER
from gradvac.lab.experiments.verdicts import Against
from gradvac.lab.languages.known import load_runs
from gradvac.lab.runs import RunFolder, read_scores
from gradvac.utils.files import read_json, write_text

HERE = Path(__file__).parent
ARCHIVE, PUBLISHED = HERE / "runs.tar.xz", HERE / "published.json"
_LEVEL = 0.05
_BEST = "dev/loss, best weights"
_FOUR = ("one_gpu", "one_gpu_full", "auto_four", "one_gpu_many")
_AGAIN, _MADE = "one_gpu_again", "constructed"
_SIMILAR = ("one_gpu_figures", "families")
_COMPANIONS = "with-"  # begins the kinds of runs with one companion

Row = dict[str, Any]
Folders = Mapping[str, list[Path]]  # method -> the folders of its runs' parts


def compute(runs: Path) -> Row:
    """All numbers, from the folders of the sweeps."""
    four, made = _methods(runs, *_FOUR), _methods(runs, _MADE)
    paper, ours = _answers(claims.PAPER, four), _answers(claims.OURS, four)
    constructed = _answers(claims.CONSTRUCTED, made)
    for rows in ([*paper.rows, *ours.rows], constructed.rows):
        _correct([row for row in rows if row.get("primary")])
    found = [*paper.comparisons, *ours.comparisons]
    kinds = _kinds(runs)
    summaries = _summaries(runs)
    return {
        "methods": _scores(found),
        "constructed": _scores(constructed.comparisons),
        "claims": {"paper": paper.rows, "ours": ours.rows, "constructed": constructed.rows},
        "auto": {length: _auto(length, four) for length in ("short", "full")},
        "together": [_together(*group, four) for group in claims.TOGETHER],
        "similarity": _similarity(kinds),
        "cosines": list(_cosines(kinds)),
        "updates": {name: updates.means(own, "update") for name, own in summaries.items()},
        "lengths": {name: updates.means(own, "lengths") for name, own in summaries.items()},
        "noise": {name: updates.noise(own) for name, own in summaries.items() if len(own) > 1},
        "again": _again(runs),
        "early": _early(runs),
    }


# Scores of methods


def _methods(runs: Path, *sweeps: str) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for folder in (folder for sweep in sweeps for folder in sorted((runs / sweep).iterdir())):
        if folder.is_dir():
            found.setdefault(folder.name.partition(PART)[0], []).append(folder)
    return found


class _Answers(NamedTuple):
    """Rows of claims, and the comparisons that they are of."""

    rows: list[Row]
    comparisons: list[Comparison]


def _answers(said: Sequence[claims.Claim], methods: Folders) -> _Answers:
    """All claims of one baseline are one comparison; pairs are the seeds that two methods share."""
    by_baseline, rows = {}, []
    for baseline in dict.fromkeys(claim.baseline for claim in said):
        wanted = dict.fromkeys(claim.method for claim in said if claim.baseline == baseline)
        folders = [path for name in (baseline, *wanted) for path in methods[name]]
        by_baseline[baseline] = compare_runs(folders, baseline=baseline)
    for claim in said:
        found = by_baseline[claim.baseline]
        against, loss = (
            row.cells[claim.method].against if claim.method in row.cells else None
            for row in (found.rows[0], _row(found, _BEST))
        )
        assert against is not None
        row = {"said": claim.said, "method": claim.method, "baseline": claim.baseline}
        row |= {"paper": claim.paper} if claim.paper is not None else {}
        row |= {"primary": True} if claim.is_primary else {}
        row |= {
            "difference": _interval(against, 2),
            "seeds": against.pairs,
            "p": round(against.p_value, 6),
        }
        rows.append(row | ({"dev_loss": _interval(loss, 4)} if loss else {}))
    return _Answers(rows, list(by_baseline.values()))


def _interval(against: Against, digits: int) -> list[float]:
    return [round(x, digits) for x in (against.difference, against.low, against.high)]


def _row(found: Comparison, name: str) -> Any:
    return next(row for row in [*found.rows, *found.losses] if row.name == name)


def _correct(rows: Sequence[Row]) -> None:
    """Mark what outlives a correction among all of these (Holm)."""
    for row, p_value in zip(rows, statistics.holm([row["p"] for row in rows]), strict=True):
        row["corrected_p"] = round(p_value, 6)
        if p_value < _LEVEL:
            row["outlived_correction"] = True


def _scores(comparisons: Sequence[Comparison]) -> Row:
    """Method -> mean scores with the reach of their intervals, and the best development loss."""
    scores: Row = {}
    for found in comparisons:
        for name, seeds in found.seeds.items():
            own = scores.setdefault(name, {"seeds": len(seeds), "levels": {}, "tasks": {}})
            for row in [*found.rows, _row(found, _BEST)]:
                if name in row.cells:
                    cell = row.cells[name]
                    reach, digits = (cell.high - cell.low) / 2, 4 if row.kind == "loss" else 2
                    numbers = [round(cell.mean, digits), round(reach, digits)]
                    if row.kind in ("level", "task"):
                        own[f"{row.kind}s"][row.name] = numbers
                    else:
                        own[row.kind] = numbers
    return scores


def _auto(length: str, methods: Folders) -> Row:
    """The automatic temperature and fixed ones: losses, scores, and differences to two of them."""
    names = {key: f"{length}-temperature={key}" for key in ("1.0", "2.0", "3.0", "5.0", "auto")}
    folders = [folder for name in names.values() for folder in methods[name]]
    found = compare_runs(folders, baseline=names["5.0"])
    means = {
        key: [_row(found, row).cells[name].mean for row in (_BEST, "all", "low")]
        for key, name in names.items()
    }
    best = min((key for key in means if key != "auto"), key=lambda key: means[key][0])
    with_best = compare_runs(folders, baseline=names[best])
    return {
        "means": {key: [round(one, 6) for one in own] for key, own in means.items()},
        "best": best,
        "minus_best": _interval(_row(with_best, _BEST).cells[names["auto"]].against, 4),
        "minus_5": [
            _interval(_row(found, row).cells[names["auto"]].against, 4)
            for row in (_BEST, "all", "low")
        ],
    }


def _together(said: str, baseline: str, names: Sequence[str], methods: Folders) -> Row:
    """The mean of differences of some methods, and whether they differ.

    The interval is over seeds, since all methods share the baseline's run of a seed; the test is
    that of a two-way layout without repetition.
    """
    row: Row = {"methods": said}
    for key, digits, values in (("bleu", 2, _bleu), ("dev_loss", 4, _best_loss)):
        of = {name: {_seed(r): values(r) for r in _runs(methods[name])} for name in names}
        first = {_seed(r): values(r) for r in _runs(methods[baseline])}
        seeds = sorted(set.intersection(set(first), *map(set, of.values())))
        changes = np.array([[own[seed] - first[seed] for seed in seeds] for own in of.values()])
        by_seed, by_method = changes.mean(0), changes.mean(1)
        rest = changes - by_seed - by_method[:, None] + changes.mean()
        freedom = (len(names) - 1) * (len(seeds) - 1)
        ratio = len(seeds) * by_method.var(ddof=1) / ((rest**2).sum() / freedom)
        row[key] = _over_seeds(by_seed, digits)
        row[f"{key}_differ"] = round(float(stats.f.sf(ratio, len(names) - 1, freedom)), 3)
        row["num"] = f"{len(names)} ({len(seeds)})"
    return row


def _runs(folders: Sequence[Path]) -> list[Path]:
    return [run for folder in folders for run in find_runs([folder])]


def _bleu(run: Path) -> float:
    scores, *_ = read_scores(RunFolder(run).scores_of("test", "best"))
    return float(np.mean(list(scores.by_task.values())))


def _dev_losses(run: Path) -> dict[int, float]:
    """Step -> development loss."""
    lines = RunFolder(run).metrics.read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    return {line["step"]: line[LOSS] for line in logged if LOSS in line}


def _best_loss(run: Path) -> float:
    return min(_dev_losses(run).values())


def _seed(run: Path) -> int:
    return int(run.name.removeprefix(SEED_FOLDER))


def _over_seeds(values: NDArray[np.float64], digits: int) -> list[float]:
    return [round(x, digits) for x in mean_and_interval(values, 1 - _LEVEL)]


# Similarities


def _kinds(runs: Path) -> dict[str, dict[int, Run]]:
    """Kind -> seed -> run, of all whose similarities were measured."""
    found = [run for sweep in _SIMILAR for run in find_runs([runs / sweep])]
    paths = [run for run in found if RunFolder(run).similarity.is_file()]
    kinds: dict[str, dict[int, Run]] = {}
    for path, run in zip(paths, load_runs(paths), strict=True):
        kinds.setdefault(path.parent.name, {})[_seed(path)] = run
    return kinds


def _by_seed(kinds: Mapping[str, Mapping[int, Run]], wanted: Sequence[str]) -> list[Runs]:
    seeds = set.intersection(*(set(kinds[kind]) for kind in wanted))
    return [{kind: kinds[kind][seed] for kind in wanted} for seed in sorted(seeds)]


def _similarity(kinds: Mapping[str, Mapping[int, Run]]) -> list[Row]:
    """A row for each claim; families and companions are tested over languages, others over seeds.

    All are claims of the paper, and corrected among each other.
    """
    companions = tuple(kind for kind in kinds if kind.startswith(_COMPANIONS))
    said = f"Similarity and BLEU (2b): Spearman, {len(companions)} companions of German"
    last = similarity_claims.Claim(said, companions, similarity_claims.rank_correlation)
    rows = []
    for claim in (*similarity_claims.CLAIMS, last):
        runs = _by_seed(kinds, claim.kinds)
        values = np.array([claim.values(own) for own in runs])  # [seeds, P]
        by_seed = values.mean(1)
        p_value = float(stats.ttest_1samp(by_seed, 0.0).pvalue)
        beside = ""
        if claim.families is not None:
            kind, side = claim.families
            into = similarity_claims.is_into(kind)
            tests = [similarity_claims.families_in(own[kind], side, into=into) for own in runs]
            p_value = max(one.p_value for one in tests)
            beside = f"p at most {p_value:.4f}"
        elif claim is last:
            points = np.mean([similarity_claims.companions(own) for own in runs], axis=0)
            found = statistics.similarity_against_score([(a, b) for a, b in points])
            p_value, (low, high) = found.p_value, found.interval
            text = f"of the means {found.rho:+.2f} ({low:+.2f} to {high:+.2f})"
            beside = f"{text}, p = {p_value:.2f}"
        elif values.shape[1] > 1:
            pairs = values.mean(0)
            agree = int((np.sign(pairs) == np.sign(pairs.mean())).sum())
            beside = f"{agree} of {pairs.size} pairs"
        row = {"said": claim.said, "difference": _over_seeds(by_seed, 3), "seeds": len(runs)}
        rows.append(row | {"over_languages": beside, "p": round(p_value, 6)})
    _correct(rows)
    return rows


def _cosines(kinds: Mapping[str, Mapping[int, Run]]) -> Iterator[Row]:
    """Mean cosines of every kind of runs, direction and side, within families and between."""
    for kind, by_seed in kinds.items():
        runs = list(by_seed.values())
        for into in (False, True):
            tasks = going(similarities(runs[0]), into)
            if kind.startswith(_COMPANIONS) or len(tasks) < 2:
                continue
            for side in SIDES:
                found = [similarity_claims.families_in(run, side, into=into) for run in runs]
                same, different = (
                    [_mean_cosine(similarities(run, lines), side, tasks) for run in runs]
                    for lines in ("same", "different")
                )
                yield {
                    "runs": kind,
                    "seeds": len(runs),
                    "tasks": f"{len(tasks)} {'into' if into else 'from'} English",
                    "side": side,
                    "all": round(float(np.mean(same)), 3),
                    "deviation": round(float(np.std(same, ddof=1)), 3),
                    "within": round(float(np.mean([one.within for one in found])), 3),
                    "between": round(float(np.mean([one.between for one in found])), 3),
                    "p": round(max(one.p_value for one in found), 4),
                    "different_lines": round(float(np.mean(different)), 3),
                }


def _mean_cosine(found: Similarities, side: str, tasks: Sequence[str]) -> float:
    return views.pair_mean(views.side_matrix(found, side, tasks))


# What records and logs say


def _summaries(runs: Path) -> dict[str, list[updates.Summary]]:
    """Method -> the summaries of its runs' records."""
    sweeps = ("one_gpu", _AGAIN, "one_gpu_full", "one_gpu_many")
    paths = [path for sweep in sweeps for path in (runs / sweep).glob(f"*/*/{updates.SUMMARY}")]
    found: dict[str, list[updates.Summary]] = {}
    for path in sorted(paths, key=lambda path: path.parts[-3:]):
        found.setdefault(path.parts[-3], []).append(read_json(path))
    return dict(sorted(found.items()))


def _again(runs: Path) -> Row:
    """Runs of one method and seed on the same batches, twice: their largest difference."""
    found: Row = {}
    for second in find_runs([runs / _AGAIN]):
        first = runs / "one_gpu" / second.relative_to(runs / _AGAIN)
        change = abs(_best_loss(first) - _best_loss(second))
        own = found.setdefault(second.parent.name, {"seeds": 0, "dev_loss": 0.0})
        own["seeds"] += 1
        own["dev_loss"] = round(max(own["dev_loss"], change), 4)
    return found


def _early(runs: Path) -> Row:
    """How well development losses of early steps rank methods as those of the last do.

    Of all methods from English that differ in mixture or rule alone, by number of steps; `lost` is
    what choosing the best method at a step costs at the end.
    """
    means: dict[int, dict[str, dict[int, float]]] = {}
    for name, folders in _methods(runs, "one_gpu").items():
        if name.startswith(("into_", "small", "large_", "high_", "bilingual")):
            continue
        losses = [_dev_losses(run) for run in _runs(folders)]
        steps = losses[0]
        of = {step: float(np.mean([one[step] for one in losses])) for step in steps}
        means.setdefault(max(steps), {})[name] = of
    found: Row = {}
    for last, of_methods in means.items():
        ends = {name: of[last] for name, of in of_methods.items()}
        own = found.setdefault(str(last), {"methods": len(ends), "steps": []})
        for step in sorted(next(iter(of_methods.values())))[:-1]:
            here = {name: of[step] for name, of in of_methods.items()}
            rho = stats.spearmanr(list(here.values()), list(ends.values())).statistic
            lost = ends[min(here, key=here.__getitem__)] - min(ends.values())
            own["steps"].append([step, round(float(rho), 2), round(lost, 4)])
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        unpack(ARCHIVE, Path(folder))
        found = compute(Path(folder))
    text = json.dumps(found, indent=1)
    lines = re.sub(r"[\[{][^][{}]*[\]}]", lambda inner: " ".join(inner[0].split()), text)
    write_text(PUBLISHED, lines + "\n")
    sys.stdout.write(f"{PUBLISHED.name} is written; write_results.py makes pages of it.\n")


if __name__ == "__main__":
    main()

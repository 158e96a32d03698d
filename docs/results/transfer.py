"""Print how well predictors chose partners, by the protocol in gains_protocol.md.

    python docs/results/transfer.py runs --prepared data/transfer

RUNS holds transfer_from, transfer_into and transfer_joint. Without `--prepared`, what is read off
the text is left out; without the package `urielplus`, its distances.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gradvac.analysis import load_similarities
from gradvac.analysis.record import read_record
from gradvac.corpora import uriel_distances
from gradvac.corpora.languages import family_of, find
from gradvac.sides import side_of
from gradvac.tasks import parse

Table = NDArray[np.float64]  # [targets, partners], or with seeds in front

TARGETS = ["be", "bg", "hi", "id", "lt", "et", "lv", "tr", "es", "cs"]
PARTNERS = ["uk", "mk", "fi", "pl", "ru", "mr", "de", "fr"]
PRIMARY, RIVALS = "same.decoder.mid", ("family", "uriel.featural")
WAYS = {"from": "en-to-any", "into": "any-to-en"}
WHEN = {"early": (250, 1, 250), "mid": (1000, 751, 1250), "late": (2000, 1751, 2000)}
SIDES = ("encoder", "decoder", "embeddings", "whole")
KINDS = ("featural", "syntactic", "genetic", "geographic", "script")
_METRICS = ("BLEU", "chrF++", "dev loss")


def main() -> None:
    """Read the arguments; print tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--prepared", type=Path)
    parser.add_argument("--metric", choices=_METRICS, default="BLEU")
    args = parser.parse_args()
    for way, directions in WAYS.items():
        scores, alone = read_scores(args.runs / f"transfer_{way}", args.metric)
        if np.isnan(scores).all():
            continue
        predicted = dict(predictors(args.runs / "transfer_joint", directions, args.prepared))
        print(f"\n## {'From' if way == 'from' else 'Into'} English, {args.metric}\n")
        print("\n".join(report(scores, alone, predicted)))


def read_scores(sweep: Path, metric: str) -> tuple[Table, Table]:
    """Scores with every partner, `[seeds, targets, partners]`, and alone, `[seeds, targets]`.

    More is better: losses are negative. NaN: there is no such run.
    """
    names = [f"seed-{seed}" for seed in range(2)]
    scores = np.full((len(names), len(TARGETS), len(PARTNERS)), np.nan)
    alone = np.full((len(names), len(TARGETS)), np.nan)
    for run in sweep.glob("*-tasks=*/seed-*"):
        tasks = run.parent.name.partition("-tasks=")[2].split(",")
        codes = [next(code for code in parse(task) if code != "en") for task in tasks]
        if run.name not in names or not (run / "scores" / "test.best.json").is_file():
            continue
        seed, target = names.index(run.name), TARGETS.index(codes[0])
        value = _score(run, tasks[0], metric)
        if len(codes) == 1:
            alone[seed, target] = value
        else:
            scores[seed, target, PARTNERS.index(codes[1])] = value
    return scores, alone


def _score(run: Path, task: str, metric: str) -> float:
    if metric == "dev loss":
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [json.loads(line).get(f"dev/loss/{task}") for line in lines]
        return -min(float(loss) for loss in losses if loss is not None)
    saved = json.loads((run / "scores" / "test.best.json").read_text(encoding="utf-8"))
    return next(float(one["by_task"][task]) for one in saved["scores"] if one["metric"] == metric)


def predictors(sweep: Path, directions: str, prepared: Path | None) -> Iterator[tuple[str, Table]]:
    """Name -> what it expects, `[seeds, targets, partners]`; more is better."""
    joint = sorted(sweep.glob(f"joint-directions={directions}/seed-*"))
    adam = sorted(sweep.glob(f"joint_adam-directions={directions}/seed-*"))
    for found in (
        _over_seeds(_measured(run) for run in joint if (run / "similarity.npz").is_file()),
        _over_seeds(_recorded(run, "train", "pushes") for run in joint),
        _over_seeds(_recorded(run, "adam", "adam_pushes") for run in adam),
    ):
        yield from found.items()
    families = np.array([[family_of(t) == family_of(p) for p in PARTNERS] for t in TARGETS])
    yield "family", families[None].astype(np.float64)
    lines = [[_lineage(t) & _lineage(p) for p in PARTNERS] for t in TARGETS]
    yield "lineage", np.array([[[len(groups) for groups in row] for row in lines]], float)
    try:
        for kind in KINDS:
            distances = uriel_distances(TARGETS + PARTNERS, kind)
            yield f"uriel.{kind}", -distances[None, : len(TARGETS), len(TARGETS) :]
    except ValueError as error:
        warnings.warn(str(error), stacklevel=1)
    if prepared is not None:
        counts = {code: _pieces(prepared, code) for code in TARGETS + PARTNERS}
        shares = {code: count / count.sum() for code, count in counts.items()}
        shared = [[np.minimum(shares[t], shares[p]).sum() for p in PARTNERS] for t in TARGETS]
        yield "subwords", np.array([shared])
        yield "size", np.array([[[counts[p].sum() for p in PARTNERS] for _ in TARGETS]], float)
    yield "chance", np.zeros((1, len(TARGETS), len(PARTNERS)))


def _lineage(code: str) -> frozenset[str]:
    language = find(code)
    return frozenset(() if language is None else language.lineage)


def _pieces(prepared: Path, code: str) -> NDArray[np.int64]:
    """How often every piece occurs in a language's training text."""
    tokens = np.fromfile(prepared / "tokens" / f"train.en-{code}.{code}.bin", dtype=np.uint16)
    return np.bincount(tokens, minlength=1 << 16)


def _over_seeds(runs: Iterator[Mapping[str, Table]]) -> dict[str, Table]:
    every = list(runs)
    names = dict.fromkeys(name for one in every for name in one)
    return {name: np.stack([one[name] for one in every if name in one]) for name in names}


def _measured(run: Path) -> dict[str, Table]:
    parts, _ = load_similarities(run / "similarity.npz")
    by = {(part.granularity, part.lines): part for part in parts}
    found = {}
    for side, (when, (step, _, _)) in itertools.product(SIDES, WHEN.items()):
        granularity, component = {
            "encoder": ("enc_dec", "encoder"),
            "decoder": ("enc_dec", "decoder"),
            "embeddings": ("all_layer", "embedding"),
            "whole": ("whole_model", None),
        }[side]
        same, other = by[granularity, "same"], by[granularity, "different"]
        if step not in same.steps:
            continue
        row = 0 if component is None else same.components.index(component)
        place = same.steps.tolist().index(step)
        values = np.asarray(other.values[place, row], np.float64)
        assert other.reliability is not None
        assert other.across is not None
        assert other.half_norms is not None
        reliability = np.asarray(other.reliability[place, row], np.float64)
        reliability = np.where(reliability > 0, reliability, np.nan)
        first, second = np.asarray(other.half_norms[place, row], np.float64)
        products = other.across[place, row] * first[:, None] * second[None]
        for name, matrix in {
            "same": same.values[place, row],
            "other": values,
            "corrected": values / np.sqrt(reliability[:, None] * reliability[None]),
            "influence": (products + products.T) / 2,
        }.items():
            found[f"{name}.{side}.{when}"] = _pairs(matrix, same.tasks)
    return found


def _recorded(run: Path, cosines: str, products: str) -> dict[str, Table]:
    record = read_record(run)
    norms = np.nan_to_num(np.asarray(record.norms, np.float64))  # [S, K, T]
    inner = np.nan_to_num(np.asarray(record.similarity, np.float64))
    inner *= norms[..., :, None] * norms[..., None, :]
    sides = np.array(["embeddings" if c == "embedding" else side_of(c) for c in record.components])
    found = {}
    for side, (when, (_, first, last)) in itertools.product(SIDES, WHEN.items()):
        steps = (record.steps >= first) & (record.steps <= last)
        chosen = np.ones(len(sides), bool) if side == "whole" else sides == side
        if not steps.any() or not chosen.any():
            continue
        total = inner[steps][:, chosen].sum(1)  # [S, T, T]
        lengths = np.sqrt((norms[steps][:, chosen] ** 2).sum(1))
        scale = lengths[:, :, None] * lengths[:, None, :]
        with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            cosine = np.nanmean(np.where(scale > 0, total / scale, np.nan), axis=0)
        found[f"{cosines}.{side}.{when}"] = _pairs(cosine, record.tasks)
        found[f"{products}.{side}.{when}"] = _pairs(total.mean(0), record.tasks)
    return found


def _pairs(matrix: Table, tasks: Sequence[str]) -> Table:
    codes = [next(code for code in parse(task) if code != "en") for task in tasks]
    rows, columns = ([codes.index(code) for code in some] for some in (TARGETS, PARTNERS))
    return np.asarray(matrix, np.float64)[np.ix_(rows, columns)]


def regrets(scores: Table, expected: Table) -> Table:
    """Score lost by the first partner, as a part of best minus mean, `[targets]`.

    Partners of which nothing is known come last; where several are first, their mean counts.
    """
    known = np.where(np.isnan(expected), -np.inf, expected)
    first = known == known.max(axis=1, keepdims=True)
    chosen = np.where(first, scores, 0).sum(1) / first.sum(1)
    best, mean = scores.max(1), scores.mean(1)
    return np.asarray((best - chosen) / (best - mean))


def correlations(scores: Table, expected: Table) -> Table:
    """Spearman's within targets, `[targets]`; NaN where all partners are alike."""
    found = []
    for score, value in zip(scores, expected, strict=True):
        known = ~np.isnan(value)
        varies = known.sum() > 2 and np.ptp(value[known]) > 0 and np.ptp(score[known]) > 0
        found.append(stats.spearmanr(score[known], value[known])[0] if varies else np.nan)
    return np.array(found)


def p_value(differences: Table) -> float:
    """One-sided, of no mean below 0: all changes of sign."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    return float(((signs * differences).mean(1) <= differences.mean() + 1e-12).mean())


def _interval(values: Table) -> str:
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"


def report(scores: Table, alone: Table, predicted: Mapping[str, Table]) -> Iterator[str]:
    """The table of a direction, and what the criteria say."""
    whole = ~np.isnan(scores).any(2) & ~np.isnan(alone)  # [seeds, targets]
    complete = np.where(whole[..., None], scores, np.nan)
    used = whole.any(0)
    missing = [f"{TARGETS[t]} of seed {s}" for s, t in np.argwhere(~whole)]
    if missing:
        yield f"Not complete: {', '.join(missing)}.\n"
    if not used.any():
        return
    names = [TARGETS[place] for place in np.flatnonzero(used)]
    complete, single = complete[:, used], np.where(whole, alone, np.nan)[:, used]
    mean, baseline = np.nanmean(complete, 0), np.nanmean(single, 0)
    yield f"| target | alone | {' | '.join(PARTNERS)} | first of {PRIMARY} |"
    yield "|" + " --- |" * (len(PARTNERS) + 3)
    primary = predicted.get(PRIMARY)
    for row, name in enumerate(names):
        first = ""
        if primary is not None:
            first = PARTNERS[int(np.nanmean(primary, 0)[used][row].argmax())]
        values = " | ".join(f"{value:.1f}" for value in mean[row])
        yield f"| {name} | {baseline[row]:.1f} | {values} | {first} |"
    helped = mean.max(1) > baseline
    yield f"\nNo partner helps: {int((~helped).sum())} of {len(names)} targets."
    yield from _ceilings(complete)
    rows = {}
    for name, expected in predicted.items():
        pooled = np.nanmean(expected, 0)[used] if len(expected) > 1 else expected[0][used]
        rows[name] = regrets(mean, pooled), correlations(mean, pooled)
    head = ("predictor", "regret", "rank correlation", "p below family", "p below URIEL")
    yield f"\n| {' | '.join(head)} | false promises | cannot be told |"
    yield "|" + " --- |" * 7
    order = sorted(rows, key=lambda name: (name != PRIMARY, float(rows[name][0].mean())))
    for name in order:
        regret, correlation = rows[name]
        tests = [
            f"{p_value(regret - rows[rival][0]):.3f}" if rival in rows and rival != name else ""
            for rival in RIVALS
        ]
        false, untold = _promises(predicted[name][:, used], mean, baseline)
        known = correlation[~np.isnan(correlation)]
        shown = f"{known.mean():.2f}" if len(known) else ""
        cells = (name, _interval(regret), shown, *tests, f"{false:.0%}", f"{untold:.0%}")
        yield f"| {' | '.join(cells)} |"
    if PRIMARY in rows:
        yield "\n" + _verdict(rows, predicted[PRIMARY][:, used], mean, baseline)


def _ceilings(complete: Table) -> Iterator[str]:
    both = ~np.isnan(complete).any((0, 2))
    if len(complete) < 2 or not both.any():
        return
    one, other = complete[:, both]
    r = float(np.nanmean(correlations(one, other)))
    ceiling = np.sqrt(max(0.0, 2 * r / (1 + r)))
    regret = (regrets(one, other).mean() + regrets(other, one).mean()) / 2
    yield f"Between seeds: rank correlation {r:.2f}, ceiling {ceiling:.2f}; regret {regret:.2f}."


def _promises(expected: Table, mean: Table, alone: Table) -> tuple[float, float]:
    """Parts of targets: promised falsely, and those where seeds do not agree or there is a tie."""
    known = np.where(np.isnan(expected), -np.inf, expected)
    first = known == known.max(axis=2, keepdims=True)  # [seeds, targets, partners]
    agreed = first.all(0) & (first.sum(2) == 1).all(0)[:, None]
    told = agreed.any(1)
    false = (agreed & (mean <= alone[:, None])).any(1)
    return float(false.mean()), float((~told).mean())


def _verdict(
    rows: Mapping[str, tuple[Table, Table]], expected: Table, mean: Table, alone: Table
) -> str:
    regret = rows[PRIMARY][0]
    false, _ = _promises(expected, mean, alone)
    tests = {name: p_value(regret - rows[name][0]) for name in RIVALS if name in rows}
    met = {
        "regret at most .25": regret.mean() <= 0.25,
        "below family and URIEL": len(tests) == 2 and all(p < 0.05 for p in tests.values()),
        "at most 10 % false promises": false <= 0.1,
    }
    said = "; ".join(f"{name}: {'met' if is_met else 'not met'}" for name, is_met in met.items())
    return f"{PRIMARY}: {said}."


if __name__ == "__main__":
    main()

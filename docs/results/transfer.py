"""Who should learn with whom: scores and predictors of runs, by the protocol in gains_protocol.md.

    python docs/results/transfer.py docs/results/transfer.json      # prints all predictors
    python docs/results/transfer.py runs --prepared data/transfer   # after the sweeps: saves them

`runs` holds transfer_from, transfer_into and transfer_joint; what is read of them is saved to
transfer.json, from which `write_results.py` writes the tables. Without `--prepared`, what is read
off the text is left out; without the package `urielplus`, its distances.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gradvac.analysis import load_similarities
from gradvac.analysis.record import read_record
from gradvac.engine.components import side_of
from gradvac.lab.languages import default_corpus, uriel_distances
from gradvac.lab.languages.real import LANGUAGES
from gradvac.tasks import parse

Table = NDArray[np.float64]  # [targets, partners], or with seeds in front


@dataclass(frozen=True)
class Design:
    """A table: its languages, the sweep of pairs, and the folder of joint runs that predict it."""

    targets: list[str]
    partners: list[str]
    sweep: str
    joint: str
    rivals: tuple[str, ...] = ("family", "uriel.featural")


REAL = (
    ["be", "bg", "hi", "id", "lt", "et", "lv", "tr", "es", "cs"],
    ["uk", "mk", "fi", "pl", "ru", "mr", "de", "fr"],
)
DESIGNS = {
    "from": Design(*REAL, "transfer_from", "transfer_joint/{}-directions=en-to-any"),
    "into": Design(*REAL, "transfer_into", "transfer_joint/{}-directions=any-to-en"),
    "constructed": Design(
        ["qsm", "qsk", "qtb", "qtm", "qnm", "qnt", "qpt", "qpl"],
        ["qso", "qsd", "qtu", "qth", "qnk", "qnz", "qpp", "qpo"],
        *("transfer_constructed", "transfer_constructed_joint/{}", ("family",)),
    ),
}
PRIMARY = "same.decoder.mid"
WHEN = {"early": (250, 1, 250), "mid": (1000, 751, 1250), "late": (2000, 1751, 2000)}
SIDES = ("encoder", "decoder", "embeddings", "whole")
KINDS = ("featural", "syntactic", "genetic", "geographic", "script")
SHOWN = (
    *(f"same.{side}.mid" for side in ("decoder", "encoder", "embeddings", "whole")),
    *("same.decoder.early", "same.decoder.late", "other.decoder.mid", "corrected.decoder.mid"),
    *("influence.decoder.mid", "train.decoder.mid", "pushes.decoder.mid", "adam.decoder.mid"),
    *("adam_pushes.decoder.mid", "subwords", "family", "lineage", "uriel.featural"),
    *("uriel.genetic", "size", "chance"),
)
SAVED = Path(__file__).parent / "transfer.json"
_METRICS = ("BLEU", "chrF++", "dev loss")
_IN_WORDS = {"dev loss": "development loss"}


def main() -> None:
    """Read the arguments; save what runs have, print what predictors are worth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="a folder of runs, or transfer.json")
    parser.add_argument("--prepared", type=Path)
    args = parser.parse_args()
    if args.source.is_dir():
        found = json.loads(SAVED.read_text(encoding="utf-8"))
        for way, design in DESIGNS.items():
            if (args.source / design.sweep).is_dir():
                found[way] = read_runs(args.source, design, args.prepared)
        text = json.dumps(found, separators=(",", ":")) + "\n"
        SAVED.write_text(text, encoding="utf-8")
    else:
        found = json.loads(args.source.read_text(encoding="utf-8"))
    for way, table in found.items():
        print(f"\n{way}\n\n{predictor_table(way, table, sorted(table['predictors']))}")


def read_runs(runs: Path, design: Design, prepared: Path | None) -> dict[str, Any]:
    """Scores and predictors of a table, as numbers of few digits."""
    scores = {}
    for metric in _METRICS:
        pairs, alone = read_scores(runs / design.sweep, design, metric)
        scores[metric] = {"pairs": pairs.round(3).tolist(), "alone": alone.round(3).tolist()}
    expected = predictors(runs, design, prepared)
    rounded = np.vectorize(lambda value: float(f"{value:.7g}"), otypes=[float])
    return {
        "scores": scores,
        "predictors": {name: rounded(values).tolist() for name, values in expected},
    }


def read_scores(sweep: Path, design: Design, metric: str) -> tuple[Table, Table]:
    """Scores with every partner, `[seeds, targets, partners]`, and alone, `[seeds, targets]`.

    More is better: losses are negative. NaN: there is no such run.
    """
    names = [f"seed-{seed}" for seed in range(2)]
    scores = np.full((len(names), len(design.targets), len(design.partners)), np.nan)
    alone = np.full((len(names), len(design.targets)), np.nan)
    for run in sweep.glob("*-tasks=*/seed-*"):
        tasks = run.parent.name.partition("-tasks=")[2].split(",")
        codes = [next(code for code in parse(task) if code != "en") for task in tasks]
        if run.name not in names or not (run / "scores" / "test.best.json").is_file():
            continue
        seed, target = names.index(run.name), design.targets.index(codes[0])
        value = _score(run, tasks[0], metric)
        if len(codes) == 1:
            alone[seed, target] = value
        else:
            scores[seed, target, design.partners.index(codes[1])] = value
    return scores, alone


def _score(run: Path, task: str, metric: str) -> float:
    if metric == "dev loss":
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [json.loads(line).get(f"dev/loss/{task}") for line in lines]
        return -min(float(loss) for loss in losses if loss is not None)
    saved = json.loads((run / "scores" / "test.best.json").read_text(encoding="utf-8"))
    return next(float(one["by_task"][task]) for one in saved["scores"] if one["metric"] == metric)


def predictors(runs: Path, design: Design, prepared: Path | None) -> Iterator[tuple[str, Table]]:
    """Name -> what it expects, `[seeds, targets, partners]`; more is better."""
    targets, partners = design.targets, design.partners
    joint, adam = (
        sorted(runs.glob(f"{design.joint.format(name)}/seed-*")) for name in ("joint", "joint_adam")
    )
    for found in (
        _over_seeds(_measured(run, design) for run in joint if (run / "similarity.npz").is_file()),
        _over_seeds(_recorded(run, design, "train", "pushes") for run in joint),
        _over_seeds(_recorded(run, design, "adam", "adam_pushes") for run in adam),
    ):
        yield from found.items()
    families, lines = kinship([*targets, *partners])
    related = [[families[t] == families[p] for p in partners] for t in targets]
    yield "family", np.array([related], float)
    shared_lines = [[len(lines[t] & lines[p]) for p in partners] for t in targets]
    yield "lineage", np.array([shared_lines], float)
    try:
        for kind in KINDS if "uriel.featural" in design.rivals else ():
            distances = uriel_distances([*targets, *partners], kind)
            yield f"uriel.{kind}", -distances[None, : len(targets), len(targets) :]
    except ValueError as error:
        warnings.warn(str(error), stacklevel=1)
    if prepared is not None:
        counts = {code: _pieces(prepared, code) for code in (*targets, *partners)}
        shares = {code: count / count.sum() for code, count in counts.items()}
        shared = [[np.minimum(shares[t], shares[p]).sum() for p in partners] for t in targets]
        yield "subwords", np.array([shared])
        yield "size", np.array([[[counts[p].sum() for p in partners] for _ in targets]], float)
    yield "chance", np.zeros((1, len(targets), len(partners)))


def kinship(codes: Sequence[str]) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Language -> its family, and all groups that it belongs to by descent."""
    if codes[0] in LANGUAGES:
        known = {code: LANGUAGES[code] for code in codes}
        return (
            {code: one.family for code, one in known.items()},
            {code: set(one.lineage) for code, one in known.items()},
        )
    made = default_corpus().languages
    families = {code: made[code].family for code in codes}
    return families, {code: {families[code], made[code].branch} for code in codes}


def _pieces(prepared: Path, code: str) -> NDArray[np.int64]:
    """How often every piece occurs in a language's training text."""
    tokens = np.fromfile(prepared / "tokens" / f"train.en-{code}.{code}.bin", dtype=np.uint16)
    return np.bincount(tokens, minlength=1 << 16)


def _over_seeds(runs: Iterator[Mapping[str, Table]]) -> dict[str, Table]:
    every = list(runs)
    names = dict.fromkeys(name for one in every for name in one)
    return {name: np.stack([one[name] for one in every if name in one]) for name in names}


def _measured(run: Path, design: Design) -> dict[str, Table]:
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
            found[f"{name}.{side}.{when}"] = _pairs(matrix, same.tasks, design)
    return found


def _recorded(run: Path, design: Design, cosines: str, products: str) -> dict[str, Table]:
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
        found[f"{cosines}.{side}.{when}"] = _pairs(cosine, record.tasks, design)
        found[f"{products}.{side}.{when}"] = _pairs(total.mean(0), record.tasks, design)
    return found


def _pairs(matrix: Table, tasks: Sequence[str], design: Design) -> Table:
    codes = [next(code for code in parse(task) if code != "en") for task in tasks]
    rows, columns = (
        [codes.index(code) for code in some] for some in (design.targets, design.partners)
    )
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


def mean_and_interval(values: Table) -> tuple[float, float, float]:
    """The mean over targets, and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def parts(found: Mapping[str, Any]) -> dict[str, str]:
    """Mark -> what stands there on the page, of all tables."""
    return {
        f"{way}_{name}": text
        for way, table in found.items()
        for name, text in (
            ("scores", score_table(way, table)),
            ("predictors", predictor_table(way, table, SHOWN)),
        )
    }


def _of_metric(table: Mapping[str, Any], metric: str) -> tuple[Table, Table, Table]:
    """Scores with every partner by seed, their mean over seeds, and the mean of targets alone."""
    pairs, alone = (np.array(table["scores"][metric][kind]) for kind in ("pairs", "alone"))
    return pairs, np.nanmean(pairs, 0), np.nanmean(alone, 0)


def regrets_of(table: Mapping[str, Any], metric: str) -> dict[str, Table]:
    """Predictor -> what its first partners lose, `[targets]`."""
    mean = _of_metric(table, metric)[1]
    return {
        name: regrets(mean, np.array(expected, float).mean(0))
        for name, expected in table["predictors"].items()
    }


def _in_words(values: Table) -> str:
    mean, low, high = mean_and_interval(values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def score_table(way: str, table: Mapping[str, Any]) -> str:
    """BLEU of every target with every partner, and the partner that the primary predictor names."""
    pairs, mean, alone = _of_metric(table, "BLEU")
    chosen = np.array(table["predictors"][PRIMARY]).mean(0).argmax(1)
    targets, partners = DESIGNS[way].targets, DESIGNS[way].partners
    lines = [f"| target | alone | {' | '.join(partners)} | first of {PRIMARY} |"]
    lines.append("|" + " --- |" * (len(partners) + 3))
    for row, name in enumerate(targets):
        cells = [f"{value:.1f}" for value in (alone[row], *mean[row])]
        lines.append(f"| {' | '.join((name, *cells, partners[chosen[row]]))} |")
    return "\n".join([*lines, "", *_ceilings(pairs)]) + "\n"


def predictor_table(way: str, table: Mapping[str, Any], names: Sequence[str]) -> str:
    """What predictors are worth, and below what the criteria say of the primary one."""
    heads = [f"regret, {_IN_WORDS.get(metric, metric)}" for metric in _METRICS]
    rivals = DESIGNS[way].rivals
    heads += ["rank correlation, BLEU", *(f"p below {name}" for name in rivals), "cannot be told"]
    lines = [f"| predictor | {' | '.join(heads)} |", "|" + " --- |" * (len(heads) + 1)]
    predicted = {name: np.array(values, float) for name, values in table["predictors"].items()}
    regret = {metric: regrets_of(table, metric) for metric in _METRICS}
    _, mean, alone = _of_metric(table, "BLEU")
    for name in (name for name in names if name in predicted):
        own = regret["BLEU"]
        known = correlations(mean, predicted[name].mean(0))
        known = known[~np.isnan(known)]
        cells = [f"`{name}`", *(_in_words(regret[metric][name]) for metric in _METRICS)]
        cells.append(f"{known.mean():.2f}" if len(known) else "")
        cells += ["" if one == name else f"{p_value(own[name] - own[one]):.3f}" for one in rivals]
        cells.append(f"{_promises(predicted[name], mean, alone)[1]:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    for metric in _METRICS:
        _, mean, alone = _of_metric(table, metric)
        false, _ = _promises(predicted[PRIMARY], mean, alone)
        said = _verdict(regret[metric], false, rivals)
        lines += ["", f"By {_IN_WORDS.get(metric, metric)}: {said}"]
    return "\n".join(lines) + "\n"


def _ceilings(complete: Table) -> Iterator[str]:
    one, other = complete
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


def _verdict(regret: Mapping[str, Table], false: float, rivals: Sequence[str]) -> str:
    own = regret[PRIMARY]
    met = {
        "regret at most .25": own.mean() <= 0.25,
        f"below {' and '.join(rivals)}": all(p_value(own - regret[name]) < 0.05 for name in rivals),
        "at most 10 % false promises": false <= 0.1,
    }
    said = "; ".join(f"{name}: {'met' if is_met else 'not met'}" for name, is_met in met.items())
    return f"`{PRIMARY}`: {said}."


if __name__ == "__main__":
    main()

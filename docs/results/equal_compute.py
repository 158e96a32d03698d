"""Do companions pay at equal compute? Plans and tables of equal_compute_protocol.md.

    python docs/results/equal_compute.py shuffle DATA        # the Bible's verses
    python docs/results/equal_compute.py plan tatoeba runs   # from the joint runs
    python docs/results/equal_compute.py save runs           # the scores of all runs

`runs` holds equal_tatoeba and equal_tatoeba_groups, equal_bible and equal_bible_groups. Scores are
saved to equal_compute.json, from which `write_results.py` writes the tables.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gradvac.analysis import best_groups
from gradvac.analysis.record import read_record
from gradvac.engine.components import side_of

Table = NDArray[np.float64]
Groups = list[list[str]]

SEEDS = (0, 1, 2, 3)
JOINT = {"joint2": 2.0, "joint5": 5.0, "joint10": 10.0}  # method -> temperature
METRICS = ("BLEU", "chrF++", "dev loss")
MID = (1751, 3250)  # the steps of joint5's record in the middle of training
NUM_COMPANIONS = 3
LEVEL = 0.975  # of intervals: two arms are judged
SAVED = Path(__file__).parent / "equal_compute.json"


@dataclass(frozen=True)
class Collection:
    """Languages, and who is related to whom."""

    families: Groups
    small: list[str]

    @property
    def languages(self) -> list[str]:
        """All of them, in the order of the families."""
        return [code for family in self.families for code in family]


COLLECTIONS = {
    "tatoeba": Collection(
        [
            ["uk", "ru", "be"],
            ["pl", "cs", "mk", "bg"],
            ["pt", "es", "fr", "de"],
            ["fi", "et", "lt", "lv"],
            ["mr", "hi", "tr", "id"],
        ],
        ["hi", "id", "lt", "be", "et", "lv"],
    ),
    "bible": Collection(
        [["de", "da", "es", "it"], ["cs", "hr"], ["sw", "sn", "nd"], ["he", "ha", "tdx"]],
        ["da", "hr", "sn", "nd", "tdx"],
    ),
}


def main() -> None:
    """Read the arguments; shuffle, plan or print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shuffling = commands.add_parser("shuffle")
    shuffling.add_argument("data", type=Path)
    planning = commands.add_parser("plan")
    planning.add_argument("collection", choices=COLLECTIONS)
    planning.add_argument("runs", type=Path)
    planning.add_argument("--out", type=Path, default=Path("configs/sweeps"))
    commands.add_parser("save").add_argument("runs", type=Path)
    args = parser.parse_args()
    if args.command == "shuffle":
        shuffle_bible(args.data)
    elif args.command == "plan":
        planned = plan(args.collection, args.runs / f"equal_{args.collection}")
        path = args.out / f"equal_{args.collection}_groups.toml"
        path.write_text(planned, encoding="utf-8")
        print(path)
    else:
        found = {name: read_scores(args.runs, name) for name in COLLECTIONS}
        SAVED.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


def shuffle_bible(data: Path) -> None:
    """Write the training verses of all languages in one random order."""
    out = data / "mt" / "bible_shuffled"
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted((data / "mt" / "bible_full").glob("train.*.gz")):
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        random.Random(0).shuffle(lines)  # the same order for as many lines
        (out / path.name).write_bytes(gzip.compress(b"".join(lines), mtime=0))


# Plans


def plan(collection: str, joint: Path) -> str:
    """The sweep of groups and companions as TOML, chosen by the joint runs."""
    data, chosen = COLLECTIONS[collection], tuned(joint)
    prepared = Path(config_of(joint / "joint5" / "seed-0")["data"]["prepared"])
    subwords = shared_subwords(prepared, data.languages)
    num_groups = len(data.families)
    methods = [
        *_groups("family", dict.fromkeys(SEEDS, data.families)),
        *_groups("subwords", dict.fromkeys(SEEDS, groups_by(subwords, data, num_groups))),
    ]
    by_gradient = {}
    by_chance = {}
    for seed in SEEDS:
        cosines = decoder_cosines(joint / "joint5" / f"seed-{seed}", data.languages)
        by_gradient[seed] = groups_by(cosines, data, num_groups)
        by_chance[seed] = random_groups(data, seed)
        methods += last_fifth(data, seed, cosines)
    methods += [*_groups("gradients", by_gradient), *_groups("chance", by_chance)]
    start = f"{joint}/{chosen}/seed-{{seed}}"
    base = joint.name
    out = [
        f"# Written by docs/results/equal_compute.py from the runs of {base}.toml,",
        f"# of which {chosen} has the lowest development loss; see equal_compute_protocol.md.",
        "",
        *_same_as(Path("configs/sweeps") / f"{base}.toml"),
        f'"sampling.temperature" = {JOINT[chosen]}',
        '"align.rule" = "none"',
        "",
    ]
    num_small, steps = len(data.small), 1000
    settings = {
        "groups": {"batch.tokens": 4096, "train.max_steps": 10000 // num_groups}
        | {"train.validate_every": 1000 // num_groups, "train.checkpoint_every": 10000},
        "last": {"batch.tokens": 4096, "train.max_steps": 2 * steps // num_small}
        | {"train.validate_every": 2 * steps // num_small // 10, "optimizer.warmup_steps": 40},
        "last_all": {"train.max_steps": steps, "train.validate_every": steps // 10}
        | {"optimizer.warmup_steps": 120},
    }
    for name, seed, tasks in methods:
        kind = name if name == "last_all" else name.partition("_")[0]
        kind = "groups" if kind not in settings else kind
        values: dict[str, Any] = {"train.seed": seed, **settings[kind]}
        if kind != "groups":
            values |= {"model.init": start, "model.init_weights": "4000"}
            values |= {"optimizer.lr": 6e-4, "train.checkpoint_every": 10000}
            values["data.prepared"] = f"{prepared}_last"  # its vocabulary is that of the joint run
        if kind == "last":
            values["train.metric"] = f"dev/loss/en-{tasks[0][0]}"
        out += ["[[methods]]", f'name = "{name}_{seed}"', f"set = {_toml(values)}"]
        if tasks:
            every = [[f"en-{code}" for code in group] for group in tasks]
            out.append(f'parts = {{ "data.tasks" = {json.dumps(every)} }}')
        out.append("")
    return "\n".join(out)


def _groups(arm: str, groups: Mapping[int, Groups]) -> Iterator[tuple[str, int, Groups]]:
    for seed, divided in groups.items():
        yield arm, seed, divided


def last_fifth(data: Collection, seed: int, cosines: Table) -> Iterator[tuple[str, int, Groups]]:
    """The last fifth of a joint run: each small language alone, with companions, by chance."""
    draw, every = random.Random(seed), data.languages
    yield "last_all", seed, []
    for code in data.small:
        order = np.argsort(-cosines[every.index(code)])
        others = [every[place] for place in order if every[place] != code]
        yield f"last_alone_{code}", seed, [[code]]
        yield f"last_gradients_{code}", seed, [[code, *others[:NUM_COMPANIONS]]]
        yield f"last_chance_{code}", seed, [[code, *draw.sample(sorted(others), NUM_COMPANIONS)]]


def groups_by(values: Table, data: Collection, num_groups: int) -> Groups:
    """The best groups, by a table of which only the order within a row is meant to count."""
    others = values.copy()
    np.fill_diagonal(others, np.nan)
    mean, deviation = np.nanmean(others, 1)[:, None], np.nanstd(others, 1)[:, None]
    scaled = np.nan_to_num((others - mean) / deviation)
    return [[data.languages[place] for place in group] for group in best_groups(scaled, num_groups)]


def random_groups(data: Collection, seed: int) -> Groups:
    """Groups of the families' sizes, by chance."""
    drawn = random.Random(100 + seed).sample(data.languages, len(data.languages))
    sizes = [len(family) for family in data.families]
    return [[drawn.pop() for _ in range(size)] for size in sizes]


def decoder_cosines(run: Path, languages: Sequence[str]) -> Table:
    """Mean cosine of the decoder's gradients in training batches, in the middle of a joint run."""
    record = read_record(run)
    norms = np.nan_to_num(np.asarray(record.norms, np.float64))  # [S, K, T]
    inner = np.nan_to_num(np.asarray(record.similarity, np.float64))
    inner *= norms[..., :, None] * norms[..., None, :]
    steps = (record.steps >= MID[0]) & (record.steps <= MID[1])
    chosen = np.array([side_of(name) == "decoder" for name in record.components])
    lengths = np.sqrt((norms[steps][:, chosen] ** 2).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = inner[steps][:, chosen].sum(1) / (lengths[:, :, None] * lengths[:, None, :])
    order = [record.tasks.index(f"en-{code}") for code in languages]
    return np.nanmean(cosines, axis=0)[np.ix_(order, order)]


def shared_subwords(prepared: Path, languages: Sequence[str]) -> Table:
    """Sum over pieces of the smaller relative frequency in the training text of two languages."""
    shares = []
    for code in languages:
        path = prepared / "tokens" / f"train.en-{code}.{code}.bin"
        count = np.bincount(np.fromfile(path, dtype=np.uint16), minlength=1 << 16)
        shares.append(count / count.sum())
    return np.array([[np.minimum(one, other).sum() for other in shares] for one in shares])


def tuned(joint: Path) -> str:
    """The joint method with the lowest development loss: mean over languages, then over seeds."""
    losses = {
        name: np.mean(
            [best_validation(joint / name / f"seed-{seed}")["dev/loss"] for seed in SEEDS]
        )
        for name in JOINT
    }
    return min(losses, key=lambda name: float(losses[name]))


def config_of(run: Path) -> dict[str, Any]:
    """The settings of a run."""
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def best_validation(run: Path) -> dict[str, float]:
    """The validation whose weights are scored."""
    metric = config_of(run)["train"].get("metric", "dev/loss")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [entry for line in lines if metric in (entry := json.loads(line))]
    return min(found, key=lambda entry: float(entry[metric]))


def _same_as(sweep: Path) -> Iterator[str]:
    """The opening of a sweep's config up to its grid, without what the methods set."""
    lines = sweep.read_text(encoding="utf-8").splitlines()
    start, end = lines.index('recipe = "nmt"'), lines.index("[grid]")
    own = ("batch.tokens", "train.max_steps", "train.validate_every", "train.checkpoint_every")
    yield from (
        line
        for line in lines[start : end - 1]
        if not line.startswith(tuple(f'"{key}"' for key in (*own, "train.keep")))
    )
    yield '"train.keep" = 1'


def _toml(values: Mapping[str, Any]) -> str:
    return (
        "{ " + ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in values.items()) + " }"
    )


# Tables


def read_scores(runs: Path, collection: str) -> dict[str, Any]:
    """Arm -> metric -> language -> score of every seed, and the groups."""
    data = COLLECTIONS[collection]
    arms: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    groups: dict[str, list[str]] = {}
    for path in sorted(runs.glob(f"equal_{collection}*/*/seed-*")):
        saved = path / "scores" / "test.best.json"
        if not saved.is_file():
            continue
        name, _, part = path.parent.name.partition("+")
        seed = int(path.name.removeprefix("seed-"))
        arm = name.rpartition("_")[0] or name
        tasks = part.split(",") if part else [f"en-{code}" for code in data.languages]
        if part:
            groups.setdefault(name, []).append(" ".join(task[3:] for task in tasks))
        if arm.startswith("last_") and arm != "last_all":
            arm, tasks = arm.rpartition("_")[0], tasks[:1]  # only the target counts
        losses = best_validation(path)
        by_metric = {
            one["metric"]: one["by_task"] for one in json.loads(saved.read_text())["scores"]
        }
        for metric in METRICS:
            for task in tasks:
                value = (
                    -losses[f"dev/loss/{task}"] if metric == "dev loss" else by_metric[metric][task]
                )
                row = arms.setdefault(arm, {}).setdefault(metric, {})
                row.setdefault(task[3:], [None] * len(SEEDS))[seed] = round(float(value), 4)
    joint = runs / f"equal_{collection}"
    return {"tuned": tuned(joint) if arms else "", "arms": arms, "groups": groups}


def report(collection: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Every arm against tuned joint training: small languages, and all."""
    data, tuned_joint = COLLECTIONS[collection], found["tuned"]
    yield f"## {collection.capitalize()}: against {tuned_joint}"
    for title, languages in (("small languages", data.small), ("all", data.languages)):
        yield f"\n### {title}: {', '.join(languages)}\n"
        yield "| arm | BLEU | difference | chrF++ | difference | development loss | difference |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for arm, by_metric in found["arms"].items():
            cells = [arm]
            for metric in METRICS:
                ours, base = (
                    _means(scores[metric], languages)
                    for scores in (by_metric, found["arms"][tuned_joint])
                )
                if ours is None or base is None:
                    break
                digits, sign = (3, -1) if metric == "dev loss" else (2, 1)
                mean, low, high = mean_and_interval(sign * (ours - base), LEVEL)
                said = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
                cells += [f"{sign * ours.mean():.{digits}f}", "" if arm == tuned_joint else said]
            else:
                yield "| " + " | ".join(cells) + " |"
    yield "\n### BLEU by small language, mean over seeds\n"
    arms = [
        arm
        for arm, scores in found["arms"].items()
        if _means(scores["BLEU"], data.small) is not None
    ]
    yield f"| language | {' | '.join(arms)} |"
    yield "| --- |" + " --- |" * len(arms)
    for code in data.small:
        cells = [f"{np.mean(found['arms'][arm]['BLEU'][code]):.1f}" for arm in arms]
        yield f"| {code} | {' | '.join(cells)} |"


def _means(
    by_language: Mapping[str, Sequence[float | None]], languages: Sequence[str]
) -> Table | None:
    """The mean over languages, by seed; None where a run is missing."""
    rows = [by_language.get(code, [None]) for code in languages]
    if any(value is None for row in rows for value in row):
        return None
    return np.array(rows, dtype=np.float64).mean(0)


def mean_and_interval(differences: Table, level: float) -> tuple[float, float, float]:
    """Mean of the seeds' differences with its interval."""
    num = len(differences)
    half = float(stats.t.ppf((1 + level) / 2, num - 1)) * float(differences.std(ddof=1)) / num**0.5
    mean = float(differences.mean())
    return mean, mean - half, mean + half


def small_differences(collection: str, found: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Arm -> its BLEU minus that of tuned joint training, on the small languages."""
    small, arms = COLLECTIONS[collection].small, found["arms"]
    means = {arm: _means(scores["BLEU"], small) for arm, scores in arms.items()}
    base = means[found["tuned"]]
    assert base is not None
    return {
        arm: mean_and_interval(own - base, LEVEL)
        for arm, own in means.items()
        if own is not None and arm != found["tuned"]
    }


if __name__ == "__main__":
    main()

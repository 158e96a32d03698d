"""Does it help to finish each small language alone? The tables of finish_alone_protocol.md.

    python docs/results/finish_alone.py runs       # the scores of all runs

`runs` holds finish_into and finish_into_last, finish_bible and finish_bible_last. Scores are saved
to finish_alone.json, from which `write_results.py` writes the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from equal_compute import Table, best_validation, mean_and_interval

Scores = dict[str, dict[str, list[float]]]  # metric -> task -> score by seed

SEEDS = (10, 11, 12, 13)
SMALL = {
    "into": [f"{code}-en" for code in ("mr", "cs", "es", "fr", "tr", "bg")],
    "bible": [f"en-{code}" for code in ("de", "es", "cs", "sw", "he")],
}
TITLES = {"into": "Into English", "bible": "Bible"}
_LEVEL = 0.95
METRICS = {"BLEU": 2, "chrF++": 2, "dev loss": 3}  # with digits; a loss is better if lower
OWN_BEST = "dev loss, own best"  # joint training's, at each language's own best validation
STEP = "3200"  # where the last fifth begins
SAVED = Path(__file__).parent / "finish_alone.json"


def main() -> None:
    """Read the arguments; save what runs have."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    runs = parser.parse_args().runs
    found = {name: read_arms(runs, name) for name in SMALL}
    SAVED.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")


def read_arms(runs: Path, collection: str) -> dict[str, Scores]:
    """Every arm's scores; `alone` is put together from the runs of the small languages."""
    joint, last = runs / f"finish_{collection}", runs / f"finish_{collection}_last"
    arms = {path.name: _read(path) for path in sorted(joint.iterdir()) if path.is_dir()}
    arms["until 3200"] = _read(joint / "joint5", STEP)
    arms |= {name: _read(last / name) for name in ("all", "together")}
    alone: Scores = {}
    for task in SMALL[collection]:
        for metric, by_task in _read(last / task.replace("en", "").strip("-")).items():
            alone.setdefault(metric, {}).update(by_task)
    return arms | {"alone": alone}


def _read(method: Path, weights: str = "best") -> Scores:
    found: Scores = {}
    for seed in SEEDS:
        run = method / f"seed-{seed}"
        path = run / "scores" / f"test.{weights}.json"
        by_metric = {
            one["metric"]: one["by_task"]
            for one in json.loads(path.read_text(encoding="utf-8"))["scores"]
        }
        if weights == "best":
            tasks = by_metric["BLEU"]
            losses = best_validation(run)
            by_metric["dev loss"] = {task: losses[f"dev/loss/{task}"] for task in tasks}
            by_metric[OWN_BEST] = _own_best(run, list(tasks))
        for metric, by_task in by_metric.items():
            for task, score in by_task.items():
                row = found.setdefault(metric, {}).setdefault(task, [])
                row.append(round(float(score), 4))
    return found


def _own_best(run: Path, tasks: Sequence[str]) -> dict[str, float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for line in lines if "dev/loss" in (entry := json.loads(line))]
    return {task: min(entry[f"dev/loss/{task}"] for entry in entries) for task in tasks}


def tuned_joint(arms: Mapping[str, Scores]) -> str:
    """The joint training with the lowest development loss."""
    joint = [name for name in arms if name.startswith("joint")]
    return min(joint, key=lambda name: _means(arms[name], "dev loss", arms[name]["BLEU"]).mean())


def small_differences(collection: str, arms: Mapping[str, Scores]) -> dict[str, tuple[float, ...]]:
    """Arm -> its BLEU minus that of tuned joint training, on the small languages."""
    small, tuned = SMALL[collection], tuned_joint(arms)
    base = _means(arms[tuned], "BLEU", small)
    return {
        arm: mean_and_interval(_means(own, "BLEU", small) - base, _LEVEL)
        for arm, own in arms.items()
        if arm != tuned
    }


def report(collection: str, arms: Mapping[str, Scores]) -> Iterator[str]:
    """Every arm against tuned joint training: small languages, the others, and all."""
    tuned = tuned_joint(arms)
    everything = list(arms[tuned]["BLEU"])
    small = SMALL[collection]
    others = [task for task in everything if task not in small]
    yield f"## {TITLES[collection]}: against {tuned}"
    for title, tasks in (("small", small), ("others", others), ("all", everything)):
        yield f"\n### {title}: {', '.join(tasks)}\n"
        yield "| arm |" + "".join(f" {metric} | difference |" for metric in METRICS)
        yield "| --- |" + " --- |" * 2 * len(METRICS)
        for name, scores in arms.items():
            if not set(tasks) <= set(scores["BLEU"]):
                continue
            cells = [name]
            for metric, digits in METRICS.items():
                if metric not in scores:
                    cells += ["", ""]
                    continue
                ours, base = (_means(one, metric, tasks) for one in (scores, arms[tuned]))
                cells += [f"{ours.mean():.{digits}f}", interval(ours - base, digits)]
            yield "| " + " | ".join(cells) + " |"
    yield from _criteria(arms, tuned, small, others)


def _criteria(
    arms: Mapping[str, Scores], tuned: str, small: Sequence[str], others: Sequence[str]
) -> Iterator[str]:
    yield "\n### Criteria\n"
    for first, second in (("alone", tuned), ("alone", "together"), ("alone", "all")):
        difference = _means(arms[first], "BLEU", small) - _means(arms[second], "BLEU", small)
        yield f"- {first} minus {second}, small languages: {interval(difference, 2)} BLEU"
    paid = _means(arms["until 3200"], "BLEU", others) - _means(arms["joint5"], "BLEU", others)
    yield f"- step 3,200 minus whole joint5, other languages: {interval(paid, 2)} BLEU"
    chosen = _means(arms["alone"], "dev loss", small) - _means(arms[tuned], OWN_BEST, small)
    yield f"- alone minus {tuned} at each one's own best validation: {interval(chosen, 3)} loss"
    for task in small:
        difference = np.subtract(arms["alone"]["BLEU"][task], arms[tuned]["BLEU"][task])
        yield f"- {task}: {np.mean(arms[tuned]['BLEU'][task]):.1f}, {interval(difference, 1)} BLEU"


def _means(scores: Scores, metric: str, tasks: Sequence[str] | Mapping[str, Any]) -> Table:
    """The mean over tasks, by seed."""
    return np.array([scores[metric][task] for task in tasks]).mean(0)


def interval(differences: Table, digits: int) -> str:
    """Mean of the seeds' differences with its 95 % interval; of a method and itself nothing."""
    mean, low, high = mean_and_interval(differences, _LEVEL)
    said = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return said if differences.any() else ""


if __name__ == "__main__":
    main()

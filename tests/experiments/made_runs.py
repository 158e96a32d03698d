"""Run folders with made-up scores, counts and logs: what a recipe would have left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradvac.lab.runs import RunFolder, TaskScores, write_scores
from gradvac.lab.runs.counts import SentenceCounts, write_counts
from gradvac.lab.training.config import write_toml

LEVELS = {"en-fr": "high", "en-hi": "low"}


def make_run(
    path: Path,
    *,
    rule: str = "sum",
    seed: int = 0,
    quality: Mapping[str, float] | float = 0.6,
    num_sentences: int = 200,
    with_counts: bool = True,
    seconds_per_step: float = 0.1,
    steps: int = 40,
    losses: tuple[float, ...] = (3.0, 2.5, 2.2, 2.1),
    settings: Mapping[str, Any] | None = None,
    tasks: Mapping[str, str] = LEVELS,
) -> Path:
    """A run whose tasks have about that share of their words right."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    table: dict[str, Any] = {
        "train": {"seed": seed, "metric": "dev/loss", "higher_is_better": False},
        "align": {"rule": rule},
        "data": {"prepared": f"somewhere/{path.name}"},
    }
    for key, value in (settings or {}).items():
        section, name = key.split(".")
        table.setdefault(section, {})[name] = value
    folder.config.write_text(write_toml(table))
    folder.signature.write_text(json.dumps({"data": "abcd", "device": "cpu"}))
    entries = []
    for number, loss in enumerate(losses, start=1):
        step = steps * number // len(losses)
        logged = {"train/loss": loss - 0.5, "train/seconds": step * seconds_per_step}
        entries.append({"step": step, **logged, "train/peak_memory": 1.5})
        entries.append({"step": step, "dev/loss": loss})
    folder.metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    random = np.random.default_rng([seed, len(rule), 7])
    counts = {}
    for task in tasks:
        share = quality if isinstance(quality, float) else quality[task]
        words = np.full(num_sentences, 10)
        counts[task] = np.stack([random.binomial(words, share), words], axis=1)
    sentences = dict.fromkeys(tasks, f"{num_sentences} sentences")
    made = SentenceCounts("accuracy", "percentage", counts, sentences)
    folder.scores.mkdir()
    if with_counts:
        write_counts(folder.counts_of("test", "best"), [made])
    by_task = {task: made.score(task) for task in tasks}
    write_scores(folder.scores_of("test", "best"), [TaskScores("accuracy", by_task, tasks, "test")])
    return path

"""Runs with similarities that are known: made, not trained."""

# S steps, K components, T tasks

from pathlib import Path

import numpy as np

from gradvac.analysis.record import Record
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities
from gradvac.lab.runs import TaskScores

FAMILIES = {
    "fr": "Western European", "es": "Western European", "de": "Western European",
    "pl": "West Slavic", "cs": "West Slavic", "mk": "South Slavic", "bg": "South Slavic",
    "uk": "East Slavic", "be": "East Slavic", "ru": "East Slavic", "lv": "Baltic", "lt": "Baltic",
    "et": "Uralic", "fi": "Uralic", "hi": "Indo-Iranian", "mr": "Indo-Iranian",
    "gu": "Indo-Iranian", "ne": "Indo-Iranian", "kk": "Turkic", "ky": "Turkic",
    "sw": "Benue-Congo", "zu": "Benue-Congo", "xh": "Benue-Congo",
    "id": "Malayo-Polynesian", "ms": "Malayo-Polynesian",
}  # fmt: skip
LEVELS = ("high", "medium", "low")


def layer_names(num_layers: int) -> tuple[str, ...]:
    """Components of a Transformer."""
    layers = [f"{side}.layers.{n}" for side in ("encoder", "decoder") for n in range(num_layers)]
    return (*layers[:num_layers], "encoder.norm", *layers[num_layers:], "decoder.norm", "embedding")


def cosines(
    tasks: list[str], components: tuple[str, ...], num_steps: int, *, seed: int, family: float
) -> np.ndarray:
    """Symmetric `[S, K, T, T]`: a base, something for relatives, less in the decoder, noise."""
    draw = np.random.default_rng(seed)
    families = [FAMILIES.get(task.replace("en", "").strip("-"), task) for task in tasks]
    related = np.array([[a == b for b in families] for a in families])
    pairs = draw.normal(0, 0.03, (len(tasks), len(tasks)))
    values = np.empty((num_steps, len(components), len(tasks), len(tasks)), np.float32)
    for k, name in enumerate(components):
        depth = 0.02 * int(name.rsplit(".", 1)[-1]) if name[-1].isdigit() else 0.0
        share = 1.0 if name.startswith("encoder") else 0.4
        base = (0.1 + family * related) * share - depth + pairs
        for s in range(num_steps):
            noise = draw.normal(0, 0.02, pairs.shape)
            values[s, k] = base * (1 - 0.5 * s / num_steps) + noise
    values = (values + values.swapaxes(-1, -2)) / 2
    values[..., range(len(tasks)), range(len(tasks))] = 1
    return values


def make_run(
    name: str = "gradvac",
    *,
    codes: tuple[str, ...] = tuple(FAMILIES),
    directions: tuple[str, ...] = ("en-xx",),
    num_layers: int = 6,
    num_steps: int = 12,
    seed: int = 0,
    family: float = 0.25,
    measured: bool = True,
    recorded: bool = True,
    bleu: float | None = 20.0,
) -> Run:
    """A run whose relatives share `family` more than others."""
    tasks = [direction.replace("xx", code) for direction in directions for code in codes]
    components = layer_names(num_layers)
    steps = 100 * np.arange(1, num_steps + 1)
    draw = np.random.default_rng(seed)
    values = cosines(tasks, components, num_steps, seed=seed, family=family)
    reliability = draw.uniform(0.3, 0.6, values.shape[:3]).astype(np.float32)
    across = values * 0.7 + draw.normal(0, 0.01, values.shape).astype(np.float32)
    across[..., range(len(tasks)), range(len(tasks))] = reliability
    apart = (across + across.swapaxes(-1, -2)) / 2
    norms = draw.uniform(1, 2, (*values.shape[:2], 2, len(tasks))).astype(np.float32)
    named = tuple(tasks), components, steps
    found = (
        Similarities(*named, values, reliability),
        Similarities(*named, apart, reliability, across, norms, lines="different"),
    )
    record = _record(tasks, components, steps, values * 0.4, draw) if recorded else None
    return Run(
        name=name,
        path=Path(name),
        record=record,
        measured=found if measured else (),
        metrics=_metrics(tasks, num_steps, draw),
        scores=None if bleu is None else _scores(tasks, bleu, draw),
        settings=f'[align]\nrule = "{name}"\n\n[train]\nseed = {seed}\nmax_steps = 1200\n',
        signature={"rule": name, "tasks": str(len(tasks)), "config": "ab12cd34"},
        families={task: FAMILIES.get(task.replace("en", "").strip("-"), "") for task in tasks},
        distances=None,
    )


def _record(
    tasks: list[str],
    components: tuple[str, ...],
    steps: np.ndarray,
    similarity: np.ndarray,
    draw: np.random.Generator,
) -> Record:
    shape = similarity.shape[:2]
    target = np.broadcast_to(similarity.mean(axis=0), similarity.shape) * np.linspace(
        0, 1, len(steps)
    ).reshape(-1, 1, 1, 1)
    others = ~np.eye(len(tasks), dtype=bool)
    return Record(
        tasks=tuple(tasks),
        components=components,
        steps=steps,
        similarity=similarity.astype(np.float32),
        target=target.astype(np.float32),
        active=(similarity < target) & others,
        weights=np.ones((*shape, len(tasks)), np.float32),
        norms=np.ones((*shape, len(tasks)), np.float32),
        update_cosine=(1 - draw.uniform(0, 0.01, shape)).astype(np.float32),
        update_ratio=(1 + draw.uniform(0, 0.1, shape)).astype(np.float32),
        rule="GradVac(EmaTarget(beta=0.01))",
    )


def _metrics(tasks: list[str], num_steps: int, draw: np.random.Generator) -> list[dict]:
    entries: list[dict] = []
    for n in range(1, 10 * num_steps + 1):
        entries.append({"step": 10 * n, "train/loss": 6 / n**0.3 + draw.normal(0, 0.03)})
        if n % 10 == 0:
            losses = {f"dev/loss/{t}": 6.2 / n**0.3 + draw.normal(0, 0.1) for t in tasks}
            mean = sum(losses.values()) / len(losses)
            entries.append({"step": 10 * n, "dev/loss": mean, **losses})
    return [*entries, {"step": 10 * num_steps, "train/loss": None}]


def _scores(tasks: list[str], bleu: float, draw: np.random.Generator) -> TaskScores:
    by_task = {task: bleu + 10 * (n % 3) / 3 + draw.normal(0, 0.5) for n, task in enumerate(tasks)}
    levels = {task: LEVELS[3 * n // len(tasks)] for n, task in enumerate(tasks)}
    note = "test set, best weights; BLEU nrefs:1|case:mixed|tok:13a"
    return TaskScores("BLEU", by_task, levels, note)

"""Runs made of vectors: with no structure at all, or with one that was planted.

Every task has a gradient in every component. Tasks, layers, sides and steps are all alike, but for
what is asked for; measurements on halves of the data and training batches add their noise.
"""

# S steps, K components, T tasks, D numbers of a component

from pathlib import Path

import numpy as np

from gradvac.analysis import KnownDistances, Record, Run, Similarities
from gradvac.lab.runs import TaskScores

SIZE = 100  # numbers of a component
LAYERS = 4
COMPONENTS = tuple(f"{side}.layers.{n}" for side in ("encoder", "decoder") for n in range(LAYERS))
FAMILIES = ("x", "x", "x", "y", "y", "z", "z")


def gradients(
    draw: np.random.Generator,
    *,
    num_tasks: int = 7,
    num_steps: int = 8,
    shared: float = 0.2,
    family: float = 0.0,
    by_side: float = 0.0,
    by_depth: float = 0.0,
    by_step: float = 0.0,
) -> np.ndarray:
    """True gradients `[S, K, T, D]` of length 1 in expectation; any two share `shared`.

    Relatives share `family` more, tasks in the encoder `by_side` more than in the decoder, in the
    last layer `by_depth` more than in the first, at the last step `by_step` more than at the first.
    """
    found = np.empty((num_steps, len(COMPONENTS), num_tasks, SIZE))
    relatives = np.array([FAMILIES.index(FAMILIES[i % len(FAMILIES)]) for i in range(num_tasks)])
    for k, name in enumerate(COMPONENTS):
        common, own = draw.normal(size=SIZE), draw.normal(size=(num_tasks, SIZE))
        common *= SIZE**0.5 / np.linalg.norm(common)  # longer in one layer would be a difference
        families = draw.normal(size=(num_tasks, SIZE))[relatives]
        here = shared + by_side / 2 * (1 if name.startswith("encoder") else -1)
        here += by_depth * (k % LAYERS / (LAYERS - 1) - 0.5)
        for s in range(num_steps):
            now = here + by_step * (s / max(1, num_steps - 1) - 0.5)
            rest = np.sqrt(1 - now - family) * own
            found[s, k] = (np.sqrt(now) * common + np.sqrt(family) * families + rest) / SIZE**0.5
    return found


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`[..., T, T]`"""
    one, other = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (one, other))
    return one @ other.swapaxes(-1, -2)


def noisy(draw: np.random.Generator, true: np.ndarray, reliability: float) -> np.ndarray:
    """One half of the data: its cosine with another half is `reliability`; alike at all steps."""
    noise = draw.normal(size=true.shape[1:]) * np.sqrt((1 / reliability - 1) / SIZE)
    return true + noise


def halves_of(tasks: tuple[str, ...], a: np.ndarray, b: np.ndarray) -> tuple[Similarities, ...]:
    """What `measure` makes of two halves `[S, K, T, D]`."""
    across = cosines(a, b)
    steps = 100 * np.arange(1, len(a) + 1)
    norms = np.stack([np.linalg.norm(half, axis=-1) for half in (a, b)], axis=2)
    reliability = np.diagonal(across, axis1=2, axis2=3).copy()
    floats = [
        np.asarray(one, np.float32)
        for one in (cosines(a + b, a + b), (across + across.swapaxes(2, 3)) / 2, reliability)
    ]
    own, apart, reliable = floats
    return (
        Similarities(tasks, COMPONENTS, steps, own, reliable),
        Similarities(
            tasks, COMPONENTS, steps, apart, reliable, across.astype(np.float32),
            norms.astype(np.float32), lines="different",
        ),
    )  # fmt: skip


def record_of(tasks: tuple[str, ...], batches: np.ndarray) -> Record:
    """What training records of a plain sum of batch gradients `[S, K, T, D]`."""
    shape = batches.shape[:3]
    similarity = cosines(batches, batches).astype(np.float32)
    return Record(
        tasks=tasks,
        components=COMPONENTS,
        steps=100 * np.arange(1, len(batches) + 1),
        similarity=similarity,
        target=np.full_like(similarity, np.nan),
        active=np.zeros(similarity.shape, bool),
        weights=np.ones(shape, np.float32),
        norms=np.linalg.norm(batches, axis=-1).astype(np.float32),
        update_cosine=np.ones(shape[:2], np.float32),
        update_ratio=np.ones(shape[:2], np.float32),
        rule="Sum()",
    )


def make(
    draw: np.random.Generator,
    *,
    name: str = "run",
    num_tasks: int = 7,
    measured: bool = True,
    reliability: float = 0.5,
    directions: tuple[str, ...] = ("en-{}",),
    **structure: float,
) -> Run:
    """A run on tasks of FAMILIES and of random distances, which mean nothing unless planted."""
    codes = [f"q{letter}" for letter in "abcdefg"[:num_tasks]]
    tasks = tuple(way.format(code) for way in directions for code in codes)
    true = gradients(draw, num_tasks=len(tasks), **structure)
    a, b = (noisy(draw, true, reliability) for _ in range(2))
    batches = true + draw.normal(size=true.shape) / SIZE**0.5
    scores = draw.normal(size=len(tasks))
    points = draw.normal(size=(num_tasks, 3))
    far = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return Run(
        name=name,
        path=Path(name),
        record=None if measured else record_of(tasks, batches),
        measured=halves_of(tasks, a, b) if measured else (),
        metrics=[],
        scores=TaskScores("F1", dict(zip(tasks, scores.tolist(), strict=True))),
        settings="",
        signature={},
        families=dict(zip(tasks, FAMILIES[:num_tasks] * len(directions), strict=True)),
        distances=KnownDistances(tasks, np.tile(far, (len(directions),) * 2), "distance"),
    )

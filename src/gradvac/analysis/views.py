"""What figures and report show of a run: which similarities, in which order and by which names."""

# S steps, K components, T tasks

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvac import tasks as task_names
from gradvac.analysis import statistics
from gradvac.analysis.run import KnownDistances, Run
from gradvac.analysis.run_files import TaskScores
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.engine.components import DECODER, ENCODER, side_of

Matrix = NDArray[np.floating]

SIDES = (ENCODER, DECODER)
MODEL = "model"
MOST_SHOWN = 100  # tasks in a map; more take megabytes, and no screen has room for them
_FEWEST_FOR_DISTANCE = 5  # tasks; fewer can be permuted in too few ways
_WHERE = {
    "same": "aligned set, same lines",
    "different": "aligned set, different lines",
    "training": "batches of training",
}


class Block(NamedTuple):
    """Neighbouring rows of one family: rows `start` to `stop - 1`."""

    family: str
    start: int
    stop: int


@dataclass(frozen=True)
class TaskSubset:
    """Tasks of one direction in one side of the model: what can be compared with each other."""

    side: str  # "encoder", "decoder", "shared" or "model"
    direction: str  # "xx-en" or "en-xx"; "" if all tasks go the same way, or neither
    tasks: list[str]

    @property
    def name(self) -> str:
        """As in "encoder" or "encoder (en-xx)"."""
        return self.side + (f" ({self.direction})" if self.direction else "")


def short(name: str, most: int = 24) -> str:
    """A name shortened to its beginning and its end, which distinguish most names."""
    end = (most - 1) // 3
    return name if len(name) <= most else f"{name[: most - 1 - end]}…{name[-end:]}"


def sources(run: Run) -> dict[str, Similarities]:
    """All similarities of a run by a readable name; the one to show first comes first.

    What was measured on an aligned set comes before what was recorded in training, because it
    compares all tasks on the same sentences; the finest division into components comes first.
    """
    preference = ("all_layer", "all_matrix", "enc_dec", "whole_model")

    def rank(found: Similarities) -> tuple[bool, int, int]:
        known = found.granularity in preference
        granularity = preference.index(found.granularity) if known else len(preference)
        return found.lines != "same", granularity, -len(found.components)

    named = {}
    for source in sorted(run.measured, key=rank):
        granularity = source.granularity.replace("_", " ")
        named[f"{_WHERE[source.lines]}, {granularity}"] = source
    if run.record is not None:
        named[_WHERE["training"]] = run.record.similarities()
    return named


def main_source(run: Run) -> Similarities | None:
    """The main similarities of a run; None if it has none."""
    return next(iter(sources(run).values()), None)


def for_maps(runs: Sequence[Run]) -> list[Run]:
    """The runs with at most `MOST_SHOWN` tasks: those that agree least with the others.

    What the first run shows is shown of the others too, where they have it.
    """
    parts, chosen = list[Run](), set[str]()
    for run in runs:
        main = main_source(run)
        if main is None or len(run.tasks) <= MOST_SHOWN:
            parts.append(run)
            continue
        if not chosen.issubset(run.tasks) or not chosen:
            matrix = np.array(statistics.mean_matrix(main))
            np.fill_diagonal(matrix, np.nan)
            least = np.argsort(mean_where_known(matrix, axis=1))[:MOST_SHOWN]  # NaN comes last
            chosen = {main.tasks[i] for i in least}
        kept = [task for task in run.tasks if task in chosen]
        measured = tuple(one.select(tasks=kept) for one in run.measured)
        record = run.record and run.record.select([t for t in kept if t in run.record.tasks])
        parts.append(replace(run, record=record, measured=measured))
    return parts


def measured_on(run: Run) -> str:
    """What the aligned set was, as in "1,000 lines of dev"; "an unnamed set" if that is unknown."""
    try:
        about = json.loads(run.about)
        return f"{about['lines']:,} lines of {about['set']}"
    except (ValueError, KeyError, TypeError):
        return "an unnamed set"


def sides_of(similarities: Similarities) -> tuple[str, ...]:
    """Encoder and decoder if the components have both, else the model as a whole."""
    sides = {side_of(name) for name in similarities.components}
    return SIDES if sides.issuperset(SIDES) else (MODEL,)


def side_matrix(
    similarities: Similarities, side: str, tasks: Sequence[str] | None = None
) -> Matrix:
    """Mean over steps and over the components of a side, or of the whole "model", `[T, T]`."""
    chosen = similarities if tasks is None else similarities.select(tasks=tasks)
    return statistics.mean_matrix(chosen, None if side == MODEL else side)


def side_by_step(
    similarities: Similarities, side: str, tasks: Sequence[str] | None = None
) -> Matrix:
    """Mean over the components of a side, or of the whole "model", `[S, T, T]`."""
    chosen = similarities if tasks is None else similarities.select(tasks=tasks)
    return statistics.by_step(chosen, None if side == MODEL else side)


def for_pairs(main: Similarities, run: Run) -> Similarities:
    """The similarities by which pairs are tested: on different lines, where they were measured.

    Two tasks that were measured on the same lines share the noise of these lines, and tasks of
    larger sets share more of them.
    """
    halves = two_halves(run)
    return halves if halves is not None and main.lines == "same" else main


def shared_noise(main: Similarities, run: Run, tasks: Sequence[str] | None = None) -> Matrix | None:
    """Correlations of the tasks' noise by the lines they share, `[T, T]`; None if unknown."""
    halves, chosen = two_halves(run), tasks or main.tasks
    if halves is None:
        return None
    return statistics.noise_in_common(main.select(tasks=chosen), halves.select(tasks=chosen))


def side_pattern(
    similarities: Similarities, side: str, tasks: Sequence[str] | None = None
) -> Matrix:
    """What stands out in pairs beyond the noise of tasks, in a side or the "model", `[T, T]`."""
    chosen = similarities if tasks is None else similarities.select(tasks=tasks)
    return statistics.pair_pattern(chosen, None if side == MODEL else side)


def layer_means(similarities: Similarities) -> list[tuple[TaskSubset, list[tuple[int, float]]]]:
    """Mean similarity (layer, mean) of every direction in every side, without what is unknown."""
    lines = []
    for direction, tasks in task_names.directions(similarities.tasks):
        for side, points in statistics.mean_by_layer(similarities.select(tasks=tasks)).items():
            known_points = [(layer, mean) for layer, mean in points if not np.isnan(mean)]
            if known_points:
                lines.append((TaskSubset(side, direction, tasks), known_points))
    return lines


def example_pairs(similarities: Similarities) -> list[tuple[str, str]]:
    """The most similar, a middling and the least similar pair."""
    matrix = statistics.mean_matrix(similarities)
    rows, columns = np.tril_indices(len(matrix), -1)
    values = matrix[rows, columns]
    ranked = [int(i) for i in np.argsort(-values) if not np.isnan(values[i])]
    if not ranked:
        return []
    shown = dict.fromkeys((ranked[0], ranked[len(ranked) // 2], ranked[-1]))
    return [(similarities.tasks[columns[i]], similarities.tasks[rows[i]]) for i in shown]


def similarity_and_score(
    similarities: Similarities, scores: TaskScores
) -> list[tuple[str, float, float]]:
    """Every task's mean similarity with the others, and its score, where both are known."""
    matrix = np.array(statistics.mean_matrix(similarities), dtype=np.float64)
    np.fill_diagonal(matrix, np.nan)
    means = mean_where_known(matrix, axis=1)
    return [
        (task, float(mean), scores.by_task[task])
        for task, mean in zip(similarities.tasks, means, strict=True)
        if task in scores.by_task and not np.isnan(mean)
    ]


def pair_values(matrix: Matrix) -> Matrix:
    """The values of a symmetric matrix, each pair once and the diagonal left out."""
    values: Matrix = matrix[np.tril_indices(len(matrix), -1)]
    return values[~np.isnan(values)]


def pair_mean(matrix: Matrix) -> float:
    """Mean over pairs of different tasks; NaN without any."""
    values = pair_values(matrix)
    return float(values.mean()) if values.size else float("nan")


def subsets(similarities: Similarities) -> list[TaskSubset]:
    """Every direction in every side."""
    return [
        TaskSubset(side, direction, tasks)
        for side in sides_of(similarities)
        for direction, tasks in task_names.directions(similarities.tasks)
    ]


def two_halves(run: Run) -> Similarities | None:
    """Similarities on different lines with both halves, of the finest division; None without."""
    halves = [s for s in sources(run).values() if s.lines == "different"]
    return next((s for s in halves if s.across is not None), None)


def reliability_by_step(halves: Similarities) -> dict[str, Matrix]:
    """Side -> how well tasks agree with themselves on other lines, `[S]`; empty if unknown."""
    if halves.reliability is None:
        return {}
    chosen = {
        side: weighty(halves.components, None if side == MODEL else side)
        for side in sides_of(halves)
    }
    return {
        side: mean_where_known(halves.reliability[:, components], axis=(1, 2))
        for side, components in chosen.items()
    }


def find_influence(run: Run) -> statistics.Influence | None:
    """Influence: unbiased on the aligned set, else as recorded; None if neither is there."""
    halves = two_halves(run)
    measured = None if halves is None else statistics.measured_influence(halves)
    if measured is not None or run.record is None or len(run.record.tasks) < 2:
        return measured
    return statistics.recorded_influence(run.record)


def against_distance(
    similarities: Similarities, known: KnownDistances | None
) -> list[tuple[TaskSubset, Matrix, Matrix]]:
    """Similarities and known distances, each `[T, T]`, of every subset that has enough of both."""
    with_distances: list[tuple[TaskSubset, Matrix, Matrix]] = []
    if known is None:
        return with_distances
    for subset in subsets(similarities):
        tasks = [task for task in subset.tasks if task in known.tasks]
        if len(tasks) < _FEWEST_FOR_DISTANCE:
            continue
        where = [known.tasks.index(task) for task in tasks]
        matrix = side_matrix(similarities, subset.side, tasks)
        distances = np.where(np.isnan(matrix), np.nan, known.values[np.ix_(where, where)])
        matrix = np.where(np.isnan(distances), np.nan, matrix)
        if all(len(set(pair_values(one))) > 1 for one in (matrix, distances)):  # else there is no r
            with_distances.append((replace(subset, tasks=tasks), matrix, distances))
    return with_distances


def correlation_with_distance(
    main: Similarities, run: Run, subset: TaskSubset, distances: Matrix
) -> statistics.Correlation:
    """Mantel's test of what stands out in the pairs of a subset, against their known distances."""
    pattern = side_pattern(for_pairs(main, run), subset.side, subset.tasks)
    noise = shared_noise(main, run, subset.tasks)
    return statistics.mantel(pattern, statistics.without_task_means(distances), in_common=noise)


def order_by_family(
    matrix: Matrix, tasks: Sequence[str], families: Mapping[str, str]
) -> tuple[list[int], list[Block]]:
    """An order that keeps directions and, within them, families together, similar ones adjacent.

    Families follow the clustering of their mean similarities, tasks within a family that of their
    own. Tasks of no known family come last.
    """
    order: list[int] = []
    blocks: list[Block] = []
    for direction, members in task_names.directions(tasks):
        positions = [position for position, task in enumerate(tasks) if task in members]
        inner, inner_blocks = _order_of_one(
            matrix[np.ix_(positions, positions)], [families.get(tasks[i], "") for i in positions]
        )
        start = len(order)
        blocks += [
            Block(f"{block.family} {direction}".strip(), start + block.start, start + block.stop)
            for block in inner_blocks
        ]
        order += [positions[i] for i in inner]
    return order, blocks


def _order_of_one(matrix: Matrix, families: Sequence[str]) -> tuple[list[int], list[Block]]:
    """`order_by_family` for tasks of one direction."""
    members: dict[str, list[int]] = {}
    for position, family in enumerate(families):
        members.setdefault(family, []).append(position)
    unknown = members.pop("", [])
    names = list(members)
    means = np.array(
        [[_mean(matrix[np.ix_(members[a], members[b])], a == b) for b in names] for a in names]
    )
    order: list[int] = []
    blocks = []
    for name in (names[i] for i in _cluster(means)):
        positions = members[name]
        blocks.append(Block(name, len(order), len(order) + len(positions)))
        order += [positions[i] for i in _cluster(matrix[np.ix_(positions, positions)])]
    order += [unknown[i] for i in _cluster(matrix[np.ix_(unknown, unknown)])]
    return order, blocks


def _cluster(matrix: Matrix) -> list[int]:
    return statistics.cluster_order(matrix) if len(matrix) else []


def _mean(block: Matrix, same_family: bool) -> float:
    values = pair_values(block) if same_family else block[~np.isnan(block)]
    return float(values.mean()) if values.size else 0.0


def why_not_compared(first: Run, second: Run) -> str:
    """Why the similarities of two runs mean different things; empty if they do not."""
    a, b = main_source(first), main_source(second)
    if a is None or b is None:
        return "one of them has none"
    if a.lines != b.lines:
        return "one was measured on an aligned set, the other in training"
    if a.lines == "training":
        divisions = [run.signature.get("granularity", "") for run in (first, second)]
        sets = ["", ""]
    else:
        divisions = [a.granularity, b.granularity]
        sets = [measured_on(run) for run in (first, second)]
    if divisions[0] != divisions[1]:
        return f"one is of {divisions[0]}, the other of {divisions[1]}"
    if sets[0] != sets[1]:
        return f"one was measured on {sets[0]}, the other on {sets[1]}"
    return ""


def compared(first: Run, second: Run) -> statistics.SimilarityComparison | None:
    """The similarities of two runs at the steps they share; None if they cannot be compared."""
    a, b = main_source(first), main_source(second)
    if a is None or b is None or why_not_compared(first, second):
        return None
    pairs = [for_pairs(a, first), for_pairs(b, second)]
    common = sorted(set(a.steps.tolist()) & set(b.steps.tolist()))
    if common:
        a, b, *pairs = (one.select(steps=common) for one in (a, b, *pairs))
    try:
        return statistics.compare_similarities(a, b, tested=(pairs[0], pairs[1]))
    except ValueError:  # fewer than two tasks in common
        return None

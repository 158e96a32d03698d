"""Compare methods: per task, by resource level and on average, against a baseline."""

# R runs (seeds), B drawings of the sentences, N sentences, C counts

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.run_files import ALL, tasks_by_level
from gradvac.lab.experiments import methods
from gradvac.lab.experiments.methods import (
    JOINT,
    LOSS,
    PLAN,
    PRIMARY,
    Cost,
    Method,
    ScoredRun,
)
from gradvac.lab.experiments.trials import PrimaryQuestion
from gradvac.lab.experiments.verdicts import (
    FEWEST_PAIRS,
    LEVEL,
    Against,
    ComparisonRow,
    RowQuantity,
    Scored,
    judge_primary,
    row_of,
)
from gradvac.lab.runs.counts import FORMULAS
from gradvac.utils.files import read_json
from gradvac.utils.hints import nearest, some

Floats = NDArray[np.float64]
_DRAWINGS = 1000


@dataclass(frozen=True)
class PrimaryAnswer:
    """What was asked beforehand, and what was found."""

    method: str
    baseline: str  # what it is compared with, which may be another one than that of the tables
    on: str  # the row
    digits: int  # decimals to show
    against: Against


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        metric: Such as "BLEU".
        note: How it was scored.
        baseline: The method that the others are compared with.
        seeds: Method -> its seeds.
        primary: Answers to the questions that the sweep named beforehand; without any, every
            method's average takes their place in the tables, and this is empty.
        rows: Scores: average, levels, tasks.
        losses: Losses of training and development, at equal steps and equal time.
        costs: Method -> what it cost.
        test: The test behind the verdicts.
        remarks: What a reader must know: what was left out, what is not comparable.
        mixtures: Methods that are plain joint training with some temperature and task weights.
    """

    metric: str
    note: str
    baseline: str
    seeds: Mapping[str, tuple[int, ...]]
    primary: Sequence[PrimaryAnswer]
    rows: Sequence[ComparisonRow]
    losses: Sequence[ComparisonRow]
    costs: Mapping[str, Cost]
    test: str
    remarks: Sequence[str] = field(default_factory=list)
    mixtures: Sequence[str] = ()


def compare_runs(
    paths: Sequence[Path],
    *,
    baseline: str | None = None,
    split: str = "test",
    weights: str | int = "best",
    metric: str | None = None,
) -> Comparison:
    """Compare the methods of some runs.

    Args:
        paths: Run folders, or folders of sweeps.
        baseline: Name of a method, or a run of it; None: the method called "joint", else plain
            joint training if one method is that, else the first.
        split: The set whose scores are compared.
        weights: The weights they are of.
        metric: None: the first metric of the scores.

    Raises:
        ValueError: There is nothing to compare, or scores are damaged or of other sentences.
    """
    run_paths = methods.find_runs(paths)
    read = {
        path: methods.read_run(path, split=split, weights=weights, metric=metric)
        for path in run_paths
    }
    missing = [path for path, run in read.items() if run is None]
    scored = [run for run in read.values() if run is not None]
    if not scored:
        raise ValueError(
            f"{run_paths[0]}: has no scores of the {split} set with {weights} weights; run "
            "`gradvac nmt score` or `gradvac tagging score`."
        )
    compared = methods.group_by_method(scored)
    remarks = [
        f"{some([str(path) for path in missing])}: not scored on the {split} set, left out."
    ] * bool(missing)
    return compare_methods(
        compared, baseline=baseline, primary=_named_questions(run_paths), remarks=remarks
    )


def _named_questions(runs: Sequence[Path]) -> list[PrimaryQuestion]:
    """The primary questions of the sweeps OUT that runs OUT/METHOD/seed-N are of."""
    sweeps = dict.fromkeys(run.resolve().parents[1] for run in runs)
    asked = [question for out in sweeps for question in read_json(out / PLAN).get(PRIMARY, [])]
    once = [question for n, question in enumerate(asked) if question not in asked[:n]]
    return [PrimaryQuestion(**question) for question in once]


def compare_methods(
    compared: Sequence[Method],
    *,
    baseline: str | None = None,
    primary: Sequence[PrimaryQuestion] = (),
    remarks: Sequence[str] = (),
) -> Comparison:
    """Compare methods that were read already."""
    first = _find_baseline(compared, baseline)
    compared = [first, *(method for method in compared if method is not first)]
    scores = first.runs[0].scores
    metrics = {run.scores.metric for method in compared for run in method.runs}
    if len(metrics) > 1:
        raise ValueError(f"--metric: runs have {', '.join(sorted(metrics))}; choose one.")
    all_remarks = [*remarks, *_remarks(compared, first)]
    drawn = _draw_scores(compared, first.tasks)
    if drawn is None:
        all_remarks.append(
            f"What {scores.metric} is made of by sentence is not known of all runs, so that the "
            "intervals are about other seeds alone, on these sentences; score the runs again."
        )
    scored = [
        RowQuantity(kind, name, _scored(tasks, drawn), scores.digits + 1, scores.higher_is_better)
        for kind, name, tasks in _sets_of_tasks(first)
    ]
    losses = list(_losses(compared))
    answers, left_out = _answers(primary or _averages(compared), [*scored, *losses], compared)
    return Comparison(
        metric=scores.metric,
        note=_shared_note(compared),
        baseline=first.name,
        seeds={method.name: method.seeds for method in compared},
        primary=answers if primary else [],
        rows=[_row(one, compared, answers) for one in scored],
        losses=[_row(one, compared, answers) for one in losses],
        costs={method.name: methods.cost_of(method) for method in compared},
        test=_test_used(drawn is not None, len(answers), is_named=bool(primary)),
        remarks=[*all_remarks, *left_out],
        mixtures=[method.name for method in compared if _is_mixture(method.runs[0])],
    )


def _averages(compared: Sequence[Method]) -> list[PrimaryQuestion]:
    """The questions where none were named: who is better on average?"""
    first = compared[0].name
    return [PrimaryQuestion(method=one.name, baseline=first) for one in compared[1:]]


def _answers(
    asked: Sequence[PrimaryQuestion], quantities: Sequence[RowQuantity], compared: Sequence[Method]
) -> tuple[list[PrimaryAnswer], list[str]]:
    """The answers, and remarks about questions that these runs cannot answer."""
    rows, known = {one.name: one for one in quantities}, {one.name: one for one in compared}
    wanted = [
        (rows[one.on], known[one.baseline], known[one.method])
        for one in asked
        if one.on in rows and {one.baseline, one.method} <= known.keys()
    ]
    answers = [
        PrimaryAnswer(method.name, baseline.name, row.name, row.digits, against)
        for (row, baseline, method), against in zip(wanted, judge_primary(wanted), strict=True)
        if against is not None
    ]
    found = {(one.method, one.baseline, one.on) for one in answers}
    lacking = [
        f"{one.method} against {one.baseline} on {one.on!r}"
        for one in asked
        if (one.method, one.baseline, one.on) not in found
    ]
    return answers, [f"Primary questions without runs to answer them: {some(lacking)}."] * bool(
        lacking
    )


def _row(
    quantity: RowQuantity, compared: Sequence[Method], answers: Sequence[PrimaryAnswer]
) -> ComparisonRow:
    """A row whose primary questions have their corrected answers."""
    row = row_of(quantity, compared)
    own = {
        one.method: replace(row.cells[one.method], against=one.against)
        for one in answers
        if (one.baseline, one.on) == (compared[0].name, row.name)
    }
    return replace(row, cells={**row.cells, **own})


def _find_baseline(compared: Sequence[Method], wanted: str | None) -> Method:
    if wanted is None:
        plain = [method for method in compared if _is_plain(method.runs[0])]
        named = [method for method in compared if method.name == JOINT]
        return named[0] if named else plain[0] if len(plain) == 1 else compared[0]
    for method in compared:
        folders = {run.path.resolve() for run in method.runs}
        if wanted == method.name or Path(wanted).resolve() in folders:
            return method
    names = [method.name for method in compared]
    raise ValueError(f"--baseline: there is no {wanted!r}; {nearest(wanted, names)}")


def _is_plain(run: ScoredRun) -> bool:
    return _is_mixture(run) and not any(key.startswith("align.weights.") for key in run.settings)


def _is_mixture(run: ScoredRun) -> bool:
    return run.settings.get("align.rule") in ("sum", "none")


def _remarks(compared: Sequence[Method], first: Method) -> Iterator[str]:
    for method in compared[1:]:
        absent = [task for task in first.tasks if task not in method.tasks]
        beyond = [task for task in method.tasks if task not in first.tasks]
        if absent:
            yield f"{method.name}: not scored on {some(absent)}, so that it has no average."
        if beyond:
            yield f"{method.name}: {some(beyond)} not compared, as {first.name} lacks them."
    for method in compared[1:]:
        shared = set(first.seeds) & set(method.seeds)
        if len(shared) < max(len(first.seeds), len(method.seeds)):
            yield _about_pairs(first, method, len(shared))
    single = [method.name for method in compared if len(method.runs) == 1]
    if single:
        yield f"{some(single)}: one seed, which shows nothing about other seeds; train more."
    stopped = [stop for method in compared for run in method.runs if (stop := _stop(run))]
    if stopped:
        yield f"Not trained to their end: {some(stopped)}."
    devices = {str(r.signature.get("device", "")) for method in compared for r in method.runs}
    if len(devices) > 1:
        yield f"Runs are of different machines ({some(sorted(devices))}): their times differ too."
    if len(notes := _notes(compared)) > 1:
        yield f"Scores were made in different ways: {'; '.join(notes)}."


def _about_pairs(first: Method, method: Method, num_shared: int) -> str:
    """What the seeds that two methods do not share have to do with their difference."""
    if num_shared < min(FEWEST_PAIRS, len(first.seeds), len(method.seeds)):
        return (
            f"{method.name}: shares {num_shared} seeds with {first.name}, so that runs are not "
            "paired, which takes larger differences to see; train both with the same seeds."
        )
    return (
        f"{method.name}: compared with {first.name} on the {num_shared} seeds that both have "
        f"(of {len(method.seeds)} and {len(first.seeds)}); its mean is over all of its own."
    )


def _stop(run: ScoredRun) -> str:
    """Where a run stands that has steps left; empty for others."""
    settings, step = run.settings, methods.last_step(run)
    planned = int(settings.get("train.max_steps", 0))
    if settings.get("train.patience") or settings.get("batch.epochs"):
        return ""  # they end otherwise
    return f"{run.path} (step {step:,} of {planned:,})" if 0 < step < planned else ""


def _notes(compared: Sequence[Method]) -> list[str]:
    return sorted({run.scores.note for method in compared for run in method.runs})


def _shared_note(compared: Sequence[Method]) -> str:
    """How all runs were scored; remarks say it where they were not scored alike."""
    notes = _notes(compared)
    return notes[0] if len(notes) == 1 else "in different ways, see the remarks"


def _sets_of_tasks(first: Method) -> list[tuple[str, str, tuple[str, ...]]]:
    """Kind, name and tasks of every row."""
    groups = tasks_by_level(first.tasks, first.runs[0].scores.levels)
    by_level = [("level", level, tuple(tasks)) for level, tasks in groups.items()]
    tasks = [("task", task, (task,)) for task in first.tasks]
    average = [("average", ALL, first.tasks)]
    return [*average, *(by_level if len(by_level) > 1 else []), *(tasks if len(tasks) > 1 else [])]


Drawn = dict[str, dict[Path, Floats]]  # task -> run -> [B]


def _draw_scores(compared: Sequence[Method], tasks: Sequence[str]) -> Drawn | None:
    """Scores on drawings of the sentences, the same for all runs; None if counts are missing."""
    runs = [run for method in compared for run in method.runs]
    if any(run.counts is None for run in runs):
        return None
    drawn: Drawn = {}
    for number, task in enumerate(tasks):
        with_task = [run for run in runs if task in run.scores.by_task]
        counts = [run.counts for run in with_task if run.counts is not None]
        for run, one in zip(with_task, counts, strict=True):
            if one.sentences[task] != counts[0].sentences[task]:
                raise ValueError(
                    f"{run.path}: {task} was scored on other sentences than in "
                    f"{with_task[0].path}; score both on the same set."
                )
        num = len(counts[0].by_task[task])
        times = draw_sentences(num, [0, number])
        formula = FORMULAS[counts[0].formula]
        drawn[task] = {
            run.path: formula(times @ one.by_task[task])
            for run, one in zip(with_task, counts, strict=True)
        }
    return drawn


def draw_sentences(num: int, seed: int | list[int]) -> Floats:
    """How often each of N sentences is in each of B drawings with replacement, `[B, N]`."""
    random = np.random.default_rng(seed)
    return random.multinomial(num, np.full(num, 1.0 / num), size=_DRAWINGS).astype(float)


def _scored(tasks: Sequence[str], drawn: Drawn | None) -> Callable[[Method], Scored | None]:
    """The mean score over some tasks, of a method that has them all."""

    def score(method: Method) -> Scored | None:
        if not set(tasks) <= set(method.tasks):
            return None
        values = [[run.scores.by_task[task] for task in tasks] for run in method.runs]
        again = None
        if drawn is not None:
            again = np.stack(
                [np.mean([drawn[task][run.path] for task in tasks], axis=0) for run in method.runs]
            )
        return Scored(method.seeds, np.mean(values, axis=1), again)

    return score


def _of_runs(value: Callable[[ScoredRun], float]) -> Callable[[Method], Scored | None]:
    def score(method: Method) -> Scored | None:
        values = np.array([value(run) for run in method.runs], dtype=np.float64)
        return None if np.isnan(values).any() else Scored(method.seeds, values)

    return score


def _losses(compared: Sequence[Method]) -> Iterator[RowQuantity]:
    """Losses beside the scores: at the best weights, at equal steps, at equal time."""
    runs = [run for method in compared for run in method.runs if run.metrics]
    if not runs:
        return
    seconds = methods.common_seconds(runs)
    chosen, more_is_better = methods.metric_of(runs[0])
    for key, higher in {LOSS: False, chosen: more_is_better}.items():
        step = methods.common_step(runs, key)
        if step is None:
            continue
        views = {
            f"{key}, best weights": partial(methods.at_best, key=key),
            f"{key}, step {step:,}": partial(methods.at_step, key=key, step=step),
        }
        if key == LOSS:
            train = f"train/loss up to step {step:,}"
            views = {train: partial(methods.train_loss, step=step)} | views
        if seconds is not None:
            equal_time = partial(methods.after_seconds, key=key, seconds=seconds)
            views[f"{key} after {seconds:,.3g} s"] = equal_time
        for name, value in views.items():
            yield RowQuantity("loss", name, _of_runs(value), 4 if key == LOSS else 2, higher)


def _test_used(has_sentences: bool, num_questions: int, *, is_named: bool) -> str:
    levels = "seeds and sentences" if has_sentences else "seeds alone"
    how = (
        f"paired bootstrap over sentences ({_DRAWINGS:,} drawings), spread over seeds"
        if has_sentences
        else "spread over seeds"
    )
    questions = "questions that were named beforehand" if is_named else "averages of all methods"
    return (
        f"two-sided test over {levels} ({how}; runs paired by the seeds that both methods have), "
        f"level {LEVEL:.0%}; *clear* after Holm's correction among the {num_questions} {questions}"
    )

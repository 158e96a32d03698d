"""The demo: what one joint run's gradients advise, and what following it brings, in minutes.

Constructed languages, so that it is known who is related to whom. Beside joint training runs the
same with GradVac. They are two processes of one thread each. On two cores nothing is faster: the
threads of one small training synchronise after every small product, and where other work holds one
of them up, all wait. Two processes never wait for each other.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from gradvac.analysis import load_run
from gradvac.analysis.advice import (
    LAST_FIFTH,
    TRUST,
    Advice,
    advise_runs,
    describe_advice,
)
from gradvac.lab.experiments.comparison import draw_sentences
from gradvac.lab.experiments.follow_up import last_part
from gradvac.lab.experiments.sweep import reason_of_failure
from gradvac.lab.experiments.worker import leave_with_parent, load_settings, signals_interrupt
from gradvac.lab.languages import PIVOT, Corpus, default_corpus
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus, open_corpus
from gradvac.lab.recipes.nmt.recipe import measure_translation, train_translation
from gradvac.lab.recipes.nmt.score import score_translation, translations
from gradvac.lab.recipes.nmt.settings import TEST, TRAIN, NmtConfig
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.counts import SentenceCounts, bleu, read_counts
from gradvac.lab.training import AlignConfig, CheckpointError, Display, DivergedError
from gradvac.tasks import Direction, parse
from gradvac.utils.files import write_json

JOINT, GRADVAC = "joint", "gradvac"
ALONE, ADVISED, CHANCE = "alone", "advised", "chance"  # follow-ups
_PARTS, _MIDDLE, _LAST = 10, 5, 8  # checkpoints of joint training: all, two of them by name
_NUM_SAMPLES = 2
_LOSS = "train/loss"


@dataclass(frozen=True)
class ScoreChange:
    """BLEU, and its difference to another model's."""

    bleu: float  # of this model
    difference: float  # this minus the other's
    low: float  # lower end of the difference's 95 % interval over test sentences
    high: float  # upper end


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        joint: Task -> BLEU of joint training.
        target: The task whose last fifth was tried; empty if no small one was promised a companion.
        tasks: Follow-up -> what was trained.
        changes: Follow-up -> BLEU of the target, against joint training.
        advised_over: Another follow-up -> what was advised against it.
        gradvac: GradVac instead of joint training, mean over all tasks.
        seconds: What took how long.
    """

    joint: Mapping[str, float]
    target: str
    tasks: Mapping[str, Sequence[str]]
    changes: Mapping[str, ScoreChange]
    advised_over: Mapping[str, ScoreChange]
    gradvac: ScoreChange
    seconds: Mapping[str, float]


def run_demo(config: NmtConfig, out: Path, *, console: Console, num_lines: int = 200) -> DemoResult:
    """Prepare, train, ask for advice, follow it, and print everything.

    Args:
        config: Of the GradVac run; the joint run differs in `align` alone, and is plain training:
            it keeps no gradients by task, which would double its time.
        out: Gets `data`, `joint`, `gradvac`, the follow-ups and `demo.json`. Called again, it
            continues.
        console: Where to print.
        num_lines: Test sentences of each language to translate.
    """
    _check(config)
    begin = time.perf_counter()
    corpus = default_corpus().select(config.data.languages)
    data = config.data.model_copy(update={"prepared": out / "data"})
    every = config.train.max_steps // _PARTS
    after_middle = -(-(config.train.max_steps - _MIDDLE * every) // every)
    kept = {"checkpoint_every": every, "keep": after_middle + 2}
    train = config.train.model_copy(update=kept)
    config = config.model_copy(update={"data": data, "train": train})
    console.rule("1. Data", align="left")
    prepared = open_corpus(config.data)
    _show_languages(corpus, prepared, console)
    console.rule("2. Two trainings side by side, gradients, and what follows", align="left")
    joint = config.model_copy(update={"align": AlignConfig(rule="none")})
    sizes = {task: prepared.train_size(task) for task in config.data.all_tasks()}
    jobs: dict[str, Job] = {
        JOINT: partial(_train_and_follow, settings=joint, out=out, sizes=sizes, lines=num_lines),
        GRADVAC: partial(_train_and_measure, settings=config, run=out / GRADVAC, lines=num_lines),
    }
    run_side_by_side(jobs, out, console)
    tasks = _chosen(_advice(out), sizes, _counts(out / JOINT))
    names = {task: corpus.languages[parse(task).target].name for task in sizes}
    console.rule("3. What the gradients of joint training advise", align="left")
    for sentence in describe_advice(_advice(out), names):
        if sentence not in (TRUST, LAST_FIFTH):  # the verdict says so
            console.print(sentence, markup=False)
    result = _judged(out, tasks, begin)
    console.rule("4. What following the advice did", align="left")
    if result.target:
        _show_samples(prepared, out, result, names, console)
    _show_result(config, result, names, sizes, console)
    write_json(out / "demo.json", asdict(result))
    _show_way_on(config, out, result, console)
    return result


def _check(config: NmtConfig) -> None:
    if not config.train.validate_every:
        raise ValueError(
            "train.validate_every: is 0, but the demo translates with the best weights of all "
            "validations; leave it out, or set it to some steps."
        )
    if config.train.max_steps < _PARTS:
        raise ValueError(f"train.max_steps: the demo needs {_PARTS}, got {config.train.max_steps}.")
    if len(config.data.all_tasks()) < 3:
        raise ValueError("data.languages: give three or more, so that there is one to advise.")


def _train_one(display: Display, *, settings: NmtConfig, run: Path, lines: int) -> None:
    """Train and score."""
    result = train_translation(settings, run, display=display)
    if result.reason == "interrupted":
        raise ValueError("was stopped; the same command continues.")
    score_translation(run, max_lines=lines)


def _train_and_measure(display: Display, *, settings: NmtConfig, run: Path, lines: int) -> None:
    """The same, and gradients in the middle and at the end."""
    _train_one(display, settings=settings, run=run, lines=lines)
    middle = _MIDDLE * settings.train.checkpoint_every
    measure_translation(run, num_lines=lines, weights=(middle, "last"))


def _train_and_follow(
    display: Display, *, settings: NmtConfig, out: Path, sizes: Mapping[str, int], lines: int
) -> None:
    """Joint training, and what its gradients advise."""
    run = out / JOINT
    _train_and_measure(display, settings=settings, run=run, lines=lines)
    part = last_part(settings, str(run), _LAST * settings.train.checkpoint_every)
    for name, trained in _chosen(_advice(out), sizes, _counts(run)).items():
        own = {"data.tasks": trained, "train.metric": f"dev/loss/{trained[0]}"}
        follow = load_settings("nmt", RunFolder(run).config, {**part, **own})
        assert isinstance(follow, NmtConfig)
        _train_one(display, settings=follow, run=out / name, lines=lines)


def _advice(out: Path) -> Advice:
    return advise_runs([load_run(out / JOINT)])


def _chosen(
    advice: Advice, sizes: Mapping[str, int], counts: SentenceCounts
) -> dict[str, list[str]]:
    """Follow-up -> its tasks, for the smallest task that is promised a companion.

    Of equally small ones, the one that joint training translates best: where nearly nothing is
    right, differences cannot be seen.
    """
    order = sorted(sizes, key=lambda task: (sizes[task], -counts.score(task)))
    promised = {task: [c.task for c in advice.companions(task) if c.promised] for task in order}
    target = next((task for task in order if promised[task]), None)
    if target is None:
        return {}
    companion = promised[target][0]
    others = [task for task in advice.tasks if task not in (target, companion)]
    drawn = str(np.random.default_rng(0).choice(others))
    return {ALONE: [target], ADVISED: [target, companion], CHANCE: [target, drawn]}


def _counts(run: Path) -> SentenceCounts:
    return read_counts(RunFolder(run).counts_of(TEST, "best"))["BLEU"]


def _judged(out: Path, tasks: Mapping[str, list[str]], begin: float) -> DemoResult:
    joint, target = _counts(out / JOINT), tasks[ALONE][0] if tasks else ""
    counts = {name: _counts(out / name) for name in tasks}
    return DemoResult(
        {task: joint.score(task) for task in joint.by_task},
        target,
        tasks,
        {name: _change(joint, one, [target]) for name, one in counts.items()},
        {
            name: _change(one, counts[ADVISED], [target])
            for name, one in counts.items()
            if name != ADVISED
        },
        _change(joint, _counts(out / GRADVAC), list(joint.by_task)),
        {name: _seconds(out / name) for name in (JOINT, GRADVAC)}
        | {"all": time.perf_counter() - begin},
    )


def _seconds(run: Path) -> float:
    """What training took, by its log."""
    return max(float(one.get("train/seconds", 0.0)) for one in RunFolder(run).read_metrics())


def _change(first: SentenceCounts, second: SentenceCounts, tasks: Sequence[str]) -> ScoreChange:
    """The mean over tasks; line i of all tasks says the same, and they are drawn together."""
    times = draw_sentences(len(first.by_task[tasks[0]]), 0)
    drawn = [
        np.mean([bleu(times @ one.by_task[task]) for task in tasks], axis=0)
        for one in (first, second)
    ]
    low, high = np.quantile(drawn[1] - drawn[0], (0.025, 0.975))
    before, after = (np.mean([one.score(task) for task in tasks]) for one in (first, second))
    return ScoreChange(float(after), float(after - before), float(low), float(high))


def _show_languages(corpus: Corpus, prepared: PreparedCorpus, console: Console) -> None:
    console.print(
        "English into constructed languages with a known family tree. Two of a branch are siblings:"
        " the small one can learn from the big one."
    )
    shown = Table()
    for column in ("code", "name", "family", "branch", "script", "level"):
        shown.add_column(column)
    shown.add_column("pairs", justify="right")
    for code, language in corpus.languages.items():
        size = prepared.sizes[TRAIN][Direction(PIVOT, code).name]
        facts = (language.name, language.family, language.branch, language.script)
        shown.add_row(code, *facts, language.resource_level.replace("_", " "), f"{size:,}")
    console.print(shown)
    console.print(f"One vocabulary of {len(prepared.vocabulary):,} pieces for all.")


def _show_samples(
    prepared: PreparedCorpus,
    out: Path,
    result: DemoResult,
    names: Mapping[str, str],
    console: Console,
) -> None:
    target = result.target
    sources, references = prepared.task_text(TEST, target)
    found = {name: translations(out / name, TEST, "best", target) for name in (JOINT, ADVISED)}
    shown = Table(show_header=False, box=None, padding=(0, 1))
    for number in range(_NUM_SAMPLES):
        shown.add_row("English", sources[number])
        shown.add_row(names[target], references[number])
        for name, lines in found.items():
            shown.add_row(f"  {name}", lines[number])
        shown.add_row()
    console.print(shown)


def _show_result(
    config: NmtConfig,
    result: DemoResult,
    names: Mapping[str, str],
    sizes: Mapping[str, int],
    console: Console,
) -> None:
    if not result.target:
        console.print("No task is promised a companion, so there is nothing to follow.")
    else:
        steps, target = config.train.max_steps, names[result.target]
        shown = Table()
        shown.add_column(f"English into {target}, {sizes[result.target]:,} pairs")
        for column in ("BLEU", "change", "95 % interval"):
            shown.add_column(column, justify="right")
        shown.add_row(f"joint training of all {len(sizes)}", f"{result.joint[result.target]:.1f}")
        for name, one in result.changes.items():
            what = target if name == ALONE else f"with {names[result.tasks[name][1]]}"
            shown.add_row(f"... its last fifth {_WORDS[name].format(what)}", *_cells(one))
        console.print(shown)
        console.print(
            f"Every row has seen {steps:,} batches of {config.batch.tokens} tokens; they differ in "
            f"the last {steps - _LAST * (steps // _PARTS):,}."
        )
    console.print(verdict(result, names))
    one = result.gradvac
    console.print(
        f"Beside it, GradVac instead of joint training: {one.bleu:.1f} BLEU on the average of all "
        f"{len(sizes)} languages, {_interval(one)}."
    )


_WORDS = {ALONE: "on {} alone", ADVISED: "{}, as advised", CHANCE: "{}, drawn by chance"}


def _cells(one: ScoreChange) -> tuple[str, str, str]:
    return f"{one.bleu:.1f}", f"{one.difference:+.1f}", f"{one.low:+.1f} to {one.high:+.1f}"


def _interval(one: ScoreChange) -> str:
    return "{1} ({2})".format(*_cells(one))


def verdict(result: DemoResult, names: Mapping[str, str]) -> str:
    """What this shows, and what not."""
    noise = (
        "Intervals are those of other test sentences for these very models (paired bootstrap). "
        "Another seed moves BLEU too, often by more, and no interval here covers that."
    )
    if not result.target:
        return noise
    advised, over = result.changes[ADVISED], result.advised_over
    target, companion = (names[task] for task in result.tasks[ADVISED])
    if advised.low > 0:
        outcome = f"Following the advice helped {target} here, more than other sentences could"
    elif advised.high < 0:
        outcome = f"Following the advice harmed {target} here, more than other sentences could"
    else:
        outcome = f"Following the advice changed {target} by no more than other sentences could"
    return (
        f"{outcome}. With {companion} it has {_interval(over[ALONE])} over the last fifth alone, "
        f"and {_interval(over[CHANCE])} over a companion by chance. {noise} {target} then has a "
        "model of its own, and the others keep the joint one of four fifths; several small "
        "languages would have to divide the last fifth. On real text, divided so, the last fifth "
        "alone has helped from English, and advised companions have not "
        "(docs/results/equal_compute.md, docs/results/finish_alone.md)."
    )


def _show_way_on(config: NmtConfig, out: Path, result: DemoResult, console: Console) -> None:
    seconds = result.seconds
    console.print(
        f"Training took {seconds[JOINT]:.0f} s (joint, plain) and {seconds[GRADVAC]:.0f} s "
        f"(gradvac), everything {seconds['all']:.0f} s. On a processor and in a model this small, "
        "gradients by task take about as long as all the rest; in a large one on a GPU, a few "
        "percent (README, What it costs)."
    )
    console.print(f"Data, runs and demo.json are in {out}. To go on:", markup=False)
    program = _program()
    console.print(
        f'  echo "the old man sees a dog" | {program} nmt translate {out / JOINT} --to '
        f"{config.data.languages[0]}\n  {program} advise {out / JOINT} --out {out / 'next'}",
        markup=False,
        soft_wrap=True,
    )


def _program() -> str:
    """How to call gradvac from a shell, also where its environment is not active."""
    found = shutil.which("gradvac")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return "gradvac" if is_ours else f"{os.path.relpath(sys.executable)} -m gradvac"


# --- two trainings side by side -------------------------------------------------------------------

Job = Callable[[Display], None]
_SHOW_EVERY = 0.5  # seconds
# One thread each. And glibc would give the memory of every step back to the system and ask for it
# again in the next, which took a fifth of the time (docs/log.md).
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


def run_side_by_side(jobs: Mapping[str, Job], out: Path, console: Console) -> None:
    """Run jobs at the same time, each in a process of its own, and show how far their runs are.

    Args:
        jobs: Name -> what to do, given a display; must be picklable.
        out: The folder of their runs; what a job says goes to `NAME.log` there.
        console: Where to show it.

    Raises:
        ValueError: A job failed; says which and why. The others were done to their end.
        KeyboardInterrupt: Somebody stopped them; they have saved where they stand.
    """
    context = multiprocessing.get_context("spawn")
    with signals_interrupt(), _progress(console) as progress:
        processes = []
        try:
            with _environment():
                for name, job in jobs.items():
                    process = context.Process(target=_work, args=(job, out / f"{name}.log"))
                    process.start()
                    processes.append(process)
            bars: dict[Path, TaskID] = {}
            while any(process.is_alive() for process in processes):
                _show(progress, bars, out)
                time.sleep(_SHOW_EVERY)
            _show(progress, bars, out)
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()  # they save where they stand
            for process in processes:
                process.join()
            raise
    failed = [
        f"{name}: {reason_of_failure(out / f'{name}.log', process.exitcode)}"
        for name, process in zip(jobs, processes, strict=True)
        if process.exitcode
    ]
    if failed:
        raise ValueError("; ".join(failed))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn())
    return Progress(
        *columns, TextColumn("{task.fields[shown]}"), TimeElapsedColumn(), console=console
    )


def _show(progress: Progress, bars: dict[Path, TaskID], out: Path) -> None:
    """Move the bar of every run in a folder to its last log entry."""
    for path in sorted(out.glob("*/config.toml")):
        run = RunFolder(path.parent)
        if run.path not in bars:
            total = run.read_table()["train"]["max_steps"]
            bars[run.path] = progress.add_task(run.path.name, total=total, shown="")
        logged = [one for one in run.read_metrics() if one.get(_LOSS) is not None]
        if logged:
            shown = f"loss {logged[-1][_LOSS]:.3f}"
            progress.update(bars[run.path], completed=logged[-1]["step"], shown=shown)


def _work(job: Job, log: Path) -> None:
    """What a process does; its last words are its error."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    with log.open("a", encoding="utf-8") as file:
        try:
            job(Display(Console(file=file)))
        except (ValueError, OSError, CheckpointError, DivergedError) as error:
            print(error, file=file)
            sys.exit(1)


@contextmanager
def _environment() -> Iterator[None]:
    """Variables for processes that are started here, unless the user has set them."""
    new = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]

"""The demo: joint training against GradVac on constructed languages, in a few minutes.

The two trainings are two processes of one thread each, with one display. On two cores nothing is
faster: the threads of one small training synchronise after every small product, and where other
work holds one of them up, all wait. Two processes never wait for each other.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradvac.files import write_json
from gradvac.lab.languages import PIVOT, Corpus, default_corpus, dictionary_translate
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus, open_corpus
from gradvac.lab.recipes.nmt.recipe import measure_translation, train_translation
from gradvac.lab.recipes.nmt.score import bleu_p_value, score_lines, score_translation, translations
from gradvac.lab.recipes.nmt.settings import TEST, TRAIN, NmtConfig
from gradvac.lab.training import AlignConfig, CheckpointError, Display, DivergedError
from gradvac.tasks import Direction, parse

DICTIONARY, JOINT, GRADVAC = "dictionary", "joint", "gradvac"
_SIGNIFICANT = 0.05
_NUM_SAMPLES = 4

Lines = Mapping[str, list[str]]  # by task


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        bleu: System -> task -> BLEU; the systems are "dictionary", "joint" and "gradvac".
        p_values: Task -> two-sided p-value of the difference between joint and gradvac, by a
            randomization test over sentences, corrected for the number of tasks.
        seconds: What took how long.
    """

    bleu: Mapping[str, Mapping[str, float]]
    p_values: Mapping[str, float]
    seconds: Mapping[str, float]


def run_demo(config: NmtConfig, out: Path, *, console: Console, num_lines: int = 200) -> DemoResult:
    """Prepare, train twice, translate, score, compare gradients, and print everything.

    Args:
        config: Of the GradVac run; the joint run differs in `align` alone, and is plain training:
            it keeps no gradients by task, which would double its time.
        out: Gets `data`, `joint`, `gradvac` and `demo.json`. Called again, it continues.
        console: Where to print.
        num_lines: Test sentences of each language to translate.
    """
    # Not above: the two processes, which import this file, have no use for SciPy.
    from gradvac.analysis.statistics import holm

    if not config.train.validate_every:
        raise ValueError(
            "train.validate_every: is 0, but the demo translates with the best weights of all "
            "validations; leave it out, or set it to some steps."
        )
    begin = time.perf_counter()
    corpus = default_corpus().select(config.data.languages)
    data = config.data.model_copy(update={"prepared": out / "data"})
    config = config.model_copy(update={"data": data})
    console.rule("1. Data", align="left")
    prepared = open_corpus(config.data)
    _show_languages(corpus, prepared, console)
    console.rule("2. Two trainings side by side, then translation and gradients", align="left")
    joint = config.model_copy(update={"align": AlignConfig(rule="none")})
    jobs = {
        name: partial(_train_one, settings=settings, run=out / name, num_lines=num_lines)
        for name, settings in ((JOINT, joint), (GRADVAC, config))
    }
    seconds = run_side_by_side(jobs, console)
    console.rule("3. Translations", align="left")
    tasks = config.data.all_tasks()
    text = {task: prepared.task_text(TEST, task) for task in tasks}
    sources = {task: text[task][0][:num_lines] for task in tasks}
    references = {task: text[task][1][:num_lines] for task in tasks}
    said: dict[str, Lines] = {DICTIONARY: _look_up(corpus, sources)}
    for name in (JOINT, GRADVAC):
        said[name] = {t: translations(out / name, TEST, "best", t) for t in tasks}
    _show_samples(corpus, sources, references, said, console)
    console.rule("4. Scores", align="left")
    bleu = {
        name: {t: score_lines(lines[t], references[t], _target(t)).bleu for t in tasks}
        for name, lines in said.items()
    }
    p_values = [
        bleu_p_value(said[JOINT][t], said[GRADVAC][t], references[t], _target(t)) for t in tasks
    ]
    adjusted = dict(zip(tasks, holm(p_values), strict=True))
    result = DemoResult(bleu, adjusted, seconds | {"all": time.perf_counter() - begin})
    _show_scores(corpus, result, num_lines, console)
    console.print(verdict(result))
    write_json(out / "demo.json", asdict(result))
    _show_way_on(config, out, result, console)
    return result


def _train_one(display: Display, *, settings: NmtConfig, run: Path, num_lines: int) -> float:
    """One of the two processes; returns the seconds of training."""
    result = train_translation(settings, run, display=display)
    if result.reason == "interrupted":
        raise ValueError("was stopped; the same command continues.")
    score_translation(run, max_lines=num_lines)
    measure_translation(run, num_lines=num_lines)
    return result.seconds


def _target(task: str) -> str:
    return parse(task).target


def _look_up(corpus: Corpus, sources: Lines) -> dict[str, list[str]]:
    return {t: dictionary_translate(corpus, _target(t), lines) for t, lines in sources.items()}


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
    corpus: Corpus,
    sources: Lines,
    references: Lines,
    said: Mapping[str, Lines],
    console: Console,
) -> None:
    shown = Table(show_header=False, box=None, padding=(0, 1))
    some = list(sources)[:: max(1, len(sources) // _NUM_SAMPLES)]
    for number, task in enumerate(some):  # another sentence for every language
        shown.add_row("English", sources[task][number])
        shown.add_row(corpus.languages[_target(task)].name, references[task][number])
        for system, lines in said.items():
            shown.add_row(f"  {system}", lines[task][number])
        shown.add_row()
    console.print(shown)


def _show_scores(corpus: Corpus, result: DemoResult, num_lines: int, console: Console) -> None:
    shown = Table()
    shown.add_column("BLEU")
    for column in (DICTIONARY, JOINT, GRADVAC, "change", "p"):
        shown.add_column(column, justify="right")
    shown.add_column("joint or gradvac?")
    for task, p_value in result.p_values.items():
        scores = [result.bleu[name][task] for name in (DICTIONARY, JOINT, GRADVAC)]
        change = scores[2] - scores[1]
        cells = [*(f"{score:.1f}" for score in scores), f"{change:+.1f}", _shown(p_value)]
        better = "within noise" if p_value >= _SIGNIFICANT else f"{_better(change)}, in this run"
        shown.add_row(corpus.languages[_target(task)].name, *cells, better)
    means = _means(result)
    shown.add_section()
    cells = [f"{mean:.1f}" for mean in means.values()]
    shown.add_row("average", *cells, f"{means[GRADVAC] - means[JOINT]:+.1f}", "", "")
    console.print(shown)
    console.print(
        f"sacreBLEU on {num_lines} test sentences per language; dictionary: word by word, with a "
        "perfect dictionary and no grammar. p: two-sided randomization test over these sentences, "
        f"corrected for {len(result.p_values)} languages; from {_SIGNIFICANT} on, a change is "
        "within noise. It is one seed each: another seed moves BLEU too, so that no change here "
        "shows that one method is better."
    )


def _shown(p_value: float) -> str:
    return f"{p_value:.2f}" if p_value >= 0.005 else "<0.01"  # no p-value is 0


def _means(result: DemoResult) -> dict[str, float]:
    return {name: sum(scores.values()) / len(scores) for name, scores in result.bleu.items()}


def _better(change: float) -> str:
    return GRADVAC if change > 0 else JOINT


def verdict(result: DemoResult) -> str:
    """Who won this time, and when one would use what."""
    changes = {t: result.bleu[GRADVAC][t] - result.bleu[JOINT][t] for t in result.p_values}
    wins = Counter(_better(changes[t]) for t, p in result.p_values.items() if p < _SIGNIFICANT)
    means, num = _means(result), len(changes)
    average = f"{means[JOINT]:.1f} (joint) against {means[GRADVAC]:.1f} (gradvac) on average"
    if not wins:
        outcome = f"Neither wins here: {average}, and no language differs by more than noise."
    elif len(wins) == 2:
        outcome = (
            f"Each wins somewhere: {average}; joint is better in {wins[JOINT]} of {num} "
            f"languages, gradvac in {wins[GRADVAC]}, beyond the noise of these sentences."
        )
    else:
        (winner, count), *_ = wins.items()
        name = "Joint training" if winner == JOINT else "GradVac"
        outcome = (
            f"{name} wins here: {average}; it is better in {count} of {num} languages beyond the "
            "noise of these sentences, and worse in none."
        )
    return (
        f"{outcome} When to use which: joint training is the one to beat. Where the gradients of "
        "your languages agree, there is little for GradVac to change; it is meant for many "
        "languages of unequal size whose gradients do not. The report says how far yours agree. "
        "Decide on your own data, with several seeds."
    )


def _show_way_on(config: NmtConfig, out: Path, result: DemoResult, console: Console) -> None:
    seconds = result.seconds
    console.print(
        f"Same steps, same batches, side by side on a thread each; training took "
        f"{seconds[JOINT]:.0f} s (joint) and {seconds[GRADVAC]:.0f} s (gradvac), everything "
        f"{seconds['all']:.0f} s. Joint training is plain here. On a processor and in a model this "
        "small, gradients by task take about as long as all the rest; in a large one on a GPU, a "
        "few percent (README, What it costs)."
    )
    console.print(f"Data, runs and demo.json are in {out}. To go on:", markup=False)
    program = _program()
    console.print(
        f'  echo "the old man sees a dog" | {program} nmt translate {out / GRADVAC} --to '
        f"{config.data.languages[0]}\n  {program} nmt score {out / GRADVAC} --set dev",
        markup=False,
        soft_wrap=True,
    )


def _program() -> str:
    """How to call gradvac from a shell, also where its environment is not active."""
    found = shutil.which("gradvac")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return "gradvac" if is_ours else f"{os.path.relpath(sys.executable)} -m gradvac"


# --- two trainings side by side -------------------------------------------------------------------

Job = Callable[[Display], Any]
# One thread each. And glibc would give the memory of every step back to the system and ask for it
# again in the next, which took a fifth of the time (docs/log.md).
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


def run_side_by_side(jobs: Mapping[str, Job], console: Console) -> dict[str, Any]:
    """Run jobs at the same time, each in a process of its own, and show how far they are.

    Args:
        jobs: Name -> what to do, given a display; must be picklable, and so must what it returns.
        console: Where to show it.

    Returns:
        Name -> what the job returned.

    Raises:
        ValueError: A job failed; says which and why. The others were done to their end.
        KeyboardInterrupt: Somebody stopped them; they have saved where they stand.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, str] = {}
    processes: list[Any] = []
    with _stops_as_interrupts():
        try:
            with _environment():
                for name, job in jobs.items():
                    here, there = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(job, there), name=name)
                    process.start()
                    there.close()  # so that the pipe ends with the process
                    pipes[here] = name
                    processes.append(process)
            results, errors = _listen(pipes, console)
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()  # they save where they stand
            for process in processes:
                process.join()
            raise
    for process in processes:
        process.join()
    for name in jobs:
        if name not in results:
            errors.setdefault(name, "its process ended without a word")
    if errors:
        raise ValueError("; ".join(f"{name}: {what}" for name, what in errors.items()))
    return results


def _listen(pipes: dict[Any, str], console: Console) -> tuple[dict[str, Any], dict[str, str]]:
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn())
    with Progress(
        *columns, TextColumn("{task.fields[shown]}"), TimeElapsedColumn(), console=console
    ) as progress:
        bars = {name: progress.add_task(name, total=None, shown="") for name in pipes.values()}
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                name = pipes[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    del pipes[pipe]
                    continue
                if kind == "bar":
                    progress.update(bars[name], **content)
                elif kind == "message":
                    progress.console.print(f"{name}: {content}", markup=False)
                elif kind == "result":
                    results[name] = content
                else:
                    errors[name] = content
    return results, errors


def _work(job: Job, pipe: Connection) -> None:
    """What a process does."""
    try:
        outcome = ("result", job(_RemoteDisplay(pipe)))
    except (ValueError, OSError, CheckpointError, DivergedError) as error:
        outcome = ("error", str(error))
    with suppress(OSError):  # nobody listens any more
        pipe.send(outcome)
    pipe.close()


class _RemoteDisplay(Display):
    """Sends what to display to the process that started this one."""

    def __init__(self, pipe: Connection) -> None:
        with open(os.devnull, "w") as nowhere:
            super().__init__(Console(file=nowhere), quiet=True)
        self.console.quiet = True
        self._pipe, self._is_open = pipe, True

    def _send(self, kind: str, content: Any) -> None:
        try:
            self._pipe.send((kind, content))
        except OSError:  # that process was killed: save, and end too
            if self._is_open:
                self._is_open = False
                os.kill(os.getpid(), signal.SIGTERM)

    def show_message(self, message: str) -> None:
        self._send("message", message)

    def open(self, step: int, max_steps: int) -> None:
        self._send("bar", {"completed": step, "total": max_steps})

    def advance(self, step: int) -> None:
        if step % 10 == 0:
            self._send("bar", {"completed": step})

    def show(self, step: int, values: Mapping[str, float], *, seconds_left: float) -> None:
        shown = f"loss {values['train/loss']:.3f}, {seconds_left:.0f} s left"
        self._send("bar", {"completed": step, "shown": shown})


@contextmanager
def _stops_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C, so that no process is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = {}
    with suppress(ValueError):  # not the main thread
        for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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

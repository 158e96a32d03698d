"""The demo: joint training against GradVac on constructed languages, in a few minutes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradvac import corpora
from gradvac.nmt.data_settings import TEST, TRAIN
from gradvac.nmt.preparation import open_or_prepare
from gradvac.nmt.prepared import Prepared
from gradvac.nmt.recipe import train_translation
from gradvac.nmt.score import bleu_p_value, score_lines, score_run, translations
from gradvac.nmt.settings import NmtConfig
from gradvac.nmt.similarity import measure_run
from gradvac.runs.files import write_json
from gradvac.tasks import Direction, parse
from gradvac.training import AlignConfig, Display

DICTIONARY, JOINT, GRADVAC = "dictionary", "joint", "gradvac"
_SIGNIFICANT = 0.05

Lines = Mapping[str, list[str]]  # by task


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        bleu: System -> task -> BLEU; the systems are "dictionary", "joint" and "gradvac".
        p_values: Task -> chance of the difference between joint and gradvac, by paired bootstrap
            over sentences.
        seconds: What took how long.
    """

    bleu: Mapping[str, Mapping[str, float]]
    p_values: Mapping[str, float]
    seconds: Mapping[str, float]


def run_demo(config: NmtConfig, out: Path, *, console: Console, num_lines: int = 200) -> DemoResult:
    """Prepare, train twice, translate, score, compare gradients, and print everything.

    Args:
        config: Of the GradVac run; the joint run differs in `align.rule` alone.
        out: Gets `data`, `joint`, `gradvac` and `demo.json`. Called again, it continues.
        console: Where to print.
        num_lines: Test sentences of each language to translate.
    """
    begin = time.perf_counter()
    corpus = corpora.default().select(config.data.languages)
    data = config.data.model_copy(update={"prepared": out / "data"})
    config = config.model_copy(update={"data": data})
    console.rule("1. Data", align="left")
    prepared = open_or_prepare(config.data, say=lambda _: None)
    _show_languages(corpus, prepared, console)
    seconds = {}
    joint = config.model_copy(update={"align": AlignConfig(rule="sum")})
    for number, name, settings in ((2, JOINT, joint), (3, GRADVAC, config)):
        console.rule(f"{number}. Training: {name}", align="left")
        seconds[name] = train_translation(settings, out / name, display=Display(console)).seconds
    console.rule("4. Translation", align="left")
    tasks = config.data.all_tasks()
    text = {task: prepared.task_text(TEST, task) for task in tasks}
    sources = {task: text[task][0][:num_lines] for task in tasks}
    references = {task: text[task][1][:num_lines] for task in tasks}
    said: dict[str, Lines] = {DICTIONARY: _look_up(corpus, sources)}
    scores = {
        DICTIONARY: {t: score_lines(said[DICTIONARY][t], references[t], _target(t)) for t in tasks}
    }
    for name in (JOINT, GRADVAC):
        scores[name] = dict(score_run(out / name, max_lines=num_lines).by_task)
        said[name] = {t: translations(out / name, TEST, "best", t) for t in tasks}
    _show_samples(corpus, sources, references, said, console)
    console.rule("5. Gradients, on the same sentences for all languages", align="left")
    for name in (JOINT, GRADVAC):
        measure_run(out / name, num_lines=num_lines, console=console)
    console.rule("6. Scores", align="left")
    bleu = {name: {t: own[t].bleu for t in tasks} for name, own in scores.items()}
    p_values = {
        t: bleu_p_value(said[JOINT][t], said[GRADVAC][t], references[t], _target(t)) for t in tasks
    }
    result = DemoResult(bleu, p_values, seconds | {"all": time.perf_counter() - begin})
    _show_scores(corpus, result, num_lines, console)
    write_json(out / "demo.json", asdict(result))
    _show_way_on(config, out, result, console)
    return result


def _target(task: str) -> str:
    return parse(task).target


def _look_up(corpus: corpora.Corpus, sources: Lines) -> dict[str, list[str]]:
    return {t: corpora.dictionary_translate(corpus, _target(t), own) for t, own in sources.items()}


def _show_languages(corpus: corpora.Corpus, prepared: Prepared, console: Console) -> None:
    console.print(
        "English into constructed languages with a known family tree. Two of a branch are siblings:"
        " the small one can learn from the big one."
    )
    shown = Table()
    for column in ("code", "name", "family", "branch", "script", "level"):
        shown.add_column(column)
    shown.add_column("pairs", justify="right")
    for code, language in corpus.languages.items():
        size = prepared.sizes[TRAIN][Direction(corpora.PIVOT, code).name]
        facts = (language.name, language.family, language.branch, language.script)
        shown.add_row(code, *facts, language.resource_level.replace("_", " "), f"{size:,}")
    console.print(shown)
    console.print(f"One vocabulary of {len(prepared.vocabulary):,} pieces for all.")


def _show_samples(
    corpus: corpora.Corpus,
    sources: Lines,
    references: Lines,
    said: Mapping[str, Lines],
    console: Console,
) -> None:
    shown = Table(show_header=False, box=None, padding=(0, 1))
    for number, task in enumerate(sources):  # another sentence for every language
        shown.add_row("English", sources[task][number])
        shown.add_row(corpus.languages[_target(task)].name, references[task][number])
        for system, lines in said.items():
            shown.add_row(f"  {system}", lines[task][number])
        shown.add_row()
    console.print(shown)


def _show_scores(
    corpus: corpora.Corpus, result: DemoResult, num_lines: int, console: Console
) -> None:
    shown = Table()
    shown.add_column("BLEU")
    for column in (DICTIONARY, JOINT, GRADVAC, "change", "p"):
        shown.add_column(column, justify="right")
    shown.add_column("joint or gradvac?")
    for task, p_value in result.p_values.items():
        scores = [result.bleu[name][task] for name in (DICTIONARY, JOINT, GRADVAC)]
        change = scores[2] - scores[1]
        cells = [*(f"{score:.1f}" for score in scores), f"{change:+.1f}", f"{p_value:.2f}"]
        shown.add_row(corpus.languages[_target(task)].name, *cells, _verdict(change, p_value))
    means = {name: sum(own.values()) / len(own) for name, own in result.bleu.items()}
    shown.add_section()
    cells = [f"{mean:.1f}" for mean in means.values()]
    shown.add_row("average", *cells, f"{means[GRADVAC] - means[JOINT]:+.1f}", "", "")
    console.print(shown)
    console.print(
        f"sacreBLEU on {num_lines} test sentences a language; dictionary: word by word, with a "
        "perfect dictionary and no grammar. p: paired bootstrap over these sentences; from "
        f"{_SIGNIFICANT} on, a change is within noise. It is one seed each: another seed moves "
        "BLEU too, so that no change here shows that one method is better."
    )


def _verdict(change: float, p_value: float) -> str:
    if p_value >= _SIGNIFICANT:
        return "within noise"
    return f"{GRADVAC if change > 0 else JOINT}, in this run"


def _show_way_on(config: NmtConfig, out: Path, result: DemoResult, console: Console) -> None:
    seconds = result.seconds
    console.print(
        f"Same steps, same batches; training took {seconds[JOINT]:.0f} s (joint) and "
        f"{seconds[GRADVAC]:.0f} s (gradvac), everything {seconds['all']:.0f} s."
    )
    console.print(f"Data, runs and demo.json are in {out}. To go on:")
    console.print(
        f'  echo "the old man sees a dog" | gradvac nmt translate {out / GRADVAC} --to '
        f"{config.data.languages[0]}\n  gradvac nmt score {out / GRADVAC} --set dev",
        markup=False,
        soft_wrap=True,
    )

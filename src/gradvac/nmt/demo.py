"""The demo: joint training against GradVac on constructed languages, in a few minutes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradvac import corpora
from gradvac.nmt import files
from gradvac.nmt.prepare import open_or_prepare
from gradvac.nmt.prepared import Prepared
from gradvac.nmt.recipe import train_translation
from gradvac.nmt.score import bleu_p_value, score_lines
from gradvac.nmt.settings import TEST, TRAIN, NmtConfig
from gradvac.nmt.translator import Translator
from gradvac.training import AlignConfig, Display

DICTIONARY, JOINT, GRADVAC = "dictionary", "joint", "gradvac"
_SIGNIFICANT = 0.05


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        bleu: System -> task -> BLEU; the systems are "dictionary", "joint" and "gradvac".
        p_values: Task -> chance of the difference between joint and gradvac, by paired bootstrap.
        seconds: System -> time of training.
        total_seconds: Everything.
    """

    bleu: Mapping[str, Mapping[str, float]]
    p_values: Mapping[str, float]
    seconds: Mapping[str, float]
    total_seconds: float


def run_demo(
    config: NmtConfig, out: Path, *, console: Console, num_lines: int = 200
) -> DemoResult:
    """Prepare, train twice, translate, score, and print everything.

    Args:
        config: Of the GradVac run; the joint run differs in `align.rule` alone.
        out: Gets `data`, `joint`, `gradvac` and `demo.json`. Called again, it continues.
        console: Where to print.
        num_lines: Test sentences of each language to translate.
    """
    begin = time.perf_counter()
    corpus = corpora.default().select(config.data.languages)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"prepared": out / "data"})}
    )
    console.rule("Data", align="left")
    _describe(corpus, console)
    prepared = open_or_prepare(config.data, say=lambda message: None)
    console.print(f"One vocabulary of {len(prepared.vocabulary):,} pieces for all.")
    joint = config.model_copy(update={"align": AlignConfig(rule="sum")})
    seconds = {}
    for name, settings in ((JOINT, joint), (GRADVAC, config)):
        console.rule(f"Training: {name}", align="left")
        result = train_translation(settings, out / name, display=Display(console))
        seconds[name] = result.seconds
    console.rule("Translation", align="left")
    texts = {
        task: [side[:num_lines] for side in prepared.task_text(TEST, task)]
        for task in config.data.all_tasks()
    }
    sources = {task: text[0] for task, text in texts.items()}
    references = {task: text[1] for task, text in texts.items()}
    said = {DICTIONARY: _look_up(corpus, sources)}
    for name in (JOINT, GRADVAC):
        translator = Translator.from_run(out / name)
        said[name] = {task: translator.translate(sources[task], _target(task)) for task in texts}
    _show_samples(corpus, sources, references, said, console)
    bleu = {
        name: {task: score_lines(lines[task], references[task], _target(task)).bleu for task in texts}
        for name, lines in said.items()
    }
    p_values = {
        task: bleu_p_value(said[JOINT][task], said[GRADVAC][task], references[task], _target(task))
        for task in texts
    }
    result = DemoResult(bleu, p_values, seconds, time.perf_counter() - begin)
    _show_scores(corpus, prepared, result, num_lines, console)
    files.write_json(out / "demo.json", vars(result))
    console.print(f"{result.total_seconds:.0f} s in all. Everything is in {out}: try")
    console.print(f'  echo "the old man sees a dog" | gradvac nmt translate {out / GRADVAC} --to '
                  f"{config.data.languages[0]}", soft_wrap=True)
    return result

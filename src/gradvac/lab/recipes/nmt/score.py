"""Scores: sacreBLEU's BLEU and chrF++, with their signatures, by task and by resource level."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from gradvac.lab.languages.real import find
from gradvac.lab.recipes.common.readers import read_all_lines
from gradvac.lab.recipes.common.scoring import RunScores, Scorer, TaskResult, score_run
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus
from gradvac.lab.recipes.nmt.readers import read_written
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.translator import Translator
from gradvac.lab.runs import RunFolder, TaskScores
from gradvac.lab.training import config
from gradvac.lab.training.settings import TECHNICAL_ELSEWHERE, trained_settings
from gradvac.tasks import parse

logger = logging.getLogger(__name__)
# Scripts without blanks between words, whose n-grams are counted otherwise.
_TOKENIZERS = {
    **dict.fromkeys(("zh", "yue"), "zh"),
    **dict.fromkeys(("bo", "ja", "km", "lo", "my", "th"), "char"),
}


@dataclass(frozen=True)
class Score:
    """The quality of some translations.

    Attributes:
        bleu: Corpus BLEU.
        chrf: Corpus chrF++.
        num_lines: Sentences scored.
        bleu_signature: sacreBLEU's; scores with different ones must not be compared.
        chrf_signature: The same for chrF++.
    """

    bleu: float
    chrf: float
    num_lines: int
    bleu_signature: str
    chrf_signature: str


def score_lines(lines: Sequence[str], references: Sequence[str], target: str) -> Score:
    """Score translations against references.

    Args:
        lines: Translations.
        references: One reference each.
        target: Code of the target language, which decides how BLEU cuts words.
    """
    if len(lines) != len(references) or not lines:
        raise ValueError(
            f"lines: there are {len(lines)}, but {len(references)} references; give at least one, "
            "and one reference each."
        )
    bleu, chrf = _bleu(target), CHRF(word_order=2)
    scores = [metric.corpus_score(lines, [references]) for metric in (bleu, chrf)]
    signatures = [str(metric.get_signature()) for metric in (bleu, chrf)]
    return Score(scores[0].score, scores[1].score, len(lines), *signatures)


def count_ngrams(lines: Sequence[str], references: Sequence[str], target: str) -> NDArray[np.int64]:
    """What BLEU is made of, sentence by sentence, for `gradvac.lab.runs.sentences.bleu`: `[N, 10]`.

    Args:
        lines: Translations.
        references: One reference each.
        target: Code of the target language.
    """
    # Effective order changes a sentence's score, never its counts; without it sacreBLEU warns.
    metric = _bleu(target, effective_order=True)
    scored = [
        metric.sentence_score(line, [reference])
        for line, reference in zip(lines, references, strict=True)
    ]
    rows = [(*one.counts, *one.totals, one.sys_len, one.ref_len) for one in scored]
    return np.array(rows, dtype=np.int64)


def _bleu(target: str, **options: Any) -> BLEU:
    language = find(target)  # by any of its codes: zh, zho, zh_tw
    code = target if language is None else language.code
    return BLEU(tokenize=_TOKENIZERS.get(code, "13a"), **options)


@dataclass(frozen=True)
class TranslationScores(RunScores):
    """The scores of a translation run on one set.

    Attributes:
        num_cut: Source sentences that were too long, of which only the beginning was translated.
        searched: Settings of the search that were not the run's own, in words.
    """

    by_task: Mapping[str, Score]
    num_cut: int
    searched: str = ""

    def means(self) -> dict[str, tuple[float, float]]:
        """Mean BLEU and chrF++ over the tasks of each resource level, and over "all"."""
        bleu, chrf = (scores.by_level() for scores in self.by_metric())
        return {name: (bleu[name], chrf[name]) for name in bleu}

    def by_metric(self) -> tuple[TaskScores, TaskScores]:
        """BLEU, which reports show, and chrF++."""
        how = f"{self.split} set, {self.weights} weights" + (self.searched and f", {self.searched}")
        scored = self.by_task.values()
        bleu = {task: score.bleu for task, score in self.by_task.items()}
        chrf = {task: score.chrf for task, score in self.by_task.items()}
        # Languages without blanks have another tokenizer, and so another signature.
        bleu_signatures = " and ".join(dict.fromkeys(score.bleu_signature for score in scored))
        chrf_signatures = " and ".join(dict.fromkeys(score.chrf_signature for score in scored))
        return (
            TaskScores("BLEU", bleu, self.levels, f"{how}; BLEU {bleu_signatures}"),
            TaskScores("chrF++", chrf, self.levels, f"{how}; chrF++ {chrf_signatures}"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        means = {name: {"bleu": b, "chrf": c} for name, (b, c) in self.means().items()}
        return asdict(self) | {"means": means}

    def table(self) -> Table:
        """The scores as a table."""
        shown = Table(title=f"{self.split}, {self.weights} weights", title_justify="left")
        shown.add_column("task")
        shown.add_column("level")
        for column in ("BLEU", "chrF++", "sentences"):
            shown.add_column(column, justify="right")
        for task, score in self.by_task.items():
            numbers = (f"{score.bleu:.1f}", f"{score.chrf:.1f}", f"{score.num_lines:,}")
            shown.add_row(task, self.levels[task], *numbers)
        shown.add_section()
        for name, (bleu, chrf) in self.means().items():
            shown.add_row("average", name, f"{bleu:.1f}", f"{chrf:.1f}", "")
        return shown

    def notes(self) -> list[str]:
        """What belongs to the numbers: signatures, with their tasks where they differ, and cuts."""
        tasks: dict[str, list[str]] = {}
        for task, score in self.by_task.items():
            tasks.setdefault(f"BLEU {score.bleu_signature}", []).append(task)
            tasks.setdefault(f"chrF++ {score.chrf_signature}", []).append(task)
        lines = [
            signature if len(of) == len(self.by_task) else f"{signature}  ({', '.join(of)})"
            for signature, of in sorted(tasks.items())
        ]
        if self.num_cut:
            lines.append(_cut(self.num_cut))
        return lines


def score_translation(
    run: str | Path, *, max_lines: int | None = None, **options: Any
) -> TranslationScores:
    """Translate a set with a run's model, score it, and keep both in the run folder.

    Args:
        run: The run folder.
        max_lines: Only so many lines of each task.
        options: As `gradvac.lab.recipes.common.scoring.score_run` takes them.
    """
    return score_run(run, NmtConfig, partial(_open_scorer, max_lines=max_lines), **options)


def _open_scorer(
    settings: NmtConfig,
    run: Path,
    split: str,
    weights: str | int,
    device: torch.device,
    *,
    max_lines: int | None,
) -> Scorer[TranslationScores]:
    prepared = PreparedCorpus.require(settings.data, run)
    translator = Translator.open(run, settings, weights, device)
    tasks, levels = settings.data.all_tasks(), settings.data.resource_levels

    def score_task(task: str) -> TaskResult:
        sources, references = prepared.task_text(split, task)
        references, target = references[:max_lines], parse(task).target
        lines = translator.translate(sources[:max_lines], target)
        return TaskResult(
            score_lines(lines, references, target),
            "".join(f"{line}\n" for line in lines),
            {"BLEU": count_ngrams(lines, references, target)},
            references,
        )

    def summarise(**fields: Any) -> TranslationScores:
        searched = _searched(config.load(NmtConfig, RunFolder(run).config), settings)
        return TranslationScores(**fields, num_cut=translator.counts.cut, searched=searched)

    by_task = {task: levels.of(prepared.train_size(task)) for task in tasks}
    return Scorer(tasks, score_task, {"BLEU": "bleu"}, summarise, by_task)


def _searched(trained: NmtConfig, asked: NmtConfig) -> str:
    """Settings of the search that differ from the run's own."""
    changed = config.compare_settings(trained, asked)
    return ", ".join(
        f"{key} = {new}"
        for key, (_, new) in changed.items()
        if key.startswith("decoding.") and key not in TECHNICAL_ELSEWHERE
    )


def score_files(
    run: str | Path,
    source: Path,
    reference: Path,
    *,
    direction: str,
    weights: str | int = "best",
    device: str = "auto",
    overrides: Sequence[str] = (),
) -> tuple[Score, list[str]]:
    """Translate any file with a run's model, and score it; nothing is written or prepared.

    Args:
        run: The run folder.
        source: Sentences, line by line; `.gz` and `.zst` are unpacked.
        reference: Their translations, line by line.
        direction: Such as "en-de".
        weights: "best", "last", "averaged", or a step.
        device: "auto", "cpu", "cuda", ...
        overrides: Of the run's config, such as "decoding.beams=8".

    Returns:
        The score, and the translations.

    Raises:
        ValueError: The files have different numbers of lines, nothing to translate, a source
            without reference, or a line that is not UTF-8.
    """
    translator = Translator.from_run(run, weights=weights, device=device, overrides=overrides)
    tasks = trained_settings(NmtConfig, Path(run), overrides).data.all_tasks()
    if direction not in tasks:
        logger.warning(f"{direction} was not trained; this run knows {', '.join(tasks)}.")
    sources, references = (
        [line for _, line in read_all_lines(path)] for path in (source, reference)
    )
    _check_pairs(source, sources, reference, references)
    target = parse(direction).target
    lines = translator.translate(sources, target)
    if translator.counts.cut:
        logger.warning(_cut(translator.counts.cut))
    return score_lines(lines, references, target), lines


def _cut(number: int) -> str:
    return f"Longer than data.max_tokens, and so cut before translation: {number:,} of the sources."


def _check_pairs(
    source: Path, sources: Sequence[str], reference: Path, references: Sequence[str]
) -> None:
    if len(sources) != len(references):
        raise ValueError(
            f"reference: {reference} has {len(references):,} lines, but {source} has "
            f"{len(sources):,}; line i of one must be the translation of line i of the other."
        )
    if not any(line.strip() for line in sources):
        raise ValueError(f"source: {source} has no line to translate.")
    lines = enumerate(zip(sources, references, strict=True), start=1)
    absent = [
        number for number, (original, other) in lines if original.strip() and not other.strip()
    ]
    if absent:
        raise ValueError(
            f"reference: {reference} has no translation in {len(absent):,} of {len(sources):,} "
            f"lines, the first is line {absent[0]:,}; leave those out of both files."
        )


def translations(run: Path, split: str, weights: str | int, task: str) -> list[str]:
    """Read the translations that `score_translation` kept."""
    return list(read_written(RunFolder(run).outputs_of(split, weights, task)))

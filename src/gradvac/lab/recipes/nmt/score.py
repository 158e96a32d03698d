"""Scores by task and resource level: BLEU and chrF++ with their signatures, language, COMET."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from gradvac.lab.languages.real import find
from gradvac.lab.recipes.common.readers import read_all_lines
from gradvac.lab.recipes.common.scoring import RunScores, Scorer, TaskResult, score_run
from gradvac.lab.recipes.nmt.comet import Text, open_comet
from gradvac.lab.recipes.nmt.data_warnings import in_other_languages
from gradvac.lab.recipes.nmt.preparation import PreparedCorpus
from gradvac.lab.recipes.nmt.readers import read_written
from gradvac.lab.recipes.nmt.settings import NmtConfig
from gradvac.lab.recipes.nmt.translator import Translator
from gradvac.lab.runs import RunFolder, TaskScores
from gradvac.lab.runs.counts import Counts
from gradvac.lab.training import choose_device, config
from gradvac.lab.training.settings import TECHNICAL_ELSEWHERE, trained_settings
from gradvac.tasks import parse
from gradvac.utils.hints import some

logger = logging.getLogger(__name__)
COMET, WRONG_LANGUAGE = "COMET", "wrong language"
SCORE_FORMULAS = {"BLEU": "bleu", WRONG_LANGUAGE: "percentage", COMET: "percentage"}
_GUESSED = "translations that look like another language than the target (py3langid), in percent"
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
        wrong_language: Translations that look like another language than the target, in percent;
            None if the guesser does not know the target, such as a constructed language.
        wrong_references: The same of the references: how often the guess errs.
        comet: Mean over the sentences, times 100; None if it was not asked for.
    """

    bleu: float
    chrf: float
    num_lines: int
    bleu_signature: str
    chrf_signature: str
    wrong_language: float | None = None
    wrong_references: float | None = None
    comet: float | None = None


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
    guesses = [in_other_languages(text, target) for text in (lines, references)]
    wrong = [None if guess is None else 100 * float(guess.mean()) for guess in guesses]
    return Score(
        bleu=scores[0].score,
        chrf=scores[1].score,
        num_lines=len(lines),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        wrong_language=wrong[0],
        wrong_references=wrong[1],
    )


def count_ngrams(lines: Sequence[str], references: Sequence[str], target: str) -> NDArray[np.int64]:
    """What BLEU is made of, sentence by sentence, for `gradvac.lab.runs.counts.bleu`: `[N, 10]`."""
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
        comet: The COMET model, if one was asked for.
    """

    by_task: Mapping[str, Score]
    num_cut: int
    searched: str = ""
    comet: str = ""

    def by_metric(self) -> tuple[TaskScores, ...]:
        """BLEU, which reports show, chrF++, and what else there is a number of."""
        how = f"{self.split} set, {self.weights} weights" + (self.searched and f", {self.searched}")
        # Languages without blanks have another tokenizer, and so another signature.
        signatures = {
            key: " and ".join(dict.fromkeys(getattr(one, key) for one in self.by_task.values()))
            for key in ("bleu_signature", "chrf_signature")
        }
        notes = {
            "BLEU": ("bleu", f"BLEU {signatures['bleu_signature']}"),
            "chrF++": ("chrf", f"chrF++ {signatures['chrf_signature']}"),
            COMET: ("comet", f"{self.comet}, times 100"),
            WRONG_LANGUAGE: ("wrong_language", _GUESSED),
        }
        made = (
            TaskScores(
                name,
                {
                    t: value
                    for t, one in self.by_task.items()
                    if (value := getattr(one, key)) is not None
                },
                self.levels,
                f"{how}; {note}",
                higher_is_better=name != WRONG_LANGUAGE,
            )
            for name, (key, note) in notes.items()
        )
        return tuple(one for one in made if one.by_task)

    def further_columns(self) -> dict[str, list[str]]:
        """How often the guess of languages errs, where there is one, level, and sentences."""
        scores = self.by_task.values()
        wrong = [score.wrong_references for score in scores]
        guessed = {"of references": ["-" if w is None else f"{w:.1f}" for w in wrong]}
        known = guessed if any(w is not None for w in wrong) else {}
        levels = [self.levels.get(task, "") for task in self.by_task]
        return known | {"level": levels, "sentences": [f"{one.num_lines:,}" for one in scores]}

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
        unknown = [task for task, score in self.by_task.items() if score.wrong_language is None]
        if len(unknown) < len(self.by_task):
            lines.append(
                f"{WRONG_LANGUAGE}: {_GUESSED}; of references: the same guess at the references, "
                "which is how often it errs"
            )
        if unknown:
            shown = f"no number for {some(unknown)}; py3langid does not know the target"
            lines.append(f"{WRONG_LANGUAGE}: {shown}")
        if self.num_cut:
            lines.append(_cut(self.num_cut))
        return lines


def score_translation(
    run: str | Path, *, max_lines: int | None = None, comet: str = "", **options: Any
) -> TranslationScores:
    """Translate a set with a run's model, score it, and keep both in the run folder.

    Args:
        run: The run folder.
        max_lines: Only so many lines of each task.
        comet: Score with this COMET model too: see `gradvac.lab.recipes.nmt.comet`.
        options: As `gradvac.lab.recipes.common.scoring.score_run` takes them.
    """
    return score_run(
        run, NmtConfig, partial(_open_scorer, max_lines=max_lines, comet=comet), **options
    )


def _open_scorer(
    settings: NmtConfig,
    run: Path,
    split: str,
    weights: str | int,
    device: torch.device,
    *,
    max_lines: int | None,
    comet: str,
) -> Scorer[TranslationScores]:
    prepared = PreparedCorpus.require(settings.data, run)
    translator = Translator.open(run, settings, weights, device)
    tasks, levels = settings.data.all_tasks(), settings.data.resource_levels
    score_comet = open_comet(comet, device) if comet else None
    texts: dict[str, Text] = {}

    def score_task(task: str) -> TaskResult:
        sources, references = (text[:max_lines] for text in prepared.task_text(split, task))
        target = parse(task).target
        lines = translator.translate(sources, target)
        texts[task] = Text(sources, lines, references)
        return judge_task(lines, references, target)

    def add_comet(results: dict[str, TaskResult]) -> dict[str, TaskResult]:
        if score_comet is None:
            return results
        completed = {}
        for task, scores in score_comet(texts).items():
            one, counts = results[task], np.stack([scores, np.ones_like(scores)], axis=1)
            score = replace(one.score, comet=100 * float(scores.mean()))
            completed[task] = replace(one, score=score, counts={**one.counts, COMET: counts})
        return completed

    def summarise(**fields: Any) -> TranslationScores:
        searched = _searched(config.load(NmtConfig, RunFolder(run).config), settings)
        cut = translator.counts.cut
        return TranslationScores(**fields, num_cut=cut, searched=searched, comet=comet)

    by_task = {task: levels.of(prepared.train_size(task)) for task in tasks}
    return Scorer(tasks, score_task, SCORE_FORMULAS, summarise, by_task, add_comet)


def judge_task(lines: Sequence[str], references: Sequence[str], target: str) -> TaskResult:
    """The scores of a task's translations, and what they are made of: see `score_lines`."""
    counts: dict[str, Counts] = {"BLEU": count_ngrams(lines, references, target)}
    if (wrong := in_other_languages(lines, target)) is not None:
        counts[WRONG_LANGUAGE] = np.stack([wrong, np.ones_like(wrong)], axis=1).astype(np.int64)
    output = "".join(f"{line}\n" for line in lines)
    return TaskResult(score_lines(lines, references, target), output, counts, references)


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
    comet: str = "",
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
        comet: As in `score_translation`.

    Returns:
        The score, and the translations.

    Raises:
        ValueError: The files have different numbers of lines, nothing to translate, a source
            without reference, or a line that is not UTF-8.
    """
    translator = Translator.from_run(run, weights=weights, device=device, overrides=overrides)
    score_comet = open_comet(comet, choose_device(device)) if comet else None
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
    score = score_lines(lines, references, target)
    if score_comet is not None:
        scores = score_comet({direction: Text(sources, lines, references)})[direction]
        score = replace(score, comet=100 * float(scores.mean()))
    return score, lines


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

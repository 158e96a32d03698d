"""Scores of a tagging run: F1 and accuracy by language, and their averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.table import Table

from gradvac.lab.recipes.common.scoring import RunScores, Scorer, TaskResult, score_run
from gradvac.lab.recipes.tagging.metrics import Kind, TagScore, count_all, score_tags
from gradvac.lab.recipes.tagging.preparation import PreparedSentences
from gradvac.lab.recipes.tagging.readers import TaggedSentence
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.recipes.tagging.tagger import Tagger
from gradvac.lab.runs import TaskScores

F1_OF = {
    "ner": "F1 of entities as conlleval counts them",
    "pos": "F1 as XTREME counts it: over runs of equal tags",
}


def metric_names(kind: Kind) -> dict[str, str]:
    """Field of a `TagScore` -> what it is called, the one to show first."""
    names = {"f1": "F1", "accuracy": "accuracy"}
    return names | ({"strict_f1": "strict F1"} if kind == "ner" else {})


@dataclass(frozen=True)
class TaggingScores(RunScores):
    """The scores of a tagging run on one set.

    Attributes:
        kind: "ner" or "pos".
        unknown: Language -> words whose label the model cannot predict, counted as wrong.
        without_entities: Languages without entities in the set: their F1 is 0 by definition.
    """

    task_word: ClassVar[str] = "language"
    by_task: Mapping[str, TagScore]
    kind: Kind
    unknown: Mapping[str, int]
    without_entities: Sequence[str]

    def by_metric(self) -> tuple[TaskScores, ...]:
        """F1, which reports show, and accuracy; for entities also strict F1."""
        how = f"{self.split} set, {self.weights} weights"
        notes = {"f1": F1_OF[self.kind], "accuracy": "words with the right tag, in percent"}
        notes["strict_f1"] = "predictions that break IOB2 are not entities"
        return tuple(
            TaskScores(
                name,
                {task: getattr(score, key) for task, score in self.by_task.items()},
                self.levels,
                f"{how}; {notes[key]}",
            )
            for key, name in metric_names(self.kind).items()
        )

    def further_columns(self) -> dict[str, list[str]]:
        """Sentences and words."""
        scores = self.by_task.values()
        return {
            "sentences": [f"{score.num_sentences:,}" for score in scores],
            "words": [f"{score.num_words:,}" for score in scores],
        }

    def table(self) -> Table:
        """The scores as a table, with remarks."""
        shown = super().table()
        shown.caption = "\n".join([F1_OF[self.kind], *self._remarks()])
        shown.caption_justify = "left"
        return shown

    def _remarks(self) -> list[str]:
        broken = sum(score.num_broken for score in self.by_task.values())
        unknown = {task: count for task, count in self.unknown.items() if count}
        remarks = []
        if broken:
            remarks.append(f"{broken:,} predicted tags break IOB2; strict F1 gives them no entity.")
        if unknown:
            shown = ", ".join(f"{task} {count:,}" for task, count in unknown.items())
            remarks.append(f"Words with a label unknown in training, counted as wrong: {shown}.")
        if self.without_entities:
            shown = ", ".join(self.without_entities)
            remarks.append(f"Without any entity, so that F1 is 0 by definition: {shown}.")
        return remarks


def score_tagging(run: str | Path, **options: Any) -> TaggingScores:
    """Tag a set with a run's model, score it, and keep both in the run folder.

    RUN/scores/SET.WEIGHTS.LANG.txt has word, tag and predicted tag in three columns, which
    conlleval can read. Options are those of `gradvac.lab.recipes.common.scoring.score_run`.
    """
    return score_run(run, TaggingConfig, _open_scorer, **options)


def _open_scorer(
    settings: TaggingConfig, run: Path, split: str, weights: str | int, device: torch.device
) -> Scorer[TaggingScores]:
    prepared = PreparedSentences.require(settings, run)
    tagger = Tagger.open(run, settings, weights, device)
    kind, labels = settings.data.kind, set(settings.data.all_labels())
    unknown: dict[str, int] = {}
    without_entities: list[str] = []

    def score_task(task: str) -> TaskResult:
        sentences = prepared.sentences(split, task)
        gold = [one.tags for one in sentences]
        predicted = tagger.tag_windows(prepared.windows(split, task), len(sentences))
        counts = count_all(gold, predicted, kind)
        unknown[task] = sum(tag not in labels for tags in gold for tag in tags)
        if kind == "ner" and not counts["F1"][:, 2].any():
            without_entities.append(task)
        return TaskResult(
            score_tags(gold, predicted, kind),
            _columns(sentences, predicted),
            counts,
            [[*one.words, *one.tags] for one in sentences],
        )

    formulas = {"F1": "f1", "accuracy": "percentage"}
    return Scorer(
        settings.data.languages,
        score_task,
        formulas | ({"strict F1": "f1"} if kind == "ner" else {}),
        lambda **fields: TaggingScores(
            **fields, kind=kind, unknown=unknown, without_entities=without_entities
        ),
        settings.data.resource_levels,
    )


def _columns(sentences: Sequence[TaggedSentence], predicted: Sequence[Sequence[str]]) -> str:
    """Word, tag and predicted tag in three columns, a blank line between sentences."""
    rows = (
        zip(one.words, one.tags, guess, strict=True)
        for one, guess in zip(sentences, predicted, strict=True)
    )
    return "\n".join("".join("\t".join(row) + "\n" for row in sentence) for sentence in rows)

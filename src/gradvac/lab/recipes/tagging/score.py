"""Scores of a tagging run: F1 and accuracy by language, and their averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradvac.lab.recipes.tagging.metrics import Kind, TagScore, count_all, score_tags
from gradvac.lab.recipes.tagging.preparation import require_prepared
from gradvac.lab.recipes.tagging.sentences import Sentence
from gradvac.lab.recipes.tagging.settings import TaggingConfig
from gradvac.lab.recipes.tagging.tagger import Tagger
from gradvac.lab.runs import RunFolder, TaskScores
from gradvac.lab.runs.sentences import Counts, SentenceCounts, identify
from gradvac.lab.training.settings import trained_settings

F1_OF = {
    "ner": "F1 of entities as conlleval counts them",
    "pos": "F1 as XTREME counts it: over runs of equal tags",
}


def metric_names(kind: Kind) -> dict[str, str]:
    """Field of a `TagScore` -> what it is called, the one to show first."""
    names = {"f1": "F1", "accuracy": "accuracy"}
    return names | ({"strict_f1": "strict F1"} if kind == "ner" else {})


@dataclass(frozen=True)
class Scores:
    """The scores of a run on one set.

    Attributes:
        run: The run folder.
        kind: "ner" or "pos".
        split: Name of the set.
        weights: Which weights were used.
        by_task: Language -> score.
        levels: Language -> resource level, where known.
        unknown: Language -> words whose label the model cannot predict, counted as wrong.
        without_entities: Languages without entities in the set: their F1 is 0 by definition.
        signature: The run's signature.
    """

    run: str
    kind: Kind
    split: str
    weights: str
    by_task: dict[str, TagScore]
    levels: dict[str, str]
    unknown: dict[str, int]
    without_entities: list[str]
    signature: str

    def by_metric(self) -> tuple[TaskScores, ...]:
        """F1, which reports show, and accuracy; for entities also strict F1."""
        how = f"{self.split} set, {self.weights} weights"
        notes = {"f1": F1_OF[self.kind], "accuracy": "words with the right tag, in percent"}
        names = metric_names(self.kind)
        notes["strict_f1"] = "predictions that break IOB2 are not entities"
        return tuple(
            TaskScores(
                name,
                {task: getattr(score, key) for task, score in self.by_task.items()},
                self.levels,
                f"{how}; {notes[key]}",
            )
            for key, name in names.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self) | {"means": {one.metric: one.by_level() for one in self.by_metric()}}

    def table(self) -> Table:
        """The scores as a table."""
        shown = Table(title=f"{self.run}: {self.split}, {self.weights} weights")
        shown.title_justify = "left"
        shown.add_column("language")
        metrics = self.by_metric()
        for column in (*(one.metric for one in metrics), "sentences", "words"):
            shown.add_column(column, justify="right")
        for task, score in self.by_task.items():
            values = (one.show(one.by_task[task]) for one in metrics)
            shown.add_row(task, *values, f"{score.num_sentences:,}", f"{score.num_words:,}")
        shown.add_section()
        means = [one.by_level() for one in metrics]
        for level in means[0]:
            name = "average" if level == "all" else f"average, {level}"
            shown.add_row(name, *(f"{by_level[level]:.1f}" for by_level in means), "", "")
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


def score_run(
    run: str | Path,
    *,
    split: str = "test",
    weights: str | int = "best",
    device: str = "auto",
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Scores:
    """Tag a set with a run's model, score it, and keep both in the run folder.

    Writes RUN/scores/SET.WEIGHTS.json and, with word, tag and predicted tag in three columns,
    RUN/scores/SET.WEIGHTS.LANG.txt, which conlleval can read.

    Args:
        run: The run folder.
        split: "test" or "dev".
        weights: "best", "last", "averaged", or a step.
        device: "auto", "cpu", "cuda", ...
        overrides: Overrides of the run's config, such as "data.prepared=...".
        console: Where progress is shown; None: nowhere.
    """
    run = Path(run)
    folder = RunFolder(run)
    settings = trained_settings(TaggingConfig, run, overrides)
    prepared = require_prepared(settings, run)
    of_weights = folder.identify_weights(weights)
    tagger = Tagger.from_run(run, weights=weights, device=device, overrides=overrides)
    kind, labels = settings.data.kind, set(settings.data.all_labels())
    by_task: dict[str, TagScore] = {}
    unknown: dict[str, int] = {}
    outputs: dict[str, str] = {}
    counts: dict[str, dict[str, Counts]] = {}
    texts: dict[str, str] = {}
    console = console or Console(quiet=True)
    with folder.lock_beside("scores"):
        for task in track(settings.data.languages, "Tagging", console=console, transient=True):
            sentences = prepared.sentences(split, task)
            gold = [one.tags for one in sentences]
            predicted = tagger.tag_windows(prepared.windows(split, task), len(sentences))
            by_task[task] = score_tags(gold, predicted, kind)
            unknown[task] = sum(tag not in labels for tags in gold for tag in tags)
            outputs[task] = _columns(sentences, predicted)
            texts[task] = identify([[*one.words, *one.tags] for one in sentences])
            for metric, values in count_all(gold, predicted, kind).items():
                counts.setdefault(metric, {})[task] = values
        scores = Scores(
            str(run),
            kind,
            split,
            str(weights),
            by_task,
            dict(settings.data.resource_levels),
            unknown,
            []
            if kind == "pos"
            else [t for t, spans in counts["F1"].items() if not spans[:, 2].any()],
            str(folder.read_signature().get("signature", "")),
        )
        sentence_counts = [
            SentenceCounts(metric, "percentage" if metric == "accuracy" else "f1", of_metric, texts)
            for metric, of_metric in counts.items()
        ]
        folder.write_scored(
            split,
            weights,
            outputs=outputs,
            counts=sentence_counts,
            scores=scores.by_metric(),
            details=scores.to_dict(),
            of_weights=of_weights,
        )
    return scores


def _columns(sentences: Sequence[Sentence], predicted: Sequence[Sequence[str]]) -> str:
    """Word, tag and predicted tag in three columns, a blank line between sentences."""
    rows = (
        zip(one.words, one.tags, guess, strict=True)
        for one, guess in zip(sentences, predicted, strict=True)
    )
    return "\n".join("".join("\t".join(row) + "\n" for row in sentence) for sentence in rows)

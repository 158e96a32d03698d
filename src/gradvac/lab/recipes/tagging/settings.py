"""The config of a tagging run: [data], [model], [batch].

The other sections are the same in every run: [train], [optimizer], [sampling], [align].
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from gradvac.lab.recipes.tagging.metrics import OUTSIDE, Kind
from gradvac.lab.recipes.tagging.readers import Format
from gradvac.lab.training import RunConfig, Section
from gradvac.lab.training.config import Folder

TRAIN, DEV, TEST = "train", "dev", "test"
MULTILINGUAL_BERT = "google-bert/bert-base-multilingual-cased"
logger = logging.getLogger(__name__)
# The 17 universal parts of speech, and the entities of WikiAnn.
UNIVERSAL_TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
ENTITY_TAGS = (OUTSIDE, "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")


class TaggingDataConfig(Section):
    """[data]: tagged sentences, one task per language.

    Attributes:
        kind: "ner" (entities in IOB2, scored by span F1) or "pos" (parts of speech).
        prepared: Folder for what `gradvac tagging prepare` makes.
        root: What the sources below are relative to.
        languages: Codes, which replace `{lang}`; they are the names of the tasks.
        train: Source of training sentences; `gradvac.lab.recipes.tagging.readers` explains sources.
        dev: Source of the sentences that choose the weights.
        test: Source of the sentences to score on; optional.
        format: The format of the files; "auto": by their names.
        labels: All labels; empty: the 17 universal parts of speech, or O and B-/I- of PER, LOC and
            ORG.
        rename: Tag, or type of entity -> its name in `labels`; "O" removes a type.
        limit: Language -> maximum number of training sentences, the first ones.
        dev_limit: Maximum number of dev sentences per language, the first ones; 0: all.
        resource_levels: Language -> level, such as "low", for `align.vaccinated`.
    """

    kind: Kind
    prepared: Folder
    root: Folder = Path(".")
    languages: list[str]
    train: str
    dev: str
    test: str | None = None
    format: Format = "auto"
    labels: list[str] = Field(default_factory=list)
    rename: dict[str, str] = Field(default_factory=dict)
    limit: dict[str, PositiveInt] = Field(default_factory=dict)
    dev_limit: NonNegativeInt = 0
    resource_levels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> TaggingDataConfig:
        if not self.languages or len(set(self.languages)) != len(self.languages):
            raise ValueError("languages: name at least one, and each only once")
        check_labels(self.all_labels(), self.kind)
        for what in ("limit", "resource_levels"):
            unknown = [code for code in getattr(self, what) if code not in self.languages]
            if unknown:
                raise ValueError(
                    f"{what}: {unknown[0]!r} is not one of {', '.join(self.languages)}"
                )
        for split, source in self.sources().items():
            if "{lang}" not in source and not source.startswith("constructed"):
                raise ValueError(f"{split}: {source!r} has no {{lang}}; all languages share it")
        return self

    def all_labels(self) -> tuple[str, ...]:
        """The labels, in the order of the model's outputs."""
        return tuple(self.labels) or (UNIVERSAL_TAGS if self.kind == "pos" else ENTITY_TAGS)

    def sources(self) -> dict[str, str]:
        """Split -> source."""
        by_split = {TRAIN: self.train, DEV: self.dev, TEST: self.test}
        return {split: source for split, source in by_split.items() if source is not None}


class TaggingModelConfig(Section):
    """[model]: the encoder that is fine-tuned.

    Attributes:
        encoder: A folder in Hugging Face format, or a name on the hub.
        max_tokens: Maximum number of sub-words in a window; longer sentences are cut into several.
        dropout: Replaces the encoder's own; unset: the encoder's own.
    """

    encoder: str = MULTILINGUAL_BERT
    max_tokens: int = Field(default=128, ge=3)
    dropout: float | None = Field(default=None, ge=0, lt=1)


class TaggingBatchConfig(Section):
    """[batch]: what one micro-batch holds, and how long to train.

    Attributes:
        rows: Windows (sentences, unless long) per micro-batch, drawn from all languages.
        epochs: Epochs over the data of all languages together; sets `train.max_steps`. 0:
            `train.max_steps` decides.
        fixed: Give all batches the width of the longest window, so that a step can be recorded;
            "auto": if `train.cuda_graph` asks for it, on a GPU with bf16.
        score_rows: Windows per batch in validation and scoring.
    """

    rows: PositiveInt = 32
    epochs: NonNegativeFloat = 10.0
    fixed: bool | Literal["auto"] = "auto"
    score_rows: PositiveInt = 256


class TaggingConfig(RunConfig):
    """A tagging run."""

    data: TaggingDataConfig
    model: TaggingModelConfig = TaggingModelConfig()
    batch: TaggingBatchConfig = TaggingBatchConfig()

    @model_validator(mode="after")
    def _metric_is_measured(self) -> TaggingConfig:
        kinds = {"loss": False, "f1": True, "accuracy": True}
        self.train.check_metric(kinds, self.data.languages)
        return self

    def with_steps(self, num_windows: int) -> TaggingConfig:
        """These settings with the number of steps that `batch.epochs` amounts to."""
        epochs, given = self.batch.epochs, self.train.max_steps
        if not epochs:
            return self
        rows = self.batch.rows * self.optimizer.accumulation
        steps = max(1, math.ceil(epochs * num_windows / rows))
        if "max_steps" in self.train.model_fields_set and given != steps:
            logger.warning(
                f"warning: train.max_steps = {given} does not count, because batch.epochs = "
                f"{epochs:g} makes {steps} steps; with batch.epochs=0 it decides."
            )
        return self.model_copy(update={"train": self.train.model_copy(update={"max_steps": steps})})


# All languages share one label set, fixed before any file is read, or their gradients would belong
# to different tasks. A training tag outside it stops the preparation, with a count and the two ways
# out: rename it, or add it. In dev and test such a tag stays: a word that no prediction gets right.


def check_labels(labels: Sequence[str], kind: Kind) -> None:
    """Refuse a label set that cannot be scored."""
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice or not labels:
        raise ValueError(f"labels: {twice[0]!r} appears twice" if twice else "labels: is empty")
    if kind == "pos":
        return
    bad = [label for label in labels if label != OUTSIDE and label[:2] not in ("B-", "I-")]
    if bad or OUTSIDE not in labels:
        what = f"{bad[0]!r} is no IOB2 tag" if bad else "O is missing"
        raise ValueError(f'labels: {what}; entities need "O" and "B-X", "I-X" for every type')
    alone = [label for label in labels if label[:2] == "I-" and f"B-{label[2:]}" not in labels]
    if alone:
        raise ValueError(f"labels: {alone[0]!r} has no B-{alone[0][2:]} to continue; add it")


def rename_tag(tag: str, names: Mapping[str, str]) -> str:
    """A tag under its new name: a whole tag, or the type of an entity tag.

    A type renamed to "O" is no longer an entity.
    """
    if tag in names:
        return names[tag]
    prefix, hyphen, kind = tag.partition("-")
    if not hyphen or kind not in names:
        return tag
    return OUTSIDE if names[kind] == OUTSIDE else f"{prefix}-{names[kind]}"


def check_known(where: str, counts: Mapping[str, int], labels: Sequence[str]) -> None:
    """Refuse training tags that the model cannot predict."""
    unknown = Counter({tag: count for tag, count in counts.items() if tag not in labels})
    if not unknown:
        return
    most = unknown.most_common(6)
    shown = ", ".join(f"{tag or 'an empty tag'} ({num:,} words)" for tag, num in most)
    first = most[0][0]
    first = (first.partition("-")[2] if first[1:2] == "-" else first) or "_"
    raise ValueError(
        f"data: {where} has tags that are not in the label set: {shown}. The labels are "
        f'{", ".join(labels)}. Rename them, as in data.rename = {{ "{first}" = "{labels[-1][-3:]}" '
        "}, or list all labels in data.labels."
    )

"""[data]: the text of a translation run, and what is learned from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from gradvac.lab.recipes.nmt.cleaning import CleaningConfig
from gradvac.lab.recipes.nmt.readers import fill
from gradvac.lab.recipes.nmt.vocabulary import VocabularyConfig
from gradvac.lab.runs.scores import RESOURCE_LEVELS
from gradvac.lab.training import Section
from gradvac.lab.training.config import Folder
from gradvac.tasks import DEFAULT_PIVOT, Direction, parse, turned

Source = str | list[str]
Sources = Source | dict[str, Source]
TRAIN, DEV, TEST = "train", "dev", "test"
# They become names of files and of pieces, so that nothing else may be in them.
_CODE, _SET = re.compile(r"\w{1,32}", re.ASCII), re.compile(r"\w[\w-]{0,63}", re.ASCII)


class ResourceLevels(Section):
    """[data.resource_levels]: training pairs from which a task is of a level.

    The defaults are those of the paper's massively multilingual data, in sentence pairs.

    Attributes:
        high: From so many pairs on.
        medium: From so many pairs on.
        low: From so many pairs on; tasks with fewer are "extremely_low".
    """

    high: int = Field(default=100_000_000, ge=1)
    medium: int = Field(default=10_000_000, ge=1)
    low: int = Field(default=5_000_000, ge=1)

    @model_validator(mode="after")
    def _fall(self) -> ResourceLevels:
        if not self.high >= self.medium >= self.low:
            raise ValueError(
                f"high, medium and low must fall, got {self.high}, {self.medium}, {self.low}"
            )
        return self

    def of(self, num_pairs: int) -> str:
        """The level of a number of training pairs."""
        thresholds = (self.high, self.medium, self.low, 0)
        return next(
            level
            for level, least in zip(RESOURCE_LEVELS, thresholds, strict=True)
            if num_pairs >= least
        )


class DataConfig(Section):
    """[data]: the text, and what is learned from it.

    Attributes:
        prepared: Folder for what `gradvac nmt prepare` makes.
        root: What the files below are relative to.
        pivot: The language that all others are paired with.
        languages: The others.
        pairs: Instead of `languages`: pairs such as "fr-de", pivot or not.
        columns: What the columns of TSV and CSV files hold, by code, as in ["de", "en"]; "{xx}"
            stands for the second language of a pair, any other name for a column to pass over.
            Empty: a header says so, or else the two columns are in the order of the pair's name.
        train: Sources of training pairs; see `gradvac.lab.recipes.nmt.readers`. A source, a list of
            them, or one of either for every language or pair: {de = "a.tsv", fr = ["b.tsv"]}.
        dev: Source of the pairs that choose the checkpoint; may differ by language likewise.
        test: Source of the pairs to score on; may be left out.
        extra: Further named sets to score on, such as {ntrex = "eval.{lang}.gz"}.
        limit: Language or pair -> most training pairs.
        directions: Which way to translate the pairs; "en" stands for the first of each.
        tasks: Only these tasks, such as ["en-fr"] for a bilingual model.
        max_tokens: Training pairs with a longer side are dropped; `translate` cuts its input there.
        processes: Processes that clean large corpora, and threads that cut them; 0: one for every
            core. They change nothing.
        engine: What cleans and cuts large corpora: "processes" of this machine, or "ray" (extra
            `ray`): the cluster that RAY_ADDRESS names, or an instance of this machine. It changes
            nothing. Files are read and written here.
        resource_levels: Thresholds.
        cleaning: What else is dropped.
        vocabulary: The shared vocabulary.
    """

    prepared: Folder
    root: Folder = Path(".")
    pivot: str = DEFAULT_PIVOT
    languages: list[str] = Field(default_factory=list)
    pairs: list[str] = Field(default_factory=list)
    columns: list[str] = Field(default_factory=list)
    train: Sources
    dev: Sources
    test: Sources | None = None
    extra: dict[str, Sources] = Field(default_factory=dict)
    limit: dict[str, PositiveInt] = Field(default_factory=dict)
    directions: Literal["en-to-any", "any-to-en", "any-to-any"] = "en-to-any"
    tasks: list[str] = Field(default_factory=list)
    max_tokens: int = Field(default=256, ge=1)
    processes: int = Field(default=0, ge=0)
    engine: Literal["processes", "ray"] = "processes"
    resource_levels: ResourceLevels = ResourceLevels()
    cleaning: CleaningConfig = CleaningConfig()
    vocabulary: VocabularyConfig = VocabularyConfig()

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if bool(self.languages) == bool(self.pairs):
            raise ValueError("give either languages or pairs")
        for pair in self.pairs:
            try:
                parse(pair)
            except ValueError as error:
                raise ValueError(f"pairs: {error}") from None
        codes = (self.pivot, *self.languages, *(c for p in self.pairs for c in parse(p)))
        bad = [code for code in codes if not _CODE.fullmatch(code)]
        if bad or self.pivot in self.languages:
            name, what = (bad or [self.pivot])[0], "is no code" if bad else "is the pivot"
            what = "has a hyphen" if "-" in name else what
            raise ValueError(
                f"languages: {name!r} {what}; write codes such as 'fr' or 'zh_tw': letters, digits "
                "and _"
            )
        names = self.all_pairs()
        if len(set(names)) != len(names):
            raise ValueError("languages or pairs: one appears twice")
        known = {*names, *(code for pair in names for code in parse(pair))}
        for what, given in (("tasks", self.tasks), ("limit", list(self.limit))):
            choices = self._all_tasks() if what == "tasks" else sorted(known)
            unknown = [name for name in given if name not in choices]
            if unknown:
                raise ValueError(f"{what}: {unknown[0]!r} is none of {', '.join(choices)}")
        reserved = {TRAIN, DEV, TEST} & set(self.extra)
        if reserved:
            raise ValueError(f"extra: {min(reserved)!r} is taken; choose another name")
        bad = [name for name in self.extra if not _SET.fullmatch(name)]
        if bad:
            raise ValueError(
                f"extra: {bad[0]!r} becomes part of file names; use letters, digits, - and _"
            )
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if twice or len(self.columns) == 1:
            raise ValueError(f"columns: {self.columns} must name two languages, each once")
        for split in self.sources():
            for pair in names:
                for source in self.sources_of(split, pair):
                    fill(source, "en", "xx", "en")  # a wrong placeholder is told now
        return self

    def all_pairs(self) -> list[str]:
        """All language pairs, as in "en-fr"."""
        return self.pairs or [Direction(self.pivot, code).name for code in self.languages]

    def all_languages(self) -> list[str]:
        """The codes of all languages, pivot included."""
        return list(dict.fromkeys(code for pair in self.all_pairs() for code in parse(pair)))

    def all_tasks(self) -> list[str]:
        """The tasks to train: directions, as in "en-fr" or "fr-en"."""
        return self.tasks or self._all_tasks()

    def _all_tasks(self) -> list[str]:
        there = self.all_pairs()
        back = [turned(pair) for pair in there]
        return {"en-to-any": there, "any-to-en": back, "any-to-any": [*there, *back]}[
            self.directions
        ]

    def limit_of(self, pair: str) -> int | None:
        """The most training pairs: the pair's own limit, or the lower one of its languages."""
        language_limits = [self.limit[code] for code in parse(pair) if code in self.limit]
        return self.limit.get(pair, min(language_limits, default=None))

    def sources(self) -> dict[str, Sources]:
        """Split -> its sources, as they were given."""
        test = {} if self.test is None else {TEST: self.test}
        return {TRAIN: self.train, DEV: self.dev, **test, **self.extra}

    def sources_of(self, split: str, pair: str) -> list[str]:
        """The sources of a pair in a split."""
        given = self.sources()[split]
        if isinstance(given, dict):
            names = [pair, *(code for code in reversed(parse(pair)) if code != self.pivot)]
            unknown = given.keys() - {*self.all_pairs(), *self.all_languages()}
            sources = [given[name] for name in names if name in given]
            if unknown or not sources:
                what = f"{min(unknown)!r} is none of them" if unknown else f"none for {pair}"
                raise ValueError(
                    f"{split}: gives sources by language or pair, but {what}; write as in "
                    f'{{{names[-1]} = "..."}}'
                )
            given = sources[0]
        return [given] if isinstance(given, str) else given

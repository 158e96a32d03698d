"""The family tree: what a corpus is made of, before any word is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gradvac.lab.languages._grammar import Grammar
from gradvac.lab.languages._sounds import SoundChange

ResourceLevel = Literal["high", "medium", "low", "extremely_low"]
RESOURCE_LEVELS: tuple[ResourceLevel, ...] = ("high", "medium", "low", "extremely_low")

Split = Literal["dev", "test", "eval", "novel"]
SPLITS: tuple[Split, ...] = ("dev", "test", "eval", "novel")


@dataclass(frozen=True)
class Language:
    """The facts about one constructed language.

    Attributes:
        code: Code of two or three letters; the task is then `en-code`.
        name: Invented name.
        family: Name of the family.
        branch: Name of the branch within the family.
        script: Script it is written in.
        train: Number of training pairs.
        resource_level: Level of that number, by the corpus's thresholds.
        grammar: Word order, morphology and so on.
    """

    code: str
    name: str
    family: str
    branch: str
    script: str
    train: int
    resource_level: ResourceLevel
    grammar: Grammar


@dataclass(frozen=True)
class Phonology:
    """The sounds of a family's ancestor and the shapes of its roots, such as "CVCVC"."""

    consonants: str
    vowels: str
    roots: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """A stretch of history: the time of a branch, or of a language alone.

    Attributes:
        key: Unique name, such as `sarvan.coastal`; it seeds what is drawn for this stage.
        replace: Share of the words that are replaced by new ones, at the start of the stage.
        sounds: Sound changes, in order.
    """

    key: str
    replace: float
    sounds: tuple[SoundChange, ...]


@dataclass(frozen=True)
class Lineage:
    """Where a language comes from.

    Attributes:
        language: The facts.
        family: Key of the family.
        phonology: Sounds of the ancestor.
        proto: Grammar of the ancestor, which shapes its roots and affixes.
        stages: The branch's time and the language's own.
        borrow: Code of a donor to the share of words borrowed from it.
    """

    language: Language
    family: str
    phonology: Phonology
    proto: Grammar
    stages: tuple[Stage, Stage]
    borrow: Mapping[str, float]


@dataclass(frozen=True)
class Tree:
    """All lineages, by code, with the seed and the sizes of the aligned splits."""

    seed: int
    splits: Mapping[Split, int]
    thresholds: Mapping[ResourceLevel, int]
    lineages: Mapping[str, Lineage]


def resource_level(num_pairs: int, thresholds: Mapping[ResourceLevel, int]) -> ResourceLevel:
    """The highest level whose threshold a number of training pairs reaches."""
    for level in RESOURCE_LEVELS[:-1]:
        if num_pairs >= thresholds[level]:
            return level
    return "extremely_low"

"""The family tree: what a corpus is made of, before any word is drawn.

Reading of family trees from TOML, with errors that name the key and the fix.

A table inherits what the tables around it set: a branch from its family, a language from both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from gradvac.lab.languages.grammar import PARAMETERS, Grammar
from gradvac.lab.languages.sounds import CONSONANTS, SCRIPTS, VOWELS, SoundChange
from gradvac.utils.hints import nearest

PIVOT = "en"  # the language that all others are translated from and into

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
    """A stretch of history: the time of a branch, or of a language alone."""

    key: str  # unique name, such as `sarvan.coastal`; it seeds what is drawn for this stage
    replace: float  # share of the words that are replaced by new ones, at the start of the stage
    sounds: tuple[SoundChange, ...]


@dataclass(frozen=True)
class Lineage:
    """Where a language comes from."""

    language: Language
    family: str
    phonology: Phonology  # sounds of the ancestor
    proto: Grammar  # grammar of the ancestor, which shapes its roots and affixes
    stages: tuple[Stage, Stage]  # the branch's time and the language's own
    borrow: Mapping[str, float]  # code of a donor to the share of words borrowed from it


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


Table = Mapping[str, object]

_SPLITS: dict[Split, int] = {"dev": 500, "test": 1000, "eval": 500, "novel": 500}
_THRESHOLDS: dict[ResourceLevel, int] = {"high": 10000, "medium": 4000, "low": 1000}
_ROOTS = ("CVCV", "CVCVC", "CVC")
_INHERITED = ("script", *PARAMETERS)
_FAMILY = ("name", "consonants", "vowels", "roots", "branches", *_INHERITED)
_BRANCH = ("name", "sounds", "replace", "languages", *_INHERITED)
_LANGUAGE = ("name", "train", "sounds", "replace", "borrow", *_INHERITED)


def read_tree(path: Path, *, seed: int | None = None) -> Tree:
    """Read a family tree from a TOML file; `seed` replaces the file's.

    Raises:
        ValueError: The file is not TOML, or a key or value in it is wrong; says which and the fix.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    try:
        return _tree(table, seed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _tree(table: Table, seed: int | None) -> Tree:
    _check_keys("", table, ("seed", "splits", "resource_levels", "families"))
    own_seed = _whole("seed", table.get("seed", 0))
    splits = dict(_SPLITS)
    for key, value in _table("splits", table.get("splits", {}), SPLITS).items():
        splits[cast(Split, key)] = _whole(f"splits.{key}", value)
    thresholds = dict(_THRESHOLDS)
    levels = _table("resource_levels", table.get("resource_levels", {}), RESOURCE_LEVELS[:-1])
    for key, value in levels.items():
        thresholds[cast(ResourceLevel, key)] = _whole(f"resource_levels.{key}", value)
    if not thresholds["high"] > thresholds["medium"] > thresholds["low"]:
        raise ValueError(f"resource_levels: must fall from high to low, got {thresholds}")
    families = _table("families", table.get("families", {}), None)
    if not families:
        raise ValueError("families: a corpus needs at least one; add a table [families.NAME]")
    lineages: dict[str, Lineage] = {}
    for key in families:
        _read_family(key, families, thresholds, lineages)
    for code, lineage in lineages.items():
        for donor in lineage.borrow:
            if donor not in lineages or donor == code:
                others = [other for other in lineages if other != code]
                raise ValueError(
                    f"borrow of {code}: no other language {donor!r}; {nearest(donor, others)}"
                )
    return Tree(own_seed if seed is None else seed, splits, thresholds, lineages)


def _read_family(
    key: str,
    families: Table,
    thresholds: Mapping[ResourceLevel, int],
    lineages: dict[str, Lineage],
) -> None:
    """Read one family and add its languages to `lineages`."""
    place = f"families.{key}"
    family = _table(place, families[key], _FAMILY)
    phonology = _phonology(place, family)
    proto, script = _grammar(place, family), _script(place, family, "latin")
    family_name = _text(f"{place}.name", family.get("name", key.capitalize()))
    if any(lineage.language.family == family_name for lineage in lineages.values()):
        raise ValueError(f"{place}.name: {family_name!r} is another family's name; give a new one")
    branches = _table(f"{place}.branches", family.get("branches", {}), None)
    for branch_key in branches:
        inner = f"{place}.branches.{branch_key}"
        branch = _table(inner, branches[branch_key], _BRANCH)
        _grammar(inner, family, branch)
        branch_stage = _stage(inner, f"{key}.{branch_key}", branch)
        languages = _table(f"{inner}.languages", branch.get("languages", {}), None)
        for code in languages:
            here = f"{inner}.languages.{code}"
            language_table = _table(here, languages[code], _LANGUAGE)
            if not re.fullmatch("[a-z]{2,3}", code) or code == PIVOT or code in lineages:
                raise ValueError(
                    f"{here}: code {code!r} must be two or three small letters, used once, and not "
                    f"{PIVOT!r}; the range qaa to qtz is free for local use"
                )
            train = _whole(f"{here}.train", language_table.get("train", 0))
            language = Language(
                code,
                _text(f"{here}.name", language_table.get("name", code)),
                family_name,
                _text(f"{inner}.name", branch.get("name", branch_key)),
                _script(here, language_table, _script(inner, branch, script)),
                train,
                resource_level(train, thresholds),
                _grammar(here, family, branch, language_table),
            )
            borrow = _table(f"{here}.borrow", language_table.get("borrow", {}), None)
            lineages[code] = Lineage(
                language,
                key,
                phonology,
                proto,
                (branch_stage, _stage(here, f"{key}.{branch_key}.{code}", language_table)),
                {donor: _share(f"{here}.borrow.{donor}", borrow[donor]) for donor in borrow},
            )
    if not any(lineage.family == key for lineage in lineages.values()):
        raise ValueError(
            f"{place}: has no language; add a table [{place}.branches.NAME.languages.CODE]"
        )


def _phonology(place: str, family: Table) -> Phonology:
    sounds = {}
    for name, inventory in (("consonants", CONSONANTS), ("vowels", VOWELS)):
        text = _text(f"{place}.{name}", family.get(name, ""))
        sounds[name] = text.replace(" ", "")
        wrong = [sound for sound in sounds[name] if sound not in inventory]
        if wrong or len(set(sounds[name])) < 2:
            what = f"{wrong[0]!r} is none" if wrong else f"got {text!r}"
            raise ValueError(f"{place}.{name}: {what}; give at least two of {inventory}")
    roots = tuple(_texts(f"{place}.roots", family.get("roots", list(_ROOTS))))
    for root in roots:
        if not re.fullmatch("[CV]*V[CV]*", root):
            raise ValueError(f"{place}.roots: {root!r} must be made of C and V, such as 'CVCV'")
    if not roots:
        raise ValueError(f"{place}.roots: is empty; give shapes such as {list(_ROOTS)}")
    return Phonology(sounds["consonants"], sounds["vowels"], roots)


def _grammar(place: str, *tables: Table) -> Grammar:
    """Read the grammar from tables, the innermost last."""
    chosen = {name: table[name] for table in tables for name in PARAMETERS if name in table}
    for name, value in chosen.items():
        # Types are compared too: 1 == True in Python, but `genders = true` is a mistake.
        if not any(value == choice and type(value) is type(choice) for choice in PARAMETERS[name]):
            choices = [str(choice) for choice in PARAMETERS[name]]
            raise ValueError(f"{place}.{name}: got {value!r}; {nearest(str(value), choices)}")
    grammar = Grammar(**chosen)  # type: ignore[arg-type]  # checked against PARAMETERS above
    problem = grammar.contradiction()
    if problem is not None:
        raise ValueError(f"{place}: {problem}")
    return grammar


def _stage(place: str, key: str, table: Table) -> Stage:
    sounds = []
    for text in _texts(f"{place}.sounds", table.get("sounds", [])):
        try:
            sounds.append(SoundChange(text))
        except ValueError as error:
            raise ValueError(f"{place}.sounds: {error}") from error
    return Stage(key, _share(f"{place}.replace", table.get("replace", 0.0)), tuple(sounds))


def _script(place: str, table: Table, inherited: str) -> str:
    script = _text(f"{place}.script", table.get("script", inherited))
    if script not in SCRIPTS:
        raise ValueError(f"{place}.script: got {script!r}; {nearest(script, SCRIPTS)}")
    return script


def _check_keys(place: str, table: Table, valid: Iterable[str]) -> None:
    valid = tuple(valid)
    for key in table:
        if key not in valid:
            place = f"{place}: " if place else ""
            raise ValueError(f"{place}unknown key {key!r}; {nearest(key, valid)}")


def _table(place: str, value: object, valid: Iterable[str] | None) -> Table:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be a table, got {value!r}; write [{place}]")
    if valid is not None:
        _check_keys(place, value, valid)
    return value


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: must be a string, got {value!r}; put it in quotes")
    return value


def _texts(place: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: must be a list of strings, got {value!r}; put it in [ ]")
    return [_text(place, item) for item in value]


def _whole(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{place}: must be a whole number from 0 up, got {value!r}")
    return value


def _share(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{place}: must be a share from 0 to 1, got {value!r}")
    return float(value)

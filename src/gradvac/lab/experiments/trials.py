"""The config of a sweep, and the runs it stands for.

    recipe = "nmt"                      # or "tagging", or "module:NAME" of your own
    base = "tatoeba"                    # the config that is varied: a name, or a file
    score = ["test"]                    # sets to score when a run is finished

    [set]                               # settings of all runs
    "train.max_steps" = 3500

    [grid]                              # every combination of these values
    "train.seed" = [0, 1, 2, 3]

    [[methods]]                         # without any: the grid alone
    name = "joint"
    set = { "align.rule" = "sum" }
    grid = { "sampling.temperature" = [1.0, 2.0, 5.0] }

    [[methods]]
    name = "bilingual"                  # models that stand together for one method
    set = { "align.rule" = "none" }
    parts = { "data.tasks" = [["en-fr"], ["en-hi"]] }

    [[methods]]
    name = "continued"                  # `{run:NAME}`: the folder of that method's run of this seed
    set = { "model.init" = "{run:high}", "data.prepared" = "{out}/data-{seed}" }

    [[methods]]
    name = "own"                        # a rule of your own, with its arguments
    set = { "align.rule" = "file.py:Class", "align.options" = { strength = 0.5 } }

    [[primary]]                         # asked before anything is trained: these can be *clear*
    method = "gradvac"                  # against the method "joint", on the average of all tasks

Strings may hold `{out}`, `{point}` and `{seed}`: folder, point and seed of the run.
The run of method `joint` with temperature 2 and seed 0 is in OUT/joint-temperature=2.0/seed-0.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from gradvac.analysis.run_files import ALL
from gradvac.lab.experiments.methods import JOINT, PART, SEED, SEED_FOLDER
from gradvac.lab.training.config import Section
from gradvac.utils.hints import nearest

_RULE = "align.rule"
_NAME = re.compile(r"[\w-]+", re.ASCII)
_REFERENCE = re.compile(r"\{run:([^{}]+)\}")


class MethodConfig(Section):
    """[[methods]]: one line of the table that the sweep is for.

    Attributes:
        name: What it is called; letters, digits, - and _.
        set: Settings.
        grid: Setting -> the values to try, besides those of the sweep's own grid.
        parts: One setting -> values whose models stand together for the method, each with some of
            the tasks.
        scored: Whether its runs are scored and compared; not those that others only start from.
        turn: Methods of a later turn begin after those of the turns before.
    """

    name: str
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    parts: dict[str, list[Any]] = Field(default_factory=dict)
    scored: bool = True
    turn: int = Field(default=1, ge=1)

    @field_validator("name")
    @classmethod
    def _fits_a_folder(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} becomes a folder; use letters, digits, - and _")
        return name


class PrimaryQuestion(Section):
    """[[primary]]: is a method better than another? Asked before anything is trained.

    Attributes:
        method: A method, or a point of its grid, as its folder is called.
        baseline: The one that it is compared with.
        on: A row of the comparison: "all", a resource level, a task, "dev/loss, best weights".
    """

    method: str
    baseline: str = JOINT
    on: str = ALL


class SweepConfig(Section):
    """A sweep.

    Attributes:
        recipe: What is trained: a registered recipe, "module:NAME" or "file.py:NAME".
        base: The config that is varied: a name as on the command line, or a file.
        score: Sets to score when a run is finished.
        measure: Aligned sets on which the similarity of its tasks is measured then.
        set: Settings of all runs.
        grid: Setting -> values to try; every combination.
        methods: Lines of the table; without any, the grid alone.
        primary: The few questions that the sweep is for, and whose answers can be clear.
        submitit: For `--launcher submitit`: `cluster`, and what its executor takes.
    """

    recipe: str
    base: str
    score: list[str] = Field(default_factory=lambda: ["test"])
    measure: list[str] = Field(default_factory=list)
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    methods: list[MethodConfig] = Field(default_factory=list)
    primary: list[PrimaryQuestion] = Field(default_factory=list)
    submitit: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> SweepConfig:
        names = [method.name for method in self.methods]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"methods: {twice[0]!r} appears twice")
        for grid in (self.grid, *(method.grid for method in self.methods)):
            for key, values in grid.items():
                if not values or any(value in values[:n] for n, value in enumerate(values)):
                    raise ValueError(f"grid: {key} must have at least one value, and each once")
        both = [key for key in self.grid if key in self.set]
        if both:
            raise ValueError(f"grid: {both[0]} is in [set] too; leave out one of the two")
        for method in self.methods:
            both = [key for key in {**method.grid, **method.parts} if key in method.set]
            if both:
                raise ValueError(f"methods: {method.name!r} both sets and varies {both[0]}")
        many = [method.name for method in self.methods if len(method.parts) > 1]
        if many:
            raise ValueError(f"methods: {many[0]!r} has parts of several settings; give one")
        return self


@dataclass(frozen=True, eq=False)  # settings cannot be hashed: equal means identical
class Trial:
    """One run of a sweep."""

    method: str  # the method whose budget it counts for
    name: str  # of its point: the method and what the grid varies
    seed: int  # `train.seed`
    settings: Mapping[str, Any]  # setting -> value
    run: Path
    scored: bool
    needs: tuple[Path, ...]  # folders of the runs that must be finished first

    @property
    def label(self) -> str:
        """Point and seed, also a file name."""
        return f"{self.name}.{SEED_FOLDER}{self.seed}"


def plan_trials(
    config: SweepConfig, out: Path, extra: Mapping[str, Any] | None = None
) -> list[Trial]:
    """All runs of a sweep in their order: turn by turn, then seed by seed; needed ones first.

    So a sweep that is stopped has treated all methods of a turn alike.

    Raises:
        ValueError: Two points have one name, or a reference leads nowhere.
    """
    methods = config.methods or [_grid_alone(config)]
    turns = sorted({method.turn for method in methods})
    trials = [
        trial
        for turn in turns
        for trial in sorted(
            (
                trial
                for method in methods
                if method.turn == turn
                for trial in _trials(config, method, out, extra or {})
            ),
            key=lambda trial: trial.seed,
        )
    ]
    folders = [trial.run for trial in trials]
    twice = [run for run in folders if folders.count(run) > 1]
    if twice:
        raise ValueError(f"grid: two runs would share {twice[0]}; give methods different names.")
    names = sorted({trial.name for trial in trials})
    for trial in trials:
        for run in trial.needs:
            if run not in folders:
                hint = nearest(run.parent.name, names)
                raise ValueError(f"{trial.name}: needs {run}, which is not in the sweep; {hint}")
    scored = sorted({trial.name.partition(PART)[0] for trial in trials if trial.scored})
    for question in config.primary:
        for name in (question.method, question.baseline):
            if name not in scored:
                raise ValueError(f"primary: there is no method {name!r}; {nearest(name, scored)}")
    return _ordered(trials)


def _grid_alone(config: SweepConfig) -> MethodConfig:
    """A sweep without methods is a grid; what varies names its points."""
    return MethodConfig(name=config.base if _NAME.fullmatch(config.base) else "all")


def _trials(
    config: SweepConfig, method: MethodConfig, out: Path, extra: Mapping[str, Any]
) -> Iterator[Trial]:
    grid = {**config.grid, **method.grid}
    for key in {**method.set, **extra}:
        grid.pop(key, None)  # a method that fixes what others vary
    parts: list[tuple[str, Any] | None] = [
        (key, value) for key, values in method.parts.items() for value in values
    ]
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        for part in parts or [None]:
            settings = {
                **config.set,
                **method.set,
                **point,
                **dict([part] if part else []),
                **extra,
            }
            seed = settings.setdefault(SEED, 0)
            shown = {key: value for key, value in point.items() if key != SEED}
            name = _name(method, config, shown) + (PART + _word(part[1]) if part else "")
            run = out / name / f"{SEED_FOLDER}{seed}"
            words = {"{out}": str(out), "{point}": name, "{seed}": str(seed)}
            named = list(_referred(settings))
            needs = {other: out / other / f"{SEED_FOLDER}{seed}" for other in named}
            words |= {f"{{run:{other}}}": str(run) for other, run in needs.items()}
            settings = {key: _filled(value, words) for key, value in settings.items()}
            counted = str(settings[_RULE]) if not config.methods and _RULE in point else method.name
            yield Trial(counted, name, seed, settings, run, method.scored, tuple(needs.values()))


def _name(method: MethodConfig, config: SweepConfig, point: Mapping[str, Any]) -> str:
    words = [method.name] if config.methods else []
    for key, value in point.items():
        short = key.rpartition(".")[2]
        words.append(_word(value) if key == _RULE else f"{short}={_word(value)}")
    return "-".join(words) or method.name


def _word(value: Any) -> str:
    """A value within the name of a folder."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}_{_word(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ",".join(map(_word, value)) or "none"
    return re.sub(r"[^\w.=,-]", "_", str(value))


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """A value in whose strings words are replaced."""
    if isinstance(value, Mapping):
        return {key: _filled(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, words) for item in value]
    if isinstance(value, str):
        for word, meaning in words.items():
            value = value.replace(word, meaning)
    return value


def _referred(value: Any) -> Iterator[str]:
    """Names of the methods whose runs a value refers to."""
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _referred(item)
    elif isinstance(value, str):
        yield from _REFERENCE.findall(value)


def _ordered(trials: Sequence[Trial]) -> list[Trial]:
    """Every run after those it needs, otherwise in their order."""
    done: list[Trial] = []
    folders: set[Path] = set()
    waiting = list(trials)
    while waiting:
        ready = next((trial for trial in waiting if folders.issuperset(trial.needs)), None)
        if ready is None:
            raise ValueError(f"{waiting[0].name}: needs runs that need it; break the circle.")
        done.append(ready)
        folders.add(ready.run)
        waiting.remove(ready)
    return done

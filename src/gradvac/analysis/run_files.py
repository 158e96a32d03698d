"""What a report reads of a run: its files, by name, and its scores by task.

Whatever loop wrote them, a folder may hold

    RUN/record.bin                   similarities and what the rule did: gradvac.analysis.record
    RUN/similarity.npz               similarities on an aligned set
    RUN/metrics.jsonl                one object per line: {"step": 100, "train/loss": ...}
    RUN/scores/SET.WEIGHTS.json      scores of a set with those weights
    RUN/config.toml, signature.json  all settings; what the numbers depend on

A damaged file gives an error that says which one, what is wrong, and what to do.
"""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gradvac.utils.files import hash_of, read_json, write_json

ALL = "all"
RESOURCE_LEVELS = ("high", "medium", "low", "extremely_low")
_CHECK = "check"
_OF_WEIGHTS = "of_weights"
_PREFERRED = "test.best.json"
_STEP = "step-"
_WEIGHTS = ".safetensors"
_LONGEST_HEADER = 100_000_000  # of weights; safetensors' own limit

T = TypeVar("T")


@dataclass(frozen=True)
class TaskScores:
    """What a run scores on one set, by one metric.

    Attributes:
        metric: Its name, as it appears in a sentence or on an axis: "BLEU", "F1".
        by_task: Task -> score.
        levels: Task -> resource level, as far as it is known.
        note: How it was scored, in a few words: the set, the weights, the metric's signature.
        higher_is_better: Whether a larger number is better.
        digits: Decimals to show.
    """

    metric: str
    by_task: Mapping[str, float]
    levels: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    higher_is_better: bool = True
    digits: int = 1

    def by_level(self) -> dict[str, float]:
        """Mean over the tasks of each resource level, largest first, and over "all"."""
        groups = tasks_by_level(self.by_task, self.levels) | {ALL: list(self.by_task)}
        return {
            name: sum(self.by_task[task] for task in tasks) / len(tasks)
            for name, tasks in groups.items()
            if tasks
        }

    def show(self, value: float) -> str:
        """A score with as many decimals as this metric has."""
        return f"{value:.{self.digits}f}"


def level_rank(level: str) -> int:
    """The place of a resource level in a table: from high to low, others last."""
    known = level in RESOURCE_LEVELS
    return RESOURCE_LEVELS.index(level) if known else len(RESOURCE_LEVELS)


def tasks_by_level(tasks: Iterable[str], levels: Mapping[str, str]) -> dict[str, list[str]]:
    """Resource level -> its tasks, from high to low; tasks without a level are left out."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        if task in levels:
            found.setdefault(levels[task], []).append(task)
    return {level: found[level] for level in sorted(found, key=level_rank)}


def write_scores(
    path: Path,
    scores: Sequence[TaskScores],
    details: Mapping[str, Any] | None = None,
    *,
    of_weights: str = "",
) -> None:
    """Write the scores of one set; the metric to show first comes first.

    Args:
        path: The file; see `RunFolder.scores_of`.
        scores: One entry for every metric.
        details: What else the recipe wants to keep, ready for JSON.
        of_weights: What `RunFolder.identify_weights` said of the weights that were scored.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "scores": [asdict(one) for one in scores],
        "details": dict(details or {}),
        _OF_WEIGHTS: of_weights,
    }
    write_json(path, content | {_CHECK: hash_of(content)})


def read_scores(path: Path) -> tuple[TaskScores, ...]:
    """Read what `write_scores` wrote: one entry for every metric, the one to show first.

    Raises:
        ValueError: The file is damaged, or something else.
    """
    try:
        content = json.loads(path.read_bytes())
        check = content.pop(_CHECK, None)  # which scores of another origin need not have
        if check is not None and check != hash_of(content):
            raise ValueError("it is not what was written")
        scores = tuple(TaskScores(**entry) for entry in content["scores"])
        if not scores:
            raise ValueError("it holds none")
        for one in scores:
            _check(one)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}: holds no scores by task, or is damaged ({reason}); score again, or remove it."
        ) from None
    return scores


def scored_weights(path: Path) -> str:
    """Which weights were scored, as passed to `write_scores`; empty if unknown."""
    return str(read_json(path).get(_OF_WEIGHTS, ""))


def _check(scores: TaskScores) -> None:
    for task, value in scores.by_task.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the {scores.metric} of {task} is {str(value)[:40]}, no number")
    for name, kind in (("metric", str), ("note", str), ("digits", int), ("levels", dict)):
        if not isinstance(getattr(scores, name), kind):
            raise ValueError(f"{name} is {str(getattr(scores, name))[:40]}")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run folder that reports read."""

    path: Path

    @property
    def config(self) -> Path:
        """All settings; a folder without them is not a run."""
        return self.path / "config.toml"

    @property
    def signature(self) -> Path:
        """What the numbers depend on."""
        return self.path / "signature.json"

    @property
    def metrics(self) -> Path:
        """The log."""
        return self.path / "metrics.jsonl"

    @property
    def record(self) -> Path:
        """What training recorded of its alignments."""
        return self.path / "record.bin"

    @property
    def similarity(self) -> Path:
        """What was measured on an aligned set."""
        return self.path / "similarity.npz"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def scores(self) -> Path:
        """The folder of scores."""
        return self.path / "scores"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.checkpoints / f"{_STEP}{step:08d}"

    def kept_checkpoints(self) -> list[tuple[int, Path]]:
        """Steps and folders of all checkpoints, damaged ones too, by step."""
        named = ((path.name.removeprefix(_STEP), path) for path in self.checkpoints.glob("step-*"))
        return sorted(
            (int(step), path) for step, path in named if step.isdecimal() and path.is_dir()
        )

    def weights(self, name: str) -> Path:
        """Weights to use: "best" or "averaged"."""
        return self.path / f"{name}{_WEIGHTS}"

    def kept_weights(self) -> list[Path]:
        """All weights to use, by name."""
        return sorted(self.path.glob(f"[!.]*{_WEIGHTS}"))

    def weights_by_name(self) -> dict[str, Path]:
        """All weights: files ("best", "averaged") and checkpoints ("last", the newest; steps)."""
        checkpoints = {str(step): path for step, path in self.kept_checkpoints()}
        last = [("last", path) for path in checkpoints.values()][-1:]
        return {path.stem: path for path in self.kept_weights()} | dict(last) | checkpoints

    def identify_weights(self, which: str | int) -> str:
        """A word for weights that is another one once they are replaced; empty without any."""
        path = self.weights_by_name().get(str(which))
        if path is None:
            return ""
        if path.is_dir():
            return f"{_STEP}{int(path.name.removeprefix(_STEP))}"
        with path.open("rb") as file:  # safetensors: a length, a header, the numbers
            header = file.read(min(int.from_bytes(file.read(8), "little"), _LONGEST_HEADER))
        remedy = "use other weights, or train again"
        metadata = _parse_at(str(path), header, _parse_object, remedy).get("__metadata__")
        return str(metadata.get("sha256", "")) if isinstance(metadata, dict) else ""

    def scores_of(self, split: str, weights: str | int) -> Path:
        """Scores of a set."""
        return self.scores / f"{split}.{weights}.json"

    def are_scores_current(self, split: str, weights: str | int) -> bool:
        """Whether scores are of the weights that are there now, as far as can be known."""
        now = self.identify_weights(weights)
        return scored_weights(self.scores_of(split, weights)) in ("", now) or not now

    def read_settings(self) -> str:
        """`config.toml` as it stands; empty if there is none."""
        return _read(self.config, bytes.decode, "save it as UTF-8") or ""

    def read_table(self) -> dict[str, Any]:
        """`config.toml` as nested tables; empty if there is none."""
        return _read(self.config, _parse_toml, "put back what training wrote") or {}

    def read_signature(self) -> dict[str, Any]:
        """`signature.json`; empty if there is none."""
        return _read(self.signature, _parse_signature, "remove it") or {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """All entries of `metrics.jsonl`; a line that is still being written is left out.

        Numbers that are not finite are None.
        """
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_bytes().split(b"\n")[:-1]
        return [
            _parse_at(f"{self.metrics}, line {number}", line, _parse_entry, _MEND_LINE)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]

    def read_scores(self) -> tuple[TaskScores, ...]:
        """Scores of the test set and best weights if they are there, else of another set.

        One entry for every metric, the one to show first; empty without scores. Warns of scores
        whose weights were replaced since.
        """
        names = {path.name: path for path in sorted(self.scores.glob("*.json"))}
        if not names:
            return ()
        first = min(names, key=lambda n: (n != _PREFERRED, not n.startswith("test."), n))
        scores = read_scores(names[first])
        split, _, weights = names[first].stem.partition(".")
        if not self.are_scores_current(split, weights):
            warnings.warn(f"{self.outdated(split, weights)} Its scores are left out.", stacklevel=2)
            return ()
        return scores

    def outdated(self, split: str, weights: str | int) -> str:
        """What to say of scores whose weights were replaced since."""
        what = f"has other {weights} weights than those its {split} set was scored with"
        return f"{self.path}: {what}, because training went on; score it again."


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: {"train": {"seed": 1}} -> {"train.seed": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


_MEND_LINE = "fix or remove this line"


def _read(path: Path, parse: Callable[[bytes], T], remedy: str) -> T | None:
    return _parse_at(str(path), path.read_bytes(), parse, remedy) if path.is_file() else None


def _parse_at(place: str, content: bytes, parse: Callable[[bytes], T], remedy: str) -> T:
    """What `parse` makes of some content; its error says where it was and what to do."""
    try:
        return parse(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: is damaged ({error}); {remedy}.") from error


def _parse_toml(content: bytes) -> dict[str, Any]:
    return tomllib.loads(content.decode())


def _parse_object(content: bytes, number: Callable[[str], float | None] = float) -> dict[str, Any]:
    value = json.loads(content, parse_float=number, parse_constant=number)
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {str(value)[:40]}")
    return value


def _parse_signature(content: bytes) -> dict[str, Any]:
    """The fields, and all of them again in one line."""
    fields = _parse_object(content)
    line = "|".join(f"{name}:{value}" for name, value in fields.items() if name != "signature")
    if fields.get("signature", line) != line:  # foreign loops need not write the line
        raise ValueError("its line and its fields differ")
    return fields


def _parse_entry(content: bytes) -> dict[str, Any]:
    """An entry of metrics; foreign loops may write NaN, which is not valid JSON."""
    entry = _parse_object(
        content, lambda text: value if math.isfinite(value := float(text)) else None
    )
    if not isinstance(entry.get("step"), int | float):
        raise ValueError(f"has no step: {str(entry)[:40]}")
    return entry

"""A run folder as reports and figures see it: plain files, whatever recipe wrote them."""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.record import RECORD, Record, read_record
from gradvac.analysis.similarities import SIMILARITY, Similarities, load_similarities

T = TypeVar("T")


class KnownDistances(NamedTuple):
    """How far apart tasks are known to be, whatever their gradients say.

    Attributes:
        tasks: Names of the tasks, in the order of rows and columns.
        values: `[T, T]`, symmetric; NaN where unknown.
        name: What is measured, as it stands in a sentence: "genealogical distance".
    """

    tasks: tuple[str, ...]
    values: NDArray[np.floating]
    name: str = "known distance"


@dataclass(frozen=True)
class Run:
    """Everything a run left to look at.

    Attributes:
        name: Name of its folder.
        path: The folder.
        record: What training recorded (`record.bin`); None if it did not.
        measured: What was measured on an aligned set (`similarity.npz`), one entry for every
            granularity and kind of lines; empty if nothing was.
        metrics: Entries of `metrics.jsonl`, such as {"step": 100, "train/loss": 2.3}; None for
            numbers that are not finite.
        scores: `scores/SET.WEIGHTS.json`, of the test set and best weights if they are there; see
            `by_task` in it. None without scores.
        settings: `config.toml` as it stands.
        signature: `signature.json`.
        families: Task -> family, "" where unknown.
        distances: Known distances of tasks; None if unknown.
        about: How `measured` was measured: JSON, as it stands in `similarity.npz`.
    """

    name: str
    path: Path
    record: Record | None
    measured: tuple[Similarities, ...]
    metrics: list[dict[str, Any]]
    scores: dict[str, Any] | None
    settings: str
    signature: dict[str, Any]
    families: dict[str, str]
    distances: KnownDistances | None
    about: str = ""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names: as measured, else as recorded, else as scored."""
        if self.measured:
            return self.measured[0].tasks
        if self.record is not None:
            return self.record.tasks
        return tuple(self.scores["by_task"]) if self.scores else ()


def load_run(
    path: str | Path,
    *,
    families: Mapping[str, str] | None = None,
    distances: KnownDistances | None = None,
    most_records: int | None = 2000,
) -> Run:
    """Read a run folder; warns and goes on without a record that cannot be read, if similarities
    were measured.

    Args:
        path: The folder.
        families: Task -> family; tasks not named are of family "".
        distances: Known distances of tasks, all or some.
        most_records: See `read_record`.

    Raises:
        ValueError: There is nothing to show, or a file is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: is no folder; give the folder of a run.")
    measured: tuple[Similarities, ...] = ()
    about = ""
    if (path / SIMILARITY).is_file():
        measured, about = load_similarities(path / SIMILARITY)
    record = None
    if (path / RECORD).is_file() and (path / RECORD).stat().st_size:
        try:
            record = read_record(path / RECORD, most=most_records)
        except ValueError as error:
            if not measured:
                raise
            warnings.warn(f"{error} Going on with {SIMILARITY} alone.", stacklevel=2)
    if record is None and not measured:
        raise ValueError(
            f"{path}: has neither {RECORD} nor {SIMILARITY}; train with train.record_every above "
            "0, or run `gradvac similarity` on a run with checkpoints."
        )
    run = Run(
        name=path.resolve().name,
        path=path,
        record=record,
        measured=measured,
        metrics=_read_metrics(path / "metrics.jsonl"),
        scores=_read_scores(path / "scores"),
        settings=_read(path / "config.toml", bytes.decode, "save it as UTF-8") or "",
        signature=_read(path / "signature.json", _parse, "remove it") or {},
        families=dict(families or {}),
        distances=distances,
        about=about,
    )
    run.families.update({task: "" for task in run.tasks if task not in run.families})
    return run


def _read(path: Path, parse: Callable[[bytes], T], remedy: str) -> T | None:
    return _parse_at(str(path), path.read_bytes(), parse, remedy) if path.is_file() else None


def _parse_at(where: str, content: bytes, parse: Callable[[bytes], T], remedy: str) -> T:
    """What `parse` makes of some content; its error says where it was and what to do."""
    try:
        return parse(content)
    except ValueError as error:
        raise ValueError(f"{where}: is damaged ({error}); {remedy}.") from error


def _parse(content: bytes, number: Callable[[str], float | None] = float) -> dict[str, Any]:
    """A JSON object."""
    found = json.loads(content, parse_float=number, parse_constant=number)
    if not isinstance(found, dict):
        raise ValueError(f"must be an object, got {str(found)[:40]}")
    return found


def _parse_entry(content: bytes) -> dict[str, Any]:
    """An entry of metrics; loops of others also write NaN, which other readers of JSON refuse."""
    entry = _parse(content, lambda text: value if math.isfinite(value := float(text)) else None)
    if not isinstance(entry.get("step"), int | float):
        raise ValueError(f"has no step: {str(entry)[:40]}")
    return entry


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """All entries; a line that is still being written is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [
        _parse_at(f"{path}, line {number}", line, _parse_entry, "mend or remove this line")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _read_scores(folder: Path) -> dict[str, Any] | None:
    found = {path.name: path for path in sorted(folder.glob("*.json"))}
    if not found:
        return None
    first = min(found, key=lambda n: (n != "test.best.json", not n.startswith("test."), n))
    return _read(found[first], _parse, "remove it, or score again")

"""A run folder as reports and figures see it: plain files, whatever recipe wrote them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.record import RECORD, Record, read_record
from gradvac.analysis.similarities import SIMILARITY, Similarities, load_similarities


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
        metrics: Entries of `metrics.jsonl`, such as {"step": 100, "train/loss": 2.3}.
        scores: `scores/SET.WEIGHTS.json`, of the test set and best weights if they are there; see
            `by_task` in it. None without scores.
        settings: `config.toml` as it stands.
        signature: `signature.json`.
        families: Task -> family, "" where unknown.
        distances: Known distances of tasks; None if unknown.
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
    """Read a run folder.

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
    record = None
    if (path / RECORD).is_file() and (path / RECORD).stat().st_size:
        record = read_record(path / RECORD, most=most_records)
    measured: tuple[Similarities, ...] = ()
    if (path / SIMILARITY).is_file():
        measured, _ = load_similarities(path / SIMILARITY)
    if record is None and not measured:
        raise ValueError(
            f"{path}: has neither {RECORD} nor {SIMILARITY}; train with train.record_every above "
            "0, or run `gradvac similarity` on a run with checkpoints."
        )
    signature = path / "signature.json"
    run = Run(
        name=path.resolve().name,
        path=path,
        record=record,
        measured=measured,
        metrics=_read_metrics(path / "metrics.jsonl"),
        scores=_read_scores(path / "scores"),
        settings=_read_text(path / "config.toml"),
        signature=json.loads(_read_text(signature) or "{}"),
        families=dict(families or {}),
        distances=distances,
    )
    run.families.update({task: "" for task in run.tasks if task not in run.families})
    return run


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """All entries; a line that is still being written is left out."""
    lines = _read_text(path).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _read_scores(folder: Path) -> dict[str, Any] | None:
    found = {path.name: path for path in sorted(folder.glob("*.json"))}
    if not found:
        return None
    first = min(found, key=lambda n: (n != "test.best.json", not n.startswith("test."), n))
    scores: dict[str, Any] = json.loads(_read_text(found[first]))
    return scores

"""A run folder as reports and figures see it: plain files, whatever recipe wrote them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.record import Record, read_record
from gradvac.analysis.run_files import RunFiles, TaskScores
from gradvac.analysis.similarities import Similarities, load_similarities


@dataclass(frozen=True, eq=False)
class KnownDistances:
    """Known distances between tasks, whatever their gradients say.

    Attributes:
        tasks: Names of the tasks, in the order of rows and columns.
        values: `[T, T]`, symmetric; NaN where unknown.
        name: What is measured, as it appears in a sentence: "genealogical distance".
    """

    tasks: tuple[str, ...]
    values: NDArray[np.floating]
    name: str = "known distance"


@dataclass(frozen=True)
class Run:
    """Everything a run left behind.

    Attributes:
        name: Name of its folder.
        path: The folder.
        record: What training recorded (`record.bin`); None if it did not.
        measured: What was measured on an aligned set (`similarity.npz`), one entry for every
            granularity and kind of lines; empty if nothing was.
        metrics: Entries of `metrics.jsonl`, such as {"step": 100, "train/loss": 2.3}; None for
            numbers that are not finite.
        scores: Of the test set and best weights if they are there; None without scores.
        settings: `config.toml` as it stands.
        signature: `signature.json`.
        families: Task -> family, "" where unknown.
        distances: Known distances of tasks; None if unknown.
        about: How `measured` was measured: JSON, as it stands in `similarity.npz`.
        names: Task -> its name in a sentence, such as its language; others by task name.
    """

    name: str
    path: Path
    record: Record | None
    measured: tuple[Similarities, ...]
    metrics: list[dict[str, Any]]
    scores: TaskScores | None
    settings: str
    signature: dict[str, Any]
    families: dict[str, str]
    distances: KnownDistances | None
    about: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names: as measured, else as recorded, else as scored."""
        if self.measured:
            return self.measured[0].tasks
        if self.record is not None:
            return self.record.tasks
        return tuple(self.scores.by_task) if self.scores else ()


def load_run(
    path: str | Path,
    *,
    families: Mapping[str, str] | None = None,
    distances: KnownDistances | None = None,
    most_records: int | None = 2000,
) -> Run:
    """Read a run folder.

    A record that cannot be read is skipped with a warning if similarities were measured.

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
        raise ValueError(f"{path}: is not a folder; give the folder of a run.")
    measured: tuple[Similarities, ...] = ()
    about = ""
    folder = RunFiles(path)
    if folder.similarity.is_file():
        measured, about = load_similarities(folder.similarity)
    record = None
    if folder.record.is_file() and folder.record.stat().st_size:
        try:
            record = read_record(folder.record, most=most_records)
        except ValueError as error:
            if not measured:
                raise
            warnings.warn(f"{error} Going on with {folder.similarity.name} alone.", stacklevel=2)
    if record is None and not measured:
        if folder.record.is_file():
            raise ValueError(
                f"{path}: {folder.record.name} holds no step so far; one is kept every "
                "train.record_every steps (a Recorder's `every`), and written some at a time."
            )
        raise ValueError(
            f"{path}: has neither {folder.record.name} nor {folder.similarity.name}; train with "
            "train.record_every above 0, or run `gradvac similarity` on a run with checkpoints."
        )
    run = Run(
        name=path.resolve().name,
        path=path,
        record=record,
        measured=measured,
        metrics=folder.read_metrics(),
        scores=next(iter(folder.read_scores()), None),
        settings=folder.read_settings(),
        signature=folder.read_signature(),
        families=dict(families or {}),
        distances=distances,
        about=about,
    )
    run.families.update({task: "" for task in run.tasks if task not in run.families})
    return run


def check_runs_differ(runs: Sequence[Run]) -> None:
    """Refuse no run at all, and two of one name."""
    names = [run.name for run in runs]
    if not runs:
        raise ValueError("runs: give at least one.")
    if len(set(names)) < len(names):
        raise ValueError(f"runs: two have the same name ({', '.join(names)}); rename one.")


def scores_by_one_metric(runs: Sequence[Run]) -> list[TaskScores | None]:
    """The scores of each run, by the metric of the first that was scored.

    None for a run that was not scored, or scored by another metric, which is not comparable.
    """
    metric = next((run.scores.metric for run in runs if run.scores is not None), None)
    return [
        run.scores if run.scores is not None and run.scores.metric == metric else None
        for run in runs
    ]

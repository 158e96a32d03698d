"""The files of a run folder.

    RUN/config.toml                     all settings, defaults written out
    RUN/signature.json                  what the numbers depend on
    RUN/metrics.jsonl                   one object per line: {"step": 100, "train/loss": ...}
    RUN/tensorboard/                    the same, if TensorBoard is installed
    RUN/record.bin                      similarities and what the rule did: gradvac.analysis.record
    RUN/similarity.npz                  similarities on an aligned set
    RUN/checkpoints/step-00001000/      gradvac.lab.training.checkpoint
    RUN/best.safetensors                weights to use; also averaged.safetensors
    RUN/vocabulary.model, RUN/encoder/  what the run needs wherever it is moved
    RUN/manifest.json                   checksums of these: gradvac.lab.runs.manifest
    RUN/scores/SET.WEIGHTS.json         scores of a set with those weights
    RUN/scores/SET.WEIGHTS.npz          their counts by sentence: gradvac.lab.runs.sentences
    RUN/scores/SET.WEIGHTS.TASK.txt     the outputs that were scored
    RUN/.lock                           held by the process that trains here; others that write
                                        have .similarity.lock and .scores.lock

A damaged file gives an error that says which one, what is wrong, and what to do.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradvac.lab.runs.files import FolderLock, remove_leftovers, write_bytes, write_text
from gradvac.lab.runs.manifest import read_manifest, verify_manifest, write_manifest
from gradvac.lab.runs.scores import TaskScores, read_scores, scored_weights, write_scores

if TYPE_CHECKING:
    from gradvac.lab.runs.sentences import SentenceCounts

PREPARED_MANIFEST = "prepared.json"  # what describes a folder of prepared data
_STEP = "step-"
_WEIGHTS = ".safetensors"
_LONGEST_HEADER = 100_000_000  # of weights; safetensors' own limit
_PREFERRED = "test.best.json"
_PUT_BACK = "the command that trained the run, given again, puts it back"

T = TypeVar("T")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: Where it is.
    """

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
    def tensorboard(self) -> Path:
        """The log for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def record(self) -> Path:
        """What training recorded of its alignments."""
        return self.path / "record.bin"

    @property
    def similarity(self) -> Path:
        """What was measured on an aligned set."""
        return self.path / "similarity.npz"

    @property
    def vocabulary(self) -> Path:
        """The SentencePiece model of a translation run."""
        return self.path / "vocabulary.model"

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
        metadata = _parse_at(str(path), header, _parse_object, remedy).get("__metadata__", {})
        return str(metadata.get("sha256", ""))

    def scores_of(self, split: str, weights: str | int) -> Path:
        """Scores of a set."""
        return self.scores / f"{split}.{weights}.json"

    def counts_of(self, split: str, weights: str | int) -> Path:
        """The counts behind the scores of a set, by sentence."""
        return self.scores / f"{split}.{weights}.npz"

    def outputs_of(self, split: str, weights: str | int, task: str) -> Path:
        """The outputs of a set that were scored, one line each."""
        return self.scores / f"{split}.{weights}.{task}.txt"

    def are_scores_current(self, split: str, weights: str | int) -> bool:
        """Whether scores are of the weights that are there now, as far as can be known."""
        now = self.identify_weights(weights)
        return scored_weights(self.scores_of(split, weights)) in ("", now) or not now

    def save_files(self, files: Mapping[str, bytes]) -> None:
        """Save copies of files that the run needs wherever it is moved; damaged ones are repaired.

        Only the holder of the lock may.

        Args:
            files: Name -> contents.

        Raises:
            ValueError: The run was begun with others.
        """
        is_new, saved = not self.kept_checkpoints(), read_manifest(self.path)
        for name, content in files.items():
            path, digest = self.path / name, hashlib.sha256(content).hexdigest()
            there = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else digest
            if not is_new and saved.get(name, {"sha256": there})["sha256"] != digest:
                raise ValueError(
                    f"run: {self.path} was trained with another {name}; choose a new run folder."
                )
            if there != digest or not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, content)
        if files:
            write_manifest(self.path, files)

    def read_saved(self, name: str) -> bytes:
        """Read one of the files that were saved with the run, verified.

        Raises:
            ValueError: It is missing, or not the one the run was begun with.
        """
        verify_manifest(self.path, [name], remedy=_PUT_BACK)
        return (self.path / name).read_bytes()

    def verify_saved(self) -> None:
        """Compare all files that were saved with the run with their checksums."""
        verify_manifest(self.path, remedy=_PUT_BACK)

    def is_run(self) -> bool:
        """Whether there is a run."""
        return self.config.is_file()

    def lock(self, busy: str | None = None) -> FolderLock:
        """The right to write here; `busy` is the error if another process has it."""
        default = f"run: another process is at work in {self.path}; wait for it to end."
        return FolderLock(self.path, busy=busy or default)

    def lock_beside(self, what: str) -> FolderLock:
        """The right to write what can be written during training: "similarity", ..."""
        busy = f"run: another process writes {what} in {self.path}; wait for it to end."
        return FolderLock(self.path, busy=busy, name=f".{what}.lock")

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

    def write_scored(
        self,
        split: str,
        weights: str | int,
        *,
        outputs: Mapping[str, str],
        counts: Sequence[SentenceCounts],
        scores: Sequence[TaskScores],
        details: Mapping[str, Any],
        of_weights: str,
    ) -> None:
        """Write the outputs of a set and their scores; only the holder of the lock may.

        Args:
            split: Name of the set.
            weights: Which weights were used.
            outputs: Task -> what was scored.
            counts: What the scores are made of, by sentence.
            scores: One entry for every metric, the one to show first.
            details: What else the recipe wants to keep, ready for JSON.
            of_weights: What identifies the weights; see `write_scores`.
        """
        from gradvac.lab.runs.sentences import write_counts  # NumPy, which --help does without

        self.scores.mkdir(exist_ok=True)
        remove_leftovers(self.scores)
        # Old scores are removed first and new ones written last: scores always match the outputs.
        self.scores_of(split, weights).unlink(missing_ok=True)
        for task, text in outputs.items():
            write_text(self.outputs_of(split, weights, task), text)
        write_counts(self.counts_of(split, weights), counts)
        write_scores(self.scores_of(split, weights), scores, details, of_weights=of_weights)

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


def other_data(run: Path, prepared: Path, recipe: str) -> ValueError:
    """The error for a folder that does not hold the prepared data of a run."""
    return ValueError(
        f"data.prepared: {prepared} does not hold the data of {run}; run `gradvac {recipe} "
        f"prepare` with its {RunFolder(run).config.name}, or give data.prepared=..."
    )


def other_settings(prepared: Path, changed: Sequence[str], recipe: str) -> ValueError:
    """The error for data prepared with other settings, which another run may need."""
    return ValueError(
        f"data.prepared: {prepared} was prepared with other settings ({', '.join(changed)}); "
        f"choose another folder, or replace it with `gradvac {recipe} prepare`."
    )


def prepared_sizes(run: RunFolder) -> dict[str, int]:
    """Pair -> number of training pairs that the preparation of a run's data wrote down.

    Empty if the folder of prepared data is gone, or of another kind.
    """
    try:
        prepared = Path(run.read_table()["data"]["prepared"])
        manifest = json.loads((prepared / PREPARED_MANIFEST).read_bytes())
        return {pair: int(size) for pair, size in manifest["sizes"]["train"].items()}
    except (AttributeError, KeyError, TypeError, OSError, ValueError):
        return {}


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

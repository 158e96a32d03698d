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
    RUN/scores/SET.WEIGHTS.npz          their counts by sentence: gradvac.lab.runs.counts
    RUN/scores/SET.WEIGHTS.TASK.txt     the outputs that were scored
    RUN/.lock                           held by the process that trains here; others that write
                                        have .similarity.lock and .scores.lock

A damaged file gives an error that says which one, what is wrong, and what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradvac.analysis.run_files import RunFiles, TaskScores, write_scores
from gradvac.lab.runs.manifest import read_manifest, verify_manifest, write_manifest
from gradvac.utils.files import folder_lock, remove_leftovers, write_bytes, write_text

if TYPE_CHECKING:
    from gradvac.lab.runs.counts import SentenceCounts

PREPARED_METADATA = "prepared.json"  # what describes a folder of prepared data
_PUT_BACK = "the command that trained the run, given again, puts it back"


@dataclass(frozen=True)
class RunFolder(RunFiles):
    """The folder of one run, for those who write in it; `RunFiles` has what reports read."""

    @property
    def tensorboard(self) -> Path:
        """The log for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def vocabulary(self) -> Path:
        """The SentencePiece model of a translation run."""
        return self.path / "vocabulary.model"

    def counts_of(self, split: str, weights: str | int) -> Path:
        """The counts behind the scores of a set, by sentence."""
        return self.scores / f"{split}.{weights}.npz"

    def outputs_of(self, split: str, weights: str | int, task: str) -> Path:
        """The outputs of a set that were scored, one line each."""
        return self.scores / f"{split}.{weights}.{task}.txt"

    def save_files(self, files: Mapping[str, bytes]) -> None:
        """Save copies of files that the run needs wherever it is moved; damaged ones are repaired.

        Only the holder of the lock may.

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

    def lock(self, busy: str | None = None) -> AbstractContextManager[None]:
        """The right to write here; `busy` is the error if another process has it."""
        default = f"run: another process is at work in {self.path}; wait for it to end."
        return folder_lock(self.path, busy=busy or default)

    def lock_beside(self, what: str) -> AbstractContextManager[None]:
        """The right to write what can be written during training: "similarity", ..."""
        busy = f"run: another process writes {what} in {self.path}; wait for it to end."
        return folder_lock(self.path, busy=busy, name=f".{what}.lock")

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
        from gradvac.lab.runs.counts import write_counts  # NumPy, which --help does without

        self.scores.mkdir(exist_ok=True)
        remove_leftovers(self.scores)
        # Old scores are removed first and new ones written last: scores always match the outputs.
        self.scores_of(split, weights).unlink(missing_ok=True)
        for task, text in outputs.items():
            write_text(self.outputs_of(split, weights, task), text)
        write_counts(self.counts_of(split, weights), counts)
        write_scores(self.scores_of(split, weights), scores, details, of_weights=of_weights)


def prepared_sizes(run: RunFolder) -> dict[str, int]:
    """Pair -> number of training pairs that the preparation of a run's data wrote down.

    Empty if the folder of prepared data is gone, or of another kind.
    """
    try:
        prepared = Path(run.read_table()["data"]["prepared"])
        manifest = json.loads((prepared / PREPARED_METADATA).read_bytes())
        return {pair: int(size) for pair, size in manifest["sizes"]["train"].items()}
    except (AttributeError, KeyError, TypeError, OSError, ValueError):
        return {}

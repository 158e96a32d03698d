"""The run folder: who owns it, what it is, and what happened.

RUN/config.toml       all settings, defaults written out
RUN/signature.json    what the numbers depend on
RUN/metrics.jsonl     one object per line: {"step": 100, "train/loss": ...}
RUN/tensorboard/      the same, if installed
RUN/record.bin        similarities and what the rule did: see gradvac.analysis.record
RUN/checkpoints/      see checkpoint.py
RUN/.lock             held by the process that trains
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from numpy.typing import NDArray

from gradvac.training import config
from gradvac.training.config import ConfigError
from gradvac.training.settings import EXTENSIBLE, TECHNICAL, RunConfig
from gradvac.training.signature import Signature
from gradvac.training.writers import Writer, open_writers

CONFIG, SIGNATURE, METRICS = "config.toml", "signature.json", "metrics.jsonl"


class RunLog:
    """The folder of one run, owned by this process until `close`.

    Args:
        run: The folder; made if it does not exist.
        settings: What the run is trained with.
        say: Told what the user should know.

    Raises:
        ValueError: Another process trains in this folder.
    """

    def __init__(
        self, run: Path, settings: RunConfig, *, say: Callable[[str], None] = print
    ) -> None:
        self.run, self._settings, self._say = run, settings, say
        self._writers: list[Writer] = []
        run.mkdir(parents=True, exist_ok=True)
        # flock and its like: the system releases it, however the process ends.
        self._lock = filelock.FileLock(run / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(
                f"run: another process is training in {run}; wait for it, or choose another folder."
            ) from None
        self._metrics = (run / METRICS).open("ab", buffering=0)

    def check_settings(self) -> None:
        """Refuse to continue a run as another experiment.

        Raises:
            ConfigError: A setting differs that may not change within a run; one line each.
        """
        former = config.load(type(self._settings), self.run / CONFIG)
        changed = config.differences(former, self._settings)
        allowed = {f"train.{key}" for key in (*TECHNICAL, *EXTENSIBLE)}
        refused = [key for key in changed if key not in allowed]
        if refused:
            lines = [
                f"{key}: the run in {self.run} has {changed[key][0]!r}, now {changed[key][1]!r} "
                "was asked for; a run keeps it. Choose another folder."
                for key in refused
            ]
            raise ConfigError("\n".join(lines))
        for key, (old, new) in changed.items():
            self._say(f"{key}: {old!r} until now, {new!r} from here on.")

    def begin(self, *, step: int, metrics_bytes: int) -> None:
        """Start writing after `step`; what a killed process logged beyond it is removed.

        Args:
            step: Of the checkpoint that is continued from; 0 for a new run.
            metrics_bytes: `position()` as it was then.
        """
        if self.position() < metrics_bytes:
            self._say(f"{METRICS} is shorter than it was; entries before step {step} are missing.")
        else:
            os.truncate(self.run / METRICS, metrics_bytes)
        _write(self.run / CONFIG, config.dump(self._settings))
        self._writers = open_writers(self.run, self._settings, step=step, say=self._say)

    def sign(self, signature: Signature) -> None:
        """Write the signature."""
        fields = signature.to_dict() | {"signature": str(signature)}
        _write(self.run / SIGNATURE, json.dumps(fields, indent=2) + "\n")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record; at once visible to readers."""
        # JSON has no NaN: what is not finite is null.
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, **plain}).encode() + b"\n"
        try:
            while line:  # a nearly full disk takes a part, then nothing
                line = line[self._metrics.write(line) :]
        except OSError as error:
            what = f"{os.strerror(error.errno or 0)}: {self.run / METRICS}; checkpoints are intact"
            raise OSError(error.errno, what) from error
        for writer in self._writers:
            writer.write(step, values)

    def draw(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Show a picture, `[height, width, 3]`, where that is possible."""
        for writer in self._writers:
            writer.draw(step, name, pixels)

    def position(self) -> int:
        """Bytes of `metrics.jsonl`, which are on disk once this returns."""
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def close(self) -> None:
        """Close all writers and release the folder."""
        try:
            for writer in self._writers:
                writer.close()
        finally:
            self._metrics.close()
            self._lock.release()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of a run; a line that is still being written is left out."""
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _write(path: Path, text: str) -> None:
    """Replace a small file at once."""
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

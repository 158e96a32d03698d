"""The log of a run: who owns its folder, what the run is, and what happened.

`gradvac.lab.runs.folder` lists the files.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.files import write_json, write_text
from gradvac.lab.runs.kept import keep_file
from gradvac.lab.training import config
from gradvac.lab.training.config import ConfigError
from gradvac.lab.training.ranks import Job
from gradvac.lab.training.settings import EXTENSIBLE, TECHNICAL, TECHNICAL_ELSEWHERE, RunConfig
from gradvac.lab.training.signature import Signature
from gradvac.lab.training.weights import CheckpointError
from gradvac.lab.training.writers import Writer, open_writers


class RunLog:
    """The folder of one run, owned by this process until `close`.

    Args:
        run: The folder; made if it does not exist.
        settings: What the run is trained with.
        say: Called with messages for the user.

    Raises:
        ValueError: Another process trains in this folder.
    """

    def __init__(
        self, run: Path, settings: RunConfig, *, say: Callable[[str], None] = print
    ) -> None:
        self.run, self._settings, self._say = run, settings, say
        self.folder = RunFolder(run)
        self._writers: list[Writer] = []
        self._lock = self.folder.lock(
            f"run: another process is training in {run}; wait for it, or choose another folder."
        )
        self._lock.acquire()
        self._place = _place(run)
        self._metrics = self.folder.metrics.open("ab", buffering=0)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Keep copies of files that the run needs wherever its folder is moved: see `runs.kept`."""
        for name, content in files.items():
            is_new = not self.folder.kept_checkpoints()
            keep_file(self.run / name, content, is_new=is_new)

    def require_place(self) -> None:
        """Refuse to continue if another folder has taken the place of ours.

        Raises:
            CheckpointError: The run folder was moved away.
        """
        if _place(self.run) != self._place:
            raise CheckpointError(
                f"run: {self.run} was moved, removed or replaced during training. What was saved "
                "is where the folder is now; move it back, and start the same command again."
            )

    def check_settings(self) -> None:
        """Refuse to continue a run as another experiment.

        Raises:
            ConfigError: A setting differs that may not change within a run; one line each.
        """
        former = config.load(type(self._settings), self.folder.config)
        changed = config.differences(former, self._settings)
        allowed = {*TECHNICAL_ELSEWHERE, *(f"train.{key}" for key in (*TECHNICAL, *EXTENSIBLE))}
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
            step: Step of the checkpoint that the run continues from; 0 for a new run.
            metrics_bytes: `position()` as it was then.
        """
        if self.position() < metrics_bytes:
            name = self.folder.metrics.name
            self._say(f"{name} is shorter than it was; entries before step {step} are missing.")
        else:
            os.truncate(self.folder.metrics, metrics_bytes)
        write_text(self.folder.config, config.seal(config.dump(self._settings)))
        self._writers = open_writers(self.run, self._settings, step=step, say=self._say)

    def sign(self, signature: Signature) -> None:
        """Write the signature."""
        self.require_place()
        fields = signature.to_dict() | {"signature": str(signature)}
        write_json(self.folder.signature, fields)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one entry, which readers see at once."""
        # JSON has no NaN: what is not finite is null.
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, **plain}).encode() + b"\n"
        try:
            while line:  # a nearly full disk takes a part, then nothing
                line = line[self._metrics.write(line) :]
        except OSError as error:
            what = f"{os.strerror(error.errno or 0)}: {self.folder.metrics}; checkpoints are intact"
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
        with ExitStack() as stack:  # whatever one of them raises, all are closed
            stack.callback(self._lock.release)
            stack.callback(self._metrics.close)
            for writer in self._writers:
                stack.callback(writer.close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with after(error):
            self.close()


class SilentLog(RunLog):
    """The log of a process that writes nothing, because the first of its job does."""

    def __init__(self, run: Path, settings: RunConfig) -> None:
        self.run, self._settings, self.folder = run, settings, RunFolder(run)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Leave it to the first process, like everything below."""

    def require_place(self) -> None:
        """See `keep`."""

    def check_settings(self) -> None:
        """See `keep`."""

    def begin(self, *, step: int, metrics_bytes: int) -> None:
        """See `keep`."""

    def sign(self, signature: Signature) -> None:
        """See `keep`."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `keep`."""

    def draw(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """See `keep`."""

    def position(self) -> int:
        """Nothing is written here."""
        return 0

    def close(self) -> None:
        """Nothing is open."""


def open_log(run: Path, settings: RunConfig, job: Job, *, say: Callable[[str], None]) -> RunLog:
    """The log of a run, for one of the processes that train it."""
    return RunLog(run, settings, say=say) if job.is_first else SilentLog(run, settings)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of a run; a line that is still being written is left out."""
    return RunFolder(run).read_metrics()


@contextmanager
def after(first: BaseException | None) -> Iterator[None]:
    """Close something, possibly after an error, which a failure to close must not hide."""
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        first.add_note(f"Closing failed too: {error}")


def _place(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

"""The log of a run: metrics and what else training writes, sums between entries, progress shown.

`gradvac.lab.runs.folder` lists the files.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import config
from gradvac.lab.training.config import ConfigError
from gradvac.lab.training.environment import peak_memory
from gradvac.lab.training.settings import EXTENSIBLE, TECHNICAL, TECHNICAL_ELSEWHERE, RunConfig
from gradvac.lab.training.writers import Writer, open_writers
from gradvac.utils.files import write_json, write_text
from gradvac.utils.hints import log_to

logger = logging.getLogger(__name__)
BY_TASK = "by_task"  # of a step's sums: losses and tokens of every task, [2, T]


class RunLog:
    """The folder of one run, owned by this process until `close`.

    Args:
        run: The folder; made if it does not exist.
        settings: What the run is trained with.
        is_first: Whether this is the first of the processes that train the run, which alone
            writes; in the others everything below does nothing.

    Raises:
        ValueError: Another process trains in this folder.
    """

    def __init__(self, run: Path, settings: RunConfig, *, is_first: bool = True) -> None:
        self.run, self._settings, self._is_first = run, settings, is_first
        self.folder = RunFolder(run)
        self._writers: list[Writer] = []
        self._open = ExitStack()
        if is_first:
            busy = "another process is training in"
            self._open.enter_context(
                self.folder.lock(f"run: {busy} {run}; wait for it, or choose another folder.")
            )
            self._metrics = self.folder.metrics.open("ab", buffering=0)
            self._open.enter_context(self._metrics)

    def save_files(self, files: Mapping[str, bytes]) -> None:
        """Save copies of files that the run needs wherever its folder is moved."""
        if self._is_first:
            self.folder.save_files(files)

    def check_settings(self) -> None:
        """Check that the run is not continued as another experiment.

        Raises:
            ConfigError: A setting differs that may not change within a run; one line each.
        """
        before = config.load(type(self._settings), self.folder.config)
        changed = config.compare_settings(before, self._settings)
        allowed = {*TECHNICAL_ELSEWHERE, *(f"train.{key}" for key in (*TECHNICAL, *EXTENSIBLE))}
        lines = [
            f"{key}: the run in {self.run} has {old!r}, now {new!r} was asked for; a run keeps it. "
            "Choose another folder."
            for key, (old, new) in changed.items()
            if key not in allowed
        ]
        if lines:
            raise ConfigError("\n".join(lines))
        for key, (old, new) in changed.items():
            logger.info("%s: %r until now, %r from here on.", key, old, new)

    def start_writing(self, *, step: int, metrics_bytes: int) -> None:
        """Start writing after `step`; what a killed process logged beyond it is removed.

        Args:
            step: Step of the checkpoint that the run continues from; 0 for a new run.
            metrics_bytes: `position()` as it was then.
        """
        if not self._is_first:
            return
        if self.position() < metrics_bytes:
            logger.warning(
                "%s is shorter than it was; entries before step %d are missing.",
                self.folder.metrics.name,
                step,
            )
        else:
            os.truncate(self.folder.metrics, metrics_bytes)
        write_text(self.folder.config, config.dump(self._settings))
        self._writers = open_writers(self.run, self._settings, step=step)
        for writer in self._writers:
            self._open.callback(writer.close)

    def sign(self, signature: Mapping[str, str]) -> None:
        """Write the signature: see `run_signature`."""
        if self._is_first:
            write_json(self.folder.signature, dict(signature))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one entry, which readers see at once."""
        if not self._is_first:
            return
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
        if not self._is_first:
            return 0
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def close(self) -> None:
        """Close all writers and release the folder, whatever one of them raises."""
        self._open.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with after(error):
            self.close()


@contextmanager
def after(first: BaseException | None) -> Iterator[None]:
    """Close something, possibly after an error, which a failure to close must not hide."""
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        first.add_note(f"Closing failed too: {error}")


class Meters:
    """What happened since the last log entry, and how long training took in all.

    Part of the checkpoint, so that a resumed run logs what an uninterrupted one would have.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._num_steps = 0
        self._seconds_before, self.seconds = 0.0, 0.0
        self._mark = time.perf_counter()

    def add(self, sums: Mapping[str, Tensor | float], num_tokens: int, bad: Tensor) -> None:
        """Add a step: sums over its tokens, how many those were, and whether it was skipped."""
        for name, value in {**sums, "tokens": float(num_tokens)}.items():
            new = value.detach().double() if isinstance(value, Tensor) else value
            before = self._sums.get(name, self._zero)
            self._sums[name] = before + torch.where(bad, 0.0, self._zero + new)
        self._skipped = self._skipped + bad
        self._in_a_row = (self._in_a_row + 1) * bad
        self._num_steps += 1

    @property
    def bad_in_a_row(self) -> int:
        """Steps skipped without a good one since; waits for the device."""
        return int(self._in_a_row)

    @property
    def skipped(self) -> int:
        """Steps skipped in the whole run; waits for the device."""
        return int(self._skipped)

    def pause(self) -> None:
        """Stop the clock once the device is done: what follows is not training."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - self._mark

    def resume(self) -> None:
        """Start the clock again."""
        self._mark = time.perf_counter()

    def read(self, tasks: Sequence[str]) -> tuple[dict[str, float], float]:
        """Means per token since the last reading, tokens/s, and seconds per step; resets.

        Also the loss per token of the tasks that had any, the seconds of the whole run, and the
        most memory this process needed, in GiB.
        """
        by_task = self._sums.pop(BY_TASK, self._zero.expand(2, len(tasks))).tolist()
        sums = {name: float(value) for name, value in self._sums.items()}
        self.pause()
        self.resume()
        seconds = max(self.seconds - self._seconds_before, 1e-9)
        tokens = sums.pop("tokens")
        means = {name: value / tokens if tokens else float("nan") for name, value in sums.items()}
        known = zip(tasks, *by_task, strict=True)
        means |= {f"loss/{task}": loss / own for task, loss, own in known if own}
        means |= {
            "tokens_per_second": tokens / seconds,
            "seconds": self.seconds,
            "peak_memory": peak_memory(self._device),
        }
        per_step = seconds / self._num_steps
        self._sums, self._num_steps, self._seconds_before = {}, 0, self.seconds
        return means, per_step

    def state_dict(self) -> dict[str, Any]:
        """Everything except the clock's mark."""
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "skipped": self.skipped,
            "in_a_row": self.bad_in_a_row,
            "num_steps": self._num_steps,
            "seconds": self.seconds,
            "seconds_before": self._seconds_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._sums = {name: value.to(self._device) for name, value in state["sums"].items()}
        self._skipped = torch.tensor(state["skipped"], device=self._device)
        self._in_a_row = torch.tensor(state["in_a_row"], device=self._device)
        self._num_steps = state["num_steps"]
        self.seconds, self._seconds_before = state["seconds"], state["seconds_before"]
        self.resume()


class Display:
    """A progress bar with loss, tokens/s and time left; without a terminal, a line per log entry.

    While it is entered (`with`), messages of the package's log are shown too, above the bar.

    Args:
        console: Where to write; None: standard output.
        quiet: Show only messages.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._quiet = quiet
        self._progress: Progress | None = None
        self._messages: list[AbstractContextManager[None]] = []  # a display may be entered twice

    def show_message(self, message: str) -> None:
        """Print a message; above the bar, if there is one."""
        self.console.print(message, markup=False)

    def open(self, step: int, max_steps: int) -> None:
        """Begin at a step."""
        self._max_steps = max_steps
        if self._quiet or not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=max_steps, completed=step, shown="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def show(self, step: int, values: Mapping[str, float], *, seconds_left: float) -> None:
        """Show a log entry."""
        shown = (
            f"loss {values['train/loss']:.4f}  lr {values['train/lr']:.2e}  "
            f"{values['train/tokens_per_second']:,.0f} tokens/s  {_duration(seconds_left)} left"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=shown)
        elif not self._quiet:
            self.show_message(f"step {step}/{self._max_steps}  {shown}")

    def close(self) -> None:
        """Stop the bar where it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "Display":
        self._messages.append(log_to(self.show_message))
        self._messages[-1].__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._messages.pop().__exit__(None, None, None)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

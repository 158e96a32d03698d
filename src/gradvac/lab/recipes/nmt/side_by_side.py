"""Two trainings as two processes of one thread each, with one display.

On two cores that is as fast as it gets: threads of one small training meet after every little
product, and where other work holds one of them up, all wait. Two processes never wait for each
other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradvac.lab.training import CheckpointError, Display, DivergedError

Job = Callable[[Display], Any]
# One thread each. And glibc would give the memory of every step back to the system and ask for it
# again in the next, which took a fifth of the time (docs/log.md).
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
_SILENT = "its process ended without a word"


def run_side_by_side(jobs: Mapping[str, Job], console: Console) -> dict[str, Any]:
    """Run jobs at the same time, each in a process of its own, and show how far they are.

    Args:
        jobs: Name -> what to do, given a display; must be picklable, and so must what it returns.
        console: Where to show it.

    Returns:
        Name -> what the job returned.

    Raises:
        ValueError: A job failed; says which and why. The others were done to their end.
        KeyboardInterrupt: Somebody stopped them; they have saved where they stand.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, str] = {}
    processes: list[Any] = []
    with _stops_as_interrupts():
        try:
            with _environment():
                for name, job in jobs.items():
                    here, there = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(job, there), name=name)
                    process.start()
                    there.close()  # so that the pipe ends with the process
                    pipes[here] = name
                    processes.append(process)
            results, errors = _listen(pipes, console)
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()  # they save where they stand
            for process in processes:
                process.join()
            raise
    for process in processes:
        process.join()
    silent = {name: _SILENT for name in jobs if name not in results and name not in errors}
    if errors or silent:
        raise ValueError("; ".join(f"{name}: {what}" for name, what in (errors | silent).items()))
    return results


def _listen(pipes: dict[Any, str], console: Console) -> tuple[dict[str, Any], dict[str, str]]:
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn())
    with Progress(
        *columns, TextColumn("{task.fields[shown]}"), TimeElapsedColumn(), console=console
    ) as progress:
        bars = {name: progress.add_task(name, total=None, shown="") for name in pipes.values()}
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                name = pipes[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    del pipes[pipe]
                    continue
                if kind == "bar":
                    progress.update(bars[name], **content)
                elif kind == "say":
                    progress.console.print(f"{name}: {content}", markup=False)
                elif kind == "result":
                    results[name] = content
                else:
                    errors[name] = content
    return results, errors


def _work(job: Job, pipe: Connection) -> None:
    """What a process does."""
    try:
        told = ("result", job(_Sender(pipe)))
    except (ValueError, OSError, CheckpointError, DivergedError) as error:
        told = ("error", str(error))
    with suppress(OSError):  # nobody listens any more
        pipe.send(told)
    pipe.close()


class _Sender(Display):
    """A display in another process."""

    def __init__(self, pipe: Connection) -> None:
        with open(os.devnull, "w") as nowhere:
            super().__init__(Console(file=nowhere), quiet=True)
        self.console.quiet = True
        self._pipe, self._is_heard = pipe, True

    def _send(self, kind: str, content: Any) -> None:
        try:
            self._pipe.send((kind, content))
        except OSError:  # whoever started us was killed: save, and end too
            if self._is_heard:
                self._is_heard = False
                os.kill(os.getpid(), signal.SIGTERM)

    def say(self, message: str) -> None:
        self._send("say", message)

    def open(self, step: int, max_steps: int) -> None:
        self._send("bar", {"completed": step, "total": max_steps})

    def advance(self, step: int) -> None:
        if step % 10 == 0:
            self._send("bar", {"completed": step})

    def show(self, step: int, values: Mapping[str, float], *, seconds_left: float) -> None:
        shown = f"loss {values['train/loss']:.3f}, {seconds_left:.0f} s left"
        self._send("bar", {"completed": step, "shown": shown})


@contextmanager
def _stops_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C, so that no process is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    former = {}
    with suppress(ValueError):  # not the main thread
        for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                former[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _environment() -> Iterator[None]:
    """Variables for processes that are started here, unless the user has set them."""
    new = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]

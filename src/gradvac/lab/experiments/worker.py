"""One run of a sweep, in a process of its own: train, score, measure, and write how it went.

`Processes` forks the runs from a server that has imported torch and the recipe already, which takes
longer than many a small run; only the runs themselves touch a GPU. A run that crashes takes nothing
else with it, and one whose sweep is gone saves and leaves.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, Protocol

from gradvac.lab.recipes import recipe_named
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import RunConfig, config
from gradvac.lab.training.config import write_value
from gradvac.utils.files import folder_lock, write_json
from gradvac.utils.hints import install_line, log_to

INTERRUPTED = 130  # exit status
STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_POLL = 0.2  # seconds between two looks at processes and jobs

logger = logging.getLogger(__name__)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as Ctrl-C does, unless they are ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = {
        number: signal.signal(number, interrupt)
        for number in STOPS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def load_settings(recipe: str, base: str | Path, settings: Mapping[str, Any]) -> RunConfig:
    """The config of a run.

    Raises:
        ConfigError: With one line for each mistake.
    """
    overrides = [f"{key}={write_value(value)}" for key, value in settings.items()]
    return config.load(recipe_named(recipe).settings, base, overrides)


def work(
    *,
    recipe: str,
    base: str,
    settings: dict[str, Any],
    settings_hash: str,
    run: str,
    score: Sequence[str],
    measure: Sequence[str],
    result: str,
) -> int:
    """Train, score and measure one run, and write how it ended; an exit status.

    Args:
        recipe: As `recipe_named` takes it.
        base: File of the config that is varied.
        settings: Setting -> value.
        settings_hash: Of all settings: the result counts for these alone.
        run: The run folder.
        score: Sets to score when it is finished.
        measure: Aligned sets to measure similarities on then.
        result: File to write.
    """
    found, loaded = recipe_named(recipe), load_settings(recipe, base, settings)
    _wait_for(Path(run))
    done = found.train(loaded, Path(run))
    if done.reason == "interrupted":
        return INTERRUPTED
    if done.reason != "paused":
        folder = RunFolder(Path(run))
        for split in score:
            is_scored = folder.scores_of(split, "best").is_file()
            if not is_scored or not folder.are_scores_current(split, "best"):
                found.score(run, split=split, device=loaded.train.device)
                logger.info("Scored on the %s set.", split)
        for split in measure:  # only what is not there yet
            found.measure(run, split=split, device=loaded.train.device)
            logger.info("Measured on the %s set.", split)
    ended = {"reason": done.reason, "step": done.step, "seconds": done.seconds}
    write_json(Path(result), ended | {"hash": settings_hash})
    return 0


def _wait_for(run: Path) -> None:
    """Wait for a run of a sweep that was killed, which may still be saving."""
    try:
        with folder_lock(run, busy="busy"):
            return
    except ValueError:
        logger.info("Waiting for another process that writes in %s.", run)
    with folder_lock(run, busy=None):
        pass


def work_from_file() -> None:
    """Do what the file says that is named on the command line."""
    _leave_by_signals()
    with log_to(partial(print, flush=True)):
        sys.exit(work(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


def _leave_by_signals() -> None:
    """Let all signals that ask a run to stop end it alike; while it trains, it saves first."""

    def leave(*_: object) -> None:
        sys.exit(INTERRUPTED)

    for number in (signal.SIGINT, *STOPS):
        signal.signal(number, leave)


class Launcher(Protocol):
    """Runs workers.

    Attributes:
        jobs: How many at a time; no more may be started.
    """

    jobs: int

    def start(self, task: Path, log: Path) -> None:
        """Begin the worker of a file; what it prints goes to `log`."""

    def wait_for_one(self) -> dict[Path, int]:
        """Wait until a worker ends; the files of all that have ended, with exit status."""

    def stop(self) -> None:
        """Let running workers save and leave; nothing can be started any more."""


class Processes:
    """A process of this machine for each run.

    Args:
        jobs: How many at a time.
        recipe: What they will train, to be imported once for all of them.
    """

    def __init__(self, jobs: int, recipe: str | None = None) -> None:
        self.jobs, self._has_server = jobs, False
        self._started: dict[Path, multiprocessing.context.ForkServerProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        modules = [__name__, "torch._dynamo"]  # which every optimizer imports
        if recipe is not None:
            found = recipe_named(recipe)
            modules += [one.__module__ for one in (found.train, found.score, found.measure)]
        self._context.set_forkserver_preload(modules)

    def start(self, task: Path, log: Path) -> None:
        """Begin."""
        if not self._has_server:
            _start_server()
            self._has_server = True
        process = self._context.Process(target=_work_in_child, args=(task, log, Path.cwd()))
        process.start()
        self._started[task] = process

    def wait_for_one(self) -> dict[Path, int]:
        """Wait until a process ends."""
        connection.wait([process.sentinel for process in self._started.values()])
        ended = {task: one.exitcode for task, one in self._started.items() if not one.is_alive()}
        for task in ended:
            self._started.pop(task).close()
        return {task: 1 if status is None else status for task, status in ended.items()}

    def stop(self) -> None:
        """Ask all processes, and those that they have started, to save and leave; wait for them.

        By another signal than a cluster would send to all of them: of two alike, the second kills.
        """
        for process in self._started.values():
            assert process.pid is not None, "a process that was started has a number"
            with suppress(ProcessLookupError):  # it has ended
                while os.getpgid(process.pid) != process.pid:  # it would not hear yet
                    time.sleep(_POLL)
                os.killpg(process.pid, signal.SIGINT)
        for process in self._started.values():
            process.join()
        self._started.clear()


def _start_server() -> None:
    """Start what forks the runs, unless it is there.

    It outlives signals to the whole sweep, to report how runs end, and ends with the sweep.
    """
    # Without NVML, torch.cuda.is_available() would initialise CUDA here, and runs could not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    former = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _work_in_child(task: Path, log: Path, directory: Path) -> None:
    _leave_by_signals()
    os.setpgid(0, 0)  # signals of the terminal are for the sweep, which passes them on
    os.chdir(directory)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard in (1, 2):
        os.dup2(output, standard)
    sys.argv = [sys.argv[0], str(task)]
    work_from_file()


def leave_with_parent() -> None:
    """Save and leave once the process that started this one is gone, were it killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "somebody has started this process"
    parent.join()
    os.kill(os.getpid(), signal.SIGHUP)


class Submitit:
    """One job of submitit for each run: Slurm, or processes of this machine.

    Args:
        folder: For its files.
        options: `cluster` ("slurm", "local"; unset: what is there), and what
            `AutoExecutor.update_parameters` takes, such as `timeout_min` or `slurm_partition`.
        jobs: How many at a time.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], jobs: int) -> None:
        try:
            import submitit
        except ImportError:
            raise ValueError(
                f"--launcher: submitit is not installed here; {install_line('cluster')}."
            ) from None
        given = dict(options)
        self._executor = submitit.AutoExecutor(folder=folder, cluster=given.pop("cluster", None))
        self._executor.update_parameters(**given)
        self.jobs, self._started = jobs, dict[Path, Any]()

    def start(self, task: Path, log: Path) -> None:
        """Submit it, by the shell: a job that imported this module would do so twice."""
        program = f"from {__name__} import work_from_file; work_from_file()"
        command = ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(log)]
        command += [sys.executable, "-c", program, str(task)]
        self._started[task] = self._executor.submit(subprocess.call, command)

    def wait_for_one(self) -> dict[Path, int]:
        """Wait until a job ends; one that the cluster killed has status 1."""
        while not (ended := [task for task, job in self._started.items() if job.done()]):
            time.sleep(_POLL)
        return {task: _status(self._started.pop(task)) for task in ended}

    def stop(self) -> None:
        """Cancel what was submitted; training saves when its job is told to end."""
        for job in self._started.values():
            job.cancel()


def _status(job: Any) -> int:
    try:
        return int(job.result())
    except Exception as error:  # whatever a cluster does to a job
        logger.warning("%s: %s", job.job_id, error)
        return 1

"""How the runs of a sweep are started: as processes of this machine, or by submitit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

_WORKER = "from gradvac.experiments.worker import main; main()"
_POLL = 0.2  # seconds between two looks at the jobs of a cluster


class Launcher(Protocol):
    """Runs workers, some at a time."""

    def start(self, task: Path, log: Path) -> Any:
        """Begin the worker of a file; what it prints goes to `log`."""

    def wait_for_one(self) -> dict[Any, int]:
        """Wait until a job ends; all that have ended, with their exit status."""

    def stop(self) -> None:
        """Let running workers save and leave."""


def run_worker(task: Path, log: Path, running: set[Any] | None = None) -> int:
    """Run a worker to its end; its exit status."""
    command = [sys.executable, "-c", _WORKER, str(task)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        if running is None:
            return process.wait()
        running.add(process)
        try:
            return process.wait()
        finally:
            running.discard(process)


class Processes:
    """One process for each run on this machine.

    Args:
        jobs: How many at a time.
    """

    def __init__(self, jobs: int) -> None:
        self._pool = ThreadPoolExecutor(jobs)
        self._running: set[Any] = set()
        self._stopping = threading.Event()
        self._jobs: set[Future[int]] = set()

    def start(self, task: Path, log: Path) -> Future[int]:
        """Begin, or wait for a free place."""
        job = self._pool.submit(self._run, task, log)
        self._jobs.add(job)
        return job

    def _run(self, task: Path, log: Path) -> int:
        if self._stopping.is_set():
            return 130
        return run_worker(task, log, self._running)

    def wait_for_one(self) -> dict[Future[int], int]:
        """Wait until a process ends."""
        ended, self._jobs = wait(self._jobs, return_when=FIRST_COMPLETED)
        return {job: job.result() for job in ended}

    def stop(self) -> None:
        """Ask all processes to save and leave, and wait for them."""
        self._stopping.set()
        for process in list(self._running):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


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
                '--launcher: submitit is not installed here; pip install "gradvac[cluster]".'
            ) from None
        given = dict(options)
        self._executor = submitit.AutoExecutor(folder=folder, cluster=given.pop("cluster", None))
        self._executor.update_parameters(**given)
        self._jobs, self._waiting, self._started = jobs, list[Any](), dict[Any, Any]()

    def start(self, task: Path, log: Path) -> Any:
        """Begin, or wait for a free place."""
        ticket = (task, log)
        self._waiting.append(ticket)
        self._fill()
        return ticket

    def _fill(self) -> None:
        while self._waiting and len(self._started) < self._jobs:
            ticket = self._waiting.pop(0)
            self._started[ticket] = self._executor.submit(run_worker, *ticket)

    def wait_for_one(self) -> dict[Any, int]:
        """Wait until a job ends; one that the cluster killed has status 1."""
        pause = threading.Event()
        while True:
            ended = {ticket: _status(job) for ticket, job in self._started.items() if job.done()}
            for ticket in ended:
                del self._started[ticket]
            self._fill()
            if ended:
                return ended
            pause.wait(_POLL)

    def stop(self) -> None:
        """Cancel what was submitted; training saves when its job is told to end."""
        self._waiting.clear()
        for job in self._started.values():
            job.cancel()


def _status(job: Any) -> int:
    try:
        return int(job.result())
    except Exception as error:  # whatever a cluster does to a job
        print(f"{job.job_id}: {error}", file=sys.stderr)
        return 1

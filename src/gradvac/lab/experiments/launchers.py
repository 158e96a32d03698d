"""How the runs of a sweep are started: as processes of this machine, or by submitit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

_WORKER = "from gradvac.lab.experiments.worker import main; main()"
_LANE = "from gradvac.lab.experiments.worker import serve; serve()"
_POLL = 0.2  # seconds between two looks at the jobs of a cluster


class Launcher(Protocol):
    """Runs workers.

    Attributes:
        jobs: How many at a time; no more may be started.
    """

    jobs: int

    def start(self, task: Path, log: Path) -> Any:
        """Begin the worker of a file; what it prints goes to `log`."""

    def wait_for_one(self, timeout: float | None = None) -> dict[Any, int]:
        """Wait until a job ends, or so many seconds; all that have ended, with exit status."""

    def stop(self) -> None:
        """Let running workers save and leave; nothing can be started any more."""


def run_worker(task: Path, log: Path) -> int:
    """Run a worker to its end in a process that knows nothing yet; its exit status."""
    command = [sys.executable, "-c", _WORKER, str(task)]
    with log.open("ab") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode


class Processes:
    """A process for each run, on this machine, forked by lanes that have imported everything.

    Args:
        jobs: How many at a time.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._pool = ThreadPoolExecutor(jobs)
        self._idle: deque[_Lane] = deque()
        self._busy: set[_Lane] = set()
        self._started: set[Future[int]] = set()

    def start(self, task: Path, log: Path) -> Future[int]:
        """Begin, in a lane that is free or new."""
        job = self._pool.submit(self._run, task, log)
        self._started.add(job)
        return job

    def _run(self, task: Path, log: Path) -> int:
        lane = self._idle.popleft() if self._idle else _Lane()
        self._busy.add(lane)
        try:
            status = lane.run(task, log)
        finally:
            self._busy.discard(lane)
        if lane.is_alive():
            self._idle.append(lane)
        return status

    def wait_for_one(self, timeout: float | None = None) -> dict[Future[int], int]:
        """Wait until a process ends."""
        ended, self._started = wait(self._started, timeout, return_when=FIRST_COMPLETED)
        return {job: job.result() for job in ended}

    def stop(self) -> None:
        """Ask all processes to save and leave, and wait for them."""
        for lane in list(self._busy):
            lane.interrupt()
        self._pool.shutdown()
        while self._idle:
            self._idle.pop().close()


class _Lane:
    """A process that forks a child for one run after the other."""

    def __init__(self) -> None:
        # Without NVML, a look for GPUs would take hold of them; children could not.
        environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LANE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._child: int | None = None
        self._is_stopping = False

    def run(self, task: Path, log: Path) -> int:
        """Run a worker to its end; its exit status."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([str(task), str(log)]) + "\n")
            self._process.stdin.flush()
        child = self._answer()
        if child is None:
            return self._died(log)
        self._child = child
        if self._is_stopping:
            self.interrupt()
        status = self._answer()
        self._child = None
        return self._died(log) if status is None else status

    def _answer(self) -> int | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return int(line) if line else None

    def _died(self, log: Path) -> int:
        status = self._process.wait()
        self.close()
        with log.open("a", encoding="utf-8") as output:
            output.write(f"the process that starts runs ended with exit status {status}\n")
        return status or 1

    def is_alive(self) -> bool:
        """Whether it can take another run."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Ask the run to save and leave."""
        self._is_stopping = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)

    def close(self) -> None:
        """End it, once its run has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


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
        self.jobs, self._started = jobs, dict[Any, Any]()

    def start(self, task: Path, log: Path) -> Any:
        """Submit it."""
        self._started[task] = self._executor.submit(run_worker, task, log)
        return task

    def wait_for_one(self, timeout: float | None = None) -> dict[Any, int]:
        """Wait until a job ends; one that the cluster killed has status 1."""
        end, pause = time.monotonic() + (timeout or 0.0), threading.Event()
        while True:
            ended = {task: _status(job) for task, job in self._started.items() if job.done()}
            for task in ended:
                del self._started[task]
            if ended or (timeout is not None and time.monotonic() >= end):
                return ended
            pause.wait(_POLL)

    def stop(self) -> None:
        """Cancel what was submitted; training saves when its job is told to end."""
        for job in self._started.values():
            job.cancel()


def _status(job: Any) -> int:
    try:
        return int(job.result())
    except Exception as error:  # whatever a cluster does to a job
        print(f"{job.job_id}: {error}", file=sys.stderr)
        return 1

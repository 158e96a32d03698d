"""Work that is killed in the middle: what the drivers of kills have in common.

A driver is a program, so that torch is imported once and every piece of work is a fork of it; the
parent never runs autograd, which would not survive a fork. A death is SIGKILL: at the n-th
operation on files, with the file that was being written cut, or at some moment.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KILLED = -signal.SIGKILL
SAVING: list[tuple[Any, str]] = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
]
ALL = [*SAVING, (os, "unlink"), (Path, "unlink"), (Path, "mkdir")]


def import_everything() -> None:
    """What torch imports when it is first needed: once, before the processes part."""
    for name in ("torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(name)


def arm(operations: Sequence[tuple[Any, str]], at: int, cut: float) -> Callable[[], int]:
    """Die at the n-th of these operations; returns how many there were, for whoever survives."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                if call is os.fsync and not os.path.isdir(f"/proc/self/fd/{args[0]}"):
                    os.truncate(f"/proc/self/fd/{args[0]}", int(cut * os.fstat(args[0]).st_size))
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return run

    for owner, name in operations:
        setattr(owner, name, counted(getattr(owner, name)))
    return lambda: count


def fork(
    work: Callable[[], object],
    *,
    operations: Sequence[tuple[Any, str]] = ALL,
    at: int = 0,
    cut: float = 0.5,
    after: float | None = None,
) -> tuple[int, int]:
    """Work in a fork; returns its exit status and its number of operations on files.

    Args:
        work: What to do.
        operations: Those that count.
        at: The operation at which it dies; 0: none.
        cut: What is left of the file that was being written.
        after: Seconds after which it dies.
    """
    pipe_out, pipe_in = os.pipe()
    child = os.fork()
    if child == 0:
        count = arm(operations, at, cut)
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.write(pipe_in, str(count()).encode())
        os._exit(0)
    os.close(pipe_in)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(pipe_out) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(status), int(said or 0)

"""What holds for all tests."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from . import browser

# What runs in the background, or under nohup, starts with Ctrl-C or hang-ups ignored, and its child
# processes inherit that: tests that send these signals would wait for ever.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A run forces each of its files to the disk, which takes a third of a short one's time; in memory
# it takes none. Child processes follow the variable.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8e9:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# What is written in C++ is used where it was built; tests that want it say so.
os.environ.setdefault("GRADVAC_NATIVE", "0")

LONG = {"distributed", "experiments", "faults", "golden", "torchrun", "test_job.py"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules are no garbage: nobody looks through them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: no worker is left with one while the other has none."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The driver of a browser, for `browser.Page`."""
    with browser.start() as driver:
        yield driver


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a folder once for all workers: each gets a copy, to do with as it likes."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        copy = tmp_path_factory.mktemp(name) / "copy"
        shutil.copytree(folder, copy)
        return copy

    return make_once

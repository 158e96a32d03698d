"""Locks of a folder, what killed processes left in it, hashes of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradvac.utils.files import TEMPORARY, short_digest

LOCK = ".lock"


def remove_leftovers(folder: Path, *, of: Path | None = None, but: Path | None = None) -> None:
    """Remove what killed processes left half-written; only the holder of the lock may.

    Args:
        folder: Where to look.
        of: Only what was to become this file.
        but: Nothing that was to become this file, which another lock protects.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        is_other = of is not None and not path.name.endswith(f"-{of.name}")
        is_spared = but is not None and path.name.endswith(f"-{but.name}")
        if (path.is_file() or path.is_symlink()) and not is_other and not is_spared:
            path.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path, *, busy: str | None, name: str = LOCK) -> Iterator[None]:
    """The right to write in a folder, for one process at a time.

    The system releases it however the process ends.

    Args:
        folder: The folder; made if it does not exist.
        busy: Error message if another process holds it; None: wait for that process.
        name: The file that is locked. Locks of different names are held side by side.

    Raises:
        ValueError: Another process holds it; the text is `busy`.

    Examples:
        >>> import tempfile
        >>> from gradvac.utils.files import write_json
        >>> run = Path(tempfile.mkdtemp())
        >>> with folder_lock(run, busy=f"run: another process writes in {run}; wait for it."):
        ...     write_json(run / "facts.json", {"steps": 3})
    """
    import filelock  # comes with torch; reading a run does without

    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / name)
    try:
        lock.acquire(timeout=-1 if busy is None else 0)
    except filelock.Timeout:
        raise ValueError(busy) from None
    try:
        yield
    finally:
        lock.release()


def hash_file(path: Path) -> str:
    """Hash the contents of a file as `hash_of` hashes a value."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, short_digest).hexdigest()

"""Locks of a folder, what killed processes left in it, hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gradvac.files import TEMPORARY, short_digest

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


class FolderLock:
    """The right to write in a folder, for one process at a time.

    The system releases it however the process ends.

    Args:
        folder: The folder; made if it does not exist.
        busy: Error message if another process holds it; None: wait for that process.
        name: The file that is locked. Locks of different names are held side by side.

    Raises:
        ValueError: Another process holds it (from `acquire`, with the text of `busy`).

    Examples:
        >>> import tempfile
        >>> from gradvac.files import write_json
        >>> run = Path(tempfile.mkdtemp())
        >>> with FolderLock(run, busy=f"run: another process writes in {run}; wait for it."):
        ...     write_json(run / "facts.json", {"steps": 3})
    """

    def __init__(self, folder: Path, *, busy: str | None, name: str = LOCK) -> None:
        import filelock  # comes with torch; reading a run does without

        folder.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(folder / name)
        self._busy = busy
        self._timeout = filelock.Timeout

    def acquire(self) -> None:
        """Take the lock."""
        try:
            self._lock.acquire(timeout=-1 if self._busy is None else 0)
        except self._timeout:
            raise ValueError(self._busy) from None

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def hash_file(path: Path) -> str:
    """Hash the contents of a file as `hash_of` hashes a value."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, short_digest).hexdigest()

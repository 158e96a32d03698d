"""Files written whole or not at all, folder locks, and hashes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".writing-"  # begins the names of files that are not complete
LOCK = ".lock"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


@contextmanager
def replacing_path(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place when the block ends without an error.

    The file is forced to disk before it is renamed, and so is the name afterwards: a process that
    is killed in between leaves the old file as it was. A link at `path` is replaced, not followed;
    the mode is that of any new file, by umask. Use it where something needs a path to write to;
    `replacing` opens the file.
    """
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK, 0o666)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    try:
        yield temporary
        temporary.chmod(mode)  # the writer may have replaced the file
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a full disk does not say what was being written
        raise
    sync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that takes the place of `path`: see `replacing_path`."""
    with replacing_path(path) as temporary, temporary.open("wb") as file:
        yield file


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; an empty one if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """The right to write in a folder, for one process at a time.

    The system releases it however the process ends.

    Args:
        folder: The folder; made if it does not exist.
        busy: Error message if another process holds it; None: wait for that process.
        name: The file that is locked. Locks of different names are held side by side.

    Raises:
        ValueError: Another process holds it (from `acquire`, with the text of `busy`).

    Example:
        >>> import tempfile
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


def hash_of(value: Any) -> str:
    """Hash anything JSON can express."""
    text = json.dumps(value, sort_keys=True, default=str)
    digest: str = _short_digest(text.encode()).hexdigest()
    return digest


def hash_file(path: Path) -> str:
    """Hash the contents of a file as `hash_of` hashes a value."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _short_digest).hexdigest()


def _short_digest(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=16)

"""Files written whole or not at all, small JSON files, arrays, locks of a folder, and hashes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np

LOCK = ".lock"
TEMPORARY = ".writing-"  # begins the names of files that are not complete
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


def open_arrays(content: bytes, most: int) -> np.lib.npyio.NpzFile:
    """The arrays of an `.npz` file, unpacked as they are asked for.

    Args:
        content: The file.
        most: Bytes that all arrays may take; a thousandth of them may be enough on the disk.

    Raises:
        ValueError: They would take more.
    """
    import numpy as np  # which `gradvac --help` does without

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > most:
        raise ValueError(f"it would take {size / 1e9:.1f} GB")
    arrays: np.lib.npyio.NpzFile = np.load(io.BytesIO(content), allow_pickle=False)
    return arrays


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


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_of(value: Any) -> str:
    """Hash anything JSON can express."""
    text = json.dumps(value, sort_keys=True, default=str)
    digest: str = short_digest(text.encode()).hexdigest()
    return digest


def short_digest(content: bytes = b"") -> Any:
    """The hash that names and checks things here: 16 bytes."""
    return hashlib.blake2b(content, digest_size=16)


def hash_file(path: Path) -> str:
    """Hash the contents of a file as `hash_of` hashes a value."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, short_digest).hexdigest()

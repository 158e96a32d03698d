"""Lines of text files, packed or not: all of them, or an error that says why not."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import zstandard

_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_PACKED_AT_ONCE = 1 << 10  # what a kilobyte unpacks to still fits into memory, whatever it is
_LOOKED_AT = 1 << 12


class Problem(StrEnum):
    """Why a pair could not be read."""

    NOT_UTF8 = "not UTF-8"
    MALFORMED = "malformed"


def open_text(path: Path) -> io.BufferedIOBase:
    """Open a file for reading bytes, unpacking `.gz` and `.zst`; a cut-off one is an EOFError."""
    if path.suffix in (".gz", ".zst") and path.stat().st_size == 0:
        raise EOFError("it is empty, and so not even an archive")
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return path.open("rb")


def raw_lines(path: Path) -> Iterator[str | Problem]:
    """Read lines, without their ends; a problem for a line that is no text.

    Raises:
        ValueError: The file is cut off or damaged, or in another encoding than UTF-8.
    """
    try:
        with open_text(path) as file:
            assert isinstance(file, io.BufferedReader | gzip.GzipFile)
            refuse_wide(file.peek(_LOOKED_AT)[:_LOOKED_AT])
            for number, raw in enumerate(file):
                try:
                    text = raw.decode("utf-8-sig" if number == 0 else "utf-8")
                except UnicodeDecodeError:
                    yield Problem.NOT_UTF8
                else:
                    yield Problem.MALFORMED if "\0" in text else text.rstrip("\r\n")
    except UNREADABLE as error:
        raise ValueError(f"data: {path} cannot be read to its end: {error}.") from error


class _ZstdFile(io.RawIOBase):
    """A `.zst` file, unpacked: all its frames, of which the last must be whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._unpacked = b""
        self._blocks = self._unpack()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        while not self._unpacked:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._unpacked = block
        part = self._unpacked[: len(view)]
        self._unpacked = self._unpacked[len(part) :]
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _unpack(self) -> Iterator[bytes]:
        frame, packed = None, b""
        while packed := packed or self._file.read(_PACKED_AT_ONCE):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("it is cut off")


def refuse_wide(start: bytes) -> None:
    """Text in two or four bytes a character would pass for UTF-8 full of NUL characters."""
    if start.startswith(_WIDE) or 4 * start.count(0) > len(start):
        raise UnicodeError(
            "it is not UTF-8 but UTF-16 or UTF-32; convert it, as in `iconv -f UTF-16 -t UTF-8`"
        )


UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError, UnicodeError)

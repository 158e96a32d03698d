"""Token files: a corpus in numbers, mapped into memory instead of read.

NAME.bin            all tokens, one sentence after the other, uint16 or uint32
NAME.offsets.npy    where every sentence starts, and the end of the last, int64
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradvac.nmt.batch import Ragged, Tokens


class TokenFile:
    """The sentences of one language of a corpus.

    Args:
        path: Without `.bin`.
        vocabulary_size: It decides about the number type.
    """

    def __init__(self, path: Path, vocabulary_size: int) -> None:
        self._offsets: npt.NDArray[np.int64] = np.load(f"{path}.offsets.npy", mmap_mode="r")
        kind = _kind(vocabulary_size)
        expected, found = int(self._offsets[-1]) * kind.itemsize, os.path.getsize(f"{path}.bin")
        if expected != found:
            raise ValueError(
                f"data: {path}.bin has {found:,} bytes instead of {expected:,}; run "
                "`gradvac nmt prepare` again."
            )
        # An empty file cannot be mapped.
        self._tokens: Tokens = (
            np.memmap(f"{path}.bin", dtype=kind, mode="r") if found else np.empty(0, dtype=kind)
        )
        self.lengths: npt.NDArray[np.int64] = np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tokens:
        return self._tokens[self._offsets[number] : self._offsets[number + 1]]

    def gather(self, numbers: npt.NDArray[np.int64]) -> Ragged:
        """Read many sentences at once."""
        lengths = self.lengths[numbers]
        starts = self._offsets[numbers]
        # Position of every token in the file: its place in the result, moved to its sentence.
        moves = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return Ragged(self._tokens[np.arange(len(moves)) + moves], lengths)


class TokenWriter:
    """Writes a token file; it appears under its name when the `with` block ends without error.

    Args:
        path: Without `.bin`.
        vocabulary_size: It decides about the number type.
    """

    def __init__(self, path: Path, vocabulary_size: int) -> None:
        self._path, self._kind = path, _kind(vocabulary_size)
        self._part = Path(f"{path}.bin.part")
        self._file = self._part.open("wb")
        self._lengths: list[int] = []

    def write(self, sentences: Iterable[Sequence[int]]) -> None:
        """Append sentences."""
        for sentence in sentences:
            self._lengths.append(len(sentence))
            self._file.write(np.asarray(sentence, dtype=self._kind).tobytes())

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        part = Path(f"{self._path}.offsets.part")
        with part.open("wb") as file:
            np.save(file, offsets.astype(np.int64))
        os.replace(part, f"{self._path}.offsets.npy")
        os.replace(self._part, f"{self._path}.bin")


def _kind(vocabulary_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)

"""Token files: a corpus in numbers, mapped into memory instead of read.

NAME.bin            all tokens, one sentence after the other, uint16 or uint32
NAME.offsets.npy    where every sentence starts, and the end of the last, int64

A large corpus has several, NAME.00000 and so on before the language: its shards.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradvac.lab.recipes.nmt.batches import Ragged, Tokens
from gradvac.lab.recipes.nmt.sealed import Seal, sealing

OFFSETS = ".offsets.npy"
SUFFIXES = (".bin", OFFSETS)


def shard_name(name: str, shard: int, num: int) -> str:
    """A name for the token files of a shard; that of the whole if there is only one."""
    return name if num == 1 else f"{name}.{shard:05}"


class TokenFile:
    """The sentences of one language of a corpus.

    Args:
        path: Without `.bin`.
        vocabulary_size: It decides about the number type.
    """

    def __init__(self, path: Path, vocabulary_size: int) -> None:
        self._offsets = _read_offsets(Path(f"{path}{OFFSETS}"))
        kind = _kind(vocabulary_size)
        expected, size = int(self._offsets[-1]) * kind.itemsize, os.path.getsize(f"{path}.bin")
        self._path = path
        if expected != size or self._offsets[0] != 0:
            raise ValueError(
                f"data: {path}.bin has {size:,} bytes instead of {expected:,}, or its sentences "
                "begin at other places; run `gradvac nmt prepare` again."
            )
        # An empty file cannot be mapped.
        self._tokens: Tokens = (
            np.memmap(f"{path}.bin", dtype=kind, mode="r") if size else np.empty(0, dtype=kind)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Tokens:
        return self._tokens[self._offsets[number] : self._offsets[number + 1]]

    @property
    def mean_length(self) -> float:
        """Tokens of a sentence; known without a look at any."""
        return float(self._offsets[-1]) / max(1, len(self))

    def lengths(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of some sentences."""
        lengths: npt.NDArray[np.int64] = self._offsets[numbers + 1] - self._offsets[numbers]
        if (lengths < 0).any():
            raise ValueError(
                f"data: the sentences of {self._path}.bin begin at other places than written; run "
                "`gradvac nmt prepare` again."
            )
        return lengths

    def gather(self, numbers: npt.NDArray[np.int64]) -> Ragged:
        """Read many sentences at once."""
        lengths = self.lengths(numbers)
        starts = self._offsets[numbers]
        # Position of every token in the file: its place in the result, moved to its sentence.
        moves = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return Ragged(self._tokens[np.arange(len(moves)) + moves], lengths)


class TokenShards:
    """The sentences of one language in several token files, each mapped when it is needed.

    Args:
        paths: The files, without `.bin`.
        sizes: Sentences of each.
        num_tokens: Tokens of all.
        vocabulary_size: It decides about the number type.
    """

    def __init__(
        self, paths: Sequence[Path], sizes: Sequence[int], num_tokens: int, vocabulary_size: int
    ) -> None:
        self._paths, self._vocabulary_size = list(paths), vocabulary_size
        self._ends = np.cumsum([0, *sizes])
        self._num_tokens = num_tokens
        self._files: dict[int, TokenFile] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def mean_length(self) -> float:
        """Tokens of a sentence; known without a look at any."""
        return self._num_tokens / max(1, len(self))

    def __getitem__(self, number: int) -> Tokens:
        shard = int(np.searchsorted(self._ends, number, side="right")) - 1
        return self._file(shard)[number - int(self._ends[shard])]

    def lengths(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of some sentences."""
        lengths = np.zeros(len(numbers), dtype=np.int64)
        for file, in_shard, places in self._by_shard(numbers):
            lengths[places] = file.lengths(in_shard)
        return lengths

    def gather(self, numbers: npt.NDArray[np.int64]) -> Ragged:
        """Read many sentences at once."""
        parts, order = [], []
        for file, in_shard, places in self._by_shard(numbers):
            parts.append(file.gather(in_shard))
            order.append(places)
        if len(parts) == 1:
            return parts[0]
        # Back from the order of the shards to that of the numbers.
        joined, back = Ragged.join(parts), np.argsort(np.concatenate(order))
        starts = np.cumsum(joined.lengths) - joined.lengths
        lengths = joined.lengths[back]
        moves = np.repeat(starts[back] - np.cumsum(lengths) + lengths, lengths)
        return Ragged(joined.tokens[np.arange(len(moves)) + moves], lengths)

    def _by_shard(
        self, numbers: npt.NDArray[np.int64]
    ) -> Iterator[tuple[TokenFile, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Every shard that is asked for something: what of it, and where that was asked."""
        shards = np.searchsorted(self._ends, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            yield self._file(shard), numbers[places] - self._ends[shard], places

    def _file(self, shard: int) -> TokenFile:
        if shard not in self._files:
            file = TokenFile(self._paths[shard], self._vocabulary_size)
            if len(file) != self._ends[shard + 1] - self._ends[shard]:
                raise ValueError(
                    f"data: {self._paths[shard]}.bin has {len(file):,} sentences, and not what was "
                    "prepared; run `gradvac nmt prepare` again."
                )
            self._files[shard] = file
        return self._files[shard]


class TokenWriter:
    """Writes a token file; it appears under its name when the `with` block ends without error.

    Args:
        path: Without `.bin`.
        vocabulary_size: It decides about the number type.
    """

    def __init__(self, path: Path, vocabulary_size: int) -> None:
        self._path, self._kind = path, _kind(vocabulary_size)
        self._places = [Path(f"{path}{suffix}") for suffix in SUFFIXES]
        self._lengths = array("i")
        self.seals: dict[Path, Seal] = {}  # of the two files, once they are there

    def write(self, sentences: Iterable[Sequence[int]]) -> None:
        """Append sentences."""
        block = list(sentences)
        if block:
            self._lengths.extend(map(len, block))
            # One array of all: an array of each sentence takes longer than cutting it did.
            tokens = np.fromiter(itertools.chain.from_iterable(block), self._kind)
            self._files[0].write(tokens.tobytes())

    def __enter__(self) -> TokenWriter:
        with ExitStack() as stack:
            self._files = [stack.enter_context(sealing(path)) for path in self._places]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            offsets = np.concatenate([[0], np.cumsum(np.asarray(self._lengths), dtype=np.int64)])
            np.lib.format.write_array(self._files[1], offsets.astype(np.int64))
        self._stack.__exit__(kind, *rest)
        self.seals = {
            path: file.seal(path)
            for path, file in zip(self._places, self._files, strict=True)
            if kind is None
        }


def _read_offsets(path: Path) -> npt.NDArray[np.int64]:
    try:
        offsets: npt.NDArray[np.int64] = np.load(path, mmap_mode="r")
    # What NumPy says about a damaged header depends on which part of it is.
    except (OSError, EOFError, ValueError, TypeError, SyntaxError, MemoryError) as error:
        raise ValueError(
            f"data: {path} cannot be read ({error}); run `gradvac nmt prepare` again."
        ) from error
    if getattr(offsets, "dtype", None) != np.int64 or offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"data: {path} holds no offsets; run `gradvac nmt prepare` again.")
    return offsets


def _kind(vocabulary_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradvac.lab.recipes.nmt.batches import Ragged, Tokens
from gradvac.lab.recipes.nmt.cleaning import Report
from gradvac.lab.recipes.nmt.readers import Pair
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary
from gradvac.lab.recipes.nmt.workers import chunks, num_cores, ordered_map
from gradvac.utils.files import replacing

PAIRS_PER_SHARD = 1_000_000  # pairs of text that one pair of token files is made of
Pieces = list[list[int]]
Numbers = npt.NDArray[np.int64]
OFFSETS = ".offsets.npy"
SUFFIXES = (".bin", OFFSETS)


def shard_name(name: str, shard: int, num: int) -> str:
    """A name for the token files of a shard; that of the whole if there is only one."""
    return name if num == 1 else f"{name}.{shard:05}"


class TokenFile:
    """The sentences of one language of a corpus; `path` is without `.bin`, as in all of these."""

    def __init__(self, path: Path, vocabulary_size: int) -> None:
        self._path = f"{path}.bin"
        self._stamp = self._stamp_now()
        self._offsets: Numbers = np.load(f"{path}{OFFSETS}", mmap_mode="r")
        kind = _kind(vocabulary_size)
        expected, size = int(self._offsets[-1]) * kind.itemsize, os.path.getsize(self._path)
        if expected != size:
            raise ValueError(
                f"data: {path}.bin has {size:,} bytes instead of {expected:,}; run `gradvac nmt "
                "prepare` again."
            )
        # An empty file cannot be mapped.
        self._tokens: Tokens = (
            np.memmap(f"{path}.bin", dtype=kind, mode="r") if size else np.empty(0, dtype=kind)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _stamp_now(self) -> tuple[int, int]:
        now = os.stat(self._path)
        return now.st_size, now.st_mtime_ns

    def _check(self) -> None:
        """Raise if the file has been changed: a cut one would end the process without a word."""
        if self._stamp_now() != self._stamp:
            raise ValueError(
                f"data: {self._path} was changed while it was in use; run `gradvac nmt prepare` "
                "again, then go on."
            )

    @property
    def mean_length(self) -> float:
        """Tokens of a sentence; known without a look at any."""
        return float(self._offsets[-1]) / max(1, len(self))

    def lengths(self, numbers: Numbers) -> Numbers:
        """Tokens of some sentences."""
        lengths: Numbers = self._offsets[numbers + 1] - self._offsets[numbers]
        return lengths

    def gather(self, numbers: Numbers) -> Ragged:
        """Read many sentences at once."""
        self._check()
        return _gather(self._tokens, self._offsets[numbers], self.lengths(numbers))


class TokenShards:
    """The sentences of one language in several token files, each mapped when it is needed."""

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

    def lengths(self, numbers: Numbers) -> Numbers:
        """Tokens of some sentences."""
        lengths = np.zeros(len(numbers), dtype=np.int64)
        for file, in_shard, places in self._by_shard(numbers):
            lengths[places] = file.lengths(in_shard)
        return lengths

    def gather(self, numbers: Numbers) -> Ragged:
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
        return _gather(joined.tokens, starts[back], joined.lengths[back])

    def _by_shard(self, numbers: Numbers) -> Iterator[tuple[TokenFile, Numbers, Numbers]]:
        """Every shard that is asked for something: what of it, and where that was asked."""
        shards = np.searchsorted(self._ends, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            yield self._file(shard), numbers[places] - self._ends[shard], places

    def _file(self, shard: int) -> TokenFile:
        if shard not in self._files:
            self._files[shard] = TokenFile(self._paths[shard], self._vocabulary_size)
        return self._files[shard]


def _gather(tokens: Tokens, starts: Numbers, lengths: Tokens) -> Ragged:
    """Sentences that begin at some places among all tokens."""
    # Position of every token there: its place in the result, moved to its sentence.
    moves = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return Ragged(tokens[np.arange(len(moves)) + moves], lengths)


class TokenWriter:
    """Writes a token file; it appears under its name when the `with` block ends without error."""

    def __init__(self, path: Path, vocabulary_size: int) -> None:
        self._path, self._kind = path, _kind(vocabulary_size)
        self.paths = [Path(f"{path}{suffix}") for suffix in SUFFIXES]
        self._lengths = array("i")

    def write(self, sentences: Iterable[Sequence[int]]) -> None:
        """Append sentences."""
        block = list(sentences)
        if block:
            self._lengths.extend(map(len, block))
            # One array of all: an array of each sentence takes longer than tokenising it did.
            tokens = np.fromiter(itertools.chain.from_iterable(block), self._kind)
            self._files[0].write(tokens.tobytes())

    def __enter__(self) -> TokenWriter:
        with ExitStack() as stack:
            self._files = [stack.enter_context(replacing(path)) for path in self.paths]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            offsets = np.concatenate([[0], np.cumsum(np.asarray(self._lengths), dtype=np.int64)])
            np.lib.format.write_array(self._files[1], offsets.astype(np.int64))
        self._stack.__exit__(kind, *rest)


def _kind(vocabulary_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


@dataclass
class TokenisedShard:
    """What became of a shard."""

    report: Report = field(default_factory=Report)
    files: list[Path] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])  # pairs, tokens of both sides


def num_shards(num_pairs: int) -> int:
    """How many shards so many pairs of text make."""
    return max(1, -(-num_pairs // PAIRS_PER_SHARD))


def tokenise_shard(
    lines: Iterable[Pair],
    paths: Sequence[Path],
    vocabulary: Vocabulary,
    *,
    most: int | None,
    processes: int = 0,
    backend: str = "processes",
) -> TokenisedShard:
    """Write the token files of a shard.

    Args:
        lines: Its text.
        paths: Its token files, without `.bin`, in the order of the two sides.
        vocabulary: What text is tokenised with.
        most: Pairs with more tokens on a side are dropped; None: none is.
        processes: How many work at a time; 0: one for every core.
        backend: Where: "processes" stands for threads of this one, or "ray".
    """
    outcome = TokenisedShard()
    encoded = _encoded(chunks(lines), vocabulary, processes=processes, backend=backend)
    with ExitStack() as stack:
        writers = [stack.enter_context(TokenWriter(path, len(vocabulary))) for path in paths]
        for texts, sides in encoded:
            kept = []
            for text, row in zip(texts, zip(*sides, strict=True), strict=True):
                if most is None or max(map(len, row)) <= most:
                    kept.append(row)
                else:
                    outcome.report.drop("too many tokens", text)
            outcome.sizes[0] += len(kept)
            for side, writer in enumerate(writers):
                outcome.sizes[1 + side] += sum(len(row[side]) for row in kept)
                writer.write(row[side] for row in kept)
    outcome.files = [path for writer in writers for path in writer.paths]
    return outcome


def _encoded(
    blocks: Iterable[list[Pair]],
    vocabulary: Vocabulary,
    *,
    processes: int,
    backend: str,
) -> Iterator[tuple[list[Pair], list[Pieces]]]:
    if backend == "processes":  # SentencePiece's own threads need no copies of the text
        threads = processes or num_cores()
        return ((texts, encode_pairs(texts, vocabulary, threads)) for texts in blocks)
    return ordered_map(
        encode_pairs, blocks, shared=(vocabulary,), processes=processes, backend=backend
    )


def encode_pairs(texts: Sequence[Pair], vocabulary: Vocabulary, threads: int = 1) -> list[Pieces]:
    """Tokenise both sides of some pairs."""
    return [vocabulary.encode(side, threads=threads) for side in zip(*texts, strict=True)]

"""Cutting clean text into tokens: one shard of a pair after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from gradvac.lab.recipes.nmt.cleaning import Report
from gradvac.lab.recipes.nmt.sealed import Seal
from gradvac.lab.recipes.nmt.tokens import TokenWriter
from gradvac.lab.recipes.nmt.vocabulary import Vocabulary
from gradvac.lab.recipes.nmt.workers import chunks, num_cores, ordered_map

SHARD = 1_000_000  # pairs of text that one pair of token files is made of


@dataclass
class Cut:
    """What became of a shard.

    Attributes:
        report: What was dropped.
        seals: Of the token files.
        sizes: Sentence pairs, and the tokens of both sides.
    """

    report: Report = field(default_factory=Report)
    seals: dict[Path, Seal] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])


def num_shards(num_pairs: int) -> int:
    """How many shards so many pairs of text make."""
    return max(1, -(-num_pairs // SHARD))


def cut(
    lines: Iterable[tuple[str, str]],
    paths: Sequence[Path],
    vocabulary: Vocabulary,
    *,
    most: int | None,
    processes: int = 0,
    engine: str = "processes",
) -> Cut:
    """Write the token files of a shard.

    Args:
        lines: Its text.
        paths: Its token files, without `.bin`, in the order of the two sides.
        vocabulary: What text is cut with.
        most: Pairs with more tokens on a side are dropped; None: none is.
        processes: How many cut at a time; 0: one for every core.
        engine: Where: "processes" stands for threads of this one, or "ray".
    """
    outcome = Cut()
    encoded = _encoded(chunks(lines), vocabulary, processes=processes, engine=engine)
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
    outcome.seals = {path: seal for writer in writers for path, seal in writer.seals.items()}
    return outcome


Pieces = list[list[int]]


def _encoded(
    blocks: Iterable[list[tuple[str, str]]],
    vocabulary: Vocabulary,
    *,
    processes: int,
    engine: str,
) -> Iterator[tuple[list[tuple[str, str]], list[Pieces]]]:
    if engine == "processes":  # SentencePiece's own threads need no copies of the text
        threads = processes or num_cores()
        return ((texts, encode_pairs(texts, vocabulary, threads)) for texts in blocks)
    return ordered_map(
        encode_pairs, blocks, shared=(vocabulary,), processes=processes, engine=engine
    )


def encode_pairs(
    texts: Sequence[tuple[str, str]], vocabulary: Vocabulary, threads: int = 1
) -> list[Pieces]:
    """Cut both sides of some pairs."""
    return [vocabulary.encode(side, threads=threads) for side in zip(*texts, strict=True)]

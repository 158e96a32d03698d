"""Sentences of any length, one after the other: how text is held between files and batches."""

# N tokens, B sentences

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sentences of any length, one after the other."""

    tokens: Tokens  # [N]
    lengths: Tokens  # [B]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[int] | Tokens]) -> Ragged:
        """Put sentences together."""
        arrays = [np.asarray(sentence, dtype=np.int64) for sentence in sentences]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))

    def enclose(self, first: int | Tokens, last: int) -> Ragged:
        """Put a token before every sentence (one for all, or one each) and one after it."""
        lengths = self.lengths + 2
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), dtype=np.int64)
        inner = np.ones(len(tokens), dtype=bool)
        inner[ends - lengths] = inner[ends - 1] = False
        tokens[ends - lengths], tokens[ends - 1], tokens[inner] = first, last, self.tokens
        return Ragged(tokens, lengths)

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Put the sentences of several together."""
        tokens = np.concatenate([part.tokens for part in parts])
        return cls(tokens, np.concatenate([part.lengths for part in parts]))

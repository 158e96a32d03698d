"""Masked language modelling: blocks of text, and what is hidden in them."""

# T tasks, B rows, S sub-words of a block, M hidden ones

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradvac.lab.training import Part, TensorBatch

Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MaskedBatch(TensorBatch):
    """Blocks with hidden sub-words.

    Attributes:
        tokens: `[B, S]`.
        places: Positions of the hidden sub-words, the same number in every row, `[B, M]`.
        hidden: The original sub-words, `[B, M]`.
        languages: The language of every row; on the host, unless the batch is framed.
        num_tokens: Hidden sub-words, of all parts of the batch.
        counts: Whether the rows count; they do not if a process has none of its own.
        static_shape: Rows and columns that all batches of the run have; None: they may differ.
    """

    tokens: Tensor
    places: Tensor
    hidden: Tensor
    languages: list[int] | Tensor
    num_tokens: int
    counts: bool = True
    static_shape: tuple[int, int] | None = None

    def take(self, part: Part, costs: Sequence[float] | None = None) -> MaskedBatch:
        """The part of one process; if it has no rows, one row that does not count."""
        if part.of == 1:
            return self
        ours = part.cut(costs or [1.0] * len(self.languages))
        is_empty = ours.start == ours.stop
        rows = slice(0, 1) if is_empty else ours
        tokens, places, hidden = self.tokens[rows], self.places[rows], self.hidden[rows]
        languages = self.languages[rows]
        return MaskedBatch(tokens, places, hidden, languages, self.num_tokens, not is_empty)

    def framed(self) -> MaskedBatch:
        """The same with nothing left on the host, and as large as all batches of the run."""
        rows, size = self.tokens.shape
        return replace(self, languages=torch.tensor(self.languages), static_shape=(rows, size))


def cut_blocks(tokenizer: Any, lines: Sequence[str], size: int) -> Blocks:
    """Concatenate lines, each with an end mark, and cut them into blocks.

    Every block begins with the tokenizer's first special token. The last one is filled up with the
    beginning of the text, so that no line is lost; a block may cut a line in two.

    Returns:
        `[blocks, size]`.
    """
    end, begin = tokenizer.sep_token_id, tokenizer.cls_token_id
    flat: list[int] = []
    for first in range(0, len(lines), 10_000):
        encoded = tokenizer(
            list(lines[first : first + 10_000]),
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        for tokens in encoded["input_ids"]:
            flat += [*tokens, end]
    text = np.array(flat, dtype=np.int32)
    num_blocks = max(1, -(-len(text) // (size - 1)))
    text = np.resize(text, num_blocks * (size - 1)).reshape(num_blocks, size - 1)
    return np.concatenate([np.full((num_blocks, 1), begin, dtype=np.int32), text], axis=1)


def hide(
    blocks: Blocks,
    languages: list[int],
    *,
    share: float,
    mask: int,
    vocabulary: int,
    generator: np.random.Generator,
) -> MaskedBatch:
    """Hide a share of every block: 80 % masked, 10 % replaced at random, 10 % left as they are.

    Args:
        blocks: `[B, S]`; their first place is never hidden.
        languages: The language of every row.
        share: The share to hide.
        mask: The mask token.
        vocabulary: Number of tokens.
        generator: Draws everything.
    """
    rows, size = blocks.shape
    num_hidden = max(1, round(share * (size - 1)))
    places = 1 + np.argsort(generator.random((rows, size - 1)), axis=1)[:, :num_hidden]
    hidden = np.take_along_axis(blocks, places, axis=1)
    chance = generator.random(places.shape)
    random_tokens = generator.integers(0, vocabulary, places.shape)
    shown = np.where(chance < 0.8, mask, np.where(chance < 0.9, random_tokens, hidden))
    tokens = blocks.astype(np.int64)
    np.put_along_axis(tokens, places, shown, axis=1)
    return MaskedBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(places),
        torch.from_numpy(hidden.astype(np.int64)),
        languages,
        int(places.size),
    )

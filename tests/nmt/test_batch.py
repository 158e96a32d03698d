"""Batches: what encoder and decoder read, and what must be said."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gradvac.nmt import Batch, Ragged, make_batch

SOURCES = Ragged.of([[9, 4], [9, 5, 6, 7]]).enclose(np.array([30, 31]), 2)
TARGETS = Ragged.of([[8, 8, 8], []]).enclose(1, 2)


def test_padded_layout() -> None:
    batch = make_batch(SOURCES, TARGETS, [0, 3])
    assert batch.source.tokens.tolist() == [[30, 9, 4, 2, 0, 0], [31, 9, 5, 6, 7, 2]]
    assert batch.target.tokens.tolist() == [[1, 8, 8, 8], [1, 0, 0, 0]]
    assert batch.labels.tolist() == [8, 8, 8, 2, 2]
    assert batch.sentence_of_label.tolist() == [0, 0, 0, 0, 1]
    assert batch.task_of_label.tolist() == [0, 0, 0, 0, 3]
    assert batch.num_tokens == 5
    assert batch.source.mask is not None
    assert batch.source.mask.squeeze().tolist() == [[True] * 4 + [False] * 2, [True] * 6]


def test_packed_layout() -> None:
    batch = make_batch(SOURCES, TARGETS, [0, 3], packed=True)
    assert batch.source.tokens.tolist() == [30, 9, 4, 2, 31, 9, 5, 6, 7, 2]
    assert batch.source.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert batch.source.ends.tolist() == [0, 4, 10]
    assert batch.source.task_of_token is not None
    assert batch.source.task_of_token.tolist() == [0] * 4 + [3] * 6
    assert batch.target.tokens.tolist() == [1, 8, 8, 8, 1]
    assert batch.labels.tolist() == [8, 8, 8, 2, 2]


@pytest.mark.parametrize("equal", [False, True])
def test_pad_and_pack_are_inverse(random_batch: Callable[..., Batch], equal: bool) -> None:
    side = random_batch(packed=True, equal=equal).source
    values = torch.randn(side.num_tokens, 3)
    padded = side.pad(values)
    assert padded.shape == (side.num_sentences, side.longest, 3)
    assert torch.equal(side.pack(padded), values)
    assert (side.mask is None) == equal  # no mask where nothing is padding


def test_mixed_up_tasks_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="lie together"):
        make_batch(SOURCES, TARGETS, [1, 0])

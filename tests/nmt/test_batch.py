"""Batches: what encoder and decoder read, and what must be said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gradvac
from gradvac.lab.recipes.nmt import Batch, Ragged, Transformer, make_batch
from gradvac.lab.recipes.nmt.batches import StaticShape

SOURCES = Ragged.of([[9, 4], [9, 5, 6, 7]]).add_special_tokens(np.array([30, 31]), 2)
TARGETS = Ragged.of([[8, 8, 8], []]).add_special_tokens(1, 2)


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
    assert batch.source.task_of_row.tolist() == [0] * 4 + [3] * 6
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


def filled_up(shape: StaticShape, seed: int = 3) -> tuple[Batch, Batch]:
    """A packed batch, and the same one filled up."""
    draw = np.random.default_rng(seed)
    tasks = [0] * 5 + [1] * 3 + [2] * 4
    sources = Ragged.of(
        [draw.integers(4, 50, n) for n in draw.integers(1, 8, 12)]
    ).add_special_tokens(3, 2)
    targets = Ragged.of(
        [draw.integers(4, 50, n) for n in draw.integers(1, 7, 12)]
    ).add_special_tokens(1, 2)
    plain = make_batch(sources, targets, tasks, packed=True)
    return plain, make_batch(sources, targets, tasks, packed=True, static_shape=shape)


@pytest.mark.parametrize("rule", [gradvac.Sum(), gradvac.GradVac()])
def test_rows_that_do_not_count_change_nothing(
    tiny_model: Callable[..., Transformer], rule: Any
) -> None:
    shape = StaticShape(source=120, target=96, rows=24, longest=11)
    results = []
    for batch in filled_up(shape):
        model = tiny_model()
        names = ["a", "b", "c"]
        aligner = gradvac.Aligner(model, names, copy.deepcopy(rule), engine="one_backward")
        losses = model(batch)
        alignment = aligner.backward(losses / batch.num_tokens, batch.tasks)
        assert alignment is not None
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append((losses.detach(), batch.num_tokens, alignment.similarity, grads))
    (losses, num_tokens, similarity, grads), (filled, num_filled, also, more) = results
    assert (num_tokens, len(filled)) == (num_filled, shape.rows)
    torch.testing.assert_close(filled[: len(losses)], losses)
    assert filled[len(losses) :].tolist() == [0.0] * (shape.rows - len(losses))
    torch.testing.assert_close(also, similarity)
    torch.testing.assert_close(more, grads)


def test_batches_of_a_static_shape_are_filled_up() -> None:
    shape = StaticShape(source=130, target=80, rows=30, longest=40)
    plain, batch = filled_up(shape)
    assert (len(batch.source.tokens), len(batch.target.tokens)) == (130, 80)
    assert (len(batch.labels), len(batch), batch.source.longest) == (80, 30, 40)
    lengths = batch.source.ends.diff()
    assert lengths.max() <= 40
    read = batch.target.ends.diff()
    assert lengths[read > 0].min() >= 1  # nobody reads a source of nothing
    assert not shape.fits(129, 10, 3)
    into, other = batch.copy(), filled_up(shape, seed=4)[1]
    into.copy_(other)
    assert torch.equal(into.source.tokens, other.source.tokens)
    assert torch.equal(into.target.task_of_row, other.target.task_of_row)
    assert torch.equal(into.labels, other.labels)
    assert not torch.equal(batch.labels, other.labels)
    assert len(plain) == 12

"""Batches: what encoder and decoder read and predict; full ones of a static shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gradvac
from gradvac.lab.recipes.nmt import Batch, Ragged, Transformer, make_batch
from gradvac.lab.recipes.nmt.batches import (
    StaticShape,
    cut_full,
    make_static_shape,
    rows_to_draw,
)

SOURCES = Ragged.of([[9, 4], [9, 5, 6, 7]]).add_special_tokens(np.array([30, 31]), 2)
TARGETS = Ragged.of([[8, 8, 8], []]).add_special_tokens(1, 2)
LONGEST = 130
Numbers = npt.NDArray[np.int64]


def test_padded_layout() -> None:
    batch = make_batch(SOURCES, TARGETS, [0, 3])
    assert batch.source.tokens.tolist() == [[30, 9, 4, 2, 0, 0], [31, 9, 5, 6, 7, 2]]
    assert batch.target.tokens.tolist() == [[1, 8, 8, 8], [1, 0, 0, 0]]
    assert batch.labels.tolist() == [8, 8, 8, 2, 2]
    assert batch.sentence_of_label.tolist() == [0, 0, 0, 0, 1]
    assert batch.row_of_label.tolist() == [0, 0, 0, 0, 1]
    assert batch.num_tokens == 5
    assert batch.source.mask is not None
    assert batch.source.mask.squeeze().tolist() == [[True] * 4 + [False] * 2, [True] * 6]


def test_packed_layout() -> None:
    batch = make_batch(SOURCES, TARGETS, [0, 3], packed=True)
    assert batch.source.tokens.tolist() == [30, 9, 4, 2, 31, 9, 5, 6, 7, 2]
    assert batch.source.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert batch.source.ends.tolist() == [0, 4, 10]
    assert batch.source.sentence_of_row.tolist() == [0] * 4 + [1] * 6
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
    sources = Ragged.of([draw.integers(4, 50, n) for n in draw.integers(1, 8, 12)])
    targets = Ragged.of([draw.integers(4, 50, n) for n in draw.integers(1, 7, 12)])
    sources, targets = sources.add_special_tokens(3, 2), targets.add_special_tokens(1, 2)
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
    assert torch.equal(into.target.sentence_of_row, other.target.sentence_of_row)
    assert torch.equal(into.labels, other.labels)
    assert not torch.equal(batch.labels, other.labels)
    assert len(plain) == 12


def drawn(num: int, seed: int, *, ratio: float = 1.0) -> Numbers:
    """Lengths of both sides like those of verses, sorted."""
    draw = np.random.default_rng(seed)
    source = np.clip(draw.lognormal(3.3, 0.45, num), 3, LONGEST - 2)
    target = np.clip(source * draw.normal(ratio, 0.1, num), 3, LONGEST - 2)
    lengths = np.stack([source + 2, target + 1]).astype(np.int64)
    return lengths[:, np.argsort(lengths.sum(0), kind="stable")]


@pytest.mark.parametrize("tokens", [2048, 16384])
@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("shares", [(1.0,), (0.7, 0.25, 0.05), (0.999, 0.001)])
def test_batches_are_full_and_lose_no_sentence(
    tokens: int, ratio: float, shares: tuple[float, ...]
) -> None:
    means = drawn(20_000, 0, ratio=ratio).mean(1)
    shape = make_static_shape(tokens, means, LONGEST)
    num = rows_to_draw(shape, means, 24)
    full = []
    for seed in range(1, 4):
        lengths = [
            drawn(max(1, int(share * num)), 10 * seed + task, ratio=ratio)
            for task, share in enumerate(shares)
        ]
        batches = cut_full(shape, lengths)
        for task, own in enumerate(lengths):
            ends = [(batch[task].start, batch[task].stop) for batch in batches]
            assert [0, *(stop for _, stop in ends)] == [*(start for start, _ in ends), own.shape[1]]
        for batch in batches:
            parts = [own[:, cut] for own, cut in zip(lengths, batch, strict=True)]
            taken = np.concatenate(parts, axis=1)
            assert shape.fits(*taken.sum(1).tolist(), taken.shape[1])
            full.append(float(np.max(taken.sum(1) / [shape.source, shape.target])))
    assert np.mean(full) > (0.96 if tokens > 4096 else 0.93)


def test_tasks_have_the_same_share_of_every_batch() -> None:
    shape = make_static_shape(16384, drawn(20_000, 0).mean(1), LONGEST)
    lengths = [drawn(9000, 1), drawn(3000, 2)]
    batches = cut_full(shape, lengths)
    assert len(batches) > 20
    tokens = np.array(
        [[own[:, cut].sum() for own, cut in zip(lengths, batch, strict=True)] for batch in batches]
    )
    shares = tokens[:, 0] / tokens.sum(1)
    assert np.abs(shares - shares.mean()).max() < 0.02


def test_sentences_that_fit_one_at_a_time_do_so() -> None:
    shape = make_static_shape(LONGEST, np.array([LONGEST, LONGEST / 2]), LONGEST)
    lengths = np.full((2, 5), LONGEST)
    assert [batch[0].stop for batch in cut_full(shape, [lengths])] == [1, 2, 3, 4, 5]

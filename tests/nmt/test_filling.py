"""Full batches of one size: every sentence once, every batch within its size, hardly any room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from gradvac.lab.recipes.nmt.batches import cut_full, make_static_shape, rows_to_draw

LONGEST = 130
Numbers = npt.NDArray[np.int64]


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

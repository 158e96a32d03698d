"""Beam search against searches that anyone can check."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from gradvac.lab.recipes.nmt import (
    Batch,
    BeamSearch,
    Hypothesis,
    Ragged,
    Transformer,
    make_batch,
)
from gradvac.lab.recipes.nmt.beam_search import largest, length_penalty
from gradvac.lab.recipes.nmt.settings import DecodingConfig

BOS, EOS = 1, 2
NUM_WORDS = 3
SOURCES = [[5, 4, 3], [3], [4, 4, 5, 3, 5, 4], [5, 5]]


@pytest.fixture
def model(tiny_model: Callable[..., Transformer]) -> Transformer:
    """A model with strong opinions that does not like to stop."""
    model = tiny_model(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5 if parameter.dim() > 1 else 1.0)
        model.embedding.weight[EOS] *= 0.3
    return model.eval()


def ragged(sources: list[list[int]]) -> Ragged:
    return Ragged.of(sources).add_special_tokens(3, EOS)


def search(
    model: Transformer,
    sources: list[list[int]],
    limits: list[int],
    forbidden: tuple[int, ...] = (),
    **settings: Any,
) -> list[Hypothesis]:
    made = BeamSearch(model, DecodingConfig(**settings), forbidden)
    return made.decode(ragged(sources), limits)


@torch.no_grad()
def log_probs(model: Transformer, source: list[int], words: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of every next token, without any cache, `[len(words) + 1, V]`."""
    batch = make_batch(
        Ragged.of([source]).add_special_tokens(3, EOS),
        Ragged.of([list(words)]).add_special_tokens(BOS, EOS),
        [0],
    )
    states = model.decode(batch.target, model.encode(batch.source), batch.source)
    return model.head(states).log_softmax(-1)


def log_probability(model: Transformer, source: list[int], words: tuple[int, ...]) -> float:
    found = log_probs(model, source, words)
    return float(found[torch.arange(len(words) + 1), torch.tensor([*words, EOS])].sum())


def reference_search(
    model: Transformer, source: list[int], limit: int, num_beams: int, alpha: float
) -> tuple[int, ...]:
    """The same search, a sentence at a time, with plain lists and no cache."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, limit + 1):
        candidates = []
        for score, words in beams:
            next_word = log_probs(model, source, words)[-1]
            words_left = range(3, len(next_word)) if length < limit else ()
            for token in (EOS, *words_left):
                candidates.append((score + float(next_word[token]), words, token))
        candidates.sort(key=lambda c: -c[0])
        for score, words, token in candidates[:num_beams]:
            if token == EOS:
                ended.append((score / length_penalty(length, alpha), words))
        open_ones = [c for c in candidates[: 2 * num_beams] if c[2] != EOS]
        beams = [(score, (*words, token)) for score, words, token in open_ones[:num_beams]]
        if len(ended) >= num_beams:
            break
    return max(ended, key=lambda e: e[0])[1]


def test_a_wide_beam_finds_the_best_of_all(model: Transformer) -> None:
    limit, lengths = 5, set()
    everything = [
        {
            words: log_probability(model, source, words)
            for n in range(limit)
            for words in product((3, 4, 5), repeat=n)
        }
        for source in SOURCES
    ]
    for alpha in (0.0, 0.6, 2.0):
        options = {"beams": NUM_WORDS**limit, "length_penalty": alpha, "forbidden": (0, BOS)}
        wide = search(model, SOURCES, [limit] * 4, **options)
        for logs, found in zip(everything, wide, strict=True):
            scores = {w: log / length_penalty(len(w) + 1, alpha) for w, log in logs.items()}
            best = max(scores, key=scores.__getitem__)
            assert found.tokens == best
            assert found.score == pytest.approx(scores[best], rel=1e-5)
            lengths.add(len(best))
    assert max(lengths) > 1  # the test would be hollow if nothing were said


@pytest.mark.parametrize("num_beams", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_equals_a_search_without_cache_or_batch(
    model: Transformer, num_beams: int, alpha: float
) -> None:
    limits = [9, 4, 12, 7]
    found = search(model, SOURCES, limits, (0, BOS), beams=num_beams, length_penalty=alpha)
    for source, limit, hypothesis in zip(SOURCES, limits, found, strict=True):
        assert hypothesis.tokens == reference_search(model, source, limit, num_beams, alpha)


@pytest.fixture
def talkative(tiny_model: Callable[..., Transformer]) -> Transformer:
    """A model with so many words that the largest probabilities are sought by chunks."""
    model = tiny_model(2200, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_sentences_do_not_notice_each_other(talkative: Transformer, num_beams: int) -> None:
    """One slot, some that are refilled, or one each: the tokens are those of a search alone."""
    draw = np.random.default_rng(0)
    sources = [draw.integers(3, 2200, length).tolist() for length in draw.integers(1, 30, 14)]
    limits = [int(limit) for limit in draw.integers(1, 13, 14)]
    expected = []
    for source, limit in zip(sources, limits, strict=True):
        words = reference_search(talkative, source, limit, num_beams, 0.6)
        score = log_probability(talkative, source, words) / length_penalty(len(words) + 1, 0.6)
        expected.append((words, pytest.approx(score, rel=1e-6)))
    assert len({len(words) for words, _ in expected}) > 4
    for memory, check_every in [(1, 1), (400_000, 3), (None, 1), (None, 5)]:
        settings = DecodingConfig(beams=num_beams, memory=memory and memory / (1 << 30))
        beam_search = BeamSearch(talkative, settings, (0, BOS), check_every=check_every)
        assert beam_search.decode(ragged(sources), limits) == expected
        # What one call leaves in the slots must not reach the next.
        assert beam_search.decode(ragged(sources[::-1]), limits[::-1]) == expected[::-1]


@pytest.mark.parametrize("length", [5, 64, 2048, 2200])
@pytest.mark.parametrize("num", [1, 2, 8])
def test_the_largest_are_found_by_chunks_too(length: int, num: int) -> None:
    torch.manual_seed(length)
    values = torch.randn(3, 2, length)
    num = min(num, length)
    found, where = largest(values, num)
    torch.testing.assert_close((found, where), tuple(values.topk(num)))


def test_one_beam_is_greedy(model: Transformer) -> None:
    for source in SOURCES:
        words: tuple[int, ...] = ()
        while len(words) < 7:
            allowed = log_probs(model, source, words)[-1]
            allowed[[0, BOS]] = -math.inf
            token = int(allowed.argmax())
            if token == EOS:
                break
            words = (*words, token)
        (found,) = search(
            model,
            [source],
            [8],
            (0, BOS),
            beams=1,
        )
        assert found.tokens == words


def test_forbidden_tokens_and_limits_hold(model: Transformer) -> None:
    found = search(model, SOURCES * 5, [1, 2, 3, 4] * 5, (0, BOS, 5), beams=4, length_penalty=3.0)
    assert all(len(h.tokens) < limit for h, limit in zip(found, [1, 2, 3, 4] * 5, strict=True))
    assert not {0, BOS, 5, EOS} & {token for h in found for token in h.tokens}


def test_the_length_penalty_is_that_of_the_literature() -> None:
    assert length_penalty(7, 0.5) == pytest.approx(np.sqrt(2.0))


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_model_of_no_numbers_does_not_translate(model: Transformer, num_beams: int) -> None:
    with torch.no_grad():
        next(model.decoder.parameters())[0] = math.nan
    with pytest.raises(ValueError, match=r"model: .*not finite"):
        search(model, SOURCES, [4, 5, 6, 7], beams=num_beams)


def test_what_a_search_leaves_in_the_model_can_be_trained(
    model: Transformer, random_batch: Callable[..., Batch]
) -> None:
    search(model, [[3] * 300], [2])  # the table of positions grows
    model.train()(random_batch(packed=False, vocabulary=6)).sum().backward()
    assert not model.positions.table.is_inference()

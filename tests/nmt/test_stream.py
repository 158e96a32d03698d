"""The stream of batches: budget, mixture, fairness, exact continuation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from gradvac.lab.recipes.nmt import Batch, Stream, TaskData, TokenFile, TokenWriter
from gradvac.lab.recipes.nmt.settings import BatchConfig
from gradvac.lab.training import BatchSlice, SamplingConfig
from gradvac.lab.training.settings import TemperaturePhase

SIZES = {"en-aa": 600, "en-bb": 80, "en-cc": 3}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[TaskData]:
    """Sentences that start with their number, and translations of about the same length."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = np.random.default_rng(0)
    found = []
    for position, (name, size) in enumerate(SIZES.items()):
        lengths = draw.integers(2, 18, size)
        for side in "st":
            with TokenWriter(folder / f"{name}.{side}", 10_000) as writer:
                writer.write([n, *[7] * (lengths[n] + draw.integers(-1, 2))] for n in range(size))
        files = [TokenFile(folder / f"{name}.{side}", 10_000) for side in "st"]
        found.append(TaskData(name, files[0], files[1], tag=9000 + position))
    return found


@pytest.fixture
def stream(tasks: list[TaskData]) -> Callable[..., Stream]:
    def build(
        tokens: int = 300, chunk: int = 6, temperature: float = 5.0, **options: Any
    ) -> Stream:
        sampling = options.pop("sampling", SamplingConfig(temperature=temperature))
        return Stream(tasks, sampling, BatchConfig(tokens=tokens, chunk=chunk), **options)

    return build


def pairs_of(batch: Batch) -> list[tuple[int, int]]:
    """Task and number of every sentence."""
    return list(zip(batch.tasks.tolist(), batch.source.tokens[:, 1].tolist(), strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_no_side_of_a_batch_exceeds_the_budget(stream: Callable[..., Stream], packed: bool) -> None:
    sizes = []
    for batch in islice(stream(packed=packed), 200):
        sizes.append(max(batch.source.tokens.numel(), batch.target.tokens.numel()))
    assert max(sizes) <= 300
    assert np.mean(sizes) > (255 if packed else 190)  # and they are not half empty either


def test_tiny_budgets_still_work(stream: Callable[..., Stream]) -> None:
    longest = 22
    for batch in islice(stream(tokens=longest), 100):
        assert batch.source.tokens.numel() <= longest
        assert batch.target.tokens.numel() <= longest


def test_rows_are_sorted_by_task_and_tasks_are_mixed(stream: Callable[..., Stream]) -> None:
    present = Counter[int]()
    for batch in islice(stream(), 100):
        assert bool((batch.tasks[1:] >= batch.tasks[:-1]).all())
        present.update(set(batch.tasks.tolist()))
    assert min(present.values()) > 90  # also the task with three sentences


def test_pairs_belong_together_and_carry_their_language(stream: Callable[..., Stream]) -> None:
    for batch in islice(stream(), 20):
        assert torch.equal(batch.source.tokens[:, 0], 9000 + batch.tasks)
        firsts = torch.ones_like(batch.labels, dtype=torch.bool)
        firsts[1:] = batch.sentence_of_label[1:] != batch.sentence_of_label[:-1]
        assert torch.equal(batch.labels[firsts], batch.source.tokens[:, 1])


def test_every_sentence_comes_once_a_pass(stream: Callable[..., Stream]) -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for batch in islice(stream(temperature=1.0), 150):
        for task, number in pairs_of(batch):
            seen[task].append(number)
    # A chunk holds batches in any order, so passes are counted with the slack of one chunk.
    for task, size in enumerate(SIZES.values()):
        counts = Counter(seen[task])
        assert len(counts) == size
        assert max(counts.values()) - min(counts.values()) <= 1 + 140 // size


def test_shares_follow_the_temperature(stream: Callable[..., Stream]) -> None:
    for temperature, share in ((1.0, 80 / 683), (float("inf"), 1 / 3)):
        rows = Counter[int]()
        for batch in islice(stream(temperature=temperature), 400):
            rows.update(batch.tasks.tolist())
        assert rows[1] / rows.total() == pytest.approx(share, abs=0.02)


def test_the_temperature_schedule_counts_optimizer_steps(stream: Callable[..., Stream]) -> None:
    phase = TemperaturePhase(from_step=20, temperature=float("inf"))
    sampling = SamplingConfig(temperature=1.0, schedule=[phase])
    batches = list(islice(stream(sampling=sampling, accumulation=2), 120))
    before = torch.cat([batch.tasks for batch in batches[:40]])
    after = torch.cat([batch.tasks for batch in batches[60:]])
    assert (before == 2).float().mean() < 0.03
    assert (after == 2).float().mean() > 0.25


def test_sentences_of_a_batch_are_of_like_length(stream: Callable[..., Stream]) -> None:
    def mean_spread(chunk: int) -> float:
        batches = islice(stream(chunk=chunk), 60)
        return float(np.mean([batch.source.ends.diff().double().std() for batch in batches]))

    assert mean_spread(12) < 0.7 * mean_spread(1)


@pytest.mark.parametrize("options", [{}, {"packed": True, "longest": 22}])
@pytest.mark.parametrize("stop", [0, 1, 5, 6, 17])
def test_continues_exactly(
    stream: Callable[..., Stream], stop: int, options: dict[str, Any]
) -> None:
    whole = stream(**options)
    for _ in range(stop):
        next(whole)
    resumed = stream(**options)
    resumed.load_state_dict(whole.state_dict())
    for ours, theirs in islice(zip(whole, resumed, strict=False), 20):
        assert torch.equal(ours.source.tokens, theirs.source.tokens)
        assert torch.equal(ours.labels, theirs.labels)
    assert whole.state_dict() == resumed.state_dict()


def test_seeds_differ(stream: Callable[..., Stream]) -> None:
    one, other, again = stream(seed=1), stream(seed=2), stream(seed=1)
    assert pairs_of(next(one)) == pairs_of(next(again))
    assert pairs_of(next(one)) != pairs_of(next(other))


def test_batches_that_were_cut_otherwise_are_not_continued(stream: Callable[..., Stream]) -> None:
    packed = stream(packed=True)
    next(packed)
    for other in (stream(), stream(packed=True, longest=30)):
        with pytest.raises(ValueError, match="packed = True"):
            other.load_state_dict(packed.state_dict())
    stream(packed=True).load_state_dict(packed.state_dict())


FORMS = [{}, {"packed": True}, {"packed": True, "longest": 22}]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_of_processes_are_the_batch(
    stream: Callable[..., Stream], form: dict[str, Any], size: int
) -> None:
    """Every row once, tokens in equal shares, few tasks each; and the state of all is one."""
    whole = stream(**form, tokens=120)
    parts = [stream(**form, tokens=120, batch_slice=BatchSlice(n, size)) for n in range(size)]
    shares, num_tasks = [], []
    for _ in range(60):
        batch, own = next(whole), [next(part) for part in parts]
        counted = [one for one in own if one.counts is None]
        empty = [one for one in own if one.counts is not None]
        num_rows = len(batch) if batch.counts is None else int(batch.counts.sum())
        labels = batch.labels[: batch.num_tokens]  # those of one size are filled up behind
        assert torch.equal(torch.cat([one.labels for one in counted]), labels)
        assert torch.equal(torch.cat([one.tasks for one in counted]), batch.tasks[:num_rows])
        assert {one.num_tokens for one in own} == {batch.num_tokens}
        assert len(counted) == min(size, num_rows)
        assert all(len(one) == 1 and not bool(one.counts.any()) for one in empty)  # type: ignore[union-attr]
        shares += [len(one.labels) / batch.num_tokens for one in counted]
        num_tasks += [len(one.tasks.unique()) for one in counted]
        assert all(part.state_dict() == whole.state_dict() for part in parts)
    assert np.mean(num_tasks) < 1 + 3 / size
    if size < 8:
        assert max(shares) < 1.6 / size
    whole.load_state_dict(parts[-1].state_dict())  # by any number of processes
    assert torch.equal(next(whole).labels[:1], next(parts[0]).labels[:1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slots_give_every_process_few_tasks(stream: Callable[..., Stream], size: int) -> None:
    def make(part: BatchSlice) -> Stream:
        sampling = SamplingConfig(temperature=100.0, slots=4)
        return stream(tokens=400, chunk=2, packed=True, sampling=sampling, batch_slice=part)

    whole, parts = make(BatchSlice()), [make(BatchSlice(n, size)) for n in range(size)]
    num_tasks = []
    for _ in range(30):
        batch, own = next(whole), [next(part) for part in parts]
        num_tasks += [len(set(one.tasks.tolist())) for one in own]
        assert torch.equal(torch.cat([one.labels for one in own]), batch.labels)
        assert all(part.state_dict() == whole.state_dict() for part in parts)
    assert max(num_tasks) <= max(1, 4 // size)


def test_thinned_data_auto_temperature_and_high_resource_first(
    stream: Callable[..., Stream],
) -> None:
    thin = stream(sampling=SamplingConfig(thin=4))
    assert {number % 4 for batch in islice(thin, 60) for _, number in pairs_of(batch)} == {0}
    few, many = (stream(sampling=SamplingConfig(temperature="auto"), num_steps=n) for n in (2, 900))
    shares = [
        np.mean([task > 0 for batch in islice(one, 60) for task, _ in pairs_of(batch)])
        for one in (few, many)
    ]
    assert shares[1] < shares[0] / 2  # long training sees small tasks often enough
    first = stream(sampling=SamplingConfig(high_first=0.5), num_steps=60)
    tasks_by_step = [{task for task, _ in pairs_of(batch)} for batch in islice(first, 60)]
    assert set.union(*tasks_by_step[:24]) == {0}
    assert set.union(*tasks_by_step[40:]) == {0, 1, 2}

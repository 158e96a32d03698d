"""What makes large corpora possible: work on all cores in order, and fingerprints on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gradvac.lab.recipes.common.readers import Problem
from gradvac.lab.recipes.nmt import NmtConfig, prepare_corpus, tokens, workers
from gradvac.lab.recipes.nmt.cleaning import CleaningConfig, Report, SeenFingerprints, clean_pairs
from gradvac.lab.recipes.nmt.readers import Line
from gradvac.lab.recipes.nmt.recipe import TranslationWorkload
from gradvac.lab.recipes.nmt.workers import chunks, ordered_map
from gradvac.utils.hints import log_to


def test_seen_is_a_set() -> None:
    draw = np.random.default_rng(0)
    seen, known = SeenFingerprints(), set[int]()
    for size in [5, 0, 1, 300, 40, 2000, 7, 900]:
        marks = draw.integers(0, 3000, size).astype(np.uint64)
        expected = []
        for mark in marks.tolist():
            expected.append(mark not in known)
            known.add(mark)
        assert seen.add(marks).tolist() == expected
    assert sum(map(len, seen._runs)) == len(known)
    assert len(seen._runs) < 8


def test_results_come_in_the_order_of_the_items() -> None:
    found = list(ordered_map(pow, range(60), shared=(3,), processes=1, alone=2))
    assert found == [(number, number**3) for number in range(60)]
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]


def lines() -> Iterator[Line]:
    for number in range(2300):
        if number % 500 == 7:
            yield Problem.NOT_UTF8
        yield f"sentence number {number % 1200}", f"satz nummer {number % 1200}"


def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LINES_AT_ONCE", 100)
    monkeypatch.setattr(workers, "_ALONE", 3)
    results = []
    for processes in (1, 2):
        report = Report()
        held_out = ({1}, {2})
        kept = clean_pairs(
            lines(), CleaningConfig(), report, held_out=held_out, processes=processes
        )
        results.append((sum(hash(pair) for pair in kept), report.to_dict()))
    assert results[0] == results[1]
    assert results[0][1]["kept"] == 1200
    assert results[0][1]["dropped"] == {"repetition": 1100, "not UTF-8": 5}


@pytest.fixture
def a_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real instance of Ray on this machine, with two workers."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of what it does
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # writes no token into the home folder
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("a_cluster")
def test_a_cluster_prepares_the_same_files(
    toy_config: Callable[..., NmtConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workers, "LINES_AT_ONCE", 200)
    monkeypatch.setattr(workers, "_ALONE", 2)
    signatures, found = [], []
    for backend in ("processes", "ray"):
        data = {
            "limit": {},
            "backend": backend,
            "processes": 1,
            "prepared": str(tmp_path / backend),
        }
        prepared = prepare_corpus(toy_config(data=data).data)
        signatures.append(prepared.signature)
        files = sorted((tmp_path / backend / "tokens").glob("*.bin"))
        found.append({path.name: path.read_bytes() for path in files})
    assert signatures[0] == signatures[1]
    assert found[0] == found[1]
    assert len(found[0]) >= 4


def test_shards_are_one_corpus_and_are_made_again_one_by_one(
    toy_config: Callable[..., NmtConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config(data={"limit": {}}).data
    whole = prepare_corpus(config)
    numbers = np.random.default_rng(0).integers(0, whole.sizes["train"]["en-xx"], 300)
    expected = [side.gather(numbers) for side in whole.task_tokens("train", "xx-en")]
    monkeypatch.setattr(tokens, "PAIRS_PER_SHARD", 700)
    said: list[str] = []
    with log_to(said.append):
        parts = prepare_corpus(config)
    assert "Tokenising train en-xx.00002" in said
    assert len(parts.shards["train.en-xx"]) == 4
    assert parts.sizes == whole.sizes
    for side, own in zip(parts.task_tokens("train", "xx-en"), expected, strict=True):
        assert len(side) == whole.sizes["train"]["en-xx"]
        assert side.gather(numbers).tokens.tolist() == own.tokens.tolist()
        assert side.lengths(numbers).tolist() == own.lengths.tolist()
    (config.prepared / "tokens" / "train.en-xx.00001.xx.bin").unlink()
    said.clear()
    with log_to(said.append):
        prepare_corpus(config)
    assert said == ["Tokenising train en-xx.00001"]


def test_nothing_is_opened_before_it_is_needed(
    toy_config: Callable[..., NmtConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PAIRS_PER_SHARD", 40)
    settings = toy_config(data={"limit": {}})
    recipe = TranslationWorkload(settings, prepare_corpus(settings.data))
    sources, _ = recipe.prepared.task_tokens("train", "en-xx")
    assert len(sources._paths) > 50
    assert not sources._files
    sources.gather(np.array([3, 39, 45]))
    assert sorted(sources._files) == [0, 1]
    assert next(recipe.batches()).num_tokens > 0

"""Claims and chance: without structure, few sentences claim anything; what was planted is found."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from gradvac.analysis import statistics
from gradvac.analysis.report import describe_difference, run_headline, summarise
from gradvac.analysis.run import Run

from . import structure


def claims(run: Run) -> set[str]:
    """Kinds of sentences that claim something."""
    said = summarise(run)
    found = {sentence.about for sentence in said if sentence.claims}
    return found | ({"headline"} if run_headline(run, said).claims else set())


def claims_of_two(first: Run, second: Run) -> set[str]:
    said = [sentence.text for sentence in describe_difference(first, second) if sentence.claims]
    return {"pattern" if text.startswith("The same pairs") else "difference" for text in said}


@pytest.mark.parametrize(
    ("num", "settings"),
    [
        (100, {}),
        (100, {"measured": False}),
        (40, {"num_tasks": 4}),
        (24, {"num_tasks": 4, "directions": ("en-{}", "{}-en")}),
    ],
    ids=["measured", "recorded", "four tasks", "both ways"],
)
def test_without_structure_claims_are_rare(num: int, settings: dict) -> None:
    found: Counter[str] = Counter()
    for seed in range(num):
        draw = np.random.default_rng(seed)
        run = structure.make(draw, **settings)
        found.update(claims(run))
        if not seed % 2:
            other = structure.make(draw, name="other", **settings)
            found.update(dict.fromkeys(claims_of_two(run, other), 2))
    # A twentieth, and what chance adds to it in so many sets.
    assert max(found.values(), default=0) <= binom.ppf(0.995, num, 0.05), found


@pytest.mark.parametrize(
    ("planted", "kinds"),
    [
        ({"family": 0.25}, {"Relatives", "headline"}),
        ({"by_side": 0.3}, {"Encoder and decoder"}),
        ({"by_depth": 0.38}, {"Depth"}),
        ({"by_step": 0.3}, {"Time"}),
        ({"by_step": 0.3, "measured": False, "num_steps": 24}, {"Time"}),
    ],
    ids=lambda value: "-".join(sorted(map(str, value))),
)
def test_what_was_planted_is_found(planted: dict, kinds: set[str]) -> None:
    found = Counter(
        kind
        for seed in range(6)
        for kind in claims(structure.make(np.random.default_rng(seed), **planted))
    )
    assert all(found[kind] >= 4 for kind in kinds), found


def test_a_planted_distance_and_a_planted_difference_are_found() -> None:
    draw = np.random.default_rng(0)
    run = structure.make(draw, family=0.25)
    far = np.array(
        [[0.3 if a == b else 1.0 for b in structure.FAMILIES] for a in structure.FAMILIES]
    )
    near = replace(run.distances, values=far)  # type: ignore[union-attr]
    assert "Distance" in claims(structure_with(run, near))
    other = structure.make(draw, name="other", shared=0.5)
    assert "difference" in claims_of_two(structure.make(draw), other)


def structure_with(run: Run, distances: object) -> Run:
    return replace(run, distances=distances)  # type: ignore[arg-type]


@pytest.mark.parametrize("reliability", [0.03, 0.06, 0.3, 0.75])
def test_corrected_similarity_is_near_the_truth_or_refused(
    reliability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of ratios was off by up to 0.3 at low reliability, and single pairs by 9."""
    monkeypatch.setattr(structure, "SIZE", 1000)
    told, wrong = 0, 0
    for seed in range(16):
        draw = np.random.default_rng(seed)
        true = structure.gradients(draw, shared=0.5, num_steps=1)
        halves = structure.halves_of(
            tuple("abcdefg"), *(structure.noisy(draw, true, reliability) for _ in range(2))
        )[1]
        found = statistics.corrected(halves)
        assert found is not None
        truth = structure.cosines(true, true).mean(axis=(0, 1))
        apart = ~np.eye(7, dtype=bool) & ~np.isnan(found.values)
        told += int(apart.sum())
        wrong += int((np.abs(found.values - truth)[apart] > statistics.REACH).sum())
        if not np.isnan(found.mean):
            assert abs(found.mean - truth[~np.eye(7, dtype=bool)].mean()) < 0.05
    assert wrong <= 0.05 * told
    if reliability < 0.1:
        assert told == 0
    if reliability > 0.5:
        assert told > 0.5 * 16 * 42


def test_predicted_harm_is_claimed_rarely_without_any() -> None:
    """Gradients at right angles: no task does anything to another."""
    num, alarms = 60, Counter[str]()
    for seed in range(num):
        draw = np.random.default_rng(seed)
        true = np.zeros((8, len(structure.COMPONENTS), 5, structure.SIZE))
        true[..., range(5), range(5)] = 1.0
        a, b = (structure.noisy(draw, true, 0.5) for _ in range(2))
        measured = statistics.measured_influence(structure.halves_of(tuple("abcde"), a, b)[1])
        batches = true + draw.normal(size=true.shape) / structure.SIZE**0.5
        record = structure.record_of(tuple("abcde"), batches)
        recorded = statistics.recorded_influence(record)
        for name, influence in (("measured", measured), ("recorded", recorded)):
            assert influence is not None
            apart = ~np.eye(5, dtype=bool)
            alarms[name] += min(statistics.holm(influence.p_values[apart].tolist())) < 0.05
    assert max(alarms.values()) <= binom.ppf(0.995, num, 0.05), alarms

"""Statistics against values computed by hand or by SciPy."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from gradvac.analysis import Record, Similarities, statistics
from gradvac.analysis.similarities import layer_of, weighty
from gradvac.analysis.statistics import over_steps
from gradvac.engine.components import side_of

# Two families, {0, 1} and {2, 3}: within 0.8 and 0.6, between 0.1, 0.2, 0.3, 0.0.
MATRIX = np.array(
    [
        [1.0, 0.8, 0.1, 0.2],
        [0.8, 1.0, 0.3, 0.0],
        [0.1, 0.3, 1.0, 0.6],
        [0.2, 0.0, 0.6, 1.0],
    ]
)
TASKS = ("a", "b", "c", "d")


def similarities(values: Any, components: tuple[str, ...], tasks: Any = TASKS) -> Similarities:
    values = np.asarray(values, dtype=np.float32)
    return Similarities(tuple(tasks), components, np.arange(len(values)), values)


@pytest.mark.parametrize(
    ("component", "side", "layer"),
    [
        ("encoder.layers.3", "encoder", 3),
        ("decoder.layers.10", "decoder", 10),
        ("decoder.layers.0.encoder_attn", "decoder", 0),
        ("embedding", "shared", None),
        ("encoder.norm", "encoder", None),
        ("bert.encoder.layer.11.output", "encoder", 11),
        ("model", "shared", None),
        ("layers.2", "shared", 2),
        ("conv2d.x1", "shared", None),
        ("layer2.1.conv1", "shared", 2),
        ("mt5.encoder.block.7", "encoder", 7),
    ],
)
def test_names_of_components(component: str, side: str, layer: int | None) -> None:
    assert side_of(component) == side
    assert layer_of(component) == layer


def test_sides_agree_with_granularity_enc_dec() -> None:
    """What `enc_dec` calls a side and what the statistics call it are the same."""
    import torch

    from gradvac.engine import split

    model = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    for side, members in split(model, "enc_dec").items():
        assert {side_of(name) for name in members} == {side}


def test_normalisations_do_not_count_as_much_as_layers() -> None:
    small = ("encoder.norm", "encoder.layers.0.norm1.weight", "h.3.ln_1", "decoder.layers.1.bias")
    large = ("encoder.layers.0", "embedding", "encoder.layers.0.self_attn.in_proj_weight", "normal")
    assert weighty([*small, *large]) == [False] * 4 + [True] * 4
    assert weighty(["encoder.norm", "decoder.layers.0"], "encoder") == [True, False]  # all it has
    components = ("encoder.layers.0", "encoder.norm", "decoder.layers.0", "decoder.norm")
    values = np.ones((1, 4, 2, 2))
    values[0, :, 0, 1] = values[0, :, 1, 0] = [0.3, 0.1, 0.2, 0.9]
    found = similarities(values, components, ("a", "b"))
    assert statistics.encoder_minus_decoder(found)[0, 1] == pytest.approx(0.1)
    assert statistics.mean_matrix(found)[0, 1] == pytest.approx(0.25)
    assert statistics.mean_by_step(found) == pytest.approx([0.25])
    assert statistics.mean_by_step(found, ("a", "b")) == pytest.approx([0.25])


def test_means_by_side_layer_and_step() -> None:
    components = ("encoder.0", "encoder.1", "decoder.0", "embedding")
    pair = np.array([[[0.1, 0.3, 0.5, 0.9]], [[0.3, 0.5, np.nan, 0.9]]])  # [S, 1, K]
    values = np.ones((2, 4, 2, 2))
    values[:, :, 0, 1] = values[:, :, 1, 0] = pair[:, 0]
    found = similarities(values, components, ("a", "b"))
    assert statistics.mean_matrix(found, "encoder")[0, 1] == pytest.approx(0.3)
    assert statistics.mean_matrix(found)[0, 1] == pytest.approx((0.1 + 0.3 + 0.5 + 1.8 + 0.8) / 7)
    assert statistics.encoder_minus_decoder(found)[0, 1] == pytest.approx(-0.2)
    by_layer = statistics.mean_by_layer(found)
    assert set(by_layer) == {"encoder", "decoder"}
    assert [n for n, _ in by_layer["encoder"]] == [0, 1]
    np.testing.assert_allclose([mean for _, mean in by_layer["encoder"]], [0.2, 0.4], atol=1e-6)
    np.testing.assert_allclose(by_layer["decoder"], [(0, 0.5)], atol=1e-6)
    expected = [(0.1 + 0.3 + 0.5 + 0.9) / 4, (0.3 + 0.5 + 0.9) / 3]
    np.testing.assert_allclose(statistics.mean_by_step(found), expected, atol=1e-6)
    np.testing.assert_allclose(statistics.mean_by_step(found, ("b", "a")), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"side: .*'head'"):
        statistics.mean_matrix(found, "head")


def test_only_eligible_pairs_in_layers_count() -> None:
    """Task a alone is vaccinated: of six pairs in a layer, its two can be altered."""
    components = ("encoder.layers.0", "encoder.norm")
    similarity = np.full((2, 2, 3, 3), 0.1, dtype="f4")
    similarity[0, :, 0, 1] = similarity[0, :, 1, 0] = similarity[0, :, 1, 2] = -0.1
    similarity[1, :, 0, 2] = np.nan
    active = np.zeros((2, 2, 3, 3), dtype=bool)
    active[0, :, 0, 1] = True
    task, component = np.zeros((2, 2, 3), dtype="f4"), np.zeros((2, 2), dtype="f4")
    record = Record(
        ("a", "b", "c"), components, np.array([10, 20]), similarity, np.zeros_like(similarity),
        active, task, task, component, component, "gradvac", vaccinated=("a",),
    )  # fmt: skip
    counts = statistics.rule_counts(record)
    assert counts.eligible.tolist() == [2, 1]
    assert counts.active.tolist() == [1, 0]
    assert counts.conflicts.tolist() == [1, 0]
    assert counts.share(counts.active).tolist() == [0.5, 0.0]
    # A record that does not say who is vaccinated shows it: row a alone was ever active.
    assert replace(record, vaccinated=None).eligible().tolist() == [0]
    moved = record.target.copy()
    moved[1, 0, 2, 1] = 0.01  # and row c has a target that moves
    assert replace(record, vaccinated=None, target=moved).eligible().tolist() == [0, 2]
    idle = replace(record, vaccinated=None, active=np.zeros_like(active))
    assert idle.eligible().tolist() == [0, 1, 2]


def test_counts_of_a_record() -> None:
    similarity = np.array([[[[1, -0.1], [-0.1, 1]]], [[[1, np.nan], [np.nan, 1]]]], dtype="f4")
    active = np.zeros((2, 1, 2, 2), dtype=bool)
    active[0, 0, 0, 1] = True
    task, component = np.zeros((2, 1, 2), dtype="f4"), np.zeros((2, 1), dtype="f4")
    record = Record(
        ("a", "b"), ("k",), np.array([10, 20]), similarity, similarity, active, task, task,
        component, component, "gradvac",
    )  # fmt: skip
    assert statistics.rule_counts(record).active.tolist() == [1, 0]
    assert statistics.rule_counts(record).conflicts.tolist() == [1, 0]
    assert record.similarities().lines == "training"


def test_cluster_order_and_dendrogram() -> None:
    shuffled = [2, 0, 3, 1]
    order = [shuffled[i] for i in statistics.cluster_order(MATRIX[np.ix_(shuffled, shuffled)])]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 1}), frozenset({2, 3})}
    linkage = statistics.dendrogram(MATRIX)
    np.testing.assert_allclose(linkage[:, 2], [0.2, 0.4, 1 - 0.15])  # average linkage by hand
    unknown = MATRIX.copy()
    unknown[0, 3] = unknown[3, 0] = np.nan
    assert sorted(statistics.cluster_order(unknown)) == [0, 1, 2, 3]
    assert statistics.cluster_order(np.ones((1, 1))) == [0]
    with pytest.raises(ValueError, match="one task"):
        statistics.dendrogram(np.ones((1, 1)))


def test_family_contrast_by_hand() -> None:
    """Of the three ways to pair four tasks, the true one is the best: p is near 1/3."""
    found = statistics.family_contrast(MATRIX, ["x", "x", "y", "y"])
    assert found.within == pytest.approx(0.7)
    assert found.between == pytest.approx(0.15)
    assert found.difference == pytest.approx(0.55)
    assert found.p_value == found.least_p_value == pytest.approx(1 / 3)
    worst = statistics.family_contrast(MATRIX, ["x", "y", "y", "x"])
    assert worst.p_value > 0.6


def test_family_contrast_against_all_permutations() -> None:
    draw = np.random.default_rng(3)
    matrix = draw.normal(size=(6, 6))
    matrix = (matrix + matrix.T) / 2
    families = ["x", "x", "x", "y", "y", "z"]
    labels = np.array(families)

    def contrast(order: tuple[int, ...]) -> float:
        own = labels[list(order)]
        pairs = [(i, j) for i in range(6) for j in range(i)]
        within = [matrix[i, j] for i, j in pairs if own[i] == own[j]]
        between = [matrix[i, j] for i, j in pairs if own[i] != own[j]]
        return float(np.mean(within) - np.mean(between))

    every = np.array([contrast(order) for order in permutations(range(6))])
    exact = (np.abs(every) >= abs(contrast(tuple(range(6)))) - 1e-12).mean()
    assert statistics.family_contrast(matrix, families).p_value == pytest.approx(exact)
    opposite = statistics.family_contrast(-matrix, families)
    assert opposite.p_value == pytest.approx(exact)  # two-sided
    large = np.pad(matrix, (0, 6), constant_values=np.nan)  # too many to count: drawn
    drawn = statistics.family_contrast(large, [*families, *"abcdef"], num_permutations=999)
    assert 0 < drawn.p_value <= 1


def test_family_contrast_leaves_out_what_is_unknown() -> None:
    larger = np.full((5, 5), 0.99)
    larger[:4, :4] = MATRIX
    found = statistics.family_contrast(larger, ["x", "x", "y", "y", ""])
    assert found.difference == pytest.approx(0.55)
    larger = MATRIX.copy()
    larger[0, 2] = larger[2, 0] = np.nan
    found = statistics.family_contrast(larger, ["x", "x", "y", "y"])
    assert found.between == pytest.approx(0.5 / 3)
    with pytest.raises(ValueError, match=r"families: .*two tasks of one family"):
        statistics.family_contrast(MATRIX, ["x", "y", "z", "w"])
    with pytest.raises(ValueError, match=r"families: .*4 tasks"):
        statistics.family_contrast(MATRIX, ["x"])
    assert statistics.families_of(["a", "q"], {"a": "x"}) == ["x", ""]


def test_mantel_against_scipy() -> None:
    draw = np.random.default_rng(0)
    points = draw.normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    noise = draw.normal(size=(9, 9)) * 0.1
    matrix = -distances + noise + noise.T
    above = np.triu_indices(9, k=1)
    found = statistics.mantel(matrix, distances)
    assert found.r == pytest.approx(stats.pearsonr(matrix[above], distances[above]).statistic)
    assert found.r < -0.9
    assert found.p_value < 0.001
    ranked = statistics.mantel(matrix, distances, ranks=True, num_permutations=99)
    assert ranked.r == pytest.approx(stats.spearmanr(matrix[above], distances[above]).statistic)
    noise = draw.normal(size=(9, 9))
    unrelated = statistics.mantel(noise + noise.T, distances)
    assert unrelated.p_value > 0.05


def test_mantel_has_the_right_size() -> None:
    """Of tests on unrelated matrices, about a tenth are below 0.1."""
    draw = np.random.default_rng(1)
    p_values = []
    for seed in range(100):
        one, two = (m + m.T for m in draw.normal(size=(2, 7, 7)))
        p_values.append(statistics.mantel(one, two, num_permutations=99, seed=seed).p_value)
    assert 2 <= sum(p <= 0.1 for p in p_values) <= 22


def test_mantel_where_little_is_known() -> None:
    matrix, distances = np.full((2, 4, 4), np.nan)
    for known, first, second in ((matrix, 0.3, 0.1), (distances, 1.0, 2.0)):
        known[[0, 1], [1, 0]], known[[2, 3], [3, 2]] = first, second
    # 8 of 24 orders keep the two known pairs or swap them; the others bring unknown ones alone.
    found = statistics.mantel(matrix, distances)
    assert found.r == pytest.approx(-1)
    assert found.p_value == pytest.approx(8 / 24)


def test_mantel_refuses() -> None:
    with pytest.raises(ValueError, match=r"distances: .*\(4, 4\)"):
        statistics.mantel(MATRIX, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="3 tasks, got 2"):
        statistics.mantel(MATRIX[:2, :2], np.zeros((2, 2)))


def test_similarity_against_score_is_spearman_s() -> None:
    draw = np.random.default_rng(0)
    first = draw.normal(size=12)
    second = first + draw.normal(size=12)
    found = statistics.similarity_against_score(list(zip(first, second, strict=True)))
    expected = stats.spearmanr(first, second)
    assert found.rho == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)
    assert found.interval[0] < found.rho < found.interval[1]
    bootstrap = stats.bootstrap(
        (first, second), lambda a, b: stats.spearmanr(a, b).statistic, paired=True,
        vectorized=False, n_resamples=2000, method="percentile", rng=0,
    )  # fmt: skip
    np.testing.assert_allclose(found.interval, bootstrap.confidence_interval, atol=0.06)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(0.1, 1.0)] * 3, "at least 4"),
        ([(0.1, 1.0), (0.2, np.nan), (0.3, 2.0), (0.4, 3.0)], "NaN"),
        ([(0.1, 1.0), (0.2, 1.0), (0.3, 1.0), (0.4, 1.0)], "scores are equal"),
    ],
)
def test_similarity_against_score_refuses(points: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statistics.similarity_against_score(points)


def test_compare_runs() -> None:
    first = similarities(MATRIX[None, None], ("encoder.0",))
    other = MATRIX * 0.5
    second = similarities(other[None, None][..., ::-1, ::-1], ("encoder.0",), TASKS[::-1])
    found = statistics.compare_similarities(first, second)
    assert found.tasks == TASKS
    np.testing.assert_allclose(found.difference, -0.5 * MATRIX, atol=1e-6)
    assert found.change.first == pytest.approx(2.0 / 6)
    difference = found.change.difference
    assert difference.mean == pytest.approx(-1.0 / 6)
    assert difference.interval[0] < difference.mean < difference.interval[1]
    assert found.pattern is not None
    assert found.pattern.r == pytest.approx(1.0, abs=0.03)  # the half looks noisier
    assert np.isnan(found.pattern.p_value)  # the same lines have the same noise in both
    trained = [replace(one, lines="training") for one in (first, second)]
    assert statistics.compare_similarities(*trained).pattern.p_value < 0.2  # type: ignore[union-attr]


def test_mean_over_tasks_by_hand() -> None:
    """Three tasks, three pairs: leaving out a task leaves one pair."""
    matrix = np.array([[0, 1.0, 2.0], [1.0, 0, 6.0], [2.0, 6.0, 0]])
    found = statistics.mean_over_tasks(matrix)
    error = np.sqrt(2 / 3 * np.sum((np.array([6, 2, 1]) - 3) ** 2))
    assert found.mean == pytest.approx(3)
    assert found.p_value == pytest.approx(2 * stats.t.sf(3 / error, 2))
    assert found.interval[1] - 3 == pytest.approx(stats.t.ppf(0.975, 2) * error)
    assert np.isnan(statistics.mean_over_tasks(matrix[:2, :2]).p_value)
    assert statistics.mean_over_tasks(np.zeros((4, 4))).p_value == 1.0
    unknown = np.pad(matrix, (0, 1), constant_values=np.nan)  # a task of which nothing is known
    assert statistics.mean_over_tasks(unknown) == found


def halves_of(
    draw: np.random.Generator, shared: float, groups: Any = (0,) * 8
) -> tuple[Similarities, Similarities]:
    """Equal tasks on the same and on different lines, with noise that those of a group share."""
    num = len(groups)
    true = draw.normal(size=40) / 40**0.5
    lines, own = draw.normal(size=(2, max(groups) + 1, 40)), draw.normal(size=(2, num, 40))
    lines = lines[:, groups]
    halves = true + (shared**0.5 * lines + (1 - shared) ** 0.5 * own) / 40**0.5
    unit = halves / np.linalg.norm(halves, axis=2, keepdims=True)
    whole = halves.sum(0) / np.linalg.norm(halves.sum(0), axis=1, keepdims=True)
    across = unit[0] @ unit[1].T
    reliability = across.diagonal()[None, None].astype(np.float32)
    tasks = tuple("abcdefghij"[:num])
    same, different = (
        similarities(one[None, None].astype(np.float32), ("encoder.0",), tasks)
        for one in (whole @ whole.T, (across + across.T) / 2)
    )
    return same, replace(different, reliability=reliability, lines="different")


@pytest.mark.parametrize("shared", [0.0, 0.4, 0.9])
def test_noise_of_shared_lines_is_measured(shared: float) -> None:
    draw = np.random.default_rng(0)
    found = [statistics.noise_in_common(*halves_of(draw, shared)) for _ in range(40)]
    means = [statistics.mean_of_pairs(one) for one in found if one is not None]
    assert np.mean(means) == pytest.approx(shared, abs=0.1)


def test_tasks_on_the_same_lines_are_fewer_observations() -> None:
    """Two sets of lines for equal tasks: the means differed "clearly" in a third of all cases."""
    alarms = np.zeros(2)
    for seed in range(200):
        draw = np.random.default_rng(seed)
        (one, halves), (two, _) = halves_of(draw, 0.5), halves_of(draw, 0.5)
        difference = two.values[0, 0] - one.values[0, 0]
        in_common = statistics.noise_in_common(one, halves)
        found = [statistics.mean_over_tasks(difference, r) for r in (None, in_common)]
        assert found[0].mean == found[1].mean
        alarms += [estimate.p_value < 0.05 for estimate in found]
    assert alarms[0] > 50
    assert alarms[1] <= 16


def test_a_change_on_lines_that_all_tasks_share_needs_more() -> None:
    """Equal tasks on the same lines, seen by other weights: a third of them had "changed"."""
    alarms = np.zeros(2)
    for seed in range(100):
        draw = np.random.default_rng(seed)
        steps = [halves_of(draw, 0.6)[0].values for _ in range(4)]
        found = replace(halves_of(draw, 0.6)[0], values=np.concatenate(steps), steps=np.arange(4))
        for n, shared in enumerate((None, np.full((8, 8), 0.6))):
            change = statistics.change_over_steps(found, shared)
            assert change is not None
            alarms[n] += change.p_value < 0.05
    assert alarms[0] > 20
    assert alarms[1] <= 5


def test_relatives_on_the_same_lines_need_a_larger_difference() -> None:
    draw = np.random.default_rng(0)
    noise = draw.normal(size=(9, 9))
    families = [str(i // 3) for i in range(9)]
    related = np.equal.outer(families, families)
    matrix = 0.3 * related + 0.1 * (noise + noise.T)
    alone = statistics.family_contrast(matrix, families)
    for shared in (np.zeros((9, 9)), np.full((9, 9), 0.7)):  # nobody, or everybody
        assert statistics.family_contrast(matrix, families, in_common=shared) == alone
    found = statistics.family_contrast(matrix, families, in_common=0.9 * related)
    assert found.difference == alone.difference
    assert found.p_value > alone.p_value
    far = statistics.mantel(matrix, ~related)  # relatives are near
    assert statistics.mantel(matrix, ~related, in_common=np.zeros((9, 9))) == far
    assert statistics.mantel(matrix, ~related, in_common=0.9 * related).p_value > far.p_value


def test_holm_by_hand() -> None:
    assert statistics.holm([0.01, 0.04, np.nan, 0.03]) == pytest.approx(
        [0.03, 0.06, np.nan, 0.06], nan_ok=True
    )
    assert statistics.holm([]) == []


def test_change_is_within_pairs() -> None:
    """A pair that is known only early, and is very similar, moves the mean but no pair."""
    values = np.full((8, 1, 3, 3), np.nan)
    values[:, 0, 0, 1] = values[:, 0, 1, 0] = 0.1
    values[:4, 0, 0, 2] = values[:4, 0, 2, 0] = 0.9
    found = statistics.change_over_steps(similarities(values, ("encoder.0",), "abc"))
    assert found is not None
    assert (found.first, found.second) == pytest.approx((0.1, 0.1))
    assert not found.p_value < 0.05
    assert (found.until, found.since) == (1, 6)
    assert statistics.change_over_steps(similarities(values[:3], ("encoder.0",), "abc")) is None


def test_depth_by_hand() -> None:
    """Lines and parabolas are found exactly."""
    place = np.linspace(-1, 1, 5)
    layers = [
        statistics.LayerSimilarity(n, 0.3 * x - 0.2 * x**2 + np.array(MATRIX), np.array([0.0]))
        for n, x in enumerate(place)
    ]
    found = statistics.depth(layers, over="tasks")
    assert (found.slope, found.bend) == pytest.approx((0.6, 0.2))
    assert found.bend_p_value < 0.001
    assert np.isnan(statistics.depth(layers[:3], over="tasks").slope_p_value)


def test_runs_of_both_directions_are_matched() -> None:
    assert statistics.match_tasks(["en-fr", "en-hi"], ["hi-en", "fr-en", "tr-en"]) == {
        "en-fr": "fr-en",
        "en-hi": "hi-en",
    }
    both = ["en-fr", "en-hi", "fr-en"]
    assert statistics.match_tasks(["en-fr", "en-hi"], both) == {"en-fr": "en-fr", "en-hi": "en-hi"}
    with pytest.raises(ValueError, match=r"fewer than two .*a, b"):
        statistics.match_tasks(["a", "b"], ["c", "d"])


def test_noisy_tasks_do_not_decide_what_pairs_have_in_common() -> None:
    """Families of tasks with 3, 10 and 60 rows; without weights, 12 % were called relatives."""
    families, alarms = [str(i // 3) for i in range(9)], 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        rows = np.repeat([3, 10, 60], 3)[:, None] ** 0.5
        gradients = draw.normal(size=(4, 1, 20)) + 2 * draw.normal(size=(4, 9, 20)) / rows
        gradients /= np.linalg.norm(gradients, axis=2, keepdims=True)
        cosines = (gradients @ gradients.swapaxes(1, 2)).astype(np.float32)
        names = tuple(f"encoder.layers.{k}" for k in range(4))
        found = similarities(cosines[None], names, tuple("abcdefghi"))
        pattern = statistics.pair_pattern(found)
        alarms += statistics.family_contrast(cosines.mean(0), families, tested=pattern)[3] < 0.05
    assert alarms <= 10


def test_few_lines_lean_away_from_many_without_being_relatives() -> None:
    """Rare lines with large gradients, sets of 8 and 256 lines: 14 % were called relatives."""
    families, names, alarms = [str(i // 5) for i in range(10)], tuple("abcdefghij"), 0
    num = np.repeat([8, 256], 5)
    for seed in range(100):
        draw = np.random.default_rng(seed)
        usual, rare = draw.normal(size=(2, 4, 1, 20))
        often = (draw.binomial(num, 0.05) / num)[:, None]
        noise = 2 * draw.normal(size=(4, 10, 20)) / num[:, None] ** 0.5
        gradients = usual + 4 * rare * often + noise
        gradients /= np.linalg.norm(gradients, axis=2, keepdims=True)
        cosines = (gradients @ gradients.swapaxes(1, 2)).astype(np.float32)
        found = similarities(cosines[None], tuple(f"encoder.layers.{k}" for k in range(4)), names)
        pattern = statistics.pair_pattern(found)
        alarms += statistics.family_contrast(cosines.mean(0), families, tested=pattern)[3] < 0.05
    assert alarms <= 8


@pytest.mark.parametrize(
    ("num", "memory", "noise"),
    [(24, 0.9, 0.5), (40, 0.9, 1.0), (40, 0.97, 0.5), (60, 0.97, 1.0), (200, 0.97, 2.0)],
)
def test_no_slopes_of_slow_changes_below_noise(num: int, memory: float, noise: float) -> None:
    """A fluctuation that all tasks share, below noise without memory."""
    draw = np.random.default_rng(1)
    new = (1 - memory**2) ** 0.5
    slow = lfilter([new], [1.0, -memory], draw.normal(size=(300 + num, 500)), axis=0)[300:]
    series = slow + noise * draw.normal(size=slow.shape)
    false = np.mean([over_steps.trend_over_records(one) < 0.05 for one in series.T])
    assert false <= stats.binom.ppf(0.95, 500, 0.08) / 500


@pytest.mark.parametrize(
    ("memory", "size", "least"), [(0.0, 5, 0.6), (0.0, 8, 0.9), (0.5, 8, 0.9), (0.9, 8, 0.8)]
)
def test_slopes_are_found_and_not_made_up(memory: float, size: int, least: float) -> None:
    draw = np.random.default_rng(0)
    noise = lfilter([1.0], [1.0, -memory], draw.normal(size=(300, 200)), axis=0)[100:]
    steps = np.linspace(-1.7, 1.7, 200)[:, None]
    slope = size / (1 - memory) / 200**0.5  # in standard errors
    flat, rising = (
        [over_steps.trend_over_records(series) < 0.05 for series in values.T]
        for values in (noise, noise + slope * steps)
    )
    assert np.mean(flat) <= 0.05
    assert np.mean(rising) >= least  # of a memory of 0.9, stretches found 0.25


def test_too_short_or_constant_records_have_no_slope() -> None:
    assert np.isnan(over_steps.trend_over_records(np.arange(23.0)))
    assert over_steps.trend_over_records(np.arange(24.0)) < 1e-9
    assert over_steps.trend_over_records(np.full(24, 0.3)) > 0.9


def test_many_tasks_are_shuffled_less_often_and_left_out_at_once() -> None:
    draw = np.random.default_rng(0)
    matrix = draw.normal(size=(120, 120))
    found = statistics.mantel(matrix + matrix.T, draw.normal(size=(120, 120)))
    assert found.p_value * 2802 == pytest.approx(round(found.p_value * 2802), abs=1e-6)
    known = matrix + matrix.T
    np.fill_diagonal(known, np.nan)
    known[3, 5] = known[5, 3] = np.nan
    slow = [np.nanmean(np.delete(np.delete(known, i, 0), i, 1)) for i in range(120)]
    error = np.sqrt(119 / 120 * np.sum((np.array(slow) - np.mean(slow)) ** 2))
    low, high = statistics.mean_over_tasks(known).interval
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 119) * error)

"""The report without a browser: its sentences say the numbers, its data come back, it is small."""

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradvac.analysis import pictures, views
from gradvac.analysis.report import (
    describe_difference,
    payload,
    render,
    summarise,
    write_report,
)
from gradvac.analysis.report.payload import MISSING, UNIT, pack
from gradvac.analysis.report.sentences import describe_source
from gradvac.analysis.report.tables import score_table
from gradvac.analysis.run import KnownDistances, Run
from gradvac.analysis.similarities import Similarities
from gradvac.lab.runs import TaskScores

from .made_runs import make_run
from .structure import SIZE, halves_of

COMPONENTS = ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1")
CODES = ("fr", "es", "de", "cs", "pl", "fi", "et")


def run_with(values: np.ndarray, tasks: list[str], **changes: object) -> Run:
    """A run with nothing but these cosines, `[S, K, T, T]`."""
    run = make_run(codes=CODES, recorded=False, bleu=None)
    steps = np.arange(1, len(values) + 1) * 100
    found = Similarities(tuple(tasks), COMPONENTS, steps, values.astype(np.float32))
    return replace(run, measured=(found,), **changes)


def related(within: float, between: float) -> np.ndarray:
    """`[T, T]` of CODES: relatives share `within`, others `between`."""
    relatives = [0, 0, 0, 1, 1, 2, 2]
    return np.array([[within if a == b else between for b in relatives] for a in relatives])


def summary_text(run: Run) -> str:
    return "\n".join(sentence.text for sentence in summarise(run))


def test_sentences_say_the_numbers() -> None:
    encoder, decoder = related(0.31, 0.19), related(0.05, 0.02)
    values = np.stack([encoder + 0.1, encoder - 0.1, decoder, decoder])[None].repeat(8, axis=0)
    values = values * np.linspace(1.5, 0.5, 8).reshape(-1, 1, 1, 1)
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    # The true families are 2 of 210 ways to give them; two tests stand side by side.
    contrast = "0.12 more similar than others in the encoder: 0.31 against 0.19 (0.10"
    assert f"Languages of one family are {contrast}" in text
    assert "among West Slavic languages 0.31 in the encoder, 0.05 in the decoder" in text
    # 5 pairs of relatives and 16 others.
    assert "The average cosine of two tasks is 0.12, from 0.18 (" in text
    assert "no pair is below 0" in text
    assert "The encoder is more similar than the decoder: 0.22 against 0.03 (difference +" in text
    few = "0.32 in layer 0, 0.12 in layer 1 of the encoder; 0.03 in layer 0, 0.03 in layer 1 of the"
    assert f"By depth, not tested (too few layers or records): {few}" in text
    time = "0.18 up to step 200, 0.07 from step 700 on"
    assert f"Similarity fell in training, within pairs: {time}" in text


def test_a_difference_is_that_of_the_numbers_shown() -> None:
    values = related(0.134, 0.066)[None, None].repeat(8, axis=0).repeat(4, axis=1)
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "0.06 more similar than others in the encoder: 0.13 against 0.07" in text


def test_noise_is_not_significant() -> None:
    draw = np.random.default_rng(4)
    values = draw.normal(0, 0.1, (1, 4, 7, 7))
    values = (values + values.swapaxes(-1, -2)) / 2
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "Languages of one family against others, not beyond chance: " in text
    pairs = values.mean(axis=(0, 1))[np.tril_indices(7, -1)]
    assert f"{(pairs < 0).sum()} of 21 pairs are below 0" in text


def test_less_similar_relatives_are_told() -> None:
    """The test is two-sided: it does not hide the opposite of what one expects."""
    values = related(0.1, 0.4)[None, None].repeat(4, axis=1)
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "Languages of one family are 0.30 less similar than others in the encoder" in text


def test_who_is_left_out_is_named() -> None:
    values = related(0.4, 0.1)[None, None].repeat(4, axis=1)
    tasks = [f"en-{code}" for code in CODES]
    families = dict(zip(tasks, ["x", "x", "x", "y", "y", "", ""], strict=True))
    text = summary_text(run_with(values, tasks, families=families))
    assert "Of no known family, and left out of this: en-fi and en-et (see --families)." in text
    known = KnownDistances(tuple(tasks[:5]), far_apart()[:5, :5], "any distance")
    text = summary_text(run_with(values, tasks, distances=known))
    assert "Of unknown any distance, and left out of this: en-fi and en-et." in text


def test_equal_pairs_have_no_extremes() -> None:
    values = np.full((1, 4, 7, 7), 0.3)
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "The average cosine of two tasks is 0.30, and all pairs about the same." in text


def test_extremes_that_print_alike_are_no_extremes() -> None:
    values = np.full((1, 4, 7, 7), 0.9160)
    values[..., 0, 1] = values[..., 1, 0] = 0.9245
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "The average cosine of two tasks is 0.92, and all pairs about the same." in text


def test_identical_tasks_and_tasks_without_gradient_say_no_nan() -> None:
    tasks = [f"en-{code}" for code in CODES]
    known = KnownDistances(tuple(tasks), far_apart(), "any distance")
    same = summary_text(run_with(np.ones((3, 4, 7, 7)), tasks, distances=known))
    values = related(0.5, 0.1)[None, None].repeat(4, axis=1)
    values[..., 4, :] = values[..., :, 4] = np.nan  # Polish has no gradient, Czech no relative
    absent = summary_text(run_with(values, tasks, distances=known))
    assert "nan" not in same
    assert "nan" not in absent
    assert "among Western European languages 0.50" in absent


def test_what_is_clear_and_small_is_not_called_chance() -> None:
    values = related(0.504, 0.5)[None, None].repeat(4, axis=1)
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "Languages of one family against others, too small to matter: 0.50 against 0.50" in text
    assert "others, not beyond chance" not in text


def test_a_claim_never_contradicts_its_numbers() -> None:
    """A slope over layers that rises, though the last layer is below the first."""
    run = make_run(codes=CODES, recorded=False, bleu=None)
    by_layer = np.linspace(0.1, 0.8, 40)
    by_layer[[0, -1]] = 0.6, 0.55
    draw = np.random.default_rng(0).normal(0, 0.01, (7, 7))
    values = (by_layer[:, None, None] + draw + draw.T)[None]
    names = tuple(f"layers.{n}" for n in range(40))
    found = Similarities(run.tasks, names, np.array([1]), values.astype(np.float32))
    assert "rises with depth" not in summary_text(replace(run, measured=(found,)))


def test_too_few_tasks_for_a_test() -> None:
    values = related(0.5, 0.1)[None, None].repeat(4, axis=1)
    keep = [0, 1, 3, 4]
    tasks = [f"en-{CODES[i]}" for i in keep]
    text = summary_text(run_with(values[..., keep, :][..., keep], tasks))
    assert "(p = 0.33; with so few languages p cannot be below 0.33)" in text


def far_apart(seed: int = 0) -> np.ndarray:
    """Distances `[T, T]` of CODES: any."""
    distance = np.random.default_rng(seed).uniform(0.2, 1, (7, 7))
    return (distance + distance.T) / 2


def test_distances_in_encoder_and_decoder() -> None:
    tasks = [f"en-{code}" for code in CODES]
    distance, other = far_apart(), far_apart(seed=5)
    values = np.stack([1 - distance, 1 - distance, other, other])[None]
    known = KnownDistances(tuple(tasks), distance, "genealogical distance")
    text = summary_text(run_with(values, tasks, distances=known))
    falls = r"Similarity falls with genealogical distance in the encoder: r = -1\.00 \(p = 0\.0"
    assert re.search(falls, text)
    unclear = r"genealogical distance, not beyond chance: r = .* in the decoder "
    assert re.search(unclear, text)


def test_distances_in_each_direction() -> None:
    tasks = [f"{code}-en" for code in CODES] + [f"en-{code}" for code in CODES]
    distance = far_apart()
    values = np.full((14, 14), 0.3)
    values[:7, :7], values[7:, 7:] = 1 - distance, distance
    known = KnownDistances(tuple(tasks), np.tile(distance, (2, 2)), "distance")
    text = summary_text(run_with(values[None, None].repeat(4, axis=1), tasks, distances=known))
    assert "Similarity falls with distance in the encoder (xx-en): r = -1.00" in text
    assert "Similarity rises with distance in the decoder (en-xx): r = 1.00" in text
    assert text.count("with distance") == 4


def test_distances_that_tell_nothing() -> None:
    tasks = [f"en-{code}" for code in CODES]
    values = (1 - far_apart())[None, None].repeat(4, axis=1)
    strangers = KnownDistances(tuple(tasks), 1 - np.eye(7), "any distance")
    few = KnownDistances(tuple(tasks[:4]), far_apart()[:4, :4], "any distance")
    unknown = KnownDistances(tuple(tasks), np.full((7, 7), np.nan), "any distance")
    for known in (strangers, few, unknown):
        assert "any distance" not in summary_text(run_with(values, tasks, distances=known))


def test_directions_and_families_in_each() -> None:
    tasks = [f"{code}-en" for code in CODES] + [f"en-{code}" for code in CODES]
    values = np.full((14, 14), 0.3)
    values[:7, :7], values[7:, 7:] = related(0.9, 0.7), related(0.3, 0.2)
    families = make_run(codes=CODES, directions=("xx-en", "en-xx")).families
    text = summary_text(run_with(values[None, None].repeat(4, axis=1), tasks, families=families))
    assert "0.20 more similar than others in the encoder (xx-en): 0.90 against 0.70" in text
    assert "0.10 more similar than others in the decoder (en-xx): 0.30 against 0.20" in text
    into = "Tasks into en are more similar than tasks out of it in the encoder: 0.75 against 0.22"
    assert into in text
    shares = "among West Slavic languages {0} in the encoder, {0} in the decoder"
    assert shares.format("0.90") in text  # not with en-cs, which goes the other way
    assert shares.format("0.30") in text
    assert "Encoder against decoder, not beyond chance: 0.75 against 0.75 (xx-en)" in text
    assert "0.22 in layer 0, 0.22 in layer 1 of the decoder (en-xx)" in text


def test_tasks_that_are_no_translations() -> None:
    values = related(0.4, 0.1)[None, None].repeat(4, axis=1)
    families = dict(zip("abcdefg", ["x", "x", "x", "y", "y", "z", "z"], strict=True))
    text = summary_text(run_with(values, list("abcdefg"), families=families))
    assert "Tasks of one family are 0.30 more similar than others in the encoder" in text
    assert "among x tasks 0.40 in the encoder, 0.40 in the decoder" in text


def test_noise_is_told_from_different_lines() -> None:
    tasks = [f"en-{code}" for code in CODES]
    run = run_with(related(0.5, 0.5)[None, None].repeat(4, axis=1), tasks)
    (same,) = run.measured
    reliability = np.full((1, 4, 7), 0.64, np.float32)
    across = np.full_like(same.values, 0.32)
    across[..., range(7), range(7)] = 0.64
    apart = replace(
        same,
        values=across,
        reliability=reliability,
        across=across,
        half_norms=np.ones((1, 4, 2, 7), np.float32),
        lines="different",
    )
    text = summary_text(replace(run, measured=(same, apart)))
    assert "agrees with itself on other lines (split halves) by 0.64 in the encoder; 0.64" in text
    free = "0.50 (give or take 0.00) in the encoder; 0.50 (give or take 0.00) in the decoder"
    assert f"the average cosine similarity of two tasks would be: {free}." in text
    draw = np.random.default_rng(0)
    noise = across + draw.normal(0, 0.2, across.shape).astype(np.float32)
    text = summary_text(replace(run, measured=(same, replace(apart, across=noise))))
    assert "two tasks would be: not reliable enough to say in the encoder" in text
    assert "was not stored; measure again" in summary_text(run)


@pytest.mark.parametrize("planted", [True, False])
def test_scores_that_follow_the_noise_of_tasks_alone_are_no_claim(planted: bool) -> None:
    """A noisy task is less similar to all others, however much it has in common with them."""
    draw, num_tasks = np.random.default_rng(0), 12
    level = np.linspace(0.25, 0.8, num_tasks)  # of what a task shares with others; of reliability
    shared = level if planted else np.full(num_tasks, 0.5)
    noise = np.ones(num_tasks) if planted else 1 / level - 1
    tasks = tuple(f"t{number}" for number in range(num_tasks))
    common, own = (draw.normal(size=(1, 8, n, SIZE)) for n in (1, num_tasks))
    true = np.sqrt(shared)[:, None] * common + np.sqrt(1 - shared)[:, None] * own
    halves = [true + np.sqrt(noise)[:, None] * draw.normal(size=true.shape) for _ in range(2)]
    run = replace(
        run_with(np.zeros((1, 4, 1, 1)), ["t0"]),
        measured=halves_of(tasks, *halves),
        scores=TaskScores("F1", dict(zip(tasks, level.tolist(), strict=True))),
    )
    text = summary_text(run)
    assert ("more similar to the others have higher F1" in text) is planted
    assert ("which the noise of each task alone can bring about" in text) is not planted


def test_few_steps_are_named_alone() -> None:
    values = (
        related(0.4, 0.4)[None, None].repeat(4, axis=1)
        * np.array([1, 2, 3, 4])[:, None, None, None]
        / 4
    )
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    steps = "0.10 at step 100, 0.40 at step 400 (p < 0.0001)."
    assert f"Similarity rose in training, within pairs: {steps}" in text


def test_what_the_rule_did() -> None:
    run = make_run(codes=CODES, num_layers=2, num_steps=4)
    assert run.record is not None
    similarity = run.record.similarity.copy()
    others = ~np.eye(7, dtype=bool)
    active = np.zeros_like(run.record.active)
    active[:, :2, :2] = others[:2]  # rows of the first two tasks, in 2 of 5 layers
    similarity[..., others] = 0.1
    similarity[:2][..., others] = -0.1
    num = similarity.shape[1]
    record = replace(
        run.record,
        similarity=similarity,
        active=active,
        update_cosine=np.full((4, num), 0.975, np.float32),
        update_ratio=np.full((4, num), 2.68, np.float32),
        vaccinated=("en-fr", "en-es"),
    )
    text = summary_text(replace(run, record=record))
    who = "those of en-fr and en-es, the vaccinated tasks, in layers"
    assert f"GradVac altered 40% of the pairs it could, {who}; 50% of these pairs, " in text
    assert "cosine 0.975 with the plain sum and 2.68 times its length." in text
    plain = replace(
        record,
        update_cosine=np.ones((4, num)),
        update_ratio=np.ones((4, num)),
        rule="Sum()",
        target=np.full_like(record.target, np.nan),
        active=np.zeros_like(active),
        vaccinated=None,
    )
    text = summary_text(replace(run, record=plain))
    assert "The update was the plain sum." in text
    assert "50% of all pairs in layers were in conflict" in text


def test_comparison_of_two_runs() -> None:
    tasks = [f"en-{code}" for code in CODES]
    low, high = (related(a, b)[None, None].repeat(4, axis=1) for a, b in ((0.3, 0.1), (0.6, 0.4)))
    bleu = [
        TaskScores("BLEU", {task: 20.0 + gain * (n % 2) for n, task in enumerate(tasks)})
        for gain in (0, 1)
    ]
    first = run_with(low, tasks, name="joint", scores=bleu[0])
    second = run_with(high, tasks, name="gradvac", scores=bleu[1])
    text = "\n".join(sentence.text for sentence in describe_difference(first, second))
    assert "Their 7 tasks are more similar in gradvac (0.45 against 0.15" in text
    assert "Their pairs correlate by 1.00, not tested: they were measured on the same lines" in text
    assert "BLEU is 0.4 higher in gradvac on average, and higher in 3 of 7 tasks" in text
    assert "does not show that one is better" in text
    same = "\n".join(
        sentence.text for sentence in describe_difference(first, replace(first, name="again"))
    )
    assert "Similarity over their 7 tasks, not beyond chance: 0.15 against 0.15" in same
    assert "BLEU is the same in again" in same


def compared(first: Run, second: Run) -> str:
    return "\n".join(sentence.text for sentence in describe_difference(first, second))


def test_what_was_measured_differently_is_not_compared() -> None:
    tasks = [f"en-{code}" for code in CODES]
    values = related(0.3, 0.1)[None, None].repeat(4, axis=1)
    first = run_with(values, tasks, name="a", about='{"set": "dev", "lines": 1000}')
    second = run_with(values / 2, tasks, name="b", about='{"set": "dev", "lines": 20}')
    reason = "not compared: one was measured on 1,000 lines of dev, the other on 20 lines of dev."
    assert reason in compared(first, second)
    coarse = replace(second.measured[0], granularity="whole_model")
    other = replace(second, measured=(coarse,), about=first.about)
    assert "not compared: one is of all_layer, the other of whole_model." in compared(first, other)
    recorded = make_run("r", codes=CODES, measured=False, bleu=None)
    assert "measured on an aligned set, the other in training" in compared(first, recorded)
    again = make_run("again", codes=CODES, measured=False, bleu=None, seed=1)
    assert "other batches alone can change them" in compared(recorded, again)


def test_only_steps_in_common_are_compared() -> None:
    tasks = [f"en-{code}" for code in CODES]
    grown = (
        related(0.3, 0.1)[None, None].repeat(4, axis=1) * np.array([1, 2, 3])[:, None, None, None]
    )
    first, second = run_with(grown[:1], tasks, name="a"), run_with(grown, tasks, name="b")
    assert "not beyond chance: 0.15 against 0.15" in compared(first, second)


def test_few_or_unknown_tasks_give_no_verdict() -> None:
    keep = [0, 1, 3]
    values = related(0.3, 0.1)[keep][:, keep][None, None].repeat(4, axis=1)
    tasks = [f"en-{CODES[i]}" for i in keep]
    first, second = run_with(values, tasks, name="a"), run_with(values * 2, tasks, name="b")
    text = "Similarity over their 3 tasks, not beyond chance: 0.33 against 0.17, difference"
    assert text in compared(first, second)
    two = replace(first, measured=(first.measured[0].select(tasks=tasks[:2]),))
    assert "too few tasks for a test" in compared(two, second)
    unknown = run_with(np.full_like(values, np.nan), tasks, name="c")
    assert "not compared: one of them is unknown" in compared(first, unknown)
    assert "No similarity of two tasks is known" in summary_text(unknown)


def test_a_side_that_is_unknown() -> None:
    values = np.stack([np.full((7, 7), np.nan)] * 2 + [related(0.4, 0.1)] * 2)[None]
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "others in the encoder" not in text
    assert "0.30 more similar than others in the decoder" in text


def test_depth_tells_a_turn() -> None:
    layers = [0.4, 0.2, 0.1, 0.2, 0.4]
    components = tuple(f"{side}.layers.{n}" for side in ("encoder", "decoder") for n in range(5))
    rising = [0.1, 0.16, 0.2, 0.24, 0.3]
    flat = np.stack([np.full((7, 7), value) for value in [*layers, *rising]])[None]
    run = make_run(codes=CODES, recorded=False, bleu=None)
    tasks = tuple(f"en-{code}" for code in CODES)
    found = Similarities(tasks, components, np.array([10]), flat.astype(np.float32))
    text = summary_text(replace(run, measured=(found,)))
    turn = "0.17 against 0.40 (0.40 in layer 0, 0.40 in layer 4; p = 0.0"
    middle = "The middle layers of the encoder are less similar than its first and last"
    assert f"{middle} on average: {turn}" in text
    rises = "0.10 in layer 0, 0.30 in layer 4 (p = 0.00"
    assert f"Similarity rises with depth in the decoder: {rises}" in text


def test_the_interval_has_the_sign_of_the_claim() -> None:
    encoder, decoder = related(0.05, 0.02), related(0.31, 0.19)
    values = np.stack([encoder, encoder, decoder, decoder])[None]
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "The decoder is more similar than the encoder: 0.22 against 0.03 (difference +" in text


def test_sides_that_do_not_clearly_differ() -> None:
    draw = np.random.default_rng(0)
    values = 0.3 + draw.normal(0, 0.2, (1, 4, 7, 7))
    values = (values + values.swapaxes(-1, -2)) / 2
    values[:, :2] += values[:, 2:].mean() - values[:, :2].mean() + 0.02
    text = summary_text(run_with(values, [f"en-{code}" for code in CODES]))
    assert "Encoder against decoder, not beyond chance: " in text


def test_the_source_is_described() -> None:
    run = make_run(codes=CODES, num_layers=1, num_steps=2)
    run = replace(run, about='{"set": "dev", "lines": 1234}')
    text = describe_source(run.measured[0], run)
    assert text == (
        "Cosines between the gradients of 7 tasks in 5 components, on the same lines of an aligned "
        "set (1,234 lines of dev), at 2 steps from 100 to 200. Means leave out the 2 that are "
        "normalisations or biases."
    )


def test_one_task_and_no_families() -> None:
    alone = make_run(codes=("fr",), num_layers=1, num_steps=1)
    assert "only one task" in summary_text(alone)
    unknown = replace(make_run(codes=CODES, num_layers=1, num_steps=1), families={})
    assert "families of the tasks are not known" in summary_text(unknown)


def test_controls_and_legend_name_only_what_there_is() -> None:
    known = make_run(codes=CODES, num_layers=1, num_steps=1)
    page = render([known])
    assert all(text in page for text in ("by family", "A dot in the corner"))
    assert "on other lines. Families are framed. Choose" in " ".join(page.split())
    page = render([replace(known, families={}, measured=())])
    assert "by similarity" in page
    absent = ("by family", "Families are framed", "A dot in the corner")
    assert not any(text in page for text in absent)


def test_layers_without_sides_are_those_of_the_model() -> None:
    values = np.random.default_rng(0).uniform(-0.3, 0.3, (1, 2, 4, 4)).astype(np.float32)
    found = Similarities(("a", "b", "c", "d"), ("0", "2"), np.array([10]), values)
    run = replace(make_run(codes=CODES, recorded=False, bleu=None), measured=(found,))
    assert re.search(r"in layer 0, .* in layer 2 of the model\.", summary_text(run))


def test_equal_scores_have_no_extremes() -> None:
    run = make_run(codes=CODES, num_layers=1, num_steps=1)
    same = TaskScores("BLEU", dict.fromkeys(run.tasks, 0.01), {}, "")
    assert "BLEU is 0.0 on average over 7 tasks." in summary_text(replace(run, scores=same))


def unpack(text: str, shape: tuple[int, ...]) -> np.ndarray:
    """What the page does, in NumPy: the inverse of `pack` up to rounding."""
    planes = np.frombuffer(gzip.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1)
    moves = np.ascontiguousarray(planes.T).view("<u2").reshape(shape)
    coded = np.cumsum(moves, axis=0, dtype=np.uint16).view(np.int16)
    return np.where(coded == MISSING, np.nan, coded * UNIT)


def test_packing_keeps_three_digits_and_gaps() -> None:
    draw = np.random.default_rng(0)
    values = draw.uniform(-1, 1, (5, 3, 11))
    values[1, :, 4] = np.nan
    values[2, 0, 0], values[3, 0, 0] = 40.0, -40.0
    back = unpack(pack(values), values.shape)
    assert np.array_equal(np.isnan(back), np.isnan(values))
    assert np.nanmax(np.abs(back - values.clip(-32, 32))) <= 0.0005 + 1e-12


def test_a_large_run_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the steps and of the limit that a page has; scripts and drawings take 2.3 MB."""
    monkeypatch.setattr(payload, "MAX_PACKED", payload.MAX_PACKED // 10)
    run = make_run("large", num_layers=19, num_steps=20)
    assert run.measured[0].shape == (20, 41, 25)
    path = write_report([run], tmp_path / "large.html")
    assert path.stat().st_size < 2.5e6 + payload.MAX_PACKED
    assert re.search(r"holds at most \d+ steps of a source", path.read_text(encoding="utf-8"))


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    run = make_run("<script>alert(1)</script>", codes=("fr", "es", "fi"), num_layers=1)
    page = write_report([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["runs"][0]["name"] == run.name


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runs: .*at least one"):
        write_report([], tmp_path / "page.html")
    run = make_run(codes=CODES, num_layers=1, num_steps=1)
    with pytest.raises(ValueError, match=r"same name .*gradvac, gradvac"):
        write_report([run, run], tmp_path / "page.html")


def test_another_pivot_than_english() -> None:
    """Directions are those of the language that all tasks share, as with data.pivot = "de"."""
    codes = [code if code != "de" else "en" for code in CODES]
    both = np.kron(np.eye(2), np.ones((7, 7))) * 0.3 + 0.1
    values = both[None, None].repeat(4, axis=1)
    tasks = [f"{code}-de" for code in codes] + [f"de-{code}" for code in codes]
    assert "Tasks into de against tasks out of it" in summary_text(run_with(values, tasks))
    english = [task.replace("en", "xx").replace("de", "en") for task in tasks]
    assert "Tasks into en against tasks out of it" in summary_text(run_with(values, english))


def test_scores_of_single_runs_get_no_verdict() -> None:
    """Which of two methods is better is said by `gradvac compare`, over seeds."""
    run = make_run("a", codes=("fr", "es"), num_layers=1, num_steps=1)
    table = score_table([run, replace(run, name="b")])
    assert table is not None
    assert table.rows[0].differences == ["", "+0.0"]
    assert "gradvac compare" in table.notes[-1]


def test_maps_of_many_tasks_hold_those_that_agree_least(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("many", num_layers=1, num_steps=2)
    main = views.main_source(run)
    assert main is not None
    everyone = pictures.influence_maps([run], [run])[0][pictures.WHOLE_MODEL]
    monkeypatch.setattr(views, "MOST_SHOWN", 3)
    shown = views.for_maps([run])[0]
    assert shown.record is not None
    means = np.where(np.eye(len(main.tasks)), np.nan, views.side_matrix(main, views.MODEL))
    least = np.argsort(np.nanmean(means, axis=1))[:3]
    assert set(shown.tasks) == set(shown.record.tasks) == {main.tasks[i] for i in least}
    part = pictures.influence_maps([run], [shown])[0][pictures.WHOLE_MODEL]
    where = [everyone.tasks.index(task) for task in part.tasks]
    np.testing.assert_array_equal(part.values, everyone.values[np.ix_(where, where)])
    assert "show 3 tasks of a run" in render([run])

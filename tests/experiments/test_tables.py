"""The tables of the results page: of methods that the sweep has, on the seeds they share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from gradvac.lab.experiments import SweepConfig, compare_runs, to_markdown
from gradvac.lab.experiments.statistics import Against
from gradvac.lab.runs import RunFolder
from gradvac.lab.training.config import load

from ..drivers import load_module
from .conftest import ROOT
from .made_runs import make_run


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_module(ROOT / "docs" / "results" / "write_tables.py")


def test_every_method_is_one_of_the_sweep_and_none_is_forgotten(tables: ModuleType) -> None:
    own = ("one_gpu", "one_gpu_more", "one_gpu_rest", "one_gpu_last")
    names = (*own, "one_gpu_full", "one_gpu_seeds")
    sweeps = [ROOT / "configs" / "sweeps" / f"{name}.toml" for name in names]
    methods = [method for path in sweeps for method in load(SweepConfig, path).methods]
    asked = {name for question in tables.QUESTIONS for name in question.methods}
    by_older_code = {"without_noise", "temperature2_without_noise", "many_without_noise"}
    assert asked == {method.name for method in methods if method.scored} | by_older_code
    claims = (*tables.claims.PAPER, *tables.claims.OURS, *tables.claims.TUNED)
    assert {name for claim in claims for name in (claim.method, claim.baseline)} <= asked


def test_methods_are_compared_on_the_seeds_they_share(tables: ModuleType, tmp_path: Path) -> None:
    """GradVac has three seeds, joint two of them, PCGrad one: too few."""
    have = {"joint": ("sum", (0, 2)), "gradvac": ("gradvac", (0, 1, 2)), "pcgrad": ("pcgrad", (0,))}
    for name, (rule, seeds) in have.items():
        for seed in seeds:
            make_run(tmp_path / "runs" / name / f"seed-{seed}", rule=rule, seed=seed)
    (tmp_path / "out").mkdir()
    runs = tables.Runs([tmp_path / "runs"])
    question = tables.Question("one", "Who wins?", ("joint", "gradvac", "pcgrad"))
    said = tables.write_question(question, runs, tmp_path / "out")
    assert said == "one: 2 methods, 2 seeds"
    text = (tmp_path / "out" / "one.md").read_text()
    assert text.startswith(
        "# Who wins?\n\nLeft out, as fewer than two seeds were finished: pcgrad."
    )
    assert "| gradvac | 2 |" in text
    none = tables.Question("two", "And here?", ("pcgrad", "joint"))
    assert "no table" in tables.write_question(none, runs, tmp_path / "out")


def test_a_seed_with_a_missing_part_does_not_count(tables: ModuleType, tmp_path: Path) -> None:
    for part, seeds in (("en-fr", (0, 1)), ("en-hi", (0,))):
        for seed in seeds:
            run = tmp_path / f"bilingual+{part}" / f"seed-{seed}"
            make_run(run, seed=seed, tasks={part: "low"})
    assert set(tables.Runs([tmp_path]).seeds_of("bilingual")) == {0}


def test_claims_are_answered_by_the_seeds_that_both_methods_have(
    tables: ModuleType, tmp_path: Path
) -> None:
    """Two sweeps: of what both have, the first counts; the second has one more seed."""
    for folder, method, rule, seeds in (
        ("first", "joint", "sum", (0, 1, 2)),
        ("first", "gradvac", "gradvac", (1, 2, 3)),
        ("second", "gradvac", "gradvac", (0, 1)),
        ("second", "long_joint", "none", (0, 1)),
    ):
        for seed in seeds:
            make_run(tmp_path / folder / method / f"seed-{seed}", rule=rule, seed=seed)
    runs = tables.Runs([tmp_path / "first", tmp_path / "second"])
    parts = tables.claims.claim_tables(runs.shared, runs.losses)
    found = parts["paper"].splitlines()
    rows = {line.split(" | ")[0]: line for line in found}
    own = rows["| GradVac by layer, low-resource tasks, against joint training"]
    assert " | +1.41, outside | " in own
    assert " | 3 | " in own
    seeds = runs.seeds_of("gradvac")
    assert {seed: path.parts[-3] for seed, (path,) in seeds.items()} == {
        0: "second",
        1: "first",
        2: "first",
        3: "first",
    }
    assert rows["| ... with twice the steps"].endswith(" | not run | +1.41 |  | 0 |  |")
    assert parts["count"].startswith(f"Of the {len(tables.claims.PAPER)} rows")
    assert parts["count"].endswith(f", {len(tables.claims.PAPER) - 1} not run.\n")


def test_stopped_runs_are_shown_by_their_losses(tables: ModuleType, tmp_path: Path) -> None:
    """Three seeds, none scored: the last step that two of them share with the baseline."""
    for seed in range(3):
        make_run(tmp_path / "joint" / f"seed-{seed}", seed=seed, losses=(3.0, 2.5, 2.2, 2.1))
        stopped = make_run(
            tmp_path / "early" / f"seed-{seed}",
            seed=seed,
            losses=(3.1, 2.6, 2.1, 2.0)[: 1 + seed],
            steps=10 * (1 + seed),
            rule="gradvac",
        )
        RunFolder(stopped).scores_of("test", "best").unlink()
    runs = tables.Runs([tmp_path])
    found = tables.claims.claim_tables(runs.shared, runs.losses)["ours"]
    assert "half of training (e) | stopped |  | 0 | +0.1000, +0.1000 at step 20 |" in found


@pytest.mark.parametrize(
    ("difference", "adjusted", "said"),
    [
        (0.9, 0.01, "clear: better"),
        (-0.9, 0.01, "clear: worse"),
        (0.9, 0.2, "suggestive: better"),
        (-0.9, np.nan, "suggestive: worse"),
        (0.2, np.nan, "not shown: at most 0.70"),
    ],
)
def test_verdicts_about_claims(
    tables: ModuleType, difference: float, adjusted: float, said: str
) -> None:
    """Each was compared by itself, where its average was the only question."""
    word = "clear" if abs(difference) > 0.5 else "not shown"
    ends = (difference - 0.5, difference + 0.5)
    found = Against(difference, *ends, 0.04, 0.04, 0.5, word, 4, is_better=difference > 0)
    assert tables.claims.verdict(found, adjusted) == said


def test_pages_have_what_the_published_numbers_say(tmp_path: Path) -> None:
    """Tables between the marks are those of `write_results.py`; a changed number is noticed."""
    folder = ROOT / "docs" / "results"
    results = load_module(folder / "write_results.py")
    for name, text in results.pages(folder).items():
        assert (folder / name).read_text("utf-8") == text, f"run write_results.py: {name}"
        (tmp_path / name).write_text(text)
    published = (folder / "published.json").read_text("utf-8")
    (tmp_path / "published.json").write_text(published.replace("[-0.09, -0.3, 0.12]", "[9, 8, 10]"))
    assert "+9.00 (+8.00 to +10.00)" in results.pages(tmp_path)["table1.md"]
    with pytest.raises(ValueError, match="a page lacks"):
        results.fill("", {"paper": "new"})


def test_words_of_published_differences() -> None:
    results = load_module(ROOT / "docs" / "results" / "write_results.py")
    row = {"difference": [0.4, 0.1, 0.7]}
    assert results.verdict(row) == "suggestive: better"
    assert results.verdict(row | {"outlived_correction": True}) == "suggestive: better"
    both = {"outlived_correction": True, "primary": True}
    assert results.verdict({"difference": [-0.4, -0.7, -0.1]} | both) == "clear: worse"
    assert results.verdict({"difference": [0.1, -0.7, 0.3]} | both) == "not shown: at most 0.70"
    assert results.verdict({"difference": [0.1]}) == "cannot tell"


def test_packed_runs_give_the_same_tables(tmp_path: Path) -> None:
    raw = load_module(ROOT / "docs" / "results" / "raw_scores.py")
    runs = tmp_path / "runs"
    for seed in range(3):
        make_run(runs / "joint" / f"seed-{seed}", seed=seed)
        make_run(runs / "gradvac" / f"seed-{seed}", seed=seed, rule="gradvac", quality=0.65)
    question = {"method": "gradvac", "baseline": "joint", "on": "low"}
    (runs / "sweep.json").write_text(json.dumps({"primary": [question]}))
    (runs / "joint" / "seed-0" / "weights.pt").write_text("large")
    raw.main(["pack", str(runs), "--out", str(tmp_path / "kept.json.gz")])
    raw.main(["unpack", str(tmp_path / "kept.json.gz"), str(tmp_path / "again")])
    first, second = (to_markdown(compare_runs([path])) for path in (runs, tmp_path / "again"))
    assert first.replace(str(runs), "") == second.replace(str(tmp_path / "again"), "")
    assert "gradvac against joint, low" in second
    assert not (tmp_path / "again" / "joint" / "seed-0" / "weights.pt").exists()
    make_run(tmp_path / "other" / "joint" / "seed-0", quality=0.1)
    with pytest.raises(ValueError, match="pack the two folders apart"):
        raw.pack([runs, tmp_path / "other"])


def test_runs_of_one_seed_are_held_against_each_other(tables: ModuleType, tmp_path: Path) -> None:
    make_run(tmp_path / "joint" / "seed-0", losses=(3.0, 2.5, 2.2, 2.1))
    make_run(tmp_path / "long_joint" / "seed-0", losses=(3.0, 2.53, 2.2, 2.1, 1.9), steps=50)
    found = tables.twice(tables.Runs([tmp_path]))
    assert found.splitlines()[2:] == ["| joint | another sweep, later code | 1 | 0.0300 |"]


def test_noise_of_cosines_is_told_from_differences_between_pairs(tables: ModuleType) -> None:
    """Three tasks whose pairs differ by 0.1, in two seeds, with noise of 0.2 at every step."""
    rng = np.random.default_rng(0)
    steps, pairs = 4000, np.triu_indices(3, 1)
    records = []
    for _ in range(2):
        cosines = np.zeros((steps, 2, 3, 3), dtype=np.float32)
        noisy = np.array([0.0, 0.1, 0.2]) + 0.2 * rng.standard_normal((steps, 2, 3))
        cosines[:, :, pairs[0], pairs[1]] = noisy
        records.append(
            SimpleNamespace(tasks=("a", "b", "c"), steps=np.arange(steps), similarity=cosines)
        )
    row = tables.noise_table({"gradvac": records}).splitlines()[2].split(" | ")
    assert [float(cell) for cell in row[1:4]] == pytest.approx([0.1, 0.2, 0.1], abs=0.01)
    assert row[4] == "20%"
    assert float(row[5].removesuffix(" |")) > 0.98


def test_updates_that_are_longest_where_tasks_agree_least_are_seen(tables: ModuleType) -> None:
    """Two gradients of length 1: sums of sqrt(2 + 2 cosine), 1.6 and 1.2."""
    steps, tasks = 400, ("a", "b")
    cosine = np.tile([[0.28], [-0.28]], (steps // 2, 1))
    cosines = np.broadcast_to(cosine[:, :, None, None], (steps, 1, 2, 2))

    def record(ratio: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(
            tasks=tasks,
            steps=np.arange(steps),
            similarity=cosines,
            update_ratio=ratio,
            norms=np.ones((steps, 1, 2)),
        )

    uneven, even = record(2.4 / np.sqrt(2 + 2 * cosine)), record(np.full((steps, 1), 1.8))
    rows = tables.length_table({"many_gradvac": [uneven], "many_frozen": [even]}).splitlines()[2:]
    assert rows[0] == "| many_gradvac | 1.75 | 14% | r = -1.00 | 14% | 0% |"
    assert rows[1] == "| many_frozen | 1.80 | 0% |  | 14% | 14% |"


def test_rounds_of_halving_are_shown(tables: ModuleType, tmp_path: Path) -> None:
    rung = {"step": 150, "losses": {"a": 5.0, "b": 4.0, "c": None}, "kept": ["b", "a"]}
    (tmp_path / "halving.json").write_text(json.dumps({"rungs": [rung]}))
    assert tables.halving_table(tmp_path).endswith("| 150 | 3 | b | 4.000 | a |\n")


@pytest.mark.usefixtures("tables")
def test_methods_together_show_their_mean_and_whether_they_differ() -> None:
    """Of methods that are all the same, one group in twenty seems to differ; of others, most."""
    rng = np.random.default_rng(0)
    together = sys.modules["together"].together  # imported by the script
    found = [together(rng.standard_normal((10, 4)) + rng.standard_normal(4)) for _ in range(400)]
    assert np.mean([one.p_value < 0.05 for one in found]) == pytest.approx(0.05, abs=0.03)
    covered = [abs(one.mean) < one.reach for one in found]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)
    planted = np.linspace(-2, 2, 10)[:, None]
    differ = [together(rng.standard_normal((10, 4)) + planted).p_value < 0.05 for _ in range(50)]
    assert np.mean(differ) > 0.8


@pytest.mark.usefixtures("tables")
def test_further_seeds_of_one_method_do_not_leave_the_others_out() -> None:
    seeds = {"joint": 6, "gradvac": 6, "norm": 3, "shuffled": 3, "random": 2}
    values = {name: dict.fromkeys(range(num), 1.0) for name, num in seeds.items()}
    group = sys.modules["together"].Group("all", "joint", tuple(seeds)[1:])
    found = sys.modules["together"]._differences(group, values.__getitem__)
    assert found.shape == (3, 3)  # without the method that lacks a seed

"""Runs grouped into methods, and what is said about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradvac.cli.commands import app
from gradvac.lab.experiments import compare_runs, find_runs, to_json, to_markdown
from gradvac.lab.experiments.verdicts import pareto_front
from gradvac.lab.runs import RunFolder

from .made_runs import make_run


def two_methods(folder: Path, *, better: float = 0.1, seeds: int = 4, **options: object) -> Path:
    for seed in range(seeds):
        make_run(folder / "joint" / f"seed-{seed}", seed=seed, **options)  # type: ignore[arg-type]
        make_run(
            folder / "vaccinated" / f"seed-{seed}",
            rule="gradvac",
            seed=seed,
            quality=0.6 + better,
            seconds_per_step=0.2,
            losses=(2.9, 2.4, 2.1, 2.0 + 0.01 * seed),
            **options,  # type: ignore[arg-type]
        )
    return folder


def test_a_difference_is_found_by_task_and_level(tmp_path: Path) -> None:
    found = compare_runs([two_methods(tmp_path)])
    assert found.baseline == "joint"
    assert found.seeds == {"joint": (0, 1, 2, 3), "vaccinated": (0, 1, 2, 3)}
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["all", "high", "low", "en-fr", "en-hi"]
    for row in found.rows:
        against = row.cells["vaccinated"].against
        assert against is not None
        assert against.verdict == ("clear" if row.name == "all" else "suggestive")
        assert against.is_better
        assert 7 < against.difference < 13
        assert against.low < against.difference < against.high
        assert 0 < against.needed < against.difference
    assert "seeds and sentences" in found.test
    text = to_markdown(found)
    assert "**clear: better**" in text
    assert json.loads(to_json(found))["rows"][0]["cells"]["joint"]["against"] is None


def test_of_equal_methods_nothing_is_shown(tmp_path: Path) -> None:
    found = compare_runs([two_methods(tmp_path, better=0.0)])
    against = found.rows[0].cells["vaccinated"].against
    assert against is not None
    assert against.verdict == "not shown"
    assert against.largest == max(-against.low, against.high)
    assert f"**not shown: at most {against.largest:.2f}**" in to_markdown(found)
    assert against.needed > abs(against.difference)


def test_equal_steps_equal_time_and_cost(tmp_path: Path) -> None:
    """The better loss at equal steps took twice the time, and is worse at equal time."""
    found = compare_runs([two_methods(tmp_path)])
    rows = {row.name: row.cells for row in found.losses}
    assert list(rows) == [
        "train/loss up to step 40",
        "dev/loss, best weights",
        "dev/loss, step 40",
        "dev/loss after 4 s",
    ]
    assert rows["dev/loss, step 40"]["vaccinated"].mean == pytest.approx(2.015)
    assert rows["dev/loss, step 40"]["joint"].mean == pytest.approx(2.1)
    # 4 s are 20 steps of the slower one, where its loss was 2.4
    assert rows["dev/loss after 4 s"]["vaccinated"].mean == pytest.approx(2.4)
    assert rows["dev/loss after 4 s"]["joint"].mean == pytest.approx(2.1)
    assert rows["dev/loss, step 40"]["vaccinated"].against.verdict == "suggestive"  # type: ignore[union-attr]
    assert found.costs["vaccinated"].seconds_per_step == pytest.approx(0.2)
    assert found.costs["joint"].peak_memory == 1.5


def test_methods_are_told_apart_by_settings_but_not_by_seed_or_place(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / "a", seed=0, settings={"sampling.temperature": 5.0}),
        make_run(tmp_path / "b", seed=1, settings={"sampling.temperature": 5.0}),
        make_run(tmp_path / "c", seed=0, settings={"sampling.temperature": 2.0}),
        make_run(tmp_path / "d", seed=1, settings={"sampling.temperature": 2.0}),
    ]
    found = compare_runs(paths, baseline="temperature=2.0")
    assert found.seeds == {"temperature=2.0": (0, 1), "temperature=5.0": (0, 1)}
    assert compare_runs(paths, baseline=str(paths[0])).baseline == "temperature=5.0"
    with pytest.raises(ValueError, match=r"--baseline: .*'temperature=2'"):
        compare_runs(paths, baseline="temperature=2")


def test_methods_are_called_as_their_folders_are(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / f"joint-{seed}", seed=seed)
        make_run(tmp_path / f"vaccine_seed{seed}", rule="gradvac", seed=seed)
    make_run(tmp_path / "t1", settings={"sampling.temperature": 1.0})
    found = compare_runs([tmp_path])
    assert found.baseline == "joint"
    assert found.seeds == {"joint": (0, 1), "t1": (0,), "vaccine": (0, 1)}


def test_seeds_without_a_partner_are_left_out_of_the_difference_and_it_is_said(
    tmp_path: Path,
) -> None:
    two_methods(tmp_path)
    complete = compare_runs([tmp_path / "joint", *find_runs([tmp_path / "vaccinated"])[:3]])
    against = complete.rows[0].cells["vaccinated"].against
    assert against is not None
    assert against.pairs == 3
    assert against.verdict == "clear"
    assert "| vaccinated | 3 |" in to_markdown(complete)
    said = "vaccinated: compared with joint on the 3 seeds that both have (of 3 and 4)"
    assert any(line.startswith(said) for line in complete.remarks)
    for seed in (4, 5):
        make_run(tmp_path / "other" / f"seed-{seed}", rule="pcgrad", seed=seed)
    found = compare_runs([tmp_path])
    assert "| other | 2, unpaired |" in to_markdown(found)
    assert any(line.startswith("other: shares 0 seeds with joint") for line in found.remarks)


def test_only_what_was_asked_beforehand_can_be_clear(tmp_path: Path) -> None:
    """Two methods, both far better: the sweep asks about one of them, on one level."""
    two_methods(tmp_path)
    for seed in range(4):
        make_run(tmp_path / "pcgrad" / f"seed-{seed}", rule="pcgrad", seed=seed, quality=0.75)
    asked = [
        {"method": "vaccinated", "baseline": "joint", "on": "low"},
        {"method": "vaccinated", "baseline": "pcgrad", "on": "all"},
        {"method": "vaccinated", "baseline": "joint", "on": "dev/loss, best weights"},
        {"method": "vaccinated", "baseline": "joint", "on": "medium"},
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"primary": asked}))
    found = compare_runs([tmp_path / "joint", tmp_path / "pcgrad", tmp_path / "vaccinated"])
    verdicts = {
        (row.name, name): cell.against.verdict
        for row in [*found.rows, *found.losses]
        for name, cell in row.cells.items()
        if cell.against is not None
    }
    clear = {("low", "vaccinated"), ("dev/loss, best weights", "vaccinated")}
    assert {which for which, verdict in verdicts.items() if verdict == "clear"} == clear
    assert verdicts["all", "pcgrad"] == "suggestive"
    answers = {(one.baseline, one.on): one.against for one in found.primary}
    assert list(answers) == [(one["baseline"], one["on"]) for one in asked[:3]]
    other = answers["pcgrad", "all"]
    assert not other.is_better
    assert other.adjusted > other.p_value
    assert "among the 3 questions that were named beforehand" in found.test
    assert "vaccinated against joint on 'medium'" in found.remarks[-1]
    text = to_markdown(found)
    assert "| vaccinated against joint, low | 4 |" in text
    assert json.loads(to_json(found))["primary"][0]["on"] == "low"


def test_models_of_single_tasks_stand_together(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / "joint" / f"seed-{seed}", seed=seed)
        for task, level in {"en-fr": "high", "en-hi": "low"}.items():
            make_run(
                tmp_path / f"bilingual+{task}" / f"seed-{seed}",
                seed=seed,
                tasks={task: level},
                settings={"data.tasks": [task]},
            )
    found = compare_runs([tmp_path], baseline="joint")
    assert list(found.seeds) == ["joint", "bilingual"]
    assert found.rows[0].cells["bilingual"].against is not None


def test_runs_that_have_steps_left_are_told(tmp_path: Path) -> None:
    for seed, steps in enumerate((40, 40, 20)):
        options = {"seed": seed, "settings": {"train.max_steps": 40}}
        make_run(tmp_path / f"joint/seed-{seed}", **options)
        make_run(tmp_path / f"gradvac/seed-{seed}", rule="gradvac", steps=steps, **options)
    remarks = compare_runs([tmp_path]).remarks
    stopped = tmp_path / "gradvac/seed-2"
    assert f"Not trained to their end: {stopped} (step 20 of 40)." in remarks


def test_what_is_missing_or_not_comparable_is_said(tmp_path: Path) -> None:
    folder = two_methods(tmp_path / "all", with_counts=False)
    unscored = make_run(folder / "joint" / "seed-9", seed=9)
    RunFolder(unscored).scores_of("test", "best").unlink()
    found = compare_runs([folder])
    assert any("seed-9" in line and "left out" in line for line in found.remarks)
    assert any("other seeds alone" in line for line in found.remarks)
    assert "seeds alone" in found.test
    single = two_methods(tmp_path / "single", seeds=1)
    said = compare_runs([single])
    assert any("one seed" in line for line in said.remarks)
    assert said.rows[0].cells["vaccinated"].against.verdict == "cannot tell"  # type: ignore[union-attr]
    assert "**cannot tell**" in to_markdown(said)


def test_mistakes_are_refused_with_their_mending(tmp_path: Path) -> None:
    first = make_run(tmp_path / "one", seed=0)
    with pytest.raises(ValueError, match="same seed"):
        compare_runs([first, make_run(tmp_path / "two", seed=0)])
    with pytest.raises(ValueError, match="twice"):
        find_runs([first, first])
    with pytest.raises(ValueError, match="no run"):
        find_runs([tmp_path / "nothing"])
    other = make_run(tmp_path / "three", seed=1, num_sentences=100)
    with pytest.raises(ValueError, match="other sentences"):
        compare_runs([first, other])
    with pytest.raises(ValueError, match=r"'BLEU'.*accuracy"):
        compare_runs([first], metric="BLEU")
    scores = RunFolder(first).scores_of("test", "best")
    content = json.loads(scores.read_text())
    content.pop("check")
    content["scores"][0]["by_task"]["en-fr"] += 1.0
    scores.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"score .*again"):
        compare_runs([first])


def test_command(tmp_path: Path) -> None:
    folder = two_methods(tmp_path / "runs")
    out = tmp_path / "out" / "table.json"
    done = CliRunner().invoke(app, ["compare", str(folder), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("# accuracy: 2 methods against joint")
    assert json.loads(out.read_text())["baseline"] == "joint"
    refused = CliRunner().invoke(app, ["compare", str(folder), "--baseline", "jiont"])
    assert refused.exit_code == 1
    assert "joint" in refused.stderr


def test_the_front_of_resource_levels(tmp_path: Path) -> None:
    """One is best for high, one for low resources, one in between; one is beaten everywhere."""
    made = {"flat": (0.5, 0.7), "even": (0.6, 0.6), "steep": (0.7, 0.5), "beaten": (0.4, 0.4)}
    for number, (name, (high, low)) in enumerate(made.items()):
        quality = {"en-fr": high, "en-hi": low}
        settings = {"sampling.temperature": float(number + 1)}
        make_run(tmp_path / name / "seed-0", quality=quality, settings=settings)
    found = compare_runs([tmp_path])
    levels = [row for row in found.rows if row.kind == "level"]
    assert set(pareto_front(levels)) == {"flat", "even", "steep"}
    assert "Trade-off between resource levels" in to_markdown(found)


def test_frozen_weights_of_every_seed_are_one_method(tmp_path: Path) -> None:
    """Each has another run in its settings, of its own seed."""
    for seed in range(2):
        source = make_run(tmp_path / "gradvac" / f"seed-{seed}", rule="gradvac", seed=seed)
        run, settings = (
            tmp_path / "frozen" / f"seed-{seed}",
            {"align.options": {"run": str(source)}},
        )
        make_run(run, rule="studies/frozen.py:Frozen", seed=seed, settings=settings)
    assert compare_runs([tmp_path]).seeds == {"frozen": (0, 1), "gradvac": (0, 1)}


def test_runs_that_start_from_others_are_one_method_wherever_they_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model.init` is as it was said in the folder of the training."""
    for seed in range(2):
        make_run(tmp_path / "runs" / "high" / f"seed-{seed}", seed=seed)
        parent = {"model.init": f"runs/high/seed-{seed}"}
        make_run(tmp_path / "runs" / "then_all" / f"seed-{seed}", seed=seed, settings=parent)
    both = {"high": (0, 1), "then_all": (0, 1)}
    for place in (tmp_path, Path("/")):
        monkeypatch.chdir(place)
        assert compare_runs([tmp_path / "runs"]).seeds == both
    moved = (tmp_path / "runs").rename(tmp_path / "renamed")
    assert compare_runs([moved]).seeds == both


def test_a_setting_that_is_younger_than_a_run_counts_as_its_default(tmp_path: Path) -> None:
    """Seeds of one method, from before and after `align.space`; another value differs."""
    make_run(tmp_path / "joint" / "seed-0")
    make_run(tmp_path / "gradvac" / "seed-0", rule="gradvac")
    default = {"align.space": "gradients"}
    make_run(tmp_path / "gradvac" / "seed-1", rule="gradvac", seed=1, settings=default)
    assert compare_runs([tmp_path]).seeds["gradvac"] == (0, 1)
    other = {"align.space": "preconditioned"}
    make_run(tmp_path / "gradvac" / "seed-2", rule="gradvac", seed=2, settings=other)
    with pytest.raises(ValueError, match=r"called gradvac.* differ in align\.space"):
        compare_runs([tmp_path])

"""The demo's printing and files; how well it learns is the demo's own business."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradvac.analysis import load_run
from gradvac.analysis.advice import Advice
from gradvac.lab.experiments import demo
from gradvac.lab.experiments.demo import (
    DemoResult,
    ScoreChange,
    _change,
    _chosen,
    _program,
    run_demo,
    run_side_by_side,
    verdict,
)
from gradvac.lab.recipes.nmt import NmtConfig
from gradvac.lab.runs.counts import SentenceCounts
from gradvac.lab.training import Display, config

CONFIGS = Path(__file__).parents[2] / "configs" / "nmt"
TASKS = ("en-qsm", "en-qpl", "en-qso")
SMALL = [
    'data.languages=["qsm", "qpl", "qso"]',
    "data.limit={qsm = 300, qpl = 400, qso = 400}",
    "data.vocabulary.size=1500",
    "model.width=32",
    "align.vaccinated=all",
    "train.max_steps=10",
    "train.threads=1",
    "validation.sentences=10",
    "decoding.beams=1",
]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.validate_every=0", r"validate_every: .*0"),
        ("train.max_steps=9", r"max_steps: .*10"),
        ('data.languages=["qso", "qsm"]', r"languages: .*three"),
    ],
)
def test_what_the_demo_needs(tmp_path: Path, setting: str, message: str) -> None:
    """Told before the work, and not when weights or companions are sought."""
    settings = config.load(NmtConfig, CONFIGS / "demo.toml", ["data.limit={}", setting])
    with pytest.raises(ValueError, match=message):
        run_demo(settings, tmp_path / "demo", console=Console(file=io.StringIO()))
    assert not any(tmp_path.iterdir())


def advice_for(*pairs: tuple[str, str]) -> Advice:
    """Each first task is promised the second."""
    num = len(TASKS)
    promised = np.zeros((num, num), dtype=bool)
    for task, companion in pairs:
        promised[TASKS.index(task), TASKS.index(companion)] = True
    values = np.where(promised, 0.4, 0.1)
    np.fill_diagonal(values, np.nan)
    return Advice(TASKS, values, values, values / 10, promised, (), 0.5, "decoder")


def here(jobs: Mapping[str, Any], _: Path, __: Console) -> None:
    """Instead of processes."""
    display = Display(Console(quiet=True), quiet=True)
    for job in jobs.values():
        pickle.loads(pickle.dumps(job))(display)


def test_the_demo_follows_the_advice_at_equal_cost_and_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: dict[str, str]
) -> None:
    monkeypatch.setattr(demo, "run_side_by_side", here)
    monkeypatch.setattr(demo, "_advice", lambda _: advice_for(("en-qsm", "en-qso")))
    small = [*SMALL, *(f"{key}={source}" for key, source in sources.items())]
    settings = config.load(NmtConfig, CONFIGS / "demo.toml", small)
    console, out = Console(file=io.StringIO(), width=120), tmp_path / "out"
    result = run_demo(settings, out, console=console, num_lines=10)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    words = (
        "Marvene",
        "with Ostrel, as advised",
        "with Linawe, drawn by chance",
        "GradVac instead",
    )
    for text in (*words, "on Marvene alone", "Another seed moves BLEU too", "10 batches of 512"):
        assert text in shown
    assert f"{_program()} advise {out / 'joint'} --out" in shown
    assert result.target == "en-qsm"
    assert json.loads((out / "demo.json").read_text())["tasks"] == {
        "alone": ["en-qsm"],
        "advised": ["en-qsm", "en-qso"],
        "chance": ["en-qsm", "en-qpl"],
    }
    for name, tasks in result.tasks.items():
        follow = config.load(NmtConfig, out / name / "config.toml")
        assert follow.data.tasks == tasks
        assert (follow.model.init, follow.model.init_weights) == (out / "joint", "8")
        assert follow.train.max_steps == 2  # of 10
        kept = json.loads((out / name / "scores" / "test.best.json").read_text())["scores"][0]
        assert kept["by_task"]["en-qsm"] == pytest.approx(result.changes[name].bleu)
    for name, rule in (("joint", "none"), ("gradvac", "gradvac")):
        run = config.load(NmtConfig, out / name / "config.toml")
        assert run.align.rule == rule
        assert run.data.prepared == out / "data"
        assert load_run(out / name).measured[0].steps.tolist() == [5, 10]


def test_the_smallest_with_a_promise_is_followed() -> None:
    def counts(**right: int) -> SentenceCounts:
        rows = {f"en-{code}": np.array([[n] * 4 + [9] * 6]) for code, n in right.items()}
        return SentenceCounts("BLEU", "bleu", rows, dict.fromkeys(rows, ""))

    sizes = {"en-qsm": 400, "en-qpl": 400, "en-qso": 5000}
    scored = counts(qsm=1, qpl=2, qso=9)
    every = advice_for(("en-qsm", "en-qso"), ("en-qpl", "en-qsm"), ("en-qso", "en-qsm"))
    assert _chosen(every, sizes, scored)["advised"] == ["en-qpl", "en-qsm"]
    assert _chosen(every, sizes, counts(qsm=2, qpl=1, qso=9))["alone"] == ["en-qsm"]
    large = _chosen(advice_for(("en-qso", "en-qsm")), sizes, scored)
    assert large["chance"] == ["en-qso", "en-qpl"]
    assert _chosen(advice_for(), sizes, scored) == {}


def test_intervals_are_those_of_other_sentences() -> None:
    draw = np.random.default_rng(1)

    def counts(right: float) -> SentenceCounts:
        matches = draw.binomial(8, right, size=(200, 4))
        rows = np.concatenate([matches, np.full((200, 6), 8)], axis=1)
        return SentenceCounts("BLEU", "bleu", {"en-qso": rows}, {"en-qso": ""})

    joint = counts(0.5)
    same, better = _change(joint, joint, ["en-qso"]), _change(joint, counts(0.7), ["en-qso"])
    assert (same.difference, same.low, same.high) == (0, 0, 0)
    assert better.bleu == pytest.approx(70, abs=3)
    assert 15 < better.low < better.difference < better.high < 25


def test_commands_to_go_on_with_run_in_any_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert _program() == "gradvac"
    monkeypatch.setenv("PATH", "/nowhere")
    assert _program() == f"{os.path.relpath(sys.executable)} -m gradvac"


def train(_: Display) -> None:
    """Leave what shows how far a run is."""
    run = Path(os.environ["OUT"]) / "joint"
    run.mkdir()
    (run / "config.toml").write_text("[train]\nmax_steps = 20")
    losses = {15: "2.5", 16: "null"}
    entries = [f'{{"step": {step}, "train/loss": {loss}}}\n' for step, loss in losses.items()]
    (run / "metrics.jsonl").write_text("".join([*entries, '{"step": 17}\n']))


def fail(display: Display) -> None:
    display.show_message("so far so good")
    raise ValueError("no such thing")


def vanish(_: Display) -> None:
    os._exit(3)


@pytest.mark.filterwarnings("ignore:.*fork")  # newer Pythons: of threads, which are idle
def test_jobs_side_by_side_tell_how_far_they_are_and_how_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = multiprocessing.get_context("fork")  # the next test starts a Python
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setenv("OUT", str(tmp_path))
    console = Console(file=io.StringIO(), width=120)
    before = dict(os.environ)
    with pytest.raises(ValueError, match=r"b: .*no such thing; c: .*3: it printed nothing"):
        run_side_by_side({"a": train, "b": fail, "c": vanish}, tmp_path, console)
    assert "joint 15/20" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "so far so good" in (tmp_path / "b.log").read_text()
    assert dict(os.environ) == before


def sleep(display: Display) -> None:
    display.show_message("asleep")
    time.sleep(60)


def test_a_stop_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a process that has begun, nor of one that has been asked to."""
    before = signal.getsignal(signal.SIGTERM)  # Ray, in another test, may have set one
    monkeypatch.setattr(demo, "_show", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side({"a": sleep}, tmp_path, Console(file=io.StringIO()))
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0.5, 5.0), "helped Tuvao here"),
        ((-1.0, 5.0), "changed Tuvao by no more than"),
        ((-5.0, -1.0), "harmed Tuvao here"),
    ],
)
def test_the_verdict_is_what_was_found(interval: tuple[float, float], expected: str) -> None:
    rest = ScoreChange(12.0, 0.5, -1.0, 1.0)
    changes = {"alone": rest, "advised": ScoreChange(14.0, 2.0, *interval), "chance": rest}
    tasks = {"advised": ["en-qpt", "en-qpp"]}
    result = DemoResult({}, "en-qpt", tasks, changes, {"alone": rest, "chance": rest}, rest, {})
    said = verdict(result, {"en-qpt": "Tuvao", "en-qpp": "Pelani"})
    assert expected in said
    assert "With Pelani it has +0.5 (-1.0 to +1.0) over the last fifth alone" in said

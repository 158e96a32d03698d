"""The demo's printing and files; how well it learns is the demo's own business."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradvac.analysis import load_run
from gradvac.lab.recipes.nmt import NmtConfig
from gradvac.lab.recipes.nmt.demo import (
    DemoResult,
    _program,
    _RemoteDisplay,
    run_demo,
    run_side_by_side,
    verdict,
)
from gradvac.lab.training import Display, config
from gradvac.lab.training.environment import StopSignals

CONFIGS = Path(__file__).parents[2] / "configs" / "nmt"


def test_the_demo_needs_validations(tmp_path: Path) -> None:
    """Told before the work, and not when the best weights are sought."""
    settings = config.load(NmtConfig, CONFIGS / "demo.toml", ["train.validate_every=0"])
    with pytest.raises(ValueError, match=r"validate_every: .*0"):
        run_demo(settings, tmp_path / "demo", console=Console(file=io.StringIO()))
    assert not any(tmp_path.iterdir())


def test_the_demo_shows_samples_scores_and_honest_verdicts(tmp_path: Path) -> None:
    settings = config.load(
        NmtConfig,
        CONFIGS / "demo.toml",
        [
            'data.languages=["qsm", "qpl"]',
            "data.limit={qsm = 300, qpl = 300}",
            "data.vocabulary.size=1500",
            "model.width=32",
            "align.vaccinated=all",
            "train.max_steps=2",
            "train.threads=1",
            "validation.sentences=10",
            "decoding.beams=1",
        ],
    )
    console = Console(file=io.StringIO(), width=120)
    result = run_demo(settings, tmp_path / "out", console=console, num_lines=10)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    words = ("Marvene", "Linawe", "within noise", "one seed each", "dictionary", "two-sided")
    for text in (*words, "Neither wins here", "joint training is the one to beat"):
        assert text in " ".join(shown.split())
    assert f"{_program()} nmt score {tmp_path / 'out' / 'gradvac'} --set dev" in shown
    assert set(result.bleu) == {"dictionary", "joint", "gradvac"}
    assert result.bleu["dictionary"]["en-qsm"] > 5
    saved = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert saved["bleu"]["joint"].keys() == {"en-qsm", "en-qpl"}
    for name, rule in (("joint", "none"), ("gradvac", "gradvac")):
        run = config.load(NmtConfig, tmp_path / "out" / name / "config.toml")
        assert run.align.rule == rule
        assert run.data.prepared == tmp_path / "out" / "data"
        seen = load_run(tmp_path / "out" / name)  # all that the report shows
        assert seen.scores is not None
        assert seen.scores.by_task["en-qsm"] == result.bleu[name]["en-qsm"]
        assert seen.measured[0].steps.tolist() == [2]
        assert seen.record is None  # two steps are fewer than record_every


def test_commands_to_go_on_with_run_in_any_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert _program() == "gradvac"
    monkeypatch.setenv("PATH", "/nowhere")
    assert _program() == f"{os.path.relpath(sys.executable)} -m gradvac"


def fail(display: Display) -> None:
    display.show_message("so far so good")
    raise ValueError("no such thing")


def vanish(_: Display) -> None:
    os._exit(3)


def test_jobs_side_by_side_tell_how_they_ended() -> None:
    console = Console(file=io.StringIO(), width=120)
    before = dict(os.environ)
    with pytest.raises(ValueError, match=r"b: no such thing; c: .*ended"):
        run_side_by_side({"b": fail, "c": vanish}, console)
    assert "b: so far so good" in console.file.getvalue()  # type: ignore[attr-defined]
    assert dict(os.environ) == before


def sleep(display: Display) -> None:
    display.show_message("asleep")
    time.sleep(60)


class StoppedConsole(Console):
    """One whose process gets SIGTERM as soon as something is said."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if any("asleep" in str(one) for one in objects):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_leaves_no_process_behind() -> None:
    before = signal.getsignal(signal.SIGTERM)  # Ray, in another test, may have set one
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side({"a": sleep}, StoppedConsole(file=io.StringIO()))
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_job_that_nobody_hears_stops_itself() -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    here.close()
    display = _RemoteDisplay(there)
    with StopSignals() as signals:
        display.show_message("hello?")
        display.show_message("hello?")  # a second signal would end it at once, unsaved
    assert signals.received == "SIGTERM"


@pytest.mark.parametrize(
    ("p_values", "changes", "expected"),
    [
        ((0.5, 0.5), (1.0, -1.0), "Neither wins here"),
        ((0.01, 0.5), (-3.0, 1.0), "Joint training wins here"),
        ((0.01, 0.02), (3.0, 1.0), "GradVac wins here"),
        ((0.01, 0.02), (3.0, -1.0), "Each wins somewhere"),
    ],
)
def test_the_verdict_is_what_was_found(
    p_values: tuple[float, ...], changes: tuple[float, ...], expected: str
) -> None:
    tasks = ("en-qso", "en-qpp")
    bleu = {"dictionary": dict.fromkeys(tasks, 3.0), "joint": dict.fromkeys(tasks, 30.0)}
    bleu["gradvac"] = {task: 30.0 + change for task, change in zip(tasks, changes, strict=True)}
    result = DemoResult(bleu, dict(zip(tasks, p_values, strict=True)), {})
    assert verdict(result).startswith(expected)

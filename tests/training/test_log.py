"""The run folder has one owner and readable records; a bar on a terminal, lines in a file."""

from __future__ import annotations

import io
import json
import logging
import math
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import Display, RunConfig, TrainConfig, config
from gradvac.lab.training.log import RunLog
from gradvac.lab.training.writers import writer_class
from gradvac.utils.hints import log_to


def open_log(run: Path, **train: Any) -> RunLog:
    settings = RunConfig(train=TrainConfig(**({"writers": []} | train)))
    return RunLog(run, settings)


def test_two_trainings_never_share_a_folder(tmp_path: Path) -> None:
    first = open_log(tmp_path)
    with pytest.raises(ValueError, match="another process"):
        open_log(tmp_path)
    first.close()
    open_log(tmp_path).close()


def test_lock_is_between_processes_and_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys, time, filelock\n"
        "lock = filelock.FileLock(sys.argv[1])\n"
        "lock.acquire()\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another process"):
            open_log(tmp_path)
        owner.kill()
        owner.wait()
    open_log(tmp_path).close()


def test_config_in_the_folder_is_the_run_s(tmp_path: Path) -> None:
    with open_log(tmp_path, seed=4) as log:
        log.start_writing(step=0, metrics_bytes=0)
    assert config.load(RunConfig, tmp_path / "config.toml").train.seed == 4


def test_records_are_visible_at_once_and_valid_json(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.start_writing(step=0, metrics_bytes=0)
        log.write(1, {"a": 1.5, "b": math.nan, "c": math.inf})
        text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
        assert "NaN" not in text
        assert "Infinity" not in text
        assert RunFolder(tmp_path).read_metrics() == [{"step": 1, "a": 1.5, "b": None, "c": None}]


def test_records_beyond_the_checkpoint_are_removed(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.start_writing(step=0, metrics_bytes=0)
        log.write(1, {"a": 1.0})
        position = log.position()
        log.write(2, {"a": 2.0})
    with open_log(tmp_path) as log:
        log.start_writing(step=1, metrics_bytes=position)
        log.write(2, {"a": 3.0})
    assert [record["a"] for record in RunFolder(tmp_path).read_metrics()] == [1.0, 3.0]


def test_lost_records_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_log(tmp_path) as log:
        log.start_writing(step=9, metrics_bytes=1000)
        log.write(10, {"a": 1.0})
    assert "shorter than it was" in caplog.messages[0]
    assert RunFolder(tmp_path).read_metrics() == [{"step": 10, "a": 1.0}]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.start_writing(step=0, metrics_bytes=0)
        log.write(1, {"a": 1.0})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
        try:
            with pytest.raises(OSError, match=r"metrics\.jsonl.*checkpoints"):
                log.write(2, {"a": 2.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert RunFolder(tmp_path).read_metrics() == [{"step": 1, "a": 1.0}]


def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_log(tmp_path, writers=["tensorboard"]) as log:
        log.start_writing(step=0, metrics_bytes=0)
        for step in (1, 2, 3):
            log.write(step, {"train/loss": float(step)})
    with open_log(tmp_path, writers=["tensorboard"]) as log:  # continued from step 1
        log.start_writing(step=1, metrics_bytes=0)
        log.write(2, {"train/loss": 20.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 20.0)]


def test_missing_tensorboard_is_logged_and_missing_wandb_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradvac")
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with RunLog(tmp_path, RunConfig()) as log:
        log.start_writing(step=0, metrics_bytes=0)
        log.write(1, {"a": 1.0})
    assert "TensorBoard is not installed" in caplog.messages[0]
    with (
        open_log(tmp_path, writers=["wandb"]) as log,
        pytest.raises(ValueError, match=r"train\.writers: 'wandb'"),
    ):
        log.start_writing(step=0, metrics_bytes=0)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_keep_one_page_per_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[tuple[str, Any]] = []
    module = ModuleType(name)
    module.init = lambda **options: calls.append(("init", options))  # type: ignore[attr-defined]
    module.log = lambda values, step: calls.append(("log", (step, values)))  # type: ignore[attr-defined]
    module.finish = lambda: calls.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        with open_log(tmp_path, writers=[name], project="mine") as log:
            log.start_writing(step=0, metrics_bytes=0)
            log.write(1, {"a": 1.0})
    assert [call for call, _ in calls] == ["init", "log", "finish"] * 2
    first, second = calls[0][1], calls[3][1]
    assert first == second  # so that it is found again
    assert (first["project"], first["name"], first["resume"]) == ("mine", tmp_path.name, "allow")
    assert first["config"]["train"]["project"] == "mine"
    assert calls[1][1] == (1, {"a": 1.0})
    json.dumps(first)


VALUES = {"train/loss": 1.23456, "train/lr": 1e-3, "train/tokens_per_second": 12345.6}


@pytest.mark.parametrize("terminal", [False, True])
def test_speed_and_time_left_are_shown(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with Display(console) as display:
        display.open(0, 100)
        display.advance(10)
        display.show(10, VALUES, seconds_left=3 * 3600 + 61)
        display.show_message("a [message] with brackets")
    text = file.getvalue()
    for part in ("10/100", "loss 1.2346", "12,346 tokens/s", "3:01:01 left"):
        assert part in text
    assert "a [message] with brackets" in text
    assert ("\x1b[" in text) == terminal


def test_quiet_shows_messages_only() -> None:
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True), quiet=True) as display:
        display.open(0, 100)
        display.advance(1)
        display.show(1, VALUES, seconds_left=1.0)
        assert file.getvalue() == ""
        display.show_message("something")
    assert "something" in file.getvalue()


def test_messages_go_to_the_innermost_display(caplog: pytest.LogCaptureFixture) -> None:
    logger, lines, file = logging.getLogger("gradvac.lab.anything"), list[str](), io.StringIO()
    logger.info("nobody listens")
    with log_to(lines.append):
        logger.info("%d [lines]", 2)
        with Display(Console(file=file)) as display, display:  # as a recipe and the loop do
            logger.warning("shown")
        logger.info("again")
    logger.info("nobody listens")
    assert lines == ["2 [lines]", "again"]
    assert file.getvalue() == "shown\n"
    assert "nobody listens" not in caplog.messages


OWN = """
from gradvac.lab.training import Writer


class Lines(Writer):
    def __init__(self, run, settings, *, step):
        self.file = open(run / "lines.txt", "a")
        print("from", step, settings.train.project, file=self.file)

    def write(self, step, values):
        print(step, values["a"], file=self.file)

    def close(self):
        self.file.close()


class Other:
    pass
"""


def test_a_writer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By file and by module; without pictures, unless it draws."""
    (tmp_path / "my_writers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, step in (("my_writers.py:Lines", 0), ("my_writers:Lines", 1)):
        with open_log(tmp_path, writers=[name], project="mine") as log:
            log.start_writing(step=step, metrics_bytes=0)
            log.write(step + 1, {"a": 1.5})
            log.draw(step + 1, "picture", np.zeros((2, 2, 3), dtype=np.uint8))
    lines = (tmp_path / "lines.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["from 0 mine", "1 1.5", "from 1 mine", "2 1.5"]
    for name, reason in (
        ("my_writers:Other", r"'Other' of my_writers is no subclass of .*Writer"),
        ("my_writers:Missing", "'Missing' of my_writers"),
        ("missing.py:Lines", r"no file missing\.py"),
        ("tensorbord", "did you mean 'tensorboard'"),
    ):
        with pytest.raises(ValueError, match=reason):
            writer_class(name)
    assert TrainConfig(writers=["missing.py:Lines"]), "whoever only reads a run need not have it"
    with pytest.raises(ValueError, match="did you mean"):
        TrainConfig(writers=["tensorbord"])

"""Sweeps that are executed, stopped, continued and halved."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradvac.lab.experiments import Processes, Submitit, Sweep, budget_table, compare_runs, worker
from gradvac.lab.experiments.methods import read_run
from gradvac.lab.experiments.sweep import HALVING, rungs
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import checkpoint
from gradvac.utils.files import folder_lock, read_json

from .conftest import ROOT, TWIN, InProcess

Make = Callable[..., Sweep]
HALF = {"train.validate_every": 2, "train.max_steps": 4}
METHODS = """
[[methods]]
name = "joint"
set = { "align.rule" = "sum" }
[[methods]]
name = "vaccinated"
"""


def statuses(sweep: Sweep) -> dict[str, str]:
    return {trial.label: sweep.ended(trial).status for trial in sweep.trials}


def test_runs_are_trained_scored_measured_compared_and_not_run_twice(sweep: Make) -> None:
    made = sweep('measure = ["dev"]\n[grid]\n"train.seed" = [0, 1]\n' + METHODS)
    launcher = InProcess()
    ended = made.run(launcher)
    assert set(statuses(made).values()) == {"done"}
    assert all(RunFolder(trial.run).similarity.is_file() for trial in made.trials)
    assert len(launcher.started) == 4
    found = compare_runs([made.out])
    assert found.metric == "BLEU"
    assert found.baseline == "joint"
    assert found.seeds == {"joint": (0, 1), "vaccinated": (0, 1)}
    assert "seeds and sentences" in found.test
    table = budget_table(ended)
    assert "| joint | 1 | 2 | 2 | 0 | 16 |" in table
    again = InProcess()
    made.run(again)
    assert again.started == []


def test_a_base_that_was_changed_is_seen(sweep: Make, tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(TWIN.read_text())
    sweep("score = []", base=base).run(InProcess())
    base.write_text(TWIN.read_text().replace("lr = 5e-3", "lr = 6e-3"))
    changed = sweep("score = []", base=base)
    assert statuses(changed) == {"twin.seed-0": "waiting"}
    changed.run(InProcess())
    assert "optimizer.lr" in changed.ended(changed.trials[0]).error


def test_runs_that_go_on_are_scored_again(sweep: Make) -> None:
    made = sweep("")
    made.run(InProcess())
    folder = RunFolder(made.trials[0].run)
    longer = {"train.max_steps": 12}
    sweep("score = []", **longer).run(InProcess())
    with pytest.raises(ValueError, match=r"other best weights .*score it again"):
        read_run(folder.path, split="test", weights="best", metric=None)
    with pytest.warns(UserWarning, match="left out"):
        assert folder.read_scores() == ()
    shutil.rmtree(made.out / "trials")
    made = sweep("", **longer)
    made.run(InProcess())
    assert read_run(folder.path, split="test", weights="best", metric=None) is not None
    assert statuses(made) == {"twin.seed-0": "done"}
    shutil.rmtree(folder.path)
    assert statuses(made) == {"twin.seed-0": "waiting"}


def test_a_failed_run_is_reported_and_run_again_when_asked(sweep: Make, tmp_path: Path) -> None:
    missing = tmp_path / "no.model"
    text = f"""
[[methods]]
name = "broken"
set = {{ "data.vocabulary.model" = "{missing}" }}
[[methods]]
name = "after"
set = {{ "model.init" = "{{run:broken}}" }}
"""
    made = sweep(text, **{"data.prepared": f"{tmp_path}/other"})
    made.run(InProcess())
    assert statuses(made) == {"broken.seed-0": "failed", "after.seed-0": "failed"}
    assert "no.model" in made.ended(made.trials[0]).error
    assert "needs broken.seed-0, which failed" in made.ended(made.trials[1]).error
    launcher = InProcess()
    made.run(launcher)
    assert launcher.started == []
    made.run(launcher, retry=True)
    assert launcher.started == ["broken.seed-0"]


def test_settings_that_cannot_be_used_are_told_before_anything_runs(sweep: Make) -> None:
    with pytest.raises(ValueError, match=r"joint: .*align.bta=0.1.*beta"):
        sweep('[[methods]]\nname = "joint"\nset = { "align.bta" = 0.1 }')
    with pytest.raises(ValueError, match=r"score: .*'tset'.*'test'"):
        sweep('score = ["tset"]')


def test_halving_stops_the_weaker_half_and_goes_on_exactly(sweep: Make) -> None:
    """A learning rate of nearly 0 loses; what is left ends as if nothing had been paused."""
    text = '[grid]\n"optimizer.lr" = [5e-3, 1e-9]\n'
    made = sweep(text, **HALF)
    launcher = InProcess()
    made.run(launcher, halving=True)
    assert statuses(made) == {"lr=0.005.seed-0": "done", "lr=1e-09.seed-0": "paused"}
    assert launcher.started == ["lr=0.005.seed-0", "lr=1e-09.seed-0", "lr=0.005.seed-0"]
    told = json.loads((made.out / HALVING).read_text())["rungs"]
    assert [(rung["step"], rung["kept"]) for rung in told] == [(2, ["lr=0.005"])]
    whole = sweep('[grid]\n"optimizer.lr" = [5e-3]\n', out="whole", **HALF)
    whole.run(InProcess())
    halved, unbroken = (checkpoint.weights(one.trials[0].run, "best") for one in (made, whole))
    assert all(torch.equal(values, unbroken[name]) for name, values in halved.items())


def test_rungs_are_validated_steps() -> None:
    assert rungs(3500, 250, 16) == [1000, 1750, 3500]
    assert rungs(1000, 100, 2) == [500, 1000]
    with pytest.raises(ValueError, match="smaller"):
        rungs(100, 100, 8)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_sweep_that_can_go_on(sweep: Make, number: signal.Signals) -> None:
    class Signalled(InProcess):
        def wait_for_one(self) -> dict[Path, int]:
            os.kill(os.getpid(), number)
            return super().wait_for_one()

    made, before = sweep("score = []", **{"train.max_steps": 1}), signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        made.run(Signalled())
    assert signal.getsignal(number) == before
    made.run(InProcess())
    assert statuses(made) == {"twin.seed-0": "done"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_save_when_the_sweep_is_stopped(
    tmp_path: Path, prepared: Path, sources: dict[str, str], number: signal.Signals
) -> None:
    """Two real processes at a time; what signals the whole process group would reach, and more."""
    command = [sys.executable, "-m", "gradvac", "sweep", "twin", "-o", str(tmp_path / "out")]
    command += ["--jobs", "2", f"data.prepared={prepared}", "train.max_steps=4000"]
    command += ['data.tasks=["en-qsm", "en-qsk"]', "train.validate_every=0"]
    command += [f"{key}={source}" for key, source in sources.items()]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True
    )
    runs = [tmp_path / "out" / name / "seed-0" for name in ("joint", "bilingual+en-qsm")]
    deadline = time.monotonic() + 120
    while not all(RunFolder(run).read_metrics() for run in runs) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=240)
    if number != signal.SIGKILL:
        assert process.returncode == 130, said
        assert "the same command continues" in said
    while workers_of(tmp_path) and time.monotonic() < deadline + 120:
        assert number == signal.SIGKILL, "the sweep has not waited for its runs"
        time.sleep(0.1)
    assert workers_of(tmp_path) == []
    for run in runs:
        assert RunFolder(run).kept_checkpoints()[-1][0] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_stop_while_it_scores_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (tmp_path / "task.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["work", str(tmp_path / "task.json")])
    monkeypatch.setattr(worker, "work", lambda: os.kill(os.getpid(), number))
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, *worker.STOPS)}
    try:
        with pytest.raises(SystemExit) as left:
            worker.work_from_file()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert left.value.code == worker.INTERRUPTED


def test_a_run_waits_for_its_predecessor_to_leave(sweep: Make) -> None:
    """One whose sweep was killed may still be saving when the same command continues."""
    made, is_held = sweep("score = []", **{"train.max_steps": 1}), threading.Event()

    def save() -> None:
        with folder_lock(made.trials[0].run, busy=None):
            is_held.set()
            time.sleep(0.5)

    predecessor = threading.Thread(target=save)
    predecessor.start()
    is_held.wait()
    made.run(InProcess())
    predecessor.join()
    assert statuses(made) == {"twin.seed-0": "done"}


def workers_of(folder: Path) -> list[Path]:
    """Processes that write a log in a folder."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if folder in output.readlink().parents:
                found.append(output)
    return found


def test_submitit_runs_jobs(sweep: Make) -> None:
    made = sweep("")
    options = {"cluster": "local", "timeout_min": 5}
    made.run(Submitit(made.out / "submitit", options, 1))
    assert statuses(made) == {"twin.seed-0": "done"}


KILLED = """
import os, signal
from gradvac.lab.recipes import Recipe, recipe_named

translation = recipe_named("nmt")

def train(config, run):
    print("here", os.getppid(), flush=True)
    if config.train.seed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return translation.train(config, run)

KILLED = Recipe("killed", translation.settings, translation.prepare, train, translation.score, None)
"""


def test_a_run_that_is_killed_takes_nothing_with_it(
    sweep: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs, by a recipe of one's own, the first is killed; one process forks both."""
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.chdir(tmp_path)
    made = sweep('[grid]\n"train.seed" = [0, 1]\n', recipe="killed.py:KILLED")
    made.run(Processes(1))
    assert statuses(made) == {"twin.seed-0": "failed", "twin.seed-1": "done"}
    assert made.ended(made.trials[0]).error.startswith("exit status -9: here")
    logs = [(made.out / "trials" / f"twin.seed-{seed}.log").read_text() for seed in (0, 1)]
    assert logs[0].split()[1] == logs[1].split()[1]  # the fork server's process number
    assert "Scored on the test set." in logs[1]


def test_primary_questions_are_asked_before_there_are_answers(sweep: Make) -> None:
    question = '[[primary]]\nmethod = "{}"\n'
    sweep(METHODS).run(InProcess())
    with pytest.raises(ValueError, match=r"primary: vaccinated against joint on 'all' was not"):
        sweep(question.format("vaccinated") + METHODS).run(InProcess())
    asked = sweep(question.format("vaccinated") + METHODS, out="other")
    asked.run(InProcess())
    later = question.format("pcgrad") + METHODS.replace("vaccinated", "pcgrad")
    sweep(later, out="other").run(InProcess())  # another sweep that shares the folder
    named = [one["method"] for one in read_json(asked.out / "sweep.json")["primary"]]
    assert named == ["vaccinated", "pcgrad"]
    with pytest.raises(ValueError, match=r"primary: vaccinated .* was asked"):
        sweep(METHODS, out="other").run(InProcess())


def test_a_result_counts_only_for_its_settings(sweep: Make) -> None:
    made = sweep("score = []")
    made.run(InProcess())
    result = made.out / "trials" / "twin.seed-0.result.json"
    written = json.loads(result.read_text())
    assert statuses(made) == {"twin.seed-0": "done"}
    result.write_text(json.dumps({**written, "hash": "of others"}))
    assert statuses(made) == {"twin.seed-0": "waiting"}
    del written["hash"]
    result.write_text(json.dumps(written))
    assert statuses(made) == {"twin.seed-0": "waiting"}

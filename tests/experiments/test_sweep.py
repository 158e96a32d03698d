"""Sweeps that are executed, stopped, continued and halved."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradvac.lab.experiments import Sweep, budget_table, budgets, compare_runs, read_run
from gradvac.lab.experiments.halving import FILE, rungs
from gradvac.lab.experiments.launchers import Processes, Submitit
from gradvac.lab.runs import RunFolder
from gradvac.lab.training import checkpoint

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
    table = budget_table(budgets(ended))
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
    with pytest.raises(ValueError, match=r"has other best weights than .* score it again"):
        read_run(folder.path, split="test", weights="best", metric=None)
    with pytest.warns(UserWarning, match="Its scores are left out"):
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
    with pytest.raises(ValueError, match=r"joint: override align.bta=0.1.*beta"):
        sweep('[[methods]]\nname = "joint"\nset = { "align.bta" = 0.1 }')
    with pytest.raises(ValueError, match=r"score: there is no set 'tset'; did you mean 'test'\?"):
        sweep('score = ["tset"]')


def test_halving_stops_the_weaker_half_and_goes_on_exactly(sweep: Make) -> None:
    """A learning rate of nearly 0 loses; what is left ends as if nothing had been paused."""
    text = '[grid]\n"optimizer.lr" = [5e-3, 1e-9]\n'
    made = sweep(text, **HALF)
    launcher = InProcess()
    made.run(launcher, halving=True)
    assert statuses(made) == {"lr=0.005.seed-0": "done", "lr=1e-09.seed-0": "paused"}
    assert launcher.started == ["lr=0.005.seed-0", "lr=1e-09.seed-0", "lr=0.005.seed-0"]
    told = json.loads((made.out / FILE).read_text())["rungs"]
    assert [(rung["step"], rung["kept"]) for rung in told] == [(2, ["lr=0.005"])]
    whole = sweep('[grid]\n"optimizer.lr" = [5e-3]\n', out="whole", **HALF)
    whole.run(InProcess())
    halved, unbroken = (checkpoint.weights(one.trials[0].run, "best") for one in (made, whole))
    assert all(torch.equal(values, unbroken[name]) for name, values in halved.items())


def test_rungs_are_validated_steps() -> None:
    assert rungs(3500, 250, 16) == [1000, 1750, 3500]
    assert rungs(1000, 100, 2) == [500, 1000]
    with pytest.raises(ValueError, match="set a smaller one"):
        rungs(100, 100, 8)


def test_processes_save_when_the_user_stops_them(
    tmp_path: Path, prepared: Path, sources: dict[str, str]
) -> None:
    """Two real processes at a time, stopped by a signal."""
    command = [sys.executable, "-m", "gradvac.cli", "sweep", "twin", "-o", str(tmp_path / "out")]
    command += ["--jobs", "2", f"data.prepared={prepared}", "train.max_steps=4000"]
    command += ['data.tasks=["en-qsm", "en-qsk"]', "train.validate_every=0"]
    command += [f"{key}={source}" for key, source in sources.items()]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    runs = [tmp_path / "out" / name / "seed-0" for name in ("joint", "bilingual+en-qsm")]
    deadline = time.monotonic() + 120
    while not all(RunFolder(run).read_metrics() for run in runs) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 130, said
    assert "the same command continues" in said
    for run in runs:
        assert RunFolder(run).kept_checkpoints()[-1][0] > 0


def test_submitit_runs_jobs(sweep: Make) -> None:
    made = sweep("")
    options = {"cluster": "local", "timeout_min": 5}
    made.run(Submitit(made.out / "submitit", options, 1))
    assert statuses(made) == {"twin.seed-0": "done"}


def test_a_lane_does_several_runs_and_outlives_one_that_is_killed(
    sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is killed; the second one, of the same lane, is as any other."""
    killed = (
        "from gradvac.lab.experiments import worker\n"
        "import os, signal\n"
        "real = worker.work\n"
        "def work(**task):\n"
        "    print('here', os.getppid(), flush=True)\n"
        "    if task['settings']['train.seed'] == 0:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(**task)\n"
        "worker.work = work\n"
        "worker.serve()\n"
    )
    monkeypatch.setattr("gradvac.lab.experiments.launchers._LANE", killed)
    made = sweep('[grid]\n"train.seed" = [0, 1]\n')
    made.run(Processes(1))
    assert statuses(made) == {"twin.seed-0": "failed", "twin.seed-1": "done"}
    assert made.ended(made.trials[0]).error.startswith("exit status -9: here")
    logs = [(made.out / "trials" / f"twin.seed-{seed}.log").read_text() for seed in (0, 1)]
    assert logs[0].split()[1] == logs[1].split()[1]  # the lane's process number


def test_a_lane_that_ends_is_told(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradvac.lab.experiments.launchers._LANE", "raise SystemExit(7)")
    made = sweep("")
    made.run(Processes(1))
    assert "ended with exit status 7" in made.ended(made.trials[0]).error


def test_when_its_time_is_over_a_sweep_leaves_and_goes_on_later(
    sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that is under way saves, the next one does not begin."""
    long = {"train.max_steps": 3000, "train.validate_every": 0, "train.checkpoint_every": 3000}
    made = sweep('[grid]\n"train.seed" = [0, 1]\n', **long)
    first, second = (trial.run for trial in made.trials)

    def now() -> float:  # time is over as soon as the first run has logged something
        return 60.0 if RunFolder(first).read_metrics() else 0.0

    monkeypatch.setattr("gradvac.lab.experiments.pace.time", SimpleNamespace(monotonic=now))
    made.run(Processes(1), seconds=2)
    assert set(statuses(made).values()) == {"waiting"}
    assert RunFolder(first).kept_checkpoints()[-1][0] > 0
    assert not second.exists()
    assert "2 seconds are over; the same command continues." in made.said  # type: ignore[attr-defined]


class Pretended:
    """A launcher whose runs take a second for each step, on a clock of its own."""

    jobs = 1

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock, self.started, self.ended = clock, list[str](), dict[Path, int]()

    def start(self, task: Path, log: Path) -> Path:
        asked = json.loads(task.read_text())
        steps = asked["settings"]["train.max_steps"]
        folder = RunFolder(Path(asked["run"]))
        kept = folder.kept_checkpoints()
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.touch()
        self.clock.now += steps - (kept[-1][0] if kept else 0)
        Path(asked["result"]).write_text(json.dumps({"reason": "finished", "step": steps}))
        self.started.append(task.stem)
        self.ended[task] = 0
        return task

    def wait_for_one(self, timeout: float | None = None) -> dict[Path, int]:
        ended, self.ended = self.ended, {}
        return ended

    def stop(self) -> None:
        pass


def test_a_run_that_would_not_end_in_time_does_not_begin(
    sweep: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun goes on first; what would come too late is left for the next call."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "gradvac.lab.experiments.pace.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    made = sweep('[grid]\n"train.seed" = [0, 1, 2, 3]\n')
    RunFolder(made.trials[2].run).checkpoint(6).mkdir(parents=True)
    made.run(Pretended(clock), seconds=20)
    assert statuses(made) == {
        f"twin.seed-{seed}": "waiting" if seed == 3 else "done" for seed in range(4)
    }
    assert clock.now == 2 + 8 + 8
    said = made.said[-1]  # type: ignore[attr-defined]
    assert said.startswith("Left for later: 1 of 4 runs")
    assert said.endswith("within 20 seconds; the same command continues.")
    later = Pretended(clock)
    made.run(later, seconds=8)
    assert later.started == ["twin.seed-3"]

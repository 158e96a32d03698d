"""A run that was stopped and continued is the run that was not, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import ConfigError, Result, checkpoint

Settings = Callable[..., Any]
RunToy = Callable[..., Result]


class CrashError(Exception):
    pass


def crash_at(step: int) -> Callable[[int, object], None]:
    def watch(now: int, alignment: object) -> None:
        if now == step:
            raise CrashError

    return watch


def signal_at(step: int, number: int = signal.SIGTERM) -> Callable[[int, object], None]:
    def watch(now: int, alignment: object) -> None:
        if now == step:
            os.kill(os.getpid(), number)

    return watch


RULES: list[tuple[dict[str, Any], int]] = [
    ({"rule": "gradvac", "beta": 0.1}, 2),
    ({"rule": "gradvac", "target": 0.5, "vaccinated": "low", "preserve_norm": True}, 1),
    ({"rule": "pcgrad"}, 2),
    ({"rule": "mgda", "normalize": "loss+"}, 1),
    ({"rule": "gradnorm"}, 2),
    ({"rule": "sum", "weights": {"low": 0.5}}, 1),
]  # a rule is called once a step, however many batches it has


@pytest.mark.parametrize(("align", "accumulation"), RULES)
def test_every_rule(
    tmp_path: Path,
    toy: ModuleType,
    settings: Settings,
    run_toy: RunToy,
    align: dict[str, Any],
    accumulation: int,
) -> None:
    config = settings(align=align, optimizer={"accumulation": accumulation})
    run_toy(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run_toy(config, tmp_path / "parts", watch=crash_at(7))
    assert run_toy(config, tmp_path / "parts").step == 12
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "linear", "cosine", "wsd", "constant"])
def test_every_schedule(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy, schedule: str
) -> None:
    """The crash is where "wsd" is still stable; it goes on into its fall."""
    config = settings(optimizer={"warmup_steps": 3, "schedule": schedule}, train={"log_every": 1})
    run_toy(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run_toy(config, tmp_path / "parts", watch=crash_at(7))
    run_toy(config, tmp_path / "parts")
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
@pytest.mark.parametrize("granularity", ["whole_model", "all_matrix"])
def test_every_engine(
    tmp_path: Path,
    toy: ModuleType,
    settings: Settings,
    run_toy: RunToy,
    engine: str,
    granularity: str,
) -> None:
    config = settings(align={"engine": engine, "granularity": granularity})
    run_toy(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run_toy(config, tmp_path / "parts", watch=crash_at(11))
    run_toy(config, tmp_path / "parts")
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


def test_stopping_after_every_single_step(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy
) -> None:
    """A signal stops with a checkpoint; a validation that was due comes when it goes on."""
    config = settings(
        train={"log_every": 5, "average_last": 2},
        sampling={"schedule": [{"from_step": 6, "temperature": 1.0}]},
    )
    run_toy(config, tmp_path / "whole")
    for step in range(1, 12):
        result = run_toy(config, tmp_path / "parts", watch=signal_at(step))
        assert (result.reason, result.step) == ("interrupted", step)
    result = run_toy(config, tmp_path / "parts", watch=signal_at(12))
    assert result.reason == "finished"  # the end was there anyway
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_says_how_to_continue(
    tmp_path: Path, settings: Settings, run_toy: RunToy, shown: Any, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    run_toy(settings(), tmp_path, watch=signal_at(6, number))
    assert f"Stopped by {number.name} after step 6; the same command" in shown.text
    assert signal.getsignal(number) is before


def test_second_signal_leaves_at_once(tmp_path: Path, settings: Settings, run_toy: RunToy) -> None:
    def watch(step: int, alignment: object) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_toy(settings(), tmp_path, watch=watch)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 4


def test_damaged_last_checkpoint_costs_steps_not_the_run(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy, shown: Any
) -> None:
    config = settings()
    run_toy(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run_toy(config, tmp_path / "parts", watch=crash_at(9))
    last = tmp_path / "parts" / "checkpoints" / "step-00000008" / checkpoint.STATE
    last.write_bytes(last.read_bytes()[:-100])
    run_toy(config, tmp_path / "parts")
    assert "step-00000008 is damaged" in shown.text
    assert "Continuing from step 4." in shown.text
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


def test_metrics_are_cut_back_to_the_checkpoint(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    config = settings(train={"log_every": 1})
    with pytest.raises(CrashError):
        run_toy(config, tmp_path, watch=crash_at(7))
    assert RunFolder(tmp_path).read_metrics()[-1]["step"] == 6
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')  # killed within a line
    assert RunFolder(tmp_path).read_metrics()[-1]["step"] == 6
    run_toy(config, tmp_path)
    logged = [r["step"] for r in RunFolder(tmp_path).read_metrics() if "train/loss" in r]
    validated = [r["step"] for r in RunFolder(tmp_path).read_metrics() if "dev/loss" in r]
    assert logged == list(range(1, 13))
    assert validated == [4, 8, 12]


def test_run_has_a_checkpoint_from_the_start(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy
) -> None:
    config = settings(train={"checkpoint_every": 100, "validate_every": 2})
    run_toy(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run_toy(config, tmp_path / "parts", watch=crash_at(3))
    found = checkpoint.latest(tmp_path / "parts")
    assert found is not None
    assert found.step == 0
    run_toy(config, tmp_path / "parts")
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


def test_weights_without_a_checkpoint_are_not_replaced(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    run_toy(settings(), tmp_path)
    before = (tmp_path / "best.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"best\.safetensors.*no checkpoint"):
        run_toy(settings(), tmp_path)
    assert (tmp_path / "best.safetensors").read_bytes() == before


def test_finished_run_can_be_extended(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy, shown: Any
) -> None:
    run_toy(settings(), tmp_path / "parts")
    assert run_toy(settings(), tmp_path / "parts").step == 12  # nothing left to do
    longer = settings(train={"max_steps": 16})
    assert run_toy(longer, tmp_path / "parts").step == 16
    assert "train.max_steps: 12 until now, 16 from here on." in shown.text
    run_toy(longer, tmp_path / "whole")
    assert toy.outcome(tmp_path / "parts") == toy.outcome(tmp_path / "whole")


def test_run_refuses_to_become_another_experiment(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    run_toy(settings(), tmp_path)
    changed = settings(optimizer={"lr": 0.5}, train={"seed": 3, "log_every": 5})
    with pytest.raises(ConfigError) as caught:
        run_toy(changed, tmp_path)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["train.seed", "optimizer.lr"]
    assert "has 0.01, now 0.5 was asked for" in lines[1]


def test_run_refuses_other_data(
    tmp_path: Path, toy: ModuleType, settings: Settings, run_toy: RunToy, monkeypatch: Any
) -> None:
    run_toy(settings(), tmp_path)
    monkeypatch.setattr(toy.ToyRecipe, "data_signature", lambda _: "other data")
    with pytest.raises(ValueError, match="other data"):
        run_toy(settings(), tmp_path)


def test_validation_does_not_touch_training(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    run_toy(settings(train={"validate_every": 1}), tmp_path / "often")
    run_toy(settings(train={"validate_every": 0}), tmp_path / "never")
    often, never = (checkpoint.weights(tmp_path / run, "last") for run in ("often", "never"))
    assert all(torch.equal(often[name], never[name]) for name in never)

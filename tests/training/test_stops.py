"""Stops, bad stretches and full disks: no good checkpoint is lost, no first error is hidden."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import CheckpointError, ConfigError, DivergedError, checkpoint, train

Run = Callable[..., Any]


def stop_at(*steps: int, by: signal.Signals = signal.SIGTERM) -> Callable[[int, object], None]:
    return lambda step, _: signal.raise_signal(by) if step in steps else None


def steps_of(run: Path) -> list[int]:
    return [one.step for one in checkpoint.list_checkpoints(run)]


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_in_a_bad_stretch_pushes_nothing_out(
    settings: Run, run_toy: Run, shown: Any, tmp_path: Path, by: signal.Signals
) -> None:
    config = settings(train={"keep": 2, "max_steps": 40, "max_bad_steps": 30})
    bad = frozenset(range(9, 100))
    for step in (10, 11, 13, 14, 15):
        result = run_toy(config, tmp_path / "run", spoil=bad, watch=stop_at(step, by=by))
        assert result.reason == "interrupted"
        assert steps_of(tmp_path / "run") == [4, 8]
        bad = frozenset(range(1, 100))  # counted from the checkpoint that is continued
    assert "Nothing was saved here" in shown.text
    assert f"Stopped by {by.name} after step 10" in shown.text
    assert "continues from step 8" in shown.text


def test_weights_that_are_not_finite_are_never_saved(
    settings: Run, toy: Any, shown: Any, tmp_path: Path
) -> None:
    config = settings(train={"keep": 2, "max_steps": 40})
    recipe = toy.ToyRecipe(config)

    def spoil(step: int, _: object) -> None:
        if step == 11:
            with torch.no_grad():
                next(recipe.model.parameters()).fill_(torch.inf)

    with pytest.raises(DivergedError, match="not finite") as caught:
        train(recipe, config, tmp_path / "run", display=shown, watch=spoil)
    message = str(caught.value)
    assert "The last good checkpoint is that of step 8" in message
    # The advice can be followed: a run keeps its optimizer, another folder does not.
    assert "another folder" in message
    assert "optimizer.lr (here 0.01)" in message
    assert steps_of(tmp_path / "run") == [4, 8]
    for which in ("last", "best", 4, 8):
        found = checkpoint.weights(tmp_path / "run", which)
        assert all(value.isfinite().all() for value in found.values())


def test_a_checkpoint_of_another_version_that_is_not_finite_is_told(
    settings: Run, run_toy: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_toy(settings(), run, watch=stop_at(6))
    last = checkpoint.latest(run)
    assert last is not None
    weights = {name: value * torch.nan for name, value in last.weights().items()}
    checkpoint.write_checkpoint(run, 7, weights, last.state(), keep=5)
    with pytest.raises(CheckpointError, match=r"step-00000007: .*not finite"):
        run_toy(settings(), run)


@pytest.mark.parametrize("stops", [(2,), (5, 6, 7, 9), (4, 8), (3, 4, 5, 10, 11)])
def test_what_a_run_ends_with_does_not_depend_on_stops(
    settings: Run, run_toy: Run, toy: Any, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    config = settings(train={"keep": 3, "average_last": 3})
    run_toy(config, tmp_path / "whole")
    for stop in stops:
        assert run_toy(config, tmp_path / "run", watch=stop_at(stop)).step == stop
    run_toy(config, tmp_path / "run")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole") == [4, 8, 12]
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")
    averaged = [checkpoint.weights(tmp_path / name, "averaged") for name in ("run", "whole")]
    assert all(torch.equal(averaged[0][name], value) for name, value in averaged[1].items())


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_while_closing_does_not_hide_the_first(
    settings: Run, run_toy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(train={"record_every": 1})

    def break_everything(step: int, _: object) -> None:
        if step == 7:
            monkeypatch.setattr("gradvac.lab.training.checkpoint.write_weights", fail)
            monkeypatch.setattr("gradvac.analysis.record.append_chunk", fail)

    with pytest.raises(CheckpointError, match="make room") as caught:
        run_toy(config, tmp_path / "run", watch=break_everything)
    assert any("Closing failed too" in note for note in caught.value.__notes__)
    monkeypatch.undo()
    assert run_toy(config, tmp_path / "run").reason == "finished"


def test_an_error_while_closing_alone_is_told(
    settings: Run, run_toy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(train={"record_every": 1})
    monkeypatch.setattr("gradvac.analysis.record.append_chunk", fail)
    with pytest.raises(OSError, match=r"record\.bin.*make room"):
        run_toy(config, tmp_path / "run")


def test_a_run_that_is_moved_away_does_not_end_as_finished(
    settings: Run, run_toy: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def move(step: int, _: object) -> None:
        if step == 6:
            run.rename(tmp_path / "elsewhere")

    with pytest.raises(CheckpointError, match="written"):
        run_toy(settings(), run, watch=move)
    assert not run.exists()
    assert steps_of(tmp_path / "elsewhere")[-1] == 4
    assert run_toy(settings(), tmp_path / "elsewhere").reason == "finished"


def test_a_run_continues_only_with_its_settings(
    settings: Run, run_toy: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_toy(settings(), run, watch=stop_at(6))
    path = RunFolder(run).config
    whole = path.read_text()
    path.write_text(whole.replace("lr = 0.01", "lr = 0.02"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr: .*0\.02.*0\.01"):
        run_toy(settings(), run)
    path.write_text(whole)
    assert run_toy(settings(), run).reason == "finished"


def test_files_of_a_run_are_written_once_and_mended(
    settings: Run, toy: Any, shown: Any, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", settings()

    def go(content: bytes, watch: Any = None) -> None:
        files = {"words.txt": content}
        train(toy.ToyRecipe(config), config, run, display=shown, watch=watch, files=files)

    run.mkdir()
    (run / "words.txt").write_bytes(b"half of it")  # a killed process of an older version
    go(b"a b c", watch=stop_at(6))
    assert (run / "words.txt").read_bytes() == b"a b c"
    before = (run / "words.txt").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"another words\.txt"):
        go(b"other words")
    (run / "words.txt").write_bytes(b"damaged")
    go(b"a b c")
    assert (run / "words.txt").read_bytes() == b"a b c"
    assert (run / "words.txt").stat().st_mtime_ns != before


def test_checkpoints_may_be_a_link_to_another_disk(
    settings: Run, run_toy: Run, tmp_path: Path
) -> None:
    for name in ("run", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    run_toy(settings(), tmp_path / "run", watch=stop_at(6))
    assert run_toy(settings(), tmp_path / "run").reason == "finished"
    assert (tmp_path / "run" / "checkpoints").is_symlink()
    assert (tmp_path / "scratch" / "step-00000012" / "manifest.json").is_file()
    assert steps_of(tmp_path / "run")[-1] == 12


def test_the_signature_says_what_ran_in_the_end(
    settings: Run, toy: Any, shown: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()
    recipe = toy.ToyRecipe(config)

    def change_mind(step: int, _: object) -> None:
        if step == 11:  # after the last log entry but one
            monkeypatch.setattr("gradvac.Aligner.engine", property(lambda _: "another"))

    train(recipe, config, tmp_path / "run", display=shown, watch=change_mind)
    signature = RunFolder(tmp_path / "run").read_signature()
    assert signature["engine"] == "another"
    assert signature["signature"].count("engine:another") == 1
    assert "signature:" not in signature["signature"]

"""Weights are those that were written, or an error names the file that is not."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gradvac.lab.runs import RunFolder
from gradvac.lab.training import CheckpointError, checkpoint
from gradvac.lab.training.weights import load_weights, read_metadata, read_weights, write_weights

Run = Callable[..., Any]


def make() -> dict[str, torch.Tensor]:
    shared = torch.arange(12.0).reshape(3, 4)
    return {
        "embedding": shared,
        "softmax": shared,
        "half": torch.ones(5, dtype=torch.bfloat16),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }


def test_round_trip_stores_tied_weights_once(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(path, make(), {"step": "3"})
    found = read_weights(path)
    assert found["softmax"].data_ptr() == found["embedding"].data_ptr()
    assert all(torch.equal(found[name], value) for name, value in make().items())
    assert read_metadata(path)["step"] == "3"
    assert len(safetensors.torch.load_file(path)) == 4


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_weights(path, make(), {"step": "3"})
    whole, draw = path.read_bytes(), random.Random(0)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"w\.safetensors"):
            read_weights(path)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 1000])
def test_what_is_no_weights_file_is_told_by_name(tmp_path: Path, size: int) -> None:
    path = tmp_path / "w.safetensors"
    for content in (random.Random(size).randbytes(size), bytes(size)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"w\.safetensors: .*weights"):
            read_weights(path)
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="checksum"):
        read_weights(path)


def test_weights_of_another_model_are_no_traceback() -> None:
    with pytest.raises(CheckpointError, match=r"runs/a: .*another model"):
        load_weights(torch.nn.Linear(2, 2), {"x": torch.ones(2)}, origin="runs/a")


@pytest.fixture
def finished(settings: Run, run_toy: Run, tmp_path: Path) -> Path:
    train = {"checkpoint_every": 4, "keep": 3, "average_last": 2}
    run_toy(settings(train=train), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("which", ["best", "averaged", 8, "last"])
def test_damaged_weights_of_a_run_are_named(
    finished: Path, caplog: pytest.LogCaptureFixture, which: str | int
) -> None:
    checkpoint.weights(finished, which)
    folder = RunFolder(finished)
    path = folder.weights(str(which))
    if which in (8, "last"):
        path = folder.checkpoint(8 if which == 8 else 12) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    if which == "last":
        # The one before is taken, with a warning.
        found = checkpoint.weights(finished, which)
        assert all(torch.equal(found[n], w) for n, w in checkpoint.weights(finished, 8).items())
        assert "step-00000012 is damaged" in caplog.messages[-1]
    else:
        with pytest.raises(CheckpointError, match=r"damaged"):
            checkpoint.weights(finished, which)


@pytest.mark.parametrize("which", ["../run/best", "best.safetensors", "..", "", "/etc/passwd"])
def test_weights_are_looked_for_in_the_run_alone(finished: Path, which: str) -> None:
    with pytest.raises(CheckpointError, match="averaged, best, last, 4, 8, 12"):
        checkpoint.weights(finished, which)


def test_files_have_the_mode_of_any_new_file(finished: Path) -> None:
    before = os.umask(0)
    os.umask(before)
    for path in finished.rglob("*"):
        if path.is_file() and not path.name.endswith(".lock"):
            assert path.stat().st_mode & 0o777 == 0o666 & ~before, path


@pytest.mark.parametrize("content", [b"{}", b"", b"[]", b'{"step": 12, "files": {}}', b"[" * 99999])
def test_a_checkpoint_is_what_its_manifest_says(
    finished: Path, settings: Run, run_toy: Run, shown: Any, content: bytes
) -> None:
    expected = checkpoint.weights(finished, "last")
    (RunFolder(finished).checkpoint(12) / "manifest.json").write_bytes(content)
    (RunFolder(finished).checkpoints / "step-latest").mkdir()
    (RunFolder(finished).checkpoints / "step-00000099").write_text("no folder")
    train = {"checkpoint_every": 4, "keep": 3, "average_last": 2}
    run_toy(settings(train=train), finished)
    assert "step-00000012 is damaged" in shown.text
    assert "Continuing from step 8" in shown.text
    found = checkpoint.weights(finished, "last")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_average_holds_tied_weights_once(tmp_path: Path) -> None:
    for step in (4, 8):
        scaled = {name: value * step for name, value in make().items()}
        scaled["softmax"] = scaled["embedding"]
        checkpoint.write_checkpoint(_folder(tmp_path), step, scaled, {}, keep=3)
    checkpoint.average(tmp_path, 2)
    found = checkpoint.weights(tmp_path, "averaged")
    assert torch.equal(found["embedding"], 6 * make()["embedding"])
    assert found["softmax"].data_ptr() == found["embedding"].data_ptr()
    stored = safetensors.torch.load_file(RunFolder(tmp_path).weights("averaged"))
    assert len(stored) == 4


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def test_copies_of_a_run_read_the_same(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    for which in ("best", "averaged", "last", 8):
        found = checkpoint.weights(tmp_path / "copy", which)
        expected = checkpoint.weights(finished, which)
        assert all(torch.equal(found[name], value) for name, value in expected.items())

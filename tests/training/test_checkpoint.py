"""Checkpoints: complete or absent, verified, and never at the expense of the one before."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from gradvac.lab.runs.manifest import MANIFEST, write_manifest
from gradvac.lab.training import CheckpointError, checkpoint
from gradvac.lab.training.weights import read_metadata


class Tied(nn.Module):
    """Tied weights, a view of a larger tensor, and a whole-number buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("part", torch.arange(10.0)[2:5])
        self.register_buffer("count", torch.tensor(3))


def weights(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((4,), value), "n": torch.tensor(int(value))}


def save(run: Path, step: int, *, keep: int = 3, **state: Any) -> None:
    checkpoint.write_checkpoint(run, step, weights(float(step)), {"step": step, **state}, keep=keep)


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_round_trip(tmp_path: Path) -> None:
    state = {
        "tensor": torch.randn(3, dtype=torch.float64),
        "nested": {"list": [1, 2.5, None, True, "x"], 3: (4, 5)},
    }
    save(tmp_path, 10, **state)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 10
    assert torch.equal(found.weights()["w"], torch.full((4,), 10.0))
    assert torch.equal(found.state()["tensor"], state["tensor"])
    assert found.state()["nested"] == state["nested"]


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    checkpoint.write_checkpoint(tmp_path, 1, model.state_dict(), {}, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    stored = safetensors.torch.load_file(found.path / checkpoint.MODEL)
    assert sorted(stored) == ["count", "embedding.weight", "part"]
    other.load_state_dict(found.weights())
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert other.head.weight is other.embedding.weight


def test_state_of_other_types_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state\['batches'\]\['order'\]\[0\]: .*int64"):
        save(tmp_path, 1, batches={"order": [np.int64(1)]})


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (5, 100, 20_000, 1_000_000):
        save(tmp_path, step, keep=2)
    assert kept(tmp_path) == ["step-00020000", "step-01000000"]


@pytest.mark.parametrize("file", [checkpoint.MODEL, checkpoint.STATE, MANIFEST])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damaged_last_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    path = tmp_path / "checkpoints" / "step-00000020" / file
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 0x80
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if how == "cut" else content)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 10
    assert len(caplog.messages) == 1
    assert "step-00000020 is damaged" in caplog.messages[0]
    save(tmp_path, 20)  # and it can be written again
    again = checkpoint.latest(tmp_path)
    assert again is not None
    assert again.step == 20
    assert len(caplog.messages) == 1


def test_nothing_but_damage_is_an_error(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 10)
    (tmp_path / "checkpoints" / "step-00000010" / checkpoint.STATE).unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.latest(tmp_path)


def test_a_checkpoint_that_a_process_does_not_see_is_not_called_damaged(tmp_path: Path) -> None:
    """Its storage is not shared: removing the checkpoint would be bad advice."""
    with pytest.raises(FileNotFoundError):
        checkpoint.Checkpoint(tmp_path / "step-00000010", 10).state()


def test_a_pickle_in_place_of_the_state_is_refused_in_words(tmp_path: Path) -> None:
    """It runs no code; with a manifest that lists it, no checksum tells."""
    save(tmp_path, 10)
    folder = tmp_path / "checkpoints" / "step-00000010"
    (folder / checkpoint.STATE).write_bytes(pickle.dumps(Tied))
    write_manifest(folder)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match=r"state.pt: .*remove .*step-00000010"):
        found.state()


def fill_disk(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "place", ["torch.save", "safetensors.torch.save_file", "os.fsync", "os.rename"]
)
def test_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(place, fill_disk)
    with pytest.raises(CheckpointError, match=r"step 20 .*No space left on device") as caught:
        save(tmp_path, 20)
    assert "step 10 is intact" in str(caught.value)
    monkeypatch.undo()
    assert kept(tmp_path) == ["step-00000010"]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 10
    save(tmp_path, 20)
    assert kept(tmp_path) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("large", ["weights", "state"])
def test_writers_that_fail_for_real(tmp_path: Path, large: str) -> None:
    """A file-size limit makes the two writers below us fail in their own words."""
    save(tmp_path, 10)
    block = {"block": torch.zeros(100_000)}
    own, state = (block, {}) if large == "weights" else (weights(1.0), block)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 10 .*intact"):
            checkpoint.write_checkpoint(tmp_path, 20, own, state, keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept(tmp_path) == ["step-00000010"]


def test_failed_best_weights_leave_the_former_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save_weights(tmp_path, "best", weights(1.0), {"step": 10})
    monkeypatch.setattr("os.replace", fill_disk)
    with pytest.raises(CheckpointError, match=r"best\.safetensors"):
        checkpoint.save_weights(tmp_path, "best", weights(2.0), {"step": 20})
    monkeypatch.undo()
    assert torch.equal(checkpoint.weights(tmp_path, "best")["w"], weights(1.0)["w"])
    assert read_metadata(tmp_path / "best.safetensors") == {"step": "10"}
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]


def test_half_written_things_are_cleaned_up(tmp_path: Path) -> None:
    save(tmp_path, 10)
    stale = tmp_path / "checkpoints" / ".writing-00000020"
    stale.mkdir()
    (stale / checkpoint.MODEL).write_bytes(b"half")
    (tmp_path / ".writing-best.safetensors").write_bytes(b"half")
    found = checkpoint.latest(tmp_path)  # a reader leaves them: someone may be writing
    assert found is not None
    assert found.step == 10
    assert stale.exists()
    checkpoint.remove_incomplete(tmp_path)
    assert kept(tmp_path) == ["step-00000010"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_average_of_the_last_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (0, 2, 5):
        save(tmp_path, step)
    checkpoint.average(tmp_path, 3)  # the weights of step 0 are no result
    found = checkpoint.weights(tmp_path, "averaged")
    assert torch.equal(found["w"], torch.full((4,), 3.5))
    assert int(found["n"]) == 5  # whole numbers: those of the last
    assert read_metadata(tmp_path / "averaged.safetensors") == {"steps": "2,5"}
    (tmp_path / "checkpoints" / "step-00000005" / checkpoint.MODEL).write_bytes(b"")
    checkpoint.average(tmp_path, 2)
    assert torch.equal(checkpoint.weights(tmp_path, "averaged")["w"], torch.full((4,), 2.0))
    assert "step-00000005 is damaged" in caplog.messages[0]


def test_weights_by_name_and_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert float(checkpoint.weights(tmp_path, "last")["w"][0]) == 2.0
    assert float(checkpoint.weights(tmp_path, 1)["w"][0]) == 1.0
    with pytest.raises(CheckpointError, match=r"'best'.*last, 1, 2"):
        checkpoint.weights(tmp_path, "best")
    with pytest.raises(CheckpointError, match="none"):
        checkpoint.weights(tmp_path / "elsewhere", "last")

"""Training keeps a record of its alignments, and resumes it exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradvac import Alignment
from gradvac.analysis import Record, read_record
from gradvac.lab.training import Result

Settings = Callable[..., Any]
RunToy = Callable[..., Result]


class CrashError(Exception):
    pass


def crash_at(step: int) -> Callable[[int, Alignment], None]:
    def watch(now: int, alignment: Alignment) -> None:
        if now == step:
            raise CrashError

    return watch


def test_record_holds_what_the_steps_said(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    seen: dict[int, Alignment] = {}
    config = settings(train={"record_every": 3}, align={"rule": "gradvac", "beta": 0.1})
    run_toy(config, tmp_path, watch=seen.__setitem__)
    record = read_record(tmp_path)
    assert record.steps.tolist() == [3, 6, 9, 12]
    assert record.tasks == ("north", "south", "west")
    assert record.rule == "gradvac(beta=0.1)"
    for s, step in enumerate(record.steps.tolist()):
        own = [record.tasks.index(task) for task in seen[step].tasks]
        found = record.similarity[s][:, own][:, :, own]
        np.testing.assert_allclose(found, seen[step].similarity.numpy(), atol=5e-4)
        np.testing.assert_allclose(record.update_ratio[s], seen[step].update_ratio, rtol=1e-6)


@pytest.mark.parametrize("step", [3, 4, 7, 11])
def test_resumed_record_is_that_of_an_uninterrupted_run(
    tmp_path: Path, settings: Settings, run_toy: RunToy, step: int
) -> None:
    config = settings(train={"record_every": 1})
    run_toy(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run_toy(config, tmp_path / "parts", watch=crash_at(step))
    assert read_record(tmp_path / "parts").steps.tolist() == list(range(1, step + 1))
    run_toy(config, tmp_path / "parts")
    whole, parts = read_record(tmp_path / "whole"), read_record(tmp_path / "parts")
    for name in Record.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name), err_msg=name)


def test_record_changes_nothing_and_can_be_left_out(
    tmp_path: Path, toy: Any, settings: Settings, run_toy: RunToy
) -> None:
    run_toy(settings(train={"record_every": 1}), tmp_path / "with")
    run_toy(settings(train={"record_every": 0}), tmp_path / "without")
    assert not (tmp_path / "without" / "record.bin").exists()
    assert toy.outcome(tmp_path / "with") == toy.outcome(tmp_path / "without")


def test_tensorboard_shows_similarities(
    tmp_path: Path, settings: Settings, run_toy: RunToy
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings(train={"log_every": 1, "max_steps": 20, "writers": ["tensorboard"]})
    run_toy(config, tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    scalars = set(found.Tags()["scalars"])
    assert {f"train/{n}" for n in ("similarity", "active", "update_cosine")} <= scalars
    images = found.Images("similarity")
    assert [image.step for image in images] == [10, 20]
    assert (images[0].width, images[0].height) == (48, 48)  # three tasks

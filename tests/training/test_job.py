"""Several processes train what one does, stop together, and name who is gone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from gradvac.lab.training import BatchSlice, join
from gradvac.lab.training.job import Job

from ..drivers import run_driver

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the driver found: one start of Python for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_driver("tests.training.ranks_driver", folder)
    read: Found = json.loads((folder / "found.json").read_text())
    failed = {name: own["failed"] for name, own in read.items() if "failed" in own}
    assert not failed, done.stderr
    return read


def test_a_step_does_not_depend_on_the_number_of_processes(found: Found) -> None:
    gaps = found["same_as_one"]
    assert len(gaps) == 7
    assert max(gaps.values()) < 1e-12, gaps


def test_a_run_is_continued_by_any_number_of_processes(found: Found) -> None:
    gaps = found["other_sizes"]
    assert sorted(gaps) == ["both", "replicas", "shards"]
    assert max(gaps.values()) < 1e-12, gaps


def test_dropout_is_continued_bit_for_bit(found: Found) -> None:
    assert found["with_dropout"]["differ"] == []


def test_a_signal_in_one_process_stops_all_after_the_same_step(found: Found) -> None:
    own = found["signals"]
    assert [(one["reason"], one["step"]) for one in own["said"]] == [("interrupted", 6)] * 2
    assert own["saved"] == 6


def test_a_bad_loss_in_one_process_is_skipped_by_all(found: Found) -> None:
    own = found["bad_numbers"]
    assert [one["reason"] for one in own["once"]] == ["finished"] * 4
    assert own["skipped"] == [[0, 0, 1, 1]] * 2
    assert own["alike"] < 1e-12
    assert [one["error"] for one in own["often"]] == ["DivergedError"] * 2
    assert own["kept"] == [0, 4]


def test_a_damaged_shard_is_noticed(found: Found) -> None:
    step, damage, reasons = found["damages"]["told"]
    assert (step, reasons) == (6, ["finished"] * 3)
    assert damage.startswith("shards/__1_0.distcp is not what was written")
    assert found["damages"]["gap"] < 1e-12


@pytest.mark.parametrize(("name", "dead"), [("gradvac", 0), ("gradvac", 1), ("none", 1)])
def test_a_process_that_ends_is_named(found: Found, name: str, dead: int) -> None:
    own = found["deaths"][f"{name}-{dead}"]
    assert own["said"][dead] == {"gone": True}
    other = own["said"][1 - dead]
    assert other["error"] == "RankError"
    assert f"rank {dead} has ended or does not answer" in other["message"]
    assert own["intact"] == [0, 4]


def test_a_run_goes_on_after_the_death_of_a_process(found: Found) -> None:
    assert [one["reason"] for one in found["deaths"]["again"]] == ["finished"] * 2
    assert found["deaths"]["gap"] < 1e-12


def test_what_one_process_refuses_all_refuse(found: Found) -> None:
    own = found["refusals"]
    for one in own["seeds"]:
        assert "rank 1 and rank 0 differ in the config" in one["message"]
    first, second = own["settings"]
    assert first["error"] == "ConfigError"
    assert second["error"] == "RankError"
    assert "rank 0 could not go on" in second["message"]
    assert "optimizer.lr" in second["message"]
    assert all("1 (BatchNorm1d)" in one["message"] for one in own["statistics"])
    assert all("2 process(es)" in one["message"] for one in own["graph"])


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_are_all_rows_once(num_rows: int, size: int) -> None:
    costs = np.random.default_rng(num_rows).integers(1, 30, num_rows)
    parts = [BatchSlice(number, size).cut(costs) for number in range(size)]
    rows = [row for part in parts for row in range(part.start, part.stop)]
    assert rows == list(range(num_rows))
    assert sum(part.stop > part.start for part in parts) == min(size, num_rows)
    if num_rows == 40:
        shares = [costs[part].sum() for part in parts]
        assert max(shares) - min(shares) <= 2 * costs.max()


def test_one_row_that_costs_more_than_all_others_leaves_some_for_every_part() -> None:
    parts = [BatchSlice(number, 3).cut([1000, 1, 1, 1]) for number in range(3)]
    assert [(part.start, part.stop) for part in parts] == [(0, 1), (1, 2), (2, 4)]


def test_several_processes_without_a_meeting_place_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE .* RANK .*torchrun"), join():
        pass


def test_every_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    job = Job(local_rank=1)
    job.rank, job.size = 5, 8
    assert job.device("auto") == job.device("cuda") == torch.device("cuda:1")
    assert taken == [torch.device("cuda:1")] * 2
    assert job.device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"'cuda:1' .*8 processes"):
        job.device("cuda:1")
    job = Job(local_rank=2)
    job.rank, job.size = 6, 8
    with pytest.raises(ValueError, match=r"rank 6 .*2 GPU"):
        job.device("auto")


def test_processes_draw_dropout_of_their_own() -> None:
    job = Job()
    assert job.seed(7) == job.seed(7, step=3) == 7  # the first one, as without others
    job.rank = 2
    assert len({7, job.seed(7), job.seed(7, step=3), job.seed(8)}) == 4
    assert job.seed(7) == job.seed(7)

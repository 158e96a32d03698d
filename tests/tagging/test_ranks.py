"""Taggers in several processes are those of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from gradvac.lab.recipes.tagging.encoder import NO_LABEL
from gradvac.lab.recipes.tagging.tagger import TagBatch
from gradvac.lab.training import BatchSlice

from ..drivers import run_driver


def test_runs_are_those_of_one_process(tmp_path: Path, encoder: Path, corpus: Path) -> None:
    shutil.copytree(encoder, tmp_path / "encoder")
    shutil.copytree(corpus, tmp_path / "corpus")
    run_driver("tests.tagging.ranks_driver", tmp_path)
    gaps = json.loads((tmp_path / "gaps.json").read_text())
    assert sorted(gaps) == ["2", "3"]
    assert max(gaps.values()) < 1e-6, gaps


@pytest.mark.parametrize("size", [2, 5])
def test_parts_are_the_batch(size: int) -> None:
    lengths = torch.tensor([3, 5, 4, 2])
    mask = torch.arange(5) < lengths[:, None]
    tokens = torch.randint(1, 9, (4, 5)) * mask
    labels = torch.where(mask, tokens % 3, NO_LABEL)
    tagged = TagBatch(tokens, mask, labels, [0, 0, 1, 2], int(lengths.sum()))
    parts = [BatchSlice(number, size) for number in range(size)]
    own = [tagged.take(part) for part in parts]
    counting = [one for one in own if bool((one.labels != NO_LABEL).any())]
    assert len(counting) == min(size, 4)
    assert [task for one in counting for task in one.tasks] == tagged.tasks
    seen = torch.cat([one.tokens[one.mask] for one in counting])
    assert torch.equal(seen, tagged.tokens[tagged.mask])
    assert {one.num_tokens for one in own} == {tagged.num_tokens}

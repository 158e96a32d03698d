"""Taggers and encoders in several processes are those of one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gradvac.lab.recipes.tagging.batch import TagBatch
from gradvac.lab.recipes.tagging.encoding import NO_LABEL
from gradvac.lab.recipes.tagging.masking import hide
from gradvac.lab.training import Part

from ..drivers import run_driver


def test_runs_are_those_of_one_process(tmp_path: Path, encoder: Path, corpus: Path) -> None:
    """A tagger with GradVac in two, an encoder without a rule in more than there are rows."""
    shutil.copytree(encoder, tmp_path / "encoder")
    shutil.copytree(corpus, tmp_path / "corpus")
    chance = random.Random(0)
    for lang in ("aa", "bb"):
        words = [f"{lang}{chance.choice('bdfgk')}{chance.choice('aeiou')}" for _ in range(900)]
        lines = [" ".join(words[n : n + 5]) for n in range(0, 900, 5)]
        (tmp_path / f"{lang}.txt").write_text("\n".join(lines), encoding="utf-8")
    run_driver("tests.tagging.ranks_driver", tmp_path)
    gaps = json.loads((tmp_path / "gaps.json").read_text())
    assert sorted(gaps) == ["pretraining", "tagging"]
    assert max(gaps.values()) < 1e-6, gaps
    assert (tmp_path / "pretraining-3" / "encoder" / "config.json").exists()


@pytest.mark.parametrize("size", [2, 5])
def test_parts_are_the_batch(size: int) -> None:
    generator = np.random.default_rng(0)
    lengths = torch.tensor([3, 5, 4, 2])
    mask = torch.arange(5) < lengths[:, None]
    tokens = torch.randint(1, 9, (4, 5)) * mask
    labels = torch.where(mask, tokens % 3, NO_LABEL)
    tagged = TagBatch(tokens, mask, labels, [0, 0, 1, 2], int(lengths.sum()))
    blocks = generator.integers(5, 60, (4, 12)).astype(np.int32)
    hidden = hide(blocks, [0, 0, 1, 2], share=0.3, mask=4, vocabulary=60, generator=generator)
    parts = [Part(number, size) for number in range(size)]
    own = [tagged.take(part) for part in parts]
    counting = [one for one in own if bool((one.labels != NO_LABEL).any())]
    assert len(counting) == min(size, 4)
    assert [task for one in counting for task in one.tasks] == tagged.tasks
    seen = torch.cat([one.tokens[one.mask] for one in counting])
    assert torch.equal(seen, tagged.tokens[tagged.mask])
    assert {one.num_tokens for one in own} == {tagged.num_tokens}
    masked = [hidden.take(part) for part in parts]
    assert torch.equal(torch.cat([one.tokens for one in masked if one.counts]), hidden.tokens)
    assert sum(one.counts for one in masked) == min(size, 4)
    assert {one.num_tokens for one in masked} == {hidden.num_tokens}

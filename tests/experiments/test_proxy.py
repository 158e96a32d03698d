"""Short runs that stand for long ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.experiments import Sweep, SweepConfig
from gradvac.lab.training.config import load

from .conftest import TWIN


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Sweep]:
    def make(proxy: int) -> Sweep:
        file = tmp_path / "sweep.toml"
        file.write_text(
            'recipe = "nmt"\nbase = "twin"\n[set]\n"train.max_steps" = 804\n'
            '"sampling.schedule" = [{from_step = 400, temperature = 1.0}]\n'
            '[grid]\n"sampling.temperature" = [1.0, 5.0]\n',
            encoding="utf-8",
        )
        return Sweep(load(SweepConfig, file), TWIN, tmp_path / "out", proxy=proxy)

    return make


def test_steps_and_rows_are_cut_alike(planned: Callable[..., Sweep]) -> None:
    whole, short = planned(1), planned(8)
    for one, other in zip(whole.trials, short.trials, strict=True):
        before, after = whole.settings[one], short.settings[other]
        assert (before.train.max_steps, after.train.max_steps) == (804, 101)
        assert after.optimizer.warmup_steps == -(-before.optimizer.warmup_steps // 8)
        assert after.sampling.thin == 8
        assert after.sampling.schedule[0].from_step == 50
        assert after.sampling.temperature == before.sampling.temperature
        assert one.run == other.run

"""A few of the random models of `benchmarks/attack.py`, which has as many as one likes."""

from pathlib import Path
from typing import Any

import pytest

from ..drivers import load_module

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "attack.py"
SEEDS = (1000, 1001, 1002, 1003, 1004, 1005)


@pytest.fixture(scope="module")
def attack() -> Any:
    return load_module(BENCHMARK)


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_or_refused_for_a_reason(attack: Any, seed: int) -> None:
    outcome, more = attack.Attack(seed).run()
    assert outcome in ("exact", "refused"), more


def test_what_it_would_say_of_a_wrong_engine(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack.Attack, "_distance", staticmethod(lambda *_: 1e-3))
    assert attack.Attack(1000).run()[0] == "wrong"

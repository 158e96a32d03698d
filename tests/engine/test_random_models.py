"""A few of the random models of `benchmarks/attack.py`, which has as many as one likes."""

from pathlib import Path
from typing import Any

import pytest

from gradvac.engine.executor import Executor

from ..drivers import load_module

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "attack.py"
SEEDS = (1000, 1001, 1002, 1003, 1004, 1005)
KNOWN_TO_CPP = ("linear", "tied_the_other_way", "norms", "gated", "attention", "gathered", "halves")


@pytest.fixture(scope="module")
def attack() -> Any:
    return load_module(BENCHMARK)


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_or_refused_for_a_reason(attack: Any, seed: int) -> None:
    outcome, more = attack.Attack(seed).run()
    assert outcome in ("exact", "refused"), more


def test_graphs_that_come_again_in_cpp(
    attack: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del kernels
    execute, ran = Executor.execute, list[bool]()

    def counted(self: Any, *given: Any) -> bool:
        ran.append(execute(self, *given))
        return ran[-1]

    monkeypatch.setattr(Executor, "execute", counted)
    for seed in (2004, 2019, 2029, 2030, 2041):  # most others have options that it leaves alone
        outcome, more = attack.Attack(seed, num_steps=8, num_sizes=1, parts=KNOWN_TO_CPP).run()
        assert outcome in ("exact", "refused"), (seed, more)
    assert sum(ran) >= 10


def test_what_it_would_say_of_a_wrong_engine(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack.Attack, "_distance", staticmethod(lambda *_: 1e-3))
    assert attack.Attack(1000).run()[0] == "wrong"

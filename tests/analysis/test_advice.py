"""Advice: few promises where tasks are alike, the planted companions where they are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from scipy.stats import binom

from gradvac import Aligner
from gradvac.analysis import Record, Recorder, Similarities, measure, read_record
from gradvac.analysis.advice import Advice, advise, describe_advice

from . import structure

TASKS = tuple("abcdefgh")
RELATIVES = np.array([0, 0, 1, 1, 2, 2, 3, 3])
UNEQUAL = np.linspace(0.5, 3.0, len(TASKS))


def batches(
    seed: int,
    num_steps: int,
    *,
    kin: float = 0.0,
    shared: float = 1.0,
    resembling: float = 0.0,
    noise: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Gradients `[S, K, T, D]`: what all share, what relatives share, and noise over steps."""
    draw = np.random.default_rng(seed)
    shape = (len(structure.COMPONENTS), len(TASKS), 40)
    common, families = draw.normal(size=(shape[0], 1, 40)), draw.normal(size=shape)[:, RELATIVES]
    drawn = draw.normal(size=(num_steps, *shape)) * (1 - resembling**2) ** 0.5
    drawn = lfilter([1.0], [1.0, -resembling], drawn, axis=0)
    size = np.broadcast_to(noise, len(TASKS))[:, None]
    return shared * common + kin * families + size * drawn


def recorded(seed: int, num_steps: int, **settings: float) -> Record:
    return structure.record_of(TASKS, batches(seed, num_steps, **settings))


def halves(seed: int, **settings: float) -> Similarities:
    both = batches(seed, 2, **settings)
    return structure.halves_of(TASKS, both[:1], both[1:])[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: recorded(seed, 20, shared=0.0),
        lambda seed: recorded(seed, 60),
        lambda seed: recorded(seed, 60, noise=UNEQUAL),
        lambda seed: recorded(seed, 20, shared=0.0, resembling=0.9),
        lambda seed: recorded(seed, 60, noise=UNEQUAL, resembling=0.5),
        halves,
        lambda seed: halves(seed, noise=UNEQUAL / 2),
    ],
    ids=["noise", "alike", "unequal", "slow", "slow and unequal", "halves", "unequal halves"],
)
def test_little_is_promised_where_all_tasks_are_alike(
    make: Callable[[int], Record | Similarities],
) -> None:
    found = [advise([make(seed)]) for seed in range(20)]
    most = binom.ppf(0.99, 20, 0.05)
    assert sum(bool(advice.promised.any()) for advice in found) <= most
    assert sum(bool(advice.groups) for advice in found) <= most


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: recorded(seed, 60, kin=0.7),
        lambda seed: recorded(seed, 60, kin=0.7, noise=UNEQUAL / 2),
        lambda seed: halves(seed, kin=0.7, noise=UNEQUAL / 6),
    ],
    ids=["recorded", "unequal", "halves"],
)
def test_planted_companions_are_promised(make: Callable[[int], Record | Similarities]) -> None:
    kin = (RELATIVES[:, None] == RELATIVES) & ~np.eye(8, dtype=bool)
    found = [advise([make(seed)]) for seed in range(3)]
    assert sum(int((advice.promised & kin).sum()) for advice in found) >= 20  # of 24
    assert not any((advice.promised & ~kin).any() for advice in found)
    for advice in found:
        assert advice.groups == (("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"))
        assert advice.left_out() == []
        first = advice.companions("a")[0]
        assert first.task == "b"
        assert first.advantage - first.reach > 0


def test_several_runs_must_agree() -> None:
    related = recorded(0, 60, kin=0.7)
    assert advise([related]).promised.any()
    assert not advise([related, recorded(1, 60)]).promised.any()
    assert advise([related, recorded(1, 60, kin=0.7)]).promised.any()


def test_a_number_of_groups_is_obeyed_and_what_it_parts_is_said() -> None:
    advice = advise([recorded(0, 60, kin=0.7)], num_groups=2)
    assert sorted(map(len, advice.groups)) in ([3, 5], [4, 4], [2, 6])
    whole = {task: group for group in advice.groups for task in group}
    assert all(whole[TASKS[n]] == whole[TASKS[n + 1]] for n in range(0, 8, 2))
    assert advice.left_out() == []
    parted = replace(advice, groups=(("a", "c", "e", "g"), ("b", "d", "f", "h")))
    assert parted.left_out()[:2] == [("a", "b"), ("b", "a")]
    assert "a without b" in " ".join(describe_advice(parted, {}))


def test_one_measurement_says_nothing_about_its_noise() -> None:
    both = batches(0, 1)
    with pytest.raises(ValueError, match=r"runs: .* measured once"):
        advise([structure.halves_of(TASKS, both, both)[0]])
    few = advise([recorded(0, 6, kin=0.7)])
    assert not few.promised.any()
    assert few.groups == ()
    said = " ".join(describe_advice(few, {}))
    assert "Cannot be told, for lack of independent records: companions of a, b" in said
    assert "Groups are not tested" in said


def test_what_is_too_small_to_print_is_not_advised() -> None:
    """Relatives are closer by 0.004, and long records leave no doubt about it."""
    advice = advise([recorded(0, 400, kin=0.09, noise=0.3)])
    assert 0 < np.nanmax(advice.advantage) < 0.01
    assert not advice.promised.any()
    assert advice.groups == ()
    assert "No groups matter" in " ".join(describe_advice(advice, {}))


def test_groups_of_six_tasks_are_not_tested() -> None:
    """They can be shuffled in too few ways: no p-value would be below .05."""
    six = structure.record_of(tuple("abcdef"), batches(0, 60, kin=0.7)[:, :, :6])
    advice = advise([six])
    assert advice.promised.any()
    assert advice.groups == ()
    assert "Groups are not tested: that takes 7 tasks" in " ".join(describe_advice(advice, {}))
    assert len(advise([six], num_groups=3).groups) == 3


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="runs: give"):
        advise([])
    with pytest.raises(ValueError, match=r"three or more .*a, b"):
        advise([structure.record_of(("a", "b"), batches(0, 20)[:, :, :2])])
    with pytest.raises(ValueError, match="side: no component"):
        advise([recorded(0, 20)], side="sideways")
    other = structure.record_of(tuple("zyxwvuts"), batches(0, 20))
    with pytest.raises(ValueError, match="runs: must be of the same tasks"):
        advise([recorded(0, 20), other])


def trained(seed: int, folder: Path, *, rows: int) -> tuple[Record, Similarities]:
    """A small network on eight tasks that differ in nothing but their rows, labels at random."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(),
        torch.nn.Linear(16, 1),
    )  # fmt: skip
    x, y = torch.randn(len(TASKS), rows, 8), torch.randn(len(TASKS), rows, 1)
    aligner = Aligner(net, tasks=TASKS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = [task for task in TASKS for _ in range(8)]
    with Recorder(folder / f"{seed}.bin", every=2) as recorder:
        for step in range(1, 121):
            chosen = torch.randint(rows, (len(TASKS), 8))
            at = torch.arange(len(TASKS))[:, None]
            losses = (net(x[at, chosen].flatten(0, 1)) - y[at, chosen].flatten(0, 1)).square()
            optimizer.zero_grad()
            recorder(step, aligner.backward(losses.squeeze(1) / len(names), names))
            optimizer.step()

    def loss(task: int, part: int) -> torch.Tensor:
        lines = slice(part, None, 8)
        return (net(x[task, lines]) - y[task, lines]).square().sum()

    lots = {
        name: [lambda task=task, part=part: loss(task, part) for part in range(8)]
        for task, name in enumerate(TASKS)
    }
    return read_record(folder / f"{seed}.bin"), measure(net, lots).different["all_layer"]


def test_networks_whose_tasks_are_alike_are_promised_nothing(tmp_path: Path) -> None:
    """Components share a batch's noise: halves of components claimed groups in 19 of 20."""
    runs = [trained(seed, tmp_path, rows=64) for seed in range(10)]
    for kind in zip(*runs, strict=True):
        found = [advise([one]) for one in kind]
        assert sum(bool(advice.promised.any() or advice.groups) for advice in found) <= 2


def test_sentences_of_many_tasks_can_be_read() -> None:
    """Names of sixty tasks with a dozen companions each would fill screens."""
    tasks = tuple(f"t{n}" for n in range(60))
    family = np.arange(60) // 12
    promised = (family[:, None] == family) & ~np.eye(60, dtype=bool)
    values = 1.0 * promised
    groups = (tasks[:30], tasks[30:])
    many = Advice(tasks, values, values, np.zeros((60, 60)), promised, groups, 0.01, "made")
    said = describe_advice(many, {})
    assert "t0 with t1, t2, t3, t4, t5 and 6 others" in said[0]
    assert "and 48 other tasks" in said[0]
    assert "other pairs" in " ".join(said)
    none = Advice(tasks, values, values, np.zeros((60, 60)), promised & False, (), 0.5, "made")
    said += describe_advice(none, {})
    assert "companions of t0, t1," in " ".join(said)
    assert max(map(len, said)) < 700

"""Arguments that make no sense are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradvac import (
    MGDA,
    Aligner,
    EmaTarget,
    FixedTarget,
    GradNorm,
    GradVac,
    Only,
    PCGrad,
    Rule,
    Sum,
    TorchJD,
    rule_named,
)
from gradvac.rules import RULES

from .steps import bound, weights_of


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradVac(beta=-0.1), r"beta: must be in \[0, 1\], got -0.1"),
        (lambda: GradVac(beta=1.5), r"beta: must be in \[0, 1\], got 1.5"),
        (lambda: GradVac(beta="0.1"), r"beta: must be in \[0, 1\], got '0.1'"),
        (lambda: GradVac(preserve_norm="no"), r"preserve_norm: must be True or False, got 'no'"),
        (lambda: Only("gradvac"), r"rule: must be a Rule such as GradVac\(\), got 'gradvac'"),
        (lambda: GradNorm(alpha="1"), r"alpha: must be 0 or more, got '1'"),
        (lambda: Sum(weights={"a": "2"}), r"weights: 'a' must have a finite .* got '2'"),
        (lambda: TorchJD(int), r"weighting: needs a Gramian weighting .* got <class 'int'>"),
        (lambda: rule_named(MGDA), r"rule: there is no <class"),
        (lambda: GradVac(beta=float("nan")), r"beta: must be in \[0, 1\], got nan"),
        (lambda: EmaTarget(beta=2), r"beta: must be in \[0, 1\], got 2"),
        (lambda: GradVac(target=1.01), r"target: .* in \[-1, 1\], got 1.01"),
        (lambda: GradVac(target=-2), r"target: .* in \[-1, 1\], got -2"),
        (lambda: FixedTarget({("a", "b"): 7.0}), r"target: .* in \[-1, 1\], got 7"),
        (lambda: GradVac(target="high"), r"target: .* got 'high'"),
        (lambda: GradVac(order="sorted"), r'order: must be "random" or "fixed", got \'sorted\''),
        (lambda: PCGrad(order="none"), r"order: must be"),
        (lambda: GradVac(vaccinated="en-fr"), r"vaccinated: must be a list of task names"),
        (lambda: MGDA(normalize="l1"), r"normalize: must be one of .* got 'l1'"),
        (lambda: GradNorm(lr=0), r"lr: must be positive, got 0"),
        (lambda: GradNorm(lr=float("nan")), r"lr: must be positive, got nan"),
        (lambda: GradNorm(alpha=float("inf")), r"alpha: must be 0 or more, got inf"),
        (lambda: GradNorm(alpha=-1), r"alpha: must be 0 or more, got -1"),
        (lambda: Sum(weights={"a": float("nan")}), r"weights: 'a' must have a finite .* got nan"),
        (lambda: Sum(weights=[1.0]), r"weights: must be a mapping task -> weight, got \[1.0\]"),
        (lambda: GradVac(seed=None), r"seed: must be an integer of 64 bits, got None"),
        (lambda: PCGrad(seed=2**70), r"seed: must be an integer of 64 bits"),
        (lambda: GradVac(beta=0.1, target=0.5), r"beta: 0.1 would be ignored"),
        (lambda: GradVac(beta=0.1, target=EmaTarget(0.2)), r"beta: 0.1 would be ignored"),
        (lambda: FixedTarget(0.5, default=0.1), r"default: 0.1 would be ignored"),
        (lambda: TorchJD(lambda gram: gram[0], {"a": 1}), r"options: .* would be ignored"),
        (lambda: rule_named("pcgard"), r"rule: there is no 'pcgard'; did you mean 'pcgrad'\?"),
        (lambda: rule_named("gradvac", betta=1), r"betta: GradVac has no .* did you mean 'beta'\?"),
        (lambda: rule_named("torchjd"), r"weighting: TorchJD needs one"),
    ],
)
def test_when_it_is_made(make: Callable[[], Rule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (GradVac(vaccinated=["a", "zz"]), r"vaccinated: unknown task 'zz'; the tasks are \['a'"),
        (PCGrad(vaccinated=["zz"]), r"vaccinated: unknown task 'zz'"),
        (Sum(weights={"zz": 1.0}), r"weights: unknown task 'zz'"),
        (GradVac(target=FixedTarget({("a", "zz"): 0.1})), r"target: unknown task 'zz'"),
        (GradNorm(component="zz"), r"component: 'zz' is not one of the components"),
    ],
)
def test_when_the_tasks_are_known(rule: Rule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound(rule, 3)


def test_rules_by_name() -> None:
    assert repr(rule_named("GradVac", beta=0.5)) == repr(GradVac(beta=0.5))
    for name, rule in RULES.items():
        if name != "torchjd":  # which needs a weighting
            assert type(rule_named(name)) is rule


OWN = """
from dataclasses import dataclass
from gradvac import Rule, gram

@dataclass
class EqualNorms(Rule):
    length: float = 1.0

    def weigh_finite(self, components, gram_matrices):
        inverse = gram.reciprocal(gram.norms(gram_matrices))
        return self.answer(gram_matrices, self.length * inverse)

class NoRule:
    pass
"""


def test_rules_of_ones_own_by_file_and_by_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rules.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    rule = rule_named("own_rules.py:EqualNorms", length=2.0)
    assert weights_of(rule, torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist() == [0.4, 1.0]
    assert type(rule_named(f"{tmp_path}/own_rules.py:EqualNorms")) is type(rule)
    aligner = Aligner(torch.nn.Linear(2, 1), ["a", "b"], "own_rules.py:EqualNorms")
    assert type(aligner.rule) is type(rule)
    (tmp_path / "random.py").write_text(OWN)  # the file, not Python's module of that name
    assert type(rule_named("random.py:EqualNorms")).__name__ == "EqualNorms"
    monkeypatch.syspath_prepend(tmp_path)
    assert type(rule_named("own_rules:EqualNorms")).__name__ == "EqualNorms"
    for name, message in (
        ("own_rules.py:NoRule", "'NoRule' of own_rules.py is no subclass of gradvac.Rule"),
        ("missing.py:Rule", "there is no file missing.py"),
        ("no_such_module:Rule", "there is no module 'no_such_module'"),
        ("", "there is no ''"),
    ):
        with pytest.raises(ValueError, match=f"rule: {message}"):
            rule_named(name)
    with pytest.raises(ValueError, match=r"lenght: EqualNorms has no .* did you mean 'length'"):
        rule_named("own_rules.py:EqualNorms", lenght=1.0)


def test_a_rule_serves_one_aligner() -> None:
    rule = bound(GradVac(), 2)
    with pytest.raises(ValueError, match="rule: this GradVac already serves another Aligner"):
        bound(rule, 2)

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
        (lambda: GradVac(beta=-0.1), "beta: .*0, 1"),
        (lambda: GradVac(beta=1.5), "beta: .*0, 1"),
        (lambda: GradVac(beta="0.1"), "beta: .*'0.1'"),
        (lambda: GradVac(preserve_norm="no"), "preserve_norm: .*'no'"),
        (lambda: Only("gradvac"), r"rule: .*GradVac\(\)"),
        (lambda: GradNorm(alpha="1"), "alpha: .*'1'"),
        (lambda: Sum(weights={"a": "2"}), "weights: 'a' .*finite .*'2'"),
        (lambda: TorchJD(int), "weighting: .*Gramian .*'int'"),
        (lambda: rule_named(MGDA), "rule: .*class"),
        (lambda: GradVac(beta=float("nan")), "beta: .*0, 1"),
        (lambda: EmaTarget(beta=2), "beta: .*0, 1"),
        (lambda: GradVac(target=1.01), "target: .*-1, 1"),
        (lambda: GradVac(target=-2), "target: .*-1, 1"),
        (lambda: FixedTarget({("a", "b"): 7.0}), "target: .*-1, 1"),
        (lambda: GradVac(target="high"), "target: .*'high'"),
        (lambda: GradVac(order="sorted"), "order: .*random.*fixed"),
        (lambda: PCGrad(order="none"), "order: .*random"),
        (lambda: GradVac(vaccinated="en-fr"), "vaccinated: .*list"),
        (lambda: MGDA(normalize="l1"), "normalize: .*'l1'"),
        (lambda: GradNorm(lr=0), "lr: .*positive"),
        (lambda: GradNorm(lr=float("nan")), "lr: .*positive"),
        (lambda: GradNorm(alpha=float("inf")), "alpha: .*0 or more"),
        (lambda: GradNorm(alpha=-1), "alpha: .*0 or more"),
        (lambda: Sum(weights={"a": float("nan")}), "weights: 'a' .*finite"),
        (lambda: Sum(weights=[1.0]), "weights: .*mapping"),
        (lambda: GradVac(seed=None), "seed: .*64 bits"),
        (lambda: PCGrad(seed=2**70), "seed: .*64 bits"),
        (lambda: GradVac(beta=0.1, target=0.5), "beta: .*ignored"),
        (lambda: GradVac(beta=0.1, target=EmaTarget(0.2)), "beta: .*ignored"),
        (lambda: FixedTarget(0.5, default=0.1), "default: .*ignored"),
        (lambda: TorchJD(lambda gram: gram[0], {"a": 1}), "options: .*ignored"),
        (lambda: rule_named("pcgard"), "rule: .*'pcgard'.*'pcgrad'"),
        (lambda: rule_named("gradvac", betta=1), "betta: .*'beta'"),
        (lambda: rule_named("torchjd"), "weighting: "),
    ],
)
def test_when_it_is_made(make: Callable[[], Rule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (GradVac(vaccinated=["a", "zz"]), "vaccinated: .*'zz'.*'a'"),
        (PCGrad(vaccinated=["zz"]), "vaccinated: .*'zz'"),
        (Sum(weights={"zz": 1.0}), "weights: .*'zz'"),
        (GradVac(target=FixedTarget({("a", "zz"): 0.1})), "target: .*'zz'"),
        (GradNorm(component="zz"), "component: 'zz'"),
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
        ("own_rules.py:NoRule", "'NoRule' .*gradvac.*Rule"),
        ("missing.py:Rule", ".*missing.py"),
        ("no_such_module:Rule", ".*'no_such_module'"),
        ("", ".*''"),
    ):
        with pytest.raises(ValueError, match=f"rule: {message}"):
            rule_named(name)
    with pytest.raises(ValueError, match=r"lenght: .*'length'"):
        rule_named("own_rules.py:EqualNorms", lenght=1.0)


def test_a_rule_serves_one_aligner() -> None:
    rule = bound(GradVac(), 2)
    with pytest.raises(ValueError, match=r"rule: .*another Aligner"):
        bound(rule, 2)

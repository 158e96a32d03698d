"""What holds for every rule, at any scale."""

# T tasks, P parameters

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchjd import aggregation as torchjd

from gradvac import (
    MGDA,
    FixedTarget,
    GradNorm,
    GradVac,
    PCGrad,
    Sum,
    TorchJD,
    rule_named,
)
from gradvac.rules import Rule

from .steps import assert_same_state, bound, gram_of, step, weights_of

MakeRule = Callable[[], Rule]
CONTROL = "studies/controls.py:Control"
SCALES = [0.0, 1e-15, 1e-6, 1.0, 1e6, 1e15]

PAIRWISE: dict[str, MakeRule] = {
    "gradvac": lambda: GradVac(beta=0.1),
    "gradvac, beta 1": lambda: GradVac(beta=1.0),
    "gradvac, fixed order": lambda: GradVac(beta=0.1, order="fixed"),
    "gradvac, target 0.5": lambda: GradVac(target=0.5),
    "gradvac, target 1": lambda: GradVac(target=1.0),
    "gradvac, target -1": lambda: GradVac(target=-1.0),
    "gradvac, preserve_norm": lambda: GradVac(target=0.9, preserve_norm=True),
    "gradvac, some": lambda: GradVac(target=0.5, vaccinated=["a", "b"]),
    "pcgrad": lambda: PCGrad(),
    "control, norm": lambda: rule_named(CONTROL, control="norm", beta=0.1),
    "control, direction": lambda: rule_named(CONTROL, control="direction", beta=0.1),
    "control, shuffled": lambda: rule_named(CONTROL, control="shuffled", beta=0.1),
    "control, random": lambda: rule_named(CONTROL, control="random", beta=0.1),
}
OURS: dict[str, MakeRule] = PAIRWISE | {
    "sum": lambda: Sum(),
    "sum, weighted": lambda: Sum(weights={"a": 0.2, "b": 3.0}),
    "mgda": lambda: MGDA(),
    "mgda, l2": lambda: MGDA(normalize="l2"),
    "mgda, loss": lambda: MGDA(normalize="loss"),
    "mgda, loss+": lambda: MGDA(normalize="loss+"),
}
EVERY: dict[str, MakeRule] = OURS | {
    "gradnorm": lambda: GradNorm(),
    "torchjd, upgrad": lambda: TorchJD(torchjd.UPGradWeighting()),
    "torchjd, imtl-g": lambda: TorchJD(torchjd.IMTLGWeighting()),
}


def each(rules: dict[str, MakeRule]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", rules.values(), ids=rules.keys())


def draw(num_tasks: int, size: int = 10, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tasks, size, generator=generator, dtype=torch.float64)


def with_zero_row(gradients: Tensor) -> Tensor:
    return gradients.index_fill(0, torch.tensor([1]), 0.0)


FIVE_TASKS: dict[str, Tensor] = {
    "generic": draw(5),
    "a zero row": with_zero_row(draw(5)),
    "one non-zero row": draw(5) * torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])[:, None],
    "identical": draw(1).expand(5, -1),
    "opposite": draw(1) * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None],
    "of one number": draw(5) * torch.eye(10)[0],
    "of rank two": draw(5, size=2) @ draw(2),
    "lengths far apart": draw(5) * torch.tensor([1e-12, 1e-6, 1.0, 1e6, 1e12])[:, None],
}
TWO_TASKS: dict[str, Tensor] = {
    "generic": draw(2),
    "opposite": draw(1) * torch.tensor([[1.0], [-1.0]]),
    "one is zero": with_zero_row(draw(2)),
    "lengths far apart": draw(2) * torch.tensor([[1e-12], [1e12]]),
}


def at_all_scales(gradients: dict[str, Tensor]) -> Tensor:
    """One component for every kind of gradients and every scale, `[K, T, P]`."""
    return torch.stack([one * scale for one in gradients.values() for scale in SCALES])


@each(EVERY)
@pytest.mark.parametrize("kinds", [FIVE_TASKS, TWO_TASKS], ids=["five tasks", "two tasks"])
def test_weights_are_finite(make: MakeRule, kinds: dict[str, Tensor]) -> None:
    gradients = at_all_scales(kinds)
    num_components, num_tasks, _ = gradients.shape
    rule = bound(make(), num_tasks, num_components)
    losses = torch.linspace(0.5, 2.0, num_tasks, dtype=torch.float64)
    for _ in range(3):
        assert step(rule, gram_of(gradients), losses=losses).weights.isfinite().all()
    if isinstance(rule, GradVac):
        assert rule.state_dict()["target"].abs().max() <= 1.0


@pytest.mark.parametrize("kinds", [FIVE_TASKS, TWO_TASKS], ids=["five tasks", "two tasks"])
def test_gradnorm_learns_finite_weights_from_any_component(kinds: dict[str, Tensor]) -> None:
    gram = gram_of(at_all_scales(kinds))
    num_components, num_tasks, _ = gram.shape
    losses = torch.linspace(0.0, 2.0, num_tasks, dtype=torch.float64)  # one loss is zero
    for k in range(num_components):
        rule = bound(GradNorm(component=str(k)), num_tasks, num_components)
        for _ in range(3):
            weights = step(rule, gram, losses=losses).weights
            assert (weights > 0).all()
            torch.testing.assert_close(weights.sum(-1), torch.full_like(weights[:, 0], num_tasks))


@pytest.mark.parametrize("target", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kinds", [FIVE_TASKS, TWO_TASKS], ids=["five tasks", "two tasks"])
def test_nothing_is_blown_up(target: float, kinds: dict[str, Tensor]) -> None:
    """By the law of sines one visit makes a gradient at most 1 / sin(target angle) longer."""
    gradients = at_all_scales(kinds)
    num_components, num_tasks, _ = gradients.shape
    weights = step(
        bound(GradVac(target=target), num_tasks, num_components), gram_of(gradients)
    ).weights
    update = (weights[:, None] @ gradients)[:, 0]
    longest_visit = (1 - target**2) ** -0.5
    lengths = gradients.norm(dim=2).sum(1) * longest_visit ** (num_tasks - 1)
    assert (update.norm(dim=1) <= lengths * (1 + 1e-9)).all()


@each(EVERY)
def test_permuting_tasks_permutes_weights(make: MakeRule) -> None:
    gradients, losses = draw(5), torch.rand(5, dtype=torch.float64) + 0.5
    permutation = [3, 1, 4, 0, 2]
    one, other = bound(make(), 5), bound(make(), 5)
    for seed in range(4):
        gradients = draw(5, seed=seed)
        expected = step(one, gram_of(gradients), losses=losses).weights[:, permutation]
        found = step(
            other, gram_of(gradients[permutation]), present=permutation, losses=losses[permutation]
        )
        torch.testing.assert_close(found.weights, expected, rtol=1e-7, atol=1e-7)


@each({name: make for name, make in EVERY.items() if name != "gradvac, fixed order"})
def test_relisting_tasks_relists_weights(make: MakeRule) -> None:
    permutation = [3, 1, 4, 0, 2]
    names = list("abcde")
    one, other = make(), make()
    one.bind(names, ["0"])
    other.bind([names[i] for i in permutation], ["0"])
    for seed in range(4):
        gradients = draw(5, seed=seed)
        expected = step(one, gram_of(gradients)).weights[:, permutation]
        found = step(other, gram_of(gradients[permutation])).weights
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@each(
    {name: make for name, make in EVERY.items() if name not in ("sum, weighted", "gradvac, some")}
)
def test_one_task_has_weight_one(make: MakeRule) -> None:
    gradients = at_all_scales({"one task": draw(1)})
    rule = bound(make(), 1, len(SCALES))
    for _ in range(3):
        weighing = step(rule, gram_of(gradients))
        assert weighing.weights.tolist() == [[1.0]] * len(SCALES)
        assert not weighing.active.any()


@each({name: make for name, make in EVERY.items() if name != "sum, weighted"})
def test_a_task_alone_in_a_step_keeps_its_gradient(make: MakeRule) -> None:
    rule = bound(make(), 3)
    step(rule, gram_of(draw(3)))
    assert step(rule, gram_of(draw(1)), present=[2]).weights.tolist() == [[1.0]]


def test_constant_weights_hold_for_a_task_alone() -> None:
    rule = bound(Sum(weights={"a": 0.2, "b": 3.0}), 3)
    for position, weight in enumerate([0.2, 3.0, 1.0]):
        assert step(rule, gram_of(draw(1)), present=[position]).weights.tolist() == [[weight]]


@each(OURS)
def test_scaling_all_gradients_leaves_weights_unchanged(make: MakeRule) -> None:
    scales = [scale for scale in SCALES if scale]
    rule = make()
    rule.bind(list("abcde"), ["0"])
    scaled = [make() for _ in scales]
    for one in scaled:
        one.bind(list("abcde"), ["0"])
    for seed in range(3):
        gradients = draw(5, seed=seed)
        expected = step(rule, gram_of(gradients)).weights
        for one, scale in zip(scaled, scales, strict=True):
            found = step(one, gram_of(gradients * scale)).weights
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@each(PAIRWISE)
def test_identical_gradients_are_left_alone(make: MakeRule) -> None:
    rule = bound(make(), 6, len(SCALES))
    for seed in range(40):  # long enough for targets to come up to 1, where rounding matters
        lengths = torch.logspace(-1, 1, 6, dtype=torch.float64)[:, None] if seed % 2 else 1.0
        gradients = at_all_scales({"identical": draw(1, seed=seed).expand(6, -1) * lengths})
        weights = step(rule, gram_of(gradients)).weights
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-9, atol=0)


@pytest.mark.parametrize("target", [-0.999999, -0.7, 0.0, 0.3, 0.9, 0.999999, 1.0])
def test_two_gradients_meet_their_target(target: float) -> None:
    pairs = {
        str(seed): draw(2, size=2, seed=seed) * torch.tensor([[1.0], [10.0 ** (seed % 7 - 3)]])
        for seed in range(30)
    }
    gradients = at_all_scales(pairs)
    gradients = gradients[gradients.norm(dim=2).amin(1) > 0]
    rule = bound(GradVac(target=target, vaccinated=["a"]), 2, len(gradients))
    weighing = step(rule, gram_of(gradients))
    altered = (weighing.weights[:, None] @ gradients)[:, 0] - gradients[:, 1]  # b enters as it is
    size = gradients.norm(dim=2, keepdim=True)
    before = ((gradients[:, 0] / size[:, 0]) * (gradients[:, 1] / size[:, 1])).sum(1)
    altered = altered / altered.norm(dim=1, keepdim=True)
    after = (altered * (gradients[:, 1] / size[:, 1])).sum(1)
    expected = before.clamp_min(target)
    torch.testing.assert_close(after, expected, rtol=0, atol=1.001e-6)
    assert (before < target).sum() >= 20 or target < -0.9


def test_preserved_norms_are_preserved() -> None:
    gradients = draw(2)
    gradients[1] = -gradients[0] + 0.3 * gradients[1]
    for name, other in (("a", 1), ("b", 0)):
        rule = GradVac(target=0.6, vaccinated=[name], preserve_norm=True)
        altered = weights_of(rule, gradients) @ gradients - gradients[other]
        torch.testing.assert_close(altered.norm(), gradients[1 - other].norm())
        cosine = torch.cosine_similarity(altered, gradients[other], dim=0)
        torch.testing.assert_close(cosine, torch.tensor(0.6, dtype=torch.float64))


@each(EVERY)
def test_one_component_at_a_time_equals_all_at_once(make: MakeRule) -> None:
    together, alone = bound(make(), 4, 3), bound(make(), 4, 3)
    generator = torch.Generator().manual_seed(0)
    losses = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    for _ in range(6):
        gradients = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
        gram = gradients @ gradients.mT
        expected = step(together, gram, losses=losses)
        alone.start_step(range(4), losses)
        for k in (2, 0, 1):  # in any order
            found = alone.weigh([k], gram[[k]])
            assert torch.equal(found.active[0], expected.active[k])
            torch.testing.assert_close(found.weights[0], expected.weights[k], rtol=1e-12, atol=0)
        alone.commit()


@each(EVERY)
def test_a_non_finite_component_leaves_all_state_untouched(make: MakeRule) -> None:
    rule = bound(make(), 3, 2)
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    losses = torch.ones(3, dtype=torch.float64)
    step(rule, gradients @ gradients.mT, losses=losses)
    before = rule.state_dict()
    for value in (torch.inf, torch.nan):
        spoiled = gradients.clone()
        spoiled[1, 2, 5] = value
        weighing = step(rule, spoiled @ spoiled.mT, losses=losses)
        assert weighing.weights[1].tolist() == [1.0, 1.0, 1.0]  # lets the value reach .grad
        assert weighing.weights[0].isfinite().all()
        assert not weighing.active[1].any()
        assert_same_state(rule.state_dict(), before)


def test_targets_of_pairs_can_differ() -> None:
    target = FixedTarget({("a", "b"): 0.9, ("b", "a"): -1.0}, default=-1.0)
    weights = weights_of(GradVac(target=target), draw(3))
    assert weights[0] == 1.0
    assert weights[1] > 1.0
    assert weights[2] == 1.0

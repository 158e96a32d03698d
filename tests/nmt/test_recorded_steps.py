"""Steps recorded as a CUDA graph against steps as they are written, one at a time.

Over many steps rounding grows: in 16 bits, additions in another order make another model. So every
step starts twice from the same weights, moments, rule and random numbers, and what the two do is
compared: a graph that reads yesterday's batch, dropout or learning rate is far off at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradvac.lab.recipes.nmt import Batch, NmtConfig
from gradvac.lab.recipes.nmt.preparation import open_corpus
from gradvac.lab.recipes.nmt.recipe import TranslationWorkload
from gradvac.lab.training import seed_everything
from gradvac.lab.training.environment import random_state, restore_random_state
from gradvac.lab.training.job import Job
from gradvac.lab.training.optimizer import move_to_device, set_lr
from gradvac.lab.training.state import RunState
from gradvac.lab.training.step import EagerStep, GraphStep, StepResult

from .. import needs

RULES = ["none", "sum", "gradvac", "pcgrad", "gradnorm", "mgda", "studies/controls.py:Control"]
Take = Callable[[Sequence[Batch]], StepResult]
Build = Callable[..., NmtConfig]


@dataclass(frozen=True)
class Done:
    """What a step did: gradients, the change of all weights, that of the rule, and the result."""

    gradients: dict[str, Tensor]
    change: Tensor
    learned: dict[str, Tensor]
    result: StepResult

    @property
    def gradient(self) -> Tensor:
        return torch.cat([own.flatten() for own in self.gradients.values()])


class Snapshot:
    """All that the next step of a run depends on, except its batch."""

    def __init__(self, state: RunState[Batch]) -> None:
        self._model = copy.deepcopy(state.model.state_dict())
        self._optimizer = copy.deepcopy(state.optimizer.state_dict())
        aligner = state.aligner
        self._aligner = None if aligner is None else copy.deepcopy(aligner.state_dict())
        self._random = random_state()

    def restore_into(self, state: RunState[Batch]) -> None:
        state.model.load_state_dict(self._model)
        state.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        move_to_device(state.optimizer)
        if state.aligner is not None:
            state.aligner.load_state_dict(copy.deepcopy(self._aligner) or {})
        restore_random_state(self._random)


def make_state(config: NmtConfig) -> RunState[Batch]:
    prepared = open_corpus(config.data)
    seed_everything(0)
    return RunState(TranslationWorkload(config, prepared), config, Job())


def take(state: RunState[Batch], step: Take, batch: Batch, lr: float) -> Done:
    """Take a step; what was Adam's gradient is read from its first moment."""
    beta = state.optimizer.param_groups[0]["betas"][0]
    weights = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    moments = {
        name: state.optimizer.state[p]["exp_avg"].clone() if state.optimizer.state else 0.0
        for name, p in state.model.named_parameters()
    }
    set_lr(state.optimizer, lr)
    known = knowledge(state)
    result = step([batch])
    gradients, changes = {}, []
    for name, parameter in state.model.named_parameters():
        moment = state.optimizer.state[parameter]["exp_avg"]
        gradients[name] = (moment - beta * moments[name]) / (1 - beta)
        changes.append((parameter.detach() - weights[name]).flatten())
    learned = {name: now - known[name] for name, now in knowledge(state).items()}
    return Done(gradients, torch.cat(changes), learned, result)


def knowledge(state: RunState[Batch]) -> dict[str, Tensor]:
    """What the rule keeps from step to step, its counter of steps included."""
    kept = {} if state.aligner is None else state.aligner.state_dict()
    kept = {name: own for name, own in kept.items() if isinstance(own, (Tensor, int))}
    return {name: torch.as_tensor(own).double().nan_to_num() for name, own in kept.items()}


def distance(one: Tensor, other: Tensor) -> float:
    """Relative to the second."""
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def require_same(found: Done, written: Done, again: Done, limit: float) -> None:
    """Compare with a step as it is written, which itself differs from one to the next.

    Args:
        found: To be judged.
        written: What it should have been.
        again: The same once more.
        limit: How far apart gradients may be, relatively, beyond four times the difference of the
            last two.
    """

    def close(what: str, one: Tensor, right: Tensor, twin: Tensor, limit: float) -> None:
        noise = distance(twin, right)
        assert distance(one, right) <= limit + 4 * noise, f"{what}; twice as written: {noise:.3g}"

    close("gradient", found.gradient, written.gradient, again.gradient, limit)
    for name, gradient in written.gradients.items():
        close(name, found.gradients[name], gradient, again.gradients[name], 4 * limit)
    # Adam makes a large step of a small gradient, the noise of one that should be 0 included.
    close("change", found.change, written.change, again.change, 5 * limit)
    for name, learned in written.learned.items():
        close(name, found.learned[name], learned, again.learned[name], 10 * limit)
    for name, value in written.result.sums.items():
        torch.testing.assert_close(found.result.sums[name], value, rtol=limit, atol=0)
    assert float(found.result.norm) == pytest.approx(float(written.result.norm), rel=4 * limit)
    assert not found.result.bad
    ours, theirs = found.result.alignment, written.result.alignment
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        for name in ("similarity", "target", "weights"):
            one, other = getattr(ours, name), getattr(theirs, name)
            atol = 8 * limit * max(1.0, float(other.nan_to_num().abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=atol, equal_nan=True)


@pytest.fixture
def settings(toy_config: Callable[..., NmtConfig], is_prepared: None) -> Callable[..., NmtConfig]:
    """Builds a config by rule and what [train] has."""

    def build(rule: str, **train: Any) -> NmtConfig:
        return toy_config(
            model={"dropout": 0.1},
            batch={"fixed": True},
            align={"rule": rule},
            train=train,
        )

    return build


def follow(
    config: Any,
    recorded: Callable[[RunState[Any]], Any],
    calls: int,
    limit: float,
    make: Callable[[Any], RunState[Any]] = make_state,
) -> list[float]:
    """Let one run take its steps recorded, and compare each with two as they are written.

    `make` is for configs of other recipes.

    Returns:
        How far apart the gradients of neighbouring steps are: what a batch of yesterday would be.
    """
    leader, follower = make(config), make(config)
    lead, written_step = recorded(leader), EagerStep(config, follower)
    apart: list[float] = []
    before: Done | None = None
    for call in range(1, calls + 1):
        batch, lr, start = next(leader.batches), 4e-4 * call, Snapshot(leader)
        found = take(leader, lead, batch, lr)
        written, again = (
            (start.restore_into(follower), take(follower, written_step, batch, lr))[1]
            for _ in range(2)
        )
        require_same(found, written, again, limit)
        if before is not None:
            apart.append(distance(before.gradient, written.gradient))
        before = written
    for state in (leader, follower):
        if state.aligner is not None:
            state.aligner.detach()
    return apart


def test_the_comparison_sees_what_a_graph_can_get_wrong(settings: Build) -> None:
    config = settings("gradvac")
    state = make_state(config)
    step, batches = EagerStep(config, state), [next(state.batches) for _ in range(3)]
    for batch in batches[:2]:
        take(state, step, batch, 4e-4)
    start = Snapshot(state)

    def taken(batch: Batch = batches[2], lr: float = 8e-4, draws: int = 0) -> Done:
        start.restore_into(state)
        torch.rand(draws)
        return take(state, step, batch, lr)

    right = taken()
    require_same(taken(), right, right, 1e-5)
    forgetful = {name: 0 * change for name, change in right.learned.items()}
    wrong = [taken(batches[1]), taken(lr=4e-4), taken(draws=1), replace(right, learned=forgetful)]
    for found in wrong:
        with pytest.raises(AssertionError):
            require_same(found, right, right, 0.02)


@needs.GPU
@pytest.mark.parametrize("rule", RULES)
def test_recorded_steps_equal_those_as_written(settings: Build, rule: str) -> None:
    # In float32 products by task need the tasks' sizes on the host: rules cannot be recorded.
    precision = "fp32" if rule == "none" else "bf16"
    config = settings(rule, device="cuda", precision=precision)
    steps = []

    def record(state: RunState[Batch]) -> Take:
        steps.append(GraphStep(EagerStep(config, state), state.device))
        return steps[0]

    # MGDA's weights turn a small difference of the gradients into a larger one.
    limit = {"none": 1e-3, "mgda": 0.05}.get(rule, 0.02)
    apart = follow(config, record, 12, limit)  # the first three and the tenth are as written
    assert min(apart) > 5 * limit
    assert steps[0].works


class Waits(EagerStep[Batch]):
    """A step that waits for the device at its end, which no recording allows."""

    def take(self, batches: Sequence[Batch], num_tokens: Tensor) -> StepResult:
        result = super().take(batches, num_tokens)
        result.norm.item()
        return result


@needs.GPU
def test_what_cannot_be_recorded_goes_on_as_it_is_written(
    settings: Build, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings("gradvac", device="cuda", precision="bf16")

    def record(state: RunState[Batch]) -> Take:
        return GraphStep(Waits(config, state), state.device)

    with pytest.warns(UserWarning, match=r"train\.cuda_graph: .*CUDA graph"):
        follow(config, record, 7, 0.02)
    assert len(caplog.messages) == 1

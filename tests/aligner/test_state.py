"""State survives a restart, by name."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchjd import aggregation

from gradvac import Aligner, GradNorm, GradVac, PCGrad, Sum, TorchJD
from gradvac.rules import Rule

from ..rules.steps import assert_same_state
from .problems import ENGINES, Translator, descend, draw_batch

TASKS = ["tr", "fr", "hi", "cs"]
REORDERED = ["cs", "tr", "hi", "fr"]


def make_torchjd() -> Rule:
    return TorchJD(aggregation.PCDWeighting())


RULES: dict[str, Callable[[], Rule]] = {
    "gradvac": lambda: GradVac(beta=0.2),
    "gradvac, some": lambda: GradVac(target=0.4, vaccinated=["hi", "cs"], seed=5),
    "pcgrad": lambda: PCGrad(),
    "gradnorm": lambda: GradNorm(),
    "torchjd": make_torchjd,
}


def train(model: Translator, aligner: Aligner, steps: range, tasks: Sequence[str] = TASKS) -> None:
    """Steps of one run, some with absent tasks; a step's batch depends on its number alone."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        count = (4, 2, 3)[number % 3] if len(tasks) == 4 else len(tasks)
        batch = draw_batch(generator, tasks[:count])
        aligner.backward(model(batch.source, batch.words), batch.tasks)
        descend(model, lr=0.02)


def assert_equal_models(one: Translator, other: Translator) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
def test_resumed_run_equals_uninterrupted(
    engine: str, make: Callable[[], Rule], tmp_path: Path
) -> None:
    whole = Translator()
    expected = Aligner(whole, TASKS, make(), engine=engine)
    train(whole, expected, range(16))

    first = Translator()
    aligner = Aligner(first, TASKS, make(), engine=engine)
    train(first, aligner, range(8))
    torch.save([first.state_dict(), aligner.state_dict()], tmp_path / "checkpoint.pt")

    for listed in (TASKS, REORDERED):
        weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        second = Translator(seed=1)
        second.load_state_dict(weights)
        resumed = Aligner(second, listed, make(), engine=engine)
        assert resumed.load_state_dict(state).complete
        train(second, resumed, range(8, 16))
        assert_equal_models(second, whole)
        if listed == TASKS:
            assert_same_state(resumed.state_dict(), expected.state_dict())


def test_without_the_state_the_run_would_differ() -> None:
    """Or the tests above would show nothing."""
    for make in (RULES["gradvac"], RULES["pcgrad"], RULES["gradnorm"]):
        whole, first = Translator(), Translator()
        train(whole, Aligner(whole, TASKS, make(), engine="per_task"), range(20))
        train(first, Aligner(first, TASKS, make(), engine="per_task"), range(10))
        train(first, Aligner(first, TASKS, make(), engine="per_task"), range(10, 20))
        assert not torch.equal(first.embedding.weight, whole.embedding.weight)


def test_the_seed_is_part_of_the_state() -> None:
    one, other = Translator(), Translator()
    aligner = Aligner(one, TASKS, PCGrad(seed=3), engine="per_task")
    resumed = Aligner(other, TASKS, PCGrad(seed=4), engine="per_task")
    resumed.load_state_dict(aligner.state_dict())
    train(one, aligner, range(5))
    train(other, resumed, range(5))
    assert_equal_models(one, other)


def test_saved_state_does_not_move_on() -> None:
    model = Translator()
    for make in RULES.values():
        aligner = Aligner(model, TASKS, make(), engine="per_task")
        train(model, aligner, range(3))
        saved = aligner.state_dict()
        copy = deepcopy(saved)
        train(model, aligner, range(3, 6))
        assert_same_state(saved, copy)
        resumed = Aligner(model, TASKS, make(), engine="per_task")
        resumed.load_state_dict(saved)
        train(model, resumed, range(3, 6))
        assert_same_state(saved, copy)


def test_tasks_added_and_removed() -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, GradVac(beta=0.2), engine="per_task")
    train(model, aligner, range(10))
    saved = aligner.state_dict()

    now = ["de", "hi", "tr", "fr"]
    resumed = Aligner(model, now, GradVac(beta=0.2), engine="per_task")
    with pytest.warns(UserWarning, match=r"tasks .* afresh: de; .*: cs"):
        report = resumed.load_state_dict(saved)
    assert (report.new_tasks, report.dropped_tasks) == (("de",), ("cs",))
    assert (report.new_components, report.dropped_components) == ((), ())
    assert not report.complete

    state = resumed.state_dict()
    assert state["step"] == 10
    for i, one in enumerate(now):
        for j, other in enumerate(now):
            known = one in TASKS and other in TASKS
            expected = (
                saved["target"][:, TASKS.index(one), TASKS.index(other)]
                if known
                else torch.zeros(len(aligner.components), dtype=torch.float64)
            )
            assert torch.equal(state["target"][:, i, j], expected)
    train(model, resumed, range(10, 12), now)


@pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
def test_no_task_in_common(make: Callable[[], Rule]) -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, make(), engine="per_task")
    train(model, aligner, range(3))
    names = [f"{task}-en" for task in TASKS]
    rule = GradVac(target=0.4, seed=5) if make is RULES["gradvac, some"] else make()
    resumed = Aligner(model, names, rule, engine="per_task")
    with pytest.warns(UserWarning, match="afresh: tr-en, fr-en, hi-en, cs-en; "):
        resumed.load_state_dict(aligner.state_dict())
    train(model, resumed, range(3), names)


def test_gradnorm_with_another_list_of_tasks() -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, GradNorm(), engine="per_task")
    train(model, aligner, range(10))
    saved = aligner.state_dict()
    resumed = Aligner(model, ["de", "hi"], GradNorm(), engine="per_task")
    with pytest.warns(UserWarning, match="not used: tr, fr, cs"):
        resumed.load_state_dict(saved)
    state = resumed.state_dict()
    assert state["first_losses"][1] == saved["first_losses"][2]
    assert state["first_losses"][0].isnan()
    assert state["weights"].tolist() == [1.0, saved["weights"][2].item()]


def test_some_components_changed() -> None:
    """A layer was added: what is known of the others is restored."""
    model = Translator()
    aligner = Aligner(model, TASKS, GradVac(beta=0.2), engine="per_task")
    train(model, aligner, range(5))
    saved = aligner.state_dict()
    deeper = Translator()
    deeper.encoder.append(type(model.encoder[0])(6).double())
    resumed = Aligner(deeper, TASKS, GradVac(beta=0.2), engine="per_task")
    with pytest.warns(UserWarning, match=r"components .*afresh: encoder.2"):
        report = resumed.load_state_dict(saved)
    assert report.new_components == ("encoder.2",)
    names, target = list(resumed.components), resumed.state_dict()["target"]
    for position, name in enumerate(aligner.components):
        assert torch.equal(target[names.index(name)], saved["target"][position])
    assert not target[names.index("encoder.2")].any()


@pytest.mark.parametrize(
    ("saved", "now"),
    [("whole_model", "all_layer"), ("all_layer", "enc_dec"), ("all_matrix", "whole_model")],
)
def test_a_state_of_other_components_is_refused(saved: str, now: str) -> None:
    model = Translator()
    state = Aligner(model, TASKS, granularity=saved, engine="per_task").state_dict()
    aligner = Aligner(model, TASKS, granularity=now, engine="per_task")
    with pytest.raises(ValueError, match=r"state: .*components .* granularity"):
        aligner.load_state_dict(state)


def test_a_state_of_another_rule_is_refused() -> None:
    model = Translator()
    state = Aligner(model, TASKS, GradNorm(), engine="per_task").state_dict()
    aligner = Aligner(model, TASKS, GradVac(), engine="per_task")
    with pytest.raises(ValueError, match=r"state: .*GradNorm.* GradVac"):
        aligner.load_state_dict(state)


def test_a_fixed_target_is_a_setting_not_state() -> None:
    model = Translator()
    state = Aligner(model, TASKS, GradVac(target=0.1), engine="per_task").state_dict()
    aligner = Aligner(model, TASKS, GradVac(target=0.7), engine="per_task")
    aligner.load_state_dict(state)
    batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
    alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)
    assert alignment.target.unique().tolist() == [0.7]


def test_a_fixed_target_is_where_no_moving_average_starts() -> None:
    model = Translator()
    fixed = Aligner(model, TASKS, GradVac(target=0.5)).state_dict()
    moving = Aligner(model, TASKS, GradVac(beta=0.1))
    with pytest.warns(UserWarning, match=r"targets .*start at 0"):
        moving.load_state_dict(fixed)
    assert not moving.state_dict()["target"].any()


def test_rules_without_state_have_an_empty_one() -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    state = aligner.state_dict()
    assert set(state) == {"rule", "tasks", "components"}
    assert aligner.load_state_dict(state).complete


@pytest.mark.parametrize("change", [lambda target: target * torch.nan, lambda target: target[:0]])
def test_targets_that_no_rule_saved_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    """Nothing is below NaN: with such targets no pair would ever be active again."""
    aligner = Aligner(nn.Linear(2, 2), ["a", "b"], GradVac())
    state = aligner.state_dict()
    with pytest.raises(ValueError, match="state: its targets must be finite"):
        aligner.load_state_dict({**state, "target": change(state["target"])})

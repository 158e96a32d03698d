"""What couples rows: refused by name in one_backward, and taken over by per_task in "auto"."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gradvac import Aligner, GradVac, Sum
from gradvac.engine import one_backward, planner

from .parity import TASKS, UNSORTED, assert_same_gradients, attach, plain_backward
from .zoo._case import (
    B,
    Block,
    Case,
    D,
    HandWrittenNorm,
    Model,
    S,
    Scaled,
    distance,
    mlp,
    output,
)
from .zoo.sequences import checkpointed

ROWS = torch.tensor(UNSORTED)


def batch_norm() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, D),))


def in_batch_negatives() -> Case:
    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        y = model(x)
        return F.cross_entropy(y @ y.roll(1, 1).T, torch.arange(len(x)), reduction="none")

    return Case(mlp(nn.Tanh()), losses, (torch.randn(B, D),))


def mean_over_the_batch() -> Case:
    """A hand-written normalisation over dimension 0."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).tanh()
        result: Tensor = m.last(y - y.mean(0))
        return result

    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, D),))


def output_without_rows() -> Case:
    """A module that runs task by task returns something summed over the batch."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * self.weight
            return y, y.square().sum()

    def losses(model: Any, tasks: Tensor, x: Tensor) -> Tensor:
        y, penalty = model.pooled(model.first(x))
        result: Tensor = distance(y) + penalty / len(x)
        return result

    model = Model(lambda m, x: m.pooled(x), first=nn.Linear(D, D), pooled=Pooled())
    return Case(model, losses, (torch.randn(B, S, D),))


def router_loss() -> Case:
    """A small term over the whole batch, as mixtures of experts have it."""

    def losses(model: Any, tasks: Tensor, x: Tensor) -> Tensor:
        y = model.first(x)
        share = F.softmax(model.router(y), -1).mean(0)
        result: Tensor = distance(model.last(y)) + 1e-3 * share.square().sum()
        return result

    model = Model(
        lambda _, x: x, first=nn.Linear(D, D), router=nn.Linear(D, 4), last=nn.Linear(D, 3)
    )
    return Case(model, losses, (torch.randn(B, D),))


def weak_coupling() -> Case:
    """A thousandth of the mean over the batch, added to every row."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        result: Tensor = m.last(y + 1e-3 * m.middle(y).mean(0))
        return result

    model = Model(run, first=nn.Linear(D, D), middle=nn.Linear(D, D), last=nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, D),))


def attention_over_rows() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).tanh()[None]
        result: Tensor = m.attention(y, y, y)[0][0]
        return result

    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    model = Model(run, first=nn.Linear(D, D), attention=attention)
    return Case(model, output, (torch.randn(B, D),))


def cumulative() -> Case:
    model = Model(lambda m, x: m.first(x).cumsum(0), first=nn.Linear(D, D))
    return Case(model, output, (torch.randn(B, D),))


def one_against_another() -> Case:
    """What a row gains another loses: all gradients add up to zero."""

    def losses(model: nn.Module, tasks: Tensor, x: Tensor) -> Tensor:
        y = distance(model(x))
        return y - y.flip(0)

    return Case(mlp(nn.Tanh()), losses, (torch.randn(B, D),))


# The case, and what a message must say: whose gradients, why, and what to do.
COUPLED: dict[str, tuple[Callable[[], Case], str]] = {
    "batch norm": (
        batch_norm,
        r"0\.(weight|bias).*training mode \(put it into eval mode.*per_task",
    ),
    "in-batch negatives": (in_batch_negatives, r"0\.(weight|bias).*in-batch negatives.*per_task"),
    "mean over the batch": (mean_over_the_batch, r"first\.(weight|bias).*whole batch.*per_task"),
    "output without rows": (output_without_rows, r"first\.(weight|bias).*per_task"),
    "router loss": (router_loss, r"(first|router)\.(weight|bias).*a router.*per_task"),
    "weak coupling": (weak_coupling, r"(first|middle)\.(weight|bias).*per_task"),
    "attention over rows": (attention_over_rows, r"first\.(weight|bias).*per_task"),
    "one against another": (one_against_another, r"0\.(weight|bias).*per_task"),
    "cumulative": (cumulative, r"first\.(weight|bias).*per_task"),
    "reentrant checkpoints": (
        lambda: checkpointed(use_reentrant=True),
        r"reentrant activation checkpointing.*use_reentrant=False.*per_task",
    ),
}


def losses_of(case: Case, model: nn.Module) -> Tensor:
    return case.losses(model, ROWS, *case.inputs)


@pytest.mark.parametrize("kind", COUPLED)
def test_refused(kind: str) -> None:
    factory, message = COUPLED[kind]
    case = factory()
    aligner = attach(case.model)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            aligner.backward(losses_of(case, case.model), ROWS)
    assert all(p.grad is None for p in case.model.parameters())


@pytest.mark.parametrize("kind", COUPLED)
def test_auto_continues_with_per_task(kind: str) -> None:
    factory, _ = COUPLED[kind]
    torch.manual_seed(0)
    case = factory()
    reference = copy.deepcopy(case.model)
    expected = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        aligner = Aligner(case.model, TASKS, GradVac(beta=0.3), engine="auto")
        for _ in range(2):
            aligner.backward(losses_of(case, case.model), ROWS)
            expected.backward(losses_of(case, reference), ROWS)
            assert_same_gradients(case.model, reference, 1e-6)
    said = [str(w.message) for w in caught if "continues with per_task" in str(w.message)]
    assert len(said) == 1
    assert aligner.engine == "per_task"
    assert "engine=per_task (auto: " in repr(aligner)


@pytest.mark.parametrize("with_third", [False, True])
def test_losses_of_a_mapping_that_cancel_out(with_third: bool) -> None:
    model = Model(lambda m, x: m.last(m.first(x)), first=nn.Linear(D, D), last=nn.Linear(D, 3))

    def losses(of: Any, x: Tensor) -> dict[str, Tensor]:
        y = distance(of(x)).sum()
        third = {TASKS[2]: of.first(x).sum()} if with_third else {}
        return {TASKS[0]: y, TASKS[1]: -y} | third

    x, reference = torch.randn(B, D), copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"several tasks at once.*per_task"):
        attach(model).backward(losses(model, x))
    weights = {TASKS[0]: 2.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*continues with per_task")
        Aligner(model, TASKS, Sum(weights)).backward(losses(model, x))
    sum(weights.get(t, 1.0) * loss for t, loss in losses(reference, x).items()).backward()
    assert_same_gradients(model, reference, 1e-5)


def test_reentrant_checkpoints_in_per_task() -> None:
    """Its gradients come by way of `.grad`, which is put back."""
    torch.manual_seed(0)
    case = checkpointed(use_reentrant=True)
    reference = copy.deepcopy(case.model)
    reference.__dict__["use_reentrant"] = False
    found, expected = (
        Aligner(m, TASKS, GradVac(beta=0.3), engine="per_task") for m in (case.model, reference)
    )
    for _ in range(2):  # into `.grad` that is there already
        found.backward(losses_of(case, case.model), ROWS)
        expected.backward(losses_of(case, reference), ROWS)
        assert_same_gradients(case.model, reference, 1e-6)


def test_selective_checkpoints_run_once() -> None:
    """Their graph cannot be probed: a mapping of separate forwards needs no probe."""

    def policy(_: object, operation: object, *arguments: object, **options: object) -> Any:
        is_product = operation == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def run(m: Any, x: Tensor) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return m.last(checkpoint(m.inner, x, use_reentrant=False, context_fn=contexts))

    model = Model(run, inner=mlp(nn.Tanh()), last=nn.Linear(3, 3))
    x, expected = torch.randn(B, D), copy.deepcopy(model)
    for engine in ("one_backward", "per_task"):
        with pytest.raises(ValueError, match=r"selective activation checkpoint.*task -> loss"):
            Aligner(model, TASKS, engine=engine).backward(distance(model(x)), ROWS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*continues with per_task")
        aligner = Aligner(model, TASKS, Sum())
        for _ in range(2):
            rows = {task: x[torch.eq(ROWS, number)] for number, task in enumerate(TASKS)}
            aligner.backward({task: model(of).square().sum() for task, of in rows.items()})
            expected(x).square().sum().backward()
    assert aligner.engine == "per_task"
    assert_same_gradients(model, expected, 1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
def test_warnings_are_of_the_line_that_called(accumulate: bool) -> None:
    def slow(model: nn.Module, _: Tensor, x: Tensor) -> Tensor:
        return distance(Scaled.apply(model(x), model.bias))

    cases = {
        "continues": batch_norm(),
        "fast path": Case(nn.Linear(D, D), slow, (torch.randn(B, D),)),
    }
    for words, case in cases.items():
        aligner = Aligner(case.model, TASKS, GradVac())
        with pytest.warns(UserWarning, match=words) as caught:
            aligner.backward(losses_of(case, case.model), ROWS, accumulate=accumulate)
        assert {warning.filename for warning in caught} == {__file__}


def test_influence_deep_in_a_model() -> None:
    """One backward per task is not slower than T gradients that are pushed through most of it."""

    def run(m: Any, x: Tensor) -> Any:
        hidden = m.layers(x)
        return m.last(hidden + hidden[torch.zeros(B, dtype=torch.int64)])

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(24)))
    model = Model(run, layers=layers, last=nn.Linear(D, 3))
    aligner = Aligner(model, TASKS, engine="one_backward")
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(distance(model(torch.randn(B, D))), ROWS)


def test_auto_goes_back_to_one_backward() -> None:
    """One step with batch norm in training mode is no reason to stay in per_task."""
    case = batch_norm()
    reference = copy.deepcopy(case.model)
    aligner = attach(case.model, GradVac(beta=0.3), engine="auto")
    expected = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    ran = []
    for training in (False, True, False, True, False):
        for model in (case.model, reference):
            model.train(training)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*continues with per_task.*eval mode")
            aligner.backward(losses_of(case, case.model), ROWS)
        expected.backward(losses_of(case, reference), ROWS)
        assert_same_gradients(case.model, reference, 1e-6)
        ran.append(aligner.engine)
    assert ran == ["one_backward", "per_task", "one_backward", "per_task", "one_backward"]


def test_batch_norm_set_to_training_later() -> None:
    case = batch_norm()
    aligner = attach(case.model.eval())
    aligner.backward(losses_of(case, case.model), ROWS)
    case.model.train()
    plain = copy.deepcopy(case.model)
    plain.zero_grad()
    plain_backward(losses_of(case, plain))
    case.model.zero_grad()
    plain_backward(losses_of(case, case.model))  # plain training goes on
    assert_same_gradients(case.model, plain, 1e-6)
    with pytest.raises(ValueError, match="put it into eval mode"):
        aligner.backward(losses_of(case, case.model), ROWS)
    case.model.eval()
    aligner.backward(losses_of(case, case.model), ROWS)  # the fix of the message fixes it


def test_a_single_task_does_not_count_as_probed() -> None:
    """With one task in the batch every division by rows is right."""
    case = mean_over_the_batch()
    aligner = attach(case.model)
    for _ in range(2):
        aligner.backward(losses_of(case, case.model), [1] * B)
    with pytest.raises(ValueError, match=r"rows .* influence"):
        aligner.backward(losses_of(case, case.model), ROWS)
    aligner.backward(losses_of(case, case.model), [1] * B)  # as before


class Late(nn.Module):
    """A term over the batch that starts after some steps, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.step = how, 0
        self.first, self.middle, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        if how == "zero head":
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        started = self.step >= 3
        self.step += 1
        if self.how == "branch" and started:
            y = y + self.middle(y).mean(0)
        elif self.how == "factor":
            y = y + float(started) * self.middle(y).mean(0)
        elif self.how == "mask":
            same = torch.eye(len(x), dtype=torch.bool) | started
            scores = (y @ self.middle(y).T).masked_fill(~same, -torch.inf)
            y = y + scores.softmax(-1) @ y
        elif self.how == "zero head":
            y = self.middle(y - y.mean(0))
        result: Tensor = self.last(y)
        return result


@pytest.mark.parametrize("how", ["branch", "factor", "mask", "zero head"])
def test_a_term_that_starts_later(how: str) -> None:
    torch.manual_seed(0)
    model = Late(how).double()
    reference = copy.deepcopy(model)
    strict, x = copy.deepcopy(model), torch.randn(B, D).double()
    expected = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    aligner = attach(model, GradVac(beta=0.3), engine="auto")
    alone = attach(strict, GradVac(beta=0.3))
    coupled_from = 1 if how == "zero head" else 3
    for step in range(5):
        losses = distance(model(x))
        is_coupled = step >= coupled_from
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*continues with per_task")
            aligner.backward(losses, ROWS)
        expected.backward(distance(reference(x)), ROWS)
        assert_same_gradients(model, reference, 1e-9)
        assert aligner.engine == ("per_task" if is_coupled else "one_backward")
        if is_coupled:
            with pytest.raises(ValueError, match=r"influence each other.*per_task"):
                alone.backward(distance(strict(x)), ROWS)
        else:
            alone.backward(distance(strict(x)), ROWS)
        for each in (model, reference, strict):
            for parameter in each.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(0.05 * parameter.grad)
            if each is not strict:
                each.zero_grad()


def test_the_probe_now_and_then_can_be_left_out() -> None:
    """A new graph is probed all the same."""
    case = mean_over_the_batch()
    aligner = attach(case.model, check=False)
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(losses_of(case, case.model), ROWS)


@pytest.mark.parametrize("engine", ["one_backward", "per_task", "auto"])
@pytest.mark.parametrize("change", ["unfrozen", "replaced", "resized", "added"])
def test_a_model_that_changed(change: str, engine: str) -> None:
    model = Block()
    if change == "unfrozen":
        model.up.weight.requires_grad_(False)
    aligner = attach(model, engine=engine)
    aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    if change == "unfrozen":
        model.up.weight.requires_grad_(True)
    elif change == "replaced":
        model.up = nn.Linear(D, 12)
    elif change == "resized":
        model.up.weight = nn.Parameter(torch.randn(14, D))
        model.up.bias = nn.Parameter(torch.randn(14))
        model.down.weight = nn.Parameter(torch.randn(D, 14))
    else:
        model.norm = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))
    with pytest.raises(ValueError, match=r"model: (up|down|norm).*replaced"):
        aligner.backward(distance(model(torch.randn(B, D))), ROWS)


@pytest.mark.parametrize("num_tasks", [1, 2])
@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
@pytest.mark.parametrize("is_forward_over", [False, True])
def test_frozen_later(is_forward_over: bool, engine: str, num_tasks: int) -> None:
    """A parameter, or a tensor that is not the model's: neither gradient nor Gram matrix."""
    model, scale = Block(HandWrittenNorm()).double(), torch.ones(D).double().requires_grad_()
    aligner = Aligner(model, TASKS, Sum(), "whole_model", engine)
    for _ in range(2):
        model.requires_grad_(True)
        model.zero_grad()
        if not is_forward_over:
            model.up.weight.requires_grad_(False)
        losses = distance(model(torch.randn(B, D).double() * scale))
        model.up.weight.requires_grad_(False)
        scale.requires_grad_(False)
        found = aligner.backward(losses, [row % num_tasks for row in range(B)])
        assert model.up.weight.grad is None
        assert scale.grad is None
        others = [p.grad for p in model.parameters() if p is not model.up.weight]
        torch.testing.assert_close(found.gram.sum(), sum(own.square().sum() for own in others))
        scale.requires_grad_(True)


def test_slower_places_are_announced_once() -> None:
    bilinear = nn.Bilinear(D, D, 2)
    model = Model(lambda m, x: m.bilinear(m.block(x), x), block=Block(), bilinear=bilinear)
    aligner = Aligner(model, TASKS, engine="one_backward")
    with pytest.warns(UserWarning, match=r"no fast path.*bilinear\.weight"):
        aligner.backward(distance(model(torch.randn(B, D))), ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aligner.backward(distance(model(torch.randn(B, D))), ROWS)  # and not again


def test_a_scheduled_probe_without_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known goes on being used; a first probe needs its memory."""
    model = nn.Linear(D, 3).double()
    aligner, x = attach(model), torch.randn(B, D).double()
    usual = planner.probe

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(planner, "probe", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        aligner.backward(distance(model(x)), ROWS)
    monkeypatch.setattr(planner, "probe", usual)
    aligner.backward(distance(model(x)), ROWS)
    model.zero_grad()
    monkeypatch.setattr(planner, "probe", no_memory)
    for _ in range(7):
        aligner.backward(distance(model(x)), ROWS)
        model.zero_grad()
    with pytest.warns(UserWarning, match="out of memory"):
        aligner.backward(distance(model(x)), ROWS)  # the tenth
    assert model.weight.grad is not None


def test_what_fails_while_a_graph_is_recorded_fails_the_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not record per_task in its place, which would be slow for good."""

    def failing_probe(*_: object) -> None:
        raise RuntimeError("no waiting for the device")

    monkeypatch.setattr(planner, "probe", failing_probe)
    monkeypatch.setattr(one_backward, "is_captured", lambda _: True)
    model = nn.Linear(D, 3)
    aligner = attach(model, GradVac(), engine="auto")
    with pytest.raises(RuntimeError, match="no waiting"):
        aligner.backward(model(torch.randn(B, D)).sum(1), ROWS)


def test_a_recorded_step_that_is_built_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be probed; models of transformers make a mask only then."""
    model = nn.Linear(D, 3)
    aligner = attach(model, GradVac(), engine="one_backward")
    x = torch.randn(B, D)
    aligner.backward(model(x).sum(1), ROWS)
    for module in (planner, one_backward):
        monkeypatch.setattr(module, "is_captured", lambda _: True)
    with pytest.raises(RuntimeError, match="attention_mask"):
        aligner.backward(model(x).exp().sum(1), ROWS)


class Routed(nn.Module):
    """Experts, and a router whose auxiliary loss is over the whole batch.

    All rows use all experts, or each token the two best (`is_sparse`), for which rows move.
    """

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.is_sparse = is_sparse
        self.first, self.router, self.last = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(32, 10)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, coefficient: float) -> Tensor:
        hidden = self.first(x).tanh()
        shares = self.router(hidden).softmax(-1)
        best = shares.topk(2 if self.is_sparse else 1).indices
        used = F.one_hot(best, 4).sum(-2).float().mean((0, 1))
        balance = 4 * (shares.mean((0, 1)) * used).sum()
        out = hidden
        for n, expert in enumerate(self.experts):
            if self.is_sparse:
                at = (best == n).any(-1).nonzero(as_tuple=True)
                given = shares[..., n][at][:, None] * expert(hidden[at])
                out = out.index_put(at, given.to(out.dtype), accumulate=True)
            else:
                out = out + shares[..., n, None] * expert(hidden)
        out = self.last(out)
        losses = F.cross_entropy(out.mT.float(), x.argmax(-1) % 10, reduction="none")
        return losses.mean(1) + coefficient * balance


@pytest.mark.parametrize(
    ("dtype", "coefficients", "rounding", "num_seeds"),
    [
        (torch.bfloat16, (1e-4, 1e-3, 3e-3), 1e-2, 20),
        (torch.float16, (1e-4, 3e-3), 1e-3, 3),
        (torch.float32, (1e-6, 1e-2), 1e-5, 3),
    ],
    ids=["bf16", "fp16", "float32"],
)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_influence_far_below_rounding_is_noticed(
    is_sparse: bool,
    dtype: torch.dtype,
    coefficients: tuple[float, ...],
    rounding: float,
    num_seeds: int,
) -> None:
    """Of an auxiliary loss: from the first batch, or from the one at which it sets in."""
    weights = {"a": 0.2, "b": 3.5, "c": 1.0, "d": 0.5}

    def backward(aligner: Aligner, own: nn.Module, coefficient: float) -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            losses = own(x, coefficient)
        own.zero_grad()
        aligner.backward(losses, [row % 4 for row in range(16)])

    for seed in range(num_seeds if is_sparse else 3):
        torch.manual_seed(seed)
        model, x = Routed(is_sparse), torch.randn(16, 12, 32)
        twin = copy.deepcopy(model)
        aligner = Aligner(model, list(weights), Sum(weights), engine="one_backward")
        for _ in range(3):
            backward(aligner, model, 0.0)
        backward(Aligner(twin, list(weights), Sum(weights), engine="per_task"), twin, 0.0)
        assert_same_gradients(model, twin, rounding)
        with pytest.raises(ValueError, match="influence each other"):
            backward(aligner, model, coefficients[0])
        for coefficient in coefficients:
            aligner = Aligner(model, list(weights), engine="one_backward")
            with pytest.raises(ValueError, match="influence each other"):
                backward(aligner, model, coefficient)


def test_an_auxiliary_loss_with_a_backward_of_its_own() -> None:
    """As docs/engines.md says."""
    layers = {"first": nn.Linear(D, D), "router": nn.Linear(D, 4), "last": nn.Linear(D, 3)}
    model, x = Model(lambda m, x: m.last(m.first(x)), **layers), torch.randn(B, D)
    twin = copy.deepcopy(model)

    def both(own: Any) -> tuple[Tensor, Tensor]:
        hidden = own.first(x)
        share = own.router(hidden).softmax(-1).mean(0)
        return distance(own.last(hidden)), share.square().sum()

    losses, balance = both(model)
    balance.backward(retain_graph=True)
    Aligner(model, TASKS, Sum(), engine="one_backward").backward(losses, UNSORTED)
    losses, balance = both(twin)
    (losses.sum() + balance).backward()
    assert_same_gradients(model, twin, 1e-5)

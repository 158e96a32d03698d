"""What C++ executes of a step equals per_task, and is left to Python where it is not as planned."""

# B rows, S tokens, D width, T tasks

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import set_detect_anomaly
from torch.utils import swap_tensors
from torch.utils.checkpoint import checkpoint

import gradvac
from gradvac import AdamMetric, Aligner, GradVac, Sum
from gradvac.engine import executor
from gradvac.engine.budget import WaitingBudget
from gradvac.engine.graph import Graph, NotSeparable
from gradvac.engine.task_gradients import TaskGradients

from . import test_moved_rows, test_taps
from .parity import (
    ONE_ABSENT,
    SORTED,
    TASKS,
    UNSORTED,
    Twins,
    assert_same_alignment,
    assert_same_gradients,
    attach,
    gradients_of,
    made,
    plain_backward,
)
from .zoo import ZOO
from .zoo._case import B, Case, D, Model, S, V, distance, output

USUAL = ["bert", "llama", "tied_softmax", "called_twice", "heads_of_tasks"]
STEPS = (UNSORTED, SORTED, ONE_ABSENT, UNSORTED, SORTED)


@pytest.fixture
def ran(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were executed whole, and how many junctions were caught on the way."""
    del kernels
    found: Counter[str] = Counter()
    execute, start = executor.Executor.execute, executor.CaughtJunctions.__init__

    def counted(self: Any, *given: Any) -> bool:
        has_run = execute(self, *given)
        found["whole"] += has_run
        return has_run

    def started(self: Any, *given: Any) -> None:
        start(self, *given)
        found["caught"] += len(self.numbers)

    monkeypatch.setattr(executor.Executor, "execute", counted)
    monkeypatch.setattr(executor.CaughtJunctions, "__init__", started)
    return found


@pytest.fixture(params=["whole", "caught"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small steps are executed whole; as on a GPU, nothing may wait for the end of a pass."""
    if request.param == "caught":
        monkeypatch.setattr(WaitingBudget, "all_may_wait", lambda *_: False)
    return str(request.param)


def layers(run: Callable[..., Tensor], **parts: Any) -> nn.Module:
    """A model of parts."""
    return Model(run, **parts)


def _linear(names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(D, D) for name in names}


def small() -> nn.Module:
    """Of all that is known."""

    def run(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
        hidden = m.a(x).tanh() + m.table(tokens) + m.positions(torch.arange(S)[None])
        hidden = m.norm(m.b(hidden)) * m.scale + m.shift + m.rms(m.c(x))
        result: Tensor = 0.1 * (m.tied(m.a(hidden + m.prompt)) @ m.table.weight.t())
        return result

    return layers(
        run,
        a=nn.Linear(D, D),
        b=nn.Linear(D, D),
        c=nn.Linear(D, D, bias=False),
        tied=nn.Linear(D, D),
        norm=nn.LayerNorm(D),
        rms=nn.RMSNorm(D),
        scale=nn.Parameter(torch.randn(D)),
        shift=nn.Parameter(torch.randn(D)),
        prompt=nn.Parameter(torch.randn(1, S, D)),
        table=nn.Embedding(40, D, padding_idx=3),
        positions=nn.Embedding(9, D),
    )


def small_case(dtype: torch.dtype = torch.float64) -> Case:
    inputs = (torch.randn(B, S, D, dtype=dtype), torch.randint(40, (B, S)))
    return Case(small().to(dtype), output, inputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str
)
def test_equals_per_task(way: str, dtype: torch.dtype, tolerance: float, ran: Counter[str]) -> None:
    twins = Twins(small_case(dtype), lambda: GradVac(beta=0.3), tolerance=tolerance)
    for tasks in STEPS:
        twins.step(tasks)
    assert ran[way] >= 3
    assert set(+ran) == {way}


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(way: str, name: str, ran: Counter[str]) -> None:
    del ran
    granularity = "all_matrix" if way == "caught" else "all_layer"
    twins = Twins(made(name), lambda: GradVac(beta=0.3), granularity=granularity)
    for tasks in STEPS[:4]:
        twins.step(tasks)


@pytest.mark.parametrize(
    "name", ["bert", "llama", "tied_softmax", "called_twice", "heads_of_tasks"]
)
def test_usual_models_are_executed(way: str, name: str, ran: Counter[str]) -> None:
    """So that the test above says something."""
    twins = Twins(made(name), Sum)
    for tasks in STEPS[:3]:
        twins.step(tasks)
    assert ran[way]


def parts_of_parameters() -> nn.Module:
    """What is made of parameters, and junctions at which a pass ends, beside what C++ knows."""

    def run(m: Any, x: Tensor, image: Tensor) -> Tensor:
        positions = m.positions(torch.arange(S)[None])
        bias = m.bias[torch.arange(S)[:, None] - torch.arange(S)].permute(2, 0, 1)[None]
        hidden = torch.cat([m.prompt.expand(B, 1, D), m.a(x)[:, 1:]], 1) + positions
        scores = (hidden @ hidden.mT)[:, None] + bias
        mixed = torch.softmax(scores + 0.1 * bias, -1).sum(1) @ hidden
        mixed = m.norm(mixed) * (1.0 + m.scale) + (m.scale * m.positions.weight[0])
        seen = m.patches(image).flatten(2).mT.mean(1, keepdim=True)
        joined = torch.cat([m.scale[:3], m.prompt[0, 0, 3:]])
        result: Tensor = m.b(mixed + seen) * joined + positions
        return result

    return layers(
        run,
        a=nn.Linear(D, D),
        b=nn.Linear(D, D),
        norm=nn.RMSNorm(D),
        scale=nn.Parameter(torch.randn(D)),
        prompt=nn.Parameter(torch.randn(1, 1, D)),
        bias=nn.Parameter(torch.randn(2 * S, 3)),
        positions=nn.Embedding(S, D),
        patches=nn.Conv2d(2, D, 2, stride=2),
    )


def test_what_python_builds_beside(way: str, ran: Counter[str]) -> None:
    inputs = torch.randn(B, S, D).double(), torch.randn(B, 2, 4, 4).double()
    twins = Twins(Case(parts_of_parameters().double(), output, inputs), lambda: GradVac(beta=0.3))
    for tasks in (*STEPS, *STEPS):
        twins.step(tasks)
    assert ran[way] >= 6
    assert set(+ran) == {way}


@pytest.mark.parametrize("num_fit", [2, 4])
def test_what_is_larger_than_the_parameters_it_is_made_of(
    num_fit: int, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Task gradients of all three products of small factors must be there at once."""
    size = 64
    monkeypatch.setattr(
        "gradvac.engine.budget._LEAST_BYTES", num_fit * len(TASKS) * size * size * 8
    )
    factors = {name: nn.Parameter(torch.randn(size, 1) / 8) for name in "abcdef"}

    def run(m: Any, x: Tensor) -> Tensor:
        for one, other in ("ab", "cd", "ef"):
            x = (x @ (getattr(m, one) @ getattr(m, other).t())).tanh()
        return x

    x = torch.randn(B, 1, size).double()
    twins = Twins(Case(layers(run, **factors).double(), output, (x,)), Sum)
    for tasks in STEPS:
        twins.step(tasks)
    assert bool(ran["whole"]) == (num_fit > 3)


@pytest.mark.parametrize("name", ["t5", "transformer", "broadcast_positions", "several_outputs"])
def test_models_with_parts_that_python_builds_are_executed(name: str, ran: Counter[str]) -> None:
    twins = Twins(made(name), lambda: GradVac(beta=0.3))
    for tasks in STEPS:
        twins.step(tasks)
    assert ran["whole"] >= 2


@pytest.mark.parametrize("options", [{"stream_bytes": 1}, {"table_bytes": 1}], ids=str)
def test_a_user_who_wants_less_memory(options: dict[str, Any], ran: Counter[str]) -> None:
    twins = Twins(small_case(), GradVac, **options)
    for tasks in STEPS:
        twins.step(tasks)
    assert not ran["whole"]
    assert ran["caught"] or "table_bytes" in options


def test_a_large_head_is_not_built_after_micro_batches(
    ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are to be kept, and so are built whatever their size."""
    monkeypatch.setattr(WaitingBudget, "all_may_wait", lambda *_: False)
    built: list[int] = []
    add = TaskGradients.add_block
    monkeypatch.setattr(
        TaskGradients,
        "add_block",
        lambda s, p, block: (built.append(block[0].nbytes), add(s, p, block)),
    )
    parts = {"a": nn.Linear(D, D), "head": nn.Linear(D, 99)}
    model = layers(lambda m, x: m.head(m.a(x).tanh()), **parts).double()
    most = len(TASKS) * model.head.weight.nbytes - 1
    aligner, x = attach(model, GradVac(), table_bytes=most), torch.randn(B, S, D).double()
    for number in range(8):
        built.clear()
        aligner.backward(distance(model(x)), UNSORTED, accumulate=number < 3)
        assert (max(built) > most) == (number < 4)
    assert ran["caught"]


def test_what_waits_is_built_in_parts(ran: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingBudget, "all_may_wait", lambda *_: False)
    monkeypatch.setattr("gradvac.engine.budget._LEAST_BYTES", 3 * B * S * D * 8)
    monkeypatch.setattr(Graph, "kept_bytes", lambda *_: 0)  # nothing makes room on the way
    overflows: list[int] = []
    overflow = executor.CaughtJunctions._overflow
    monkeypatch.setattr(
        executor.CaughtJunctions, "_overflow", lambda s: (overflows.append(1), overflow(s))[1]
    )
    twins = Twins(small_case(), lambda: GradVac(beta=0.3))
    for tasks in STEPS:
        twins.step(tasks)
    assert ran["caught"]
    assert overflows


def test_sizes_that_change(way: str, ran: Counter[str]) -> None:
    """Every size is planned in Python once."""
    model = small().double()
    reference = copy.deepcopy(model)
    one, other = attach(model, Sum()), Aligner(reference, TASKS, Sum(), engine="per_task")
    for step in range(12):
        rows, length = (6, 8)[step % 2], S
        x, tokens = torch.randn(rows, length, D).double(), torch.randint(40, (rows, length))
        tasks = torch.randint(3, (rows,))
        tasks[:3] = torch.arange(3)
        for each, aligner in ((model, one), (reference, other)):
            each.zero_grad()
            aligner.backward(distance(each(x, tokens)), tasks)
        assert_same_gradients(model, reference, 1e-9)
    assert ran[way] >= 6


def test_a_model_that_changes_its_dtype(way: str, ran: Counter[str]) -> None:
    """Graphs of one structure have one plan, whatever their numbers are."""
    case = small_case(torch.float32)
    twins = Twins(case, Sum, tolerance=1e-3)
    for dtype in (torch.float32, torch.float64, torch.float32):
        twins.case = Case(case.model, case.losses, (case.inputs[0].to(dtype), case.inputs[1]))
        for model in twins.models:
            model.zero_grad()
            model.to(dtype)
        before = ran[way]
        for tasks in STEPS:
            twins.step(tasks)
        assert ran[way] > before


def test_settings_tell_graphs_apart(way: str, ran: Counter[str]) -> None:
    """Whichever way a cube is turned, it has the same sizes; but rows lie elsewhere."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.b(m.a(x).transpose(m.dim, m.dim + 1)).transpose(m.dim, m.dim + 1)
        result: Tensor = m.c(hidden.tanh())
        return result

    parts = {name: nn.Linear(B, B) for name in "abc"}
    case = Case(layers(run, **parts).double(), output, (torch.randn(B, B, B).double(),))
    twins = Twins(case, lambda: GradVac(beta=0.3))
    for step in range(14):
        for model in twins.models:
            model.dim = step // 2 % 2  # type: ignore[assignment]
        twins.step(UNSORTED)
    assert ran[way] >= 6


@pytest.mark.parametrize("run", test_moved_rows.RUNS)
def test_rows_that_an_index_moves(way: str, run: test_moved_rows.Run, ran: Counter[str]) -> None:
    """In order at first: a graph that looks the same may move them in another way."""
    test_moved_rows.test_equals_per_task(run)
    assert not ran["whole"]
    test_moved_rows.test_an_index_that_serves_all_entries()
    assert ran[way] or way == "whole"


def test_hooks_that_begin_later(way: str, ran: Counter[str]) -> None:
    def run(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
        hidden: Tensor = m.a(x).tanh()
        if m.factor != 1.0:
            hidden.register_hook(lambda gradient: m.factor * gradient)
        result: Tensor = m.b(hidden) + m.table(tokens)
        return result

    model = layers(run, a=nn.Linear(D, D), b=nn.Linear(D, D), table=nn.Embedding(9, D)).double()
    reference = copy.deepcopy(model)
    one, other = attach(model, Sum()), Aligner(reference, TASKS, Sum(), engine="per_task")
    x, tokens = torch.randn(B, S, D).double(), torch.randint(9, (B, S))
    for step in range(8):
        for each, aligner in ((model, one), (reference, other)):
            each.factor = 3.0 if step in (5, 6) else 1.0  # type: ignore[assignment]
            each.zero_grad()
            aligner.backward(distance(each(x, tokens)), UNSORTED)
        assert_same_gradients(model, reference, 1e-9)
    assert ran[way] >= 3


def test_a_parameter_that_is_frozen_after_the_forward(way: str, ran: Counter[str]) -> None:
    """Once, and again."""
    case = small_case()
    aligner = attach(case.model, Sum())
    for step in range(9):
        case.model.zero_grad()
        losses = case.losses(case.model, torch.tensor(UNSORTED), *case.inputs)
        is_frozen = 4 <= step < 7
        case.model.b.weight.requires_grad_(not is_frozen)
        aligner.backward(losses, UNSORTED)
        assert (case.model.b.weight.grad is None) == is_frozen
        case.model.b.weight.requires_grad_(True)
    assert ran[way] >= 2


def test_a_batch_of_padding(way: str, ran: Counter[str]) -> None:
    """A table that is looked up for nothing has a gradient of zeros."""
    parts = {"a": nn.Linear(D, D), "b": nn.Linear(D, D)}
    table = nn.Embedding(40, D, padding_idx=3)
    model = layers(lambda m, x, tokens: m.b(m.a(x) + m.table(tokens)), **parts, table=table)
    model.double()
    aligner, x = attach(model, Sum()), torch.randn(B, S, D).double()
    for step in range(8):
        tokens = torch.full((B, S), 3) if step > 3 else torch.randint(40, (B, S))
        model.zero_grad()
        unclean = [torch.full((40, D), 7.0).double() for _ in range(20)]  # memory is used again
        del unclean
        aligner.backward(distance(model(x, tokens)), UNSORTED)
        assert bool(model.table.weight.grad.any()) == (step < 4)
    assert ran[way]


def test_hooks_of_parameters_and_what_is_in_grad(way: str, ran: Counter[str]) -> None:
    twins = Twins(small_case(), Sum)
    seen: list[Tensor] = []
    for tasks in STEPS:
        twins.step(tasks)
    handles = [
        twins.model.a.weight.register_hook(lambda gradient: 2.0 * gradient),
        twins.model.norm.weight.register_post_accumulate_grad_hook(
            lambda parameter: seen.append(parameter.grad)
        ),
    ]
    before = ran[way]
    for model in twins.models:
        for number, parameter in enumerate(model.parameters()):
            if number % 2:
                parameter.grad = torch.full_like(parameter, 0.5)
            if number % 5 == 0:  # as it lies in no gradient of ours
                parameter.grad = torch.ones_like(parameter.t()).t()
    of_rows = torch.tensor(UNSORTED)
    for model, aligner in ((twins.reference, twins.per_task), (twins.model, twins.aligner)):
        aligner.backward(twins.case.losses(model, of_rows, *twins.case.inputs), of_rows)
    assert ran[way] > before
    (mine,) = seen
    assert mine is twins.model.norm.weight.grad
    first, added = twins.model.a.weight, twins.reference.a.weight
    start = 0.5 if first.grad is not None and "a.weight" in _odd(twins.model) else 1.0
    start = start if "a.weight" in _odd(twins.model) or "a.weight" in _fifth(twins.model) else 0.0
    torch.testing.assert_close(first.grad - start, 2.0 * (added.grad - start))
    for handle in handles:
        handle.remove()
    first.grad = added.grad
    assert_same_gradients(twins.model, twins.reference, 1e-9)


def _odd(model: nn.Module) -> list[str]:
    return [n for k, (n, _) in enumerate(model.named_parameters()) if k % 2 and k % 5]


def _fifth(model: nn.Module) -> list[str]:
    return [n for k, (n, _) in enumerate(model.named_parameters()) if k % 5 == 0]


@pytest.mark.filterwarnings("ignore:.*are a parameter")
def test_losses_that_are_a_leaf(ran: Counter[str]) -> None:
    model = layers(lambda m: m.scores, scores=nn.Parameter(torch.randn(B)))
    aligner = Aligner(model, TASKS, Sum())
    for _ in range(3):
        model.zero_grad()
        aligner.backward(model(), UNSORTED)
        assert torch.equal(model.scores.grad, torch.ones(B))
    assert not +ran


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_weights_without_entries(way: str, ran: Counter[str]) -> None:
    """A part of some width whose width is zero here."""
    del way, ran
    parts = {"a": nn.Linear(D, D), "b": nn.Linear(D, 0), "c": nn.Linear(0, D)}
    model = layers(lambda m, x: m.a(x) + m.c(m.norm(m.b(x))), **parts, norm=nn.LayerNorm(0))
    twins = Twins(Case(model.double(), output, (torch.randn(B, S, D).double(),)), GradVac)
    for tasks in STEPS:
        twins.step(tasks)


def test_parameters_may_be_swapped(
    way: str, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `load_state_dict` and `to` do where they are asked to: nothing holds on to them."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    twins = Twins(small_case(), Sum)
    for number, tasks in enumerate(STEPS):
        twins.step(tasks)
        if number == 2:
            assert ran[way]
            halves = {name: 0.5 * value for name, value in twins.model.state_dict().items()}
            for model in twins.models:
                model.load_state_dict(halves)


def test_a_parameter_swapped_for_another_of_the_model(way: str, ran: Counter[str]) -> None:
    """Its address is the other's now: what was known is of neither of them."""
    model = layers(lambda m, x: m.c(getattr(m, m.used)(x).tanh()), **_linear("abc")).double()
    model.used = "a"  # type: ignore[assignment]
    aligner, x = attach(model, Sum()), torch.randn(B, S, D).double()
    for _ in range(5):
        model.zero_grad()
        aligner.backward(distance(model(x)), UNSORTED)
    assert ran[way]
    model.zero_grad()
    swap_tensors(model.a.weight, model.b.weight)
    swap_tensors(model.a.bias, model.b.bias)
    model.used = "b"  # type: ignore[assignment]
    with suppress(NotSeparable):  # hooks do not come with what is swapped
        aligner.backward(distance(model(x)), UNSORTED)
    assert model.a.weight.grad is None


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_compiled_regions(way: str, ran: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps, and scales at which a pass ends; of one length, then of any; noted in anomaly mode."""
    chosen: list[tuple[int, int, int, int]] = []
    choose = executor._choose

    def seen(*given: Any) -> Any:
        catch = choose(*given)
        chosen.extend(catch.given)
        return catch

    monkeypatch.setattr(executor, "_choose", seen)
    model = test_taps.every_rule()
    reference = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend=test_taps.uncompiled)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    aligner = attach(compiled, GradVac(beta=0.3))
    for step in range(15):
        tokens, tasks = torch.randint(0, V, (B, (5, 3, 4)[step // 2 % 3])), STEPS[step % 5]
        with torch.autograd.set_detect_anomaly(step > 11, check_nan=False):
            for each in (model, reference):
                each.zero_grad()
            expected = per_task.backward(distance(reference(tokens)), tasks)
            found = aligner.backward(distance(compiled(tokens)), tasks)
        assert_same_gradients(model, reference, 1e-9)
        assert_same_alignment(found, expected, 1e-9)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            for parameter in (mine, theirs):
                parameter.data.sub_(1e-3 * theirs.grad / (1.0 + theirs.grad.norm()))
    assert not ran["whole"]
    if way == "caught":
        assert ran["caught"] >= 4 * len({number for number, *_ in chosen})
        assert {kind for _, _, kind, *_ in chosen} == {executor._TAP, executor._END}


def test_the_schedule_is_kept(way: str, probes: list[int], ran: Counter[str]) -> None:
    """Steps 1, 2, 10 and 100 verify, in Python."""
    case = small_case()
    aligner = attach(case.model, Sum())
    verified = []
    for step in range(1, 13):
        before = len(probes)
        aligner.backward(case.losses(case.model, torch.tensor(UNSORTED), *case.inputs), UNSORTED)
        if len(probes) > before:
            verified.append(step)
    assert verified == [1, 2, 10]
    assert ran[way]


def test_what_a_verification_refuses(
    way: str, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused from then on, as it is in Python."""
    case = small_case()
    aligner = attach(case.model, Sum())
    for step in range(1, 14):
        losses = case.losses(case.model, torch.tensor(UNSORTED), *case.inputs)
        if step < 10:
            aligner.backward(losses, UNSORTED)
            continue
        before = ran[way]
        with monkeypatch.context() as patch:
            if step == 10:
                patch.setattr("gradvac.engine.planner.probe", _refuse)
            with pytest.raises(NotSeparable, match="they are mixed"):
                aligner.backward(losses, UNSORTED)
        assert ran[way] == before


def _refuse(*_: Any) -> Any:
    raise NotSeparable("they are mixed")


def test_what_is_not_finite(way: str, ran: Counter[str]) -> None:
    """Reaches `.grad`, and leaves no trace in the rule."""
    case = small_case()
    aligner = attach(case.model, GradVac(beta=0.3))
    for step in range(6):
        case.model.zero_grad()
        losses = case.losses(case.model, torch.tensor(UNSORTED), *case.inputs)
        before = aligner.state_dict()
        aligner.backward(losses * (float("nan") if step == 4 else 1.0), UNSORTED)
        after = aligner.state_dict()
        assert (after["step"] == before["step"]) == (step == 4)
        assert torch.equal(after["target"], before["target"]) == (step == 4)
        assert bool(case.model.b.weight.grad.isnan().all()) == (step == 4)
    assert ran[way]


def test_checkpoints_and_saved_tensors_elsewhere(way: str, ran: Counter[str]) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            hidden = m.a(x).tanh()
        result: Tensor = m.c(checkpoint(lambda h: m.b(h).tanh(), hidden, use_reentrant=False))
        return result

    model = layers(run, a=nn.Linear(D, D), b=nn.Linear(D, D), c=nn.Linear(D, 2)).double()
    twins = Twins(Case(model, output, (torch.randn(B, S, D).double(),)), Sum)
    for tasks in STEPS:
        twins.step(tasks)
    assert not ran["whole"]
    assert ran["caught"] > 0 or way == "whole"


def test_hooks_that_begin_during_a_pass(way: str, ran: Counter[str]) -> None:
    """What a node saved may be unpacked by a function in Python."""
    seen: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        hidden: Tensor = m.a(x).tanh()

        def unpack(saved: Tensor) -> Tensor:
            if m.is_watched:
                hidden.register_hook(seen.append)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            above = hidden.exp()
        result: Tensor = m.b(above)
        return result

    model = layers(run, a=nn.Linear(D, D), b=nn.Linear(D, 2)).double()
    aligner, x = attach(model, Sum()), torch.randn(B, S, D).double()
    for step in range(6):
        model.is_watched = step == 5  # type: ignore[assignment]
        model.zero_grad()
        losses = distance(model(x))
        refused = pytest.raises(ValueError, match="GRADVAC_NATIVE=0")
        with refused if model.is_watched and way == "whole" else nullcontext():
            aligner.backward(losses, UNSORTED)
    assert ran[way]
    assert len(seen) == (way == "caught")


def test_gradients_whose_memory_is_copied_when_written(ran: Counter[str]) -> None:
    """By two threads at once, each would copy it."""
    width = 700
    model = layers(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(D, width), b=nn.Linear(width, 900))
    aligner, x = attach(model.double(), Sum()), torch.randn(B, S, D).double()
    for step in range(5):
        model.zero_grad()
        losses = distance(model(x))
        if step == 4:
            alone = torch.autograd.grad(losses.sum(), model.b.weight, retain_graph=True)[0]
            first = torch.ones_like(model.b.weight)
            model.b.weight.grad = torch._lazy_clone(first)
        aligner.backward(losses, UNSORTED)
    assert ran["whole"]
    torch.testing.assert_close(model.b.weight.grad, alone + 1.0)
    assert torch.equal(first, torch.ones_like(first))


def test_rows_that_are_declared_later(way: str, ran: Counter[str]) -> None:
    """The same graph, but its rows are said to be others'."""
    model = nn.Linear(D, 2).double()
    aligner = attach(model, Sum())
    x = torch.randn(B, D).double()
    found = []
    for step in range(6):
        model.zero_grad()
        with gradvac.rows(SORTED if step == 5 else UNSORTED):
            losses = distance(model(x))
        aligner.backward(losses, UNSORTED)
        found.append(model.weight.grad)
    assert not +ran
    del way


def test_a_metric_and_a_rule_of_somebody(way: str, ran: Counter[str]) -> None:
    case = small_case()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    models = [case.model, copy.deepcopy(case.model)]
    optimizers = [optimizer, torch.optim.AdamW(models[1].parameters(), lr=1e-3)]
    aligners = [
        Aligner(model, TASKS, GradVac(), engine=engine, metric=AdamMetric(own))
        for model, own, engine in zip(models, optimizers, ("one_backward", "per_task"), strict=True)
    ]
    for _ in range(5):
        for model, own, aligner in zip(models, optimizers, aligners, strict=True):
            own.zero_grad()
            losses = case.losses(model, torch.tensor(UNSORTED), *case.inputs)
            aligner.backward(losses, UNSORTED)
            own.step()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not ran["whole"]
    assert ran["caught"] or way == "whole"


def test_micro_batches(way: str, ran: Counter[str]) -> None:
    twins = Twins(small_case(), GradVac)
    for tasks in STEPS[:4]:
        twins.step(tasks)
    of_rows = torch.tensor(UNSORTED)
    for model, aligner in ((twins.reference, twins.per_task), (twins.model, twins.aligner)):
        model.zero_grad()
        for accumulate in (True, True, False):
            losses = twins.case.losses(model, of_rows, *twins.case.inputs)
            aligner.backward(losses, of_rows, accumulate=accumulate)
    assert_same_gradients(twins.model, twins.reference, 1e-9)
    assert ran[way]


def test_copies_start_afresh(ran: Counter[str]) -> None:
    case = small_case()
    aligner = attach(case.model, GradVac())
    for _ in range(4):
        aligner.backward(case.losses(case.model, torch.tensor(UNSORTED), *case.inputs), UNSORTED)
    before = ran["whole"]
    assert before
    model, other = copy.deepcopy((nn.ModuleList([case.model]), aligner))
    pickle.loads(pickle.dumps(attach(nn.Linear(2, 2))))
    for _ in range(4):
        losses = case.losses(model[0], torch.tensor(UNSORTED), *case.inputs)
        other.backward(losses, UNSORTED)
    assert ran["whole"] > before


def test_nothing_of_a_graph_is_kept(way: str, ran: Counter[str]) -> None:
    case = small_case()
    aligner = attach(case.model, Sum())
    for _ in range(5):
        losses = case.losses(case.model, torch.tensor(UNSORTED), *case.inputs)
        graph = Graph([losses])
        node = weakref.ref(losses)
        held = weakref.ref(graph)
        gc.collect()
        gc.disable()
        try:
            aligner.backward(losses, UNSORTED)
            del losses, graph
            assert node() is None
            assert held() is None
        finally:
            gc.enable()
    assert ran[way]


def test_an_error_of_the_rule_is_handed_on(way: str, ran: Counter[str]) -> None:
    """As it is, from whichever thread; and the next step goes on."""

    class Refuses(Sum):
        fails = False

        def weigh_finite(self, components: Any, gram: Tensor) -> Any:
            if self.fails:
                raise KeyError("no weights today")
            return super().weigh_finite(components, gram)

    case, rule = small_case(), Refuses()
    aligner = attach(case.model, rule, stream_bytes=1 if way == "caught" else None)
    for step in range(7):
        rule.fails = step == 4
        losses = case.losses(case.model, torch.tensor(UNSORTED), *case.inputs)
        if rule.fails:
            with pytest.raises(KeyError, match="no weights today"):
                aligner.backward(losses, UNSORTED)
        else:
            case.model.zero_grad()
            aligner.backward(losses, UNSORTED)
    expected = copy.deepcopy(case.model)
    expected.zero_grad()
    torch.autograd.backward([case.losses(expected, torch.tensor(UNSORTED), *case.inputs).sum()])
    assert_same_gradients(case.model, expected, 1e-9)
    assert ran[way]


@pytest.mark.parametrize("is_in_cpp", [False, True])
def test_gradients_of_another_dtype_than_their_parameters(
    way: str, ran: Counter[str], *, is_in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch is asked to keep them; the first and those that are added to it."""
    if not is_in_cpp:
        monkeypatch.setattr("gradvac.engine.task_gradients.native", lambda: None)
    case = small_case(torch.float32)
    model, expected = case.model, copy.deepcopy(case.model)
    of_rows, aligner = torch.tensor(UNSORTED), attach(model, Sum())
    for each in (model, expected):
        for weight in (each.b.weight, each.table.weight, each.shift):
            weight.grad_dtype = torch.float64
        each.c.weight.grad_dtype = None  # any
    for step in range(6):
        if step % 2 == 0:
            model.zero_grad(), expected.zero_grad()
        aligner.backward(case.losses(model, of_rows, *case.inputs), of_rows)
        torch.autograd.backward([case.losses(expected, of_rows, *case.inputs).sum()])
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert ran[way]


def test_losses_that_are_detached_meanwhile(way: str, ran: Counter[str]) -> None:
    """By a rule; nobody but the pass holds on to the graph then."""

    class Detaches(Sum):
        losses: Tensor | None = None

        def weigh_finite(self, components: Any, gram: Tensor) -> Any:
            if self.losses is not None:
                self.losses.detach_()
            return super().weigh_finite(components, gram)

    every = [nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh()) for _ in range(9)]
    model, x, rule = nn.Sequential(*every).double(), torch.randn(B, D).double(), Detaches()
    aligner = attach(model, rule, stream_bytes=1 if way == "caught" else None)
    for step in range(7):
        model.zero_grad()
        losses = distance(model(x))
        rule.losses = losses if step > 3 else None
        aligner.backward(losses, UNSORTED)
    expected = copy.deepcopy(model)
    expected.zero_grad()
    torch.autograd.backward([distance(expected(x)).sum()])
    assert_same_gradients(model, expected, 1e-9)
    assert ran[way]


def test_a_walk_keeps_its_nodes(kernels: Any) -> None:
    """Whatever becomes of the losses; and no longer than it is kept."""
    hidden = nn.Linear(D, D)(torch.randn(B, D)).exp()
    losses, held = hidden.square().sum(1), weakref.ref(hidden)
    walk = kernels.Walk(losses)
    del hidden
    losses.detach_()
    assert held() is not None
    assert walk.node(1).name() == "PowBackward0"
    del walk
    assert held() is None


def _graph(of: Tensor) -> list[object]:
    """All nodes, and where their edges go."""
    nodes: dict[Any, object] = {of.grad_fn: None}
    for node in (waiting := list(nodes)):
        nodes[node] = node.next_functions
        waiting += [child for child, _ in node.next_functions if child and child not in nodes]
    return list(nodes.items())


def test_a_pass_leaves_the_graph_as_it_was(way: str, ran: Counter[str]) -> None:
    """But for what it saved, so that another pass says that the first used it up."""
    case = small_case()
    aligner, parameters = attach(case.model, GradVac()), list(case.model.parameters())
    for _ in range(5):
        losses = distance(case.model(*case.inputs))
        before = _graph(losses)
        aligner.backward(losses, UNSORTED)
        assert _graph(losses) == before
    assert ran[way]
    given = copy.deepcopy([parameter.grad for parameter in parameters])
    with pytest.raises(RuntimeError, match="a second time"):
        losses.sum().backward()
    torch.testing.assert_close(given, [parameter.grad for parameter in parameters])


def test_nodes_at_which_a_pass_ends_keep_nothing(ran: Counter[str]) -> None:
    """As after a pass of torch's: what they saved is free, and they cannot be passed again."""
    model = layers(lambda m, x, image: m.a(x) + m.conv(image).mean((2, 3)), **_linear("a"))
    model.conv = nn.Conv2d(1, D, 2)  # which Python builds
    model.double()
    aligner = attach(model, Sum())
    for _ in range(5):
        features = [torch.randn(B, D).double().sin(), torch.randn(B, 1, 3, 3).double().sin()]
        alive = [weakref.ref(one) for one in features]
        losses = distance(model(*features))
        del features
        aligner.backward(losses, UNSORTED)
    assert ran["whole"]
    assert [one() for one in alive] == [None, None]
    with pytest.raises(RuntimeError, match="a second time"):
        losses.sum().backward()


def test_losses_that_share_a_trunk(way: str, ran: Counter[str]) -> None:
    """It saved nothing, so that every loss may have a backward of its own; also in threads."""
    heads = [
        layers(lambda m, h: m.b(m.a(h).tanh()), p=nn.Parameter(torch.ones(D)), **_linear("ab"))
    ]
    heads.append(copy.deepcopy(heads[0]))
    heads[1].p = heads[0].p
    for head in heads:
        head.double()
    aligners, x = [attach(head, Sum()) for head in heads], torch.randn(B, D).double()
    with ThreadPoolExecutor(2) as pool:
        for step in range(40):
            hidden = x + heads[0].p
            losses = [distance(head(hidden)) for head in heads]
            plain = [head(x + head.p) for head in heads]
            expected = torch.autograd.grad(
                [*map(distance, plain), hidden.sum()],
                heads[0].p,
                [torch.ones(B).double()] * 2 + [None],
            )[0]
            run = pool.map if way == "whole" and step > 20 else map
            list(run(lambda aligner, of: aligner.backward(of, UNSORTED), aligners, losses))
            hidden.sum().backward()
            torch.testing.assert_close(heads[0].p.grad, expected)
            heads[0].p.grad = None
    assert ran[way] > 40


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own
@pytest.mark.parametrize("is_traced", [False, True], ids=["anomaly", "compiled_autograd"])
def test_anomaly_mode_and_compiled_autograd(way: str, is_traced: bool, ran: Counter[str]) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double()
    aligner, x = attach(model, Sum()), torch.randn(B, D).double()
    for step in range(8):
        model.zero_grad()
        plain_backward(distance(model(x)))
        expected, before = gradients_of(model), ran[way]
        model.zero_grad()
        losses = distance(model(x))
        traced = compiled_autograd._enable(lambda graph: graph) if is_traced else nullcontext()
        with (
            traced if step == 5 else nullcontext(),
            set_detect_anomaly(step == 5 and not is_traced),
        ):
            aligner.backward(losses, UNSORTED)
        torch.testing.assert_close(gradients_of(model), expected)
        if step > 3:
            is_python = step == 5 and not is_traced and way == "whole"
            assert (ran[way] == before) == is_python


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's own
def test_sparse_gradients_meet_dense_ones(way: str, ran: Counter[str]) -> None:
    """One that others still hold, so that nothing is added in place."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.c(x).tanh()
        hidden, other = m.a(x).tanh(), m.b(x)
        picked = hidden.gather(1, torch.zeros(B, 1, dtype=torch.int64), sparse_grad=True).sin()
        result: Tensor = hidden + other + picked
        return result

    case = Case(layers(run, **_linear("abc")).double(), output, (torch.randn(B, D).double(),))
    twins = Twins(case, lambda: GradVac(beta=0.3))
    for tasks in STEPS:
        twins.step(tasks)
    assert ran[way] >= 3


def test_a_pass_that_fails_leaves_nothing(way: str, ran: Counter[str]) -> None:
    """Somebody wrote over what was saved, sees the error, and goes on with the next batch."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.a(x).exp()
        saved = m.c(m.b(hidden * 0.1).tanh()).tanh()
        if m.spoils:
            with torch.no_grad():
                hidden.add_(1.0)
        m.seen.append(weakref.ref(saved))
        result: Tensor = m.d(saved)
        return result

    model = layers(run, **_linear("abcd")).double()
    model.spoils, model.seen = False, []  # type: ignore[assignment]
    aligner, x = attach(model, GradVac()), torch.randn(B, S, D).double()
    for step in range(9):
        model.spoils = step in (4, 5, 7)  # type: ignore[assignment]
        losses = distance(model(x))
        if model.spoils:
            before = _graph(losses)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                aligner.backward(losses, UNSORTED)
            assert _graph(losses) == before
        else:
            aligner.backward(losses, UNSORTED)
    del losses
    gc.collect()
    assert ran[way]
    assert not [one for one in model.seen if one() is not None]


def test_trainings_in_threads(way: str, ran: Counter[str]) -> None:
    def train(seed: int) -> bool:
        torch.manual_seed(seed)
        twins = Twins(small_case(), GradVac)
        for _ in range(6):
            for tasks in STEPS:
                twins.step(tasks)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(train, range(2)))
    assert ran[way]


def test_a_plan_of_another_graph_is_not_executed(kernels: Any) -> None:
    """Whatever it is given, it says so instead of reading it."""
    first, other = nn.Linear(D, 3), nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3))
    x, index = torch.randn(B, D), torch.tensor(UNSORTED)
    walks = [kernels.Walk(distance(model(x))) for model in (first, other)]
    place = next(n for n in range(9) if walks[0].node(n).name() == "AddmmBackward0")
    given = (0, place, 0, 1, True, 2, -1, 0)
    parameters = [first.weight, first.bias]

    def run(junction: tuple[Any, ...], walk: Any, tasks: Tensor = index, num: int = 3) -> Any:
        plan = kernels.Plan([junction], parameters, [0, 0], 1, [])
        assert plan.run([first.weight, other[1].bias], walk, [tasks], num) is None
        assert plan.run(parameters[:1], walk, [tasks], num) is None
        return plan.run(parameters, walk, [tasks], num)

    def changed(**other: Any) -> tuple[Any, ...]:
        names = ("kind", "place", "weight", "shift", "is_transposed", "edge", "below", "rows")
        return tuple(other.get(n, v) for n, v in zip(names, given, strict=True))

    for place_there in range(8):
        if walks[1].node(place_there).name() != "AddmmBackward0":
            assert run(changed(place=place_there), walks[1]) is None
    for kind in range(1, 6):
        assert run(changed(kind=kind), walks[0]) is None
    for wrong in (changed(weight=1), changed(shift=0), changed(place=99), changed(place=-1)):
        assert run(wrong, walks[0]) is None
    assert run(given, walks[0], index, 2) is None  # a task outside
    assert run(given, walks[0], index[:4]) is None
    assert run(given, walks[0], index.int()) is None
    for beside in (99, -1):
        plan = kernels.Plan([given], parameters, [0, 0], 1, [beside])
        assert plan.run(parameters, walks[0], [index], 3) is None
    step = run(given, walks[0])
    assert step.grams().shape == (1, 3, 3)
    with pytest.raises(ValueError, match="built"):
        step.add(1, torch.ones(3, 4))
    with pytest.raises(ValueError, match="weights"):
        step.apply(torch.ones(2, 3), [])
    assert step.apply(torch.ones(1, 3, dtype=torch.float64), []) == []
    mine = first.weight.grad.clone()
    first.zero_grad()
    torch.autograd.backward([distance(first(x)).sum()])
    torch.testing.assert_close(mine, first.weight.grad)

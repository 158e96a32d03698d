"""When task gradients are formed, how long they are held, and what is never formed."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

from gradvac import GradVac
from gradvac.engine import (
    budget,
    contributions,
    pairs_of_entries,
    plain_junctions,
    task_gradients,
)
from gradvac.engine.compiled import split_and_compile
from gradvac.engine.contributions import Lookup, OuterProduct
from gradvac.engine.kernels import Segments
from gradvac.engine.pairs_of_entries import gram_of_entries
from gradvac.engine.task_gradients import ParameterGradients, TaskGradients

from .parity import (
    ONE_ABSENT,
    SORTED,
    TASKS,
    UNSORTED,
    Twins,
    assert_same_alignment,
    assert_same_gradients,
    attach,
    made,
)
from .zoo._case import B, Block, Case, D, Model, S, distance, output


def rule() -> GradVac:
    return GradVac(beta=0.3)


class Held:
    """Spies on task gradients: the largest number of bytes that those alive had at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.num_weighed = 0, 0
        self.alive: WeakSet[ParameterGradients] = WeakSet()
        weigh = TaskGradients._weigh_ready

        def spied(take: Callable[..., None]) -> Any:
            def spy(gradients: ParameterGradients, *given: Any) -> None:
                take(gradients, *given)
                self.alive.add(gradients)
                self.most = max(self.most, sum(one.nbytes for one in self.alive))

            return spy

        def spy_weigh(gradients: Any) -> None:
            weigh(gradients)
            self.num_weighed += 1

        for name in ("add", "add_stack", "begin"):
            monkeypatch.setattr(ParameterGradients, name, spied(getattr(ParameterGradients, name)))
        monkeypatch.setattr(TaskGradients, "_weigh_ready", spy_weigh)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


@pytest.fixture
def deep() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(6))).double()


def backward(model: nn.Module, **options: Any) -> None:
    aligner = attach(model, rule(), check=False, **options)
    losses = distance(model(torch.randn(B, S, D, dtype=torch.float64)))
    aligner.backward(losses, UNSORTED)


def bytes_of(model: nn.Module) -> int:
    """Of the task gradients."""
    return len(TASKS) * sum(p.nbytes for p in model.parameters())


def test_holds_one_component_at_a_time(held: Held, deep: nn.Sequential) -> None:
    backward(deep, stream_bytes=1)
    assert held.most == bytes_of(deep[0])
    assert held.num_weighed >= len(deep)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.usefixtures("_fresh_compiler")
def test_layers_that_are_compiled_are_complete_one_by_one(held: Held, deep: nn.Sequential) -> None:
    """Scales and shifts too, where a pass ends."""
    for block in deep:
        block.compile(backend=partial(split_and_compile, compile_inside=aot_eager))
    backward(deep, stream_bytes=1)  # compiling registers hooks
    held.most = held.num_weighed = 0
    backward(deep, stream_bytes=1)
    assert held.most == bytes_of(deep[0])
    assert held.num_weighed >= len(deep)


def test_components_that_fit_are_weighed_together(held: Held, deep: nn.Sequential) -> None:
    backward(deep)
    assert held.most == bytes_of(deep)
    assert held.num_weighed == 1


def test_waits_for_as_many_components_as_asked(held: Held, deep: nn.Sequential) -> None:
    backward(deep, stream_bytes=2 * bytes_of(deep[0]))
    assert held.most == 2 * bytes_of(deep[0])
    assert held.num_weighed == 4  # three pairs, and the end


def test_whole_model_holds_all_task_gradients(held: Held, deep: nn.Sequential) -> None:
    backward(deep, granularity="whole_model", stream_bytes=1)
    assert held.most == bytes_of(deep)


def test_second_backward_holds_one_layer_at_a_time(held: Held, deep: nn.Sequential) -> None:
    backward(deep, granularity="whole_model", recompute=True)
    layers = [layer for layer in deep.modules() if isinstance(layer, nn.Linear)]
    assert held.most == max(map(bytes_of, layers))


def test_nothing_is_left_after_a_step(held: Held, deep: nn.Sequential) -> None:
    backward(deep)
    assert held.most > 0
    assert not any(one.has_begun or one.nbytes for one in held.alive)


TABLES = [
    "tied_softmax",
    "tied_across_encoder_and_decoder",
    "fallback_shares_with_fast_path",
    "broadcast_positions",
    "checkpointed_not_reentrant",
    "packed",
    "m2m100",
]


@pytest.fixture(params=[1, 4, 1000, "pairs of entries"])
def of_tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices of large tables are taken by slices of so many rows, or by pairs of entries."""
    if isinstance(request.param, int):
        row_bytes = len(TASKS) * D * 8
        monkeypatch.setattr(task_gradients, "_CHUNK_BYTES", [request.param * row_bytes])
        monkeypatch.setattr(contributions, "_ENTRY_COST", [-(1 << 40)])
    else:
        monkeypatch.setattr(pairs_of_entries, "_AT_ONCE", 40)
        monkeypatch.setattr(contributions, "_ENTRY_COST", [1 << 40])


@pytest.mark.usefixtures("of_tables")
@pytest.mark.parametrize("granularity", ["all_layer", "whole_model"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_not_built(name: str, granularity: str) -> None:
    twins = Twins(made(name), rule, granularity=granularity, table_bytes=1)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)
    assert all(p.grad is None or p.grad.grad_fn is None for p in twins.model.parameters()), (
        "the update holds on to the graph"
    )


def test_a_table_above_the_limit_is_never_formed(held: Held) -> None:
    """A tied table of 40 rows, where 20 would be allowed."""
    words, block, head = nn.Embedding(40, D), Block(), nn.Linear(D, 40, bias=False)
    head.weight = words.weight
    model = nn.Sequential(words, block, head).double()
    aligner = attach(model, rule(), check=False, table_bytes=20 * len(TASKS) * D * 8)
    aligner.backward(distance(model(torch.randint(0, 40, (B, S)))), UNSORTED)
    assert held.most == bytes_of(block)


@pytest.mark.parametrize("cost", [0, 1 << 40])
def test_a_head_is_not_formed_where_pairs_of_entries_take_less(
    cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far below the limit, but beyond the share of the step that may wait."""
    monkeypatch.setattr(contributions, "_ENTRY_COST", [cost])
    monkeypatch.setattr(budget, "_LEAST_BYTES", 0)
    words, block, head = nn.Embedding(200, D), Block(), nn.Linear(D, 200, bias=False)
    head.weight = words.weight
    tokens, model = torch.randint(0, 200, (B, S)), nn.Sequential(words, block, head).double()
    twins = Twins(Case(model, output, (tokens,)), rule, check=False)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)
    held = Held(monkeypatch)
    twins.aligner.backward(distance(twins.model(tokens)), UNSORTED)
    assert held.most == bytes_of(block) + (0 if cost else bytes_of(words))


@pytest.mark.parametrize("is_room", [False, True])
def test_what_an_unbuilt_head_keeps_counts_as_waiting(is_room: bool) -> None:
    """The gradient of its output is large: it is weighed at once where there is no room for it."""
    head, weighed = nn.Parameter(torch.randn(40, D)), list[int]()

    def weigh(components: Any, grams: Tensor) -> Tensor:
        weighed.extend(components)
        return grams.new_ones(1, len(TASKS))

    segments = Segments(torch.tensor(UNSORTED), len(TASKS), torch.device("cpu"))
    use = OuterProduct(torch.randn(len(UNSORTED), 40), torch.randn(len(UNSORTED), D), segments)
    most = use.left.nbytes + use.right.nbytes + is_room
    gradients = TaskGradients([[head]], table_bytes=1)
    gradients.begin(weigh, lambda *_: None, budget=budget.WaitingBudget(most))
    gradients.add(head, use)
    gradients.component_done(0)
    assert weighed == ([] if is_room else [0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_lookup_by_slices_is_the_whole_one(dtype: torch.dtype) -> None:
    """A frequent token's small values are not lost in 16 bits."""
    tasks, tokens = torch.tensor(UNSORTED), torch.randint(0, 5, (len(UNSORTED) * 500,))
    values = torch.rand(len(tokens), 3).to(dtype)
    segments = Segments(tasks, len(TASKS), torch.device("cpu"))
    use = Lookup(values, tokens, 7, segments)
    expected = torch.zeros(len(TASKS), 7, 3).double()
    places = (tasks.repeat_interleave(500), tokens)
    expected = expected.index_put(places, values.double(), accumulate=True)
    close = {"rtol": 1e-12, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 5e-3, "atol": 0}
    torch.testing.assert_close(use.task_gradients().double(), expected, **close)
    for start, end in ((0, 3), (3, 4), (4, 7)):
        found = use.slice(start, end).double()
        torch.testing.assert_close(found, expected[:, start:end], **close)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 24])
@pytest.mark.parametrize("kinds", ["product", "lookup", "product lookup lookup", "product product"])
def test_gram_matrices_by_pairs_of_entries(
    kinds: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of contributions of any tasks to one table, some of which have no entry."""
    monkeypatch.setattr(pairs_of_entries, "_AT_ONCE", at_once)
    monkeypatch.setattr(contributions, "_ENTRY_COST", [1 << 40])
    every: list[OuterProduct | Lookup] = []
    for number, kind in enumerate(kinds.split()):
        tasks = torch.randint(0, 3, (7 + number,)) + number % 2
        segments, right = Segments(tasks, 5, torch.device("cpu")), torch.randn(2 * len(tasks), 3)
        if kind == "lookup":
            every.append(Lookup(right.double(), torch.randint(0, 6, (len(right),)), 11, segments))
        else:
            every.append(
                OuterProduct(torch.randn(len(right), 11).double(), right.double(), segments)
            )
    every.append(Lookup(torch.zeros(0, 3).double(), torch.zeros(0).long(), 11, every[0].segments))
    gradients = torch.stack([one.task_gradients() for one in every[:-1]]).sum(0).flatten(1)
    found = gram_of_entries(every)
    assert found is not None
    torch.testing.assert_close(found, gradients @ gradients.t(), rtol=1e-12, atol=1e-12)


def test_weights_of_lookups_keep_their_digits() -> None:
    """Of 16-bit values too, for which 1.003 is 1."""
    segments = Segments(torch.tensor(UNSORTED), len(TASKS), torch.device("cpu"))
    values, weights = torch.randn(len(UNSORTED), D).bfloat16(), torch.tensor([1.003, 1.001, 1.0005])
    use = Lookup(values, torch.arange(len(UNSORTED)), 7, segments)
    torch.testing.assert_close(use.weighted(weights)[:-1], values * weights[UNSORTED][:, None])


@pytest.mark.parametrize("between", [0, 3 * D, 5])
def test_lookups_are_added_where_task_gradients_lie(between: int) -> None:
    """Rows between those of two tasks, as padded products leave them, are no reason for a copy."""
    segments = Segments(torch.tensor(UNSORTED), len(TASKS), torch.device("cpu"))
    use = Lookup(torch.randn(len(UNSORTED), D), torch.randint(0, 7, (len(UNSORTED),)), 7, segments)
    padded = torch.zeros(len(TASKS), 7 * D + between)
    gradients = ParameterGradients(nn.Parameter(torch.randn(7, D)), 0, 1 << 32)
    gradients.begin(padded[:, : 7 * D])
    gradients.add(use)
    torch.testing.assert_close(gradients.dense(), use.task_gradients())
    assert not padded[:, 7 * D :].any()
    assert (gradients.dense().data_ptr() == padded.data_ptr()) == (not between % D)


@pytest.mark.parametrize("size", [1.0, 1e-24, 1e15])
def test_pairs_of_entries_that_cancel_out(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a ten-thousandth, and of any size: without a GPU products are taken in float64."""
    monkeypatch.setattr(contributions, "_ENTRY_COST", [1 << 40])
    half, right = torch.randn(32, 200), torch.randn(32, D)
    left = torch.cat([half, -half + 1e-4 * torch.randn(32, 200)]) * size
    tasks = torch.arange(32).repeat(2) % 2
    segments, right = Segments(tasks, 2, torch.device("cpu")), right.repeat(2, 1)
    found = gram_of_entries([OuterProduct(left, right, segments)])
    exact = OuterProduct(left.double(), right.double(), segments).task_gradients().flatten(1)
    assert found is not None
    torch.testing.assert_close(found, exact @ exact.t(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("at_once", [5, 2])
def test_products_of_equal_shape_are_taken_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the sums of all shifts and scales: a few launches for a whole model."""
    formed: list[int] = []
    build = plain_junctions.outer_products

    def spy(lefts: Any, *given: Any) -> Any:
        formed.append(len(lefts))
        return build(lefts, *given)

    monkeypatch.setattr(plain_junctions, "outer_products", spy)
    monkeypatch.setattr(
        plain_junctions, "_JOINED_BYTES", ((1 << 17, at_once * 2 * B * S * D * 8),) * 2
    )
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(5))).double()
    twins = Twins(Case(model, output, (torch.randn(B, S, D).double(),)), rule)
    for tasks in (UNSORTED, [0, 1, 2, 0, 1, 2], SORTED):
        twins.step(tasks)
    assert formed == 3 * ([5] if at_once == 5 else [2, 2, 1])


def test_a_table_of_which_few_rows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task gradients of the batch's tokens alone, whichever they are and however often used."""
    words = nn.Embedding(400, D, padding_idx=3)

    def run(m: Any, tokens: Tensor) -> Tensor:
        result: Tensor = m.block(m.words(tokens) + m.words(tokens.flip(1) // 2))
        return result

    model = Model(run, words=words, block=Block()).double()
    tokens = torch.randint(0, 400, (B, S))
    tokens[:, 0] = 3
    twins = Twins(Case(model, output, (tokens,)), rule, check=False)
    for tasks in (UNSORTED, SORTED, ONE_ABSENT):
        twins.step(tasks)
    held = Held(monkeypatch)
    twins.aligner.backward(distance(twins.model(tokens)), UNSORTED)
    assert held.most < len(TASKS) * words.weight.nbytes


class Sizes(TorchDispatchMode):
    """The numbers of entries of all tensors that operations gave."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found.add(result.numel())
        return result


ROWS = 400  # of tables of which a batch has few


def once(m: Any, tokens: Tensor) -> Tensor:
    result: Tensor = m.block(m.words(tokens))
    return result


def twice(m: Any, tokens: Tensor) -> Tensor:
    result: Tensor = m.block(m.words(tokens) + m.words(tokens.flip(1) // 2))
    return result


def by_index(m: Any, tokens: Tensor) -> Tensor:
    result: Tensor = m.block(m.words.weight[tokens - 1] + m.words(tokens))
    return result


def transposed(m: Any, tokens: Tensor) -> Tensor:
    """The gradient of what is looked up lies column by column."""
    same = torch.eye(D, dtype=torch.float64)[..., None]
    words = F.embedding(tokens[:, 1], m.words.weight)
    found = F.conv1d(words.t()[None], same)[0]
    result: Tensor = m.block(found.tanh().square().mean(0)[:, None, None].expand(-1, S, D))
    return result


def looked_up(run: Callable[..., Tensor], length: int = S) -> tuple[nn.Module, Callable[[], Case]]:
    """A model with a table, and batches that have few rows of it, some of them often."""
    model = Model(run, words=nn.Embedding(ROWS, D, padding_idx=3), block=Block()).double()

    def batch() -> Case:
        some = torch.randperm(ROWS)[:12]
        tokens = some[torch.randint(0, len(some), (B, length))]
        tokens[:, 0] = 3
        return Case(model, output, (tokens,))

    return model, batch


@pytest.mark.usefixtures("of_tables")
@pytest.mark.parametrize("granularity", ["all_layer", "whole_model"])
@pytest.mark.parametrize("run", [once, twice, by_index])
def test_a_table_above_the_limit_of_which_few_rows_are_used(
    run: Callable[..., Tensor], granularity: str
) -> None:
    """Slices of the batch's rows, not of the table; tokens and tasks change from step to step."""
    _, batch = looked_up(run)
    twins = Twins(batch(), rule, granularity=granularity, table_bytes=1)
    for tasks in (UNSORTED, ONE_ABSENT, SORTED, UNSORTED, ONE_ABSENT):
        twins.case = batch()
        twins.step(tasks)
        for model in twins.models:
            model.zero_grad()


def also_the_head(m: Any, tokens: Tensor) -> Tensor:
    return F.linear(twice(m, tokens), m.words.weight)


class LookupKernels:
    """Stands in for `lookup_kernels.py`, which needs a GPU (gpu_checks.py)."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def add_rows(self, gradients: Tensor, keys: Tensor, rows: Tensor, start: int) -> None:
        self.called.add("add_rows")
        assert rows.is_contiguous(), "as it is read"
        num_tasks, size, _ = gradients.shape
        for key, row in zip(keys.tolist(), rows, strict=True):
            if key >= 0 and start <= key // num_tasks < start + size:
                gradients[key % num_tasks, key // num_tasks - start] += row

    def gram_of_rows(self, keys: Tensor, rows: Tensor, num_tasks: int) -> Tensor:
        self.called.add("gram_of_rows")
        assert rows.is_contiguous(), "as it is read"
        used = int((keys >= 0).sum())
        assert keys[:used].unique().equal(keys[:used]), "ascending, each once"
        is_same = keys[:used, None] // num_tasks == keys[:used] // num_tasks
        products = (rows[:used] @ rows[:used].t()) * is_same
        tasks = F.one_hot(keys[:used] % num_tasks, num_tasks).to(rows.dtype)
        return tasks.t() @ products @ tasks


@pytest.mark.parametrize("granularity", ["all_layer", "whole_model"])
@pytest.mark.parametrize("table_bytes", [1, 1 << 32])
@pytest.mark.parametrize("run", [once, twice, by_index, transposed, also_the_head])
def test_lookups_as_on_a_gpu(
    run: Callable[..., Tensor],
    table_bytes: int,
    granularity: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a table that is only looked up nothing is built, whatever its size."""
    kernels = LookupKernels()
    monkeypatch.setattr(contributions, "_kernels", lambda *_: kernels)
    monkeypatch.setattr(contributions, "_FEW_BYTES", 0)
    monkeypatch.setattr(contributions, "_ENTRY_COST", [-(1 << 40)])  # no pairs of entries
    monkeypatch.setattr(task_gradients, "_CHUNK_BYTES", [7 * len(TASKS) * D * 8])
    _, batch = looked_up(run)
    twins = Twins(batch(), rule, granularity=granularity, table_bytes=table_bytes)
    for tasks in (UNSORTED, ONE_ABSENT, SORTED):
        twins.case = batch()
        twins.step(tasks)
        for model in twins.models:
            model.zero_grad()
    is_split = table_bytes == 1 and run is also_the_head
    expected = {"add_rows"} if is_split else set() if run is also_the_head else {"gram_of_rows"}
    assert kernels.called == expected


@pytest.mark.parametrize("length", [S, 80])
@pytest.mark.parametrize("options", [{}, {"table_bytes": 1}], ids=["below", "above"])
@pytest.mark.parametrize("run", [once, twice, by_index])
def test_task_gradients_of_rows_that_no_token_has_are_not_formed(
    run: Callable[..., Tensor], options: dict[str, int], length: int
) -> None:
    """Below and above the limit; also where few rows have many tokens."""
    model, batch = looked_up(run, length)
    aligner = attach(model, rule(), **options)
    for _ in range(3):
        losses = output(model, torch.tensor(UNSORTED), *batch().inputs)
        with Sizes() as sizes:
            aligner.backward(losses, UNSORTED)
        assert ROWS * D in sizes.found  # the update
        assert len(TASKS) * ROWS * D not in sizes.found


@pytest.mark.parametrize("options", [{}, {"table_bytes": 1}], ids=["below", "above"])
def test_many_lookups_of_few_rows_may_have_many(options: dict[str, int]) -> None:
    """Each has few rows, but not all together: no more is formed than the table's."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        found = [m.words((tokens + 40 * number) % ROWS) for number in range(10)]
        result: Tensor = m.block(torch.stack(found).sum(0))
        return result

    model = Model(run, words=nn.Embedding(ROWS, D), block=Block()).double()
    tokens = torch.arange(B * 20).view(B, 20)
    twins = Twins(Case(model, output, (tokens,)), rule, **options)
    for tasks in (UNSORTED, SORTED, ONE_ABSENT):
        twins.step(tasks)
    losses = output(twins.model, torch.tensor(UNSORTED), tokens)
    with Sizes() as sizes:
        twins.aligner.backward(losses, UNSORTED)
    assert max(sizes.found) <= len(TASKS) * ROWS * D


@pytest.mark.parametrize("table_bytes", [1, 1 << 32])
def test_few_rows_over_micro_batches(table_bytes: int) -> None:
    _, batch = looked_up(twice)
    twins = Twins(batch(), rule, table_bytes=table_bytes)
    tasks = torch.tensor(UNSORTED)
    for _ in range(3):
        (tokens,) = batch().inputs
        results = []
        for model, aligner in ((twins.reference, twins.per_task), (twins.model, twins.aligner)):
            model.zero_grad()
            early, late = output(model, tasks[:2], tokens[:2]), output(model, tasks[2:], tokens[2:])
            aligner.backward(early, tasks[:2], accumulate=True)
            results.append(aligner.backward(late, tasks[2:]))
        assert_same_alignment(results[1], results[0], 1e-9)
        assert_same_gradients(twins.model, twins.reference, 1e-9)


@pytest.mark.parametrize("table_bytes", [1, 1 << 32])
def test_a_lookup_without_tokens(table_bytes: int) -> None:
    def run(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
        result: Tensor = m.block(x + m.words(tokens).sum(1))
        return result

    model = Model(run, words=nn.Embedding(ROWS, D), block=Block()).double()
    inputs = (torch.randn(B, D).double(), torch.zeros(B, 0, dtype=torch.int64))
    twins = Twins(Case(model, output, inputs), rule, table_bytes=table_bytes)
    twins.step(UNSORTED)


@pytest.mark.parametrize("table_bytes", [1, 1 << 32])
@pytest.mark.parametrize("num_rows", [ROWS, 12])
def test_tokens_of_32_bits(num_rows: int, table_bytes: int) -> None:
    model = Model(once, words=nn.Embedding(num_rows, D), block=Block()).double()
    tokens = torch.randint(0, num_rows, (B, S), dtype=torch.int32)
    twins = Twins(Case(model, output, (tokens,)), rule, table_bytes=table_bytes)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)


@pytest.mark.usefixtures("of_tables")
@pytest.mark.parametrize("granularity", ["all_layer", "whole_model"])
def test_a_large_table_whose_task_gradients_come_formed_as_well(granularity: str) -> None:
    """After those of a lookup, which must not be added to them twice."""

    def run(m: Any, x: Tensor, tokens: Tensor) -> Tensor:
        early = torch.tanh(F.linear(x, 2 * m.words.weight))
        result: Tensor = m.block(m.back(early)) + m.words(tokens)
        return result

    model = Model(run, words=nn.Embedding(40, D), back=nn.Linear(40, D), block=Block()).double()
    inputs = (torch.randn(B, S, D).double(), torch.randint(0, 40, (B, S)))
    twins = Twins(Case(model, output, inputs), rule, granularity=granularity, table_bytes=1)
    for tasks in (UNSORTED, SORTED, ONE_ABSENT, [1] * B):
        twins.step(tasks)


def test_reused_weights_are_weighed_once(held: Held) -> None:
    """A block called twice is complete after its second use, not after its first."""
    block = Block()
    model = nn.Sequential(block, nn.Tanh(), block).double()
    plain = copy.deepcopy(model)
    aligner = attach(model, rule(), check=False, stream_bytes=1)
    tasks, x = torch.tensor(UNSORTED), torch.randn(B, S, D, dtype=torch.float64)
    alignment = aligner.backward(distance(model(x)), tasks)
    losses = distance(plain(x))
    gradients = [
        torch.autograd.grad(losses[tasks == t].sum(), list(plain.parameters()), retain_graph=True)
        for t in range(len(TASKS))
    ]
    stacked = torch.stack([torch.cat([g.flatten() for g in own]) for own in gradients])
    torch.testing.assert_close(alignment.gram.sum(0), stacked @ stacked.T)
    assert held.num_weighed == len(alignment.components) + 1  # each once, and the end

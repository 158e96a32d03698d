"""What a probe found and a later batch changes, in a graph of the same structure."""

# B rows, D width

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gradvac import Aligner, Sum
from gradvac.engine import layouts, one_backward
from gradvac.engine.passes import ReachedNodes

from .parity import TASKS, UNSORTED, WEIGHTS, assert_same_gradients
from .zoo._case import B, D, Model, S, distance

Run = Callable[[Any, Tensor, bool], Tensor]
CASES: dict[str, tuple[Run, tuple[int, ...], str]] = {}
LATER = torch.tensor([2, 0, 1, 5, 3, 4])  # rows are in order in the batches that are probed


def case(shape: tuple[int, ...] = (B, D), engine: str = "one_backward") -> Callable[[Run], Run]:
    def keep(run: Run) -> Run:
        CASES[run.__name__] = (run, shape, engine)
        return run

    return keep


def permutation(is_later: bool) -> Tensor:
    return torch.eye(B, dtype=torch.float64)[LATER if is_later else torch.arange(B)]


def there_and_back(m: Any, x: Tensor, move: Callable[[Tensor, Tensor], Tensor], how: Tensor) -> Any:
    """Rows in another order through a layer, by an operation that may do anything to them."""
    moved = m.middle(move(m.first(x), how)).tanh()
    return m.last(move(moved, how.T))


@case()
def by_masks_and_sums(m: Any, x: Tensor, is_later: bool) -> Any:
    how = permutation(is_later)
    return there_and_back(m, x, lambda y, p: (y[None] * p[:, :, None]).sum(1), how)


@case()
def by_masks_and_maxima(m: Any, x: Tensor, is_later: bool) -> Any:
    def move(y: Tensor, p: Tensor) -> Tensor:
        return y.expand(B, B, D).masked_fill(p[:, :, None] == 0, -1e9).amax(1)

    return there_and_back(m, x, move, permutation(is_later))


@case()
def by_a_stack_of_masked_sums(m: Any, x: Tensor, is_later: bool) -> Any:
    def move(y: Tensor, p: Tensor) -> Tensor:
        return torch.stack([(y * p[row][:, None]).sum(0) for row in range(B)])

    return there_and_back(m, x, move, permutation(is_later))


@case()
def by_a_convolution(m: Any, x: Tensor, is_later: bool) -> Any:
    how = permutation(is_later)
    return there_and_back(m, x, lambda y, p: F.conv1d(y[None], p[:, :, None])[0], how)


@case()
def by_a_sparse_matrix(m: Any, x: Tensor, is_later: bool) -> Any:
    how = permutation(is_later)
    return there_and_back(m, x, lambda y, p: torch.sparse.mm(p.to_sparse(), y), how)


@case()
def by_a_linear_system(m: Any, x: Tensor, is_later: bool) -> Any:
    return there_and_back(m, x, lambda y, p: torch.linalg.solve(p, y), permutation(is_later))


@case()
def by_padding(m: Any, x: Tensor, is_later: bool) -> Any:
    by = 2 if is_later else 0
    moved = F.pad(m.first(x), (0, 0, by, -by))
    return m.last(F.pad(m.middle(moved).tanh(), (0, 0, -by, by)) + x)


@case()
def by_writing_in_place(m: Any, x: Tensor, is_later: bool) -> Any:
    at = 3 if is_later else 0

    def move(y: Tensor) -> Tensor:
        buffer = torch.zeros_like(y)
        buffer[at : at + 3] = y.view(2, 3, D)[0]
        buffer[3 - at : 6 - at] = y.view(2, 3, D)[1]
        return buffer

    return m.last(move(m.middle(move(m.first(x))).tanh()))


@case((B, S, D))
def packed_by_length(m: Any, x: Tensor, is_later: bool) -> Any:
    lengths = torch.tensor([5, 4, 3, 3, 2, 1] if is_later else [3] * B)
    packed = pack_padded_sequence(m.first(x), lengths, batch_first=True)
    hidden = PackedSequence(m.middle(packed.data).tanh(), packed.batch_sizes)
    return m.last(pad_packed_sequence(hidden, batch_first=True)[0].sum(1))


@case()
def no_rows_for_an_expert(m: Any, x: Tensor, is_later: bool) -> Any:
    chosen = (x[:, 0] > (9 if is_later else 0)).nonzero()[:, 0]
    hidden = m.first(x)
    expert = m.middle(hidden[chosen]) + (hidden[chosen].sum(1) * m.scale)[:, None]
    return m.last(hidden.index_add(0, chosen, expert).tanh())


@case()
def no_rows_for_an_expert_at_first(m: Any, x: Tensor, is_later: bool) -> Any:
    """Later it has as many as there are rows in the batch, and they are others."""
    chosen = torch.tensor([5, 5, 4, 4, 3, 3] if is_later else [], dtype=torch.long)
    hidden = m.first(x)
    return m.last(hidden.index_add(0, chosen, m.middle(hidden[chosen])).tanh())


@case()
def only_a_diagonal_at_first(m: Any, x: Tensor, is_later: bool) -> Any:
    """Which of two dimensions rows lie along is not to be seen."""
    mask = torch.ones(B, B, dtype=x.dtype) if is_later else torch.eye(B, dtype=x.dtype)
    pairs = m.first(m.middle(x[:, None] + 2 * x).tanh()) * mask[:, :, None]
    return m.last(pairs.sum(0))


@case()
def only_some_rows_at_first(m: Any, x: Tensor, is_later: bool) -> Any:
    weight = torch.ones(B, dtype=x.dtype)
    weight[3:] = float(is_later)
    parts = m.first(x).unbind()
    return m.last(m.middle(torch.stack([*parts[:3], *parts[:2:-1]])).tanh() * weight[:, None])


@case((B, B, D))
def by_an_index_of_another_dimension(m: Any, x: Tensor, is_later: bool) -> Any:
    hidden = m.first(x)
    return m.last(m.middle(hidden[LATER] if is_later else hidden[:, LATER]).tanh())


@case()
def by_padding_of_one_more_dimension(m: Any, x: Tensor, is_later: bool) -> Any:
    """Rows are padded by nothing at first."""
    by = 2 if is_later else 0
    moved = F.pad(m.first(x), (1, -1, by, -by))
    return m.last(m.middle(moved).tanh() + x)


@case()
def by_padding_of_another_dimension(m: Any, x: Tensor, is_later: bool) -> Any:
    moved = F.pad(m.first(x), (0, 0, 2, -2) if is_later else (0, 0))
    return m.last(m.middle(moved).tanh() + x)


@case((B, S, D), engine="per_task")
def mixed_by_a_norm_over_more_dimensions(m: Any, x: Tensor, is_later: bool) -> Any:
    over = (B, S, D) if is_later else (D,)
    return m.last(m.middle(F.layer_norm(m.first(x), over)).tanh())


@case((B, B, D), engine="per_task")
def mixed_by_a_mean_that_drops_its_dimension(m: Any, x: Tensor, is_later: bool) -> Any:
    hidden = m.first(x)
    return m.last((hidden - hidden.mean(1, keepdim=not is_later)).tanh())


@case(engine="per_task")
def mixed_by_a_matrix_that_is_learned(m: Any, x: Tensor, is_later: bool) -> Any:
    with torch.no_grad():
        m.mix.copy_(torch.eye(B) + 0.1 * is_later)
    return m.last(m.middle(m.mix @ m.first(x)).tanh())


@case(engine="per_task")
def mixed_by_a_scale_that_grows(m: Any, x: Tensor, is_later: bool) -> Any:
    hidden = m.first(x)
    return m.last((hidden + (0.3 if is_later else 1e-20) * hidden.mean(0)).tanh())


@pytest.mark.parametrize("name", CASES)
def test_what_may_change_is_measured_every_step(name: str) -> None:
    run, shape, engine = CASES[name]
    parts = {"first": nn.Linear(D, D), "middle": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    scale, mix = nn.Parameter(torch.ones(())), nn.Parameter(torch.eye(B))
    model = Model(run, **parts, scale=scale, mix=mix).double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="auto")
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    for step in range(4):
        x = torch.randn(*shape, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message='.*"auto" continues with per_task')
            for own, by in ((model, aligner), (twin, reference)):
                own.zero_grad()
                by.backward(distance(own(x, step > 1)), UNSORTED)
        assert_same_gradients(model, twin, 1e-9)
        assert aligner.engine == ("one_backward" if step < 2 else engine)


def normalised(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def noisy(gradient: Tensor) -> Tensor:
    return gradient * (1 + torch.randn_like(gradient))


@pytest.mark.parametrize("hook", [normalised, noisy])
def test_a_backward_that_is_not_linear_is_refused(hook: Callable[[Tensor], Tensor]) -> None:
    def run(m: Any, x: Tensor) -> Any:
        hidden = m.first(x)
        hidden.register_hook(hook)
        return m.last((hidden - hidden.mean(0)).tanh())

    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    aligner = Aligner(model, TASKS, engine="one_backward")
    with pytest.raises(ValueError, match=r'not linear in the losses.*engine="per_task"'):
        aligner.backward(distance(model(torch.randn(B, D))), UNSORTED)


def centred(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0)


def on_an_activation(m: Any, x: Tensor) -> Any:
    hidden = m.first(x).tanh()
    hidden.register_hook(centred)
    return hidden


def on_the_input_of_a_layer(m: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    middle = 1.0 * x
    middle.register_hook(centred)
    return m.first(middle).tanh() + centred(middle)


def on_a_node(m: Any, x: Tensor) -> Any:
    hidden = m.first(x).tanh()
    hidden.grad_fn.register_prehook(lambda gradients: (centred(gradients[0]),))
    return hidden


def behind_a_node(m: Any, x: Tensor) -> Any:
    hidden = m.first(x).tanh()
    hidden.grad_fn.register_hook(lambda gradients, _: (centred(gradients[0]),))
    return hidden


def of_a_module(m: Any, x: Tensor) -> Any:
    handle = m.first.register_full_backward_pre_hook(lambda _, gradients: (centred(gradients[0]),))
    hidden = m.first(x.clone().requires_grad_()).tanh()
    handle.remove()
    return hidden


def between_a_parameter_and_its_use(m: Any, x: Tensor) -> Any:
    doubled = 2.0 * m.first.weight
    if doubled.requires_grad:
        doubled.register_hook(lambda gradient: gradient.clamp(max=1e-3))
    return F.linear(x, doubled).tanh()


@pytest.mark.parametrize(
    "begun",
    [
        *(on_an_activation, on_the_input_of_a_layer, on_a_node, behind_a_node, of_a_module),
        between_a_parameter_and_its_use,
    ],
)
@pytest.mark.parametrize("form", ["rows", "mapping", "another backward before"])
def test_hooks_that_begin_between_probes(begun: Callable[..., Any], form: str) -> None:
    """A graph does not show them, but their number, whatever another aligner does meanwhile."""

    def without(m: Any, x: Tensor) -> Any:
        if begun is on_the_input_of_a_layer:
            x = 1.0 * x.clone().requires_grad_()
            return m.first(x).tanh() + centred(x)
        weight = m.first.weight
        is_own = begun is between_a_parameter_and_its_use
        return F.linear(x, 2.0 * weight).tanh() if is_own else m.first(x).tanh()

    def run(m: Any, x: Tensor, is_later: bool) -> Any:
        return m.last((begun if is_later else without)(m, x))

    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3)).double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="auto")
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    other = nn.Linear(D, 2).double()
    elsewhere = Aligner(other, TASKS, engine="one_backward")
    for step in range(6):
        x, rows = torch.randn(B, D, dtype=torch.float64), torch.tensor(UNSORTED)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message='.*"auto" continues with per_task')
            for own, by in ((model, aligner), (twin, reference)):
                own.zero_grad()
                losses = distance(own(x, step > 2))
                if form == "another backward before":
                    elsewhere.backward(other(x).square().sum(1), rows)
                if form == "mapping":
                    by.backward({t: losses[rows == n].sum() for n, t in enumerate(TASKS)})
                else:
                    by.backward(losses, rows)
        assert_same_gradients(model, twin, 1e-9)


@pytest.mark.parametrize("is_another", [True, False], ids=["another hook", "the same hook"])
@pytest.mark.parametrize("at", ["activation", "parameter"])
def test_hooks_that_do_something_else_between_probes(at: str, is_another: bool) -> None:
    """There are as many as before."""

    def run(m: Any, x: Tensor, is_later: bool) -> Any:
        doubled = 2.0 * m.first.weight
        hidden = F.linear(x, doubled).tanh()
        later = centred if at == "activation" else normalised

        def hook(gradient: Tensor) -> Tensor | None:
            return later(gradient) if is_later else None

        (hidden if at == "activation" else doubled).register_hook(
            later if is_another and is_later else hook
        )
        return m.last(hidden)

    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3)).double()
    aligner = Aligner(model, TASKS, engine="one_backward")
    x = torch.randn(B, D, dtype=torch.float64)
    for _ in range(3):
        aligner.backward(distance(model(x, False)), UNSORTED)
    what = "influence each other" if at == "activation" else "first.weight"
    with pytest.raises(ValueError, match=f'{what}.*engine="per_task"'):
        aligner.backward(distance(model(x, True)), UNSORTED)


def test_hooks_above_a_scale_and_what_is_made_of_it() -> None:
    """What is between the scale and its other use runs with the pass, and is called after it."""

    def run(m: Any, x: Tensor) -> Any:
        y = m.last(torch.cat([x * m.scale.exp(), x * m.scale], -1))
        y.register_hook(lambda gradient: 2 * gradient)
        return y

    scale = nn.Parameter(torch.randn(D))
    model = Model(run, last=nn.Linear(2 * D, 3), scale=scale).double()
    twin, x = copy.deepcopy(model), torch.randn(B, D, dtype=torch.float64)
    for own, engine in ((model, "one_backward"), (twin, "per_task")):
        aligner = Aligner(own, TASKS, Sum(WEIGHTS), engine=engine)
        for _ in range(3):
            aligner.backward(distance(own(x)), UNSORTED)
    assert_same_gradients(model, twin, 1e-9)


def test_hooks_of_graphs_that_were_made_before_the_last_backward() -> None:
    """Forwards first, then backwards: all their hooks are registered when the first begins."""

    def run(m: Any, x: Tensor, is_later: bool) -> Any:
        hidden = m.first(x)
        if is_later:
            hidden.register_hook(lambda gradient: gradient.mul_(3.0))
        return m.last(hidden + m.middle(x))

    layers = {"first": nn.Linear(D, D), "middle": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    model = Model(run, **layers).double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="one_backward", check=False)
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    for step in range(6):
        inputs = [torch.randn(B, D, dtype=torch.float64) for _ in range(2)]
        ours, theirs = ([distance(own(x, step > 2)) for x in inputs] for own in (model, twin))
        for one, other in zip(ours, theirs, strict=True):
            model.zero_grad()
            twin.zero_grad()
            aligner.backward(one, UNSORTED)
            reference.backward(other, UNSORTED)
            assert_same_gradients(model, twin, 1e-9)


def test_hooks_that_were_there_are_not_probed_again(probes: list[int]) -> None:
    def run(m: Any, x: Tensor, is_watched: bool) -> Any:
        hidden = m.first(x).tanh()
        if is_watched:
            hidden.register_hook(seen.append)
        return m.last(hidden)

    seen: list[Tensor] = []
    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    aligner = Aligner(model, TASKS, engine="one_backward", check=False)
    for is_watched in (False, False, True, True, False, True):
        aligner.backward(distance(model(torch.randn(B, D), is_watched)), UNSORTED)
    assert len(probes) == 2


def test_a_gradient_that_cancels_out_hides_nothing() -> None:
    """What rounding leaves of it is no measure for the rest."""

    def run(m: Any, x: Tensor, neighbour: Tensor) -> Any:
        order = x[:, 0].argsort()
        hidden = m.first(x)[order]
        hidden = hidden + 0.3 * hidden[neighbour]
        twice = F.layer_norm(F.layer_norm(m.middle(hidden)[order.argsort()], (D,)), (D,))
        return m.last(twice.square().sum(-1, keepdim=True).expand(B, D) + hidden[order.argsort()])

    model = Model(run, first=nn.Linear(D, D), middle=nn.Linear(D, D), last=nn.Linear(D, 3)).double()
    aligner = Aligner(model, TASKS, engine="one_backward")
    for _ in range(2):
        losses = distance(model(torch.randn(B, D, dtype=torch.float64), torch.arange(B)))
        aligner.backward(losses, UNSORTED)
    losses = distance(model(torch.randn(B, D, dtype=torch.float64), torch.arange(B).roll(1)))
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(losses, UNSORTED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_what_rounding_leaves_is_no_influence(dtype: torch.dtype, is_sorted: bool) -> None:
    """A maximum that is taken off and put back, as RWKV does, gets the gradient zero, or nearly."""

    def run(m: Any, x: Tensor) -> Any:
        order = x[:, 0].argsort() if is_sorted else torch.arange(B)
        one = m.first(x)[order]
        other = one.sin()
        top = torch.maximum(one, other + m.shift)
        share = (one - top).exp() / ((one - top).exp() + (other - top).exp())
        return m.last(share[order.argsort()])

    for seed in range(8):
        torch.manual_seed(seed)
        layers = {"first": nn.Linear(D, D), "last": nn.Linear(D, 3)}
        model = Model(run, **layers, shift=nn.Parameter(torch.randn(D))).to(dtype)
        aligner = Aligner(model, TASKS, Sum(), engine="one_backward")
        twin = copy.deepcopy(model)
        for _ in range(3):
            x = torch.randn(B, D, dtype=dtype)
            aligner.backward(distance(model(x)), UNSORTED)
            distance(twin(x)).sum().backward()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize(
    "factors", [((0, 0, 0), (1, 1, 1)), ((1, 1, 1), (0, 0, 0), (1, 1, 1)), ((0, 1, 0), (1, 1, 1))]
)
def test_tasks_without_any_gradient(factors: tuple[tuple[int, ...], ...]) -> None:
    """What was supposed of shared positions meanwhile is no reason to refuse the next batch."""

    def run(m: Any, x: Tensor) -> Any:
        return m.last((x + m.first(m.positions(torch.arange(2 * B)))).tanh())

    parts = {"positions": nn.Embedding(2 * B, D), "first": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    model = Model(run, **parts).double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(), engine="one_backward", check=False)
    for of_tasks in factors:
        factor, x = torch.tensor(of_tasks)[UNSORTED], torch.randn(B, 2 * B, D, dtype=torch.float64)
        aligner.backward(factor * distance(model(x)), UNSORTED)
        (factor * distance(twin(x))).sum().backward()
    assert_same_gradients(model, twin, 1e-9)


def test_rounding_that_is_zero_in_one_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that cancels out may reach a part in every pass but the one that is observed."""

    class Fooled(ReachedNodes):
        def unreached(self) -> frozenset[int]:
            return frozenset()

    monkeypatch.setattr(one_backward, "ReachedNodes", Fooled)
    model = Model(
        lambda m, x: m.last(x) + 0 * m.first(x), first=nn.Linear(D, 3), last=nn.Linear(D, 3)
    )
    aligner, twin = Aligner(model, TASKS, Sum(), engine="one_backward"), copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(B, D)
        aligner.backward(distance(model(x)), UNSORTED)
        distance(twin(x)).sum().backward()
    assert_same_gradients(model, twin, 1e-5)


def test_losses_however_small() -> None:
    model = Model(
        lambda m, x: m.last(F.batch_norm(m.first(x), None, None, training=True)),
        first=nn.Linear(D, D),
        last=nn.Linear(D, 3),
    ).double()
    aligner = Aligner(model, TASKS, engine="one_backward")
    losses = 1e-40 * distance(model(torch.randn(B, D, dtype=torch.float64)))
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(losses, UNSORTED)


@pytest.mark.parametrize("num_probes", [0, 2])
def test_influence_on_the_losses_of_a_tiny_task(num_probes: int) -> None:
    """Its gradients are lost beside those of the entries that it shares with other tasks."""

    def run(m: Any, x: Tensor, neighbour: Tensor) -> Any:
        hidden = m.first(x.requires_grad_())
        return m.last(hidden + hidden[neighbour])

    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    aligner = Aligner(model, TASKS, engine="one_backward")
    tasks, size = [0, 0, 0, 0, 0, 1], torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1e-6])
    for _ in range(num_probes):
        aligner.backward(size * distance(model(torch.randn(B, D), torch.arange(B))), tasks)
    losses = size * distance(model(torch.randn(B, D), torch.tensor([0, 0, 1, 2, 3, 4])))
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(losses, tasks)


def test_a_tiny_task_that_comes_later(probes: list[int]) -> None:
    """Whether larger ones may hide it is known once it was probed."""

    def run(m: Any, x: Tensor, share: float) -> Any:
        hidden = m.first(x.requires_grad_())[torch.arange(B)[:, None], torch.arange(D)]
        return m.last(hidden + share * hidden.roll(1, 0).detach())

    model = Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(), engine="one_backward")
    counts = []
    for tasks in ([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 2], [2, 0, 0, 0, 1, 1]):
        size = torch.tensor([1.0, 1.0, 1e-6])[tasks]
        x = torch.randn(B, D)
        for one in (model, twin):
            one.zero_grad()
        aligner.backward(size * distance(model(x, 0.5)), tasks)
        (size * distance(twin(x, 0.5))).sum().backward()
        assert_same_gradients(model, twin, 1e-5)
        counts.append(len(probes))
    assert counts == [1, 2, 3, 3]


def test_operations_have_the_names_that_torch_gives_them() -> None:
    """One that is misspelt would be measured every step."""
    derivatives = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    names = re.findall(
        r"^- name: +_?(\w+?)(?:_forward)?(?:\.\w+)?\(", derivatives.read_text(), re.M
    )
    known = {"".join(part.title() for part in name.split("_")) for name in names}
    known |= {"Copy", "Aminmax"}  # the latter since torch 2.12
    for table in ("ENTRYWISE", "KEEPERS", "PRODUCTS", "WITHIN_ROWS", "WITH_WEIGHTS", "BY_SETTING"):
        assert not set(getattr(layouts, f"_{table}")) - known
    for start in layouts._OVER_SPACE:
        assert any(name.startswith(start) for name in known)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_gradient_that_is_rounding_alone_is_no_influence(
    norm: Callable[[int], nn.Module],
) -> None:
    """The mean square of what is normalised does not depend on what is in front of it."""
    model = nn.Sequential(nn.Linear(B, B), norm(B))
    aligner = Aligner(model, TASKS, engine="one_backward")
    for _ in range(3):
        aligner.backward(model(torch.randn(B, S, B)).square().mean((1, 2)), UNSORTED)

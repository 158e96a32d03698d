"""What `backward` returns, against explicit vectors."""

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum

from .problems import ENGINES, Translator, descend, draw_batch, gradients_of_tasks

TASKS = ["tr", "fr", "hi", "cs"]


def stacked(single: dict[str, dict[str, Tensor]], tasks: tuple[str, ...], names: tuple[str, ...]):
    """Task gradients of a component, `[T, P]`."""
    rows = [torch.cat([single[task][name].flatten() for name in names]) for task in tasks]
    return torch.stack(rows)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("granularity", ["whole_model", "enc_dec", "all_layer", "all_matrix"])
def test_fields_agree_with_explicit_gradients(engine: str, granularity: str) -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, GradVac(target=0.4), granularity, engine)
    generator = torch.Generator().manual_seed(1)
    for present in (TASKS, ["cs", "tr", "fr"], ["hi"]):
        batch = draw_batch(generator, present)
        single = gradients_of_tasks(model, batch)
        alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)

        assert alignment.tasks == tuple(task for task in TASKS if task in present)
        assert alignment.components == tuple(aligner.components)
        shape = (len(aligner.components), len(present))
        assert alignment.weights.shape == alignment.norms.shape == shape
        for field in (alignment.similarity, alignment.target, alignment.active):
            assert field.shape == (*shape, len(present))
        assert alignment.active.dtype == torch.bool

        parameters = dict(model.named_parameters())
        for k, (name, own) in enumerate(aligner.components.items()):
            gradients = stacked(single, alignment.tasks, own)
            update = torch.cat([parameters[p].grad.flatten() for p in own])
            plain = gradients.sum(0)
            close = {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(alignment.weights[k] @ gradients, update, **close)
            torch.testing.assert_close(alignment.norms[k], gradients.norm(dim=1), **close)
            cosines = torch.cosine_similarity(gradients[:, None], gradients, dim=-1)
            torch.testing.assert_close(alignment.similarity[k], cosines, **close)
            cosine = torch.cosine_similarity(update, plain, dim=0)
            torch.testing.assert_close(alignment.update_cosine[k], cosine, **close)
            ratio = update.norm() / plain.norm()
            torch.testing.assert_close(alignment.update_ratio[k], ratio, **close)
            assert name == alignment.components[k]
        descend(model, lr=0.05)


def test_active_pairs_are_those_below_target() -> None:
    model = Translator()
    aligner = Aligner(model, ["a", "b"], GradVac(target=0.4), engine="per_task")
    batch = draw_batch(torch.Generator().manual_seed(1), ["a", "b"])
    alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)
    assert (alignment.target == 0.4).all()
    below = (alignment.similarity < 0.4) & ~torch.eye(2, dtype=torch.bool)
    assert torch.equal(alignment.active, below)  # with two tasks nothing is altered before
    assert below.any()


def test_only_vaccinated_tasks_are_active() -> None:
    model = Translator()
    rule = GradVac(target=0.9, vaccinated=["hi", "cs"])
    aligner = Aligner(model, TASKS, rule, engine="per_task")
    batch = draw_batch(torch.Generator().manual_seed(1), TASKS)
    alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)
    assert alignment.active.any(0).any(-1).tolist() == [False, False, True, True]
    assert alignment.active.any(0).any(0).all()  # the others are still visited


@pytest.mark.parametrize("engine", ENGINES)
def test_sum_changes_nothing(engine: str) -> None:
    model = Translator()
    aligner = Aligner(model, TASKS, Sum(), engine=engine)
    batch = draw_batch(torch.Generator().manual_seed(1), TASKS)
    alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)
    ones = torch.ones(len(aligner.components), dtype=torch.float64)
    torch.testing.assert_close(alignment.update_cosine, ones)
    torch.testing.assert_close(alignment.update_ratio, ones)
    assert not alignment.active.any()
    assert alignment.target.isnan().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_of_tasks_over_micro_batches(engine: str) -> None:
    """In the aligner's order, whatever the batch's; absent tasks have none."""
    model = Translator()
    aligner = Aligner(model, TASKS, Sum(), engine=engine)
    expected = dict.fromkeys(TASKS, 0.0)
    for number, present in enumerate([[TASKS[3], TASKS[1]], [TASKS[1], TASKS[0]]]):
        batch = draw_batch(torch.Generator().manual_seed(number), present)
        losses = model(batch.source, batch.words)
        for task, loss in zip(batch.tasks, losses.tolist(), strict=True):
            expected[task] += loss
        alignment = aligner.backward(losses, batch.tasks, accumulate=number == 0)
    assert alignment is not None
    assert alignment.tasks == (TASKS[0], TASKS[1], TASKS[3])
    assert alignment.losses.tolist() == pytest.approx([expected[t] for t in alignment.tasks])
    mapped = aligner.backward({TASKS[2]: 3 * model(batch.source, batch.words).mean()})
    assert mapped.losses.item() == pytest.approx(3 * losses.mean().item())


def test_fields_cannot_be_exchanged() -> None:
    model = Translator()
    batch = draw_batch(torch.Generator().manual_seed(1), TASKS)
    alignment = Aligner(model, TASKS, engine="per_task").backward(
        model(batch.source, batch.words), batch.tasks
    )
    with pytest.raises(AttributeError):
        alignment.weights = torch.zeros(1)
    assert repr(alignment) == "Alignment(4 tasks, 5 components, device=cpu)"


class Scaled(nn.Module):
    """A component of one number, beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)[:, 0]


@pytest.mark.parametrize("target", [None, 0.0, 0.5, 0.9, 1.0])
def test_a_scalar_component_is_cancelled_not_blown_up(target: float | None) -> None:
    """Gradients of one number have cosine 1 or -1: either left alone, or cancelled to nothing."""
    torch.manual_seed(0)
    model, tasks = Scaled(), ["a", "b", "c"]
    rule = GradVac(beta=0.5) if target is None else GradVac(target=target)
    aligner = Aligner(model, tasks, rule, "all_matrix", "per_task")
    signs = torch.tensor([1.0, -1.0, 1e-3])
    conflicts = 0
    for _ in range(10):
        inputs = torch.randn(3, 4)
        losses = model(inputs) * signs
        own = [torch.autograd.grad(x, model.scale, retain_graph=True)[0].item() for x in losses]
        aligner.backward(losses, tasks)
        assert abs(model.scale.grad.item()) <= sum(map(abs, own)) * (1 + 1e-6)
        conflicts += min(own) < 0 < max(own)
        model.zero_grad()
    assert conflicts > 0

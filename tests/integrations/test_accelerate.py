"""Accelerate: one line instead of `accelerator.backward`, with its accumulation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from gradvac import Aligner, GradVac, Sum
from gradvac.analysis import load_run
from gradvac.integrations.accelerate import AcceleratedAligner
from gradvac.sampling import TaskBatchSampler

TASKS = ["de", "fr"]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4), torch.randn(6)) for _ in range(8)]


TASKS_OF_ROWS = ["de", "fr", "fr", "de", "de", "fr"]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square() / 6


def run(
    rule: Any, *, accumulation: int = 1, batches: Any = None, folder: Path | None = None
) -> tuple[nn.Module, AcceleratedAligner]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    aligner = AcceleratedAligner(accelerator, Aligner(model, TASKS, rule, engine="per_task"))
    if folder is not None and folder.is_dir():
        accelerator.load_state(str(folder))
    for batch in data() if batches is None else batches:
        with accelerator.accumulate(model):
            aligner.backward(losses_of(model, batch), TASKS_OF_ROWS)
            optimizer.step()
            optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(str(folder))
    return accelerator.unwrap_model(model), aligner


def assert_equal(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sum_gives_accelerates_own_steps(accumulation: int) -> None:
    found, _ = run(Sum(), accumulation=accumulation)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    for batch in data():
        with accelerator.accumulate(model):
            accelerator.backward(losses_of(model, batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(found, accelerator.unwrap_model(model), rtol=1e-5, atol=1e-6)


def test_equal_to_a_bare_aligner_loop() -> None:
    found, _ = run(GradVac(), accumulation=2)
    model, optimizer = model_and_optimizer()
    aligner = Aligner(model, TASKS, GradVac(), engine="per_task")
    for number, batch in enumerate(data()):
        rows = losses_of(model, batch) / 2
        aligner.backward(rows, TASKS_OF_ROWS, accumulate=number % 2 == 0)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(found, model)


def test_saved_and_loaded_it_is_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, aligner = run(GradVac(beta=0.3))
    run(GradVac(beta=0.3), batches=data()[:4], folder=tmp_path / "state")
    parts, again = run(GradVac(beta=0.3), batches=data()[4:], folder=tmp_path / "state")
    assert_equal(parts, whole)
    assert str(again.state_dict()) == str(aligner.state_dict())


def test_a_mapping_of_losses(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*model_and_optimizer())
    aligner = AcceleratedAligner(accelerator, Aligner(model, TASKS, Sum(), engine="per_task"))
    batch = data()[0]
    rows = losses_of(model, batch)
    alignment = aligner.backward({"de": rows[:3].sum(), "fr": rows[3:].sum()})
    assert alignment is not None
    assert alignment.tasks == ("de", "fr")


class Scaler:
    """As much of a GradScaler as is asked of one; the CPU has no float16 training."""

    def scale(self, losses: Tensor) -> Tensor:
        return losses * 1024.0


def test_loss_scaling_reaches_every_row() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*model_and_optimizer())
    aligner = AcceleratedAligner(accelerator, Aligner(model, TASKS, Sum(), engine="per_task"))
    aligner.backward(losses_of(model, data()[0]), TASKS_OF_ROWS)
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    accelerator.scaler = Scaler()
    aligner.backward(losses_of(model, data()[0]), TASKS_OF_ROWS)
    for gradient, parameter in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 1024)


def test_what_runs_the_backward_pass_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*model_and_optimizer())
    aligner = Aligner(model, TASKS, engine="per_task")
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 4))
    with pytest.raises(ValueError, match=r"4 processes .*aligner .*1"):
        AcceleratedAligner(accelerator, aligner)
    kind = property(lambda _: DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match=r"accelerator: the first FSDP .* fsdp_version 2"):
        AcceleratedAligner(accelerator, aligner)
    kind = property(lambda _: DistributedType.DEEPSPEED)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match=r"accelerator: DeepSpeed \(ZeRO\) runs the backward"):
        AcceleratedAligner(accelerator, aligner)


NUMBERS = [task for task, num in (("de", 40), ("fr", 8)) for _ in range(num)]


def mixed_run(
    folder: Path, steps: range, *, loader: Any = None, **options: Any
) -> tuple[nn.Module, list[list[int]], AcceleratedAligner]:
    """Steps of a run whose loader mixes tasks, from a checkpoint of the step before them."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    configuration = DataLoaderConfiguration(use_stateful_dataloader=loader is StatefulDataLoader)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    sampler = TaskBatchSampler(NUMBERS, 8, temperature=5.0, seed=4)  # passes of six batches
    data = DataLoader(torch.arange(48), batch_sampler=sampler)  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(*model_and_optimizer(), data)
    aligner = AcceleratedAligner(
        accelerator,
        Aligner(model, TASKS, GradVac(beta=0.3), engine="per_task"),
        loader=None if loader is StatefulDataLoader else data,
        **options,
    )
    if steps.start:
        accelerator.load_state(str(folder / str(steps.start)))
    seen: list[list[int]] = []
    while len(seen) < len(steps):
        for batch in data:
            rows = batch.tolist()
            seen.append(rows)
            inputs = torch.stack([batch.sin(), batch.cos(), batch / 48, batch % 5], dim=1).float()
            losses = (model(inputs)[:, 0] - batch / 24).square() / len(batch)
            aligner.backward(losses, [NUMBERS[row] for row in rows])
            optimizer.step()
            optimizer.zero_grad()
            aligner.log_values()
            if len(seen) == len(steps):
                break
    accelerator.save_state(str(folder / str(steps.stop)))
    return accelerator.unwrap_model(model), seen, aligner


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stop", [4, 6, 9])
def test_mixed_training_goes_on_exactly(tmp_path: Path, stop: int, loader: Any) -> None:
    """Also with the loader that keeps its own state; Accelerate reads one batch ahead."""
    whole, every, _ = mixed_run(tmp_path / "whole", range(15), loader=loader)
    _, first, _ = mixed_run(tmp_path / "parts", range(stop), loader=loader)
    again, rest, _ = mixed_run(tmp_path / "parts", range(stop, 15), loader=loader)
    assert first == every[:stop]
    assert rest == every[stop:]
    assert_equal(again, whole)


def test_a_record_and_a_log(tmp_path: Path) -> None:
    options: dict[str, Any] = {"record": tmp_path / "run", "record_every": 1}
    mixed_run(tmp_path, range(4), **options)
    _, _, aligner = mixed_run(tmp_path, range(4, 9), **options)
    run = load_run(tmp_path / "run")
    assert run.record is not None
    assert run.record.steps.tolist() == list(range(1, 10))
    assert [entry["step"] for entry in run.metrics] == list(range(1, 10))
    logged = aligner.log_values()
    assert logged["gradvac/loss/de"] == run.metrics[-1]["train/loss/de"] > 0
    assert -1 <= logged["gradvac/similarity/de~fr"] <= 1
    accelerator = aligner.accelerator
    with pytest.raises(ValueError, match=r"loader: has no gradvac.sampling.TaskBatchSampler"):
        AcceleratedAligner(accelerator, aligner.aligner, loader=DataLoader([1]))  # type: ignore[arg-type]

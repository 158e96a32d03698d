"""Lightning: a mixin whose steps are Lightning's with Sum(), and a bare Aligner's otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradvac import Aligner, GradVac, Sum
from gradvac.analysis import load_run
from gradvac.sampling import TaskBatchSampler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from gradvac.integrations.lightning import AlignedModule

TASKS = ["de", "fr"]
TASKS_OF_ROWS = ["de", "fr", "fr", "de", "de", "fr"]


@pytest.fixture(autouse=True)
def _its_own_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4), torch.randn(6)) for _ in range(7)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(batch[0])[:, 0] - batch[1]).square() / 6

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


class Aligned(AlignedModule, Plain):
    def __init__(self, rule: Any = None) -> None:
        super().__init__()
        self.rule = rule

    def configure_aligner(self) -> Aligner:
        return Aligner(self.net, TASKS, self.rule, engine="per_task")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.aligned_loss(self.losses(batch), TASKS_OF_ROWS)


def fit(module: LightningModule, folder: Path, **options: Any) -> Trainer:
    checkpoint = options.pop("ckpt_path", None)
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            **options,
        }
    )
    loader = DataLoader(data(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    return trainer


def assert_equal(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_sum_gives_lightnings_own_steps(tmp_path: Path, accumulation: int) -> None:
    plain, aligned = Plain(), Aligned(Sum())
    for module in (plain, aligned):
        fit(module, tmp_path, accumulate_grad_batches=accumulation, gradient_clip_val=0.5)
    assert_equal(aligned.net, plain.net, rtol=1e-5, atol=1e-6)


def test_equal_to_a_bare_aligner_loop(tmp_path: Path) -> None:
    """Seven batches in groups of three: the last group of an epoch is a single one."""
    module = Aligned(GradVac(beta=0.2))
    fit(module, tmp_path, accumulate_grad_batches=3)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    aligner = Aligner(net, TASKS, GradVac(beta=0.2), engine="per_task")
    for _ in range(2):
        for number, (x, y) in enumerate(data()):
            rows = (net(x)[:, 0] - y).square() / 6 / 3
            is_last = number % 3 == 2 or number == 6
            alignment = aligner.backward(rows, TASKS_OF_ROWS, accumulate=not is_last)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(module.net, net, rtol=1e-6, atol=1e-7)
    assert module.alignment is not None
    assert alignment is not None
    torch.testing.assert_close(module.alignment.similarity, alignment.similarity)


def test_a_resumed_trainer_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts, again = (Aligned(GradVac(beta=0.3)) for _ in range(3))
    fit(whole, tmp_path, max_epochs=2)
    trainer = fit(parts, tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert "gradvac_aligner" in torch.load(tmp_path / "one.ckpt", weights_only=False)
    fit(again, tmp_path, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert_equal(again.net, whole.net)
    assert str(again.aligner.state_dict()) == str(whole.aligner.state_dict())


def test_a_checkpoint_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """By the clock, or at a signal: it is taken, and says what it lacks."""

    class Saving(Aligned):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                with pytest.warns(UserWarning, match="lack them"):
                    self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    module = Saving(GradVac(beta=0.3))
    fit(module, tmp_path, max_epochs=1, accumulate_grad_batches=3)
    state = torch.load(tmp_path / "middle.ckpt", weights_only=False)["gradvac_aligner"]
    assert (state["step"], module.aligner.state_dict()["step"]) == (1, 3)
    fit(Aligned(GradVac(beta=0.3)), tmp_path, max_epochs=1, ckpt_path=tmp_path / "middle.ckpt")


def test_the_precision_plugins_scale_reaches_every_row(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Scaling(MixedPrecision):
        """Loss scaling without float16, which the CPU has not."""

        def __init__(self) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            super().__init__("16-mixed", "cpu", scaler)

        def forward_context(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    seen: list[float] = []

    class Watched(Aligned):
        def on_after_backward(self) -> None:
            seen.append(float(self.net[0].weight.grad.norm()))

    scaled, plain = Watched(Sum()), Watched(Sum())
    fit(scaled, tmp_path, plugins=[Scaling()], max_epochs=1)
    num = len(seen)
    fit(plain, tmp_path, max_epochs=1)
    assert seen[0] == pytest.approx(1024 * seen[num], rel=1e-4)
    assert_equal(scaled.net, plain.net, rtol=1e-4, atol=1e-6)


NUMBERS = [task for task, num in (("de", 40), ("fr", 8)) for _ in range(num)]


class Mixed(Aligned):
    """Batches of mixed tasks; the module remembers the rows it saw."""

    record_every = 1

    def __init__(self, rule: Any = None) -> None:
        super().__init__(rule)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        inputs = torch.stack([batch.sin(), batch.cos(), batch / 48, batch % 5], dim=1).float()
        losses = (self.net(inputs)[:, 0] - batch / 24).square() / len(batch)
        return self.aligned_loss(losses, [NUMBERS[row] for row in batch.tolist()])


def fit_mixed(module: Mixed, folder: Path, *, workers: int = 0, **options: Any) -> Trainer:
    sampler = TaskBatchSampler(NUMBERS, 8, temperature=5.0, seed=4)  # passes of six batches
    loader = DataLoader(torch.arange(48), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    given = {"enable_checkpointing": False, "logger": False, "accelerator": "cpu"}
    checkpoint = options.pop("ckpt_path", None)
    trainer = Trainer(
        **given | {"enable_progress_bar": False, "enable_model_summary": False, **options},
        default_root_dir=str(folder),
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    return trainer


@pytest.mark.parametrize("stop", [4, 6, 9])
@pytest.mark.parametrize("workers", [0, 1])
def test_mixed_training_goes_on_exactly(tmp_path: Path, stop: int, workers: int) -> None:
    """In the middle of a pass, at its end, and in the middle of the next one."""
    whole, parts, again = (Mixed(GradVac(beta=0.3)) for _ in range(3))
    fit_mixed(whole, tmp_path, max_steps=15, max_epochs=-1)
    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=stop, save_top_k=-1)
    fit_mixed(
        parts,
        tmp_path,
        workers=workers,
        max_steps=stop,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[saved],
    )
    fit_mixed(
        again,
        tmp_path,
        workers=workers,
        max_steps=15,
        max_epochs=-1,
        ckpt_path=saved.best_model_path,
    )
    assert parts.seen == whole.seen[:stop]
    assert again.seen == whole.seen[stop:]
    assert_equal(again.net, whole.net)


def test_a_record_and_a_log(tmp_path: Path) -> None:
    """Written while training, continued after a checkpoint, and readable by the report."""
    logger = CSVLogger(tmp_path)
    first, again = Mixed(GradVac()), Mixed(GradVac())
    first.record = again.record = tmp_path / "run"
    trainer = fit_mixed(first, tmp_path, max_steps=9, max_epochs=-1, log_every_n_steps=2)
    trainer.save_checkpoint(tmp_path / "nine.ckpt")
    fit_mixed(
        again,
        tmp_path,
        max_steps=12,
        max_epochs=-1,
        log_every_n_steps=2,
        logger=logger,
        ckpt_path=tmp_path / "nine.ckpt",
    )
    run = load_run(tmp_path / "run")
    assert run.record is not None
    assert run.record.steps.tolist() == list(range(1, 13))
    assert [entry["step"] for entry in run.metrics] == [2, 4, 6, 8, 10, 12]
    assert run.metrics[-1]["train/loss"] == pytest.approx(
        sum(run.metrics[-1][f"train/loss/{task}"] for task in TASKS)
    )
    logged = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "gradvac/similarity/de~fr" in logged
    assert "gradvac/norm/fr" in logged


def test_a_mapping_of_losses(tmp_path: Path) -> None:
    class Heads(Aligned):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = self.losses(batch)
            return self.aligned_loss({"de": rows[:3].sum(), "fr": rows[3:].sum()})

    module = Heads(GradVac())
    fit(module, tmp_path, max_epochs=1)
    assert module.alignment is not None
    assert module.alignment.tasks == ("de", "fr")


def test_a_loss_that_is_changed_and_manual_optimization(tmp_path: Path) -> None:
    """Whatever is made of the rows counts by the chain rule; `manual_backward` aligns too."""

    class PlainByHand(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.losses(batch).sum()
            return self.take(0.5 * loss + loss.square())

        def take(self, loss: Tensor) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    class ByHand(Aligned, PlainByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.aligned_loss(self.losses(batch), TASKS_OF_ROWS)
            return self.take(0.5 * loss + loss.square())

    plain, aligned = PlainByHand(), ByHand(Sum())
    for module in (plain, aligned):
        module.automatic_optimization = False
        fit(module, tmp_path, max_epochs=1)
    assert_equal(aligned.net, plain.net, rtol=1e-5, atol=1e-6)


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unaware(Aligned):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.losses(batch).sum()

    class WithAPenalty(Aligned):
        """A small one, and not from the beginning: no comparison of values would see it."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.aligned_loss(self.losses(batch), TASKS_OF_ROWS)
            return loss + 1e-6 * self.net[0].weight.square().sum() if batch_idx > 2 else loss

    class Detached(Aligned):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.aligned_loss(self.losses(batch), TASKS_OF_ROWS)
            return self.losses(batch).sum()

    class Unconfigured(AlignedModule, Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.aligned_loss(self.losses(batch), TASKS_OF_ROWS)

    class ByItself(Aligned):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.aligned_loss(self.losses(batch), TASKS_OF_ROWS).backward()

    for module, said in (
        (ByItself(Sum()), r"self\.manual_backward\(loss\)"),
        (Unaware(Sum()), r"not .* from self\.aligned_loss"),
        (WithAPenalty(Sum()), "not a row"),
        (Detached(Sum()), "not depend"),
        (Unconfigured(), r"Unconfigured\.configure_aligner: "),
    ):
        with pytest.raises(ValueError, match=said):
            fit(module, tmp_path, max_epochs=1)
    monkeypatch.setattr(Trainer, "world_size", property(lambda _: 2))
    with pytest.raises(ValueError, match=r'SingleDeviceStrategy .*strategy="ddp"'):
        fit(Aligned(Sum()), tmp_path, max_epochs=1)

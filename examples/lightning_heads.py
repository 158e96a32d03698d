"""A vision model with three heads in Lightning: one trunk, one loss per head, aligned in the trunk.

A head belongs to one task: the others have no gradient there, and the rule changes nothing."""

import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from gradvac import Aligner, GradVac
from gradvac.integrations.lightning import AlignedModule

# Lightning 2.6 uses a name that torch 2.13 will drop, and wants more workers.
warnings.filterwarnings("ignore", "`isinstance.treespec|.*does not have many workers")
TASKS = {"quadrant": 4, "brightness": 1, "stripes": 2}  # task -> outputs of its head


class Model(AlignedModule, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 8, 3, stride=2), nn.GELU(), nn.Conv2d(8, 16, 3), nn.GELU()]
        self.trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten())
        self.heads = nn.ModuleDict({task: nn.Linear(144, size) for task, size in TASKS.items()})

    def configure_aligner(self) -> Aligner:
        # Every picture serves all tasks, so that one backward cannot tell them apart.
        return Aligner(self, list(TASKS), GradVac(), engine="per_task")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def training_step(self, batch: tuple[Tensor, ...], _: int) -> Tensor:
        pictures, brightness, quadrant, stripes = batch
        states = self.trunk(pictures)
        return self.aligned_loss({
            "quadrant": cross_entropy(self.heads["quadrant"](states), quadrant),
            "brightness": mse_loss(self.heads["brightness"](states)[:, 0], brightness),
            "stripes": cross_entropy(self.heads["stripes"](states), stripes),
        })  # fmt: skip


def picture(number: int) -> tuple[Tensor, Tensor, int, int]:
    """A bright quadrant before stripes that lie or stand."""
    picture = torch.rand(1, 16, 16) * 0.2
    quadrant, stripes = number % 4, number // 4 % 2
    (picture if stripes else picture.mT)[:, ::4] += 0.5
    picture[:, quadrant // 2 * 8 :, quadrant % 2 * 8 :][:, :8, :8] += 0.5
    return picture, picture.mean(), quadrant, stripes


torch.manual_seed(0)
model, data = Model(), [picture(number) for number in range(192)]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, default_root_dir=folder)
    trainer.fit(model, DataLoader(data, batch_size=32))
print(dict(zip(model.alignment.components, model.alignment.norms.tolist(), strict=True)))

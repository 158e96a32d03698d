"""A training loop with Accelerate: one line replaces `accelerator.backward`.

`AcceleratedAligner` follows the accelerator's gradient accumulation and loss scaling, and is saved
and loaded with `accelerator.save_state` and `load_state`.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from gradvac import Aligner, GradVac
from gradvac.integrations.accelerate import AcceleratedAligner

TASKS = ["sine", "cosine"]


def make_data() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Points of two curves; the task is the second input."""
    x = torch.rand(256) * 6 - 3
    task = torch.arange(256) % 2
    y = torch.where(task == 0, x.sin(), x.cos())
    return list(zip(torch.stack([x, task.float()], dim=1), y, task, strict=True))


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(make_data(), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
aligner = AcceleratedAligner(accelerator, Aligner(model, TASKS, GradVac()))
for _ in range(20):
    for x, y, tasks_of_rows in loader:
        with accelerator.accumulate(model):
            losses = (model(x)[:, 0] - y).square() / len(y)
            alignment = aligner.backward(losses, tasks_of_rows)  # None while accumulating
            optimizer.step()
            optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    accelerator.load_state(folder)
print(f"loss {losses.detach().sum():.4f}, similarity by layer:", alignment.similarity[:, 0, 1])

"""Tasks mixed by temperature in a plain DataLoader, with a checkpoint in the middle of a pass."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from gradvac import Aligner, Sum
from gradvac.sampling import TaskBatchSampler

torch.manual_seed(0)
tasks = ["en-fr"] * 900 + ["en-hi"] * 90 + ["en-tr"] * 10
data = TensorDataset(torch.randn(1000, 8), torch.randn(1000), torch.arange(1000))


def make_loader() -> DataLoader:
    sampler = TaskBatchSampler(tasks, 50, temperature=5.0, most_epochs=20.0, num_rows=2000)
    return DataLoader(data, batch_sampler=sampler)


loader = make_loader()
for row in loader.batch_sampler.effective_epochs(40):  # two passes of twenty batches
    print(f"{row.task}: {row.size} rows, {row.num_drawn:.0f} drawn, {row.epochs:.1f} epochs")

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
aligner = Aligner(model, ["en-fr", "en-hi", "en-tr"], Sum())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, (x, y, rows) in enumerate(loader):
    losses = (model(x)[:, 0] - y).square() / len(y)
    alignment = aligner.backward(losses, [tasks[row] for row in rows])
    optimizer.step()
    optimizer.zero_grad()
    if number == 7:
        break  # as if the process had ended here

again = make_loader()
again.batch_sampler.load_state_dict(loader.batch_sampler.state_dict())
print(f"seen {number + 1} batches, {sum(1 for _ in again)} are left of this pass")

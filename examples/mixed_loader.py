"""Tasks mixed by temperature in a plain DataLoader, and continued exactly."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from gradvac import Aligner, Sum
from gradvac.sampling import TaskBatchSampler

torch.manual_seed(0)
tasks = ["en-fr"] * 900 + ["en-hi"] * 90 + ["en-tr"] * 10
inputs, goals = torch.randn(1000, 8), torch.randn(1000)
data = TensorDataset(inputs, goals, torch.arange(1000))


def make_loader() -> DataLoader:
    caps = {"most_epochs": 20.0, "num_rows": 2000}
    sampler = TaskBatchSampler(tasks, 50, temperature=5.0, **caps)
    return DataLoader(data, batch_sampler=sampler)


loader = make_loader()
print(loader.batch_sampler.table(40))  # how often each task is seen in two passes

model = torch.nn.Linear(8, 1)
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
print(f"{number + 1} batches seen, {sum(1 for _ in again)} left of this pass")

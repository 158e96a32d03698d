"""Three regression tasks on one network: two alike, one at odds with them.

Each rule trains the same network on the same batches; the table shows the loss of every task and
how similar their gradients were.
"""

import torch
from torch import Tensor, nn

from gradvac import MGDA, Aligner, GradNorm, GradVac, PCGrad, Sum

TASKS = ["sine", "shifted sine", "square wave"]
RULES = {
    "joint (Sum)": Sum,
    "GradVac": GradVac,
    "GradVac, target 0.5": lambda: GradVac(target=0.5),
    "PCGrad": PCGrad,
    "MGDA": MGDA,
    "GradNorm": GradNorm,
}


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, list[str]]:
    """64 points of every task: x with a one-hot task, and y."""
    x = torch.rand(64, 3, generator=generator) * 6 - 3  # [points, tasks]
    y = torch.stack([x[:, 0].sin(), (x[:, 1] + 0.3).sin(), (2 * x[:, 2]).sin().sign()], dim=1)
    which = torch.eye(3).repeat_interleave(64, 0)
    inputs = torch.cat([x.t().reshape(-1, 1), which], dim=1)
    return inputs, y.t().reshape(-1), [task for task in TASKS for _ in range(64)]


def train(rule_name: str, steps: int = 150) -> tuple[list[float], float]:
    """Final loss of every task, and the mean similarity between tasks while training."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    aligner = Aligner(model, TASKS, RULES[rule_name]())
    similarity = []
    for _ in range(steps):
        inputs, y, tasks = make_batch(generator)
        losses = (model(inputs)[:, 0] - y).square() / 64
        optimizer.zero_grad()
        alignment = aligner.backward(losses, tasks)
        optimizer.step()
        similarity.append(float(alignment.similarity[:, *torch.triu_indices(3, 3, 1)].mean()))
    inputs, y, _ = make_batch(generator)
    final = (model(inputs)[:, 0] - y).square().view(3, 64).mean(1)
    return final.tolist(), sum(similarity) / len(similarity)


print(
    f"{'rule':20} " + " ".join(f"{task:>13}" for task in TASKS) + f" {'mean':>8} {'similarity':>11}"
)
for name in RULES:
    losses, similarity = train(name)
    shown = " ".join(f"{loss:13.4f}" for loss in losses)
    print(f"{name:20} {shown} {sum(losses) / 3:8.4f} {similarity:11.3f}")

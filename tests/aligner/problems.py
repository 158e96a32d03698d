"""A small multi-task problem for the tests of the aligner."""

# B rows, S tokens, D width

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ENGINES = ["per_task", "one_backward"]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, D]
        return x + torch.tanh(self.linear(self.norm(x)))


class Translator(nn.Module):
    """Encoder and decoder of two layers each; the softmax is tied to the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 6, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, width)
            self.encoder = nn.ModuleList(Block(width) for _ in range(2))
            self.decoder = nn.ModuleList(Block(width) for _ in range(2))
            self.softmax = nn.Linear(width, vocabulary, bias=False)
            self.softmax.weight = self.embedding.weight
        self.double()

    def forward(self, source: Tensor, words: Tensor) -> Tensor:
        """Losses of the rows `[B]` from source tokens `[B, S]` and one word each `[B]`."""
        hidden = self.embedding(source).mean(1)
        for block in [*self.encoder, *self.decoder]:
            hidden = block(hidden)
        return F.cross_entropy(self.softmax(hidden), words, reduction="none")


@dataclass
class Batch:
    """Rows of several tasks, mixed."""

    source: Tensor  # [B, S]
    words: Tensor  # [B]
    tasks: list[str]  # [B]

    def of(self, chosen: Sequence[int]) -> "Batch":
        """Some of the rows."""
        index = torch.tensor(chosen)
        return Batch(self.source[index], self.words[index], [self.tasks[row] for row in chosen])

    def of_task(self, task: str) -> "Batch":
        """The rows of a task."""
        return self.of([row for row, own in enumerate(self.tasks) if own == task])


def draw_batch(generator: torch.Generator, tasks: Sequence[str], num_rows: int = 12) -> Batch:
    """Rows in no order, at least one for each of the tasks; every task prefers other words."""
    source = torch.randint(11, (num_rows, 3), generator=generator)
    extra = torch.randint(len(tasks), (num_rows - len(tasks),), generator=generator).tolist()
    shuffled = torch.randperm(num_rows, generator=generator).tolist()
    rows = [*tasks, *(tasks[i] for i in extra)]
    own = [rows[i] for i in shuffled]
    words = torch.tensor([(len(task) + sum(map(ord, task)) * 3) % 11 for task in own])
    words = (words + source[:, 0] * (words % 2)) % 11
    return Batch(source, words, own)


def gradients_of_tasks(model: nn.Module, batch: Batch) -> dict[str, dict[str, Tensor]]:
    """task -> parameter -> gradient, one forward and backward for each task; the truth."""
    parameters = dict(model.named_parameters())
    found = {}
    for task in dict.fromkeys(batch.tasks):
        own = batch.of_task(task)
        loss = model(own.source, own.words).sum()
        values = torch.autograd.grad(loss, list(parameters.values()))
        found[task] = dict(zip(parameters, values, strict=True))
    return found


def descend(model: nn.Module, *, lr: float) -> None:
    """Plain gradient descent, and `.grad` emptied."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)
                parameter.grad = None

"""Published ways to mix tasks by their gradients or losses, beside temperatures.

A mixture has `shares` (task -> probability) and learns from what a step shows. Two read the Gram
matrices of half-batches: the aligner gets tasks "fr#a", "fr#b" and, with weight 0, "fr#dev".

    python studies/mixtures.py          # a toy with much repetition: test losses of all of them

    PiKE   Li et al., NeurIPS 2025      p_k *= exp(z1 |grad L_k|^2 - z2 / (2 b) var_k)
    DoGE   Fan et al., ICML 2024        p_k *= exp(lr / mu sum_l <grad L_l of dev, grad L_k>)
    ADO    Jiang et al., ICLR 2025      p_k ~ prior_k sqrt(history_k) slope of a power law of L_k
"""

# T tasks

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gradvac import Aligner, Alignment, Sum
from gradvac.sampling import repetition_temperature, task_probabilities

Shares = dict[str, float]
PARTS = ("a", "b", "dev")


class Estimates(NamedTuple):
    """What a step says about the mean loss of every task's rows.

    Attributes:
        squared: Squared length of its gradient, without the noise of the batch, `[T]`.
        variance: Of the gradient of a row, `[T]`.
        to_dev: [l, k]: product of the gradients of l on development rows and of k, `[T, T]`.
    """

    squared: Tensor
    variance: Tensor
    to_dev: Tensor


def parts_of(tasks: Sequence[str]) -> list[str]:
    """The task names of the aligner."""
    return [f"{task}#{part}" for task in tasks for part in PARTS]


def estimates(alignment: Alignment, rows: Tensor, dev_rows: Tensor) -> Estimates:
    """Read a step whose losses were divided by a common number.

    Args:
        alignment: Of `parts_of(tasks)`, all present.
        rows: Rows of both halves of every task together, relative to that number, `[T]`.
        dev_rows: Its development rows, likewise.
    """
    gram = alignment.gram.sum(0).double()
    a, b, dev = (slice(part, None, 3) for part in range(3))
    cross, both = gram[a, b].diagonal(), gram[a, a] + gram[a, b] + gram[b, a] + gram[b, b]
    squared = 4 * cross / rows**2
    variance = (both.diagonal() - 4 * cross) / rows
    to_dev = (gram[dev, a] + gram[dev, b]) / (dev_rows[:, None] * rows)
    return Estimates(squared, variance, to_dev)


def updated(shares: Shares, scores: Sequence[float], floor: float) -> Shares:
    """Shares times the exponentials of scores, with a least share."""
    logs = [math.log(share) + score for share, score in zip(shares.values(), scores, strict=True)]
    powers = [math.exp(log - max(logs)) for log in logs]
    total, num = math.fsum(powers), len(powers)
    return {
        task: (1 - floor) * power / total + floor / num
        for task, power in zip(shares, powers, strict=True)
    }


class Seen(NamedTuple):
    """A step: its number from 1, what its gradients say, and the mean training loss of tasks."""

    step: int
    gradients: Estimates
    losses: Mapping[str, float]


class Mixture(Protocol):
    """Shares that learn."""

    shares: Shares

    def learn(self, seen: Seen) -> None:
        """Take note of a step."""
        ...


class Fixed:
    """A temperature."""

    def __init__(self, sizes: Mapping[str, int], temperature: float) -> None:
        self.shares = task_probabilities(sizes, temperature)

    def learn(self, seen: Seen) -> None:
        """Nothing."""


class Pike:
    """PiKE: tasks with long and certain gradients."""

    def __init__(self, tasks: Sequence[str], *, signal: float, noise: float, batch: int) -> None:
        self.shares = {task: 1 / len(tasks) for task in tasks}
        self._signal, self._noise = signal, noise / (2 * batch)

    def learn(self, seen: Seen) -> None:
        """One step of exponentiated gradient."""
        scores = self._signal * seen.gradients.squared - self._noise * seen.gradients.variance
        self.shares = updated(self.shares, scores.tolist(), floor=0.01)


class Doge:
    """DoGE: tasks whose gradients point where development losses fall."""

    def __init__(self, tasks: Sequence[str], *, rate: float) -> None:
        self.shares, self._rate = {task: 1 / len(tasks) for task in tasks}, rate

    def learn(self, seen: Seen) -> None:
        """One step of mirror descent."""
        scores = self._rate * seen.gradients.to_dev.sum(0)
        self.shares = updated(self.shares, scores.tolist(), floor=0.02)


class Ado:
    """ADO: tasks whose loss still falls, by a power law of the rows seen."""

    def __init__(self, sizes: Mapping[str, int], *, fewest: int = 10, floor: float = 0.01) -> None:
        self._prior = task_probabilities(sizes, 1.0)
        self.shares, self._history = dict(self._prior), dict(self._prior)
        self._seen: list[tuple[int, dict[str, float]]] = []
        self._fewest, self._floor = fewest, floor

    def learn(self, seen: Seen) -> None:
        """Fit the power laws again, and mix."""
        self._seen.append((seen.step, dict(seen.losses)))
        if len(self._seen) < self._fewest:
            return
        steps = np.array([at for at, _ in self._seen], float)
        slopes = {
            task: power_slope(steps, np.array([found[task] for _, found in self._seen]))
            for task in self.shares
        }
        credit = {t: self._prior[t] * math.sqrt(self._history[t]) * slopes[t] for t in slopes}
        total = math.fsum(credit.values()) or 1.0
        num = len(credit)
        self.shares = {
            task: (1 - self._floor * num) * value / total + self._floor
            for task, value in credit.items()
        }
        self._history = {t: 0.9 * self._history[t] + 0.1 * self.shares[t] for t in credit}


def power_slope(steps: np.ndarray, losses: np.ndarray) -> float:
    """How fast e + c n^-a, fitted to losses, falls at the last step; never below 1e-12."""
    best, slope = math.inf, 1e-12
    for part in (0.0, 0.5, 0.8, 0.95):
        least = part * losses.min()
        logs = np.log(np.maximum(losses - least, 1e-12))
        gradient, start = np.polyfit(np.log(steps), logs, 1)
        error = float(((np.exp(start) * steps**gradient + least - losses) ** 2).sum())
        if error < best:
            now = -gradient * np.exp(start) * steps[-1] ** (gradient - 1)
            best, slope = error, max(1e-12, float(now))
    return slope


SIZES = {"large": 3000, "middle": 600, "small": 150, "tiny": 40}
_BATCH, _EVERY, _STEPS, _DEV, _SEEDS = 32, 10, 1500, 16, 6


def toy_data(seed: int, num: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Rows of tasks that share half of what there is to learn, with noise in the labels."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.Generator().manual_seed(0)
    shared = torch.randn(12, generator=truth)
    found = {}
    for task in SIZES:
        own = (shared + torch.randn(12, generator=truth)) / 12**0.5
        x = torch.randn(num, 12, generator=draw)
        y = torch.tanh(2 * x @ own) + 0.3 * torch.randn(num, generator=draw)
        found[task] = x, y
    return found


def train_toy(mixture: Mixture, seed: int, num_steps: int = _STEPS) -> float:
    """The mean test loss over tasks after training with a mixture."""
    torch.manual_seed(seed)
    tasks = list(SIZES)
    inputs = 12 + len(tasks)
    model = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    names = parts_of(tasks)
    aligner = Aligner(model, names, Sum(weights={n: 0.0 for n in names if n.endswith("#dev")}))
    rows, test = toy_data(seed + 1000, max(SIZES.values())), toy_data(seed + 2000, 500)
    dev = toy_data(seed + 3000, _DEV)

    def losses_of(chosen: Sequence[tuple[str, Tensor, Tensor]]) -> Tensor:
        tags = [torch.eye(len(tasks))[tasks.index(t)].expand(len(x), -1) for t, x, _ in chosen]
        x, y = (torch.cat([one[place] for one in chosen]) for place in (1, 2))
        found: Tensor = (model(torch.cat([x, torch.cat(tags)], 1))[:, 0] - y).square()
        return found

    def drawn(task: str, count: int) -> tuple[str, Tensor, Tensor]:
        which = torch.randint(SIZES[task], (count,))
        return task, rows[task][0][which], rows[task][1][which]

    for step in range(num_steps):
        draw = np.random.default_rng([seed, step])
        counts = np.maximum(2, draw.multinomial(_BATCH, list(mixture.shares.values()))).tolist()
        chosen = [drawn(task, count) for task, count in zip(tasks, counts, strict=True)]
        optimizer.zero_grad()
        if step % _EVERY:
            (losses_of(chosen).sum() / _BATCH).backward()
        else:
            labels = [3 * k + n % 2 for k, count in enumerate(counts) for n in range(count)]
            labels += [3 * k + 2 for k in range(len(tasks)) for _ in range(_DEV)]
            losses = losses_of([*chosen, *((task, *dev[task]) for task in tasks)])
            alignment = aligner.backward(losses / _BATCH, torch.tensor(labels))
            dev_rows = torch.full((len(tasks),), _DEV / _BATCH)
            seen = estimates(alignment, torch.tensor(counts) / _BATCH, dev_rows)
            by_task = torch.split(losses.detach()[: sum(counts)], counts)
            means = {t: float(own.mean()) for t, own in zip(tasks, by_task, strict=True)}
            mixture.learn(Seen(step + 1, seen, means))
        optimizer.step()
    with torch.no_grad():
        return float(losses_of([(task, *test[task]) for task in tasks]).mean())


def main() -> None:
    """Print the test losses of all mixtures, and what they differ by from the first, by seed."""
    tasks, auto = list(SIZES), repetition_temperature(SIZES, _STEPS * _BATCH)
    makers: dict[str, Callable[[], Mixture]] = {
        **{f"temperature {t:g}": partial(Fixed, SIZES, t) for t in (5, 1, 2, 3)},
        f"law of repetition ({auto:g})": lambda: Fixed(SIZES, auto),
        "DoGE": lambda: Doge(tasks, rate=0.1),
        "PiKE": lambda: Pike(tasks, signal=0.1, noise=0.1, batch=_BATCH),
        "ADO": lambda: Ado(SIZES),
    }
    first = np.zeros(_SEEDS)
    for number, (name, make) in enumerate(makers.items()):
        found = np.array([train_toy(make(), seed) for seed in range(_SEEDS)])
        first = first if number else found
        spread = (found - first).std(ddof=1) / math.sqrt(_SEEDS)
        print(f"{name:24} {found.mean():.4f}  {(found - first).mean():+.4f} ± {spread:.4f}")


if __name__ == "__main__":
    main()

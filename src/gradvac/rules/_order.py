"""The random order in which a task visits the others, as a pure function of names and step.

A generator would tie the order to how tasks are listed and to which components were weighed first.
Hashing (seed, step, component, task, other task) does not: a run resumed with its tasks reordered,
a component weighed alone, and every rank of a distributed run see the same order. The hash runs on
the device, because the step counter lives there.
"""

# K components, T tasks

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_MIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's multipliers as signed integers
_GOLDEN = -7046029254386353131


def name_keys(names: Sequence[str]) -> Tensor:
    """One fixed 64-bit key per name."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests])


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 arithmetic wraps around as it needs."""
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical, where >> on int64 is arithmetic


def random_order(seed: int, step: Tensor, components: Tensor, tasks: Tensor) -> Tensor:
    """Positions of the other tasks in visiting order, `[K, T, T - 1]`.

    Args:
        seed: Of the rule.
        step: Scalar counter on the device.
        components: Name keys `[K]`.
        tasks: Name keys `[T]` of the present tasks.
    """
    start = _mix(components + _mix(step * _GOLDEN + seed))
    key = _mix(_mix(start[:, None] + tasks)[:, :, None] + tasks)  # [K, T, T]
    return _others(key)


def fixed_order(rank: Tensor, num_components: int) -> Tensor:
    """Every task visits the others by ascending rank, `[K, T, T - 1]`."""
    num_tasks = len(rank)
    return _others(rank.expand(num_components, num_tasks, num_tasks))


def _others(key: Tensor) -> Tensor:
    """Sort by key, leaving the task itself out."""
    num_tasks = key.shape[-1]
    is_itself = torch.eye(num_tasks, dtype=torch.bool, device=key.device)
    key = key.masked_fill(is_itself, torch.iinfo(torch.int64).max)
    return key.argsort(-1)[..., : num_tasks - 1]

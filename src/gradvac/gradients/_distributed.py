"""Collectives between the processes of a job: every one of them is in this file.

Where all processes of a job train together, they run in a process group of their own, so that they
cannot be mistaken for those of the model. Each counts what this process sends.
"""

# W processes

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

Found = TypeVar("Found")

_own_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()
# The name before torch 2.13, where it is deprecated.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_PATIENCE = 5.0  # seconds that a process waits to learn which others are still there


class Ranks:
    """The processes that train one model together.

    Args:
        group: The process group they are in.

    Attributes:
        rank: Ours, in the group.
        size: Their number, W.
        sent: Bytes this process has sent, by kind of collective, where rings are used.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        own = _own_groups.get(group)
        if own is None:
            # A part of the job cannot make a group by itself: the others would have to take part.
            is_everyone = dist.get_world_size(group) == dist.get_world_size()
            own = _own_groups[group] = dist.new_group() if is_everyone else group
        self._group = own
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()

    def all_gather(self, own: Tensor) -> Tensor:
        """Tensors of one size from all processes, `[W, ...]`."""
        found = own.new_empty(self.size, *own.shape)
        flat = found.view(-1)
        self._run(lambda: _gather(flat, own.reshape(-1), group=self._group))
        self.sent["all_gather"] += (self.size - 1) * own.nbytes
        return found

    def all_to_all(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """Slice r of `own` `[W, m, S]` to process r; rows of all processes come back.

        Args:
            own: What goes to whom.
            sizes: Rows m of every process.

        Returns:
            `[sum of sizes, S]`, by process.
        """
        width = own.shape[2]
        found = own.new_empty(sum(sizes), width)
        counts, mine = [size * width for size in sizes], own.shape[1] * width
        self._run(
            lambda: dist.all_to_all_single(
                found.view(-1), own.reshape(-1), counts, [mine] * self.size, group=self._group
            )
        )
        self.sent["all_to_all"] += (self.size - 1) * mine * own.element_size()
        return found

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        self._run(lambda: dist.all_reduce(values, group=self._group))
        self.sent["all_reduce"] += 2 * (self.size - 1) * values.nbytes // self.size
        return values

    def from_first(self, values: Tensor) -> Tensor:
        """What the first process has."""
        values = values.contiguous()
        self._run(lambda: dist.broadcast(values, group=self._group, group_src=0))
        self.sent["broadcast"] += values.nbytes if self.rank == 0 else 0
        return values

    def gather_objects(self, own: object) -> list[Any]:
        """Any objects, from all processes."""
        found: list[Any] = [None] * self.size
        self._run(lambda: dist.all_gather_object(found, own, group=self._group))
        return found

    def _run(self, collective: Callable[[], Found]) -> Found:
        try:
            return collective()
        except RuntimeError as error:
            raise RuntimeError(
                f"processes: rank {self.rank} of {self.size} could not exchange gradients: "
                f"{self._missing()}. This step is lost; start the job again from its last "
                f"checkpoint. ({_first_line(error)})"
            ) from error

    def _missing(self) -> str:
        """Who gives no sign of life, in words."""
        try:
            # Those who still wait for us notice when our connections close.
            dist.destroy_process_group(self._group)
            store = dist.distributed_c10d._get_default_store()
            mark = f"gradvac/{self._group.group_name}/alive"
            store.set(f"{mark}/{self.rank}", "1")
            missing = [rank for rank in range(self.size) if rank != self.rank]
            end = time.monotonic() + _PATIENCE
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"{mark}/{rank}"])]
                time.sleep(0.05)
        except (RuntimeError, ValueError):  # whoever kept the store is gone
            return "the process that keeps the rendezvous has ended too"
        if not missing:
            return "all processes are there, but their exchange failed"
        who = ", ".join(str(rank) for rank in missing)
        return f"rank {who} has ended or does not answer"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def device_of(parameters: Sequence[Tensor]) -> torch.device:
    """The device of a model that is trained by several processes."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f"model: its parameters are on {len(devices)} devices "
            f"({', '.join(sorted(map(str, devices)))}); with several processes, each process needs "
            "its replica on one device."
        )
    return devices.pop()

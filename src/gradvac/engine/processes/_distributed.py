"""Collectives between the processes of a job: every one of them is in this file.

Where all processes of a job train together, they run in process groups of their own, so that they
cannot be mistaken for those of the model. Each counts what this process sends.
"""

# W processes

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

Found = TypeVar("Found")

_Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]  # between devices, and between hosts
_own_groups: "WeakKeyDictionary[dist.ProcessGroup, _Pair]" = WeakKeyDictionary()
# The name before torch 2.13, where it is deprecated.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_PATIENCE = 5.0  # seconds that a process waits to learn which others are still there


class RankError(RuntimeError):
    """Another process of the job has ended, or could not go on; says which."""


class Arriving:
    """What a collective brings, and may still be on its way; what is sent is kept until then."""

    def __init__(
        self, found: Tensor, wait: Callable[[], object] | None = None, given: Tensor | None = None
    ) -> None:
        self._found, self._wait, self._given = found, wait, given

    def wait(self) -> Tensor:
        """What came."""
        if self._wait is not None:
            self._wait()
        self._wait = self._given = None
        return self._found


class Ranks:
    """The processes that train one model together.

    Args:
        group: The process group they are in.
        patience: Give these collectives a group of their own, of the hosts, in which processes
            wait so long for each other; None: as long as in `group`.

    Attributes:
        rank: Ours, in the group.
        size: Their number, W.
        sent: Bytes this process has sent, by kind of collective, where rings are used.
        is_broken: A collective has failed: there are no others.
    """

    def __init__(self, group: dist.ProcessGroup, *, patience: timedelta | None = None) -> None:
        groups = _own_groups.get(group)
        if patience is not None:
            patient = dist.new_group(backend="gloo", timeout=patience)
            groups = (patient, patient)
        elif groups is None:
            groups = _own_groups[group] = _groups_like(group)
        self._group, self._hosts = groups
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.is_broken = False

    def gather_words(self, own: Tensor) -> Tensor:
        """A few numbers `[n]` of every process, for the host, `[W, n]`."""
        is_host = "gloo" in dist.get_backend(self._hosts)
        values = own.to("cpu" if is_host else "cuda")
        gathered = values.new_empty(self.size, len(values))
        self.run(lambda: _gather(gathered.view(-1), values, group=self._hosts))
        self.sent["words"] += (self.size - 1) * values.nbytes
        return gathered.cpu()

    def all_gather_later(self, own: Tensor, num: int, among: dist.ProcessGroup | None) -> Arriving:
        """Tensors of one size from all processes, or from `num` among them, `[num, ...]`."""
        gathered = own.new_empty(num, *own.shape)
        group = self._group if among is None else among
        work = self.run(
            lambda: _gather(gathered.view(-1), own.reshape(-1), group=group, async_op=True)
        )
        self.sent["all_gather"] += (num - 1) * own.nbytes
        return Arriving(gathered, lambda: self.run(work.wait), own)

    def all_to_all(self, own: Tensor, sizes: Sequence[int]) -> Arriving:
        """Slice r of `own` `[W, m, S]` to process r; back come those of all, `[sum(sizes), S]`."""
        width = own.shape[2]
        received = own.new_empty(sum(sizes), width)
        counts, mine = [size * width for size in sizes], own.shape[1] * width
        work = self.run(
            lambda: dist.all_to_all_single(
                received.view(-1),
                own.reshape(-1),
                counts,
                [mine] * self.size,
                group=self._group,
                async_op=True,
            )
        )
        self.sent["all_to_all"] += (self.size - 1) * mine * own.element_size()
        return Arriving(received, lambda: self.run(work.wait), own)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        self.run(lambda: dist.all_reduce(values, group=self._group))
        self.sent["all_reduce"] += 2 * (self.size - 1) * values.nbytes // self.size
        return values

    def from_first(self, values: Tensor) -> Tensor:
        """What the first process has."""
        values = values.contiguous()
        self.run(lambda: dist.broadcast(values, group=self._group, group_src=0))
        self.sent["broadcast"] += values.nbytes if self.rank == 0 else 0
        return values

    def gather_objects(self, own: object) -> list[Any]:
        """Any objects, from all processes."""
        gathered: list[Any] = [None] * self.size
        self.run(lambda: dist.all_gather_object(gathered, own, group=self._hosts))
        return gathered

    def run(self, collective: Callable[[], Found]) -> Found:
        """Run a collective, and name who is missing if it fails."""
        try:
            return collective()
        except RuntimeError as error:
            self.is_broken = True
            raise RankError(
                f"processes: rank {self.rank} of {self.size} could not reach the others: "
                f"{self._missing()}. This step is lost; start the job again from its last "
                f"checkpoint. ({_first_line(error)})"
            ) from error

    def _missing(self) -> str:
        """Who gives no sign of life, in words."""
        try:
            # Those who still wait for us notice when our connections close.
            mark = f"gradvac/{self._group.group_name}/alive"
            for group in {self._group, self._hosts}:
                dist.destroy_process_group(group)
            store = dist.distributed_c10d._get_default_store()
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


def _groups_like(group: dist.ProcessGroup) -> _Pair:
    """Groups of our own between devices and between hosts, where no device is waited for."""
    # A part of the job cannot make a group by itself: the others would have to take part.
    if dist.get_world_size(group) != dist.get_world_size():
        return group, group
    own = dist.new_group()
    return own, own if dist.get_backend(own) == "gloo" else dist.new_group(backend="gloo")


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

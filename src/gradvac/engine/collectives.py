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

import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")

_Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]  # between devices, and between hosts
_groups_of_ours: "WeakKeyDictionary[dist.ProcessGroup, _Pair]" = WeakKeyDictionary()
# The name before torch 2.13, where it is deprecated.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
PATIENCE = 5.0  # seconds that a process waits to learn which others are still there


class RankError(RuntimeError):
    """Another process of the job has ended, or could not go on; says which."""


class Pending:
    """The result of a collective that may still run; what is sent is kept alive until then."""

    def __init__(
        self, result: Tensor, wait: Callable[[], object] | None = None, sent: Tensor | None = None
    ) -> None:
        self._result, self._wait, self._sent = result, wait, sent

    def wait(self) -> Tensor:
        """The result."""
        if self._wait is not None:
            self._wait()
        self._wait = self._sent = None
        return self._result


class Ranks:
    """The processes that train one model together.

    Args:
        group: The process group they are in.
        patience: Give these collectives a group of their own, of the hosts, in which processes
            wait so long for each other; None: as long as in `group`.

    Attributes:
        rank: Of this process, in the group.
        size: Number of processes, W.
        sent: Bytes this process has sent, by kind of collective, where rings are used.
        is_broken: A collective has failed: no further one can run.
    """

    def __init__(self, group: dist.ProcessGroup, *, patience: timedelta | None = None) -> None:
        groups = _groups_of_ours.get(group)
        if patience is not None:
            patient = dist.new_group(backend="gloo", timeout=patience)
            groups = (patient, patient)
        elif groups is None:
            groups = _groups_of_ours[group] = _groups_like(group)
        self._group, self._hosts = groups
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.is_broken = False

    def gather_words(self, local: Tensor) -> Tensor:
        """A few numbers `[n]` of every process, for the host, `[W, n]`."""
        is_host = "gloo" in dist.get_backend(self._hosts)
        values = local.to("cpu" if is_host else "cuda")
        gathered = values.new_empty(self.size, len(values))
        self.run(lambda: _gather(gathered.view(-1), values, group=self._hosts))
        self.sent["words"] += (self.size - 1) * values.nbytes
        return gathered.cpu()

    def all_gather(self, local: Tensor, num: int, among: dist.ProcessGroup | None) -> Pending:
        """Tensors of one size from all processes, or from the `num` of a group, `[num, ...]`."""
        gathered = local.new_empty(num, *local.shape)
        group = self._group if among is None else among
        work = self.run(
            lambda: _gather(gathered.view(-1), local.reshape(-1), group=group, async_op=True)
        )
        self.sent["all_gather"] += (num - 1) * local.nbytes
        return Pending(gathered, lambda: self.run(work.wait), local)

    def all_to_all(self, local: Tensor, sizes: Sequence[int]) -> Pending:
        """Send slice r of `[W, m, S]` to process r; receive one of each, `[sum(sizes), S]`."""
        width = local.shape[2]
        received = local.new_empty(sum(sizes), width)
        counts, num_sent = [size * width for size in sizes], local.shape[1] * width
        work = self.run(
            lambda: dist.all_to_all_single(
                received.view(-1),
                local.reshape(-1),
                counts,
                [num_sent] * self.size,
                group=self._group,
                async_op=True,
            )
        )
        self.sent["all_to_all"] += (self.size - 1) * num_sent * local.element_size()
        return Pending(received, lambda: self.run(work.wait), local)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        self.run(lambda: dist.all_reduce(values, group=self._group))
        self.sent["all_reduce"] += 2 * (self.size - 1) * values.nbytes // self.size
        return values

    def from_first(self, values: Tensor) -> Tensor:
        """The values of the first process."""
        values = values.contiguous()
        self.run(lambda: dist.broadcast(values, group=self._group, group_src=0))
        self.sent["broadcast"] += values.nbytes if self.rank == 0 else 0
        return values

    def gather_objects(self, local: object) -> list[Any]:
        """Any objects, from all processes."""
        gathered: list[Any] = [None] * self.size
        self.run(lambda: dist.all_gather_object(gathered, local, group=self._hosts))
        return gathered

    def run(self, collective: Callable[[], Result]) -> Result:
        """Run a collective, and name who is missing if it fails."""
        try:
            return collective()
        except RuntimeError as error:
            self.is_broken = True
            text = str(error).strip()
            first_line = text.splitlines()[0] if text else type(error).__name__
            raise RankError(
                f"processes: rank {self.rank} of {self.size} could not reach the others: "
                f"{self._missing()}. This step is lost; start the job again from its last "
                f"checkpoint. ({first_line})"
            ) from error

    def _missing(self) -> str:
        """Which processes do not answer, in words."""
        try:
            # Processes that still wait for this one notice when its connections close.
            prefix = f"gradvac/{self._group.group_name}/alive"
            for group in {self._group, self._hosts}:
                dist.destroy_process_group(group)
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{prefix}/{self.rank}", "1")
            missing = [rank for rank in range(self.size) if rank != self.rank]
            end = time.monotonic() + PATIENCE
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
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
    ours = dist.new_group()
    return ours, ours if dist.get_backend(ours) == "gloo" else dist.new_group(backend="gloo")

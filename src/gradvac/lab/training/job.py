"""The processes that train one run together, seen from one of them.

`torchrun` starts them; each gets its slice of every batch. The first process does what a run does
once (files, validation, messages), and all of them agree on how the run continues: they take the
same steps and stop at the same one. A job of one process is the same, with no one to ask.
"""

import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gradvac.engine import RankError, Ranks
from gradvac.lab.training.environment import choose_device
from gradvac.lab.training.log import Display
from gradvac.lab.training.workload import BatchSlice
from gradvac.utils.hints import some

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Found = TypeVar("Found")
_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# How long processes wait for one that prepares data, validates or writes. If one dies, the others
# notice at once, whatever this is.
_LONG_WORK = timedelta(days=7)
_COMMUNICATION = re.compile(r"gloo|nccl|process ?group|connection", re.IGNORECASE)
_PREFIX = "gradvac/rendezvous"
_ARRIVAL = timedelta(minutes=30)  # for all processes to come
_POLL_EVERY = 0.02  # seconds
_current: "ContextVar[Job | None]" = ContextVar("job", default=None)


class Job:
    """This process and those it trains with.

    Args:
        group: The processes; None: there are no others.
        local_rank: Number of this process on its machine.
    """

    def __init__(self, group: "ProcessGroup | None" = None, *, local_rank: int = 0) -> None:
        self.group, self._local_rank = group, local_rank
        self.rank, self.size = 0, 1
        if group is not None:
            self._waiting = Ranks(group, patience=_LONG_WORK)
            self._stepping = Ranks(group)
            self.rank, self.size = self._waiting.rank, self._waiting.size

    @property
    def is_first(self) -> bool:
        """Whether this process writes, validates and logs."""
        return self.rank == 0

    @property
    def batch_slice(self) -> BatchSlice:
        """The local rows of every batch."""
        return BatchSlice(self.rank, self.size)

    def display(self, display: Display | None) -> Display:
        """Where the messages of this process go; only the first one shows any."""
        if self.is_first:
            return display or Display()
        return Display(Console(quiet=True), quiet=True)

    def device(self, name: str) -> torch.device:
        """The device of this process; of several GPUs, each process takes its own."""
        device = choose_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise ValueError(
                f"train.device: {name!r} is one GPU, but {self.size} processes train; use "
                '"auto" or "cuda", and each takes its own.'
            )
        if self._local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"train.device: rank {self.rank} is process {self._local_rank} of its machine, "
                f"counted from 0, but finds {torch.cuda.device_count()} GPU(s); start one process "
                'per GPU, all of which see all GPUs of the machine, or use "cpu".'
            )
        device = torch.device("cuda", self._local_rank)
        torch.cuda.set_device(device)
        return device

    def seed(self, seed: int, *, step: int = 0) -> int:
        """A seed for what differs between processes, such as dropout; the first keeps `seed`."""
        if self.is_first:
            return seed
        return int(np.random.SeedSequence([seed, self.rank, step]).generate_state(1)[0])

    # -- agreement -----------------------------------------------------------------------------

    def gather(self, local: Any) -> list[Any]:
        """Objects of all processes, by rank."""
        return [local] if self.size == 1 else self._waiting.gather_objects(local)

    def together(self, work: Callable[[], Found]) -> Found:
        """Do something in every process; if it fails in one, it fails in all.

        Raises:
            RankError: It failed in another one.
        """
        if self.size == 1:
            return work()
        error = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(errors):
            if message is not None:
                raise RankError(
                    f"processes: rank {rank} could not go on, so rank {self.rank} stops too: "
                    f"{message}"
                )
        return result

    def on_first(self, work: Callable[[], Found]) -> Found:
        """Do something in the first process only; all get its result, or fail with it."""
        if self.size == 1:
            return work()
        result = self.together(lambda: work() if self.is_first else None)
        first: Found = self.gather(result)[0]
        return first

    def first_then_others(self, work: Callable[[], Found]) -> Found:
        """Do something in the first process, then in the others: it prepares what all then open."""
        if self.size == 1:
            return work()
        result = self.together(lambda: work() if self.is_first else None)
        return self.together(lambda: work() if result is None else result)

    def check_same(self, given: Mapping[str, str]) -> None:
        """Refuse to train if processes were given different things.

        Raises:
            ValueError: Names the first process that differs, and in what.
        """
        first, *others = self.gather(dict(given))
        for rank, other in enumerate(others, start=1):
            differing = [name for name in first if first[name] != other.get(name)]
            if differing:
                raise ValueError(
                    f"processes: rank {rank} and rank 0 differ in {some(differing)}. All of them "
                    "need the same config, the same data and the same storage."
                )

    def agree_on_stop(self, received: str | None) -> str | None:
        """The signal that any process received; asked after every step."""
        if self.size == 1:
            return received
        number = 0 if received is None else int(signal.Signals[received])
        numbers = self._stepping.gather_words(torch.tensor([number]))
        signals = numbers[numbers > 0].tolist()
        return signal.Signals(signals[0]).name if signals else None

    @contextmanager
    def naming_who_is_gone(self) -> Iterator[None]:
        """Wraps communication by others than us: says which process is missing if it fails."""
        try:
            yield
        except RuntimeError as error:
            if self.size > 1 and _COMMUNICATION.search(str(error)):
                self.agree_on_stop(None)  # fails as well, and knows whom it waited for
            raise

    def add_up(self, sums: Mapping[str, Tensor | float], device: torch.device) -> dict[str, Any]:
        """Sums over the rows of all processes; every process has the same names."""
        if self.size == 1:
            return dict(sums)
        names = sorted(sums)
        local_sums = [
            torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in names
        ]
        total = self._stepping.all_reduce(torch.cat([own.reshape(-1) for own in local_sums]))
        parts = total.split([own.numel() for own in local_sums])
        shaped = (part.view_as(own) for part, own in zip(parts, local_sums, strict=True))
        return dict(zip(names, shaped, strict=True))


@contextmanager
def join(device: str = "auto") -> Iterator[Job]:
    """Join the processes that a launcher started; without a launcher, work alone.

    An existing process group is used as it is. A `join` inside another returns the same job.

    Args:
        device: `train.device`, which decides how processes communicate.

    Raises:
        ValueError: The environment announces several processes, but not where they meet.
    """
    current = _current.get()
    if current is not None:
        yield current
        return
    is_ours = not _is_initialized() and _announced() > 1
    if is_ours:
        on_gpu = choose_device(device).type == "cuda"
        _rendezvous("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    group = distributed.group.WORLD if _is_initialized() else None
    if group is not None and distributed.get_world_size() == 1:
        group = None
    job = Job(group, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    token = _current.set(job)
    try:
        yield job
    finally:
        _current.reset(token)
    if is_ours:  # after an error the process ends, and the others notice
        distributed.destroy_process_group()


def _is_initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _announced() -> int:
    """How many processes a launcher says there are."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) <= 1:
        return 1
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ValueError(
            f"processes: WORLD_SIZE = {size} says that there are several, but {missing[0]} is not "
            "set; start them with torchrun --nproc-per-node N -m gradvac ..., or unset WORLD_SIZE."
        )
    return int(size)


def check_batch_norm(model: nn.Module) -> None:
    """Refuse layers that make rows depend on which process they are in."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"model: {name} ({type(module).__name__}) takes statistics over the rows of one "
                "process, so that the result depends on how many there are; use nn.LayerNorm, or "
                "train in one process."
            )


def _rendezvous(backend: str) -> None:
    """Make the process group of all processes that the environment announces.

    All attempts of a torchrun share one key-value store, which still holds the keys of processes
    that have died: reading their addresses means waiting for the dead. So the processes of every
    attempt first agree on a number of their own, and use keys that begin with it.
    """
    store, rank, size = next(rendezvous("env://", timeout=_ARRIVAL))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = _hand_out_number(store, size) if rank == 0 else _request_number(store, rank)
        store = PrefixStore(f"{_PREFIX}/{attempt}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def _hand_out_number(store: Store, size: int) -> int:
    """Number the attempt, and answer everybody who asks; in the first process."""
    attempt = store.add(f"{_PREFIX}/attempts", 1)
    missing, answered = set(range(1, size)), set[bytes]()
    end = time.monotonic() + _ARRIVAL.total_seconds()
    while missing and time.monotonic() < end:
        for rank in list(missing):
            if store.check([f"{_PREFIX}/{attempt}/received/{rank}"]):
                missing.remove(rank)
            elif store.check([f"{_PREFIX}/asks/{rank}"]):
                token = store.get(f"{_PREFIX}/asks/{rank}")
                if token not in answered:  # of this attempt, or of a process that is dead
                    store.set(f"{_PREFIX}/answers/{token.decode()}", str(attempt))
                    answered.add(token)
        time.sleep(_POLL_EVERY)
    if missing:
        raise RuntimeError(f"processes: rank {min(missing)} of {size} did not arrive.")
    return attempt


def _request_number(store: Store, rank: int) -> int:
    """Ask for the number, with a token to which the answer is addressed; in all others."""
    token = secrets.token_hex(8)
    store.set(f"{_PREFIX}/asks/{rank}", token)
    store.wait([f"{_PREFIX}/answers/{token}"], _ARRIVAL)
    attempt = int(store.get(f"{_PREFIX}/answers/{token}"))
    store.set(f"{_PREFIX}/{attempt}/received/{rank}", "1")
    return attempt

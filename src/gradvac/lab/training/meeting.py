"""Where the processes of a job meet, also after torchrun has started them again.

All attempts of a torchrun share one key-value store, which still holds the keys of processes that
have died: reading their addresses means waiting for the dead. So the processes of every attempt
first agree on a number of their own, and use keys that begin with it.
"""

import os
import secrets
import time
from datetime import timedelta

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PREFIX = "gradvac/meeting"
_PATIENCE = timedelta(minutes=30)  # for all processes to come
_PAUSE = 0.02  # seconds between two looks


def meet(backend: str) -> None:
    """Make the process group of all processes that the environment announces.

    Args:
        backend: As in `init_process_group`.
    """
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = _number(store, size) if rank == 0 else _ask(store, rank)
        store = PrefixStore(f"{_PREFIX}/{attempt}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def _number(store: Store, size: int) -> int:
    """What the first process does: number the attempt, and tell everybody who asks."""
    attempt = store.add(f"{_PREFIX}/attempts", 1)
    missing, told = set(range(1, size)), set[bytes]()
    end = time.monotonic() + _PATIENCE.total_seconds()
    while missing and time.monotonic() < end:
        for rank in list(missing):
            if store.check([f"{_PREFIX}/{attempt}/heard/{rank}"]):
                missing.remove(rank)
            elif store.check([f"{_PREFIX}/asks/{rank}"]):
                sign = store.get(f"{_PREFIX}/asks/{rank}")
                if sign not in told:  # of this attempt, or of a process that is dead
                    store.set(f"{_PREFIX}/tells/{sign.decode()}", str(attempt))
                    told.add(sign)
        time.sleep(_PAUSE)
    if missing:
        raise RuntimeError(f"processes: rank {min(missing)} of {size} did not arrive.")
    return attempt


def _ask(store: Store, rank: int) -> int:
    """What every other process does; the answer is addressed to a token that only it knows."""
    sign = secrets.token_hex(8)
    store.set(f"{_PREFIX}/asks/{rank}", sign)
    store.wait([f"{_PREFIX}/tells/{sign}"], _PATIENCE)
    attempt = int(store.get(f"{_PREFIX}/tells/{sign}"))
    store.set(f"{_PREFIX}/{attempt}/heard/{rank}", "1")
    return attempt

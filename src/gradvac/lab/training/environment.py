"""What a run lives in: device, precision, seeds and random state, threads, and signals."""

import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.attention import SDPBackend, sdpa_kernel

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP")
# Not cuDNN's, which some GPUs prefer: it plans anew for every shape of a batch, which takes ten
# times as long as the step itself. Not the one without masks either: Hugging Face's models leave
# out a mask that hides nothing, but not while a CUDA graph is recorded, and the recorded step would
# not be the one that was verified.
_FOR_ANY_SHAPE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; "auto": the first GPU, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f'device: {name!r} is unknown; use "auto", "cpu" or "cuda:1".') from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        raise ValueError(
            f'device: {name!r} was asked for, but {num_gpus} GPU(s) were found; use "auto" '
            'or "cpu".'
        )
    return device


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process in GiB: of the GPU, or of the machine; NaN: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows has none
        return float("nan")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**30 if sys.platform == "darwin" else 2**20)


@contextmanager
def around_forward(precision: str, device: torch.device) -> Iterator[None]:
    """Autocast if the precision is "bf16", and attention for batches of any shape."""
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with autocast, any_shape_attention(device):
        yield


def any_shape_attention(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, attention by kernels that take every shape as it comes."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(_FOR_ANY_SHAPE)


def set_threads(num: int) -> None:
    """Let torch use this many CPU threads; 0: its own choice."""
    if num:
        torch.set_num_threads(num)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """All global random state, in plain values and tensors."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in _local_gpus()],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; GPUs that did not exist then keep theirs."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for index, gpu_state in zip(_local_gpus(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(gpu_state, index)


def _local_gpus() -> list[int]:
    """All GPUs; with several processes, only the one of this process."""
    if not torch.cuda.is_available():
        return []
    is_one_of_several = distributed.is_available() and distributed.is_initialized()
    if is_one_of_several and distributed.get_world_size() > 1:
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Restore the random state afterwards, whatever is drawn inside."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as a request: the loop finishes its step, saves, and leaves.

    A second signal of the same kind has its usual effect. Signals that are already ignored, as
    SIGHUP is under `nohup`, stay ignored. Outside the main thread, where Python allows no
    handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self.received: str | None = None

    def __enter__(self) -> "StopSignals":
        try:
            for number in (getattr(signal, name, None) for name in _STOPS):  # Windows has no HUP
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._receive)
        except ValueError:  # not the main thread
            self._former = {}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._former[number])
        # print() is not allowed in a handler: it may have interrupted another print().
        message = f"\n{self.received}: finishing this step, then saving; again to leave at once.\n"
        with suppress(OSError):  # the terminal may be gone
            os.write(2, message.encode())

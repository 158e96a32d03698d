"""Sums between two log entries, kept on the device: no host-device synchronisation."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradvac.lab.training.processes import peak_memory


class Meters:
    """What happened since the last log entry, and how long training took in all.

    Part of the checkpoint, so that a resumed run logs what an uninterrupted one would have.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._num_steps = 0
        self._seconds_before, self.seconds = 0.0, 0.0
        self._mark = time.perf_counter()

    def add(self, sums: Mapping[str, Tensor | float], num_tokens: int, bad: Tensor) -> None:
        """Add a step: sums over its tokens, how many those were, and whether it was skipped."""
        for name, value in {**sums, "tokens": float(num_tokens)}.items():
            new = value.detach().double() if isinstance(value, Tensor) else value
            before = self._sums.get(name, self._zero)
            self._sums[name] = before + torch.where(bad, 0.0, self._zero + new)
        self._skipped = self._skipped + bad
        self._in_a_row = (self._in_a_row + 1) * bad
        self._num_steps += 1

    @property
    def bad_in_a_row(self) -> int:
        """Steps skipped without a good one since; waits for the device."""
        return int(self._in_a_row)

    @property
    def skipped(self) -> int:
        """Steps skipped in the whole run; waits for the device."""
        return int(self._skipped)

    def pause(self) -> None:
        """Stop the clock once the device is done: what follows is not training."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - self._mark

    def go_on(self) -> None:
        """Start the clock again."""
        self._mark = time.perf_counter()

    def read(self) -> tuple[dict[str, float], float]:
        """Means per token since the last reading, tokens/s, and seconds per step; resets.

        Also the seconds of the whole run, and the most memory this process needed, in GiB.
        """
        sums = {name: float(value) for name, value in self._sums.items()}
        self.pause()
        self.go_on()
        seconds = max(self.seconds - self._seconds_before, 1e-9)
        tokens = sums.pop("tokens")
        means = {name: value / tokens if tokens else float("nan") for name, value in sums.items()}
        means |= {
            "tokens_per_second": tokens / seconds,
            "seconds": self.seconds,
            "peak_memory": peak_memory(self._device),
        }
        per_step = seconds / self._num_steps
        self._sums, self._num_steps, self._seconds_before = {}, 0, self.seconds
        return means, per_step

    def state_dict(self) -> dict[str, Any]:
        """Everything except the clock's mark."""
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "skipped": self.skipped,
            "in_a_row": self.bad_in_a_row,
            "num_steps": self._num_steps,
            "seconds": self.seconds,
            "seconds_before": self._seconds_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._sums = {name: value.to(self._device) for name, value in state["sums"].items()}
        self._skipped = torch.tensor(state["skipped"], device=self._device)
        self._in_a_row = torch.tensor(state["in_a_row"], device=self._device)
        self._num_steps = state["num_steps"]
        self.seconds, self._seconds_before = state["seconds"], state["seconds_before"]
        self.go_on()

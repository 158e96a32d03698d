"""Tokens: leaves that need a gradient and never get one, and so tell when all uses have arrived.

Autograd counts the edges into a leaf and visits it when the last has been delivered, whatever was
delivered. A prehook on that visit is the signal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Tokens:
    """One token per key, renewed when the work moves to another CUDA stream.

    Autograd runs a leaf's visit on the stream its node was made on. A CUDA graph is recorded on a
    stream of its own, so the tokens have to be made there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: int | None = None
        self._signals: dict[object, Callable[[], None]] = {}
        self._made: dict[object, tuple[Tensor, Any]] = {}  # autograd holds leaf nodes weakly

    def add(self, key: object, signal: Callable[[], None]) -> None:
        """Have `signal` called whenever all uses of `key` in a backward have arrived."""
        self._signals.setdefault(key, signal)

    def renew(self) -> None:
        """To be called when a forward begins."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device).cuda_stream
            if stream != self._stream:
                self._stream, self._made = stream, {}

    def __getitem__(self, key: object) -> Tensor:
        if key not in self._made:
            token = torch.empty((), device=self._device, requires_grad=True)
            node = torch.autograd.graph.get_gradient_edge(token).node
            signal = self._signals[key]
            node.register_prehook(lambda _: signal())
            self._made[key] = (token, node)
        return self._made[key][0]

    def made(self) -> list[Tensor]:
        """The tokens of this stream."""
        return [token for token, _ in self._made.values()]

"""What the processes of a job tell each other before they exchange gradients."""

# W processes, T tasks

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradvac.engine.components import Components
from gradvac.engine.processes._distributed import Ranks
from gradvac.engine.processes._shards import Shards

_FINE, _FAILED, _CHANGED = 0, 1, 2  # what a process says before the exchange


@dataclass(frozen=True)
class Agreed:
    """What all processes know of a step.

    Attributes:
        present: Tasks that any of them has.
        losses: Their losses, `[T]`: means over processes, as gradients are.
        used: Parameters that any task of any process reached.
        grams: Gram matrices of all components, `[K, T, T]`.
    """

    present: tuple[int, ...]
    losses: Tensor
    used: frozenset[nn.Parameter]
    grams: Tensor


class Agreement:
    """A few numbers of every process, twice a step; everything they were set up with, once.

    `facts`, what else must be the same, is asked again when the state has changed.
    """

    def __init__(
        self,
        ranks: Ranks,
        tasks: Sequence[str],
        components: Components,
        shards: Shards,
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        self._ranks, self._tasks, self._components = ranks, tuple(tasks), components
        self._shards, self._facts = shards, facts
        self._parameters = list(shards.leaves.values())
        self._state, self._is_known = _CHANGED, False

    def state_changed(self) -> None:
        """Compare the rule's state with that of the other processes before the next step."""
        self._state = _CHANGED

    def hold(self, tasks: Iterable[int], error: Exception | None) -> tuple[tuple[int, ...], ...]:
        """Before the backward: the tasks of every process.

        Raises:
            Exception: What this process met.
            RuntimeError: Another process met something.
            ValueError: The processes are not set up alike, or none has a row.
        """
        if not self._is_known:
            self._compare("setup", self._set_up())
            self._state, self._is_known = _FINE, True
        state = self._state if error is None else _FAILED
        said, held = self._ask(state, tasks, len(self._tasks), error)
        if _CHANGED in said:
            self._compare("state", self._facts())
            self._state = _FINE
        if not any(held):
            raise ValueError("losses: no process has a row; at least one needs a batch.")
        return tuple(tuple(tasks) for tasks in held)

    def conclude(
        self, used: Collection[nn.Parameter], error: Exception | None
    ) -> frozenset[nn.Parameter]:
        """After the backward: the parameters that any process reached; raises like `hold`."""
        reached = [n for n, p in enumerate(self._parameters) if p in used]
        state = _FINE if error is None else _FAILED
        _, by_rank = self._ask(state, reached, len(self._parameters), error)
        return frozenset(self._parameters[n] for n in {n for own in by_rank for n in own})

    def _ask(
        self, state: int, positions: Iterable[int], num: int, error: Exception | None
    ) -> tuple[list[int], list[list[int]]]:
        """What every process says: its state, and some of `num` positions."""
        own = torch.zeros(1 + num, dtype=torch.uint8)
        own[[1 + position for position in positions]] = 1
        own[0] = state
        every = self._ranks.gather_words(own)
        said = every[:, 0].tolist()
        if _FAILED in said:
            message = None if error is None else f"{type(error).__name__}: {error}"
            messages = self._ranks.gather_objects(message)
            if error is not None:
                raise error
            rank = said.index(_FAILED)
            raise RuntimeError(
                f"processes: rank {rank} could not take this step, so none does: {messages[rank]}"
            )
        return said, [words[1:].nonzero().flatten().tolist() for words in every]

    def _set_up(self) -> dict[str, object]:
        """What must be the same before the first exchange."""
        every = self._shards.every.items()
        return {
            "tasks": self._tasks,
            "granularity": dict(self._components),
            "parameters": [(name, tuple(p.shape), str(p.dtype)) for name, p in every],
            "the number of shards": self._shards.num,
            **self._facts(),
            **{f"the values of {what}": digest(one) for what, one in self._shards.kept().items()},
        }

    def _compare(self, what: str, here: Mapping[str, object]) -> None:
        """Raise in all processes if one differs from the first that has the same."""
        by_rank = self._ranks.gather_objects({key: _shown(value) for key, value in here.items()})
        first: dict[str, int] = {}
        for rank, shown in enumerate(by_rank):
            for key, value in shown.items():
                other = first.setdefault(key, rank)
                if value != by_rank[other][key]:
                    raise ValueError(
                        f"processes: rank {rank} and rank {other} differ in {key}: {value} and "
                        f"{by_rank[other][key]}. All processes need the same Aligner and the same "
                        f"{what}; only their rows differ."
                    )


def _shown(value: object) -> str:
    """A value to compare and to show: whole, or its beginning and a hash."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # where a function lies is its own affair
    if len(text) <= 160:
        return text
    return f"{text[:120]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def digest(state: object) -> str:
    """A hash of nested state, tensors by their bytes."""
    hashed = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            hashed.update(str((value.dtype, tuple(value.shape))).encode())
            values = value.detach().cpu().contiguous().flatten()
            hashed.update(values.view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            for key in value:
                hashed.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            hashed.update(repr(value).encode())

    add(state)
    return hashed.hexdigest()

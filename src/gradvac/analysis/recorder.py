"""The recorder: stores the `Alignment` of training steps, without waiting for the device."""

# S records, K components, T tasks

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradvac import Alignment
from gradvac import gram as geometry
from gradvac.analysis.record import append_chunk, cut_record

_KEPT = ("gram", "weights", "target", "active")  # all else follows from these


@dataclass(eq=False)
class _Chunk:
    """Records on their way to the file; their copies may still be on their way to the host."""

    steps: list[int] = field(default_factory=list)
    present: list[tuple[str, ...]] = field(default_factory=list)
    copies: list[dict[str, Tensor]] = field(default_factory=list)
    arrival: torch.cuda.Event | None = None


class Recorder:
    """Appends every n-th step's alignment to a file, a chunk of records at a time.

    Call it after every step, `recorder(step, alignment)`: it fits `training.train(watch=...)` and
    any loop of your own. A record costs four small asynchronous copies; cosines are computed later,
    on the host. A killed process loses at most the last chunk.

    An existing record is continued. A step that it already holds is refused, as it would count
    twice: remove the file to start again, or say where to continue with `after`.

    Args:
        path: The file; see `gradvac.analysis.record` for its format.
        every: Steps between records.
        tasks: All tasks, in the order to show them; None: in the order they appear.
        rule: Name of the rule, for readers of the record.
        vaccinated: Tasks whose gradients the rule may alter, to which shares of pairs refer; None:
            unknown, to be inferred from what the rule did.
        after: Continue after this step: later records of an earlier process are removed. None:
            continue after the last existing record.
        chunk: Records per chunk.

    Raises:
        ValueError: The file is not a record of a training run; it is left as it is.

    Example:
        >>> import tempfile, torch
        >>> from gradvac import Aligner
        >>> model = torch.nn.Linear(2, 1)
        >>> aligner = Aligner(model, ["fr", "hi"])
        >>> with Recorder(f"{tempfile.mkdtemp()}/record.bin", every=10) as recorder:
        ...     for step in range(1, 21):
        ...         losses = model(torch.randn(4, 2))[:, 0].square()
        ...         recorder(step, aligner.backward(losses, ["fr", "fr", "hi", "hi"]))
    """

    def __init__(
        self,
        path: str | Path,
        *,
        every: int = 10,
        tasks: Sequence[str] = (),
        rule: str = "",
        vaccinated: Sequence[str] | None = None,
        after: int | None = None,
        chunk: int = 20,
    ) -> None:
        if every < 1 or chunk < 1:
            raise ValueError(f"every, chunk: must be at least 1, got {every} and {chunk}.")
        self._every, self._chunk_size = every, chunk
        self._tasks, self._rule, self._vaccinated = tuple(tasks), rule, vaccinated
        self._is_exact = True
        self._components: tuple[str, ...] = ()
        self._device = torch.device("cpu")
        self._open, self._waiting = _Chunk(), list[_Chunk]()
        self._last = cut_record(Path(path), after)
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115

    def __call__(self, step: int, alignment: Alignment) -> None:
        """Keep this step, if it is due."""
        if self._last is not None and step <= self._last:
            raise ValueError(
                f"step: got {step}, but {self._file.name} goes to step {self._last} already; go on "
                f"from there, give the recorder after={step - 1} to replace what follows, or "
                "remove the file."
            )
        if step % self._every:
            return
        self._components, self._device = alignment.components, alignment.gram.device
        self._is_exact &= alignment.exact
        while self._waiting and _has_arrived(self._waiting[0]):
            self._write(self._waiting.pop(0))
        self._open.steps.append(step)
        self._open.present.append(alignment.tasks)
        self._open.copies.append({name: _to_host(getattr(alignment, name)) for name in _KEPT})
        if len(self._open.steps) == self._chunk_size:
            self._close_chunk()

    def flush(self) -> None:
        """Force all records to the disk; waits for the device."""
        if self._open.steps:
            self._close_chunk()
        while self._waiting:
            chunk = self._waiting.pop(0)
            if chunk.arrival is not None:
                chunk.arrival.synchronize()
            self._write(chunk)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left and close the file."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _close_chunk(self) -> None:
        if self._device.type == "cuda":
            self._open.arrival = torch.cuda.Event()
            self._open.arrival.record(torch.cuda.current_stream(self._device))
        self._waiting.append(self._open)
        self._open = _Chunk()

    def _write(self, chunk: _Chunk) -> None:
        seen = (task for present in chunk.present for task in present)
        self._tasks = tuple(dict.fromkeys([*self._tasks, *seen]))
        names: dict[str, Any] = {
            "tasks": self._tasks,
            "components": self._components,
            "rule": self._rule if self._is_exact else f"{self._rule}(approximate similarities)",
        }
        if self._vaccinated is not None:
            names["vaccinated"] = list(self._vaccinated)
        arrays = {name: np.array(value, dtype=np.str_) for name, value in names.items()}
        arrays |= _to_arrays(chunk, self._tasks, len(self._components))
        try:
            append_chunk(self._file, arrays)
        except OSError as error:
            what = f"{os.strerror(error.errno or 0)}: {self._file.name}; make room and go on"
            raise OSError(error.errno, what) from error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _to_host(values: Tensor) -> Tensor:
    """A copy in host memory; from CUDA it is asynchronous, into pinned memory."""
    return values.detach().to("cpu", non_blocking=values.is_cuda, copy=True)


def _has_arrived(chunk: _Chunk) -> bool:
    return chunk.arrival is None or chunk.arrival.query()


def _to_arrays(chunk: _Chunk, tasks: tuple[str, ...], num_components: int) -> dict[str, Any]:
    """The chunk's records over all tasks; absent tasks have zero gradients, then NaN."""
    num_records, num_tasks = len(chunk.steps), len(tasks)
    triples = (num_records, num_components, num_tasks)
    gram = torch.zeros(*triples, num_tasks, dtype=torch.float64)
    weights = torch.zeros(triples, dtype=torch.float64)
    target = torch.full_like(gram, torch.nan)
    active = torch.zeros(gram.shape, dtype=torch.bool)
    is_present = torch.zeros(num_records, 1, num_tasks, dtype=torch.bool)
    for record, (names, copies) in enumerate(zip(chunk.present, chunk.copies, strict=True)):
        places = torch.tensor([tasks.index(name) for name in names])
        for whole, name in ((gram, "gram"), (target, "target"), (active, "active")):
            whole[record, :, places[:, None], places] = copies[name].to(whole.dtype)
        weights[record, :, places] = copies["weights"].double()
        is_present[record, :, places] = True
    norms = geometry.norms(gram)
    tensors = {
        "similarity": geometry.known_cosine(gram).half(),
        "target": target.masked_fill(geometry.has_zero(gram), torch.nan).half(),
        "active": active,
        "weights": weights.masked_fill(~is_present, torch.nan).float(),
        "norms": norms.masked_fill(~is_present, torch.nan).float(),
        "update_cosine": geometry.update_cosine(gram, weights).float(),
        "update_ratio": geometry.update_ratio(gram, weights).float(),
    }
    arrays = {name: values.numpy() for name, values in tensors.items()}
    return {"steps": np.array(chunk.steps, dtype=np.int64), **arrays}

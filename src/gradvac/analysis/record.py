"""The record of a training run, `RUN/record.bin`: `Recorder` writes it, `read_record` reads it.

The file is a sequence of chunks of a few records each, so it can be appended to, and survives a
writer that is killed. A chunk is

    8 bytes   b"gradvac1"
    8 bytes   length of what follows the next field, little-endian
    4 bytes   CRC-32 of it, little-endian
    n bytes   an .npz archive, which `numpy.load` reads

with the arrays below (S records, K components, T tasks). Cosines and targets are float16, which
rounds them by at most 0.0005; they are read back as float32.

    steps         int64   [S]           vaccinated   str     [V]         (not in all records)
    tasks         str     [T]           components   str     [K]         rule   str
    similarity    float16 [S, K, T, T]  NaN: task absent, or without gradient in the component
    target        float16 [S, K, T, T]  NaN: also for rules without targets
    active        bool    [S, K, T, T]
    weights       float32 [S, K, T]     norms        float32 [S, K, T]   NaN: task absent
    update_cosine float32 [S, K]        update_ratio float32 [S, K]

`read_record` skips damaged chunks, and one that is cut off at the end of the file, as a killed
process leaves it. The format needs only NumPy; these lines read a whole file:

    import io, pathlib, numpy
    data, start, chunks = pathlib.Path("record.bin").read_bytes(), 0, []
    while start < len(data):
        end = start + 20 + int.from_bytes(data[start + 8 : start + 16], "little")
        chunks.append(numpy.load(io.BytesIO(data[start + 20 : end])))
        start = end

after which `chunks[0]["similarity"]` is an array as above.
"""

import io
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradvac import Alignment
from gradvac import gram as geometry
from gradvac.analysis.run_files import RunFiles
from gradvac.analysis.similarities import Floats, Similarities
from gradvac.utils.files import open_arrays

_MAGIC = b"gradvac1"
_HEADER = struct.Struct("<8sQI")
_BLOCK = 1 << 20  # bytes read at once: a damaged header may claim any length
_MOST_BYTES = 1 << 30  # of all records that are read at once
_MOST_UNPACKED = 1 << 30  # bytes of a chunk; it may take a thousandth of that on the disk
_PAIRS = ("similarity", "target", "active")  # [S, K, T, T]
_TASKS = ("weights", "norms")  # [S, K, T]
_COMPONENTS = ("update_cosine", "update_ratio")  # [S, K]
_KEPT = ("gram", "weights", "target", "active")  # of an alignment; all else follows from these


@dataclass(frozen=True, eq=False)
class Record:
    """What a run recorded of its alignments.

    Attributes:
        tasks: Task names.
        components: Component names.
        steps: int64 `[S]`.
        similarity: `[S, K, T, T]`, cosines of the unaltered task gradients of a batch.
        target: `[S, K, T, T]`, their targets.
        active: bool `[S, K, T, T]`: [i, j] if g_i was altered against g_j.
        weights: `[S, K, T]`, of the tasks in the update.
        norms: `[S, K, T]`, lengths of the task gradients.
        update_cosine: `[S, K]`, cos(update, plain sum).
        update_ratio: `[S, K]`, ||update|| / ||plain sum||.
        rule: The rule that decided.
        vaccinated: The tasks whose gradients the rule may alter; None if the record does not say.
    """

    tasks: tuple[str, ...]
    components: tuple[str, ...]
    steps: NDArray[np.int64]
    similarity: Floats
    target: Floats
    active: NDArray[np.bool_]
    weights: Floats
    norms: Floats
    update_cosine: Floats
    update_ratio: Floats
    rule: str
    vaccinated: tuple[str, ...] | None = None

    def eligible(self) -> NDArray[np.int64]:
        """Positions of the tasks whose gradients the rule may alter; all, if it alters none.

        If the record does not say, it can be seen: their pairs were active, or their targets moved.
        """
        if self.vaccinated is not None:
            chosen = [i for i, task in enumerate(self.tasks) if task in self.vaccinated]
            return np.array(chosen, dtype=np.int64)
        has_target = ~np.isnan(self.target)
        highest = np.where(has_target, self.target, -np.inf).max(axis=0, initial=-np.inf)
        lowest = np.where(has_target, self.target, np.inf).min(axis=0, initial=np.inf)
        shown = (self.active.any(axis=0) | (highest > lowest)).any(axis=(0, 2))  # [T]
        return np.flatnonzero(shown) if shown.any() else np.arange(len(self.tasks))

    def select(self, tasks: Sequence[str]) -> "Record":
        """The part of these tasks, in the order given."""
        chosen = [self.tasks.index(task) for task in tasks]
        parts = {name: getattr(self, name)[:, :, chosen][..., chosen] for name in _PAIRS}
        parts |= {name: getattr(self, name)[..., chosen] for name in _TASKS}
        return replace(self, tasks=tuple(tasks), **parts)

    def to_frame(self) -> Any:
        """The cosines as a pandas DataFrame: see `Similarities.to_frame`."""
        return self.similarities().to_frame()

    def _repr_html_(self) -> str:
        return self.similarities()._repr_html_()

    def similarities(self) -> Similarities:
        """The cosines alone."""
        return Similarities(
            self.tasks, self.components, self.steps, self.similarity, lines="training"
        )


def read_record(path: str | Path, *, most: int | None = None) -> Record:
    """Read a record; warns of chunks that are damaged or cut off, and leaves them out.

    Args:
        path: The file, or the run folder that holds it.
        most: Read at most this many records, evenly spread; None: all. A record takes 9 K T^2
            bytes in memory; if these would take more than a gigabyte, fewer are read.

    Raises:
        ValueError: The file is empty or something else, no chunk is whole, its components changed
            along the way, or all records (`most` is None) would take more than a gigabyte.
    """
    path = Path(path)
    path = RunFiles(path).record if path.is_dir() else path
    with path.open("rb") as file:
        chunks = list(_chunks(file))
        if not chunks:
            raise ValueError(f"{path}: holds no record yet; the first comes with the first chunk.")
        intact = [chunk for chunk in chunks if chunk.state == "intact"]
        if not intact:
            raise ValueError(
                f"{path}: is not a record of a training run, or no chunk of it is whole; remove "
                "it, or train again."
            )
        for loss in _losses(chunks):
            warnings.warn(f"{path}: {loss}.", stacklevel=2)
        steps, size = [], 0  # of a record, in bytes
        for chunk in intact:
            arrays = _load(file, chunk)
            steps.append(arrays["steps"])
            size = max(size, 9 * len(arrays["components"]) * len(arrays["tasks"]) ** 2)
        total = sum(map(len, steps))
        fit = max(1, _MOST_BYTES // max(1, size))
        if most is None and total > fit:
            raise ValueError(
                f"{path}: has {total:,} records of {size / 1e6:.1f} MB each; read some of them, as "
                f"in read_record(path, most={fit})."
            )
        wanted = np.arange(total)
        if most is not None and total > min(most, fit):
            wanted = np.unique(np.linspace(0, total - 1, min(most, fit)).round().astype(np.int64))
        parts, first = [], 0
        for chunk, chunk_steps in zip(intact, steps, strict=True):
            here = wanted[(wanted >= first) & (wanted < first + len(chunk_steps))] - first
            first += len(chunk_steps)
            if len(here):
                parts.append((_load(file, chunk), here))
        return _join(path, parts)


def append_chunk(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write a chunk at the end of a file."""
    payload = io.BytesIO()
    # As numpy.savez_compressed, but at the fastest level: cosines hardly compress any further.
    with zipfile.ZipFile(payload, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
    content = payload.getvalue()
    left = memoryview(_HEADER.pack(_MAGIC, len(content), zlib.crc32(content)) + content)
    while left:  # an unbuffered write may be partial, for example when the disk fills up
        left = left[file.write(left) :]


def cut_record(path: Path, after: int | None) -> int | None:
    """Prepare a file to be continued: cut what comes after a step (None: nothing) or is partial.

    Damaged chunks stay: there may be good ones after them.

    Returns:
        The last remaining step; None: there is none.

    Raises:
        ValueError: The file is something else.
    """
    if not path.exists():
        return None
    with path.open("r+b") as file:
        if not _MAGIC.startswith(file.read(len(_MAGIC))):
            raise ValueError(
                f"{path}: is not a record of a training run, and is left as it is; give the "
                "recorder another path, or move the file away."
            )
        end, left, rest = 0, list[int](), None
        for chunk in _chunks(file):
            if chunk.state == "cut off":
                break
            if chunk.state == "intact":
                arrays = _load(file, chunk)
                kept = arrays["steps"] <= (np.inf if after is None else after)
                left += arrays["steps"][kept].tolist()
                if not kept.all():
                    per_record = ("steps", *_PAIRS, *_TASKS, *_COMPONENTS)
                    rest = {k: arrays[k][kept] if k in per_record else arrays[k] for k in arrays}
                    break
            end = chunk.end
        file.truncate(end)
        file.seek(end)
        if rest is not None and len(rest["steps"]):
            append_chunk(file, rest)
    return max(left, default=None)


class _Chunk(NamedTuple):
    """Position of a chunk in the file, header included, and its state."""

    start: int
    end: int
    state: Literal["intact", "damaged", "cut off"]


def _chunks(file: BinaryIO) -> Iterator[_Chunk]:
    """All chunks, which together are the whole file."""
    start, size = 0, file.seek(0, os.SEEK_END)
    while start < size:
        chunk = _inspect(file, start, size)
        yield chunk
        start = chunk.end


def _inspect(file: BinaryIO, start: int, size: int) -> _Chunk:
    """The chunk that begins here; a damaged one extends to the next that looks like one."""
    file.seek(start)
    header = file.read(_HEADER.size)
    if len(header) == _HEADER.size and header.startswith(_MAGIC):
        _, length, checksum = _HEADER.unpack(header)
        end = start + _HEADER.size + length
        ends_early = end > size
        if not ends_early and _checksum(file, length) == checksum:
            return _Chunk(start, end, "intact")
    else:
        ends_early = len(header) < _HEADER.size and _MAGIC.startswith(header[: len(_MAGIC)])
    following = _find_magic(file, start + 1)
    if following is None:
        return _Chunk(start, size, "cut off" if ends_early else "damaged")
    return _Chunk(start, following, "damaged")


def _checksum(file: BinaryIO, length: int) -> int:
    checksum = 0
    while length and (block := file.read(min(length, _BLOCK))):
        checksum = zlib.crc32(block, checksum)
        length -= len(block)
    return checksum


def _find_magic(file: BinaryIO, start: int) -> int | None:
    file.seek(start)
    block = b""
    while more := file.read(_BLOCK):
        block = block[1 - len(_MAGIC) :] + more
        if (at := block.find(_MAGIC)) >= 0:
            return file.tell() - len(block) + at
    return None


def _losses(chunks: list[_Chunk]) -> Iterator[str]:
    """What is missing, in words."""
    damaged = {n: c.end - c.start for n, c in enumerate(chunks, 1) if c.state == "damaged"}
    if damaged:
        are = "chunk {} is" if len(damaged) == 1 else "chunks {} are"
        where = are.format(", ".join(map(str, damaged)))
        yield f"{where} damaged and left out ({sum(damaged.values())} bytes)"
    if chunks[-1].state == "cut off":
        yield "the last chunk is cut off and passed over"


def _load(file: BinaryIO, chunk: _Chunk) -> "np.lib.npyio.NpzFile":
    """The arrays of a chunk, unpacked as they are asked for; all have the shapes they should."""
    file.seek(chunk.start + _HEADER.size)
    content = file.read(chunk.end - file.tell())
    try:
        array = open_arrays(content, _MOST_UNPACKED)
        _check_shapes(array)
    except Exception as error:  # odd contents make zipfile, zlib and NumPy raise anything
        raise ValueError(
            f"{file.name}: holds a chunk that cannot be read ({error}); remove it, or train again."
        ) from error
    return array


def _check_shapes(arrays: "np.lib.npyio.NpzFile") -> None:
    steps, tasks, components = (arrays[name] for name in ("steps", "tasks", "components"))
    if steps.dtype.kind != "i" or tasks.dtype.kind != "U" or components.dtype.kind != "U":
        raise ValueError("its names or steps are of the wrong type")
    sizes = [len(steps), len(components), len(tasks), len(tasks)]
    assert arrays.zip is not None
    for names, dims in ((_PAIRS, 4), (_TASKS, 3), (_COMPONENTS, 2)):
        for name in names:
            with arrays.zip.open(f"{name}.npy") as entry:  # the shape, without unpacking the rest
                version = np.lib.format.read_magic(entry)[0]
                shape, _, kind = getattr(np.lib.format, f"read_array_header_{version}_0")(entry)
            if list(shape) != sizes[:dims] or kind.kind not in "fb":
                raise ValueError(f"{name} is {kind} {list(shape)} instead of {sizes[:dims]}")


def _join(path: Path, parts: list[tuple["np.lib.npyio.NpzFile", NDArray[np.int64]]]) -> Record:
    names = [tuple(part["tasks"].tolist()) for part, _ in parts]
    tasks = tuple(dict.fromkeys(task for part_tasks in names for task in part_tasks))
    components = {tuple(part["components"].tolist()) for part, _ in parts}
    rules = {str(part["rule"]) for part, _ in parts}
    if len(components) > 1 or len(rules) > 1:
        raise ValueError(
            f"{path}: was continued with other components or another rule; record every run in "
            "its own file."
        )
    where = [[tasks.index(task) for task in part_tasks] for part_tasks in names]

    def joined(name: str) -> Any:
        pieces = []
        for (part, chosen), positions in zip(parts, where, strict=True):
            values = part[name][chosen]
            dims = 2 if name in _PAIRS else 1 if name in _TASKS else 0
            if dims and positions != list(range(len(tasks))):
                fill = False if values.dtype == bool else np.nan
                padded = np.full((*values.shape[:2], *[len(tasks)] * dims), fill, values.dtype)
                where_to: Any = (..., *np.ix_(*[positions] * dims))
                padded[where_to] = values
                values = padded
            pieces.append(values)
        values = np.concatenate(pieces)
        return values.astype(np.float32) if values.dtype.kind == "f" else values

    arrays = {name: joined(name) for name in ("steps", *_PAIRS, *_TASKS, *_COMPONENTS)}
    vaccinated = None
    if all("vaccinated" in part for part, _ in parts):
        named = (part["vaccinated"].tolist() for part, _ in parts)
        vaccinated = tuple(dict.fromkeys(task for part_tasks in named for task in part_tasks))
    return Record(tasks, components.pop(), rule=rules.pop(), vaccinated=vaccinated, **arrays)


@dataclass(eq=False)
class _Pending:
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
        path: The file, in a folder that is made if it does not exist; see
            `gradvac.analysis.record` for its format.
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

    Examples:
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
        self._open, self._waiting = _Pending(), list[_Pending]()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
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
        self._open = _Pending()

    def _write(self, chunk: _Pending) -> None:
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


def _has_arrived(chunk: _Pending) -> bool:
    return chunk.arrival is None or chunk.arrival.query()


def _to_arrays(chunk: _Pending, tasks: tuple[str, ...], num_components: int) -> dict[str, Any]:
    """The chunk's records over all tasks; absent tasks have zero gradients, then NaN."""
    num_records, num_tasks = len(chunk.steps), len(tasks)
    triples = (num_records, num_components, num_tasks)
    gram = torch.zeros(*triples, num_tasks, dtype=torch.float64)
    weights = torch.zeros(triples, dtype=torch.float64)
    target = torch.full_like(gram, torch.nan)
    active = torch.zeros(gram.shape, dtype=torch.bool)
    is_present = torch.zeros(num_records, 1, num_tasks, dtype=torch.bool)
    for record, (names, copies) in enumerate(zip(chunk.present, chunk.copies, strict=True)):
        positions = torch.tensor([tasks.index(name) for name in names])
        for values, name in ((gram, "gram"), (target, "target"), (active, "active")):
            values[record, :, positions[:, None], positions] = copies[name].to(values.dtype)
        weights[record, :, positions] = copies["weights"].double()
        is_present[record, :, positions] = True
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

"""The record of a training run, `RUN/record.bin`: what `Recorder` writes, read with NumPy alone.

The file is a sequence of chunks of some records each, so that it can be appended to and survives
whoever writes it. A chunk is

    8 bytes   b"gradvac1"
    8 bytes   length of what follows the next field, little-endian
    4 bytes   CRC-32 of it, little-endian
    n bytes   an .npz archive, which `numpy.load` reads

with the arrays below (S records, K components, T tasks). Cosines and targets are float16, which
rounds them by at most 0.0005; they are read back as float32.

    steps         int64   [S]
    tasks         str     [T]           components   str     [K]         rule   str
    similarity    float16 [S, K, T, T]  NaN: task absent, or without gradient in the component
    target        float16 [S, K, T, T]  NaN: also for rules without targets
    active        bool    [S, K, T, T]
    weights       float32 [S, K, T]     norms        float32 [S, K, T]   NaN: task absent
    update_cosine float32 [S, K]        update_ratio float32 [S, K]

A chunk that is cut off at the end of the file, as a killed process leaves it, is passed over.
"""

# S records, K components, T tasks

import io
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.similarities import Floats, Similarities

RECORD = "record.bin"
_MAGIC = b"gradvac1"
_HEADER = struct.Struct("<8sQI")
_PAIRS = ("similarity", "target", "active")  # [S, K, T, T]
_TASKS = ("weights", "norms")  # [S, K, T]
_COMPONENTS = ("update_cosine", "update_ratio")  # [S, K]


@dataclass(frozen=True)
class Record:
    """What a run recorded of its alignments.

    Attributes:
        tasks: Task names.
        components: Component names.
        steps: int64 `[S]`.
        similarity: `[S, K, T, T]`, cosines of the unaltered task gradients of a batch.
        target: `[S, K, T, T]`, the targets they were held to.
        active: bool `[S, K, T, T]`: [i, j] if g_i was altered against g_j.
        weights: `[S, K, T]`, of the tasks in the update.
        norms: `[S, K, T]`, lengths of the task gradients.
        update_cosine: `[S, K]`, cos(update, plain sum).
        update_ratio: `[S, K]`, ||update|| / ||plain sum||.
        rule: The rule that decided.
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

    def similarities(self) -> Similarities:
        """The cosines alone."""
        return Similarities(
            self.tasks, self.components, self.steps, self.similarity, lines="training"
        )


def read_record(path: str | Path, *, most: int | None = None) -> Record:
    """Read a record.

    Args:
        path: The file, or the run folder that holds it.
        most: Read only so many records, evenly spread; None: all. All of a long run may be large:
            9 K T^2 bytes each in memory.

    Raises:
        ValueError: The file is empty or something else, or its components changed on the way.
    """
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    with path.open("rb") as file:
        places = list(_places(file))
        if file.tell() < file.seek(0, os.SEEK_END):
            what = "the last chunk is cut off" if places else "it is none, or its first is cut off"
            if not places:
                raise ValueError(f"{path}: is no record of a training run ({what}).")
            warnings.warn(f"{path}: {what} and passed over.", stacklevel=2)
        if not places:
            raise ValueError(f"{path}: holds no record yet; the first comes with the first chunk.")
        steps = [_load(file, place)["steps"] for place in places]
        total = sum(map(len, steps))
        wanted = np.arange(total)
        if most is not None and total > most:
            wanted = np.unique(np.linspace(0, total - 1, most).round().astype(np.int64))
        parts, first = [], 0
        for place, own in zip(places, steps, strict=True):
            here = wanted[(wanted >= first) & (wanted < first + len(own))] - first
            first += len(own)
            if len(here):
                parts.append((_load(file, place), here))
    return _join(path, parts)


def append_chunk(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write a chunk at the end of a file."""
    payload = io.BytesIO()
    # As numpy.savez_compressed, but with the fastest level: cosines hardly get smaller by others.
    with zipfile.ZipFile(payload, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
    content = payload.getvalue()
    file.write(_HEADER.pack(_MAGIC, len(content), zlib.crc32(content)) + content)


def cut_record(path: Path, step: int) -> None:
    """Remove records after a step, and a chunk that is cut off; for a run that continues there."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end, rest = 0, None
        for place in _places(file):
            arrays = _load(file, place)
            kept = arrays["steps"] <= step
            if not kept.all():
                per_record = ("steps", *_PAIRS, *_TASKS, *_COMPONENTS)
                rest = {k: arrays[k][kept] if k in per_record else arrays[k] for k in arrays}
                break
            end = place[0] + place[1]
        file.truncate(end)
        file.seek(end)
        if rest is not None and len(rest["steps"]):
            append_chunk(file, rest)


def _places(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Start and length of every intact chunk's content; leaves the file behind the last one."""
    end = file.seek(0)
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        magic, length, checksum = _HEADER.unpack(header)
        if magic != _MAGIC:
            break
        content = file.read(length)
        if len(content) < length or zlib.crc32(content) != checksum:
            break
        yield end + _HEADER.size, length
        end += _HEADER.size + length
        file.seek(end)
    file.seek(end)


def _load(file: BinaryIO, place: tuple[int, int]) -> "np.lib.npyio.NpzFile":
    file.seek(place[0])
    try:
        found = np.load(io.BytesIO(file.read(place[1])), allow_pickle=False)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file.name}: holds a chunk that NumPy cannot read ({error}).") from error
    assert isinstance(found, np.lib.npyio.NpzFile)
    return found


def _join(path: Path, parts: list[tuple["np.lib.npyio.NpzFile", NDArray[np.int64]]]) -> Record:
    names = [tuple(part["tasks"].tolist()) for part, _ in parts]
    tasks = tuple(dict.fromkeys(task for own in names for task in own))
    components = {tuple(part["components"].tolist()) for part, _ in parts}
    rules = {str(part["rule"]) for part, _ in parts}
    if len(components) > 1 or len(rules) > 1:
        raise ValueError(
            f"{path}: was continued with other components or another rule; record every run in a "
            "file of its own."
        )
    where = [[tasks.index(task) for task in own] for own in names]

    def joined(name: str) -> Any:
        pieces = []
        for (part, chosen), own in zip(parts, where, strict=True):
            values = part[name][chosen]
            dims = 2 if name in _PAIRS else 1 if name in _TASKS else 0
            if dims and own != list(range(len(tasks))):
                fill = False if values.dtype == bool else np.nan
                whole = np.full((*values.shape[:2], *[len(tasks)] * dims), fill, values.dtype)
                where_to: Any = (..., *np.ix_(*[own] * dims))
                whole[where_to] = values
                values = whole
            pieces.append(values)
        whole = np.concatenate(pieces)
        return whole.astype(np.float32) if whole.dtype.kind == "f" else whole

    arrays = {name: joined(name) for name in ("steps", *_PAIRS, *_TASKS, *_COMPONENTS)}
    return Record(tasks, components.pop(), rule=rules.pop(), **arrays)

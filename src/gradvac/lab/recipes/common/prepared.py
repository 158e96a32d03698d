"""A folder of prepared data: made in steps, and verified before it is used.

    PREPARED/prepared.json   what the data were made from, sizes, signature; written last
    PREPARED/manifest.json   checksums of all files: `gradvac.lab.runs.manifest`
    PREPARED/steps.json      for every finished step what it depended on, and its files

A preparation that is called again reads and compares all files, and repeats the steps that are
missing, damaged, or depend on something that changed. Before the first change `prepared.json` goes:
a process that is killed half-way leaves a folder that is not taken for a prepared one.

Training may start often on a large corpus. It reads a file through only where the file's times or
its place on the disk are not those that the preparation saw: a start costs a look at each file, a
copied folder is read through, and whatever touches a file later is noticed.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from gradvac.lab.runs import PREPARED_METADATA as METADATA
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.manifest import (
    MANIFEST,
    Checksum,
    checksum_file,
    read_manifest,
    verify_manifest,
)
from gradvac.utils.files import (
    folder_lock,
    hash_of,
    read_json,
    remove_leftovers,
    write_bytes,
    write_json,
)

REPORT, STEPS = "report.json", "steps.json"
Results = dict[str, Any]


class Preparation:
    """A folder that is being prepared, step by step; see `preparing`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._steps = _read_steps(folder / STEPS)
        self._checksums = read_manifest(folder)
        self._current: list[str] = []  # steps of this preparation

    def reuse(self, step: str, key: str) -> Results | None:
        """What a step noted, if it depended on the same and its files are as it wrote them."""
        results = self._steps.get(step, {})
        if results.get("key") != key or not all(map(self._is_intact, results["files"])):
            return None
        self._current.append(step)
        return results

    def _is_intact(self, name: str) -> bool:
        try:
            return checksum_file(self.folder / name) == self._checksums.get(name)
        except OSError:
            return False

    def start(self, step: str) -> None:
        """Declare the folder unprepared, and forget the step, which is done again."""
        (self.folder / METADATA).unlink(missing_ok=True)
        if self._steps.pop(step, None) is not None:
            self._write_steps()

    def finish(self, step: str, key: str, files: Iterable[Path], **results: Any) -> Results:
        """Note that a step is done.

        Args:
            step: Its name.
            key: Hash of what it depended on.
            files: What it wrote.
            results: What later steps, or a repeated preparation, need to know of it.
        """
        names = [path.relative_to(self.folder).as_posix() for path in files]
        for name in names:
            self._checksums[name] = checksum_file(self.folder / name)
        self._steps[step] = {"key": key, "files": names, **results}
        self._current.append(step)
        write_json(self.folder / MANIFEST, self._checksums)
        self._write_steps()
        return self._steps[step]

    def _write_steps(self) -> None:
        content = {"steps": self._steps, "check": hash_of(self._steps)}
        write_json(self.folder / STEPS, content)

    def complete(self, report: Mapping[str, Any], **metadata: Any) -> None:
        """Declare the folder prepared.

        Args:
            report: What was read and dropped, by set and language.
            metadata: At least `settings`, `sizes` and `signature`; see `PreparedFolder`.
        """
        write_json(self.folder / REPORT, report)
        names = [name for step in self._current for name in self._steps[step]["files"]]
        stamps = {name: _stamp(self.folder / name) for name in (*names, REPORT)}
        content = json.dumps({**metadata, "stamps": stamps}, ensure_ascii=False, indent=1).encode()
        digest = hashlib.sha256(content).hexdigest()
        self._checksums[REPORT] = checksum_file(self.folder / REPORT)
        self._checksums[METADATA] = Checksum(sha256=digest, bytes=len(content))
        kept = (*sorted(stamps), METADATA)
        write_json(self.folder / MANIFEST, {name: self._checksums[name] for name in kept})
        write_bytes(self.folder / METADATA, content)


def _read_steps(path: Path) -> dict[str, Results]:
    """The notes of finished steps; none if the file is missing or damaged."""
    content = read_json(path)
    steps: dict[str, Results] = content.get("steps", {})
    return steps if content.get("check") == hash_of(steps) else {}


@contextmanager
def preparing(folder: Path, *, subfolders: Iterable[str] = ()) -> Iterator[Preparation]:
    """Prepare data in a folder, which no other process may do meanwhile.

    Raises:
        ValueError: The folder is that of a run, whose files would be written over.
    """
    if RunFolder(folder).config.exists():
        raise ValueError(f"data.prepared: {folder} is a run folder; choose another.")
    folders = [folder, *(folder / name for name in subfolders)]
    for path in folders:
        path.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder, busy=None):
        for path in folders:
            remove_leftovers(path)
        yield Preparation(folder)


class PreparedFolder(ABC):
    """Prepared data, opened for training and scoring.

    Class attributes:
        recipe: The command that prepares it: `gradvac RECIPE prepare`.

    Attributes:
        folder: Where it is.
        sizes: Set -> task or pair -> number of examples.
        signature: Hash of all data.
        warnings: What is odd about the data, in sentences.
    """

    recipe: ClassVar[str]

    def __init__(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        self.folder = folder
        self.sizes: dict[str, dict[str, int]] = metadata["sizes"]
        self.signature: str = metadata["signature"]
        self.warnings: list[str] = metadata.get("warnings", [])
        self._stamps: dict[str, list[int]] = metadata["stamps"]

    @classmethod
    def folder_of(cls, config: Any) -> Path:
        """The folder that a config names."""
        folder: Path = config.data.prepared
        return folder

    @classmethod
    @abstractmethod
    def settings_of(cls, config: Any) -> dict[str, Any]:
        """The settings that prepared data depend on, as JSON gives them back."""

    @classmethod
    def is_made_from(cls, settings: Mapping[str, Any], config: Any) -> bool:
        """Whether data prepared with these settings are those of a config."""
        return settings == cls.settings_of(config)

    @classmethod
    def open(cls, config: Any) -> Self | None:
        """Open what was prepared with these settings; None if there is no such thing.

        Raises:
            ValueError: What describes the folder is damaged.
        """
        folder = cls.folder_of(config)
        metadata = cls._read_metadata(folder)
        if not metadata or not cls.is_made_from(metadata["settings"], config):
            return None
        return cls(folder, metadata)

    @classmethod
    def require(cls, config: Any, run: Path) -> Self:
        """Open the data that a run was trained on.

        Raises:
            ValueError: They are gone, were prepared with other settings, or are damaged.
        """
        prepared = cls.open(config)
        if prepared is None:
            raise ValueError(
                f"data.prepared: {cls.folder_of(config)} does not hold the data of {run}; run "
                f"`gradvac {cls.recipe} prepare` with its {RunFolder(run).config.name}, or give "
                "data.prepared=..."
            )
        return prepared

    @classmethod
    def check_replaceable(cls, config: Any) -> None:
        """Refuse to replace what was prepared with other settings: another run may need it."""
        settings = cls._read_metadata(cls.folder_of(config)).get("settings", {})
        asked = cls.settings_of(config)
        changed = [key for key, value in asked.items() if settings.get(key) != value]
        if settings and changed:
            raise ValueError(
                f"data.prepared: {cls.folder_of(config)} was prepared with other settings "
                f"({', '.join(changed)}); choose another folder, or replace it with "
                f"`gradvac {cls.recipe} prepare`."
            )

    @classmethod
    def _read_metadata(cls, folder: Path) -> dict[str, Any]:
        """What describes the folder; empty if it is not prepared, or half-way."""
        if not (folder / METADATA).exists():
            return {}
        verify_manifest(folder, [METADATA], remedy=cls._remedy())
        return read_json(folder / METADATA)

    @classmethod
    def _remedy(cls) -> str:
        return f"run `gradvac {cls.recipe} prepare` again, which mends it"

    def path(self, name: str) -> Path:
        """The path of a file that is as it was written.

        Raises:
            ValueError: It is missing or damaged.
        """
        path = self.folder / name
        if not path.is_file() or _stamp(path) != self._stamps.get(name):
            verify_manifest(self.folder, [name], remedy=self._remedy())
        return path

    def read_report(self) -> dict[str, Any]:
        """What was read and dropped, by set and language."""
        return read_json(self.path(REPORT))

    def check_set(self, split: str) -> None:
        """Refuse a set that was not prepared."""
        if split not in self.sizes:
            raise ValueError(f"set: there is no {split!r}; there are {', '.join(self.sizes)}.")


P = TypeVar("P", bound=PreparedFolder)


def open_or_prepare(kind: type[P], config: Any, prepare: Callable[[Any], P]) -> P:
    """Open prepared data; prepare them first if the folder holds none.

    Raises:
        ValueError: It holds what was prepared with other settings, which only `prepare` replaces.
    """
    prepared = kind.open(config)
    if prepared is not None:
        return prepared
    with folder_lock(kind.folder_of(config), busy=None, name=".opening.lock"):
        prepared = kind.open(config)  # another process may have prepared it meanwhile
        if prepared is not None:
            return prepared
        kind.check_replaceable(config)
        return prepare(config)


def _stamp(path: Path) -> list[int]:
    """What changes with any change of a file, or when it is another file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

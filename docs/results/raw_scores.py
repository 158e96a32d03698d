"""Keep of runs what the results pages are computed from, as one archive; make folders of it again.

    python docs/results/raw_scores.py pack runs/one_gpu runs/one_gpu_many --out runs.tar.xz
    python docs/results/raw_scores.py unpack runs.tar.xz FOLDER && gradvac compare FOLDER/one_gpu

Of every run SWEEP/METHOD/seed-N: settings, signature, log, scores by task and what they are made of
by sentence, measured similarities, and a summary of its record (`updates.py`); of every sweep its
primary questions. A run of four languages takes some 15 kB. Weights, records and translations are
left out.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from updates import SUMMARY, summary

from gradvac.analysis.record import read_record
from gradvac.lab.experiments import find_runs
from gradvac.lab.experiments.methods import PLAN, PRIMARY
from gradvac.lab.runs import RunFolder
from gradvac.utils.files import read_json

_COARSE = ("enc_dec.", "whole_model.")  # similarities that no page shows


def pack(sweeps: Sequence[Path], file: Path) -> None:
    """Write what is kept of all runs of some sweeps.

    Raises:
        ValueError: Two sweeps have one name.
    """
    names = [sweep.resolve().name for sweep in sweeps]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, sweeps))}: two have one name; rename a folder.")
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for sweep, sweep_name in zip(sweeps, names, strict=True):
            for name, content in _kept(sweep):
                info = tarfile.TarInfo(f"{sweep_name}/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def _kept(sweep: Path) -> Iterator[tuple[str, bytes]]:
    """Names below the sweep, and contents."""
    if (sweep / PLAN).is_file():
        asked = read_json(sweep / PLAN).get(PRIMARY, [])
        yield PLAN, json.dumps({PRIMARY: asked}).encode()
    for run in find_runs([sweep]):
        folder = RunFolder(run)
        files = [folder.signature, folder.metrics, folder.similarity, run / SUMMARY]
        for path in (folder.config, *files, *sorted(folder.scores.glob("*"))):
            if path.is_file() and path.suffix in (".toml", ".json", ".jsonl", ".npz"):
                yield path.relative_to(sweep).as_posix(), _content(path)
        if folder.record.is_file():
            found = summary(read_record(folder.record))
            yield (run / SUMMARY).relative_to(sweep).as_posix(), json.dumps(found).encode()


def _content(path: Path) -> bytes:
    """Arrays uncompressed, which the archive compresses far better; settings without paths."""
    if path.suffix == ".npz":
        packed = io.BytesIO()
        with np.load(path) as arrays:
            np.savez(packed, **{key: arrays[key] for key in arrays if not key.startswith(_COARSE)})
        return packed.getvalue()
    if path.suffix == ".toml":
        text = path.read_text(encoding="utf-8")
        return re.sub(r'(?m)^root = ".*"$', 'root = "DATA"', text).encode()
    return path.read_bytes()


def unpack(file: Path, folder: Path) -> None:
    """Write the files again."""
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("sweeps", type=Path, nargs="+")
    packing.add_argument("--out", type=Path, required=True)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "pack":
        pack(given.sweeps, given.out)
    else:
        unpack(given.file, given.folder)


if __name__ == "__main__":
    main()

"""Keep of runs what comparisons need, as one JSON file; make folders of it that compare reads.

    python docs/results/raw_scores.py pack runs/table1 --out table1.json.gz
    python docs/results/raw_scores.py unpack table1.json.gz FOLDER && gradvac compare FOLDER

Of every run OUT/METHOD/seed-N: settings, signature, log, scores by task, and what they are made of
by sentence (compressed); of the sweep OUT its primary questions. A run of four languages takes
some 10 kB. Weights, records and translations are left out.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradvac.lab.experiments import find_runs
from gradvac.lab.experiments.methods import PLAN, PRIMARY
from gradvac.lab.runs import RunFolder
from gradvac.utils.files import write_bytes, write_text


def pack(folders: Sequence[Path]) -> dict[str, Any]:
    """Name of a file below its sweep -> its content, of all runs in some folders.

    Raises:
        ValueError: Two folders have a run of the same name.
    """
    kept: dict[str, Any] = {}
    for run in find_runs(folders):
        out, folder = run.resolve().parents[1], RunFolder(run)
        files = [folder.config, folder.signature, folder.metrics, *sorted(folder.scores.glob("*"))]
        for path in (*files, out / PLAN):
            name = (path.resolve().relative_to(out)).as_posix()
            if not path.is_file() or path.suffix not in (".json", ".jsonl", ".toml", ".npz"):
                continue
            content = _read(path)
            if path.name == PLAN:
                content = {PRIMARY: content.get(PRIMARY, [])}
            if kept.setdefault(name, content) != content:
                raise ValueError(f"{path}: there is another {name}; pack the two folders apart.")
    return kept


def unpack(kept: dict[str, Any], folder: Path) -> None:
    """Write the files again."""
    for name, content in kept.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            write_bytes(path, base64.b64decode(content))
        elif path.suffix == ".jsonl":
            write_text(path, "".join(json.dumps(line) + "\n" for line in content))
        else:
            write_text(path, content if path.suffix == ".toml" else json.dumps(content))


def _read(path: Path) -> Any:
    if path.suffix == ".npz":
        return base64.b64encode(path.read_bytes()).decode("ascii")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return text if path.suffix == ".toml" else json.loads(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folders", type=Path, nargs="+")
    packing.add_argument("--out", type=Path, required=True)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "pack":
        text = json.dumps(pack(given.folders), ensure_ascii=False, indent=1) + "\n"
        write_bytes(given.out, gzip.compress(text.encode("utf-8"), mtime=0))
    else:
        unpack(json.loads(gzip.decompress(given.file.read_bytes())), given.folder)


if __name__ == "__main__":
    main()
